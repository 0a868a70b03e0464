"""World models over categorical latents: Drama and STORM, on any backbone.

A frame is K categorical variables of C classes. Latent and action of a frame are one element of the backbone; its
output d says everything that follows: reward, termination, and the distribution of the next frame's latent (the
*prior*). Encoder, decoder and dynamics learn together, so that what is hard to predict is also kept out of the latent.

    z_t ~ posterior(o_t)        d_t = backbone(stem(z_0, a_0), ..., stem(z_t, a_t))
    prior of z_{t+1}, reward r_t, termination e_t = heads(d_t)

Sources: Drama (Wang et al. 2024, "Drama: Mamba-Enabled Model-Based Reinforcement Learning Is Sample and Parameter
Efficient") and its public code; STORM (Zhang et al. 2023, arXiv 2310.09615), whose stem and heads are settings here.

B batch, T time (frames), K variables, C classes, D width of the backbone, A actions, W frames of the acting window,
H W C image. A latent is probabilities (..., K, C) float32, a drawn one is one-hot. Time: see base.py.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone
from wmcli.config import Section
from wmcli.nn import two_hot
from wmcli.nn.categorical import uniform
from wmcli.nn.decay import parameter_groups
from wmcli.nn.initialise import fan_average
from wmcli.nn.masked import masked_mean
from wmcli.nn.mlp import Activation, Norm, mlp, norm
from wmcli.nn.one_hot import draw_one_hot, entropy, kl_divergence, one_hot, straight_through
from wmcli.tokenizers.categorical import CategoricalTokenizer
from wmcli.world_models.base import Batch, Imagined, WorldModel


class LatentWorldModelSettings(Section):
    """A world model over categorical latents, and how it is trained. Defaults: Drama (XS)."""

    kind: Literal["latent"] = "latent"
    """Categorical latents, learned together with what follows from them; other kinds are token and cells."""
    stem: Literal["linear", "deep"] = "linear"
    """From latent and action to the backbone: linear, RMSNorm, SiLU (Drama), or two layers with LayerNorm (STORM)."""
    head_layers: int = Field(1, ge=1)
    """Hidden layers of the reward and termination heads (STORM: 2)."""
    head_width: int = Field(256, ge=1)
    """Width of the hidden layers of those heads (STORM: 512)."""
    head_norm: Norm = "rms"
    """After each hidden layer of those heads (STORM: layer)."""
    head_activation: Activation = "silu"
    """After each norm of those heads (STORM: relu)."""
    horizon: int = Field(128, ge=2)
    """Length of a training segment, in frames."""
    context: int = Field(8, ge=1)
    """Real frames that imagination starts from."""
    across_ends: bool = True
    """Segments run over the ends of episodes into the next one, so that short episodes fill them; else one episode,
    padded, whose padding enters batch statistics."""
    reset_at_ends: bool = True
    """In training and imagination, clear the state where an episode opens and predict nothing across; the public code
    does neither."""
    end_on_truncation: bool = False
    """Learn time limits as terminations."""
    dynamics_weight: float = Field(1.0, ge=0)
    """Weight of the loss that pulls the prior to the posterior (STORM: 0.5)."""
    representation_weight: float = Field(0.1, ge=0)
    """Weight of the loss that pulls the posterior to the prior."""
    free_nats: float = Field(1.0, ge=0)
    """Either of these is not lowered further below this (nats a frame)."""
    free_nats_of: Literal["mean", "each"] = "mean"
    """Whether that holds for the mean over the batch (public code) or for each frame (the papers' formula)."""
    act_on: Literal["prior", "posterior"] = "prior"
    """Latent that the policy sees when acting: predicted before the frame is seen (public code), or seen (paper)."""
    act_window: int = Field(16, ge=0)
    """When acting, past frames read anew at every step; 0 carries the state through the episode."""
    truncate_latents: bool = False
    """Reproduce a rounding fault of the public code: a fifth of the imagined latents reach the dynamics as zeros."""
    batch: int = Field(16, ge=1)
    """Segments in an update."""
    updates: int = Field(200, ge=0)
    """Updates in one call of the stage."""
    optimiser: Literal["laprop", "adamw", "adam"] = "laprop"
    """Of tokenizer and dynamics together."""
    learning_rate: float = Field(4e-5, gt=0)
    """Step size of the optimiser."""
    warmup: int = Field(1000, ge=0)
    """Updates over which the step size rises to it (laprop)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only; adam has none."""
    clip: float = Field(1000.0, gt=0)
    """Largest norm of the whole gradient."""

    @model_validator(mode="after")
    def _fits_into_the_horizon(self) -> LatentWorldModelSettings:
        for key in ("context", "act_window"):
            if getattr(self, key) >= self.horizon:
                raise ValueError(f"{key} = {getattr(self, key)} must be less than horizon = {self.horizon} frames.")
        return self


class Past(NamedTuple):
    """The frames before the current one, as far as acting reads them anew; the newest stand last."""

    latent: Tensor
    """(B, W, K, C)"""
    action: Tensor
    """(B, W) int64, taken in those frames."""
    length: Tensor
    """(B,) int64: how many of them belong to the episode."""
    current: Tensor
    """(B, K, C): of the current frame."""


class LatentState(NamedTuple):
    """Where a trajectory stands: the current frame, and what the backbone has read of those before it."""

    memory: Any
    """The backbone's state."""
    fresh: Tensor | None
    """(B,) bool: nothing came before the current frame, so the memory is to be cleared; None: something did in all."""
    summary: Tensor
    """(B, D) float32: the backbone's output at the frame before; zeros where nothing came before."""
    latent: Tensor
    """(B, K, C) drawn: what the dynamics will read of the current frame."""
    seen: Tensor
    """(B, K, C) drawn: what the controller sees of it."""
    length: int
    """How many frames the memory has read, counted on the host: attention has learned a limited number of positions."""
    past: Past | None = None
    """While acting with a window."""


class LatentWorldModel(WorldModel):
    """Learns latents and what follows from them. The tokenizer is a part of it and learns with it."""

    frozen_encoder = False

    @property
    def remembers(self) -> int:
        return self.settings.act_window or self.settings.horizon

    def __init__(
        self, settings: LatentWorldModelSettings, backbone: Backbone, tokenizer: CategoricalTokenizer, actions: int
    ) -> None:
        super().__init__()
        width, (variables, classes) = backbone.width, tokenizer.shape
        self.settings = settings
        self.actions = actions
        self.across_ends = settings.across_ends
        self.context = settings.context
        self.segment = settings.horizon
        self.feature_shape = (variables * classes + width,)
        self.draws = self.draws_to_observe = variables
        self.tokenizer = tokenizer
        self.stem = _stem(settings.stem, variables * classes + actions, width)
        self.backbone = backbone
        self.prior_head = nn.Linear(width, variables * classes)
        self.reward_head = self._head(width, two_hot.BINS)
        self.termination_head = self._head(width, 1)

    def _head(self, width: int, outputs: int) -> nn.Sequential:
        s = self.settings
        head = mlp(width, s.head_width, s.head_layers, outputs, norm_kind=s.head_norm, activation=s.head_activation)
        fan_average(head)
        return head

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Weight decay on matrices; none on biases, norms, and what a backbone exempts."""
        return parameter_groups(self, self.settings.weight_decay)

    # -- the parts, on any leading axes -------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Frames (B, T, H, W, C) uint8 to latents, probabilities (B, T, K, C)."""
        return self.tokenizer.encode(observation)

    def _elements(self, z: Tensor, action: Tensor) -> Tensor:
        """Drawn latents (..., K, C) and actions (...) to elements (..., D)."""
        return self.stem(torch.cat((z.flatten(-2), one_hot(action, self.actions, z.dtype)), -1))

    def _prior(self, summary: Tensor) -> Tensor:
        """(..., D) to the next latent's log-probabilities (..., K, C)."""
        return self.tokenizer.log_probabilities(self.prior_head(summary))

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Reconstruction + reward + termination + weighted dynamics and representation losses (Drama, section 3).

        `batch.latent` holds frames. Reconstruction is the squared error summed over a frame's pixels; the reward's loss
        is two-hot cross entropy, the termination's binary cross entropy. With p the posterior of the next frame and q
        the prior, [x] constant: dynamics = max(free, KL([p] || q)), representation = max(free, KL(p || [q])).

        The names: `reconstruction`, `reward_loss`, `termination_loss`, `observation_loss` (the KL itself, nats a
        frame), `posterior_entropy` and `prior_entropy` (nats a frame).
        """
        settings, frames, valid = self.settings, batch.latent, batch.valid
        log_posterior = self.tokenizer.posterior(frames)
        z = straight_through(log_posterior.exp())
        image = self.tokenizer.reconstruct(z.flatten(0, 1))
        error = self.tokenizer.reconstruction_error(image, frames.flatten(0, 1))
        reconstruction = masked_mean(error.view(valid.shape), valid)

        reset = batch.first if settings.reset_at_ends else None
        summary, _ = self.backbone(self._elements(z, batch.action), None, reset)
        reward_loss = masked_mean(two_hot.loss(self.reward_head(summary), batch.reward), valid)
        ends = (batch.terminated | batch.truncated) if settings.end_on_truncation else batch.terminated
        termination = self.termination_head(summary).float().squeeze(-1)
        termination_loss = masked_mean(
            F.binary_cross_entropy_with_logits(termination, ends.float(), reduction="none"), valid
        )

        follows = valid[:, 1:] if reset is None else valid[:, 1:] & ~reset[:, 1:]
        log_posterior, log_prior = log_posterior[:, 1:], self._prior(summary[:, :-1])
        dynamics = self._with_free_nats(kl_divergence(log_posterior.detach(), log_prior), follows)
        representation = self._with_free_nats(kl_divergence(log_posterior, log_prior.detach()), follows)

        total = reconstruction + reward_loss + termination_loss
        total = total + settings.dynamics_weight * dynamics + settings.representation_weight * representation
        with torch.no_grad():
            log = {
                "reconstruction": reconstruction,
                "reward_loss": reward_loss,
                "termination_loss": termination_loss,
                "observation_loss": masked_mean(kl_divergence(log_posterior, log_prior), follows),
                "posterior_entropy": masked_mean(entropy(log_posterior), follows),
                "prior_entropy": masked_mean(entropy(log_prior), follows),
            }
        return total, {name: value.detach() for name, value in log.items()}

    def _with_free_nats(self, kl: Tensor, mask: Tensor) -> Tensor:
        free = self.settings.free_nats
        if self.settings.free_nats_of == "each":
            return masked_mean(kl.clamp(min=free), mask)
        return masked_mean(kl, mask).clamp(min=free)

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, LatentState]:
        """Read all frames but the last, each drawn anew; features of all. See `WorldModel.observe`.

        Without `reset_at_ends` a window's first frame alone starts from nothing, as in training.
        """
        z = draw_one_hot(latent, numbers)
        if self.across_ends and not self.settings.reset_at_ends:
            reset = torch.zeros_like(reset)
        memory = self.backbone.initial_state(len(z))
        summary = z.new_zeros(*z.shape[:2], self.backbone.width)
        if z.shape[1] > 1:
            y, memory = self.backbone(self._elements(z[:, :-1], action[:, :-1]), memory, reset[:, :-1])
            summary[:, 1:] = y
            summary = summary.masked_fill(reset[..., None], 0)
        features = torch.cat((z.flatten(-2), summary), -1)
        return features, LatentState(memory, reset[:, -1], summary[:, -1], z[:, -1], z[:, -1], z.shape[1] - 1)

    @torch.no_grad()
    def imagine(
        self, state: LatentState, action: Tensor, numbers: Tensor | None = None
    ) -> tuple[Imagined, LatentState]:
        """One step. The reward is the expectation, termination is certain or not at all (likelier than not).

        A backbone with a limited number of positions starts again from the current frame alone once they are used up.
        """
        summary, memory, length = self._step(state, action)
        reward = two_hot.decode(self.reward_head(summary))
        terminated = self.termination_head(summary).squeeze(-1) > 0
        prior = self._prior(summary).exp()
        z = draw_one_hot(prior, numbers)
        # The public code adds and subtracts the probabilities in float32 and stores the result as integers.
        read = ((z + prior) - prior).long().to(z.dtype) if self.settings.truncate_latents else z
        return Imagined(z, reward, terminated), LatentState(memory, None, summary.to(z.dtype), read, z, length)

    def _step(self, state: LatentState, action: Tensor) -> tuple[Tensor, Any, int]:
        """The current frame and the action (B,) taken in it: their summary (B, D), the memory and its length after."""
        memory, fresh, length, limit = state.memory, state.fresh, state.length, self.backbone.max_length
        if limit is not None and length == limit:
            memory, fresh, length = self.backbone.initial_state(len(action)), None, 0
        summary, memory = self.backbone.step(self._elements(state.latent, action), memory, fresh)
        return summary, memory, length + 1

    def features(self, state: LatentState) -> Tensor:
        """Latent and summary of the past, (B, K * C + D) float32."""
        return torch.cat((state.seen.flatten(-2), state.summary), -1)

    def latent(self, state: LatentState) -> Tensor:
        """The current frame's latent as the controller sees it, (B, K, C)."""
        return state.seen

    def decode(self, latent: Tensor, state: LatentState | None = None) -> Tensor:
        """Latents (..., K, C) to frames (..., H, W, C) uint8."""
        return self.tokenizer.decode(latent)

    # -- acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def perceive(
        self,
        state: LatentState | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> LatentState:
        """Take in one real frame.

        With `act_window` the last so many frames of the episode are drawn and read anew each time, as in the public
        code; else the backbone's state goes on from frame to frame. With act_on = "prior" the controller sees what was
        predicted for this frame; of an episode's first frame, which nothing predicts, it sees the posterior.
        """
        latent = self.tokenizer.encode(observation)
        read = self._read_window if self.settings.act_window else self._read_on
        memory, fresh, summary, length, past = read(state, latent, previous_action, reset, generator)
        z = seen = _drawn(latent, generator)
        if self.settings.act_on == "prior":
            predicted = _drawn(self._prior(summary).exp(), generator)
            seen = torch.where(fresh[:, None, None], z, predicted)
        return LatentState(memory, fresh, summary, z, seen, length, past)

    def _read_on(
        self,
        state: LatentState | None,
        latent: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Any, Tensor, Tensor, int, None]:
        """Memory, where it is void, summary, and length, after the frame before the current one."""
        if state is None:
            nothing = latent.new_zeros(len(latent), self.backbone.width)
            return self.backbone.initial_state(len(latent)), torch.ones_like(reset), nothing, 0, None
        summary, memory, length = self._step(state, previous_action)
        return memory, reset, summary.to(latent.dtype).masked_fill(reset[:, None], 0), length, None

    def _read_window(
        self,
        state: LatentState | None,
        latent: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Any, Tensor, Tensor, int, Past]:
        """As `_read_on`, from the frames of the window, and the window itself."""
        rows, window = len(latent), self.settings.act_window
        if state is None or state.past is None:
            frames = latent.new_zeros(rows, window, *latent.shape[1:])
            actions = previous_action.new_zeros(rows, window)
            length = torch.zeros_like(previous_action)
        else:
            frames = torch.cat((state.past.latent[:, 1:], state.past.current[:, None]), 1)
            actions = torch.cat((state.past.action[:, 1:], previous_action[:, None]), 1)
            length = (state.past.length + 1).clamp(max=window).masked_fill(reset, 0)
        elements = self._elements(_drawn(frames, generator), actions)
        opens = torch.arange(window, device=latent.device) == (window - length)[:, None]
        y, memory = self.backbone(elements, self.backbone.initial_state(rows), opens)
        fresh = length == 0
        summary = y[:, -1].to(latent.dtype).masked_fill(fresh[:, None], 0)
        return memory, fresh, summary, window, Past(frames, actions, length, latent)


def _drawn(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """`draw_one_hot` with numbers from `generator`, wherever that is."""
    return draw_one_hot(probabilities, uniform(probabilities.shape[:-1], probabilities.device, generator))


def _stem(kind: str, inputs: int, width: int) -> nn.Module:
    if kind == "linear":
        return nn.Sequential(nn.Linear(inputs, width), norm("rms", width), nn.SiLU())
    return nn.Sequential(
        nn.Linear(inputs, width, bias=False),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.LayerNorm(width),
    )
