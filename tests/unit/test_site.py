"""tests.play --site: its graphs answer like play.predict, and its page needs only files."""

import json
import os
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from io import BytesIO
from itertools import product
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest
import torch
from PIL import Image

import train
from mae import MAE
from tests import play
from tests.unit.test_play import (CHROMIUM, IMAGE, PARTNER, SIZES, URL, WRONG, models, near, pixels,
                                  random_mask)

RUNTIME = os.environ.get("ONNXRUNTIME_WEB", "")
needs_onnx = pytest.mark.skipif(not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))),
                                reason="needs onnx, onnxscript and onnxruntime")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site with our five models, without most of MINR's scales, which take long to export."""
    folder, runtime = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("dist")
    (folder / "tour_mae.html").touch()
    for name in play.RUNTIME:                              # only the browser needs the real ones
        (runtime / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "product", lambda *ranges: [x for x in product(*ranges) if x[1] < 3])
        play.main(["--site", str(folder), "--runtime", RUNTIME or str(runtime)])
    return folder


def answer(file, images, mask, view, probe=0, alpha=0.3):
    """Return what site.js makes of a graph: (pictures, PSNRs, PSNR of the mean colour)."""
    import onnxruntime
    session = onnxruntime.InferenceSession(file)
    others = next(x.shape for x in session.get_inputs() if x.name == "others")
    flipped = mask ^ (torch.arange(len(mask)) == probe)

    def run(mask, others):
        feeds = dict(image=images[0][None] / 255, partner=images[-1][None] / 255, others=others,
                     ids_keep=(~mask).nonzero().T, ids_mask=mask.nonzero().T,
                     probe=torch.tensor([probe]), alpha=torch.tensor(alpha))
        made = session.run(None, {name: x.numpy() for name, x in feeds.items()})
        return dict(zip(play.Graph.outputs, map(torch.tensor, made)))
    made = run(mask, torch.zeros(others))
    if view == "change" and len(flipped.unique()) == 2:
        made = run(mask, run(flipped, torch.zeros(others))["decoded"])
    elif view == "change":
        made = run(mask, made["decoded"])
    return [*made["seen"], *made[view]], made["psnrs"].tolist(), made["flat"].item()


@needs_onnx
@pytest.mark.parametrize("name", ["mae", "crossmae", "hypermae", "minr", "imae"])
def test_graphs(site, name):
    """Pictures and PSNRs are those of play.predict, for any number of patches and each option."""
    model = models()[name]
    options = dict(minr=[dict(scale=2)], imae=[dict(alpha=0.3), dict(alpha=0.8)]).get(name, [])
    for n, more in [(1, {}), (16, {}), (63, {}), *((20, x) for x in options)]:
        mask, images = random_mask(n), (IMAGE, PARTNER) if "alpha" in more else (IMAGE,)
        mixed, scale = int("alpha" in more), more.get("scale", 1)
        file, = site.glob(f"*_{name}_mixed{mixed}_scale{scale}_leak_free0.onnx")
        for view in ("completed", "decoded", "error", "change"):
            wanted = play.predict(model, images, mask.tolist(), 5, view, **more)
            made, psnrs, flat = answer(file, images, mask, view, 5, more.get("alpha", 0.3))
            assert all(near(a, b) for a, b in zip(made, map(pixels, wanted["urls"]), strict=True))
            assert [*psnrs, flat] == pytest.approx([*wanted["psnrs"], wanted["flat"]], abs=1e-3)


@needs_onnx
def test_own_run(tmp_path, monkeypatch, refused):
    """A run on other images, with normalised targets, has a graph with their mean and variance, and
    one without. One line says what cannot be written."""
    monkeypatch.chdir(tmp_path)
    config = {**SIZES, **MAE.small_config, "img_size": (48, 64), "patch_size": (8, 4),
              "norm_pix_loss": True}
    model = MAE(**config).eval()
    torch.save(dict(method="mae", config=config, model=model.state_dict()), "own.pt")
    for name in play.RUNTIME:
        Path(name).touch()
    play.main(["own.pt", "--site", "site", "--runtime", "."])
    start = json.loads(Path("site/start.json").read_text(encoding="utf-8"))
    assert start["grid"] == [6, 16] and {*start["orders"]["block"][0]} == {*range(96)}
    image, mask = torch.randint(256, (3, 48, 64), dtype=torch.uint8), random_mask(30, 96)
    for leak_free in (0, 1):
        wanted = play.predict(model, (image,), mask.tolist(), 0, leak_free=bool(leak_free))
        file = f"site/0_own_mixed0_scale1_leak_free{leak_free}.onnx"
        made, psnrs, _ = answer(file, (image,), mask, "completed")
        assert near(made[1], pixels(wanted["urls"][1]))
        assert psnrs == pytest.approx(wanted["psnrs"], abs=1e-3)
    refused(play.main, ["own.pt", "--site", "site", "--runtime", "x"], "--runtime x has no ort.")

    class Branching(MAE):                                  # on values, which a graph cannot do
        def encode(self, images, ids_keep):
            return super().encode(images, ids_keep) * (2 if images.mean() > 0 else 1)
    monkeypatch.setitem(train.METHODS, "mae", Branching)
    refused(play.main, ["own.pt", "--site", "site", "--runtime", "."],
            "own.pt cannot be exported as ONNX")


def test_without_onnx(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(play, "find_spec", lambda name: None)
    refused(play.main, ["--site", str(tmp_path / "site")], "pip install onnx onnxscript")
    assert not (tmp_path / "site").exists()


VISIT = """<script type="module">
const $$ = query => [...document.querySelectorAll(query)], found = { plays: [], said: [] }
const until = async done => { do await new Promise(go => setTimeout(go, 20)); while (!done()) }
const dB = () => $$(".title b").map(b => b.textContent)
const play = async act => {
  act()
  await until(() => !$$(".busy").length && dB().every(x => x) || $$("#message")[0].textContent)
  await until(() => !$$(".busy").length)
  found.said.push($$("#message")[0].textContent)
  found.plays.push({ image: $$("#images [aria-pressed=true]")[0].value, dB: dB(),
    mask: $$("#patches button").map(cell => cell.ariaPressed == "false") })
}
await until(() => $$("#patches button").length)
await play(() => {})
for (const kind of MISSING ? [] : ["random", "grid", "block", "random", "grid", "block", "random",
    "grid", "block"]) {
  if (found.plays.length == 5) await play(() => $$("#images button")[1].click())
  await play(() => $$(`[data-kind=${kind}]`)[0].click())
}
if (!MISSING) for (const way of ["file", "drop"]) {
  const files = new DataTransfer(), n = $$("#images button").length
  const bytes = await (await fetch("photo.png")).arrayBuffer()
  files.items.add(new File([bytes], `${way}.png`, { type: "image/png" }))
  if (way == "file") {
    $$("[type=file]")[0].files = files.files
    $$("[type=file]")[0].dispatchEvent(new Event("change"))
  } else document.dispatchEvent(new DragEvent("drop", { dataTransfer: files, cancelable: true }))
  await until(() => $$("#images button").length > n)
  await play(() => {})
}
found.names = performance.getEntriesByType("resource").map(entry => entry.name)
found.tours = $$("#tours a").map(a => a.textContent)
await fetch("/found", { method: "POST", body: JSON.stringify(found) })
if (!MISSING && !sessionStorage.reloaded) location.reload(sessionStorage.reloaded = true)
</script>"""


@needs_onnx
@pytest.mark.skipif(not CHROMIUM or not RUNTIME,
                    reason="needs Chromium and ONNXRUNTIME_WEB=dist, of npm's onnxruntime-web")
def test_in_a_browser(site, tmp_path):
    """The page's dB are Python's, for masks of three kinds, images and photos. It asks no other
    host, and works again when it is loaded again. A missing model is named."""
    found = Queue()

    class Host(SimpleHTTPRequestHandler):
        def do_POST(self):
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass
    host = ThreadingHTTPServer(("127.0.0.1", 0), partial(Host, directory=site))
    Thread(target=host.serve_forever, daemon=True).start()
    page, own = (site / "index.html").read_text(encoding="utf-8"), f":{host.server_port}/"
    Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 40).convert("RGB").save(site / "photo.png")

    def visit(missing):
        visited = page + VISIT.replace("MISSING", missing)
        (site / "visit.html").write_text(visited, encoding="utf-8")
        return subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--no-first-run", f"--user-data-dir={tmp_path / missing}",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
             f"http://127.0.0.1{own}visit.html"], stderr=subprocess.DEVNULL)
    browser = visit("false")
    try:
        for _ in range(2):                                 # loaded, and loaded again
            seen = found.get(timeout=300)
            assert len(seen["plays"]) == 13 and seen["tours"] == ["mae"]
            assert all(name.split("/")[2].endswith(own[:-1]) or name.startswith("blob:")
                       for name in seen["names"])
            assert "middle of your photo" in seen["said"][-1]
            for shown in seen["plays"]:
                image = (255 * pixels(shown["image"])[:3]).round().byte()
                for model, text in zip(models().values(), shown["dB"], strict=True):
                    psnr, = play.predict(model, [image], shown["mask"])["psnrs"]
                    assert float(text.removesuffix(" dB")) == pytest.approx(psnr, abs=0.051)
            photo = play.open_image(site / "photo.png", (32, 32)) / 255
            assert (pixels(seen["plays"][-1]["image"])[:3] - photo).abs().mean() < 0.03
            assert seen["plays"][-1]["image"] == seen["plays"][-2]["image"]
    finally:
        browser.kill()
    missing = next(site.glob("*_minr_*scale1*"))
    missing.rename(tmp_path / "kept")
    browser = visit("true")
    try:
        assert found.get(timeout=300)["said"] == [
            f"Cannot load {missing.name} (404). Are you online? Is the file there?"]
    finally:
        browser.kill()
        host.shutdown()
