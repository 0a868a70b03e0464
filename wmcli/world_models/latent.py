"""World models over categorical latents, on any backbone: Drama, STORM, S4WM, RSSM and TSSM.

A frame is K categorical variables of C classes. Latent and action of a frame are one element of the backbone; its
output d says what follows: reward, termination, and the distribution of the next frame's latent (the *prior*). Encoder,
decoder and dynamics learn together, so that what is hard to predict is also kept out of the latent.

    z_t ~ posterior(o_t)        d_t = backbone(stem(z_0, a_0), ..., stem(z_t, a_t))
    prior of z_{t+1}, reward r_t, termination e_t = heads(d_t)        image o_t = decoder(z_t)

That is Drama. The *past* of a frame is d_{t-1}, zeros for an episode's first frame; S4WM and its baselines call it h_t,
and (z_t, h_t) the state. Settings let the decoder read the state, and the heads that of the frame they lead to; and the
posterior read, besides its frame,

    nothing (factorized: Drama, S4WM, TSSM)     its past (recurrent: RSSM; one frame after the other)
    all frames and actions so far, through a second backbone (full: S4WM-Full-Posterior)

Sources: Drama (Wang et al. 2024, arXiv 2410.08893) and its public code; STORM (Zhang et al. 2023, arXiv 2310.09615);
S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064), equations 3 to 23.

B batch, T time (frames), K variables, C classes, D width of the backbone, F length of what the encoder makes of a
frame, A actions, W frames of the acting window, H W C image. What `encode` gives is a latent's probabilities
(..., K, C) float32, or, where the posterior reads more than the frame, (..., F); a drawn latent is one-hot. Time: see
base.py.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, flat_state, replace_rows, state_tensors, with_tensors
from wmcli.errors import UsageError
from wmcli.nn import two_hot
from wmcli.nn.categorical import draw_one_hot, entropy, kl_divergence, one_hot, straight_through, uniform
from wmcli.nn.initialize import initialize
from wmcli.nn.mlp import Activation, Norm, mlp, norm
from wmcli.tokenizers.categorical import CategoricalTokenizer
from wmcli.world_models.base import Batch, DynamicsSettings, ImaginedStep, Parts, WorldModel, masked_mean


class LatentWorldModelSettings(DynamicsSettings):
    """A world model over categorical latents, and how it is trained. Defaults: Drama (XS)."""

    tokenizer_kind: ClassVar[str] = "categorical"
    reads_burn_in: ClassVar[bool] = True
    scores_frames: ClassVar[bool] = True
    acting_keys: ClassVar[tuple[str, ...]] = ("act_on", "act_window")

    kind: Literal["latent"] = "latent"
    """Categorical latents, learned together with what follows from them; other kinds are token and cells."""
    stem: Literal["linear", "deep", "dreamer"] = "linear"
    """From latent and action to the backbone: linear, RMSNorm, SiLU (Drama); two layers with LayerNorm (STORM); or one
    without bias, LayerNorm, SiLU (Dreamer)."""
    posterior: Literal["factorized", "recurrent", "full"] = "factorized"
    """What a frame's latent is drawn from: the frame; the frame and its past (RSSM); or all frames and actions so far,
    read by a second backbone of the same settings (S4WM-Full-Posterior)."""
    decoder_reads: Literal["latent", "state"] = "latent"
    """Whether a frame is decoded from its latent alone, or from its latent and its past (S4WM)."""
    heads_read: Literal["past", "state"] = "past"
    """Whether reward and termination are read from the past that ends with the action, or from that and the latent of
    the frame that it leads to (S4WM): the last frame of an episode must then be one of its frames."""
    prior_layers: int = Field(0, ge=0)
    """Hidden layers of the prior's head, each without bias, LayerNorm, SiLU (Dreamer: 1)."""
    prior_width: int = Field(512, ge=1)
    """Width of those."""
    head_layers: int = Field(1, ge=1)
    """Hidden layers of the reward and termination heads (STORM: 2)."""
    head_width: int = Field(256, ge=1)
    """Width of the hidden layers of those heads (STORM: 512)."""
    head_norm: Norm = "rms"
    """After each hidden layer of those heads (STORM: layer)."""
    head_activation: Activation = "silu"
    """After each norm of those heads (STORM: relu)."""
    norm_eps: float = Field(0.0, ge=0)
    """Of the norms in stem and heads; 0 is 1e-6 for RMSNorm and 1e-5 for LayerNorm."""
    initialization: Literal["fan-average", "torch"] = "fan-average"
    """First weights of reward and termination heads, a prior's head with hidden layers, and Dreamer's stem: truncated
    normal by the mean of a layer's inputs and outputs, biases 0 (Dreamer, Drama), or torch's defaults (STORM)."""
    reward: Literal["two-hot", "bernoulli", "mse", "none"] = "two-hot"
    """How rewards are learned: as a distribution over 255 bins; as the probability of 1, for rewards of 0 and 1; by
    their squared error; or not at all."""
    predict_termination: bool = True
    """Learn terminations; else an imagined episode never ends."""
    first_frame: bool = True
    """Learn to reconstruct the frame that opens an episode as well; S4WM, which has no prior of it, does not."""
    sequence_length: int = Field(128, ge=2)
    """Length of a training segment, in frames."""
    rows: Literal["windows", "episodes", "streams"] = "windows"
    """Rows of a batch: windows of `sequence_length` frames, drawn as training.sampling says; whole episodes, each once
    before any comes again; or the next `sequence_length` frames of a stream of episodes, with the state carried over
    from the batch before and its gradient cut (truncated backpropagation through time)."""
    context: int = Field(8, ge=1)
    """Real frames that imagination starts from."""
    across_ends: bool = True
    """Segments run over the ends of episodes into the next one, so that short episodes fill them, and a lost life ends
    no game; else one episode, padded, whose padding enters batch statistics."""
    reset_at_ends: bool = True
    """In training and imagination, clear the state where a game opens (without across_ends: an episode) and predict
    nothing across; the public code does neither."""
    end_on_truncation: bool = False
    """Learn time limits as terminations."""
    reconstruction_weight: float = Field(1.0, ge=0)
    """Weight of the squared error of a frame (0.5 makes it the likelihood of a unit Gaussian)."""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the rewards' loss, which is a mean over frames."""
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
    optimizer: Literal["laprop", "adamw", "adam"] = "laprop"
    """Of tokenizer and dynamics together."""
    learning_rate: float = Field(4e-5, gt=0)
    """Step size of the optimizer."""
    eps: float = Field(0.0, ge=0)
    """What the optimizer adds to the root of the second moment: 1e-5 in Memory Maze's Dreamer (RSSM); 0 is the
    optimizer's own, 1e-20 for laprop, 1e-8 for the others."""
    warmup: int = Field(1000, ge=0)
    """Updates over which the step size rises to it."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What becomes of the step size then: it stays, or falls to 0 at the last update as half a cosine."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only; adam has none."""
    clip: float = Field(1000.0, gt=0)
    """Largest norm of the whole gradient."""
    validate_every: int = Field(0, ge=0)
    """Updates between looks at the loss on the experience's validation episodes; the weights with the lowest are what
    is published. 0 publishes the last weights."""

    @model_validator(mode="after")
    def _fits_together(self) -> LatentWorldModelSettings:
        for key in ("context", "act_window"):
            if getattr(self, key) >= self.sequence_length:
                raise ValueError(
                    f"{key} = {getattr(self, key)} must be less than sequence_length = {self.sequence_length} frames."
                )
        if self.posterior != "factorized" and self.act_window:
            raise ValueError(
                f"act_window = {self.act_window}: a posterior that is {self.posterior} is drawn frame by frame, and not"
                " anew for a window; set act_window = 0."
            )
        if self.rows != "windows" and self.across_ends:
            raise ValueError(f"rows = '{self.rows}' does not take across_ends = true: set it to false.")
        if self.rows == "streams" and not self.reset_at_ends:
            raise ValueError("rows = 'streams' needs reset_at_ends = true: a stream runs over the ends of episodes.")
        return self

    @property
    def decodes_state(self) -> bool:
        """Whether the dynamics model's encoder and decoder are of no use without it."""
        return self.posterior != "factorized" or self.decoder_reads == "state"

    @property
    def encoder(self) -> Literal["dynamics", "itself"]:
        return "itself" if self.decodes_state else "dynamics"

    @property
    def learns_rewards(self) -> bool:
        return self.reward != "none"

    @property
    def longest_imagination(self) -> int:
        return self.sequence_length

    @property
    def needs_validation(self) -> bool:
        return self.validate_every > 0

    @property
    def longest_episode(self) -> int | None:
        return self.sequence_length if self.rows == "episodes" else None

    def build(self, parts: Parts) -> LatentWorldModel:
        backbone = parts.new_backbone(self.sequence_length, 1)
        posterior_encoder = None
        if self.posterior == "full":
            posterior_encoder = parts.new_backbone(self.sequence_length, 1)
        tokenizer = parts.tokenizer
        if self.decodes_state:
            features = parts.tokenizer_settings.stack.features(parts.size)
            reads = LatentWorldModel.tokenizer_reads(self, features, backbone.width)
            tokenizer = CategoricalTokenizer(parts.tokenizer_settings, parts.size, **reads)
        return LatentWorldModel(self, backbone, tokenizer, parts.actions, posterior_encoder)


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
    deterministic: Tensor
    """(B, D) float32: the backbone's output at the frame before; zeros where nothing came before."""
    latent: Tensor
    """(B, K, C) drawn: what the dynamics will read of the current frame."""
    seen: Tensor
    """(B, K, C) drawn: what the controller sees of it."""
    length: int
    """How many frames the memory has read, counted on the host: attention has learned a limited number of positions."""
    past: Past | None = None
    """While acting with a window."""
    posterior_encoder: Any = None
    """While acting with a full posterior: the state of the backbone that it is drawn from, the current frame read."""


class Carry(NamedTuple):
    """What training by truncated backpropagation takes from one batch to the next, the last frame read so far of each
    row. No gradient goes through it."""

    memory: Any
    """The backbone's state before that frame's element."""
    posterior_encoder: Any
    """The state of the full posterior's backbone, that frame read; () where there is none."""
    latent: Tensor
    """(B, K, C) drawn."""
    action: Tensor
    """(B,) int64, as all that follow of the frame's row of experience."""
    reward: Tensor
    ended: Tensor
    first: Tensor
    known: Tensor
    """(B,) bool: False before there was such a frame."""


class LatentWorldModel(WorldModel):
    """Learns latents and what follows from them. The tokenizer is a part of it and learns with it."""

    frozen_encoder = False
    min_segment = 2

    @property
    def lookback(self) -> int:
        return self.settings.act_window or self.settings.sequence_length

    def __init__(
        self,
        settings: LatentWorldModelSettings,
        backbone: Backbone,
        tokenizer: CategoricalTokenizer,
        actions: int,
        posterior_encoder: Backbone | None = None,
    ) -> None:
        """Build the model.

        Args:
            settings: Its section.
            backbone: Reads latents and actions.
            tokenizer: Built for the inputs of its posterior and decoder, see `tokenizer_reads`.
            actions: Number of actions A.
            posterior_encoder: The backbone of the full posterior.

        Raises:
            UsageError: The backbone is of limited length, and states are carried without end.
        """
        super().__init__()
        width, (variables, classes) = backbone.width, tokenizer.shape
        assert (posterior_encoder is not None) == (settings.posterior == "full")
        if backbone.max_length is not None and (settings.rows == "streams" or posterior_encoder is not None):
            key = "rows = 'streams'" if settings.rows == "streams" else "posterior = 'full'"
            raise UsageError(
                f"dynamics.{key} carries a state without end, which this backbone of limited length cannot hold: set"
                " another backbone.kind, for example transformer-xl."
            )
        self.settings = settings
        self.actions = actions
        self.across_ends = settings.across_ends
        self.context = settings.context
        self.segment = settings.sequence_length
        self.rows = settings.rows
        self.learns_rewards = settings.learns_rewards
        self.decodes = "features" if settings.decodes_state else "latents"
        self.feature_shape = (variables * classes + width,)
        self.frame_features = variables * classes
        held = flat_state(backbone.initial_state(1))
        self.memory_features = None if held is None else held.shape[1]
        self.uniforms_per_step = self.uniforms_per_frame = variables
        self.tokenizer = tokenizer
        self.stem = _stem(settings, variables * classes + actions, backbone.inputs)
        self.backbone = backbone
        if posterior_encoder is not None:
            self.posterior_stem = _stem(settings, tokenizer.features + actions, posterior_encoder.inputs)
            self.posterior_encoder = posterior_encoder
        self.prior_head = _prior_head(settings, width, variables * classes)
        read = width + (variables * classes if settings.heads_read == "state" else 0)
        if settings.reward != "none":
            self.reward_head = self._head(read, two_hot.BINS if settings.reward == "two-hot" else 1)
        if settings.predict_termination:
            self.termination_head = self._head(read, 1)

    @staticmethod
    def tokenizer_reads(settings: LatentWorldModelSettings, features: int, width: int) -> dict[str, int]:
        """What `CategoricalTokenizer` is told of a posterior and a decoder that read more than a frame and its latent,
        for an encoder of `features` numbers and a backbone of `width`."""
        reads = {"recurrent": {"posterior_inputs": features + width}, "full": {"posterior_inputs": width}}
        past = {"past": width} if settings.decoder_reads == "state" else {}
        return reads.get(settings.posterior, {}) | past

    def _head(self, width: int, outputs: int) -> nn.Sequential:
        s = self.settings
        head = mlp(
            width,
            s.head_width,
            s.head_layers,
            outputs,
            norm_kind=s.head_norm,
            activation=s.head_activation,
            eps=s.norm_eps,
        )
        initialize(head, s.initialization)
        return head

    def check_reads(self, frames: int) -> None:
        """Check that so many frames in a row can be read.

        Raises:
            UsageError: They are more than the backbone has positions.
        """
        limit = self.backbone.max_length
        if limit is not None and frames > limit:
            raise UsageError(
                f"dynamics.sequence_length = {limit}: this backbone has learned as many positions, and {frames} frames"
                f" in a row are to be read; train with dynamics.sequence_length={frames}, or another backbone.kind."
            )

    # -- the parts, on any leading axes -------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Frames (B, T, H, W, C) uint8 to latents, probabilities (B, T, K, C); to what the encoder makes of them,
        (B, T, F), where the posterior reads more than a frame."""
        if self.settings.posterior == "factorized":
            return self.tokenizer.encode(observation)
        return self.tokenizer.embed(observation).float()

    def _elements(self, z: Tensor, action: Tensor) -> Tensor:
        """Drawn latents (..., K, C) and actions (...) to elements (..., D)."""
        return self.stem(torch.cat((z.flatten(-2), one_hot(action, self.actions, z.dtype)), -1))

    def _prior(self, past: Tensor) -> Tensor:
        """(..., D) to the next latent's log-probabilities (..., K, C)."""
        return self.tokenizer.log_probabilities(self.prior_head(past))

    def _full_posterior(
        self, features: Tensor, previous: Tensor, reset: Tensor | None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """The full posterior of frames (B, T, F), log-probabilities (B, T, K, C), and the state after them. `previous`
        (B, T, A): the actions that led to them, one-hot, zeros where there was none."""
        x = self.posterior_stem(torch.cat((features, previous.to(features.dtype)), -1))
        y, state = self.posterior_encoder(x, state, reset)
        return self.tokenizer.posterior_of(y), state

    def _previous(self, action: Tensor, opens: Tensor, before: Tensor | None = None) -> Tensor:
        """The actions that led to frames, one-hot (B, T, A): those of the frames before them. action, opens (B, T);
        before (B,) that of the frame before all, if there was one."""
        earlier = one_hot(action[:, :-1], self.actions, torch.float32)
        start = (
            earlier.new_zeros(len(action), self.actions)
            if before is None
            else one_hot(before, self.actions, earlier.dtype)
        )
        return torch.cat((start[:, None], earlier), 1).masked_fill(opens[..., None], 0)

    def _decoder_past(self, past: Tensor) -> Tensor | None:
        """What of pasts (..., D) the decoder reads beside the latents."""
        return past if self.settings.decoder_reads == "state" else None

    def _reading(self, past: Tensor, z: Tensor | None) -> Tensor:
        """What reward and termination heads read: pasts (..., D), and the latents (..., K, C) of the frames that these
        are the pasts of."""
        if self.settings.heads_read == "past":
            return past
        assert z is not None
        return torch.cat((z.flatten(-2), past.to(z.dtype)), -1)

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Reconstruction + reward + termination + weighted dynamics and representation losses (Drama, section 3; S4WM,
        equations 8 and 9, with weights alpha and 1 - alpha).

        `batch.inputs` holds frames. Reconstruction is the squared error summed over a frame's pixels; the reward's loss
        is that of `settings.reward`, the termination's binary cross entropy. With p the posterior of the next frame and
        q the prior, [x] constant: dynamics = max(free, KL([p] || q)), representation = max(free, KL(p || [q])).

        The names: `reconstruction`, `reward_loss`, `termination_loss`, `observation_loss` (the KL itself, nats a
        frame), `posterior_entropy` and `prior_entropy` (nats a frame).
        """
        total, log, _ = self.carried_loss(batch, None)
        return total, log

    def initial_carry(self, rows: int) -> Carry:
        """What a stream begins with."""
        device = next(self.parameters()).device
        flag = torch.zeros(rows, dtype=torch.bool, device=device)
        number = torch.zeros(rows, dtype=torch.int64, device=device)
        return Carry(
            self.backbone.initial_state(rows),
            self.posterior_encoder.initial_state(rows) if self.settings.posterior == "full" else (),
            torch.zeros(rows, *self.tokenizer.shape, device=device),
            number,
            number.float(),
            flag,
            flag,
            flag,
        )

    def carried_loss(self, batch: Batch, carry: Carry | None) -> tuple[Tensor, dict[str, Tensor], Carry | None]:
        """`loss` of the next frames of each row's stream, and what to carry to those after them. None: rows that begin
        with nothing before them, and nothing to carry."""
        settings, frames, valid = self.settings, batch.inputs, batch.valid
        opens = batch.is_first if settings.reset_at_ends else torch.zeros_like(batch.is_first)
        features = self.tokenizer.embed(frames)
        log_posterior, z, read, after = self._read(features, batch, opens, carry)
        if carry is None:  # of the first frame nothing is known; what the last one leads to is
            past = torch.cat((torch.zeros_like(read[:, :1]), read[:, : valid.shape[1] - 1]), 1)
        else:
            past = read
        past = past.masked_fill(opens[..., None], 0)
        shown = valid if settings.first_frame else valid & ~batch.is_first
        error = self.tokenizer.reconstruction_error(
            z.flatten(0, 1), self._decoder_past(past.flatten(0, 1)), frames.flatten(0, 1)
        )
        reconstruction = masked_mean(error.view(valid.shape), shown)
        reward_loss, termination_loss = self._outcome_losses(batch, carry, read, z, opens)

        start = 0 if carry is not None else 1
        follows = (valid & ~opens)[:, start:]
        if carry is not None:
            follows = torch.cat((follows[:, :1] & carry.known[:, None], follows[:, 1:]), 1)
        log_posterior, log_prior = log_posterior[:, start:], self._prior(past[:, start:])
        dynamics = self._with_free_nats(kl_divergence(log_posterior.detach(), log_prior), follows)
        representation = self._with_free_nats(kl_divergence(log_posterior, log_prior.detach()), follows)

        total = settings.reconstruction_weight * reconstruction + settings.reward_weight * reward_loss
        total = total + termination_loss + settings.dynamics_weight * dynamics
        total = total + settings.representation_weight * representation
        with torch.no_grad():
            log = {
                "reconstruction": reconstruction,
                "reward_loss": reward_loss,
                "termination_loss": termination_loss,
                "observation_loss": masked_mean(kl_divergence(log_posterior, log_prior), follows),
                "posterior_entropy": masked_mean(entropy(log_posterior), follows),
                "prior_entropy": masked_mean(entropy(log_prior), follows),
            }
        return total, {name: value.detach() for name, value in log.items()}, after

    def _read(
        self, features: Tensor, batch: Batch, opens: Tensor, carry: Carry | None
    ) -> tuple[Tensor, Tensor, Tensor, Carry | None]:
        """Posteriors (B, T, K, C) and draws of frames (B, T, F), and what the backbone makes of them: its outputs at
        the T frames or, after a `carry`, at the frame carried and the first T - 1; and the next carry."""
        settings = self.settings
        # Elsewhere only the first frame of a row can open an episode, and nothing stands before that.
        reset = opens if settings.reset_at_ends and (self.across_ends or carry is not None) else None
        posterior_encoder: Any = ()
        if settings.posterior == "recurrent":
            log_posterior, z, read, memory = self._unroll(features, batch, reset, carry)
        else:
            if settings.posterior == "full":
                previous = self._previous(batch.action, batch.is_first, None if carry is None else carry.action)
                state = None if carry is None else carry.posterior_encoder
                log_posterior, posterior_encoder = self._full_posterior(features, previous, reset, state)
            else:
                log_posterior = self.tokenizer.posterior_of(features)
            z = straight_through(log_posterior.exp())
            latents, action = z, batch.action
            memory = None
            if carry is not None:
                latents = torch.cat((carry.latent[:, None], z[:, :-1]), 1)
                action = torch.cat((carry.action[:, None], batch.action[:, :-1]), 1)
                reset = torch.cat((carry.first[:, None], opens[:, :-1]), 1)
                memory = carry.memory
            read, memory = self.backbone(self._elements(latents, action), memory, reset)
        if carry is None:
            return log_posterior, z, read, None
        kept = Carry(
            memory,
            posterior_encoder,
            z[:, -1],
            batch.action[:, -1],
            batch.reward[:, -1],
            self._ends(batch)[:, -1],
            opens[:, -1],
            torch.ones_like(carry.known),
        )
        return log_posterior, z, read, _without_graph(self.initial_carry(len(z)), kept)

    def _unroll(
        self, features: Tensor, batch: Batch, reset: Tensor | None, carry: Carry | None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """`_read` where each frame's posterior waits for its past; and the backbone's state."""
        rows, time = batch.action.shape
        if carry is None:
            memory = self.backbone.initial_state(rows)
            past = features.new_zeros(rows, self.backbone.width, dtype=torch.float32)
            read = []
        else:
            past, memory = self._advance(carry.latent, carry.action, carry.memory, carry.first)
            read = [past]
        posteriors, samples = [], []
        for t, (feature, action) in enumerate(zip(features.unbind(1), batch.action.unbind(1), strict=True)):
            opens = None if reset is None else reset[:, t]
            known = past if opens is None else past.masked_fill(opens[:, None], 0)
            log_posterior = self.tokenizer.posterior_of(torch.cat((feature, known.to(feature.dtype)), -1))
            z = straight_through(log_posterior.exp())
            posteriors.append(log_posterior)
            samples.append(z)
            if carry is None or t + 1 < time:
                past, memory = self._advance(z, action, memory, opens)
                read.append(past)
        return torch.stack(posteriors, 1), torch.stack(samples, 1), torch.stack(read, 1), memory

    def _advance(self, z: Tensor, action: Tensor, memory: Any, reset: Tensor | None) -> tuple[Tensor, Any]:
        """One frame (B, K, C) and action (B,): the past (B, D) float32 that they make, and the memory, with gradient.
        (`Backbone.step` may write in place.)"""
        y, memory = self.backbone(self._elements(z, action)[:, None], memory, None if reset is None else reset[:, None])
        return y[:, 0].float(), memory

    def _ends(self, batch: Batch) -> Tensor:
        return (batch.terminated | batch.truncated) if self.settings.end_on_truncation else batch.terminated

    def _outcome_losses(
        self, batch: Batch, carry: Carry | None, read: Tensor, z: Tensor, opens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the rewards and the terminations that came of the elements that `read` (B, T, D) are the outputs at."""
        settings = self.settings
        reward, ends, counts = batch.reward, self._ends(batch), batch.valid
        if carry is not None:  # of the frame carried and all but the last
            reward = torch.cat((carry.reward[:, None], reward[:, :-1]), 1)
            ends = torch.cat((carry.ended[:, None], ends[:, :-1]), 1)
            counts = torch.cat((carry.known[:, None], counts[:, :-1]), 1)
        if settings.heads_read == "state":  # of frames that are followed by one of their episode
            if carry is None:
                read, z, reward, ends = read[:, :-1], z[:, 1:], reward[:, :-1], ends[:, :-1]
                counts, opens = batch.valid[:, 1:], opens[:, 1:]
            counts = counts & ~opens
        reading = self._reading(read, z if settings.heads_read == "state" else None)
        reward_loss = termination_loss = torch.zeros((), device=read.device)
        if settings.reward != "none":
            reward_loss = masked_mean(self._reward_loss(self.reward_head(reading), reward), counts)
        if settings.predict_termination:
            termination = self.termination_head(reading).float().squeeze(-1)
            termination_loss = masked_mean(
                F.binary_cross_entropy_with_logits(termination, ends.float(), reduction="none"), counts
            )
        return reward_loss, termination_loss

    def _reward_loss(self, output: Tensor, reward: Tensor) -> Tensor:
        """Of the head's output (..., outputs) and rewards (...)."""
        if self.settings.reward == "two-hot":
            return two_hot.loss(output, reward)
        output = output.float().squeeze(-1)
        if self.settings.reward == "mse":
            return (output - reward).square()
        return F.binary_cross_entropy_with_logits(output, reward, reduction="none")

    def _reward(self, reading: Tensor) -> Tensor:
        """The reward to expect, (...) float32."""
        kind = self.settings.reward
        if kind == "none":
            return torch.zeros(reading.shape[:-1], device=reading.device)
        output = self.reward_head(reading)
        if kind == "two-hot":
            return two_hot.decode(output)
        output = output.float().squeeze(-1)
        return output.sigmoid() if kind == "bernoulli" else output

    def _with_free_nats(self, kl: Tensor, mask: Tensor) -> Tensor:
        free = self.settings.free_nats
        if self.settings.free_nats_of == "each":
            return masked_mean(kl.clamp(min=free), mask)
        return masked_mean(kl, mask).clamp(min=free)

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self,
        latent: Tensor,
        action: Tensor,
        reset: Tensor,
        uniforms: Tensor | None = None,
        *,
        likeliest: bool = False,
    ) -> tuple[Tensor, LatentState]:
        """Read all frames but the last, each drawn anew; features of all. See `WorldModel.observe`.

        Without `reset_at_ends` a window's first frame alone starts from nothing, as in training. With `likeliest` no
        latent is drawn: each is the likeliest one.
        """
        chosen = _likeliest if likeliest else draw_one_hot
        if self.across_ends and not self.settings.reset_at_ends:
            reset = torch.zeros_like(reset)
        rows, time = action.shape
        memory = self.backbone.initial_state(rows)
        deterministic = torch.zeros(rows, time, self.backbone.width, device=action.device)
        if self.settings.posterior == "recurrent":
            if uniforms is None:
                uniforms = uniform((rows, time, self.uniforms_per_step), action.device)
            samples: list[Tensor] = []
            for t in range(time):
                if t:
                    y, memory = self.backbone.step(
                        self._elements(samples[-1], action[:, t - 1]), memory, reset[:, t - 1]
                    )
                    deterministic[:, t] = y.to(deterministic.dtype).masked_fill(reset[:, t, None], 0)
                read = torch.cat((latent[:, t], deterministic[:, t].to(latent.dtype)), -1)
                samples.append(chosen(self.tokenizer.posterior_of(read).exp(), uniforms[:, t]))
            z = torch.stack(samples, 1)
        else:
            if self.settings.posterior == "full":
                latent = self._full_posterior(latent, self._previous(action, reset), reset)[0].exp()
            z = chosen(latent, uniforms)
            if time > 1:
                y, memory = self.backbone(self._elements(z[:, :-1], action[:, :-1]), memory, reset[:, :-1])
                deterministic[:, 1:] = y
                deterministic = deterministic.masked_fill(reset[..., None], 0)
        features = torch.cat((z.flatten(-2), deterministic), -1)
        return features, LatentState(memory, reset[:, -1], deterministic[:, -1], z[:, -1], z[:, -1], time - 1)

    def find_ends(self, batch: Batch) -> Tensor:
        """Return `WorldModel.over`: nowhere without `reset_at_ends`, for a model that has learned to read on."""
        over = super().find_ends(batch)
        return torch.zeros_like(over) if self.across_ends and not self.settings.reset_at_ends else over

    @torch.no_grad()
    def imagine(
        self, state: LatentState, action: Tensor, uniforms: Tensor | None = None, *, likeliest: bool = False
    ) -> tuple[ImaginedStep, LatentState]:
        """One step. The reward is the expectation, termination is certain or not at all (likelier than not). With
        `likeliest` the latent is not drawn, but the likeliest one.

        A backbone with a limited number of positions starts again from the current frame alone once they are used up.
        """
        deterministic, memory, length = self._step(state, action)
        prior = self._prior(deterministic).exp()
        z = (_likeliest if likeliest else draw_one_hot)(prior, uniforms)
        reading = self._reading(deterministic, z)
        reward = self._reward(reading)
        terminated = torch.zeros_like(reward, dtype=torch.bool)
        if self.settings.predict_termination:
            terminated = self.termination_head(reading).squeeze(-1) > 0
        # The public code adds and subtracts the probabilities in float32 and stores the result as integers.
        read = ((z + prior) - prior).long().to(z.dtype) if self.settings.truncate_latents else z
        return ImaginedStep(z, reward, terminated), LatentState(
            memory, None, deterministic.to(z.dtype), read, z, length
        )

    def _step(self, state: LatentState, action: Tensor) -> tuple[Tensor, Any, int]:
        """Return the deterministic state (B, D) after the frame and its action (B,), the memory and its length."""
        memory, fresh, length, limit = state.memory, state.fresh, state.length, self.backbone.max_length
        if limit is not None and length == limit:
            memory, fresh, length = self.backbone.initial_state(len(action)), None, 0
        deterministic, memory = self.backbone.step(self._elements(state.latent, action), memory, fresh)
        return deterministic, memory, length + 1

    def replace_rows(self, state: LatentState, rows: Tensor, fresh: LatentState) -> LatentState:
        """See `WorldModel.replace_rows`."""
        assert state.past is None and state.posterior_encoder is None

        def nothing_before(part: LatentState) -> Tensor:
            return part.latent.new_zeros(len(part.latent), dtype=torch.bool) if part.fresh is None else part.fresh

        return LatentState(
            self.backbone.replace_rows(state.memory, rows, fresh.memory),
            replace_rows(nothing_before(state), rows, nothing_before(fresh)),
            replace_rows(state.deterministic, rows, fresh.deterministic),
            replace_rows(state.latent, rows, fresh.latent),
            replace_rows(state.seen, rows, fresh.seen),
            min(state.length, fresh.length),
        )

    def features(self, state: LatentState) -> Tensor:
        """Latent and deterministic of the past, (B, K * C + D) float32."""
        return torch.cat((state.seen.flatten(-2), state.deterministic), -1)

    def memory(self, state: LatentState) -> Tensor:
        """Return the backbone's state, scaled to a root mean square of 1; zeros where nothing came before.

        The deterministic state holds only the part of it that the next frame needs.
        """
        held = flat_state(state.memory)
        assert held is not None, "a backbone without memory_features"
        held = held.float() if state.fresh is None else held.float().masked_fill(state.fresh[:, None], 0)
        return F.rms_norm(held, held.shape[1:])

    def latent(self, state: LatentState) -> Tensor:
        """The current frame's latent as the controller sees it, (B, K, C)."""
        return state.seen

    @torch.no_grad()
    def images(self, features: Tensor) -> Tensor:
        """Features (N, K * C + D) to images (N, 3, H, W) float32, from the latents as they were drawn."""
        z, past = self._latents_and_past(features)
        return self.tokenizer.reconstruct(z, self._decoder_past(past))

    @torch.no_grad()
    def frame_error(self, features: Tensor, frames: Tensor) -> Tensor:
        """Squared error summed over pixels, (N,): frames (N, H, W, 3) uint8 against what features (N, K * C + D) are
        decoded to, from the latents as they were drawn."""
        z, past = self._latents_and_past(features)
        return self.tokenizer.reconstruction_error(z, self._decoder_past(past), frames)

    @torch.no_grad()
    def arrival_reward(self, features: Tensor) -> Tensor:
        """The reward of the step that led to a frame, as its features (..., K * C + D) tell it: (...) float32."""
        return self._reward(features if self.settings.heads_read == "state" else features[..., self.frame_features :])

    def decode(self, latent: Tensor) -> Tensor:
        """Latents (..., K, C), or features (..., K * C + D) for a model that decodes those, to frames (..., H, W, C)
        uint8."""
        if self.decodes == "latents":
            return self.tokenizer.decode(latent)
        z, past = self._latents_and_past(latent)
        return self.tokenizer.decode(z, self._decoder_past(past))

    def _latents_and_past(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features (..., K * C + D) to latents (..., K, C) and pasts (..., D)."""
        z, past = features.split((self.frame_features, self.backbone.width), -1)
        return z.unflatten(-1, self.tokenizer.shape), past

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
        latent = self.encode(observation)
        read = self._read_window if self.settings.act_window else self._read_on
        memory, fresh, deterministic, length, past = read(state, latent, previous_action, reset, generator)
        posterior_encoder = None
        if self.settings.posterior == "recurrent":
            latent = self.tokenizer.posterior_of(torch.cat((latent, deterministic), -1)).exp()
        elif self.settings.posterior == "full":
            previous = one_hot(previous_action, self.actions, latent.dtype).masked_fill(reset[:, None], 0)
            before = self.posterior_encoder.initial_state(len(latent)) if state is None else state.posterior_encoder
            log_posterior, posterior_encoder = self._full_posterior(
                latent[:, None], previous[:, None], reset[:, None], before
            )
            latent = log_posterior[:, 0].exp()
        z = seen = _drawn(latent, generator)
        if self.settings.act_on == "prior":
            predicted = _drawn(self._prior(deterministic).exp(), generator)
            seen = torch.where(fresh[:, None, None], z, predicted)
        return LatentState(memory, fresh, deterministic, z, seen, length, past, posterior_encoder)

    def _read_on(
        self,
        state: LatentState | None,
        latent: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Any, Tensor, Tensor, int, None]:
        """Memory, where it is void, deterministic, and length, after the frame before the current one."""
        if state is None:
            nothing = latent.new_zeros(len(latent), self.backbone.width)
            return self.backbone.initial_state(len(latent)), torch.ones_like(reset), nothing, 0, None
        deterministic, memory, length = self._step(state, previous_action)
        return memory, reset, deterministic.to(latent.dtype).masked_fill(reset[:, None], 0), length, None

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
        deterministic = y[:, -1].to(latent.dtype).masked_fill(fresh[:, None], 0)
        return memory, fresh, deterministic, window, Past(frames, actions, length, latent)


def _likeliest(probabilities: Tensor, uniforms: Tensor | None = None) -> Tensor:
    """In the place of `draw_one_hot`: the likeliest classes, whatever the numbers."""
    return one_hot(probabilities.argmax(-1), probabilities.shape[-1], probabilities.dtype)


def _drawn(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """`draw_one_hot` with numbers from `generator`, wherever that is."""
    return draw_one_hot(probabilities, uniform(probabilities.shape[:-1], probabilities.device, generator))


def _without_graph(empty: Carry, carry: Carry) -> Carry:
    """Return the tensors of `carry` in the tree of `empty`, so that nothing else of a state outlives its graph."""
    kept = [tensor.detach() for tensor in state_tensors(carry)]
    return with_tensors(empty, [tensor.to(like.dtype) for tensor, like in zip(kept, state_tensors(empty), strict=True)])


def _stem(settings: LatentWorldModelSettings, inputs: int, width: int) -> nn.Module:
    if settings.stem == "linear":
        linear = nn.Linear(inputs, width)
        nn.init.zeros_(linear.bias)  # Mamba's public code begins with biases 0, in the stem that Drama adds as well
        return nn.Sequential(linear, norm("rms", width, settings.norm_eps), nn.SiLU())
    if settings.stem == "dreamer":
        stem = nn.Sequential(nn.Linear(inputs, width, bias=False), norm("layer", width, settings.norm_eps), nn.SiLU())
        initialize(stem, settings.initialization)
        return stem
    return nn.Sequential(
        nn.Linear(inputs, width, bias=False),
        norm("layer", width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        norm("layer", width),
    )


def _prior_head(settings: LatentWorldModelSettings, width: int, outputs: int) -> nn.Module:
    if not settings.prior_layers:
        return nn.Linear(width, outputs)
    head = mlp(width, settings.prior_width, settings.prior_layers, outputs, norm_kind="layer", eps=settings.norm_eps)
    initialize(head, settings.initialization)
    return head
