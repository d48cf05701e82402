"""tests/results.py: its commands, its tables and its pictures."""

import re
import shutil
from types import SimpleNamespace

import pytest

import finetune
from tests import results
from tests.unit.conftest import ROOT, parsed


@pytest.mark.parametrize("name", [*{**results.ENCODERS, **results.FEATURES}, "scratch",
                                  *results.PAYS])
def test_commands(name):
    """The commands parse, and use only checkpoints that earlier ones have made."""
    args = SimpleNamespace(data="shapes", size="tiny", epochs=50, pretraining=["--batch_size", "8"])
    made = set()
    for column, command in results.commands(args, name, 5, "R"):
        assert {*re.findall(r"R/(\S+)/last.pt", command)} <= made
        for _, script, *words in map(str.split, command.split(" && ")):
            if script != "-m":
                run = parsed(script, words)
                made.add(getattr(run, "name", None))
                assert run.seed == 5 * ("--seed" in words) and run.data == "shapes"
                assert "--seed" in words or getattr(run, "eval", None)
                epochs = {"crossmae_25_long": 16, "untrained": 0}.get(name, 50)
                assert column or run.epochs == epochs
    assert results.slug(results.ENCODERS.get(name, name)) in made or name not in results.ENCODERS


@pytest.mark.parametrize("name", ["mae", "ginr", "scratch", *results.PAYS])
def test_settings_are_in_the_commands(name):
    """Other defaults of finetune.py would not change the tables."""
    args = SimpleNamespace(data="shapes", size="micro", epochs=10, pretraining=[])
    for column, command in results.commands(args, name, 0, "R"):
        if "finetune.py" in command:
            run = parsed("finetune.py", command.split()[2:])._asdict()
            recipe = finetune.RECIPES.get(run["mode"], [{}])[0]
            flags = {*recipe, "lr", "min_lr"} & run.keys() - {"blr"} if recipe else {"k"}
            assert not [flag for flag in {*flags, "pool"} if run[flag] is None]
            if name not in results.PAYS:
                assert run.get("batch_size") == {"20-NN": None, "1%": 24}.get(column, 128)
                assert run.get("layer_decay") == {"finetune": 0.75, "scratch": 1}.get(run["mode"])


def test_costs():
    """What pretraining costs relative to MAE: longer training and a teacher count. RESULTS.md says
    what it costs in epochs with labels."""
    costs = {name: results.cost(name, "micro") for name in results.ENCODERS}
    ratio = float(costs["crossmae_25_long"]) / float(costs["crossmae_25"])
    assert ratio == pytest.approx(1.6, abs=0.02) and costs["untrained"] == ""
    alone, teacher = re.fullmatch(r"(.*) \((.*)\)", costs["imae"]).groups()
    assert costs["mae"] == "1.00" and float(teacher) == float(alone) + 1
    model = results.METHODS["imae"](32, 4, 3, **results.SIZES["micro"],
                                    **results.METHODS["imae"].low_res_config)
    bare = results.flops_of_step(lambda B: model(results.torch.zeros(B, 3, 32, 32))[0], 64) / 128
    assert bare < results.multiply_adds("imae", "micro") < 1.5 * bare  # a forward pass, no backward
    text = " ".join((ROOT / "tests/docs/RESULTS.md").read_text(encoding="utf-8").split())
    assert f"Pretraining costs {results.pretraining_cost():.1f}." in text
    assert f"as many multiply-adds as {results.pretraining_cost('tiny', 100):.1f} epochs" in text


def test_the_study_of_pretraining_is_for_micro(tmp_path, capsys):
    """Its commands name ViT-micro's checkpoint."""
    with pytest.raises(SystemExit):
        results.main(f"--size tiny --only pretrained --out {tmp_path}/x.jsonl".split())
    assert "--size tiny" in capsys.readouterr().err and not (tmp_path / "x.jsonl").exists()


def test_tables_are_up_to_date(tmp_path, capsys):
    """With another --out, they are only printed."""
    pages = ["README.md", "tests/docs/RESULTS.md"]
    logs = [path.relative_to(ROOT) for path in ROOT.glob("tests/logs/*.jsonl")]
    for name in (*pages, *logs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".github").mkdir()
    results.write_tables(tmp_path / "tests")
    for name in (*pages, *(f".github/{x}.svg" for x in ("results", "pays", "recipe"))):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name
    results.main(["--tables", "--out", str(tmp_path / results.OUT)])
    assert "| 10% | after pretraining | 40 | 11.4 |" in capsys.readouterr().out
