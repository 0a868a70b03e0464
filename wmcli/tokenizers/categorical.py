"""The categorical tokenizer: K categorical variables of C classes for each frame.

    frame -> convolutions -> linear -> K x C logits -> draw -> linear -> transposed convolutions -> frame

A frame's *latent* is the distribution itself, probabilities (..., K, C) float32. Callers draw samples from it. A sample
is a latent with all its probability on one class, so both share every function here. Usually the dynamics model trains
the tokenizer jointly. Its own `loss` trains it by reconstruction alone.

Axes: B batch, H height, W width, 3 colors, F length of the encoder's output. Frames are uint8 (..., H, W, 3) outside
and (B, 3, H, W) in [0, 1] inside.

Sources: Drama (Wang et al. 2024, table 5 and its public code), STORM (Zhang et al. 2023, arXiv 2310.09615).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wmcli.config import Section
from wmcli.nn.categorical import draw_one_hot, entropy, mixed_log_probabilities, one_hot, straight_through
from wmcli.nn.initialize import initialize
from wmcli.nn.layers import scaled
from wmcli.nn.mlp import Activation, mlp
from wmcli.nn.parts import in_parts
from wmcli.nn.pooled_conv import PooledDecoder, PooledEncoder
from wmcli.nn.strided_conv import ConvStack, Norm, StridedDecoder, StridedEncoder
from wmcli.spaces import Image, ObservationSpace, to_observation_space
from wmcli.tokenizers.measures import object_weights, survival

Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False)]

CENTER = 0.5  # pixel value that is zero for Dreamer's networks


class CategoricalTokenizerSettings(Section):
    """Settings of the categorical tokenizer and of its training by reconstruction. The defaults are Drama's (XS)."""

    lacks_lpips: ClassVar[bool] = False
    """See `TokenizerSettings.lacks_lpips`: this tokenizer has no perceptual loss."""

    kind: Literal["categorical"] = "categorical"
    """Categorical variables, trained together with the dynamics model; the other kind is vq."""
    categoricals: int = Field(32, ge=1)
    """Number of categorical variables K. [variables]"""
    classes: int = Field(32, ge=2)
    """Classes C of each variable. [classes]"""
    unimix: float = Field(0.01, ge=0, lt=1)
    """Share of the uniform distribution in each posterior and predicted distribution."""
    network: Literal["strided", "pooled"] = "strided"
    """Convolutions with strides and their transposes; or, pooled, convolutions with max-pools, nearest neighbors in the
    decoder, which reads the past in blocks and needs dynamics.decoder_reads = "state" (DreamerV3)."""
    decoder_blocks: int = Field(8, ge=1)
    """Blocks of the past that a pooled decoder's first layer reads. [blocks]"""
    decoder_width: int = Field(512, ge=1)
    """Hidden width of a pooled decoder's network on the latent. [features]"""
    channels: Sizes = (16, 32, 48, 64, 64)
    """Output channels of the encoder's convolutions; the decoder mirrors them. [channels]"""
    strides: Sizes = (1, 2, 2, 2, 2)
    """Stride of each convolution. [pixels]"""
    kernel: int = Field(5, ge=2)
    """Side of each convolution's kernel. [pixels]"""
    bias: bool = True
    """Use biases in the convolutions and the decoder's linear layer."""
    norm: Norm = "batch"
    """Norm after each convolution: over the batch, or RMSNorm or LayerNorm over the channels of each pixel."""
    norm_eps: float = Field(0.0, ge=0)
    """Constant of the norms over channels and in the posterior's hidden layers; 0 is each norm's default."""
    activation: Activation = "silu"
    """Activation after each norm."""
    output: Literal["sigmoid", "linear", "centered"] = "sigmoid"
    """Output of the decoder. With centered, pixels of encoder and decoder are in [-0.5, 0.5] (DreamerV3), else in
    [0, 1]."""
    object_share: float = Field(0.0, ge=0, lt=1)
    """Share of the squared error over pixels that differ from the batch's median frame (moving objects). Without it
    small objects may be lost."""
    posterior_layers: int = Field(0, ge=0)
    """Hidden layers of the posterior, each with norm and activation (Dreamer: 1). [layers]"""
    posterior_width: int = Field(512, ge=1)
    """Width of the posterior's hidden layers. [features]"""
    posterior_norm: Literal["layer", "rms"] = "layer"
    """Norm of the posterior's hidden layers: "layer", without bias (Dreamer), or "rms", with bias (DreamerV3)."""
    initialization: Literal["fan-average", "fan-in", "torch"] = "fan-average"
    """Initialization: truncated normal by the average fan (Dreamer, Drama) or by the inputs (DreamerV3), or torch's
    defaults (STORM). A posterior without hidden layers always has torch's."""
    optimizer: Literal["laprop", "adamw", "adam"] = "laprop"
    """Optimizer of `wm train-tokenizer`; joint training has its own under dynamics."""
    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of `wm train-tokenizer`."""
    warmup: int = Field(100, ge=0)
    """Linear warmup of the learning rate (laprop). [updates]"""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of all parameters; adam has none."""
    clip: float = Field(1000.0, gt=0)
    """Largest norm of the gradient."""
    batch: int = Field(256, ge=1)
    """Batch size of an update. [frames]"""
    updates: int = Field(500, ge=0)
    """Updates of one call of `wm train-tokenizer`. [updates]"""

    @model_validator(mode="after")
    def _layers_fit(self) -> CategoricalTokenizerSettings:
        if len(self.channels) != len(self.strides):
            raise ValueError(
                f"channels {list(self.channels)} and strides {list(self.strides)} must have the same length: one of"
                " each per layer."
            )
        if self.kernel % 2 == 0 and 1 in self.strides:
            raise ValueError(
                f"kernel = {self.kernel} is even and cannot keep a frame's size: stride 1 needs an odd one."
            )
        return self

    @property
    def stack(self) -> ConvStack:
        """The encoder's convolutions."""
        return ConvStack(
            self.channels,
            self.strides,
            self.kernel,
            self.bias,
            self.norm,
            self.activation,
            self.norm_eps,
            self.initialization,
        )

    def build(self, observation_space: ObservationSpace) -> CategoricalTokenizer:
        """Build a fresh tokenizer for what the environment shows."""
        return CategoricalTokenizer(self, observation_space)


class CategoricalTokenizer(nn.Module):
    """Encoder, posterior and decoder for square frames of `image_size` pixels.

    Batch statistics depend on training mode. Convolutions follow autocast; distributions and losses are float32.
    `shape` is (K, C), `features` F.

    Args:
        settings: Settings of the tokenizer.
        observation_space: Square images in three colors, or their side. [pixels]
        posterior_inputs: Width of the posterior's inputs; None for the encoder's output.
        past: Additional inputs of the decoder besides the latent.

    Raises:
        UsageError: The strides do not divide the image.
    """

    posterior_head: nn.Module

    def __init__(
        self,
        settings: CategoricalTokenizerSettings,
        observation_space: ObservationSpace | int,
        *,
        posterior_inputs: int | None = None,
        past: int = 0,
    ) -> None:
        super().__init__()
        s = self.settings = settings
        space = to_observation_space(observation_space)
        assert isinstance(space, Image) and space == Image(space.height, space.height), space
        self.image_size = image_size = space.height
        self.shape = (s.categoricals, s.classes)
        stack = s.stack
        latent = s.categoricals * s.classes
        self.features = stack.features(image_size)
        self.encoder = (PooledEncoder if s.network == "pooled" else StridedEncoder)(stack)
        inputs = posterior_inputs or self.features
        if s.posterior_layers:
            self.posterior_head = mlp(
                inputs,
                s.posterior_width,
                s.posterior_layers,
                latent,
                norm_kind=s.posterior_norm,
                activation=s.activation,
                eps=s.norm_eps,
            )
            initialize(self.posterior_head, s.initialization)
        else:
            self.posterior_head = nn.Linear(inputs, latent)
        if s.network == "pooled":
            self.decoder: nn.Module = PooledDecoder(
                latent, past, stack, image_size, blocks=s.decoder_blocks, width=s.decoder_width
            )
        else:
            self.decoder = StridedDecoder(latent + past, stack, image_size)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log-probabilities (..., K, C) of logits (..., K * C), of this or a predicting head."""
        return mixed_log_probabilities(logits.unflatten(-1, self.shape), self.settings.unimix)

    def embed(self, observation: Tensor, frames_at_once: int = 0) -> Tensor:
        """Return the encoder's output (..., F) for frames (..., H, W, 3) uint8, with gradient.

        With `frames_at_once` that many frames are encoded at a time, see `in_parts`.
        """
        lead = observation.shape[:-3]
        frames = observation.flatten(0, -4) if lead else observation[None]
        return in_parts(self._embed, frames_at_once, frames).view(*lead, self.features)

    def _embed(self, frames: Tensor) -> Tensor:
        return self.encoder(self._pixels(frames))

    def _pixels(self, observation: Tensor) -> Tensor:
        """Convert frames (B, H, W, 3) uint8 to the range of encoder and decoder, (B, 3, H, W) float32."""
        image = scaled(observation)
        return image.sub_(CENTER) if self.settings.output == "centered" else image

    def posterior_of(self, features: Tensor) -> Tensor:
        """Return log-probabilities (..., K, C) of the posterior's inputs, (..., F) or (..., posterior_inputs)."""
        return self.log_probabilities(self.posterior_head(features))

    def posterior(self, observation: Tensor) -> Tensor:
        """Return log-probabilities (..., K, C) of the latents of frames (..., H, W, 3) uint8, with gradient."""
        return self.posterior_of(self.embed(observation))

    def reconstruct(self, z: Tensor, past: Tensor | None = None) -> Tensor:
        """Decode samples of latents, with gradient.

        Args:
            z: (B, K, C).
            past: The decoder's additional inputs (B, past), if any.

        Returns:
            Images (B, 3, H, W) float32. Only the sigmoid guarantees the range [0, 1].
        """
        image = self._decoded(z, past).float()
        return image + CENTER if self.settings.output == "centered" else image

    def _decoded(self, z: Tensor, past: Tensor | None) -> Tensor:
        """Decode as `reconstruct` does, in the decoder's own range and precision."""
        inputs = z.flatten(-2)
        image = self.decoder(inputs if past is None else torch.cat((inputs, past.to(inputs.dtype)), -1))
        return image.float().sigmoid() if self.settings.output == "sigmoid" else image

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Encode frames (..., H, W, 3) uint8 to latents: probabilities (..., K, C) float32."""
        return self.posterior(observation).exp()

    @torch.no_grad()
    def decode(self, latent: Tensor, past: Tensor | None = None) -> Tensor:
        """Decode each variable's most probable class to frames (..., H, W, 3) uint8.

        Args:
            latent: (..., K, C).
            past: The decoder's additional inputs (..., past), if any.
        """
        lead = latent.shape[:-2]
        likeliest = one_hot(latent.argmax(-1), latent.shape[-1], latent.dtype)
        image = self.reconstruct(likeliest.view(-1, *self.shape), None if past is None else past.flatten(0, -2))
        pixels = (image * 255).round().clamp(0, 255).to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).reshape(*lead, self.image_size, self.image_size, 3)

    def reconstruction_error(self, z: Tensor, past: Tensor | None, observation: Tensor) -> Tensor:
        """Return the squared error of `reconstruct`, summed over pixels and colors, (B,) float32.

        It has a gradient for one backward pass.

        Args:
            z: Samples of latents, (B, K, C).
            past: The decoder's additional inputs (B, past), if any.
            observation: Frames (B, H, W, 3) uint8.
        """
        return squared_error(self._decoded(z, past), self._pixels(observation))

    def reconstruction_loss(
        self, z: Tensor, past: Tensor | None, observation: Tensor, frames_at_once: int = 0
    ) -> Tensor:
        """Return `reconstruction_error` with the pixels weighed by `object_share`, (B,) float32.

        With `frames_at_once` that many frames are decoded at a time, see `in_parts`.
        """
        share = self.settings.object_share
        root = object_weights(observation, share).sqrt_()[:, None] if share else None
        return in_parts(self._weighed_error, frames_at_once, z, past, observation, root)

    def _weighed_error(self, z: Tensor, past: Tensor | None, observation: Tensor, root: Tensor | None) -> Tensor:
        if root is None:
            return self.reconstruction_error(z, past, observation)
        return squared_error(self._decoded(z, past) * root, self._pixels(observation).mul_(root))

    # -- training by reconstruction, and its measures -----------------------------------------------------------------

    def loss(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of frames (B, H, W, 3) uint8 and its metrics; `reconstruction` is summed over pixels."""
        log_posterior = self.posterior(observation)
        loss = self.reconstruction_loss(straight_through(log_posterior.exp()), None, observation).mean()
        return loss, {"reconstruction": loss.detach(), "posterior_entropy": entropy(log_posterior).mean().detach()}

    @torch.no_grad()
    def usage(self, observation: Tensor) -> dict[str, float]:
        """Return `measures.survival` of frames (B, H, W, 3) uint8, and their `posterior_entropy` in nats per frame."""
        latent = self.encode(observation)
        nats = float(torch.special.entr(latent).sum((-2, -1)).mean())
        return survival(observation, self.decode(draw_one_hot(latent))) | {"posterior_entropy": nats}


def squared_error(image: Tensor, target: Tensor) -> Tensor:
    """Return the squared error summed over each image, (B,), with few passes over the pixels.

    On a CPU, passes are most of the cost of a small decoder.

    Args:
        image: (B, ...).
        target: The same shape, of a precision no lower. The difference overwrites it; only one backward pass is
            possible.
    """
    return _SquaredError.apply(image, target)


class _SquaredError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target.sub_(image))
        ctx.dtype = image.dtype
        return torch.linalg.vector_norm(target, dim=tuple(range(1, target.ndim))).square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors  # raises in a second backward pass, because the first wrote to it
        return difference.mul_((-2 * grad).view(-1, *[1] * (difference.ndim - 1))).to(ctx.dtype), None
