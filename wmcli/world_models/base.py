"""The interface of world models to controllers, trainers and stages.

Axes: B batch, T time (frames), A length of an encoded action, H W C image height, width and channels.

An observation is a tree of parts, see `wmcli.spaces`: one tensor (B, T, *part), or a dict of such tensors. What is said
of frames (B, T, H, W, C) holds for each part with its own axes. An action has the axes of its space behind (B, T): none
for `Discrete`, one for `Categories` (int64) and `Continuous` (float32, -1 to 1).

Time convention, everywhere: `action[t]` is taken after `observation[t]`. `reward[t]` and `terminated[t]` result from
it. `observation[t + 1]` follows. One call of `imagine` with the action of frame t therefore yields reward and
termination of step t and the latent of frame t + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wmcli import ranks
from wmcli.backbones.base import Backbone, BackboneSettings, map_state, replace_rows
from wmcli.config import Section
from wmcli.errors import UsageError
from wmcli.nn.policies import Policy
from wmcli.spaces import ActionSpace, Image, ObservationSpace

State = Any
"""The state that a world model carries through time. Opaque to callers, who pass it from one call to the next."""


class Parts(NamedTuple):
    """The parts that a world model is built from, and the sizes that its own settings do not hold."""

    observation_space: ObservationSpace
    """What the environment shows."""
    action_space: ActionSpace
    """How it is acted on."""
    new_backbone: Callable[[int, int], Backbone]
    """Builds a backbone from the longest sequence in elements and the elements of a time step."""
    tokenizer_settings: Any
    """The section of the tokenizer that the world model trains itself; else unused."""
    tokenizer: Any
    """The tokenizer to use or to train; None for a world model without a tokenizer, or with one that it builds itself.
    """
    frames_at_once: int = 0
    """Frames that are encoded and decoded at a time in training; 0 for all."""

    def image_size(self, kind: str) -> int:
        """Return the side of the images, for a model that takes square images in three colors alone.

        Raises:
            UsageError: The environment shows something else.
        """
        match self.observation_space:
            case Image(height, width, 3) if height == width:
                return height
        raise UsageError(
            f"dynamics.kind = '{kind}' takes square images in three colors, and this environment shows something else:"
            " choose another kind, as in --set dynamics.kind=latent"
        )

    def square_backbone(self, max_length: int, block: int) -> Backbone:
        """Build a backbone whose elements are as wide as its outputs.

        Raises:
            UsageError: The two widths differ.
        """
        backbone = self.new_backbone(max_length, block)
        if backbone.inputs != backbone.width:
            raise UsageError(
                f"backbone.input_width = {backbone.inputs}: the elements of this dynamics model are as wide as"
                f" backbone.width = {backbone.width}; set it to 0."
            )
        return backbone


class DynamicsSettings(Section):
    """Settings of a world model, and its requirements on the other parts.

    A new kind is a subclass in the file of its world model, and a line in `wmcli.settings`.
    """

    tokenizer_kind: ClassVar[str | None] = None
    """Kind of the tokenizer that it works on; None for a model without a tokenizer."""
    learns_policy: ClassVar[bool] = False
    """True: it learns a policy and a value for a search to plan with."""
    uses_backbone: ClassVar[bool] = True
    """True: it is built around the backbone of the settings."""
    makes_frames: ClassVar[bool] = True
    """True: it decodes imagined frames."""
    reads_burn_in: ClassVar[bool] = False
    """True: imagination reads all frames of a controller's burn-in. False: only its own context."""
    scores_frames: ClassVar[bool] = False
    """Its world model has `images`, `frame_error` and `arrival_reward`, which the memory measures need."""
    predicts_cells: ClassVar[bool] = False
    """Its latents are the cells of the grid world."""
    learns_in_parts: ClassVar[bool] = False
    """It follows `training.frames_at_once`."""
    acting_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that matter when the model acts, and not when it is trained."""

    kind: str
    """Kind of the world model."""

    @property
    def encoder(self) -> Literal["tokenizer", "dynamics", "itself", "rules"]:
        """Source of the latents.

        "tokenizer" is one trained before, "dynamics" one trained together with the dynamics model. "itself" is the
        dynamics model, "rules" are fixed rules.
        """
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
        """Whether latents depend on learned weights rather than on fixed rules."""
        return self.encoder != "rules"

    @property
    def learns_rewards(self) -> bool:
        """Whether rewards are predicted."""
        return True

    @property
    def longest_imagination(self) -> int | None:
        """Largest number of frames that imagination reaches, real ones included; None without a limit."""
        return None

    @property
    def needs_validation(self) -> bool:
        """Whether held-out episodes select the weights to publish."""
        return False

    @property
    def reads_closing(self) -> bool:
        """Whether it learns from the observation that closes an episode."""
        return False

    @property
    def longest_episode(self) -> int | None:
        """Largest number of frames of an episode if each row of a batch holds a whole one; None without a limit."""
        return None

    def check(self, tokenizer: Any, backbone: BackboneSettings) -> None:
        """Raise ValueError if the model does not fit the settings of its tokenizer and backbone."""

    def build(self, parts: Parts) -> WorldModel:
        """Build the world model, freshly initialized."""
        raise NotImplementedError


class ImaginedStep(NamedTuple):
    """The result of one imagined step."""

    latent: Tensor
    """Latent of the next frame, (B, ...) in the model's own form."""
    reward: Tensor
    """(B,) float32."""
    terminated: Tensor
    """(B,) bool. Imagination may continue after a termination, but the results have no meaning."""
    disagreement: Tensor | None = None
    """(B,) float32, of the model's ensemble on the next frame; None without one."""
    continuation: Tensor | None = None
    """(B,) float32, probability that the task goes on after the step; None from a model that does not tell it."""
    prior: Tensor | None = None
    """(B, K, C): logits of the K variables of the next latent, which it was drawn from; None from a model that draws
    none. They have no gradient."""


class Elements(NamedTuple):
    """What a model's backbone reads of windows without a past: T time steps of n elements each."""

    read: Tensor
    """(B, T n, D). Of several elements the last of a step is its action."""
    queries: Tensor | None = None
    """(Q, D): what is asked behind every step but the last, in the places of the next one's first Q elements; None for
    a model that asks nothing."""


class Targets(NamedTuple):
    """Results of a search at each frame of a batch, for a model that learns a policy and a value."""

    policy: Tensor
    """(B, T, A) float32: share of the search's visits to each action, or each sampled one; zeros without a search."""
    value: Tensor
    """(B, T) float32: value of the frame according to the search."""
    is_searched: Tensor
    """(B, T) bool: False without a search, as in random play."""
    sampled: Tensor | None = None
    """(B, T, A, ...): the actions that the shares belong to, where a search chose among samples."""


class Prediction(NamedTuple):
    """Policy and value of the current frame, from a model that has learned them."""

    policy: Tensor
    """(B, P) float32: logits, or the outputs that `PlanningWorldModel.distribution` gives meaning to."""
    value: Tensor
    """(B,) float32, discounted reward from here on."""


class Batch(NamedTuple):
    """Segments of real experience to learn from.

    Each lies within one episode and is padded on the right to the common length. For a model with `across_ends` it has
    no padding and may span several episodes.
    """

    inputs: Tensor
    """Latents (B, T, ...) from `encode`, or frames (B, T, H, W, C) uint8 for a model whose `loss` trains its encoder.
    """
    action: Tensor
    """(B, T, ...): int64, or float32 where actions are continuous."""
    reward: Tensor
    """(B, T) float32, as given by the environment."""
    terminated: Tensor
    """(B, T) bool: the task ended here."""
    truncated: Tensor
    """(B, T) bool: the episode was cut off here, for example by a time limit."""
    is_first: Tensor
    """(B, T) bool: this frame opens an episode; for a model with `across_ends`, a game."""
    valid: Tensor
    """(B, T) bool: False where the row is padding."""
    targets: Targets | None = None
    """Search results, for models with `learns_from_search`."""
    is_last: Tensor | None = None
    """(B, T) bool: this frame is the last of its game, for a model with `across_ends`. None: `terminated` and
    `truncated` mark the last frames."""
    weight: Tensor | None = None
    """(B, T) float32: weight of a row in the loss, the same in all its frames; over time so that it is cut like the
    rest. None weighs all rows alike. The gradient with respect to it is what each row contributes to the loss."""
    is_closing: Tensor | None = None
    """(B, T) bool: this observation closes an episode. No action was taken in it, so its `action` and `reward` mean
    nothing; `terminated` and `truncated` repeat those of the row before. None: the batch has no such rows."""


def part_of(batch: Batch, span: slice) -> Batch:
    """Return the frames `span` of every row."""
    return map_state(lambda each: each[:, span], batch)


class WorldModel(nn.Module, ABC):
    """A model of the environment, learned from real experience, that replaces the environment in imagination.

    `train()` and `eval()` switch dropout; imagination needs eval mode.
    """

    settings: Any
    """The section of the settings that it was built from."""
    observation_space: ObservationSpace
    """What the environment shows."""
    action_space: ActionSpace
    """How it is acted on."""
    frozen_encoder: bool
    """True: frames are encoded before training and the encoder gets no gradient. False: `loss` takes frames."""
    across_ends: bool
    """Whether segments may run over the end of an episode into the next one.

    True: the state is cleared where a game opens. A lost life ends an episode but not its game. False: the state is
    cleared with every episode.
    """
    segment: int
    """Frames of a segment that `loss` learns from, padding included."""
    history: int = 0
    """Frames of a segment before the sampled one, as far as the episode has them.

    Padding on the left repeats the episode's first frame, with `valid` False.
    """
    rows: Literal["windows", "episodes", "streams"] = "windows"
    """Rows of a batch: arbitrary windows, whole episodes, or the next frames of streams of episodes."""
    min_segment: int = 1
    """Smallest number of an episode's frames in a segment; the rest is padding."""
    context: int
    """Real frames that imagination starts from."""
    min_context: int = 1
    """Smallest number of an episode's frames that imagination may start from."""
    decodes: Literal["latents", "features"] | None = "latents"
    """Input of `decode`: latents, or features, which depend on the past as well. None: it decodes nothing."""
    feature_shape: tuple[int, ...]
    """Shape of the features of one frame, the controller's input."""
    frame_features: int | None = None
    """Number of leading features that depend on the frame alone and not on its past; None: all of them."""
    memory_features: int | None = None
    """Length of `memory`; None for a model without it."""
    elements: int = 1
    """Elements of the backbone for a frame and its action; 0 without a backbone."""
    learns_rewards: bool = True
    """False: imagined rewards are all 0, so a controller cannot learn."""
    has_ensemble: bool = False
    """True: imagined steps have a `disagreement`."""
    learns_from_search: bool = False
    """True: `loss` takes `Batch.targets`."""
    differentiable: bool = False
    """True: rewards and features of `imagine` have a gradient with respect to the actions, where it is enabled."""
    starts_anywhere: bool = False
    """True: it has `observe_each`."""
    uniforms_per_step: int
    """Random numbers of one imagined step, per row."""
    uniforms_per_frame: int = 0
    """Random numbers of `observe`, per frame and row."""

    @property
    def lookback(self) -> int:
        """Frames before the current one that `perceive` depends on and a new player must read again."""
        return 0

    def check_reads(self, frames: int) -> None:  # noqa: B027 (most read any number)
        """Check that `frames` frames in a row can be read.

        Raises:
            UsageError: The backbone has fewer positions.
        """

    @abstractmethod
    def encode(self, observation: Tensor) -> Tensor:
        """Encode frames (B, T, H, W, C) uint8 as latents (B, T, ...)."""

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss to minimize, a float32 scalar, and named scalars without gradient for the log."""

    def elements_of(self, latent: Tensor, action: Tensor) -> Elements:
        """Return what the backbone reads of windows of real frames. Not for a model without a backbone.

        Args:
            latent: (B, T, ...), from `encode`. Random latents are drawn with torch's global generator.
            action: (B, T, ...).
        """
        raise NotImplementedError

    def learned_reward(self, reward: Tensor) -> Tensor:
        """Return what the model learns and imagines of real rewards (...), float32: the rewards themselves."""
        return reward

    def initial_carry(self, rows: int) -> State:
        """Return the carry of `carried_loss` at the beginning of streams. Only for a model that learns from streams."""
        raise NotImplementedError

    def carried_loss(self, batch: Batch, carry: State) -> tuple[Tensor, dict[str, Tensor], State]:
        """Compute `loss` of the next frames of each row's stream. Only for a model that learns from streams.

        Returns:
            The loss, the metrics, and the carry to the frames after these, without gradient.
        """
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return all learned parameters in groups for `torch.optim`, each with its `weight_decay`."""
        return parameter_groups(self, self.settings.weight_decay)

    def after_update(self) -> None:  # noqa: B027 (most models have nothing to do)
        """Update quantities that follow the weights, such as a slow copy. Called after each step of the optimizer."""

    @abstractmethod
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Read real frames; imagination starts after the last of them.

        Args:
            latent: (B, T, ...), from `encode`.
            action: (B, T) int64. The last one is not used: `imagine` acts on the last frame.
            reset: (B, T) bool. True clears the state before that frame. In a window padded on the left it is True at
                the first real frame, so that the padding has no effect.
            uniforms: (B, T, uniforms_per_frame) uniform in [0, 1); None draws them with torch's global generator.

        Returns:
            The features of every frame, (B, T, *feature_shape), and the state at the last frame.
        """

    def observe_each(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None, last: int = 1
    ) -> tuple[Tensor, State]:
        """Read real frames as `observe` does; imagination starts after each of the last ones.

        Args:
            latent: (B, T, ...), as the other arguments those of `observe`.
            action: (B, T, ...).
            reset: (B, T) bool.
            uniforms: (B, T, uniforms_per_frame).
            last: Number of frames K to start from, at most T.

        Returns:
            The features of every frame, (B, T, *feature_shape), and the states at the last K frames as B K rows: those
            of a window stand one behind the other.
        """
        raise NotImplementedError

    def find_ends(self, batch: Batch) -> Tensor:
        """Return (B, T) bool: frames behind which imagination ends, as the model has not learned to act there.

        Those are the last ones in which an action was taken, and those that close episodes.
        """
        return batch.terminated | batch.truncated if batch.is_last is None else batch.is_last

    @abstractmethod
    def imagine(self, state: State, action: Tensor, uniforms: Tensor | None = None) -> tuple[ImaginedStep, State]:
        """Take `action` in the current frame and sample the next one.

        The step is a function of its arguments if `uniforms` are passed. A state can be imagined from several times.
        Only the newest continuation is sure to stay valid, since attention writes its cache in place.

        Args:
            state: From `observe`, `perceive`, `imagine` or `replace_rows`.
            action: (B,) int64.
            uniforms: (B, uniforms_per_step) in [0, 1); None draws them with torch's global generator.

        Returns:
            The imagined step, and the state at the next frame.
        """

    def replace_rows(self, state: State, rows: Tensor, fresh: State) -> State:
        """Replace some rows of a state, so that trajectories of different age share a batch.

        On a backbone of limited length no row may then be imagined past `DynamicsSettings.longest_imagination`. The
        model restarts from the current frame only if all rows have one age.

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
        """Return the features of the current frame, (B, *feature_shape)."""

    def memory(self, state: State) -> Tensor:
        """Return the whole state of the frames before the current one, (B, memory_features) float32.

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
        """Read one real frame while acting. All returned states have the same tree.

        Frames perceived one by one give the same features and imagination as `observe` of those frames. This holds as
        far as `observe` looks back, except under settings of acting (Drama's `act_on` and `act_window`).

        Args:
            state: From the previous call; None at the very beginning.
            observation: (B, H, W, C) uint8.
            previous_action: (B,) int64, the action that led to this frame; not used where `reset`.
            reset: (B,) bool: this frame opens an episode; for a model with `across_ends`, a game.
            generator: CPU generator of a stochastic model's samples; None is torch's global one.
        """

    @abstractmethod
    def latent(self, state: State) -> Tensor:
        """Return the latent of the current frame, (B, ...)."""

    def decode(self, latent: Tensor) -> Tensor:
        """Decode to frames (..., H, W, C) uint8. Not for a model whose `decodes` is None.

        Args:
            latent: As `decodes` says, latents (..., latent axes) or features (..., *feature_shape).
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
        """Return the decoded current frame, (B, H, W, C) uint8."""
        return self.decode(self.features(state) if self.decodes == "features" else self.latent(state))


class PlanningWorldModel(WorldModel):
    """A world model that also learns a policy and a value, so that a tree search can plan in it."""

    learns_from_search = True
    discount: float
    """Discount of a reward one step later, in the learned value."""
    distribution: Policy
    """Gives meaning to `Prediction.policy`."""

    @abstractmethod
    def root(self, state: State) -> State:
        """Convert a state of `perceive` or `observe` to the form of the search's nodes.

        It is a tree (nested tuples) of tensors (B, ...) only. `imagine` from it returns a tree of the same shapes and
        types and writes nothing in place. The states of many nodes can therefore lie in one tensor and be gathered in
        any order.
        """

    def replace_rows(self, state: State, rows: Tensor, fresh: State) -> State:
        return replace_rows(self.root(state), rows, self.root(fresh))

    @abstractmethod
    def predict(self, state: State) -> Prediction:
        """Predict policy and value of the current frame."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters of a module into two groups for `torch.optim`: decayed by `weight_decay`, and not decayed.

    Decay applies to parameters with two or more axes. It spares vectors and scalars, such as biases and norms, the
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


def masked_mean(values: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean of `values` where `mask`, which has the same shape; 0 if it is nowhere True.

    Args:
        values: (B, ...).
        mask: The same shape, bool.
        weight: (B, T), `Batch.weight`: factors of the rows' values, which leave the number of values as it is.
    """
    return weighed(values * mask, weight).sum() / ranks.per_rank(mask.sum(), least=1)


def weighed(values: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply the rows of `values` (B, ...) by a `Batch.weight` (B, T), if there is one."""
    return values if weight is None else values * weight[:, 0].view(-1, *[1] * (values.ndim - 1))
