"""The tables of README.md and RESULTS.md have the means of tests/logs/results.jsonl."""

import pytest

from tests.compare import PIXELS, read_numbers
from tests.unit.conftest import ROOT

EVERY = [x for x in read_numbers(ROOT / "tests/logs/results.jsonl") if "cifar10" in x.table]
ENCODERS = {  # name in a table: in the log
    "from scratch": "scratch", "MAE": "mae", "MAE, 4 decoder blocks": "mae_4",
    "MAE, joined": "mae_joined", "CrossMAE, all": "crossmae",
    "CrossMAE, all, 2 decoder blocks": "crossmae_2", "CrossMAE, a third": "crossmae_25",
    "CrossMAE, a third, MAE's learning rate": "crossmae_25_rate",
    "CrossMAE, a third, 16 epochs": "crossmae_25_long", "HyperMAE": "hypermae",
    "MINR, joined": "ginr", "MINR": "ginr", "MINR, mean": "ginr_mean", "i-MAE": "imae",
    "untrained": "untrained"}


def rows_of(text):
    """Return the rows of the first table in a text, each a list of cells."""
    lines = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("numbers", EVERY, ids=lambda numbers: numbers.table)
def test_results(numbers):
    """Each cell is mean ± standard deviation, and bold if it differs clearly from MAE's."""
    text = (ROOT / "tests/docs/RESULTS.md").read_text(encoding="utf-8").replace("\u00a0", " ")
    rows = rows_of(text.split(f"<!-- {numbers.table} -->\n")[1])
    assert len(rows) > 5
    for name, *cells in rows:
        for column, cell in zip((PIXELS, "20-NN", "linear", "1%", "10%", "100%"), cells):
            bold = "**" if numbers.minus(ENCODERS[name], "mae", column).endswith("**") else ""
            wanted = numbers.cell(ENCODERS[name], column)
            assert cell == (wanted and f"{bold}{wanted}{bold}"), (name, column)


def test_compared():
    """The README has differences from MAE."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, *rows = rows_of(text.split("<!-- results -->\n")[1])
    micro, tiny = EVERY
    for name, *cells in rows:
        columns = [(x, column) for x in (micro, tiny) for column in (PIXELS, "100%")]
        for (numbers, column), cell in zip(columns, cells):
            assert cell in ("", numbers.minus(ENCODERS[name], "mae", column)), (name, column)
    assert len(rows) == 5
