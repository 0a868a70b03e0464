"""The discrete tokenizer: a small grid of codes for each image, and a code for each number of other parts.

    image -> encoder -> pre_quant (1x1) -> quantizer -> post_quant (1x1) -> decoder -> image

The tokens of an observation are those of its parts, one part behind the other. All parts have one vocabulary: first the
codes of images, then the bins of vectors, then the values of categories. Images of one shape share network and codes,
and all vectors share their bins.

Axes: B batch, H height, W width, C colors, K tokens of a frame (of an image row by row over the grid), N codes, D width
of a code's vector. Images are uint8 (..., H, W, C) outside and (B, C, H, W) in [-1, 1] inside, channels last in memory.

Sources: REM (Cohen et al. 2024, ICML, arXiv 2402.05643) with `network = "slim"`, IRIS (Micheli et al. 2023, ICLR,
arXiv 2209.00588) with `network = "residual"`; `network = "patch"` is our own, for small frames. Vectors and categories:
Simulus (Cohen et al. 2025, arXiv 2502.11537).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from wmcli import ranks
from wmcli.config import Section
from wmcli.errors import UsageError
from wmcli.nn import lpips
from wmcli.nn.patch_conv import PatchDecoder, PatchEncoder
from wmcli.nn.residual_conv import ResidualDecoder, ResidualEncoder
from wmcli.nn.slim_conv import SlimDecoder, SlimEncoder
from wmcli.spaces import (
    SEPARATOR,
    Categories,
    Image,
    ObservationSpace,
    Vector,
    images_of,
    join_parts,
    parts_of,
    to_observation_space,
)
from wmcli.tokenizers.fixed import CategoryCodes, VectorCodes
from wmcli.tokenizers.measures import objects, survival
from wmcli.tokenizers.quantizers import (
    AverageVectorQuantizer,
    Quantized,
    Quantizer,
    ScalarQuantizer,
    VectorQuantizer,
)

MAX_CODES = 1 << 16


class TokenizerSettings(Section):
    """Settings of the discrete tokenizer and of its training. The defaults are REM's published code."""

    kind: Literal["vq"] = "vq"
    """Discrete codes for each frame; the other kind is categorical."""
    quantizer: Literal["vq", "vq-ema", "fsq"] = "vq"
    """Quantizer: codebook by gradient, codebook of moving averages with restarts, or finite scalar levels."""
    codes: Annotated[int, Field(ge=2, le=MAX_CODES)] = 512
    """Number of codes of images; with fsq the product of fsq_levels. [codes]"""
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
    vector_bins: Annotated[int, Field(ge=5)] = 125
    """Codes for the numbers of vectors, a multiple of 4 plus 1: bins in symlog space from -402 to 402, dense up to pi.
    [codes]"""
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
    skip_gradients_above: Annotated[float, Field(ge=0)] = 0.0
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""
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
        if self.vector_bins % 4 != 1:
            raise ValueError(
                f"vector_bins = {self.vector_bins} must be a multiple of 4 plus 1; "
                f"set vector_bins = {self.vector_bins // 4 * 4 + 1}."
            )
        return self

    @property
    def lacks_lpips(self) -> bool:
        """Whether the perceptual loss is omitted because `lpips_weights` is empty."""
        return self.perceptual == "auto" and not self.lpips_weights

    def build(self, observation: ObservationSpace | int) -> VQTokenizer:
        """Build a fresh tokenizer for such observations."""
        return VQTokenizer(self, observation)


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


class ImageCodes(nn.Module):
    """Encoder, quantizer and decoder for images of one shape.

    Raises:
        UsageError: Shape of the images and downsamplings or channels are incompatible.
    """

    def __init__(self, settings: TokenizerSettings, space: Image) -> None:
        super().__init__()
        shrink = 2**settings.downsamples
        if space.height % shrink or space.width % shrink:
            raise UsageError(
                f"frames of {space.height}x{space.width} pixels cannot be halved {settings.downsamples} times; use a "
                f"size that is a multiple of {shrink}, or fewer halvings with --set tokenizer.downsamples=..."
            )
        self.shape = space.shape
        self.grid = (space.height // shrink, space.width // shrink)
        self.tokens, self.codes, self.width = self.grid[0] * self.grid[1], settings.codes, settings.width
        self.feature_count = self.tokens * self.width
        self.ranges = ((0, self.codes),) * self.tokens
        self.encoder, self.decoder = _networks(settings, space, self.grid)
        self.quantizer = _quantizer(settings)
        self.pre_quant = nn.Conv2d(settings.width, self.quantizer.inputs, 1)
        self.post_quant = nn.Conv2d(settings.width, settings.width, 1)

    def encode(self, part: Tensor) -> Tensor:
        """Encode images (..., H, W, C) uint8 as codes (..., K) int64."""
        lead = part.shape[:-3]
        h = self.inputs(self.scaled(part.flatten(0, -4) if lead else part[None]))
        return self.quantizer.tokens(h).view(*lead, self.tokens)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes (..., K) int64 to images (..., H, W, C) uint8."""
        lead = codes.shape[:-1]
        image = self.image(self.vectors(codes).view(-1, self.width))
        pixels = ((image.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).contiguous().view(*lead, *self.shape)

    def features(self, codes: Tensor) -> Tensor:
        """Return the vectors of codes (..., K), one behind the other, (..., K * D) float32."""
        return self.vectors(codes).float().flatten(-2)

    def vectors(self, codes: Tensor) -> Tensor:
        """Return the vectors (..., K, D) of codes (..., K)."""
        return F.embedding(codes, self.quantizer.vectors())

    def scaled(self, part: Tensor) -> Tensor:
        """Convert images (B, H, W, C) uint8 to (B, C, H, W) float32 in [-1, 1], channels last in memory."""
        assert part.dtype == torch.uint8 and part.shape[1:] == self.shape, f"images are uint8 {self.shape}"
        return part.permute(0, 3, 1, 2).float() / 127.5 - 1

    def inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the quantizer (B * K, inputs) for images (B, C, H, W)."""
        h = self.pre_quant(self.encoder(x))
        return h.permute(0, 2, 3, 1).reshape(-1, self.quantizer.inputs)

    def image(self, vectors: Tensor) -> Tensor:
        """Return images (B, C, H, W) of vectors (B * K, D)."""
        x = vectors.view(-1, *self.grid, self.width).permute(0, 3, 1, 2)  # channels last in memory, without a copy
        return self.decoder(self.post_quant(x))

    def forward(self, x: Tensor) -> tuple[Tensor, Quantized]:
        """Return the reconstruction (B, C, H, W) float32 of images (B, C, H, W), and its quantized vectors."""
        quantized = self.quantizer(self.inputs(x))
        return self.image(quantized.vectors).float(), quantized


Codes = ImageCodes | VectorCodes | CategoryCodes


class TokenPart(NamedTuple):
    """The tokens of one part of an observation."""

    name: str
    """Name of the part."""
    codes: Codes
    """Encodes the part. Its codes count from 0."""
    first: int
    """Number of its code 0 in the common vocabulary."""
    places: slice
    """Places of its tokens among the K of a frame."""

    def key(self, metric: str) -> str:
        """Return the name of a metric of this part."""
        return f"{metric}{SEPARATOR}{self.name}" if self.name else metric

    def own(self, tokens: Tensor) -> Tensor:
        """Return this part's codes, from 0, of tokens (..., K)."""
        return tokens[..., self.places] - self.first


class VQTokenizer(nn.Module):
    """Encodes observations as tokens, and decodes them.

    Only vq-ema's updates and LPIPS's dropout, both inside `loss`, depend on training mode. Under autocast the
    convolutions run in bf16. The quantizer, the losses and the normalization of LPIPS run in float32. Without images
    there are no parameters and there is nothing to learn.

    Args:
        settings: The section of the settings.
        observation: What the environment shows. A number is the side of square images in three colors.

    Raises:
        UsageError: Shape of the images and downsamplings, channels or LPIPS are incompatible.
    """

    observation_space: ObservationSpace
    """What the environment shows."""
    tokens: int
    """K, tokens of a frame."""
    codes: int
    """N, codes of all parts together."""
    image_codes: int
    """Number of codes of images. They are the first."""
    ranges: tuple[tuple[int, int], ...]
    """For each of the K tokens the first of its codes and the one behind the last."""
    width: int
    """D, length of the vector of an image's code."""
    grid: tuple[int, int] | None
    """(h, w), shape of the grid of tokens if the observation is one image, else None."""
    feature_shape: tuple[int, ...]
    """Shape of a frame's `features`: (D, h, w) if the observation is one image, else (F,)."""

    def __init__(self, settings: TokenizerSettings, observation: ObservationSpace | int) -> None:
        super().__init__()
        self.settings = settings
        self.observation_space = to_observation_space(observation)
        self.parts = self._build_parts()
        _check_lpips(settings, self.observation_space)
        self.tokens = self.parts[-1].places.stop
        self.codes = max(part.first + part.codes.codes for part in self.parts)
        self.image_codes = sum(images.codes for images in self._images())
        self.ranges = tuple(
            (part.first + start, part.first + stop) for part in self.parts for start, stop in part.codes.ranges
        )
        self.width = settings.width
        first = self.parts[0].codes
        self.grid = first.grid if isinstance(first, ImageCodes) and len(self.parts) == 1 else None
        flat = sum(part.codes.feature_count for part in self.parts)
        self.feature_shape = (flat,) if self.grid is None else (self.width, *self.grid)
        self.lpips: lpips.LPIPS | None = None  # loaded by the first `loss`: encoding needs no weights file

    def _build_parts(self) -> tuple[TokenPart, ...]:
        """Build the codes of all parts, and number codes and tokens.

        The modules of the first images are the tokenizer's own, so that their names do not depend on other parts.
        """
        spaces, networks, codes = parts_of(self.observation_space), dict[Image, ImageCodes](), dict[str, Codes]()
        for index, (name, space) in enumerate(spaces.items()):
            if isinstance(space, Image):
                if space not in networks:
                    networks[space] = ImageCodes(self.settings, space)
                codes[name] = networks[space]
            else:
                fixed = (
                    VectorCodes(space, self.settings.vector_bins) if isinstance(space, Vector) else CategoryCodes(space)
                )
                codes[name] = fixed
                self.add_module(f"part_{index}", fixed)
        for index, network in enumerate(networks.values()):
            for name, child in {f"images_{index}": network}.items() if index else network.named_children():
                self.add_module(name, child)

        sharing = [[name for name, space in spaces.items() if space == image] for image in networks]
        sharing += [[name for name, space in spaces.items() if isinstance(space, Vector)]]
        sharing += [[name] for name, space in spaces.items() if isinstance(space, Categories)]
        first, count = dict[str, int](), 0
        for group in filter(None, sharing):
            first |= dict.fromkeys(group, count)
            count += codes[group[0]].codes
        parts, place = [], 0
        for name in spaces:
            end = place + codes[name].tokens
            parts.append(TokenPart(name, codes[name], first[name], slice(place, end)))
            place = end
        return tuple(parts)

    def _images(self) -> list[ImageCodes]:
        """Return the networks of images."""
        return list({id(part.codes): part.codes for part in self.parts if isinstance(part.codes, ImageCodes)}.values())

    # -- observations to tokens and back ------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Any) -> Tensor:
        """Encode observations (..., *part) to tokens (..., K) int64."""
        seen = parts_of(observation)
        return torch.cat([part.codes.encode(seen[part.name]) + part.first for part in self.parts], -1)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Any:
        """Decode tokens (..., K) int64 to observations (..., *part)."""
        return join_parts({part.name: part.codes.decode(part.own(tokens)) for part in self.parts})

    def codebook(self) -> Tensor:
        """Return the vectors of the codes of images, (image_codes, D). With fsq they are projections of the levels."""
        vectors = [images.quantizer.vectors() for images in self._images()]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the codes' vectors (..., D) of tokens (...) int64 of images."""
        return F.embedding(tokens, self.codebook())

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """Return the features (..., *feature_shape) float32 of tokens (..., K).

        Of one image they are the codes' vectors on the grid. Else they are flat, part by part: vectors of an image's
        codes, symlog of a vector's numbers, categories one-hot.
        """
        if self.grid is not None:
            return self.embed(tokens).float().transpose(-1, -2).unflatten(-1, self.grid)
        return torch.cat([part.codes.features(part.own(tokens)) for part in self.parts], -1)

    # -- training and its measures ------------------------------------------------------------------------------------

    def loss(self, observation: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of observations (B, *part), and its summands by name, detached.

        The summands of an image are `reconstruction`; `codebook` and `commitment` (vq), `commitment` (vq-ema) or
        `spread` (fsq); `perceptual` with LPIPS. The name of a part follows behind a dot. There is an image.

        Raises:
            UsageError: The weights of LPIPS cannot be read.
        """
        losses: dict[str, Tensor] = {}
        for part in self.parts:
            if isinstance(part.codes, ImageCodes):
                of_part = self._image_losses(part.codes, parts_of(observation)[part.name])
                losses |= {part.key(name): loss for name, loss in of_part.items()}
        total = torch.stack(list(losses.values())).sum()
        return total, {name: value.detach() for name, value in losses.items()}

    def _image_losses(self, images: ImageCodes, observation: Tensor) -> dict[str, Tensor]:
        """Return the summands of the loss of images (B, H, W, C) uint8."""
        x = images.scaled(observation)
        image, quantized = images(x)
        losses = {"reconstruction": self._reconstruction(image, x, observation), **quantized.losses}
        if perceptual_in_use(self.settings) == "lpips":
            losses["perceptual"] = self._perceptual(x.device)(image, x).mean()
        return losses

    def _reconstruction(self, image: Tensor, x: Tensor, observation: Tensor) -> Tensor:
        """Return the pixel loss: (1 - share) * mean over all pixels + share * mean over object pixels.

        `image` and `x` are (B, C, H, W), `observation` (B, H, W, C) uint8.
        """
        error = (image - x).square() if self.settings.reconstruction == "mse" else (image - x).abs()
        loss = error.mean()
        share = self.settings.object_share
        if share > 0:
            mask = objects(observation).float()
            of_objects = (error.mean(1) * mask).sum() / ranks.per_rank(mask.sum(), least=1)
            loss = (1 - share) * loss + share * of_objects
        return loss

    def _perceptual(self, device: torch.device) -> lpips.LPIPS:
        if self.lpips is None:
            weights = lpips.read_weights(Path(self.settings.lpips_weights).expanduser())
            self.lpips = lpips.LPIPS(weights, dropout=self.settings.lpips_dropout).to(device).train(self.training)
        return self.lpips

    @torch.no_grad()
    def usage(self, observation: Any) -> dict[str, float]:
        """Return measures of encoding and decoding for observations (B, *part), for each part as in `loss`.

        - codes_used: number of the part's codes that occur.
        - perplexity: exp of the entropy of code frequencies, from 1 (a single code) to their number (uniform use).
        - object_recall and l1, of an image: see `measures.survival`.
        - l1, of a vector: mean absolute error.
        """
        tokens = self.encode(observation)
        seen, decoded = parts_of(observation), parts_of(self.decode(tokens))
        usage: dict[str, float] = {}
        for part in self.parts:
            codes = part.own(tokens)
            frequency = torch.bincount(codes.flatten(), minlength=part.codes.codes).double() / codes.numel()
            entropy = -torch.xlogy(frequency, frequency).sum()
            measures = {"codes_used": float((frequency > 0).sum()), "perplexity": float(entropy.exp())}
            if isinstance(part.codes, ImageCodes):
                measures |= survival(seen[part.name], decoded[part.name])
            elif isinstance(part.codes, VectorCodes):
                measures["l1"] = float((seen[part.name] - decoded[part.name]).abs().mean())
            usage |= {part.key(name): value for name, value in measures.items()}
        return usage


def _check_lpips(settings: TokenizerSettings, observation: ObservationSpace) -> None:
    """Raise UsageError if the perceptual loss is wanted of images that it does not take."""
    if settings.perceptual == "none" or not settings.lpips_weights:
        return
    for image in images_of(observation).values():
        if min(image.height, image.width) < lpips.SMALLEST_IMAGE or image.channels != 3:
            raise UsageError(
                f"LPIPS needs frames of at least {lpips.SMALLEST_IMAGE} pixels in three colors, these have"
                f" {image.height}x{image.width} in {image.channels}; train without it:"
                " --set tokenizer.perceptual=none"
            )


def _networks(settings: TokenizerSettings, space: Image, grid: tuple[int, int]) -> tuple[nn.Module, nn.Module]:
    channels, downsamples, width, colors = settings.channels, settings.downsamples, settings.width, space.channels
    if settings.network == "slim":
        return SlimEncoder(channels, downsamples, width, colors), SlimDecoder(channels, downsamples, width, colors)
    if settings.network == "residual":
        return (
            ResidualEncoder(channels, downsamples, width, space.height, colors),
            ResidualDecoder(channels, downsamples, width, space.height, colors),
        )
    patch = 2**downsamples
    return PatchEncoder(channels, patch, grid, width, colors), PatchDecoder(channels, patch, grid, width, colors)


def _quantizer(settings: TokenizerSettings) -> Quantizer:
    if settings.quantizer == "vq":
        return VectorQuantizer(settings.codes, settings.width, settings.commitment)
    if settings.quantizer == "vq-ema":
        return AverageVectorQuantizer(
            settings.codes, settings.width, settings.commitment, settings.ema_decay, settings.restart_below
        )
    return ScalarQuantizer(settings.fsq_levels, settings.width, settings.fsq_spread)
