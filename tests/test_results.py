"""The results of tests/results.py, on a tiny folder of pictures."""

import json
from itertools import islice
from pathlib import Path

from tests import results
from tests.conftest import ROOT, write_pictures

WORDS = "--data data/tiny --other data/tiny/val --epochs 1 --device cpu --batch_size 16".split()


def test_goes_on_where_it_stopped_and_prints_from_the_file_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for script in ("train.py", "finetune.py"):
        Path(script).symlink_to(ROOT / script)
    for split, n in (("train", 16), ("val", 4)):
        write_pictures(Path("data/tiny", split), "ab", n)
    jobs, run, commands = results.jobs, results.run, []
    monkeypatch.setattr(results, "run", lambda command: commands.append(command) or run(command))

    def main(n):                                           # the first n commands of all
        monkeypatch.setattr(results, "jobs", lambda *args: islice(jobs(*args), n))
        results.main(["--only", "untrained", "--out", "out.jsonl", *WORDS])
    main(1)
    main(3)
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["command"] for line in lines] == commands and len(set(commands)) == 3
    assert all(str(tmp_path) not in command for command in commands)
    assert [row["mask_ratio"] for row in lines[2]["numbers"]["psnr"]] == [0.5, 0.75, 0.9]

    Path("train.py").unlink()
    capsys.readouterr()
    results.main(["--table", "--out", "out.jsonl"])
    top1, psnr = lines[1]["numbers"]["top1"], lines[2]["numbers"]["psnr"][1]
    printed = capsys.readouterr().out
    assert "tiny_micro_1_batch_size_16 on data/tiny/val" in printed
    assert f"| encoder | epochs | 20-NN |\n|---|---|---|\n| untrained | 0 | {top1:.1f} |" in printed
    assert f"{psnr['psnr_hidden']:.2f} / {psnr['psnr_decoded']:.2f}" in printed


def test_a_cell():
    cells = [results.text(values) for values in ([], [7], [61.08], [60.0, 61.0, 62.0])]
    assert cells == ["", "7", "61.1", "61.0 ± 1.0"]
