"""The discrete tokenizer: a small grid of codes for each frame.

    frame -> encoder -> pre_quant (1x1) -> quantizer -> post_quant (1x1) -> decoder -> frame

Axes: B batch, H height, W width, C colors (3), K tokens of a frame (row by row over the grid), N codes, D width of a
code's vector. Frames are uint8 (..., H, W, C) outside and (B, C, H, W) in [-1, 1], channels last in memory, inside.

Sources: REM (Cohen et al. 2024, ICML, arXiv 2402.05643) with `network = "slim"`, IRIS (Micheli et al. 2023, ICLR,
arXiv 2209.00588) with `network = "residual"`; `network = "patch"` is our own, for small frames.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from wmcli.config import Section
from wmcli.errors import UsageError
from wmcli.nn import lpips
from wmcli.nn.patch_conv import PatchDecoder, PatchEncoder
from wmcli.nn.residual_conv import ResidualDecoder, ResidualEncoder
from wmcli.nn.slim_conv import SlimDecoder, SlimEncoder
from wmcli.tokenizers.measures import objects, survival
from wmcli.tokenizers.quantizers import AverageVectorQuantizer, Quantizer, ScalarQuantizer, VectorQuantizer

MAX_CODES = 1 << 16


class TokenizerSettings(Section):
    """Settings of the discrete tokenizer and of its training. The defaults are REM's published code."""

    kind: Literal["vq"] = "vq"
    """Grid of discrete codes for each frame; the other kind is categorical."""
    quantizer: Literal["vq", "vq-ema", "fsq"] = "vq"
    """Quantizer: codebook by gradient, codebook of moving averages with restarts, or finite scalar levels."""
    codes: Annotated[int, Field(ge=2, le=MAX_CODES)] = 512
    """Number of codes; with fsq the product of fsq_levels. [codes]"""
    fsq_levels: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1, strict=False)] = (8, 8, 8)
    """Levels of each channel, for fsq only. [levels]"""
    fsq_spread: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the loss that spreads fsq's features over their levels; 0 is the paper's fsq."""
    network: Literal["slim", "residual", "patch"] = "slim"
    """Encoder and decoder: slim (REM), residual with attention (IRIS), or patch for small frames, which encodes each
    patch separately."""
    channels: Annotated[int, Field(ge=1)] = 32
    """Channels of the first layer: a multiple of 8 for slim, of 32 for residual. Channels of all layers for patch.
    [channels]"""
    downsamples: Annotated[int, Field(ge=1, le=8)] = 3
    """Number of halvings of height and width; a frame has (size / 2^downsamples)^2 tokens. [halvings]"""
    width: Annotated[int, Field(ge=1)] = 256
    """Width of a code's vector; with shared embeddings it must equal the backbone's width. [features]"""
    commitment: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the commitment loss (vq and vq-ema)."""
    reconstruction: Literal["mse", "l1"] = "mse"
    """Pixel loss, a mean over frames scaled to [-1, 1]. REM's code has mse, IRIS and REM's paper l1."""
    object_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the pixel loss over pixels that differ from the batch's median frame (moving objects)."""
    perceptual: Literal["auto", "lpips", "none"] = "auto"
    """Perceptual loss. With auto it is lpips if lpips_weights is set, else none (not comparable to papers)."""
    lpips_weights: str = ""
    """Path of a safetensors file with VGG16's and LPIPS's weights, as `wm convert-lpips` writes it."""
    lpips_dropout: bool = False
    """Drop half of LPIPS's channel differences during training, as the published trainers of REM and IRIS do."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Decay of vq-ema's moving averages per update."""
    restart_below: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Threshold for restarts of vq-ema's codes, as a share of the average use of a code; 0 restarts none."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Optimizer of all parameters."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Constant learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay of all parameters, the codebook included (adamw; adam has none)."""
    clip: Annotated[float, Field(gt=0)] = 10.0
    """Largest norm of the gradient."""
    batch: Annotated[int, Field(ge=1)] = 128
    """Batch size of an update. [frames]"""
    updates: Annotated[int, Field(ge=0)] = 200
    """Updates of one call of `wm train-tokenizer`. [updates]"""

    @model_validator(mode="after")
    def _codes_are_levels(self) -> TokenizerSettings:
        product = math.prod(self.fsq_levels)
        if self.quantizer == "fsq" and product != self.codes:
            raise ValueError(
                f"fsq_levels {list(self.fsq_levels)} make {product} codes, but codes = {self.codes}; "
                f"set codes = {product}."
            )
        return self

    @property
    def lacks_lpips(self) -> bool:
        """Whether the perceptual loss is omitted because `lpips_weights` is empty."""
        return self.perceptual == "auto" and not self.lpips_weights

    def build(self, size: int) -> VQTokenizer:
        """Build a fresh tokenizer for frames of `size` pixels."""
        return VQTokenizer(self, size)


def perceptual_in_use(settings: TokenizerSettings) -> Literal["lpips", "none"]:
    """Return the perceptual loss in use.

    Raises:
        UsageError: `perceptual` is lpips and `lpips_weights` is empty.
    """
    if settings.perceptual == "lpips" and not settings.lpips_weights:
        raise UsageError(
            f"tokenizer.perceptual = 'lpips' needs tokenizer.lpips_weights, {lpips.WEIGHTS_NEEDED}; "
            "or train without it: --set tokenizer.perceptual=none"
        )
    if settings.perceptual == "none" or not settings.lpips_weights:
        return "none"
    return "lpips"


class VQTokenizer(nn.Module):
    """Encoder, quantizer and decoder for square frames of `image_size` pixels.

    `tokens` is K, `grid` (rows, columns), `codes` N and `width` D. Only vq-ema's updates and LPIPS's dropout, both
    inside `loss`, depend on training mode. Under autocast the convolutions run in bf16. The quantizer, the losses and
    the normalization of LPIPS run in float32.

    Raises:
        UsageError: Image size and downsamplings or channels are incompatible.
    """

    def __init__(self, settings: TokenizerSettings, image_size: int) -> None:
        super().__init__()
        shrink = 2**settings.downsamples
        if image_size < shrink or image_size % shrink:
            raise UsageError(
                f"frames of {image_size}x{image_size} pixels cannot be halved {settings.downsamples} times; use a size "
                f"that is a multiple of {shrink}, or fewer halvings with --set tokenizer.downsamples=..."
            )
        if settings.perceptual != "none" and settings.lpips_weights and image_size < lpips.SMALLEST_IMAGE:
            raise UsageError(
                f"LPIPS needs frames of at least {lpips.SMALLEST_IMAGE} pixels, these have {image_size}; "
                "train without it: --set tokenizer.perceptual=none"
            )
        self.settings = settings
        self.image_size = image_size
        self.grid = (image_size // shrink, image_size // shrink)
        self.tokens = self.grid[0] * self.grid[1]
        self.codes = settings.codes
        self.width = settings.width
        self.encoder, self.decoder = _networks(settings, image_size)
        self.quantizer = _quantizer(settings)
        self.pre_quant = nn.Conv2d(settings.width, self.quantizer.inputs, 1)
        self.post_quant = nn.Conv2d(settings.width, settings.width, 1)
        self.lpips: lpips.LPIPS | None = None  # loaded by the first `loss`: encoding needs no weights file

    # -- frames to tokens and back ------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Encode frames (..., H, W, C) uint8 to tokens (..., K) int64."""
        lead = observation.shape[:-3]
        h = self._features(_scaled(observation.flatten(0, -4) if lead else observation[None]))
        return self.quantizer.tokens(h).view(*lead, self.tokens)

    def codebook(self) -> Tensor:
        """Return the vector of each code, (N, D). With fsq it is the projection of each combination of levels."""
        return self.quantizer.vectors()

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the codes' vectors (..., K, D) of tokens (..., K) int64."""
        return F.embedding(tokens, self.codebook())

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens (..., K) int64 to frames (..., H, W, C) uint8."""
        lead = tokens.shape[:-1]
        image = self._image(self.embed(tokens).view(-1, self.width))
        pixels = ((image.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).contiguous().view(*lead, self.image_size, self.image_size, 3)  # -> frames

    def _features(self, x: Tensor) -> Tensor:
        """Return the inputs of the quantizer (B * K, inputs) for images (B, C, H, W)."""
        h = self.pre_quant(self.encoder(x))
        return h.permute(0, 2, 3, 1).reshape(-1, self.quantizer.inputs)

    def _image(self, vectors: Tensor) -> Tensor:
        """Return images (B, C, H, W) of vectors (B * K, D)."""
        x = vectors.view(-1, *self.grid, self.width).permute(0, 3, 1, 2)  # channels last in memory, without a copy
        return self.decoder(self.post_quant(x))

    # -- training and its measures ------------------------------------------------------------------------------------

    def loss(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of frames (B, H, W, C) uint8, and its summands by name, detached.

        The summands are `reconstruction`; `codebook` and `commitment` (vq), `commitment` (vq-ema) or `spread` (fsq);
        `perceptual` with LPIPS.

        Raises:
            UsageError: The weights of LPIPS cannot be read.
        """
        x = _scaled(observation)
        quantized = self.quantizer(self._features(x))
        image = self._image(quantized.vectors).float()
        losses = {"reconstruction": self._reconstruction(image, x, observation), **quantized.losses}
        if perceptual_in_use(self.settings) == "lpips":
            losses["perceptual"] = self._perceptual(x.device)(image, x).mean()
        total = torch.stack(list(losses.values())).sum()
        return total, {name: value.detach() for name, value in losses.items()}

    def _reconstruction(self, image: Tensor, x: Tensor, observation: Tensor) -> Tensor:
        """Return the pixel loss: (1 - share) * mean over all pixels + share * mean over object pixels.

        `image` and `x` are (B, C, H, W), `observation` (B, H, W, C) uint8.
        """
        error = (image - x).square() if self.settings.reconstruction == "mse" else (image - x).abs()
        loss = error.mean()
        share = self.settings.object_share
        if share > 0:
            mask = objects(observation).float()
            of_objects = (error.mean(1) * mask).sum() / mask.sum().clamp_min(1)
            loss = (1 - share) * loss + share * of_objects
        return loss

    def _perceptual(self, device: torch.device) -> lpips.LPIPS:
        if self.lpips is None:
            weights = lpips.read_weights(Path(self.settings.lpips_weights).expanduser())
            self.lpips = lpips.LPIPS(weights, dropout=self.settings.lpips_dropout).to(device).train(self.training)
        return self.lpips

    @torch.no_grad()
    def usage(self, observation: Tensor) -> dict[str, float]:
        """Return measures of encoding and decoding for frames (B, H, W, C) uint8.

        - codes_used: number of the N codes that occur.
        - perplexity: exp of the entropy of code frequencies, from 1 (a single code) to N (uniform use).
        - object_recall and l1: see `measures.survival`.
        """
        tokens = self.encode(observation)
        frequency = torch.bincount(tokens.flatten(), minlength=self.codes).double() / tokens.numel()
        entropy = -torch.xlogy(frequency, frequency).sum()
        return {
            "codes_used": float((frequency > 0).sum()),
            "perplexity": float(entropy.exp()),
            **survival(observation, self.decode(tokens)),
        }


def _scaled(observation: Tensor) -> Tensor:
    """Convert frames (B, H, W, C) uint8 to (B, C, H, W) float32 in [-1, 1], channels last in memory."""
    assert observation.dtype == torch.uint8 and observation.shape[-1] == 3, "frames are uint8 with three colors last"
    return observation.permute(0, 3, 1, 2).float() / 127.5 - 1


def _networks(settings: TokenizerSettings, image_size: int) -> tuple[nn.Module, nn.Module]:
    channels, downsamples, width = settings.channels, settings.downsamples, settings.width
    if settings.network == "slim":
        return SlimEncoder(channels, downsamples, width), SlimDecoder(channels, downsamples, width)
    if settings.network == "residual":
        return (
            ResidualEncoder(channels, downsamples, width, image_size),
            ResidualDecoder(channels, downsamples, width, image_size),
        )
    patch = 2**downsamples
    grid = image_size // patch
    return PatchEncoder(channels, patch, grid, width), PatchDecoder(channels, patch, grid, width)


def _quantizer(settings: TokenizerSettings) -> Quantizer:
    if settings.quantizer == "vq":
        return VectorQuantizer(settings.codes, settings.width, settings.commitment)
    if settings.quantizer == "vq-ema":
        return AverageVectorQuantizer(
            settings.codes, settings.width, settings.commitment, settings.ema_decay, settings.restart_below
        )
    return ScalarQuantizer(settings.fsq_levels, settings.width, settings.fsq_spread)
