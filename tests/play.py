"""Play with masks: hide patches of an image on a page, and see at once what models predict.

    python -m tests.play                               # our five trained models
    python -m tests.play runs/mae_shapes runs/crossmae_shapes --image photo.jpg
    python -m tests.play mae_visualize_vit_base.pth    # a released checkpoint with a decoder
    python -m tests.play --site FOLDER                 # the page as files, for any web host

The page opens in a browser on this computer (from another one, use ssh -L 8000:localhost:8000).
With --site, visitors need only their browser, which runs the models.
The methods' own files compute what it shows. Your own method needs nothing in this file, but if it
has `unmix` like i-MAE or `render` like MINR, the page uses them.
"""
# README's play.png (play_dark.png: --blink-settings=preferredColorScheme=0), after a new start:
#   chromium --headless --no-sandbox --hide-scrollbars --window-size=830,575 \
#       --virtual-time-budget=9000 --screenshot=.github/play.png http://127.0.0.1:8000

import argparse
import json
import re
import shutil
import sys
import webbrowser
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import perf_counter

import torch
import torch.nn.functional as F
from PIL import Image

from tests.lib.masks import psnr
from tests.lib.models import NORM_PIX_LOSS, load_any
from tests.tour import GREY, TRAINED, heat, open_image, png_url
from train import METHODS, draw_shapes, name_of, shell
from vit import InputError, denormalize, mask_noise, normalize, require, visible_count

MODELS = [TRAINED / f"{name}.pt" for name in ("mae", "crossmae", "hypermae", "minr", "imae")]
IMAGES = sorted(TRAINED.glob("images/*/*/*"), key=lambda x: (x.parts[-3] != "val", x))
OURS = re.compile(r"(http://)?(127\.0\.0\.1|localhost)(:\d+)?")        # names of this server
MOST_BYTES = 20_000_000                                    # in a request
PAGE = TRAINED.parent / "lib/play.html"
RUNTIME = {  # of the site: what it loads from the npm package onnxruntime-web, bytes and hashes
    "ort.wasm.bundle.min.mjs":
        (73054, "sha384-PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG"),
    "ort-wasm-simd-threaded.wasm":
        (14239897, "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM")}
PACKAGE = "onnxruntime-web@1.30.0"
CDN = f"https://cdn.jsdelivr.net/npm/{PACKAGE}/dist/"


# ---------------------------------------------------------------------------------------- pictures
@lru_cache(16)
def open_photo(data, img_size):
    """Do what open_image does, for a file that is given as bytes. A file is decoded only once."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(data)
        try:
            Image.open(path).close()                       # refuses more than 179 megapixels
            return open_image(path, img_size)
        except Exception:                                  # a broken file can raise anything
            raise InputError("cannot read this image: try .jpg or .png, or a smaller one") from None


def coloured(x, most, masks):
    """Return differences x (n,3,H,W) as pictures: above 0 orange, below blue, full from `most` on.
    Grey is what is visible in one of two masks (1,1,H,W), and in light grey, in both."""
    visible = 2 - sum(masks)                                           # (1, 1, H, W) 0, 1 or 2
    colours = heat(x.mean(1), most).transpose(0, 1)                    # (n, 3, H, W)
    return torch.where(visible > 0, GREY - 0.3 * (visible == 1), colours)


# ------------------------------------------------------------------------------------- predictions
def reconstruct(model, images, mask, alpha=0.3, scale=1, leak_free=False):
    """Return what a model predicts and what it should predict (n,3,H,W), and what it sees
    (1,3,H,W), in [0, 1]. Images are (3,H,W) in [0, 255]; mask (1,L) is true where masked. A model
    that unmixes gets a mixture of two images and predicts both (n = 2). Other models get the first
    image. One that renders enlarges it `scale` times."""
    images = [normalize(x[None], model) for x in images]
    if len(images) > 1 and hasattr(model, "unmix"):
        seen, truths = model.mix_images(*images, alpha)
        # subordinate, dominant
        preds, _ = model.unmix(*images, alpha, mask, leak_free=leak_free)
        both = (torch.cat([*x[:len(preds)]]) for x in (preds, truths))
        # the first image comes first
        preds, truths = (torch.where(torch.as_tensor(alpha) > 0.5, x.flip(0), x) for x in both)
    else:
        seen = truths = images[0]
        if scale > 1 and hasattr(model, "render"):
            preds = model.render(seen, [scale * side for side in seen.shape[2:]], mask)
        else:
            preds, _ = model.reconstruct(seen, mask, leak_free=leak_free)
    return [denormalize(x, model) for x in (preds, truths, seen)]


@lru_cache(64)                                             # *change* asks for most of them again
@torch.no_grad()
def run(model, images, mask, **options):
    """Return what reconstruct returns for a mask (L,), and the time in ms."""
    began = perf_counter()
    made = reconstruct(model, images, torch.tensor([mask]), **options)
    return *made, 1000 * (perf_counter() - began)


def draw(model, preds, truths, seen, mask, others, probe):
    """Return the views (n,3,H,W) of what reconstruct returned for mask (1,L), 1 = masked, and of
    what it sees (1,3,H,W); PSNRs of masked pixels (n,) as in train.evaluate_psnr, and that of the
    visible pixels' mean colour. `others` are preds if the patch `probe` is flipped in the mask; the
    view "change" shows what this patch adds."""
    flips = torch.arange(mask.shape[1]) == probe                       # (L,)
    both = [model.encoder.pixels_of(x) for x in (mask, torch.where(flips, 1 - mask, mask))]
    masked, sign = both[0], 1 - 2 * (flips * mask).sum()
    copied, covered = (F.interpolate(x, preds.shape[2:]) for x in (seen, masked))
    own, other = (F.interpolate(x, truths.shape[2:], mode="area") for x in (preds, others))
    mean = (seen * (1 - masked)).sum((2, 3), keepdim=True) / (1 - masked).sum()        # (1,3,1,1)
    return dict(seen=torch.where(masked > 0, 0.5, seen),
                completed=torch.where(covered > 0, preds, copied), decoded=preds,
                error=coloured(own - truths, 0.5, [masked, masked]),
                change=coloured(sign * (own - other), 0.2, both),
                psnrs=psnr(own, truths, masked), flat=psnr(mean, truths, masked)[0])


def predict(model, images, mask, probe=0, view="completed", **options):
    """Return URLs of pictures of what a model sees and predicts, PSNRs and ms: see draw. Images are
    (3,H,W), uint8. The mask (L,) is true where masked."""
    mask, flipped = tuple(mask), tuple(x != (i == probe) for i, x in enumerate(mask))
    *made, ms = run(model, tuple(images), mask, **options)
    compare = view == "change" and {*flipped} == {True, False}
    others = run(model, tuple(images), flipped, **options)[0] if compare else made[0]
    drawn = draw(model, *made, torch.tensor([mask]).float(), others, probe)
    return dict(urls=[png_url(x) for x in (*drawn["seen"], *drawn[view])],
                psnrs=drawn["psnrs"].tolist(), flat=drawn["flat"].item(), ms=ms)


def load_models(paths, norm_pix_loss=None):
    """Return {path: model}. Raises InputError unless all predict colours, in the same sizes."""
    models = {path: load_any(path, norm_pix_loss=norm_pix_loss) for path in paths}
    for path, model in models.items():
        require(model.reconstruct, f"{path} is of class {type(model).__name__}, which predicts no "
                                   f"pixels (its `reconstruct` is None): leave it out")
        require(model.encoder.in_chans == 3,
                f"{path} does not predict the three channels of colour images: leave it out")
        first, own = ((x.img_size, x.patch_size) for x in (models[paths[0]].encoder, model.encoder))
        require(own == first, f"{path} has image and patch size {own}, but {paths[0]} has {first}: "
                              f"show them separately")
    return models


def describe(path, model):
    """Return what the page tells about a model. Its title and idea begin its file."""
    text = (sys.modules[type(model).__module__].__doc__ or "").partition("\n")[0]
    title, _, idea = text.rpartition(": ")
    title = (title or type(model).__name__) + f" {name_of(path)}" * (name_of(path) not in METHODS)
    return dict(title=title, idea=idea, size=sum(p.numel() for p in model.parameters()),
                renders=hasattr(model, "render"), unmixes=hasattr(model, "unmix"),
                normalized=getattr(model, "norm_pix_loss", False))


# -------------------------------------------------------------------------------------- the server
class Handler(BaseHTTPRequestHandler):
    """Answers a request with server.answers, {path: function of the request's bytes}. Only our own
    page may ask: another site could send requests too, or have a host name that leads here."""
    def do_GET(self):
        ours = all(OURS.fullmatch(self.headers.get(x, "localhost")) for x in ("Host", "Origin"))
        answer, size = self.server.answers.get(self.path), self.headers.get("Content-Length", "0")
        if answer is None or not ours or not size.isdecimal() or int(size) > MOST_BYTES:
            return self.send_error(403)
        status, data = 200, self.rfile.read(int(size))
        try:                                               # in one thread, one after another
            text = self.server.worker.submit(answer, data).result()
        except Exception as error:                         # a bad request can raise anything
            status, text = 400, str(error) or repr(error)
        kind = "html" if self.path == "/" else "plain"
        with suppress(ConnectionError):                    # the page was closed
            self.send_response(status)
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

    do_POST, log_message = do_GET, lambda *_: None         # and print nothing


def answers(models, files):
    """Return the server's answers for models {path: model}. The page begins with `files`."""
    encoder, ratio = [(model.encoder, model.mask_ratio) for model in models.values()][0]
    names = {file: "/".join(Path(file).parts[-3:]) for file in files}
    names |= {file: f"{file.parts[-2]} ({file.parts[-3]})" for file in IMAGES}
    images = {name: open_image(file, encoder.img_size) for file, name in names.items()}
    images["star"] = draw_shapes(8, encoder.img_size, seed=0)[0][6]
    start = dict(grid=encoder.grid, size=encoder.img_size,
                 visible=visible_count(encoder.num_patches, ratio),
                 most_bytes=MOST_BYTES, models=[describe(*item) for item in models.items()],
                 images=[dict(name=name, url=png_url(x / 255)) for name, x in images.items()])

    def predict_all(data):
        asked = json.loads(data)
        images = [open_photo(b64decode(url.partition(",")[2]), encoder.img_size)
                  for url in (asked.pop("image"), asked.pop("partner", None)) if url]
        return [predict(model, images, **asked) for model in models.values()]
    return {
        "/": lambda _: PAGE.read_text(encoding="utf-8"),
        "/start": lambda _: json.dumps(start),
        "/image": lambda data: json.dumps(png_url(open_photo(data, encoder.img_size) / 255)),
        "/order": lambda kind: json.dumps(                 # of patches: first those to show
            mask_noise(kind.decode(), 1, encoder.grid)[0].argsort().tolist()),
        "/predict": lambda data: json.dumps(predict_all(data))}


def make_server(models, files=(), port=0):
    """Return a server of the page, at another port if this one is taken."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError):                       # taken, or no port
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)        # any free one
    server.answers, server.worker = answers(models, files), ThreadPoolExecutor(1)
    return server


# ---------------------------------------------------------------------------------------- the site
class Graph(torch.nn.Module):
    """What the site runs instead of predict. Image and partner (1,3,H,W) are in [0, 1]. Indices of
    visible and masked patches (1,K), (1,L-K) replace the mask, as sizes in a graph may depend only
    on sizes. Two runs make "change": the first one's predictions are the second one's `others`."""
    outputs = ("seen", "completed", "decoded", "error", "change", "psnrs", "flat")

    def __init__(self, model, mixed, **options):
        super().__init__()
        self.model, self.mixed, self.options = deepcopy(model), mixed, options

    def forward(self, image, partner, ids_keep, ids_mask, others, probe, alpha):
        images, encoder = [255 * image[0], 255 * partner[0]][:1 + self.mixed], self.model.encoder
        mask = torch.ones(1, encoder.num_patches).scatter(1, ids_keep, 0)      # (1, L)
        encoder.mask = lambda *_: (ids_keep, ids_mask, mask)
        made = reconstruct(self.model, images, mask.bool(), alpha, **self.options)
        drawn = draw(self.model, *made, mask, others, probe)
        return [drawn[name] for name in self.outputs]


@torch.no_grad()
def export(model, file, mixed=0, scale=1, leak_free=0):
    """Write a model's Graph as ONNX, for any number of visible patches."""
    L, (H, W) = model.encoder.num_patches, model.encoder.img_size
    ids_keep, ids_mask = torch.arange(L)[None].tensor_split(2, dim=1)
    varies = {1: torch.export.Dim.DYNAMIC}
    inputs = dict(image=torch.zeros(1, 3, H, W), partner=torch.zeros(1, 3, H, W), ids_keep=ids_keep,
                  ids_mask=ids_mask, others=torch.zeros(1 + mixed, 3, scale * H, scale * W),
                  probe=torch.tensor([0]), alpha=torch.tensor(0.3))
    graph = Graph(model, mixed, scale=scale, leak_free=leak_free).eval()
    torch.onnx.export(graph, (*inputs.values(),), file, input_names=[*inputs],
                      output_names=Graph.outputs, external_data=False, verbose=False,
                      dynamic_shapes=[varies if x.startswith("ids") else None for x in inputs])


def write_site(folder, models, images=(), runtime=None):
    """Write the page into a folder, with what it needs: what the server says at the start, orders
    of patches, and a graph for each option of a model. onnxruntime-web, which runs graphs in the
    browser, comes from a CDN, or is copied from the folder `runtime`."""
    folder.mkdir(parents=True, exist_ok=True)
    answer = answers(models, images)
    start, files = json.loads(answer["/start"](b"")), {}
    for file, (size, integrity) in RUNTIME.items():
        files[file] = dict(url=CDN + file, bytes=size, integrity=integrity)
        if runtime:
            shutil.copy(Path(runtime, file), folder)
            files[file].update(url=file)
    for i, (about, (path, model)) in enumerate(zip(start["models"], models.items())):
        about["file"] = f"{i}_{name_of(path)}"
        scales = range(1, 9 if about["renders"] else 2)    # the slider's
        for mixed, scale, leak_free in product(range(1 + about["unmixes"]), scales,
                                               range(1 + about["normalized"])):
            file = f"{about['file']}_mixed{mixed}_scale{scale}_leak_free{leak_free}.onnx"
            print(f"write   {folder / file}", flush=True)
            try:
                export(model, folder / file, mixed, scale, leak_free)
            except Exception as error:                     # an own method can raise anything
                raise InputError(f"{path} cannot be exported as ONNX: leave it out") from error
            files[file] = dict(url=file, bytes=(folder / file).stat().st_size, integrity="")
    start.update(files=files, tours=sorted(x.name for x in folder.glob("tour_*.html")), orders={
        kind: [json.loads(answer["/order"](kind.encode())) for _ in range(50)]
        for kind in ("random", "grid", "block")})
    (folder / "start.json").write_text(json.dumps(start), encoding="utf-8")
    script, page = '<script type="module">', PAGE.read_text(encoding="utf-8")
    page = page.replace(script, f'<script src="site.js"></script>\n{script}')
    (folder / "index.html").write_text(page, encoding="utf-8")
    shutil.copy(PAGE.with_name("site.js"), folder)
    print(f"see     python -m http.server -d {folder} shows it at http://127.0.0.1:8000")


# ------------------------------------------------------------------------------- the command line
def main(argv=None):
    """Run `python -m tests.play` with the arguments `argv`."""
    parser = argparse.ArgumentParser("play", usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("checkpoints", nargs="*", default=MODELS, metavar="CHECKPOINT",
           help="checkpoints from train.py, or released ones with a decoder (our five models)")
    option("--image", nargs="+", default=[], metavar="FILE", help="image files to begin with")
    option("--port", type=int, default=8000, metavar="X", help="the server's port (8000)")
    option("--norm_pix_loss", **NORM_PIX_LOSS)
    option("--site", metavar="FOLDER", type=Path,
           help="write the page with its models into a folder, for any web host")
    option("--runtime", metavar="FOLDER", help="with --site: the folder dist of the npm package "
                                               "onnxruntime-web (a CDN)")
    args = parser.parse_args(argv)
    require(args.site or not args.runtime, "--runtime is for --site FOLDER")
    require(not args.site or find_spec("onnx") and find_spec("onnxscript"),
            "--site needs two more packages: pip install onnx onnxscript")
    for file in RUNTIME if args.runtime else ():
        require(Path(args.runtime, file).is_file(), f"--runtime {args.runtime} has no {file}: it "
                f"must be the folder dist of the npm package {PACKAGE}")
    torch.manual_seed(0)                                   # the first mask is always the same
    models = load_models(args.checkpoints, args.norm_pix_loss)
    if args.site:
        return write_site(args.site, models, args.image, args.runtime)
    server = make_server(models, args.image, args.port)
    url = f"http://127.0.0.1:{server.server_port}"
    print(f"see     {url} (Ctrl-C stops it)", flush=True)
    Thread(target=webbrowser.open, args=[url], daemon=True).start()  # a text browser blocks
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    shell(main)
