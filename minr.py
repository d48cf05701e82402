"""MINR: a transformer reads a masked image and predicts the weights of an MLP that renders it.

An implicit neural representation (INR) of an image is an MLP that maps a pixel's coordinates to its
colour, so it can render any resolution. Fitting an MLP to each image would be slow. Instead, a ViT,
the hypernetwork, predicts it in one pass. The ViT reads the image, with 75% of its patches set to
zero, and learned weight tokens. Its outputs at these tokens, multiplied by learned matrices that
all images share, become the modulated (instance-specific) layers. All images share the other
layers. Of our two hypernetworks, GINR (generalizable INR) modulates only the second layer, TransINR
(transformer for INRs) all. The loss is the mean squared error over all pixels, masked and visible.

Lee, Lee, Kang: MINR: Implicit Neural Representations with Masked Image Modelling (OOD-CV workshop
at ICCV 2023, arXiv 2507.22404; we had only a summary). Release: https://github.com/heosuab/MINR.
TransINR: Chen, Wang, ECCV 2022. GINR: Kim et al., CVPR 2023, https://github.com/kakaobrain/ginr-ipc

    B images, L patches, K visible, D encoder width, G weight tokens, N rendered pixels. Layer i of
    the MLP has a_i inputs and b_i outputs. In a modulated layer, g_i of the G tokens become the
    columns of U (a_i,g_i), a factor of its weights (see `modulate`)
    noise (B,L): the K patches with the lowest noise stay visible
    images (B,C,H,W) -> tokens (B,1+L+G,D), or (B,1+K+G,D) if encode_visible_only
    -> weights (a_i,b_i) or, if modulated, (B,a_i,b_i), and biases (b_i,)
    coordinates (N,2) -> MLP -> colours (B,N,C)
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from vit import Method, ViT, pair, require


def grid_coords(size, device=None):
    """Return the centres (H*W,2) of H x W cells, (row, column) in [-1, 1] (same in hypermae.py)."""
    H, W = size
    row = (2 * torch.arange(H, device=device) + 1) / H - 1             # (H,)
    col = (2 * torch.arange(W, device=device) + 1) / W - 1             # (W,)
    return torch.stack([row.repeat_interleave(W), col.repeat(H)], dim=1)  # (H*W, 2)


def fourier_features(coords, dim, sigma):
    """Turn coordinates (...,2) into features (...,2 dim): cosines, then sines, of pi f c. Each
    coordinate c (row, then column) is multiplied by dim/2 frequencies f. These form a geometric
    sequence from 1 to sigma periods per image, e.g. 1 and 8 for dim 4 and sigma 8. On raw
    coordinates, an MLP learns fine detail only slowly. Features are float32: half precision is too
    coarse for phases up to pi sigma. (Same in hypermae.py.)"""
    frequencies = torch.linspace(0, math.log(sigma), dim // 2, device=coords.device).exp()
    phase = (coords.float()[..., None] * frequencies).flatten(-2) * math.pi  # (..., dim)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)               # (..., 2 dim)


class MINR(Method):
    """`loss, metrics = model(images)`; `reconstruct` renders masked images at their own size,
    `render` at any size; `encoder` returns features. Images are in [0, 1]. Defaults follow the
    summary of the paper (below: "paper"), e.g. a grid of 14 x 14 patches (item 1). Where the
    summary gives no value, they follow the release (except for coord_jitter).

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: encoder arguments, see vit.ViT
        mask_ratio: fraction of patches to mask (paper)
        hypernetwork: how the weights of modulated layers are made (names: Sec. 3.2; formulas: see
            modulate). ginr: matrix product of predicted and shared weights. transinr: elementwise
            product of shared weights and predicted columns; the columns are repeated to fit
        modulated_layers: layers of the MLP whose weights depend on the image, counted from 0, e.g.
            0,1 (default: layer 1 for ginr, all layers for transinr; Sec. 3.2)
        mlp_depth: number of layers of the MLP (paper)
        hidden_dim: width of the MLP (release)
        groups: number of weight tokens per modulated layer, capped at its number of outputs. For
            transinr, it must divide that number (default: 256 for ginr, 64 for transinr; item 7)
        ff_dim: number of cosine features, and also of sine features (release)
        ff_sigma: highest frequency of the Fourier features, in periods per image (default: 128 for
            ginr, 1024 for transinr; release)
        out_bias: constant added to the colours (release)
        loss_on: pixels in the loss: all (paper) or masked
        coord_jitter: in training, move each coordinate at random within its pixel (item 9). Of the
            release's runs, only GINR's on Imagenette and Indoor67 do so. Without jitter, larger
            renderings show a grid
        pixel_fraction: fraction of the pixels that a training step renders (ours)
        encode_visible_only: drop masked patches instead of zeroing them, for speed (ours)
    """

    recipe = dict(  # the release's for Imagenette; the paper's summary has none (more: FLAGS.md)
        # the release crops 182 x 182 pixels at random without resizing them; `crop` resizes. After
        # 80% of the epochs, the release divides TransINR's learning rate by 10 (not implemented)
        optimizer="adam", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant",
        batch_size=32, epochs=400, warmup_epochs=0, crop=0.75, flip=True)
    # ours, for encoders narrower than base. CIFAR-10, micro, 3 seeds: masked pixels 17.63 dB, 20-NN
    # 44.8%
    small_recipe = dict(Method.small_recipe, lr=4e-3, schedule="cosine", crop=0.2)
    small_config = dict(  # 32 pixels can hold at most 16 periods
        hidden_dim=64, groups=16, ff_dim=32, ff_sigma=16.0, pixel_fraction=0.25)
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    draws_alike = True                                     # the pixels of sample_pixels

    def __init__(self, img_size=182, patch_size=13, in_chans=3, dim=768, depth=6, heads=12, *,
                 mask_ratio=0.75, hypernetwork="ginr", modulated_layers: tuple = None, mlp_depth=5,
                 hidden_dim=256, groups: int = None, ff_dim=128, ff_sigma: float = None,
                 out_bias=0.5, loss_on="all", coord_jitter=False, pixel_fraction=1.0,
                 encode_visible_only=False):
        super().__init__()
        require(hypernetwork in ("ginr", "transinr"),
                f"hypernetwork {hypernetwork} must be ginr or transinr")
        require(loss_on in ("all", "masked"), f"loss_on {loss_on} must be all or masked")
        require(0 < pixel_fraction <= 1,
                f"pixel_fraction {pixel_fraction} must be above 0 and at most 1")
        require(ff_dim >= 2 and ff_dim % 2 == 0, f"ff_dim {ff_dim} must be even and at least 2")
        if modulated_layers is None:                       # Sec. 3.2: only the second layer
            modulated_layers = [1] if hypernetwork == "ginr" else range(mlp_depth)
        if groups is None:
            groups = 256 if hypernetwork == "ginr" else 64             # items 7, 8
        if ff_sigma is None:
            ff_sigma = 128.0 if hypernetwork == "ginr" else 1024.0     # item 7
        require({*modulated_layers} and {*modulated_layers} <= {*range(mlp_depth)},
                f"modulated_layers {modulated_layers} must be layers from 0 to {mlp_depth - 1}")
        require(groups >= 1, f"groups {groups} must be at least 1")

        widths = [2 * ff_dim, *[hidden_dim] * (mlp_depth - 1), in_chans]  # a_0, b_0 = a_1, ...
        self.tokens_per_layer = {                          # {i: g_i}
            i: min(groups, widths[i + 1]) for i in sorted(modulated_layers)}
        for i, g in self.tokens_per_layer.items():
            require(hypernetwork == "ginr" or widths[i + 1] % g == 0,
                    f"groups {groups} must divide the {widths[i + 1]} outputs of layer {i}")
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, norm=False,  # item 6
                           extra_tokens=sum(self.tokens_per_layer.values()))     # the weight tokens
        nn.init.normal_(self.encoder.extra_tokens)                     # N(0, 1) (release)
        self.mask_ratio, self.hypernetwork, self.loss_on = mask_ratio, hypernetwork, loss_on
        self.ff_dim, self.ff_sigma, self.out_bias = ff_dim, ff_sigma, out_bias
        self.coord_jitter, self.pixel_fraction = coord_jitter, pixel_fraction
        self.encode_visible_only = encode_visible_only

        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()  # shared by all images
        for i, (a, b) in enumerate(zip(widths, widths[1:])):
            g = self.tokens_per_layer.get(i)
            if g and hypernetwork == "ginr":               # V in modulate, item 4
                self.weights.append(torch.randn(g, b) / (g * a) ** 0.5)        # N(0, 1/(g a))
            else:
                self.weights.append((2 * torch.rand(a, b) - 1) / b ** 0.5)     # item 8
            self.biases.append(torch.zeros(b))
        self.to_columns = nn.ModuleDict({                  # turns a weight token into a column of U
            str(i): nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, widths[i]))
            for i in self.tokens_per_layer})

    def encode(self, images, ids_keep, mask):
        """Mask and encode images (B,C,H,W) (item 2). The visible patches are ids_keep (B,K), and
        mask (B,L) is 0 there. Returns the weight tokens (B,G,D) after the last block. finetune.py
        uses them as features, because the loss reads no patch outputs of that block."""
        if self.encode_visible_only:
            tokens = self.encoder(images, ids_keep)                    # (B, 1+K+G, D)
        else:
            # 0 is black: the encoder cannot tell a masked patch from a black one
            masked = self.encoder.pixels_of(mask).bool()               # (B, 1, H, W)
            tokens = self.encoder(images.masked_fill(masked, 0))       # (B, 1+L+G, D)
        return tokens[:, -len(self.encoder.extra_tokens):]             # (B, G, D)

    def modulate(self, tokens):
        """Turn weight tokens (B,G,D), sorted by modulated layer, into a list of (W, bias) for all
        layers of the MLP (item 3). U is predicted from the image, but all images share V:

            GINR           W = U V               (B,a,b) from (B,a,g) and (g,b): rank at most g
            TransINR       W = [U U ... U] * V   (B,a,b) from (B,a,g) and (a,b), elementwise
            other layers   W = V                 (a,b)

        to_columns turns token k of a layer into column k of its U. Then every column of W, in
        all layers, is scaled to length 1 (item 5). All images share the biases (b,). The paper
        calls the modulated layers of image n theta(n), and the other layers phi."""
        counts = self.tokens_per_layer                                 # {i: g_i}
        tokens_of = dict(zip(counts, tokens.split([*counts.values()], dim=1)))
        layers = []
        for i, (V, bias) in enumerate(zip(self.weights, self.biases)):
            if i not in counts:
                W = V                                                  # (a, b)
            else:
                U = self.to_columns[str(i)](tokens_of[i]).transpose(1, 2)      # (B, a, g)
                if self.hypernetwork == "ginr":
                    W = U @ V                                          # (B, a, b)
                else:
                    W = U.repeat(1, 1, len(bias) // counts[i]) * V     # (B, a, b)
            layers.append((F.normalize(W, dim=-2), bias))
        return layers

    def decode(self, coords, layers):
        """Evaluate the MLP (paper: f_theta) with the layers from modulate. Returns colours (B,N,C),
        in float32 even under autocast. coords are (B,N,2), or (N,2) if all images share them. With
        (N,2), the layers before the first modulated one run once for all images."""
        x = fourier_features(coords, self.ff_dim, self.ff_sigma)       # (N, a_0) for shared coords
        x = x.to(layers[0][0].dtype)                       # (N, a_0) in the weights' precision
        for W, bias in layers[:-1]:
            x = x @ W                                                  # (N, b_i), then (B, N, b_i)
            x = F.relu(x + bias.to(x.dtype))   # under autocast, a float32 bias would promote x
        W, bias = layers[-1]   # (hidden_dim, C), (C,) or, if modulated, (B, hidden_dim, C), (C,)
        return x @ W + bias + self.out_bias    # (B, N, C) no ReLU after the last layer; item 5

    def sample_pixels(self, images, mask):
        """Choose pixels of images (B,C,H,W) for the loss. In training, they are a random subset:
        pixel_fraction of all pixels, the same in all images. Returns their coordinates (N,2), their
        colours (B,N,C) and their mask (B,N), 1 = masked. In training, coord_jitter moves the
        coordinates. Random numbers are from PyTorch's default generator, which train_step seeds."""
        H, W = self.encoder.img_size
        coords = grid_coords((H, W), images.device)                    # (H*W, 2)
        colours = images.flatten(2).transpose(1, 2).float()            # (B, H*W, C)
        masked = self.encoder.pixels_of(mask).flatten(1)               # (B, H*W)
        if self.training and self.pixel_fraction < 1:
            N = math.ceil(self.pixel_fraction * len(coords))
            some = torch.randperm(len(coords), device=images.device)[:N]
            # (N, 2), (B, N, C), (B, N)
            coords, colours, masked = coords[some], colours[:, some], masked[:, some]
        if self.training and self.coord_jitter:
            row, col = (torch.rand_like(coords) - 0.5).unbind(1)       # (N,) each, in pixels
            coords = coords + torch.stack([row * 2 / H, col * 2 / W], dim=1)   # (N, 2)
        return coords, colours, masked

    def forward(self, images, noise=None):
        """Return loss and metrics for images (B,C,H,W) in [0, 1]. noise (B,L) is random by default.
        The loss, a float32 scalar, is the mean squared error of all or of drawn pixels, in all or
        only in masked patches (loss_on); metrics is {"loss": the detached loss}."""
        ids_keep, _, mask = self.encoder.mask(images, noise, self.mask_ratio)  # item 2
        tokens = self.encode(images, ids_keep, mask)                   # (B, G, D)
        layers = self.modulate(tokens)
        coords, target, masked = self.sample_pixels(images, mask)      # (N, 2), (B, N, C), (B, N)
        pred = self.decode(coords, layers)                             # (B, N, C)
        error = (pred - target).square().mean(dim=2)                   # (B, N)
        if self.loss_on == "all":
            loss = error.mean()                                        # paper: L2, all pixels
        else:
            # the mean over masked pixels. We divide by the masked fraction of whole images, because
            # that of the drawn pixels differs between the pieces of a batch (--accum)
            loss = (error * masked).mean() / mask.mean()
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Mask images (B,C,H,W) and render them at their own size. Returns rendered images
        (B,C,H,W) and the mask (B,L), 1 = masked. Every pixel is rendered; none is copied. leak_free
        changes nothing, as targets are plain pixels."""
        return self.render_masked(images, self.encoder.img_size, noise, mask_ratio)

    @torch.no_grad()
    def render(self, images, size, noise=None, mask_ratio=None):
        """Mask images (B,C,H,W) and render them at a size, int or (H',W'). Returns (B,C,H',W')."""
        return self.render_masked(images, pair(size), noise, mask_ratio)[0]

    def render_masked(self, images, size, noise, mask_ratio):
        """Reconstruct images at size (H',W'), a few thousand pixels at a time to save memory."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, _, mask = self.encoder.mask(images, noise, mask_ratio)
        layers = self.modulate(self.encode(images, ids_keep, mask))
        colours = []
        for coords in grid_coords(size, images.device).split(4096):
            colours.append(self.decode(coords, layers).float())        # (B, N, C)
        rendered = torch.cat(colours, dim=1).transpose(1, 2)           # (B, C, H'*W')
        return rendered.unflatten(2, size), mask                       # (B, C, H', W'), (B, L)


# Paper and release: where they differ or are silent, and what we do. The release has two programs.
# We follow generalized-MINR for GINR and trans-MINR for TransINR. The former also has TransINR, but
# does not start: it lacks a module that it imports, and its TransINR settings lack train_dataset.
#   1. We read the paper's "14 x 14 patches" as a grid, because the release masks patches of 13 x 13
#      pixels. Our tokens are these 196 patches; the release's are 400 patches of 9 x 9 pixels. With
#      GINR's 256 weight tokens, our encoder reads 453 tokens, the release's 656.
#   2. As in the release, masked patches become zero. The release masks each patch with probability
#      0.75 (generalized-MINR's script: only in evaluation); we mask equally many in every image.
#   3. In our summary, TransINR predicts all weights; GINR has no formula. In the release, both
#      predict only a factor U of the weights (see modulate), and biases are shared. We do the same.
#   4. The release also keeps unused shared weights for modulated GINR layers; we do not.
#   5. As in the release, all layers have columns of length 1 (the release does not say why), and
#      out_bias is added to the colours.
#   6. The release's ViT has learned positions, dropout (trans-MINR: 0), LayerNorms with eps 1e-5,
#      PyTorch's default weights and, in trans-MINR, no bias in q, k and v. Ours, vit.ViT, has fixed
#      positions, a class token, eps 1e-6, Xavier weights and biases. Neither ends in a norm.
#   7. Our summary does not give hidden_dim, groups, ff_dim or ff_sigma; our values are the
#      release's. With 256 groups, GINR's layer can have full rank. At the 182 pixel centres of a
#      row, frequencies above 91 look like lower ones.
#   8. As in generalized-MINR, weights (a,b) are drawn as in nn.Linear, but transposed: the bound is
#      1/sqrt(outputs). In trans-MINR, it is 1/sqrt(inputs), and biases are uniform.
#      Columns are normalised, so the scale matters only relative to the learning rate.
#   9. `coord_jitter` draws moves per batch; generalized-MINR draws them per image.
