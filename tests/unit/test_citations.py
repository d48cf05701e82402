"""An "item" that a comment cites is in the list at the end of its file."""

import re

import pytest

from tests.unit.conftest import FIVE, ROOT


@pytest.mark.parametrize("name", [*FIVE, "finetune"])
def test_items_exist(name):
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    cited = {n for words in re.findall(r"[Ii]tems? ([\d, ]*\d)", text) for n in words.split(", ")}
    listed = re.findall(r"(?m)^# +(\d+)\. ", text)
    assert cited and cited <= {*listed} and listed == [str(i + 1) for i in range(len(listed))]
