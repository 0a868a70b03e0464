"""The categorical tokenizer: K categorical variables of C classes for each frame.

    images -> convolutions -+                                  +-> linear -> transposed convolutions -> images
                            +-> linear -> K x C logits -> draw +
    others -> MLP ----------+                                  +-> MLP -> others

A frame is an observation of any parts. Each image has networks of its own. All vectors and categories share one MLP in
and one out (`wmcli.nn.vector_nets`). A frame's *latent* is the distribution itself, probabilities (..., K, C) float32.
Callers draw samples from it. A sample is a latent with all its probability on one class, so both share every function
here. Usually the dynamics model trains the tokenizer jointly. Its own `loss` trains it by reconstruction alone.

Axes: B batch, H height, W width, C colors of an image, F length of the encoders' outputs. A frame's parts are
(..., *part). Images are uint8 (..., H, W, C) outside and (B, C, H, W) in [0, 1] inside.

Sources: Drama (Wang et al. 2024, table 5 and its public code), STORM (Zhang et al. 2023, arXiv 2310.09615); for vectors
and categories DreamerV3 (Hafner et al. 2023, arXiv 2301.04104).
"""

from __future__ import annotations

from functools import partial, reduce
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
from wmcli.nn.vector_nets import (
    DenseStack,
    VectorDecoder,
    VectorEncoder,
    read_vectors,
    vector_loss,
    vector_value,
)
from wmcli.spaces import (
    SEPARATOR,
    Image,
    ObservationSpace,
    Vector,
    first_part,
    images_of,
    join_parts,
    map_parts,
    parts_of,
    to_observation_space,
)
from wmcli.tokenizers.measures import object_weights, relative_error, survival

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
    mlp_layers: int = Field(3, ge=1)
    """Hidden layers of the MLP that reads vectors and categories, and of the one that predicts them. They have the norm
    after convolutions, or RMSNorm in place of batch statistics. [layers]"""
    mlp_width: int = Field(256, ge=1)
    """Width of the two MLPs (DreamerV3: 256 in size 12m, 1024 in size 200m). [features]"""
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
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""
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

    @property
    def dense(self) -> DenseStack:
        """The hidden layers of the MLPs for vectors and categories."""
        kind = "rms" if self.norm == "batch" else self.norm
        return DenseStack(self.mlp_layers, self.mlp_width, kind, self.activation, self.norm_eps, self.initialization)

    def features(self, observation_space: ObservationSpace | int) -> int:
        """Return the length of the encoders' outputs for a frame, F."""
        space = to_observation_space(observation_space)
        images = images_of(space)
        has_others = len(images) < len(parts_of(space))
        return sum(self.stack.features(image) for image in images.values()) + has_others * self.mlp_width

    def build(self, observation_space: ObservationSpace) -> CategoricalTokenizer:
        """Build a fresh tokenizer for what the environment shows."""
        return CategoricalTokenizer(self, observation_space)


class CategoricalTokenizer(nn.Module):
    """Encoders, posterior and decoders for observations of any parts.

    Batch statistics depend on training mode. Networks follow autocast; distributions and losses are float32. `shape` is
    (K, C), `features` F. Networks of an image are `encoder` and `decoder`, of further ones `encoder_1` and so on.

    Args:
        settings: Settings of the tokenizer.
        observation_space: What the environment shows, or the side of square images in three colors. [pixels]
        posterior_inputs: Width of the posterior's inputs; None for the encoders' outputs.
        past: Additional inputs of the decoders besides the latent.

    Raises:
        UsageError: The strides do not divide an image.
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
        self.observation_space = to_observation_space(observation_space)
        self.shape = (s.categoricals, s.classes)
        self.features = s.features(self.observation_space)
        images, latent = images_of(self.observation_space), s.categoricals * s.classes
        vectors = {name: part for name, part in parts_of(self.observation_space).items() if name not in images}
        self._images, self._vectors = tuple(images), vectors
        for index, image in enumerate(images.values()):
            encoder = (PooledEncoder if s.network == "pooled" else StridedEncoder)(s.stack, image.channels)
            self.add_module(_numbered("encoder", index), encoder)
        if vectors:
            self.vector_encoder = VectorEncoder(tuple(vectors.values()), s.dense)
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
        for index, image in enumerate(images.values()):
            if s.network == "pooled":
                decoder: nn.Module = PooledDecoder(
                    latent, past, s.stack, image, blocks=s.decoder_blocks, width=s.decoder_width
                )
            else:
                decoder = StridedDecoder(latent + past, s.stack, image)
            self.add_module(_numbered("decoder", index), decoder)
        if vectors:
            self.vector_decoder = VectorDecoder(latent + past, tuple(vectors.values()), s.dense)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log-probabilities (..., K, C) of logits (..., K * C), of this or a predicting head."""
        return mixed_log_probabilities(logits.unflatten(-1, self.shape), self.settings.unimix)

    def embed(self, observation: Any, frames_at_once: int = 0) -> Tensor:
        """Return the encoders' outputs (..., F) for frames (..., *part), those of images first, with gradient.

        With `frames_at_once` that many frames are encoded at a time, see `in_parts`.
        """
        lead, parts = self._rows(observation)
        outputs = [
            in_parts(partial(self._embed_image, index), frames_at_once, parts[name])
            for index, name in enumerate(self._images)
        ]
        if self._vectors:
            numbers = read_vectors(tuple(self._vectors.values()), [parts[name] for name in self._vectors])
            outputs.append(in_parts(self.vector_encoder, frames_at_once, numbers))
        features = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return features.view(*lead, self.features)

    def _rows(self, observation: Any) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Return the leading axes of frames (..., *part), and the parts (B, *part) by name."""
        spaces, parts = parts_of(self.observation_space), parts_of(observation)
        first = first_part(self.observation_space)
        part = parts[next(iter(spaces))]
        lead = part.shape[: part.ndim - len(first.shape)]
        return lead, {name: parts[name].reshape(-1, *space.shape) for name, space in spaces.items()}

    def _embed_image(self, index: int, frames: Tensor) -> Tensor:
        return getattr(self, _numbered("encoder", index))(self._pixels(frames))

    def _pixels(self, frames: Tensor) -> Tensor:
        """Convert images (B, H, W, C) uint8 to the range of encoder and decoder, (B, C, H, W) float32."""
        image = scaled(frames)
        return image.sub_(CENTER) if self.settings.output == "centered" else image

    def posterior_of(self, features: Tensor) -> Tensor:
        """Return log-probabilities (..., K, C) of the posterior's inputs, (..., F) or (..., posterior_inputs)."""
        return self.log_probabilities(self.posterior_head(features))

    def posterior(self, observation: Any) -> Tensor:
        """Return log-probabilities (..., K, C) of the latents of frames (..., *part), with gradient."""
        return self.posterior_of(self.embed(observation))

    def reconstruct(self, z: Tensor, past: Tensor | None = None) -> Any:
        """Decode samples of latents, with gradient except of categories.

        Args:
            z: (B, K, C).
            past: The decoders' additional inputs (B, past), if any.

        Returns:
            The parts of frames: images (B, C, H, W) float32, of which only the sigmoid guarantees the range [0, 1],
                vectors (B, N) float32 and categories (B, K) int64.
        """
        parts: dict[str, Tensor] = {}
        for index, name in enumerate(self._images):
            image = self._decoded(index, z, past).float()
            parts[name] = image + CENTER if self.settings.output == "centered" else image
        if self._vectors:
            outputs = self.vector_decoder(_joined(z, past))
            values = map(vector_value, self._vectors.values(), outputs)
            parts |= dict(zip(self._vectors, values, strict=True))
        return join_parts({name: parts[name] for name in parts_of(self.observation_space)})

    def _decoded(self, index: int, z: Tensor, past: Tensor | None) -> Tensor:
        """Decode image number `index` as `reconstruct` does, in the decoder's own range and precision."""
        image = getattr(self, _numbered("decoder", index))(_joined(z, past))
        return image.float().sigmoid() if self.settings.output == "sigmoid" else image

    @torch.no_grad()
    def encode(self, observation: Any) -> Tensor:
        """Encode frames (..., *part) to latents: probabilities (..., K, C) float32."""
        return self.posterior(observation).exp()

    @torch.no_grad()
    def decode(self, latent: Tensor, past: Tensor | None = None) -> Any:
        """Decode each variable's most probable class to frames (..., *part).

        Args:
            latent: (..., K, C).
            past: The decoders' additional inputs (..., past), if any.
        """
        lead = latent.shape[:-2]
        likeliest = one_hot(latent.argmax(-1), latent.shape[-1], latent.dtype)
        decoded = self.reconstruct(likeliest.view(-1, *self.shape), None if past is None else past.flatten(0, -2))

        def to_part(space: Any, part: Tensor) -> Tensor:
            if isinstance(space, Image):
                part = (part * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
            return part.reshape(*lead, *space.shape)

        return map_parts(to_part, self.observation_space, decoded)

    def reconstruction_error(self, z: Tensor, past: Tensor | None, observation: Any) -> Tensor:
        """Return the sum of `reconstruction_losses` (B,) without the weights of pixels."""
        return summed(self._losses(z, past, observation, 0, 0.0))

    def reconstruction_losses(
        self, z: Tensor, past: Tensor | None, observation: Any, frames_at_once: int = 0
    ) -> dict[str, Tensor]:
        """Return the loss of each part by name, (B,) float32, with a gradient for one backward pass.

        It is the squared error summed over an image's pixels and colors, weighed by `object_share`, or that of
        `vector_loss`.

        Args:
            z: Samples of latents, (B, K, C).
            past: The decoders' additional inputs (B, past), if any.
            observation: Frames (B, *part).
            frames_at_once: So many frames are decoded at a time, see `in_parts`.
        """
        return self._losses(z, past, observation, frames_at_once, self.settings.object_share)

    def _losses(
        self, z: Tensor, past: Tensor | None, observation: Any, frames_at_once: int, share: float
    ) -> dict[str, Tensor]:
        parts, losses = parts_of(observation), dict[str, Tensor]()
        for index, name in enumerate(self._images):
            root = object_weights(parts[name], share).sqrt_()[:, None] if share else None
            losses[name] = in_parts(partial(self._image_error, index), frames_at_once, z, past, parts[name], root)
        if self._vectors:
            targets = [parts[name] for name in self._vectors]
            each = in_parts(self._vector_errors, frames_at_once, z, past, *targets)
            losses |= dict(zip(self._vectors, each.unbind(-1), strict=True))
        return losses

    def _image_error(self, index: int, z: Tensor, past: Tensor | None, frames: Tensor, root: Tensor | None) -> Tensor:
        image, target = self._decoded(index, z, past), self._pixels(frames)
        return squared_error(image, target) if root is None else squared_error(image * root, target.mul_(root))

    def _vector_errors(self, z: Tensor, past: Tensor | None, *targets: Tensor) -> Tensor:
        """Return the losses (B, parts) of vectors and categories."""
        outputs = self.vector_decoder(_joined(z, past))
        return torch.stack(list(map(vector_loss, self._vectors.values(), outputs, targets)), -1)

    # -- training by reconstruction, and its measures -----------------------------------------------------------------

    def loss(self, observation: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of frames (B, *part) and its metrics.

        `reconstruction` is the sum of `reconstruction_losses`. Of several parts there is `reconstruction.NAME` each.
        """
        log_posterior = self.posterior(observation)
        losses = self.reconstruction_losses(straight_through(log_posterior.exp()), None, observation)
        loss = summed(losses).mean()
        metrics = {"reconstruction": loss} | of_parts("reconstruction", {n: each.mean() for n, each in losses.items()})
        metrics["posterior_entropy"] = entropy(log_posterior).mean()
        return loss, {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def usage(self, observation: Any) -> dict[str, float]:
        """Return measures of encoding and decoding for frames (B, *part); the names of several parts follow a dot.

        - object_recall and l1, of an image: see `measures.survival`.
        - relative_error, of a vector: see `measures.relative_error`.
        - accuracy, of categories: share of them that are reconstructed.
        - posterior_entropy of the latents, in nats per frame.
        """
        latent = self.encode(observation)
        nats = float(torch.special.entr(latent).sum((-2, -1)).mean())
        real, decoded = parts_of(observation), parts_of(self.decode(draw_one_hot(latent)))
        found: dict[str, float] = {}
        for name, space in parts_of(self.observation_space).items():
            if isinstance(space, Image):
                measures = survival(real[name], decoded[name])
            elif isinstance(space, Vector):
                measures = {"relative_error": relative_error(real[name], decoded[name])}
            else:
                measures = {"accuracy": float((real[name] == decoded[name]).float().mean())}
            found |= {f"{key}{SEPARATOR}{name}" if name else key: value for key, value in measures.items()}
        return found | {"posterior_entropy": nats}


def summed(losses: dict[str, Tensor]) -> Tensor:
    """Return the sum of the losses of parts."""
    return reduce(torch.add, losses.values())


def of_parts(metric: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a metric of several parts as `metric.NAME`; of one part nothing, since it is the whole."""
    return {f"{metric}{SEPARATOR}{name}": value for name, value in values.items()} if len(values) > 1 else {}


def _numbered(module: str, index: int) -> str:
    return f"{module}_{index}" if index else module


def _joined(z: Tensor, past: Tensor | None) -> Tensor:
    """Return the inputs of decoders, of latents (B, K, C) and pasts."""
    inputs = z.flatten(-2)
    return inputs if past is None else torch.cat((inputs, past.to(inputs.dtype)), -1)


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
