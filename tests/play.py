"""Play with masks: hide patches of an image on a page, and see at once what models predict.

    python -m tests.play                               # our five trained models
    python -m tests.play runs/mae_shapes runs/crossmae_shapes --image photo.jpg
    python -m tests.play mae_visualize_vit_base.pth    # a released checkpoint with a decoder

The page opens in a browser on this computer (from another one, use ssh -L 8000:localhost:8000).
The methods' own files compute what it shows. Your own method needs nothing in this file, but if it
has `unmix` like i-MAE or `render` like MINR, the page uses them.
"""
# README's play.png (play_dark.png: --blink-settings=preferredColorScheme=0), after a new start:
#   chromium --headless --no-sandbox --hide-scrollbars --window-size=830,575 \
#       --virtual-time-budget=9000 --screenshot=.github/play.png http://127.0.0.1:8000

import argparse
import json
import re
import sys
import webbrowser
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    """Return differences x (1,3,H,W) as a picture: above 0 orange, below blue, full from `most` on.
    Grey is what is visible in one of two masks (1,1,H,W), and in light grey, in both."""
    visible = 2 - sum(masks)                                           # (1, 1, H, W) 0, 1 or 2
    return torch.where(visible > 0, GREY - 0.3 * (visible == 1), heat(x.mean(1)[0], most)[None])


# ------------------------------------------------------------------------------------- predictions
@lru_cache(64)                                             # *change* asks for most of them again
@torch.no_grad()
def run(model, images, mask, alpha=0.3, scale=1, leak_free=False):
    """Return what a model predicts, what it should predict and what it sees, lists of images
    (1,3,H,W) in [0, 1], and the time in ms. A model that unmixes gets a mixture of two images and
    predicts both. Other models get the first image. One that renders enlarges it `scale` times."""
    images, mask = [normalize(x[None], model) for x in images], torch.tensor([mask])   # (1, L)
    began = perf_counter()
    if len(images) > 1 and hasattr(model, "unmix"):
        seen, truths = model.mix_images(*images, alpha)
        # subordinate, dominant
        preds, _ = model.unmix(*images, alpha, mask, leak_free=leak_free)
        if alpha > 0.5:                                    # the first image comes first
            preds, truths = preds[::-1], truths[::-1]
    else:
        seen, truths = images[0], images[:1]
        if scale > 1 and hasattr(model, "render"):
            preds = [model.render(seen, [scale * side for side in seen.shape[2:]], mask)]
        else:
            preds = [model.reconstruct(seen, mask, leak_free=leak_free)[0]]
    ms = 1000 * (perf_counter() - began)
    return *([denormalize(x, model) for x in xs] for xs in (preds, truths, [seen])), ms


def predict(model, images, mask, probe=0, view="completed", **options):
    """Return URLs of pictures of what a model sees and predicts, PSNRs of masked pixels as in
    train.evaluate_psnr, that of the visible pixels' mean colour, and ms. Images are (3,H,W), uint8.
    The mask (L,) is true where masked. The view "change" shows what the patch `probe` adds."""
    both = tuple(mask), tuple(x != (i == probe) for i, x in enumerate(mask))
    preds, truths, (seen,), ms = run(model, tuple(images), both[0], **options)
    compare = view == "change" and {*both[1]} == {True, False}
    others = run(model, tuple(images), both[1], **options)[0] if compare else preds
    masks = masked, _ = [model.encoder.pixels_of(torch.tensor([x]).float()) for x in both]
    mean = (seen * (1 - masked)).sum((2, 3), keepdim=True) / (1 - masked).sum()        # (1,3,1,1)
    urls, psnrs = [png_url(torch.where(masked > 0, 0.5, seen)[0])], []
    for large, other, truth in zip(preds, others, truths):
        pred, other = (F.interpolate(x, truth.shape[2:], mode="area") for x in (large, other))
        own, flat = (psnr(x, truth, masked).item() for x in (pred, mean))
        copied, covered = (F.interpolate(x, large.shape[2:]) for x in (seen, masked))
        shown = dict(completed=torch.where(covered > 0, large, copied), decoded=large,
                     error=coloured(pred - truth, 0.5, [masked, masked]),
                     change=coloured((1 - 2 * mask[probe]) * (pred - other), 0.2, masks))[view]
        urls.append(png_url(shown[0]))
        psnrs.append(own)
    return dict(urls=urls, psnrs=psnrs, flat=flat, ms=ms)


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
        "/": lambda _: (TRAINED.parent / "lib/play.html").read_text(encoding="utf-8"),
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
    args = parser.parse_args(argv)
    torch.manual_seed(0)                                   # the first mask is always the same
    models = load_models(args.checkpoints, args.norm_pix_loss)
    server = make_server(models, args.image, args.port)
    url = f"http://127.0.0.1:{server.server_port}"
    print(f"see     {url} (Ctrl-C stops it)", flush=True)
    Thread(target=webbrowser.open, args=[url], daemon=True).start()  # a text browser blocks
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    shell(main)
