"""Whole methods give the numbers of the released codes, however their functions are written."""

import pytest

from tests.unit.conftest import ROOT
from tests.unit.golden import distances, load


@pytest.mark.parametrize("fixture, tolerances", [
    ("mae", (2e-6, 1e-5, 1e-5)), ("crossmae", (2e-6, 1e-5, 1e-5)),
    ("hypermae", (2e-6, 1e-4, 1e-5)), ("minr_ginr", (2e-6, 3e-5, 5e-6)),
    ("minr_transinr", (2e-6, 3e-5, 5e-6)), ("imae", (2e-6, 1e-5, 1e-5)),
    ("finetune_avg", (2e-6, 3e-6, 1e-5))])
def test_golden(fixture, tolerances):
    """Loss, predictions and gradients equal the released codes'."""
    measured = distances(load(ROOT / f"tests/unit/golden/{fixture}.pt"))
    assert all(d <= most for d, most in zip(measured, tolerances)), measured
