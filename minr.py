"""MINR: a transformer reads a masked image and predicts the weights of an MLP that renders it.

Lee, Lee, Kang: MINR: Implicit Neural Representations with Masked Image Modelling (arXiv
2507.22404), with the hypernetworks TransINR (Chen, Wang, ECCV 2022) and GINR (Kim et al., CVPR
2023; https://github.com/kakaobrain/ginr-ipc, which has both). "The release" is MINR's own code.
Its paper was at hand only as a summary with few sections' numbers: "paper" is what that says.

An implicit neural representation (INR) of an image is an MLP from a coordinate to its colour. Here
a ViT, the hypernetwork, gets the image with three quarters of its patches zeroed, and weight tokens
that become weights of the MLP; one pass then renders every pixel, hidden or visible, at any
resolution. With GINR one layer is the image's own and the others are shared by all images. The
weight tokens are the encoder's extra tokens: it keeps them, and finetune.py reads them, not the
patch tokens, on whose last outputs the loss has no gradient.

    B images, L patches, K visible, D width, G weight tokens, N pixels that are rendered
    layer i of the MLP: a_i inputs, b_i outputs, g_i weight tokens (groups; GINR: rank)
    images (B,C,H,W) -> tokens (B,1+L+G,D) -> weights (B,a_i,b_i) or (a_i,b_i), biases (b_i,)
    coordinates (N,2) and weights -> colours (B,N,C)

Where paper and release differ or say nothing, and what is done here:
  1. "14 x 14 patches" (paper), of 182 x 182 pixels, may be a grid of 14 x 14 patches of 13 pixels,
     or patches of 14 x 14 pixels. Here it is the grid, as the release masks patches of 13 pixels.
     The release's tokens are of 9 pixels; here they are the patches that are masked.
  2. The release hides each patch with probability 0.75; here the same number in each image.
  3. The paper's TransINR predicts all weights. In the release predicted columns, repeated,
     multiply shared ones, and biases are shared. As released.
  4. The release's modulated GINR layers also hold shared weights that nothing uses: not built here.
  5. Each column of weights has norm 1, in shared layers too, and `out_bias` is added: as released.
  6. The release's ViT has learnt positions and dropout; here it is vit.ViT: fixed positions, a
     class token, and no final norm (this as released).
  7. The paper does not say hidden_dim, groups, ff_dim and ff_sigma: they are the release's. GINR:
     256 groups (full rank) and ff_sigma 128 (on CelebA 64); TransINR: 64 groups and ff_sigma 1024.
  8. The paper says that MINR has fewer parameters than MAE. That depends on the sizes of both, and
     is not tested here. With GINR's full rank, its one layer takes nearly as many predicted
     numbers (65,536) as TransINR's five layers together (66,304).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from vit import InputError, ViT, pair, visible_count


def grid_coords(size, device=None):
    """Centres (H*W,2) of H x W cells, row and column, in -1 ... 1. (hypermae.py has it too.)"""
    H, W = size
    row = (2 * torch.arange(H, device=device) + 1) / H - 1             # (H,)
    col = (2 * torch.arange(W, device=device) + 1) / W - 1             # (W,)
    return torch.stack([row.repeat_interleave(W), col.repeat(H)], dim=1)  # (H*W, 2)


def fourier_features(coords, dim, sigma):
    """Coordinates (...,2) -> (...,2 dim): cosines, then sines, of pi f x, with x the row and then
    the column, and dim/2 frequencies f, geometrically spaced from 1 to sigma. Always in float32:
    phases up to pi sigma are too large for half precision. (hypermae.py has it too.)"""
    frequencies = torch.linspace(0, math.log(sigma), dim // 2, device=coords.device).exp()
    phase = (coords.float()[..., None] * frequencies).flatten(-2) * math.pi  # (..., dim)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)               # (..., 2 dim)


class MINR(nn.Module):
    """`loss, metrics = model(images)`; `reconstruct` renders masked images at their own size,
    `render` at any, `encoder` gives features. Images are 0 ... 1. Defaults: the paper's (182 x 182
    pixels, a grid of 14 x 14 patches, 75% hidden, 5 layers, the second modulated, all pixels in the
    loss), else the release's.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the hypernetwork, see vit.ViT
        mask_ratio: share of the patches that is hidden (paper)
        hypernetwork: ginr, whose predicted weights multiply shared ones as matrices, in one layer,
            or transinr, where they are factors of shared ones, in all layers (Sec. 3.2, item 3)
        modulated_layers: image-specific layers of the MLP, counted from 0, as in 0,1; None: the
            second for ginr, all for transinr (Sec. 3.2)
        mlp_depth: number of layers of the MLP (paper)
        hidden_dim: width of the MLP (release)
        groups: weight tokens for each layer, cut to its number of outputs: the rank (ginr) or
            columns that are repeated (transinr); None: 256 for ginr, 64 for transinr (release)
        ff_dim: number of cosines, and of sines, among the Fourier features (release)
        ff_sigma: highest frequency of the Fourier features, in periods per image; None: 128 for
            ginr, 1024 for transinr (release)
        out_bias: constant that is added to the colours (release)
        loss_on: pixels that the loss covers, all (paper) or masked
        coord_jitter: in training, move each coordinate within its pixel (release: not on CelebA)
        pixel_fraction: share of the pixels that a training step renders (ours)
        encode_visible_only: leave hidden patches out instead of zeroing them, for speed (ours)
    """

    recipe = dict(  # the release's for Imagenette, as the paper says none, with --coord_jitter and,
        # for its encoder, --img_size 182 --patch_size 13 --dim 768 --depth 6 --heads 12; crop
        # stands for its resize and random crop. Not built: TransINR's rate drops to a tenth after
        # 80% of the epochs. CelebA: --epochs 30 --no-flip --ff_sigma 64 (GINR), no --coord_jitter
        optimizer="adam", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant",
        batch_size=32, epochs=400, warmup_epochs=0, crop=0.75, flip=True)
    small = dict(  # ours, for images up to 64 pixels and for the micro encoder: 32 pixels have 16
        # periods at most
        lr=4e-3, schedule="cosine", batch_size=64, epochs=10, warmup_epochs=1, crop=0.2,
        hidden_dim=64, groups=16, ff_dim=32, ff_sigma=16.0, pixel_fraction=0.25)
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    lr_scale = 1.0

    def __init__(self, img_size=182, patch_size=13, in_chans=3, dim=768, depth=6, heads=12, *,
                 mask_ratio=0.75, hypernetwork="ginr", modulated_layers: tuple = None, mlp_depth=5,
                 hidden_dim=256, groups: int = None, ff_dim=128, ff_sigma: float = None,
                 out_bias=0.5, loss_on="all", coord_jitter=False, pixel_fraction=1.0,
                 encode_visible_only=False):
        super().__init__()
        if hypernetwork not in ("ginr", "transinr"):
            raise InputError(f"hypernetwork {hypernetwork} is not ginr or transinr")
        ginr = hypernetwork == "ginr"
        groups = (256 if ginr else 64) if groups is None else groups   # item 7
        ff_sigma = (128.0 if ginr else 1024.0) if ff_sigma is None else ff_sigma
        if loss_on not in ("all", "masked"):
            raise InputError(f"loss_on {loss_on} is not all or masked")
        if not 0 < pixel_fraction <= 1:
            raise InputError(f"pixel_fraction {pixel_fraction} is not above 0 and at most 1")
        if ff_dim < 2 or ff_dim % 2:
            raise InputError(f"ff_dim {ff_dim} is not even and at least 2")
        for name, value in dict(ff_sigma=ff_sigma, mlp_depth=mlp_depth, hidden_dim=hidden_dim,
                                groups=groups).items():
            if not value >= 1:
                raise InputError(f"{name} {value} is less than 1")
        if modulated_layers is None:
            # Sec. 3.2: GINR's second layer, which is 1 when counted from 0
            modulated_layers = 1 if ginr else range(mlp_depth)
        if isinstance(modulated_layers, (int, float)):     # also --modulated_layers 1
            modulated_layers = (modulated_layers,)
        modulated = sorted({*modulated_layers})
        if not modulated or not all(isinstance(i, int) and 0 <= i < mlp_depth for i in modulated):
            raise InputError(f"modulated_layers {modulated_layers} are not layers from 0 to "
                             f"{mlp_depth - 1}")
        widths = [2 * ff_dim, *[hidden_dim] * (mlp_depth - 1), in_chans]  # a_0, b_0 = a_1, ...
        self.groups = {i: min(groups, widths[i + 1]) for i in modulated}  # g_i
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, norm=False,
                           extra_tokens=sum(self.groups.values()))
        nn.init.normal_(self.encoder.extra_tokens)                     # weight tokens: N(0, 1)
        visible_count(self.encoder.num_patches, mask_ratio)            # InputError, unless it fits
        self.mask_ratio, self.hypernetwork, self.loss_on = mask_ratio, hypernetwork, loss_on
        self.ff_dim, self.ff_sigma, self.out_bias = ff_dim, ff_sigma, out_bias
        self.coord_jitter, self.pixel_fraction = coord_jitter, pixel_fraction
        self.encode_visible_only = encode_visible_only

        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()  # phi: instance-agnostic
        for i, (a, b) in enumerate(zip(widths, widths[1:])):           # norms: see modulate
            g = self.groups.get(i)
            if g and not ginr and b % g:
                raise InputError(f"groups {groups} do not divide the {b} outputs of layer {i}")
            if g and ginr:                                             # GINR's shared factor
                self.weights.append(torch.randn(g, b) / (g * a) ** 0.5)
            else:
                self.weights.append((2 * torch.rand(a, b) - 1) / b ** 0.5)
            self.biases.append(torch.zeros(b))
        self.to_weights = nn.ModuleDict({
            str(i): nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, widths[i])) for i in modulated})

    def encode(self, images, ids_keep, mask):
        """The hypernetwork (Sec. 3.2): images (B,C,H,W) of which ids_keep (B,K) are visible, where
        mask (B,L) is 0 -> the weight tokens (B,G,D) as they leave the ViT."""
        if self.encode_visible_only:
            x = self.encoder(images, ids_keep)                         # (B, 1+K+G, D)
        else:
            hidden = self.encoder.pixels_of(mask).bool()               # (B, 1, H, W)
            x = self.encoder(images.masked_fill(hidden, 0))            # (B, 1+L+G, D)
        return x[:, -len(self.encoder.extra_tokens):]                  # (B, G, D)

    def modulate(self, tokens):
        """Weight tokens (B,G,D), one modulated layer after the other -> all layers of the MLP
        (Sec. 3.2): weights, image-specific (B,a,b) or shared (a,b), and biases (b,). to_weights
        makes a column (a,) of each token. GINR multiplies these g columns by shared weights (g,b);
        TransINR repeats them, 0 ... g-1, 0 ... g-1, as factors of shared ones (item 3). At last all
        columns of weights get norm 1 (item 5)."""
        parts = dict(zip(self.groups, tokens.split([*self.groups.values()], dim=1)))
        layers = []
        for i, (W, bias) in enumerate(zip(self.weights, self.biases)):
            if i in self.groups:
                own = self.to_weights[str(i)](parts[i]).transpose(1, 2)  # (B, a, g)
                if self.hypernetwork == "ginr":                        # rank g (GINR)
                    W = own @ W                                        # (B, a, b) = (a, g) (g, b)
                else:                                                  # columns repeat (item 3)
                    W = W * own.repeat(1, 1, W.shape[1] // own.shape[2])  # (B, a, b)
            layers.append((F.normalize(W, dim=-2), bias))              # columns of norm 1, item 5
        return layers

    def decode(self, coords, layers):
        """The MLP: coordinates (N,2), the same for all images, or (B,N,2), and the layers of
        modulate -> colours (B,N,C). With (N,2), layers before the first image-specific one run only
        once. Under autocast hidden layers have its type, colours float32."""
        x = fourier_features(coords, self.ff_dim, self.ff_sigma)       # (N, a_0)
        *hidden, (W_last, bias_last) = layers
        x = x.to(W_last.dtype)
        for W, bias in hidden:
            x = x @ W                                                  # (N, b_i), then (B, N, b_i)
            x = F.relu(x + bias.to(x.dtype))
        return x @ W_last + bias_last + self.out_bias                  # (B, N, C)

    def forward(self, images, noise=None):
        """Images (B,C,H,W) in 0 ... 1 and noise (B,L; None: random) -> the loss, a float32 scalar,
        and {"loss": the same, detached}: the mean squared error of all pixels or of hidden ones. In
        training, coord_jitter and pixel_fraction draw from torch's generator, the same for all
        images."""
        ids_keep, _, mask = self.encoder.mask(images, noise, self.mask_ratio)
        layers = self.modulate(self.encode(images, ids_keep, mask))
        H, W = self.encoder.img_size
        coords = grid_coords((H, W), images.device)                    # (HW, 2)
        target = images.flatten(2).transpose(1, 2)                     # (B, HW, C)
        hidden = self.encoder.pixels_of(mask).flatten(1)               # (B, HW)
        if self.training and self.pixel_fraction < 1:
            n = math.ceil(self.pixel_fraction * len(coords))
            some = torch.randperm(len(coords), device=images.device)[:n]
            coords, target, hidden = coords[some], target[:, some], hidden[:, some]  # N = n
        if self.training and self.coord_jitter:
            row, col = (torch.rand_like(coords) - 0.5).unbind(1)       # (N,) in pixels
            coords = coords + torch.stack([row * 2 / H, col * 2 / W], dim=1)
        error = (self.decode(coords, layers).float() - target).square().mean(dim=2)  # (B, N) L2
        if self.loss_on == "all":
            loss = error.mean()                                        # paper: all pixels
        else:
            # over the expected number of hidden pixels, which is the same for each part of a batch
            loss = (error * hidden).mean() / mask.mean()
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Images (B,C,H,W) -> the same, masked and rendered at their own size, and the mask (B,L),
        1 = hidden. All pixels are rendered, nothing is copied. mask_ratio: None for the model's
        own. leak_free changes nothing, as nothing is normalised. ValueError if noise is a 0/1 mask
        of another mask_ratio."""
        return self.render_masked(images, self.encoder.img_size, noise, mask_ratio)

    @torch.no_grad()
    def render(self, images, size, noise=None, mask_ratio=None):
        """Images (B,C,H,W), masked, rendered at any size, an int or (H',W'): (B,C,H',W')."""
        return self.render_masked(images, pair(size), noise, mask_ratio)[0]

    def render_masked(self, images, size, noise, mask_ratio):
        """reconstruct at any size (H',W'), a few thousand pixels at a time, to save memory."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, _, mask = self.encoder.mask(images, noise, mask_ratio, exact=True)
        layers = self.modulate(self.encode(images, ids_keep, mask))
        colours = []
        for coords in grid_coords(size, images.device).split(4096):
            colours.append(self.decode(coords, layers).float())        # (B, N, C)
        rendered = torch.cat(colours, dim=1).transpose(1, 2)           # (B, C, H'*W')
        return rendered.unflatten(2, size), mask                       # (B, C, H', W')

    def figures(self, images):
        """{"rendered": (caption, images (rows,2,C,4H,4W))}."""
        H, W = self.encoder.img_size
        noise = self.encoder.fixed_noise(images)
        native = self.render(images, (H, W), noise)                    # (rows, C, H, W)
        large = self.render(images, (4 * H, 4 * W), noise)             # (rows, C, 4H, 4W)
        upscaled = F.interpolate(native, scale_factor=4, mode="bicubic")
        return {"rendered": ("rendered at 4 times the size, and bicubic upscaling of what is "
                             "rendered at the model's own size",
                             torch.stack([large, upscaled], dim=1))}
