"""Every table, figure, section, equation and algorithm that a file cites exists in that paper."""

import re

import pytest

from tests.unit.conftest import ROOT

PAPERS = {  # 3a-c means 3a, 3b, 3c. MAE, ViT and DeiT are from memory, the others from their texts
    "MAE": dict(Table="1-13 1a-f", Figure="1-11", Section="1-6 4.1-3 A-C A.1-5"),
    "ViT": dict(Table="1", Section="3.1-2", Equation="1-8"), "DeiT": dict(Table="1"),
    "CrossMAE": dict(Table="1-18 3a-f", Figure="1-7 4a-c 5c", Equation="1",
                     Section="1-5 2.1-3 3.1-4 4.1-5 A-D A.1-7 B.1-5"),
    "HyperMAE": dict(Table="1-13", Figure="1-4", Algorithm="1", Section="1-5 2.1-2 5.1-4 5.2.1-8"),
    "MINR": dict(Table="2", Section="3.1-2"),              # all that its summary mentions
    "i-MAE": dict(Table="1-4", Figure="1-7", Section="1-3", Algorithm="1")}
FILES = {  # the paper meant if none is named; a section or row in Markdown may begin with one
    "mae.py": "MAE", "crossmae.py": "CrossMAE", "hypermae.py": "HyperMAE", "minr.py": "MINR",
    "imae.py": "i-MAE", "vit.py": "MAE", "train.py": "MAE", "finetune.py": "MAE", "README.md": "",
    "tests/analyses.py": "CrossMAE", "tests/docs/FORKS.md": "CrossMAE",
    "tests/docs/SCALE.md": "CrossMAE", "tests/docs/RESULTS.md": "", "tests/docs/FLAGS.md": ""}
KINDS = {"Fig": "Figure", "Sec": "Section", "Appendix": "Section", "eq": "Equation", "": "Section"}
ITEM = r"(?:\d+(?:\.\d)*[a-z]?|[A-Z](?:\.\d)?)\b"
CITATION = re.compile(
    rf"(?:({'|'.join(PAPERS)})(?:'s)? )?"
    r"(?:(Table|Figure|Fig|Section|Sec|Appendix|Algorithm|eq)s?\.? "
    rf"({ITEM}(?:(?:,? and |, |-){ITEM})*)|\b([A-Z]\.\d)\b)")


def expand(words):
    """Turn "1-3 4a-b" into {"1", "2", "3", "4a", "4b"}."""
    items = set()
    for word in words.split():
        stem, first, last = re.fullmatch(r"(.*?)(\d+|\w)(?:-(.*))?", word).groups()
        number, text = (int, str) if first.isdigit() else (ord, chr)
        items |= {stem + text(i) for i in range(number(first), number(last or first) + 1)}
    return items


@pytest.mark.parametrize("file", FILES)
def test_what_is_cited_exists(file):
    """Each citation is in PAPERS, and each "item" in the list at the end of its file."""
    text, cited, wrong = (ROOT / file).read_text(encoding="utf-8"), 0, []
    for piece in re.split(r"\n(?=## |\| )|(?<=\|)\n", text):
        begin = re.match(r"(?:## |\| )([\w-]+)", piece)
        own = begin[1] if begin and begin[1] in PAPERS else FILES[file]
        for paper, kind, items, section in CITATION.findall(re.sub(r"\s+(?:# *)?", " ", piece)):
            known = PAPERS.get(paper or own, {}).get(KINDS.get(kind, kind), "")
            missing = expand(re.sub(r",? and |, ", " ", items or section)) - expand(known)
            wrong += [(paper or own or "no paper", kind, item) for item in missing]
            cited += 1
    assert not wrong and (cited > 1 or file == "README.md")
    items = {n for words in re.findall(r"[Ii]tems? ([\d, ]*\d)", text) for n in words.split(", ")}
    assert file.endswith(".md") or items <= {*re.findall(r"(?m)^# +(\d+)\. ", text)}
