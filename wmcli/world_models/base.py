"""What a controller may know of a world model.

Axes: B batch, T time (frames), A actions, H W C image height, width and channels.

Time convention, everywhere: `action[t]` is taken after seeing `observation[t]`; `reward[t]` and `terminated[t]` come of
it; `observation[t + 1]` is seen next. So one call of `imagine` with the action of frame t yields reward and termination
of step t and the latent of frame t + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wmcli.backbones.base import Backbone, BackboneSettings, replace_rows
from wmcli.config import Section
from wmcli.errors import UsageError

State = Any
"""What a world model carries through time. Opaque: take it from one call, give it to the next."""


class Parts(NamedTuple):
    """The parts that a world model is built from, and the sizes that its own settings do not hold."""

    size: int
    """Height and width of a frame, pixels."""
    actions: int
    """Number of actions A."""
    new_backbone: Callable[[int, int], Backbone]
    """Builds a backbone from the longest sequence in elements and the elements of a time step."""
    tokenizer_settings: Any
    tokenizer: Any
    """The tokenizer to use or to train; None where the world model takes none, or builds its own."""

    def square_backbone(self, max_length: int, block: int) -> Backbone:
        """Build a backbone whose elements are as wide as its outputs. Raises UsageError if they are not."""
        backbone = self.new_backbone(max_length, block)
        if backbone.inputs != backbone.width:
            raise UsageError(
                f"backbone.input_width = {backbone.inputs}: the elements of this dynamics model are as wide as"
                f" backbone.width = {backbone.width}; set it to 0."
            )
        return backbone


class DynamicsSettings(Section):
    """Settings of a world model, and what it needs of the parts around it.

    A new kind is a subclass in the file of its world model, and a line in `wmcli.settings`.
    """

    tokenizer_kind: ClassVar[str | None] = None
    """The kind of tokenizer that it works on; None for a model that takes none."""
    learns_policy: ClassVar[bool] = False
    """It learns a policy and a value, for a search to plan with."""
    uses_backbone: ClassVar[bool] = True
    """It is built around the backbone of the settings."""
    makes_frames: ClassVar[bool] = True
    """It decodes imagined frames."""
    reads_burn_in: ClassVar[bool] = False
    """Imagination reads all frames of a controller's burn-in, and not its own context alone."""
    scores_frames: ClassVar[bool] = False
    """Its world model has `images`, `frame_error` and `arrival_reward`, which the memory measures need."""
    predicts_cells: ClassVar[bool] = False
    """Its latents are the cells of the grid world."""
    acting_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that count when it is acted with, and not when it is trained."""

    kind: str
    """Which world model."""

    @property
    def encoder(self) -> Literal["tokenizer", "dynamics", "itself", "rules"]:
        """What turns frames into latents: a tokenizer trained before, a tokenizer that is trained with the dynamics
        model, the dynamics model itself, or fixed rules."""
        return "itself"

    @property
    def takes_tokenizer(self) -> bool:
        """Whether it works on a tokenizer that was trained before."""
        return self.encoder == "tokenizer"

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is a part of it, trained with it and published beside it."""
        return self.encoder == "dynamics"

    @property
    def learns_encoder(self) -> bool:
        """Whether latents depend on learned weights, and not on fixed rules."""
        return self.encoder != "rules"

    @property
    def learns_rewards(self) -> bool:
        """Whether rewards are predicted."""
        return True

    @property
    def longest_imagination(self) -> int | None:
        """Frames that imagination reaches at most, real ones included; None without a limit."""
        return None

    @property
    def needs_validation(self) -> bool:
        """Whether the weights to publish are selected on held-out episodes."""
        return False

    @property
    def longest_episode(self) -> int | None:
        """Frames of an episode at most, where a row of a batch holds a whole one; None without a limit."""
        return None

    def check(self, tokenizer: Any, backbone: BackboneSettings) -> None:
        """Raise ValueError if the model does not fit the settings of its tokenizer and backbone."""

    def build(self, parts: Parts) -> WorldModel:
        """Build the world model, freshly initialized."""
        raise NotImplementedError


class Imagined(NamedTuple):
    """What one imagined step brings."""

    latent: Tensor
    """The next frame's latent, (B, ...) in the model's own form."""
    reward: Tensor
    """(B,) float32."""
    terminated: Tensor
    """(B,) bool. The model may be asked to imagine on; nothing after a termination means anything."""


class Targets(NamedTuple):
    """What a search found at each frame of a batch, for a model that learns a policy and a value."""

    policy: Tensor
    """(B, T, A) float32: how often each action was taken in the search, as shares; zeros where none was made."""
    value: Tensor
    """(B, T) float32: the value of the frame by the search."""
    found: Tensor
    """(B, T) bool: False where no search was made, as in random play."""


class Prediction(NamedTuple):
    """What a model that has learned a policy and a value says of the current frame."""

    policy: Tensor
    """(B, A) float32, logits."""
    value: Tensor
    """(B,) float32, discounted reward from here on."""


class Batch(NamedTuple):
    """Segments of real experience to learn from.

    Each lies within one episode and is padded on the right to the common length, or, for a model with `across_ends`,
    has all its frames and may reach over the ends of episodes.
    """

    inputs: Tensor
    """Latents (B, T, ...) from `encode`, or frames (B, T, H, W, C) uint8 for the `loss` of a model that trains its
    encoder."""
    action: Tensor
    """(B, T) int64 in 0..A-1."""
    reward: Tensor
    """(B, T) float32, as the environment gave it."""
    terminated: Tensor
    """(B, T) bool: the task ended here."""
    truncated: Tensor
    """(B, T) bool: the episode was cut off here, for example by a time limit."""
    is_first: Tensor
    """(B, T) bool: this frame opens an episode; for a model with `across_ends`, a game."""
    valid: Tensor
    """(B, T) bool: False where the row is padding."""
    targets: Targets | None = None
    """For models that are planned in."""
    is_last: Tensor | None = None
    """(B, T) bool: this frame is the last of its game, for a model with `across_ends`; None: every frame is the last of
    its episode that `terminated` or `truncated` says."""


class WorldModel(nn.Module, ABC):
    """Learns from real experience what happens next, then stands in for the environment.

    `train()` and `eval()` switch dropout; imagine in eval mode.
    """

    settings: Any
    """The section of the settings that it was built from."""
    actions: int
    """Number of actions A."""
    frozen_encoder: bool
    """True: frames are encoded before training and no gradient reaches the encoder. False: `loss` takes frames."""
    across_ends: bool
    """True: segments may run over the end of an episode into the next one, and what is carried through time is cleared
    where a game opens: a lost life ends an episode, and its game goes on. False: it is cleared with every episode."""
    segment: int
    """Frames of a segment that `loss` learns from, padding included."""
    history: int = 0
    """So many of them, at its beginning, stand before the frame that was drawn, as far as the episode has them: padding
    on the left repeats the episode's first frame, with `valid` False."""
    rows: Literal["windows", "episodes", "streams"] = "windows"
    """Rows of a batch: any windows, whole episodes, or the next frames of streams of episodes."""
    min_segment: int = 1
    """Frames of an episode, at least, that a segment is made from; the rest is padding."""
    context: int
    """Real frames that imagination starts from."""
    min_context: int = 1
    """Frames of an episode, at least, that imagination may start from."""
    decodes: Literal["latents", "features"] | None = "latents"
    """What `decode` makes frames of: latents, or features (which tell of the past as well); None: of nothing."""
    feature_shape: tuple[int, ...]
    """Shape of what the controller sees of one frame."""
    frame_features: int | None = None
    """So many of the features, the first, tell of the frame alone and nothing of its past; None: all do."""
    memory_features: int | None = None
    """How many numbers `memory` has; None: the model has none."""
    elements: int = 1
    """Elements of the backbone that a frame and its action take; 0 without a backbone."""
    learns_rewards: bool = True
    """False: imagined rewards are all 0, so there is nothing for a controller to learn."""
    learns_from_search: bool = False
    """True: `loss` takes `Batch.targets`."""
    uniforms_per_step: int
    """Random numbers that one imagined step takes, a row."""
    uniforms_per_frame: int = 0
    """Random numbers that `observe` takes, a frame and row."""

    @property
    def remembers(self) -> int:
        """Frames before the current one that `perceive` depends on, as far as a new player must go back."""
        return 0

    def check_reads(self, frames: int) -> None:  # noqa: B027 (most read any number)
        """Check that so many frames in a row can be read.

        Raises:
            UsageError: They are more than the backbone has positions.
        """

    @abstractmethod
    def encode(self, observation: Tensor) -> Tensor:
        """Frames (B, T, H, W, C) uint8 to latents (B, T, ...)."""

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to minimize, a float32 scalar, and named scalars without gradient for the log."""

    def no_carry(self, rows: int) -> State:
        """Return what `carried_loss` takes at the beginning of streams. Only for a model that learns from streams."""
        raise NotImplementedError

    def carried_loss(self, batch: Batch, carry: State) -> tuple[Tensor, dict[str, Tensor], State]:
        """Compute `loss` of the next frames of each row's stream. Only for a model that learns from streams.

        Returns:
            The loss, the metrics, and the state to carry to the frames after these, without gradient.
        """
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return every parameter that learns, in groups for `torch.optim`, each with its `weight_decay`."""
        return parameter_groups(self, self.settings.weight_decay)

    def after_update(self) -> None:  # noqa: B027 (most models have nothing to do)
        """Called after each step of the optimizer, for what follows the weights, such as a slow copy of them."""

    @abstractmethod
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Take in real frames; imagination starts after the last of them.

        Args:
            latent: (B, T, ...), from `encode`.
            action: (B, T) int64. The last one is not used: it is `imagine` that acts on the last frame.
            reset: (B, T) bool. True forgets everything before that frame. In a window padded on the left it is True
                at the first real frame, so that the padding leaves no trace.
            uniforms: (B, T, uniforms_per_frame) uniform in [0, 1); None draws them with torch's global generator.

        Returns:
            What the controller sees of every frame, (B, T, *feature_shape), and the state at the last frame.
        """

    def over(self, batch: Batch) -> Tensor:
        """Return (B, T) bool: the model has learned nothing of what follows this frame, so nothing can be imagined."""
        return batch.terminated | batch.truncated if batch.is_last is None else batch.is_last

    @abstractmethod
    def imagine(self, state: State, action: Tensor, uniforms: Tensor | None = None) -> tuple[Imagined, State]:
        """Take `action` (B,) int64 in the current frame and draw what comes of it.

        `uniforms` (B, uniforms_per_step) in [0, 1) decide the samples: the step is a function of its arguments. None
        draws them with torch's global generator.

        To imagine again from a state is allowed, but of several continuations of one state only the newest is sure to
        stay valid: attention writes its cache in place.
        """

    def replace_rows(self, state: State, rows: Tensor, fresh: State) -> State:
        """Replace some rows of a state, so that trajectories of different age share a batch.

        On a backbone of limited length no row may be imagined past `DynamicsSettings.longest_imagination` then: the
        model does not start again from the current frame as it does for rows of one age.

        Args:
            state: B rows, from `observe`, `imagine` or this method.
            rows: (k,) int64, the rows to replace, each once.
            fresh: k rows, from `observe`.

        Returns:
            The new state. The old one may have become invalid.
        """
        return replace_rows(state, rows, fresh)

    @abstractmethod
    def features(self, state: State) -> Tensor:
        """What the controller sees of the current frame, (B, *feature_shape)."""

    def memory(self, state: State) -> Tensor:
        """All that is remembered of the frames before the current one, (B, memory_features) float32.

        Not for a model without `memory_features`.
        """
        raise NotImplementedError

    @abstractmethod
    def perceive(
        self,
        state: State | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> State:
        """Take in one real frame while acting. The states it returns all have the same tree.

        Frames perceived one by one give the features of the last, and imagination from it, that `observe` gives of the
        same frames at once, as far as `observe` looks back; unless settings of acting say otherwise (Drama's `act_on`
        and `act_window`).

        Args:
            state: what the last call gave; None at the very beginning.
            observation: (B, H, W, C) uint8.
            previous_action: (B,) int64, the action that led to this frame; not used where `reset`.
            reset: (B,) bool: this frame opens an episode; for a model with `across_ends`, a game.
            generator: on the CPU; a model that draws draws from it, None is torch's global generator.
        """

    @abstractmethod
    def latent(self, state: State) -> Tensor:
        """The current frame's latent, (B, ...)."""

    def decode(self, latent: Tensor) -> Tensor:
        """What `decodes` says, latents (..., latent axes) or features (..., *feature_shape), to frames (..., H, W, C)
        uint8.

        Not for a model without `decodes`, whose latents hold what planning needs and no picture.
        """
        raise NotImplementedError

    def images(self, features: Tensor) -> Tensor:
        """Decode features (N, F) to images (N, 3, H, W) float32. Only for a model with `scores_frames`."""
        raise NotImplementedError

    def frame_error(self, features: Tensor, frames: Tensor) -> Tensor:
        """Return squared errors (N,), summed over a frame's pixels, of decoded features. Only with `scores_frames`.

        Args:
            features: (N, F).
            frames: (N, H, W, 3) uint8, the real ones.
        """
        raise NotImplementedError

    def arrival_reward(self, features: Tensor) -> Tensor:
        """Return the rewards (...) of the steps that led to features (..., F). Only with `scores_frames`."""
        raise NotImplementedError

    def frame(self, state: State) -> Tensor:
        """The current frame (B, H, W, C) uint8, as `decode` makes it."""
        return self.decode(self.features(state) if self.decodes == "features" else self.latent(state))


class PlanningWorldModel(WorldModel):
    """A world model that learns a policy and a value as well, so that a tree search can plan in it."""

    learns_from_search = True
    discount: float
    """What a reward one step later is worth, in the value that it learns."""

    @abstractmethod
    def root(self, state: State) -> State:
        """What `perceive` or `observe` gave, as a search keeps it node by node.

        A tree (nested tuples) of nothing but tensors (B, ...). `imagine` from it gives a tree of the same shapes and
        types, so that the states of many nodes can lie in one tensor and be gathered from it in any order. It writes
        nothing in place.
        """

    def replace_rows(self, state: State, rows: Tensor, fresh: State) -> State:
        return replace_rows(self.root(state), rows, self.root(fresh))

    @abstractmethod
    def predict(self, state: State) -> Prediction:
        """Policy and value of the current frame."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters of a module into two groups for `torch.optim`: decayed by `weight_decay`, and not decayed.

    Decay applies to matrices and whatever has more axes. It spares vectors and scalars, such as biases and norms, the
    tables of `nn.Embedding`, and parameters marked with `_no_weight_decay = True`. Within a group the parameters have
    the order of `module.parameters()`.
    """
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in module.parameters():
        spared = parameter.ndim < 2 or id(parameter) in tables or getattr(parameter, "_no_weight_decay", False)
        (plain if spared else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` where `mask`, which has the same shape; 0 where it is nowhere True."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
