"""The methods' costs, which correct code can still get wrong, and the benchmark's numbers."""

import pytest
import torch

from tests import bench
from train import METHODS, as_table
from vit import SIZES

MICRO = "--size micro --img_size 32 --patch_size 8".split()


def giga_macs(function, *args):
    """Return the multiply-accumulates of a call, in billions."""
    with torch.no_grad():
        return bench.count_flops(lambda: function(*args)) / 2e9


def test_a_row_for_every_method(capsys):
    rows = bench.main([*MICRO, "--batch_size", "2", "--warmup", "0", "--steps", "2"])
    assert [row["method"] for row in rows] == [*METHODS]
    assert as_table(rows) in capsys.readouterr().out
    minr = METHODS["minr"](32, 8, 3, **SIZES["micro"], **METHODS["minr"].low_res_config)
    macs = giga_macs(minr, torch.zeros(1, 3, 32, 32))
    assert float(rows[3]["GMAC/img"]) == pytest.approx(macs, rel=1e-3)


def test_cost_at_vit_b(monkeypatch):
    """HyperMAE's Table 1 has 9.78 G for MAE and 6.42 G for HyperMAE. These include work that the
    releases could skip: they embed masked patches, and apply heads to all tokens. CrossMAE's
    Appendix C says that its decoder is up to 3.7 times cheaper than MAE's: that is our count at
    prediction ratio 0.15."""
    def build(name, **options):                            # values do not matter here
        return METHODS[name](**options).to("meta")
    for name in ("xavier_uniform_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, lambda weight, *args, **kwargs: weight)
    images, ids_keep = (x.to("meta") for x in (torch.zeros(1, 3, 224, 224), torch.arange(49)[None]))
    model = build("mae")
    encoder, mae = giga_macs(model.encoder, images, ids_keep), giga_macs(model, images)
    embedding = 147 * 768 * 768 / 1e9                      # of masked patches
    head = 50 * 512 * 768 / 1e9                            # of visible patches and class token
    assert round(mae, 2) == 9.67 and round(mae + embedding + head, 2) == 9.78
    hypermae = giga_macs(build("hypermae"), images)
    proj = 50 * 768 * 256 / 1e9                            # of visible patches and class token
    mlp = 49 * 8 * 256 * 256 / 1e9                         # 5 layers of 256 x 256, one of 256 x 768
    assert round(hypermae, 2) == 6.30 and round(hypermae + embedding + proj + mlp, 2) == 6.42
    for depth, ratio, cheaper in ((12, 0.25, 2.6), (12, 0.15, 3.7), (8, 0.25, 3.9)):
        model = build("crossmae", decoder_depth=depth, prediction_ratio=ratio)
        own = giga_macs(model, images) - encoder
        assert round((mae + head - encoder) / own, 1) == cheaper
