"""The page of tests.play: it shows what the models make, its answers are true, only it may ask."""

import http.client
import json
import re
import shutil
import subprocess
from base64 import b64decode
from functools import cache
from io import BytesIO
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

import train
from mae import MAE
from tests import play, tour
from tests.lib.masks import psnr
from tests.lib.models import to_released
from vit import denormalize, normalize

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
SIZES = dict(img_size=16, patch_size=4, in_chans=3, dim=16, depth=1, heads=2)
IMAGE, PARTNER = (play.open_image(file, (32, 32)) for file in play.IMAGES[:2])
URL = play.png_url(IMAGE / 255)
WRONG = "cannot read this image: try .jpg or .png, or a smaller one"


@cache
def models():
    return {path.stem: model for path, model in play.load_models(play.MODELS).items()}


@pytest.fixture(scope="module")
def server():
    server = play.make_server(models())
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def send(server):
    """send("/path", body) returns the server's status and its answer, as text."""
    def run(path, body=b"", method="POST", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    return run


def pixels(url):
    """Return the picture in a URL as (C,H,W) in [0, 1]."""
    return pil_to_tensor(Image.open(BytesIO(b64decode(url.partition(",")[2])))) / 255


def ask(mask, images=(IMAGE,), **more):
    """Return [(model, its answer, the pictures of its predictions [(C,H,W)])]."""
    answers = [play.predict(x, images, mask.tolist(), **more) for x in models().values()]
    return [(x, y, [*map(pixels, y["urls"][1:])]) for x, y in zip(models().values(), answers)]


def random_mask(n, L=64):
    """Return a mask (L,) with n visible patches."""
    return torch.randperm(L, generator=torch.Generator().manual_seed(0)) >= n


def predicted(model, mask):
    """Return what a model predicts of IMAGE, in [0, 1], and its masked pixels (H,W)."""
    pred, own = model.reconstruct(normalize(IMAGE[None], model), mask[None])
    return denormalize(pred, model)[0], model.encoder.pixels_of(own)[0, 0] > 0


def near(a, b):
    return a.shape == b.shape and (a - b).abs().max() <= 0.5 / 255 + 1e-6


@pytest.mark.parametrize("n", [1, 16, 63])
def test_predictions(n):
    """Pictures are those of reconstruct, for any number of patches. PSNRs are of masked pixels."""
    mask, truth = random_mask(n), IMAGE / 255
    views = [ask(mask, view=view) for view in ("completed", "decoded", "error")]
    for (model, answer, (completed,)), (_, _, (decoded,)), (_, _, (error,)) in zip(*views):
        pred, masked = predicted(model, mask)
        assert near(decoded, pred) and near(completed, pred.where(masked, truth))
        assert near(error, tour.heat((pred - truth).mean(0), 0.5).where(masked, tour.GREY))
        wanted = psnr(pred[None], truth[None], masked[None, None].float()).tolist()
        assert answer["psnrs"] == pytest.approx(wanted, abs=1e-3)
        flat = truth[:, ~masked].mean(1, keepdim=True) - truth[:, masked]
        assert answer["flat"] == pytest.approx(-10 * flat.square().mean().log10().item(), abs=0.01)


def test_change():
    """The view shows what a patch adds, whether it is visible now or not, except in itself."""
    less, probe = random_mask(16), random_mask(16).nonzero()[0].item()
    more = less ^ (torch.arange(64) == probe)
    both = [ask(mask, view="change", probe=probe) for mask in (less, more)]
    for (model, _, (shown,)), (_, _, (again,)) in zip(*both):
        (pred, masked), (base, also_masked) = predicted(model, more), predicted(model, less)
        wanted = tour.heat((pred - base).mean(0), 0.2).where(masked, tour.GREY - 0.3)
        assert near(shown, wanted.where(also_masked, tour.GREY)) and torch.equal(shown, again)
    only = random_mask(1)                                  # without it, nothing would be visible
    for _, _, (shown,) in ask(only, view="change", probe=only.tolist().index(False)):
        assert (shown == 1).float().mean() == 63 / 64


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_mixtures(alpha):
    """i-MAE predicts the image and its partner, in this order. Other models ignore the partner."""
    mask, mix = random_mask(20), alpha * IMAGE / 255 + (1 - alpha) * PARTNER / 255
    *others, (model, answer, pictures) = ask(mask, images=(IMAGE, PARTNER), view="decoded",
                                             alpha=alpha)
    assert all(near(shown, predicted(x, mask)[0]) for x, _, (shown,) in others)
    inputs = (normalize(x[None], model) for x in (IMAGE, PARTNER))
    preds, _ = model.unmix(*inputs, alpha, mask[None])
    for a, b in zip(pictures, preds if alpha <= 0.5 else preds[::-1], strict=True):
        assert near(a, denormalize(b, model)[0])
    seen = torch.where(predicted(model, mask)[1], 0.5, mix)
    assert (pixels(answer["urls"][0]) - seen).abs().max() < 0.01


def test_options():
    """MINR's PSNR is that of its enlarged picture's averages. With normalised targets, the true
    patches' mean and variance are used unless a box is ticked."""
    small, large = (ask(random_mask(16), scale=scale) for scale in (1, 4))
    for (model, one, _), (_, other, (shown,)) in zip(small, large):
        assert shown.shape[2] == (128 if hasattr(model, "render") else 32)
        assert other["psnrs"] == pytest.approx(one["psnrs"], abs=0.3)
    torch.manual_seed(0)
    model, mask = MAE(**SIZES, **{**MAE.small_config, "norm_pix_loss": True}), random_mask(4, 16)
    image = IMAGE[:, :16, :16]
    for leak_free in (False, True):
        made = play.predict(model, [image], mask.tolist(), 0, "decoded", leak_free=leak_free)
        pred, _ = model.reconstruct(normalize(image[None], model), mask[None], leak_free=leak_free)
        assert near(pixels(made["urls"][1]), denormalize(pred, model)[0])
    assert play.describe("a.pt", model)["normalized"]


def test_requests(send):
    """What the page asks for: the start, an order of the patches, a photo, predictions."""
    start = json.loads(send("/start")[1])
    assert start["images"][0]["url"] == URL and len(start["images"]) == 9
    assert [x["title"] for x in start["models"]] == ["MAE", "CrossMAE", "HyperMAE", "MINR", "i-MAE"]
    order = json.loads(send("/order", "grid")[1])          # every second row and column comes first
    assert {*order[:16]} == {8 * i + j for i in range(0, 8, 2) for j in range(0, 8, 2)}
    photo = BytesIO()
    Image.new("RGB", (300, 100), (200, 10, 10)).save(photo, "WEBP", lossless=True)
    text = send("/image", photo.getvalue())[1]
    assert (255 * pixels(json.loads(text))).mean((1, 2)).tolist() == [200, 10, 10]
    asked = dict(mask=random_mask(9).tolist(), image=URL, partner=json.loads(text), alpha=0.5)
    assert [len(x["psnrs"]) for x in json.loads(send("/predict", json.dumps(asked))[1])] == [
        1, 1, 1, 1, 2]


def test_refused(send):
    """Other hosts and pages, other files, and large requests get nothing."""
    for path in ("/play.py", "/../train.py", "/tests/models/mae.pt", "/?"):
        assert send(path, method="GET")[0] == 403
    for host in ("evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "[", ""):
        assert send("/", method="GET", Host=host)[0] == 403
        assert send("/start", Origin=f"http://{host}")[0] == 403
    assert send("/start", Origin="null")[0] == 403
    for size in ("20000001", "-1", "x"):
        assert send("/image", **{"Content-Length": size})[0] == 403
    assert send("/", method="GET", Host="localhost:9000")[0] == 200    # forwarded by ssh


@pytest.mark.parametrize("path, body, words", [
    ("/image", b"%!PS-Adobe-3.0 EPSF-3.0", WRONG), ("/image", b"\xff\xd8\xff broken", WRONG),
    ("/image", b"", WRONG), ("/order", b"other", "not one of random, grid, block"),
    ("/predict", b"no JSON", "Expecting value"),
    ("/predict", json.dumps(dict(mask=[True] * 64, image=URL)), "[0] of 64"),
    ("/predict", json.dumps(dict(mask=[False] * 9, image=URL)), "noise has shape")])
def test_bad_requests(send, path, body, words):
    status, text = send(path, body)
    assert status == 400 and words in text


def test_models_and_images(tmp_path, monkeypatch, refused):
    """A method of your own needs nothing. One line says what is wrong with a model or an image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(play.ThreadingHTTPServer, "serve_forever", lambda _: None)
    for name, own, patch_size in (("a", {}, 4), ("b", {}, 8), ("c", dict(reconstruct=None), 4)):
        own["__module__"] = "tests.unit.conftest"          # a file without a title
        monkeypatch.setitem(train.METHODS, name, type("Own", (MAE,), own))
        config = dict(SIZES, patch_size=patch_size, **MAE.small_config)
        torch.save(dict(method=name, config=config, model=MAE(**config).state_dict()), f"{name}.pt")
    refused(play.main, ["a.pt", "b.pt"], "b.pt has image and patch size ((16, 16), (8, 8)), but a.")
    refused(play.main, ["a.pt", "c.pt"], "c.pt is of class Own, which predicts no pixels")
    refused(play.main, ["d.pt"], "d.pt does not exist")
    refused(play.main, ["a.pt", "--image", "b.pt"], "cannot read b.pt")
    refused(play.main, ["a.pt", "--image", "x.jpg"], "image x.jpg does not exist: check its name")
    start = json.loads(play.answers(play.load_models(["a.pt"]), [])["/start"](b""))
    assert start["grid"] == [4, 4] and start["models"][0]["title"] == "Own"
    assert play.describe("runs/own/last.pt", models()["mae"])["title"] == "MAE own"


def test_released(tmp_path, monkeypatch, refused):
    """Files in the released format are played, and toured, like the model that wrote them."""
    monkeypatch.chdir(tmp_path)
    model = MAE(32, 4, 3, 64, 4, 2, norm_pix_loss=False, decoder_dim=32, decoder_depth=1).eval()
    state = {"model": to_released(model)}
    torch.save(state, "mae_visualize_x.pth")
    torch.save(state, "x.pth")
    del state["model"]["decoder_pred.weight"]
    torch.save(state, "mae_pretrain_x.pth")
    mask = random_mask(16)
    for file, norm_pix_loss in (("mae_visualize_x.pth", None), ("x.pth", False)):
        read = play.load_models([file], norm_pix_loss)[file]
        assert torch.equal(predicted(read, mask)[0], predicted(model, mask)[0])
    refused(play.main, ["x.pth"], "--no-norm_pix_loss")
    refused(play.main, ["mae_pretrain_x.pth"], "no decoder")
    tour.main(["mae", "--checkpoint", "x.pth", "--norm_pix_loss"])
    assert "norm_pix_loss=True" in (tmp_path / "tour_mae.html").read_text(encoding="utf-8")


def test_command(server, monkeypatch, capsys):
    """If the port is taken, another one is used. Ctrl-C ends the server without a traceback."""
    def stop(_):
        raise KeyboardInterrupt
    opened = []
    monkeypatch.setattr(play.webbrowser, "open", opened.append)
    monkeypatch.setattr(play, "Thread", lambda target, args, daemon: SimpleNamespace(
        start=lambda: target(*args)))
    monkeypatch.setattr(play.ThreadingHTTPServer, "serve_forever", stop)
    play.main([str(play.MODELS[0]), "--port", str(server.server_port)])
    assert opened[0] in capsys.readouterr().out and str(server.server_port) not in opened[0]


CLICKS = """<script type="module">
const $$ = query => [...document.querySelectorAll(query)], found = []
const note = async n => {
  while (!$$("#count")[0].textContent.startsWith(`${n} of 64`) || $$(".busy").length)
    await new Promise(done => setTimeout(done, 20))
  found.push($$(".title b").map(b => b.textContent))
}
const point = (kind, i) => {
  const cell = $$("#patches button")[i]
  cell.releasePointerCapture = () => {}                    // it would miss a real pointer
  cell.dispatchEvent(new PointerEvent(kind, { buttons: 1, bubbles: kind == "pointerup" }))
}
await note(16)
$$("#all")[0].click()
for (const i of [9, 10, 11, 12]) point(i == 9 ? "pointerdown" : "pointerenter", i)
point("pointerup", 12)
point("pointerenter", 13)
await note(60)
$$("#patches button")[20].click()
await note(59)
$$("#patches button")[20].click()
await note(60)
document.body.innerHTML = `<pre>${JSON.stringify(found)}</pre>`
</script>"""


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_in_a_browser(server, monkeypatch):
    """All numbers on the page follow a drag over four patches, and clicks that hide and show."""
    page = server.answers["/"](b"")
    monkeypatch.setitem(server.answers, "/", lambda _: page + CLICKS)
    made = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
         "--dump-dom", f"http://127.0.0.1:{server.server_port}"],
        capture_output=True, encoding="utf-8", timeout=120).stdout
    found = json.loads(made.split("<pre>")[1].split("</pre>")[0])
    assert all(re.fullmatch(r"\d+\.\d dB", text) for numbers in found for text in numbers)
    assert found[0] != found[1] == found[3] != found[2] and len(found[0]) == 5
