"""The categorical tokenizer: a frame becomes K categorical variables of C classes, and these become a frame again.

    frame -> convolutions -> linear -> K x C logits -> draw -> linear -> transposed convolutions -> frame

A frame's *latent* is the distribution itself, probabilities (..., K, C) float32: whoever needs a draw draws, each time
anew. A drawn latent is the same thing with all the probability on one class, so both kinds share every function here.

B batch, H height, W width, 3 colors, F length of the encoder's output. Frames are uint8 (..., H, W, 3) outside and
(B, 3, H, W) in [0, 1] inside.

Source: Drama (Wang et al. 2024, table 5 and its public code), STORM (Zhang et al. 2023, arXiv 2310.09615). Usually the
dynamics model trains it jointly; its own `loss` fits it by reconstruction alone.
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
from wmcli.nn.strided_conv import Norm, Stack, StridedDecoder, StridedEncoder
from wmcli.tokenizers.measures import survival

Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, strict=False)]

CENTRE = 0.5  # the gray that Dreamer's networks take for zero


class CategoricalTokenizerSettings(Section):
    """The categorical tokenizer, and how it is fitted by reconstruction alone. The defaults are Drama's (XS)."""

    lacks_lpips: ClassVar[bool] = False
    """See `TokenizerSettings.lacks_lpips`: there is no perceptual loss."""

    kind: Literal["categorical"] = "categorical"
    """A frame becomes categorical variables, trained together with the dynamics model; the other kind is vq."""
    categoricals: int = Field(32, ge=1)
    """Number of variables K."""
    classes: int = Field(32, ge=2)
    """Classes of each variable C."""
    unimix: float = Field(0.01, ge=0, lt=1)
    """Share of the uniform distribution in every distribution over the variables, the predicted ones included."""
    channels: Sizes = (16, 32, 48, 64, 64)
    """Output channels of the encoder's convolutions; the decoder mirrors them."""
    strides: Sizes = (1, 2, 2, 2, 2)
    """By how much each convolution shrinks the frame."""
    kernel: int = Field(5, ge=2)
    """Side of every convolution's kernel (pixels)."""
    bias: bool = True
    """Whether convolutions and the decoder's linear layer have a bias."""
    norm: Norm = "batch"
    """After each convolution: "batch" statistics, or "rms" or "layer" norm over the channels of each pixel."""
    norm_eps: float = Field(0.0, ge=0)
    """Of the norms over channels, those of the posterior's hidden layers included; 0 keeps each kind's own."""
    activation: Activation = "silu"
    """After each norm."""
    output: Literal["sigmoid", "linear", "centered"] = "sigmoid"
    """What the decoder's last convolution goes through; "centered": pixels are between -0.5 and 0.5 for encoder and
    decoder (DreamerV3), otherwise between 0 and 1."""
    posterior_layers: int = Field(0, ge=0)
    """Hidden layers between the encoder and the latent, each without bias, LayerNorm, activation (Dreamer: 1)."""
    posterior_width: int = Field(512, ge=1)
    """Width of those."""
    initialization: Literal["fan-average", "torch"] = "fan-average"
    """First weights: truncated normal by the mean of a layer's inputs and outputs, biases 0 (Dreamer, Drama), or
    torch's defaults (STORM), which a posterior without hidden layers always has."""
    optimizer: Literal["laprop", "adamw", "adam"] = "laprop"
    """Of `wm train-tokenizer`, like all that follows; joint training has its own under dynamics."""
    learning_rate: float = Field(1e-4, gt=0)
    """Step size of the optimizer."""
    warmup: int = Field(100, ge=0)
    """Updates over which the step size rises to it (laprop)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of all parameters; adam has none."""
    clip: float = Field(1000.0, gt=0)
    """Largest norm of the gradient."""
    batch: int = Field(256, ge=1)
    """Frames in an update."""
    updates: int = Field(500, ge=0)
    """Updates that one call of the stage makes."""

    @model_validator(mode="after")
    def _layers_fit(self) -> CategoricalTokenizerSettings:
        if len(self.channels) != len(self.strides):
            raise ValueError(
                f"channels {list(self.channels)} and strides {list(self.strides)} must be equally many: one of each a"
                " layer."
            )
        if self.kernel % 2 == 0 and 1 in self.strides:
            raise ValueError(
                f"kernel = {self.kernel} is even and cannot keep a frame's size: stride 1 needs an odd one."
            )
        return self

    @property
    def stack(self) -> Stack:
        """The convolutions."""
        return Stack(
            self.channels,
            self.strides,
            self.kernel,
            self.bias,
            self.norm,
            self.activation,
            self.norm_eps,
            self.initialization,
        )

    def build(self, size: int) -> CategoricalTokenizer:
        """Build a fresh tokenizer for frames of `size` pixels."""
        return CategoricalTokenizer(self, size)


class CategoricalTokenizer(nn.Module):
    """Encoder, posterior and decoder for square frames of `image_size` pixels.

    `shape` is (K, C), `features` F. A world model may have its posterior read vectors of `posterior_inputs` numbers in
    place of the encoder's output, and its decoder `past` more numbers than the latent. Batch statistics depend on
    training mode. Convolutions follow autocast; distributions and losses are float32. Raises UsageError when the
    strides do not divide the image.
    """

    posterior_head: nn.Module

    def __init__(
        self,
        settings: CategoricalTokenizerSettings,
        image_size: int,
        *,
        posterior_inputs: int | None = None,
        past: int = 0,
    ) -> None:
        super().__init__()
        s = self.settings = settings
        self.image_size = image_size
        self.shape = (s.categoricals, s.classes)
        stack = s.stack
        latent = s.categoricals * s.classes
        self.features = stack.features(image_size)
        self.encoder = StridedEncoder(stack)
        inputs = posterior_inputs or self.features
        if s.posterior_layers:
            self.posterior_head = mlp(
                inputs,
                s.posterior_width,
                s.posterior_layers,
                latent,
                norm_kind="layer",
                activation=s.activation,
                eps=s.norm_eps,
            )
            initialize(self.posterior_head, s.initialization)
        else:
            self.posterior_head = nn.Linear(inputs, latent)
        self.decoder = StridedDecoder(latent + past, stack, image_size)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logits (..., K * C) of this or a predicting head to log-probabilities (..., K, C)."""
        return mixed_log_probabilities(logits.unflatten(-1, self.shape), self.settings.unimix)

    def embed(self, observation: Tensor) -> Tensor:
        """Frames (..., H, W, 3) uint8 to what the encoder makes of them, (..., F), with gradient."""
        lead = observation.shape[:-3]
        pixels = self._pixels(observation.flatten(0, -4) if lead else observation[None])
        return self.encoder(pixels).view(*lead, self.features)

    def _pixels(self, observation: Tensor) -> Tensor:
        """Frames (B, H, W, 3) uint8 as the encoder reads and the decoder should make them, (B, 3, H, W) float32."""
        image = scaled(observation)
        return image.sub_(CENTRE) if self.settings.output == "centered" else image

    def posterior_of(self, features: Tensor) -> Tensor:
        """What the posterior reads, (..., F) or (..., posterior_inputs), to log-probabilities (..., K, C)."""
        return self.log_probabilities(self.posterior_head(features))

    def posterior(self, observation: Tensor) -> Tensor:
        """Frames (..., H, W, 3) uint8 to log-probabilities (..., K, C) of their latents, with gradient."""
        return self.posterior_of(self.embed(observation))

    def reconstruct(self, z: Tensor, past: Tensor | None = None) -> Tensor:
        """Drawn latents (B, K, C), and where the decoder reads it the past (B, past), to images (B, 3, H, W) float32,
        with gradient; certainly in [0, 1] after a sigmoid only."""
        image = self._decoded(z, past).float()
        return image + CENTRE if self.settings.output == "centered" else image

    def _decoded(self, z: Tensor, past: Tensor | None) -> Tensor:
        """`reconstruct` in the decoder's own range and precision."""
        read = z.flatten(-2)
        image = self.decoder(read if past is None else torch.cat((read, past.to(read.dtype)), -1))
        return image.float().sigmoid() if self.settings.output == "sigmoid" else image

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Frames (..., H, W, 3) uint8 to latents: probabilities (..., K, C) float32."""
        return self.posterior(observation).exp()

    @torch.no_grad()
    def decode(self, latent: Tensor, past: Tensor | None = None) -> Tensor:
        """Latents (..., K, C), and the past (..., past), to frames (..., H, W, 3) uint8, each variable at its likeliest
        class."""
        lead = latent.shape[:-2]
        likeliest = one_hot(latent.argmax(-1), latent.shape[-1], latent.dtype)
        image = self.reconstruct(likeliest.view(-1, *self.shape), None if past is None else past.flatten(0, -2))
        pixels = (image * 255).round().clamp(0, 255).to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).reshape(*lead, self.image_size, self.image_size, 3)

    def reconstruction_error(self, z: Tensor, past: Tensor | None, observation: Tensor) -> Tensor:
        """Squared error summed over pixels and colors, (B,) float32: what `reconstruct` makes of drawn latents and the
        past, against frames (B, H, W, 3) uint8. With gradient, for one backward pass."""
        return squared_error(self._decoded(z, past), self._pixels(observation))

    # -- fitting by reconstruction, and its measures ------------------------------------------------------------------

    def loss(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """uint8 (B, H, W, 3) to the loss to minimize and metrics: `reconstruction`, summed over a frame's pixels."""
        log_posterior = self.posterior(observation)
        loss = self.reconstruction_error(straight_through(log_posterior.exp()), None, observation).mean()
        return loss, {"reconstruction": loss.detach(), "posterior_entropy": entropy(log_posterior).mean().detach()}

    @torch.no_grad()
    def usage(self, observation: Tensor) -> dict[str, float]:
        """How well uint8 (B, H, W, 3) survives: see `measures.survival`. And `posterior_entropy`, nats a frame."""
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
        (difference,) = ctx.saved_tensors  # torch refuses it once it has been written
        return difference.mul_((-2 * grad).view(-1, *[1] * (difference.ndim - 1))).to(ctx.dtype), None
