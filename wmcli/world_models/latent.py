"""World models over categorical latents, on any backbone: Drama, STORM, S4WM, RSSM and TSSM.

A frame is K categorical variables of C classes. Latent and action of a frame are one element of the backbone. Its
output d predicts reward, termination, and the distribution of the next frame's latent (the *prior*). Encoder, decoder
and dynamics are trained together, so the encoder also learns latents that are easy to predict.

    z_t ~ posterior(o_t)        d_t = backbone(stem(z_0, a_0), ..., stem(z_t, a_t))
    prior of z_{t+1}, reward r_t, termination e_t = heads(d_t)        image o_t = decoder(z_t)

That is Drama. The *past* of a frame is d_{t-1}, zeros for an episode's first frame. S4WM and its baselines call it h_t,
and (z_t, h_t) the state. By the settings, the decoder reads the latent or the state. The heads read the past or the
state of the frame that they lead to. The posterior reads, besides its frame,

    nothing (factorized: Drama, S4WM, TSSM)     its past (recurrent: RSSM; one frame after the other)
    all frames and actions so far, through a second backbone (full: S4WM-Full-Posterior)

Sources: Drama (Wang et al. 2024, arXiv 2410.08893) and its public code; STORM (Zhang et al. 2023, arXiv 2310.09615);
S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064), equations 3 to 23.

B batch, T time (frames), K variables, C classes, D width of the backbone, F length of the encoders' outputs for a
frame, A length of an encoded action, W frames of the acting window. A frame has the parts (..., *part) of the
observation space, an action (..., *axes) those of the action space. `encode` returns a latent's probabilities (..., K,
C) float32. If the posterior reads more than the frame, it returns the encoders' outputs (..., F). A sampled latent is
one-hot. Time: see base.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli import ranks
from wmcli.backbones.base import Backbone, flat_state, map_state, replace_rows, state_tensors, with_tensors
from wmcli.errors import UsageError
from wmcli.nn import two_hot
from wmcli.nn.actions import encode_action, no_action, where_rows
from wmcli.nn.categorical import draw_one_hot, entropy, kl_divergence, one_hot, straight_through, uniform
from wmcli.nn.ensemble import Ensemble
from wmcli.nn.initialize import initialize, scale_last
from wmcli.nn.mlp import Activation, Norm, mlp
from wmcli.nn.stems import Stem, build_stem
from wmcli.nn.two_hot import TwoHot
from wmcli.spaces import ActionSpace, map_parts, to_action_space
from wmcli.tokenizers.categorical import CategoricalTokenizer, of_parts, summed
from wmcli.world_models.base import (
    Batch,
    DynamicsSettings,
    Elements,
    ImaginedStep,
    Parts,
    WorldModel,
    masked_mean,
    part_of,
)
from wmcli.world_models.latent_states import ActingWindow, Carry, LatentState, detach


class LatentWorldModelSettings(DynamicsSettings):
    """A world model over categorical latents, and its training. Defaults: Drama (XS)."""

    tokenizer_kind: ClassVar[str] = "categorical"
    reads_burn_in: ClassVar[bool] = True
    scores_frames: ClassVar[bool] = True
    learns_in_parts: ClassVar[bool] = True
    acting_keys: ClassVar[tuple[str, ...]] = ("act_on", "act_window")

    kind: Literal["latent"] = "latent"
    """Categorical latents, trained together with their dynamics."""
    stem: Stem = "linear"
    """Map from latent and action to the backbone: linear, RMSNorm, SiLU (Drama); two layers with LayerNorm (STORM); one
    without bias, LayerNorm, SiLU (Dreamer); or Drama's for each of the two, one behind the other (DreamerV3)."""
    posterior: Literal["factorized", "recurrent", "full"] = "factorized"
    """Inputs of a frame's posterior: the frame, the frame and its past (RSSM), or all frames and actions so far
    (S4WM-Full-Posterior). The latter needs a second backbone of the same settings."""
    decoder_reads: Literal["latent", "state"] = "latent"
    """Input of the decoder: the latent alone, or latent and past (S4WM)."""
    heads_read: Literal["past", "state"] = "past"
    """Input of reward and termination heads: the past that ends with the action, or also the latent of the next frame
    (S4WM). The latter needs episodes that include their last frame, as in memory tasks, or `closing_frames`."""
    prior_layers: int = Field(0, ge=0)
    """Hidden layers of the prior's head, each with norm and SiLU (Dreamer: 1, DreamerV3: 2). [layers]"""
    prior_width: int = Field(512, ge=1)
    """Width of the hidden layers of the prior's head. [features]"""
    prior_norm: Norm = "layer"
    """Norm of the prior's hidden layers: "layer", without bias (Dreamer), or "rms", with bias (DreamerV3)."""
    opening: Literal["zeros", "learned"] = "zeros"
    """Past of an episode's first frame: zeros, or what the backbone makes of an element of zeros, with a loss of the
    prior there (DreamerV3). The latter needs a recurrent posterior."""
    head_layers: int = Field(1, ge=1)
    """Hidden layers of the reward and termination heads (STORM: 2). [layers]"""
    head_width: int = Field(256, ge=1)
    """Width of the hidden layers of the reward and termination heads (STORM: 512). [features]"""
    head_norm: Norm = "rms"
    """Norm after each hidden layer of the reward and termination heads (STORM: layer)."""
    head_activation: Activation = "silu"
    """Activation after each norm of the reward and termination heads (STORM: relu)."""
    norm_eps: float = Field(0.0, ge=0)
    """Epsilon of the norms in stem and heads; 0 is 1e-6 for RMSNorm and 1e-5 for LayerNorm."""
    initialization: Literal["fan-average", "fan-in", "torch"] = "fan-average"
    """Initialization of reward and termination heads, a prior's head with hidden layers, and Dreamer's stems.
    fan-average is a truncated normal scaled by inputs and outputs, biases 0 (Dreamer, Drama); fan-in is scaled by the
    inputs, and the reward head's last layer is 0 (DreamerV3); torch is torch's default (STORM)."""
    reward: Literal["two-hot", "bernoulli", "mse", "none"] = "two-hot"
    """Reward loss: two-hot over 255 bins; Bernoulli for rewards of 0 and 1; squared error; or none."""
    two_hot: TwoHot = "symlog"
    """Space in which rewards are divided between bins and averaged: symlog space, or symexp, that of the rewards
    themselves (DreamerV3's code since 2024)."""
    predict_termination: bool = True
    """Learn terminations; else an imagined episode never ends."""
    imagined_termination: Literal["likelier", "sampled"] = "likelier"
    """Whether an imagined episode ends: the likelier of the two (STORM, Drama), or sampled. The likelier forgets every
    risk below one half, such as most lost lives."""
    ensemble: int = Field(0, ge=0)
    """Further heads that predict the next latent, for `controller.curiosity`. No gradient of theirs reaches the rest of
    the model. 0 for none. [heads]"""
    first_frame: bool = True
    """Reconstruct the frame that opens an episode as well. S4WM, which has no prior of it, does not."""
    sequence_length: int = Field(128, ge=2)
    """Training sequence length; the word "episode" in its place is the length of a memory task's episodes. [frames]"""
    burn_in: int = Field(0, ge=0)
    """Frames before a training sequence that are read without a gradient, for the state at its start. DreamerV3 takes
    the state that was recorded with it. [frames]"""
    rows: Literal["windows", "episodes", "streams"] = "windows"
    """Rows of a batch: windows as training.sampling says, whole episodes in shuffled epochs, or streams. A stream
    continues with the next `sequence_length` frames and the carried state (truncated backpropagation through time)."""
    context: int = Field(8, ge=1)
    """Real frames that imagination starts from. [frames]"""
    across_ends: bool = True
    """Let segments span several episodes, so that short ones fill them, and a lost life ends no game. Else each holds
    one episode, padded, and the padding enters batch statistics."""
    reset_at_ends: bool = True
    """In training and imagination, clear the state where a game opens (without across_ends: an episode) and predict
    nothing across. The public code does neither."""
    end_on_truncation: bool = False
    """Learn time limits as terminations."""
    closing_frames: bool = False
    """Learn the observation that closes an episode as well, in which no action is taken. With heads_read = "state"
    rewards and terminations of last steps are learned from it alone (DreamerV3)."""
    reconstruction_weight: float = Field(1.0, ge=0)
    """Weight of the reconstruction loss of a frame (0.5 makes squared errors the likelihood of a unit Gaussian)."""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the reward loss, which is a mean over frames."""
    dynamics_weight: float = Field(1.0, ge=0)
    """Weight of the loss that moves the prior towards the posterior (STORM: 0.5)."""
    representation_weight: float = Field(0.1, ge=0)
    """Weight of the loss that moves the posterior towards the prior."""
    free_nats: float = Field(1.0, ge=0)
    """Bound below which neither the dynamics nor the representation loss has a gradient. [nats per frame]"""
    free_nats_of: Literal["mean", "each"] = "mean"
    """Whether free_nats bounds the mean over the batch (public code) or each frame (the papers' formula)."""
    act_on: Literal["prior", "posterior"] = "prior"
    """Latent that the policy gets when acting: the prediction for the frame (public code), or its posterior (paper)."""
    act_window: int = Field(16, ge=0)
    """Past frames that acting rereads at every step; 0 carries the state through the episode. [frames]"""
    truncate_latents: bool = False
    """Reproduce a rounding fault of the public code: a fifth of the imagined latents reach the dynamics as zeros."""
    batch: int = Field(16, ge=1)
    """Segments in an update. [sequences]"""
    updates: int = Field(200, ge=0)
    """Updates in one call of the stage; words such as "50 epochs" are as many as learn 50 times from each frame of a
    memory task's scripted episodes. [updates]"""
    optimizer: Literal["laprop", "adamw", "adam"] = "laprop"
    """Optimizer of tokenizer and dynamics together."""
    learning_rate: float = Field(4e-5, gt=0)
    """Step size of the optimizer after the warm-up."""
    eps: float = Field(0.0, ge=0)
    """Added to the root of the second moment: 1e-5 in Memory Maze's Dreamer (RSSM). 0 is the optimizer's own, 1e-20 for
    laprop, 1e-8 for the others."""
    warmup: int = Field(1000, ge=0)
    """Updates over which the step size rises linearly. [updates]"""
    schedule: Literal["constant", "cosine"] = "constant"
    """Step size after the warm-up: constant, or falling to 0 at the last update as half a cosine."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; adam has none."""
    clip: float = Field(1000.0, gt=0)
    """Largest norm of the gradient of all parameters."""
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""
    agc: float = Field(0.0, ge=0)
    """Adaptive gradient clipping: largest norm of a tensor's gradient as a share of the tensor's own, 0.3 in DreamerV3;
    0 for none."""
    validate_every: int = Field(0, ge=0)
    """Updates between evaluations of the loss on held-out episodes; the weights with the lowest loss are published. 0
    publishes the last weights. [updates]"""

    @model_validator(mode="after")
    def _check_combinations(self) -> LatentWorldModelSettings:
        for key in ("context", "act_window"):
            if getattr(self, key) >= self.sequence_length and self.opening == "zeros":
                raise ValueError(
                    f"{key} = {getattr(self, key)} must be less than sequence_length = {self.sequence_length} frames."
                )
        if self.opening == "learned" and self.posterior != "recurrent":
            raise ValueError("opening = 'learned' needs posterior = 'recurrent', or set opening = 'zeros'.")
        if self.posterior != "factorized" and self.act_window:
            raise ValueError(
                f"act_window = {self.act_window}: a {self.posterior} posterior is sampled frame by frame;"
                " set act_window = 0."
            )
        if self.burn_in and (self.rows != "windows" or not self.reset_at_ends or self.validate_every):
            raise ValueError(
                f"burn_in = {self.burn_in} needs rows = 'windows', reset_at_ends = true and validate_every = 0: other"
                " rows begin with an episode or carry the state, and held-out episodes are whole."
            )
        if self.rows != "windows" and self.across_ends:
            raise ValueError(f"rows = '{self.rows}' does not take across_ends = true: set it to false.")
        if self.rows == "streams" and not self.reset_at_ends:
            raise ValueError("rows = 'streams' needs reset_at_ends = true: a stream runs over the ends of episodes.")
        return self

    @property
    def decodes_state(self) -> bool:
        """Whether encoder and decoder need the dynamics model."""
        return self.posterior != "factorized" or self.decoder_reads == "state"

    @property
    def encoder(self) -> Literal["dynamics", "itself"]:
        return "itself" if self.decodes_state else "dynamics"

    @property
    def reads_closing(self) -> bool:
        return self.closing_frames

    @property
    def learns_rewards(self) -> bool:
        return self.reward != "none"

    @property
    def longest_imagination(self) -> int | None:
        return None if self.opening == "learned" else self.sequence_length

    @property
    def needs_validation(self) -> bool:
        return self.validate_every > 0

    @property
    def longest_episode(self) -> int | None:
        return self.sequence_length if self.rows == "episodes" else None

    def build(self, parts: Parts) -> LatentWorldModel:
        backbone = parts.new_backbone(self.sequence_length + self.burn_in, 1)
        posterior_encoder = None
        if self.posterior == "full":
            posterior_encoder = parts.new_backbone(self.sequence_length + self.burn_in, 1)
        tokenizer = parts.tokenizer
        if self.decodes_state:
            features = parts.tokenizer_settings.features(parts.observation_space)
            reads = LatentWorldModel.tokenizer_reads(self, features, backbone.width)
            tokenizer = CategoricalTokenizer(parts.tokenizer_settings, parts.observation_space, **reads)
        model = LatentWorldModel(self, backbone, tokenizer, parts.action_space, posterior_encoder)
        model.frames_at_once = parts.frames_at_once
        return model


class LatentWorldModel(WorldModel):
    """Learns latents and their dynamics. The tokenizer is a part of it and is trained with it."""

    frozen_encoder = False
    differentiable = True
    min_segment = 2
    frames_at_once = 0  # encoded and decoded by `loss`, see `TrainingSettings`

    @property
    def lookback(self) -> int:
        return self.settings.act_window or self.settings.sequence_length

    def __init__(
        self,
        settings: LatentWorldModelSettings,
        backbone: Backbone,
        tokenizer: CategoricalTokenizer,
        actions: ActionSpace | int,
        posterior_encoder: Backbone | None = None,
    ) -> None:
        """Build the model.

        Args:
            settings: Its section.
            backbone: Reads latents and actions.
            tokenizer: Built for the inputs of its posterior and decoder, see `tokenizer_reads`.
            actions: The action space, or the number of actions.
            posterior_encoder: The backbone of the full posterior.

        Raises:
            UsageError: States are carried without end on a backbone with a limited number of positions.
        """
        super().__init__()
        width, (variables, classes) = backbone.width, tokenizer.shape
        assert (posterior_encoder is not None) == (settings.posterior == "full")
        endless = {"rows": "streams", "posterior": "full", "opening": "learned"}
        of_settings = [key for key, value in endless.items() if getattr(settings, key) == value]
        if backbone.max_length is not None and of_settings:
            key = f"{of_settings[0]} = '{endless[of_settings[0]]}'"
            raise UsageError(
                f"dynamics.{key} carries a state without end, and this backbone has a limited number of positions: set"
                " another backbone.kind, for example transformer-xl."
            )
        self.settings = settings
        self.action_space = to_action_space(actions)
        self.observation_space = tokenizer.observation_space
        self.across_ends = settings.across_ends
        self.context = settings.context
        self.history = settings.burn_in
        self.segment = self.history + settings.sequence_length
        self.rows = settings.rows
        self.learns_rewards = settings.learns_rewards
        self.decodes = "features" if settings.decodes_state else "latents"
        self.feature_shape = (variables * classes + width,)
        self.frame_features = variables * classes
        flat = flat_state(backbone.initial_state(1))
        self.memory_features = None if flat is None else flat.shape[1]
        self.starts_anywhere = settings.posterior == "recurrent" and flat is not None
        self.uniforms_per_step = self.uniforms_per_frame = variables
        self._samples_termination = settings.predict_termination and settings.imagined_termination == "sampled"
        if self._samples_termination:
            self.uniforms_per_step += 1
        self.tokenizer = tokenizer
        self.stem = self._stem(variables * classes, backbone)
        self.backbone = backbone
        if posterior_encoder is not None:
            self.posterior_stem = self._stem(tokenizer.features, posterior_encoder)
            self.posterior_encoder = posterior_encoder
        self.prior_head = self._prior_head(width, variables * classes)
        head_inputs = width + (variables * classes if settings.heads_read == "state" else 0)
        if settings.reward != "none":
            self.reward_head = self._head(head_inputs, two_hot.BINS if settings.reward == "two-hot" else 1)
            if settings.initialization == "fan-in":
                scale_last(self.reward_head, 0)
        if settings.predict_termination:
            self.termination_head = self._head(head_inputs, 1)
        self.ensemble = Ensemble(settings.ensemble, width, variables, classes) if settings.ensemble else None
        self.has_ensemble = self.ensemble is not None

    @staticmethod
    def tokenizer_reads(settings: LatentWorldModelSettings, features: int, width: int) -> dict[str, int]:
        """Return arguments of `CategoricalTokenizer` for a posterior and a decoder with further inputs.

        Args:
            settings: Of the world model.
            features: Length of the encoder's output for a frame.
            width: Width of the backbone.
        """
        reads = {"recurrent": {"posterior_inputs": features + width}, "full": {"posterior_inputs": width}}
        past = {"past": width} if settings.decoder_reads == "state" else {}
        return reads.get(settings.posterior, {}) | past

    def _stem(self, latent: int, backbone: Backbone) -> nn.Module:
        s, encoded = self.settings, self.action_space.encoded
        return build_stem(s.stem, latent, encoded, backbone.inputs, eps=s.norm_eps, initialization=s.initialization)

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

    def _prior_head(self, width: int, outputs: int) -> nn.Module:
        s = self.settings
        if not s.prior_layers:
            return nn.Linear(width, outputs)
        head = mlp(width, s.prior_width, s.prior_layers, outputs, norm_kind=s.prior_norm, eps=s.norm_eps)
        initialize(head, s.initialization)
        return head

    def check_reads(self, frames: int) -> None:
        """Check that `frames` frames in a row can be read.

        Raises:
            UsageError: The backbone has fewer positions.
        """
        limit = self.backbone.max_length
        if limit is not None and frames > limit:
            raise UsageError(
                f"dynamics.sequence_length = {limit - self.history}: this backbone has only {limit} positions for"
                f" {frames} frames; train with dynamics.sequence_length={frames}, or another backbone.kind."
            )

    # -- the parts, on any leading axes -------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Any) -> Tensor:
        """Encode frames (B, T, *part) as probabilities of latents (B, T, K, C).

        If the posterior reads more than a frame, return the encoders' outputs (B, T, F) instead.
        """
        if self.settings.posterior == "factorized":
            return self.tokenizer.encode(observation)
        return self.tokenizer.embed(observation).float()

    def _elements(self, z: Tensor, action: Tensor) -> Tensor:
        """Map sampled latents (..., K, C) and actions (..., *axes) to elements (..., D)."""
        return self.stem(torch.cat((z.flatten(-2), encode_action(self.action_space, action, z.dtype)), -1))

    def elements_of(self, latent: Tensor, action: Tensor) -> Elements:
        reset = torch.zeros(action.shape[:2], dtype=torch.bool, device=action.device)
        reset[:, 0] = True
        z = self._latents_and_past(self.observe(latent, action, reset)[0])[0]
        return Elements(self._elements(z, action))

    def _prior(self, past: Tensor) -> Tensor:
        """Map pasts (..., D) to the next latent's log-probabilities (..., K, C)."""
        return self.tokenizer.log_probabilities(self.prior_head(past))

    def _opening(self, rows: int) -> tuple[Tensor, Any]:
        """Return the past (B, D) of an episode's first frame, and the backbone's state there."""
        state = self.backbone.initial_state(rows)
        device = next(self.parameters()).device
        if self.settings.opening == "zeros":
            return torch.zeros(rows, self.backbone.width, device=device), state
        variables, classes = self.tokenizer.shape
        nothing = torch.zeros(rows, variables * classes + self.action_space.encoded, device=device)
        y, state = self.backbone(self.stem(nothing)[:, None], state)
        return y[:, 0].float(), state

    def _open(
        self, is_first: Tensor | None, opening: tuple[Tensor, Any], past: Tensor, backbone_state: Any
    ) -> tuple[Tensor, Any, Tensor | None]:
        """Begin anew in the rows where `is_first` (B,).

        Args:
            is_first: The frame has no predecessor; None nowhere.
            opening: Of `_opening`.
            past: (B, D), of the frame.
            backbone_state: Of the backbone, before the frame.

        Returns:
            Past and state at the frame, and the rows that the backbone has yet to clear.
        """
        if is_first is None:
            return past, backbone_state, None
        past = where_rows(is_first, opening[0].to(past.dtype), past)
        if self.settings.opening == "zeros":
            return past, backbone_state, is_first
        pairs = zip(state_tensors(opening[1]), state_tensors(backbone_state), strict=True)
        opened = [where_rows(is_first, new.to(old.dtype), old) for new, old in pairs]
        return past, with_tensors(backbone_state, opened), None

    def _full_posterior(
        self, features: Tensor, previous: Tensor, reset: Tensor | None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """Compute the full posterior of frames, and the state after them.

        Args:
            features: (B, T, F).
            previous: (B, T, A), the actions that led to the frames, encoded, zeros where there was none.
            reset: (B, T) bool or None.
            state: State of the posterior's backbone before the frames.

        Returns:
            Log-probabilities (B, T, K, C), and the state.
        """
        x = self.posterior_stem(torch.cat((features, previous.to(features.dtype)), -1))
        y, state = self.posterior_encoder(x, state, reset)
        return self.tokenizer.posterior_of(y), state

    def _previous(self, action: Tensor, is_first: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the actions that led to frames, encoded (B, T, A): those of the frames before them.

        Args:
            action: (B, T, *axes).
            is_first: (B, T) bool: the frame has no predecessor.
            before: (B, *axes), the action of the frame before all; None if there was none.
        """
        earlier = encode_action(self.action_space, action[:, :-1], torch.float32)
        if before is None:
            start = earlier.new_zeros(len(action), self.action_space.encoded)
        else:
            start = encode_action(self.action_space, before, earlier.dtype)
        return torch.cat((start[:, None], earlier), 1).masked_fill(is_first[..., None], 0)

    def _decoder_past(self, past: Tensor) -> Tensor | None:
        """Return the part of pasts (..., D) that the decoder reads beside the latents."""
        return past if self.settings.decoder_reads == "state" else None

    def _reading(self, past: Tensor, z: Tensor | None) -> Tensor:
        """Return the input of reward and termination heads.

        Args:
            past: (..., D).
            z: Latents (..., K, C) of the frames that these are the pasts of.
        """
        if self.settings.heads_read == "past":
            return past
        assert z is not None
        return torch.cat((z.flatten(-2), past.to(z.dtype)), -1)

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum reconstruction, reward, termination, and weighted dynamics and representation losses.

        See Drama, section 3, and S4WM, equations 8 and 9, with weights alpha and 1 - alpha. `batch.inputs` holds
        frames. Reconstruction is that of the tokenizer, summed over a frame's parts: the squared error of all pixels,
        weighed by `tokenizer.object_share`, and the losses of vectors and categories. `settings.reward` selects the
        reward loss. The termination loss is a binary cross entropy. With p the posterior of the next frame, q the
        prior, and [x] constant: dynamics = max(free, KL([p] || q)), representation = max(free, KL(p || [q])).

        A frame that closes an episode is learned like any other. Nothing is learned of what follows it. The first
        `settings.burn_in` frames are only read.

        The metrics are `reconstruction` (of several parts also `reconstruction.NAME` each), `reward_loss`,
        `termination_loss`, `observation_loss` (the KL itself, nats a frame), `posterior_entropy` and `prior_entropy`
        (nats a frame), and `ensemble_loss` where there is one.
        """
        carry = None
        if self.history:
            carry = self._carry_after(part_of(batch, slice(self.history)))
            batch = part_of(batch, slice(self.history, None))
        total, log, _ = self.carried_loss(batch, carry)
        return total, log

    @torch.no_grad()
    def _carry_after(self, batch: Batch) -> Carry:
        """Read frames, the first of which has no past, for the state behind them."""
        features = self.tokenizer.embed(batch.inputs, self.frames_at_once)
        begins = torch.cat((torch.ones_like(batch.is_first[:, :1]), batch.is_first[:, 1:]), 1)
        carry = self._read(features, batch, begins, self.initial_carry(len(batch.valid)))[-1]
        assert carry is not None
        return carry

    def initial_carry(self, rows: int) -> Carry:
        """Return the carry before the first frames of streams."""
        device = next(self.parameters()).device
        flag = torch.zeros(rows, dtype=torch.bool, device=device)
        return Carry(
            self.backbone.initial_state(rows),
            self.posterior_encoder.initial_state(rows) if self.settings.posterior == "full" else (),
            torch.zeros(rows, *self.tokenizer.shape, device=device),
            no_action(self.action_space, (rows,), device),
            torch.zeros(rows, device=device),
            flag,
            flag,
            flag,
        )

    def carried_loss(self, batch: Batch, carry: Carry | None) -> tuple[Tensor, dict[str, Tensor], Carry | None]:
        """Compute `loss` of the next frames of each row's stream, and the carry to those after them.

        A `carry` of None stands for rows without a past, and nothing is carried on.
        """
        settings, valid = self.settings, batch.valid
        is_first = batch.is_first if settings.reset_at_ends else torch.zeros_like(batch.is_first)
        features = self.tokenizer.embed(batch.inputs, self.frames_at_once)
        log_posterior, z, outputs, after = self._read(features, batch, is_first, carry)
        opening = self._opening(len(valid))[0]
        if carry is None:  # the first frame has no past
            past = torch.cat((opening[:, None].to(outputs.dtype), outputs[:, : valid.shape[1] - 1]), 1)
        else:
            past = outputs
        past = where_rows(is_first, opening[:, None].to(past.dtype), past)
        is_scored = valid if settings.first_frame else valid & ~batch.is_first
        frames = map_parts(lambda part: part.flatten(0, 1), batch.inputs)
        losses = self.tokenizer.reconstruction_losses(
            z.flatten(0, 1), self._decoder_past(past.flatten(0, 1)), frames, self.frames_at_once
        )
        reconstructions = {
            name: masked_mean(loss.view(valid.shape), is_scored, batch.weight) for name, loss in losses.items()
        }
        reconstruction = summed(reconstructions)
        reward_loss, termination_loss = self._outcome_losses(batch, carry, outputs, z, is_first)

        learns_opening = settings.opening == "learned"
        start = 0 if carry is not None or learns_opening else 1
        has_past = torch.zeros_like(valid[:, 0]) if carry is None else carry.is_valid
        follows = valid & ~is_first & torch.cat((has_past[:, None], _has_action(batch)[:, :-1]), 1)
        if learns_opening:
            follows = follows | (valid & is_first)
        follows = follows[:, start:]
        log_posterior, log_prior = log_posterior[:, start:], self._prior(past[:, start:])
        dynamics = self._with_free_nats(kl_divergence(log_posterior.detach(), log_prior), follows, batch.weight)
        representation = self._with_free_nats(kl_divergence(log_posterior, log_prior.detach()), follows, batch.weight)

        total = settings.reconstruction_weight * reconstruction + settings.reward_weight * reward_loss
        total = total + termination_loss + settings.dynamics_weight * dynamics
        total = total + settings.representation_weight * representation
        of_ensemble = {}
        if self.ensemble is not None:
            errors = self.ensemble.loss(past[:, start:], log_posterior.exp())
            of_ensemble["ensemble_loss"] = masked_mean(errors, follows, batch.weight)
            total = total + of_ensemble["ensemble_loss"]
        with torch.no_grad():
            log = of_ensemble | {
                "reconstruction": reconstruction,
                **of_parts("reconstruction", reconstructions),
                "reward_loss": reward_loss,
                "termination_loss": termination_loss,
                "observation_loss": masked_mean(kl_divergence(log_posterior, log_prior), follows),
                "posterior_entropy": masked_mean(entropy(log_posterior), follows),
                "prior_entropy": masked_mean(entropy(log_prior), follows),
            }
        return total, {name: value.detach() for name, value in log.items()}, after

    def _read(
        self, features: Tensor, batch: Batch, is_first: Tensor, carry: Carry | None
    ) -> tuple[Tensor, Tensor, Tensor, Carry | None]:
        """Sample latents of frames and read them with the backbone.

        Args:
            features: (B, T, F).
            batch: The frames' actions and flags.
            is_first: (B, T) bool, where the state is cleared.
            carry: State of the stream, if there is one.

        Returns:
            Log-probabilities of the posteriors (B, T, K, C), the samples, the backbone's outputs, and the next carry.
                The outputs (B, T, D) belong to the T frames, or, after a `carry`, to the carried frame and the first T
                - 1.
        """
        settings = self.settings
        # Otherwise only the first frame of a row can open an episode, and it has no past.
        reset = is_first if settings.reset_at_ends and (self.across_ends or carry is not None) else None
        posterior_encoder: Any = ()
        if settings.posterior == "recurrent":
            log_posterior, z, outputs, backbone_state = self._unroll(features, batch, reset, carry)
        else:
            if settings.posterior == "full":
                previous = self._previous(batch.action, batch.is_first, None if carry is None else carry.action)
                state = None if carry is None else carry.posterior_encoder
                log_posterior, posterior_encoder = self._full_posterior(features, previous, reset, state)
            else:
                log_posterior = self.tokenizer.posterior_of(features)
            z = straight_through(log_posterior.exp())
            latents, action = z, batch.action
            backbone_state = None
            if carry is not None:
                latents = torch.cat((carry.latent[:, None], z[:, :-1]), 1)
                action = torch.cat((carry.action[:, None], batch.action[:, :-1]), 1)
                reset = torch.cat((carry.is_first[:, None], is_first[:, :-1]), 1)
                backbone_state = carry.backbone_state
            outputs, backbone_state = self.backbone(self._elements(latents, action), backbone_state, reset)
        if carry is None:
            return log_posterior, z, outputs, None
        after = Carry(
            backbone_state,
            posterior_encoder,
            z[:, -1],
            batch.action[:, -1],
            batch.reward[:, -1],
            self._find_terminations(batch)[:, -1],
            is_first[:, -1],
            (batch.valid & _has_action(batch))[:, -1],
        )
        return log_posterior, z, outputs, detach(self.initial_carry(len(z)), after)

    def _unroll(
        self, features: Tensor, batch: Batch, reset: Tensor | None, carry: Carry | None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Do the work of `_read` frame by frame, since each posterior depends on its past; return the backbone's state
        too."""
        rows, time = batch.valid.shape
        opening = self._opening(rows)
        if carry is None:
            past, backbone_state = opening
            outputs = []
        else:
            _, backbone_state, clear = self._open(carry.is_first, opening, opening[0], carry.backbone_state)
            past, backbone_state = self._advance(carry.latent, carry.action, backbone_state, clear)
            outputs = [past]
        posteriors, samples = [], []
        for t, (feature, action) in enumerate(zip(features.unbind(1), batch.action.unbind(1), strict=True)):
            step_reset = None if reset is None else reset[:, t]
            reset_past, backbone_state, clear = self._open(step_reset, opening, past, backbone_state)
            log_posterior = self.tokenizer.posterior_of(torch.cat((feature, reset_past.to(feature.dtype)), -1))
            z = straight_through(log_posterior.exp())
            posteriors.append(log_posterior)
            samples.append(z)
            if carry is None or t + 1 < time:
                past, backbone_state = self._advance(z, action, backbone_state, clear)
                outputs.append(past)
        return torch.stack(posteriors, 1), torch.stack(samples, 1), torch.stack(outputs, 1), backbone_state

    def _advance(self, z: Tensor, action: Tensor, backbone_state: Any, reset: Tensor | None) -> tuple[Tensor, Any]:
        """Read one frame (B, K, C) and action (B, *axes): return the past (B, D) float32 and the state, with gradient.

        `Backbone.step` is not used: it may write in place.
        """
        y, backbone_state = self.backbone(
            self._elements(z, action)[:, None], backbone_state, None if reset is None else reset[:, None]
        )
        return y[:, 0].float(), backbone_state

    def _find_terminations(self, batch: Batch) -> Tensor:
        return (batch.terminated | batch.truncated) if self.settings.end_on_truncation else batch.terminated

    def _outcome_losses(
        self, batch: Batch, carry: Carry | None, outputs: Tensor, z: Tensor, is_first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the reward and termination losses of the elements with backbone outputs `outputs` (B, T, D)."""
        settings = self.settings
        reward, terminations, counts = batch.reward, self._find_terminations(batch), batch.valid & _has_action(batch)
        if carry is not None:  # for the carried frame and all but the last
            reward = torch.cat((carry.reward[:, None], reward[:, :-1]), 1)
            terminations = torch.cat((carry.terminated[:, None], terminations[:, :-1]), 1)
            counts = torch.cat((carry.is_valid[:, None], counts[:, :-1]), 1)
        if settings.heads_read == "state":  # for frames whose successor is of the same episode
            if carry is None:
                outputs, z, reward, terminations = outputs[:, :-1], z[:, 1:], reward[:, :-1], terminations[:, :-1]
                counts, is_first = batch.valid[:, 1:] & counts[:, :-1], is_first[:, 1:]
            counts = counts & ~is_first
        reading = self._reading(outputs, z if settings.heads_read == "state" else None)
        reward_loss = termination_loss = torch.zeros((), device=outputs.device)
        if settings.reward != "none":
            reward_loss = masked_mean(self._reward_loss(self.reward_head(reading), reward), counts, batch.weight)
        if settings.predict_termination:
            termination = self.termination_head(reading).float().squeeze(-1)
            termination_loss = masked_mean(
                F.binary_cross_entropy_with_logits(termination, terminations.float(), reduction="none"),
                counts,
                batch.weight,
            )
        return reward_loss, termination_loss

    def _reward_loss(self, output: Tensor, reward: Tensor) -> Tensor:
        """Return the losses (...) of the head's output (..., outputs) for rewards (...)."""
        if self.settings.reward == "two-hot":
            return two_hot.loss(output, reward, self.settings.two_hot)
        output = output.float().squeeze(-1)
        if self.settings.reward == "mse":
            return (output - reward).square()
        return F.binary_cross_entropy_with_logits(output, reward, reduction="none")

    def _reward(self, reading: Tensor) -> Tensor:
        """Return the expected reward, (...) float32."""
        kind = self.settings.reward
        if kind == "none":
            return torch.zeros(reading.shape[:-1], device=reading.device)
        output = self.reward_head(reading)
        if kind == "two-hot":
            return two_hot.decode(output, self.settings.two_hot)
        output = output.float().squeeze(-1)
        return output.sigmoid() if kind == "bernoulli" else output

    def _with_free_nats(self, kl: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
        free = self.settings.free_nats
        if self.settings.free_nats_of == "each":
            return masked_mean(kl.clamp(min=free), mask, weight)
        return ranks.mean(masked_mean(kl, mask, weight)).clamp(min=free)

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
        """Read all frames but the last, each sampled anew; features of all. See `WorldModel.observe`.

        Without `reset_at_ends` only the first frame of a window has no past, as in training. With `likeliest` the
        likeliest latents replace samples.
        """
        choose_latent = _take_likeliest if likeliest else draw_one_hot
        if self.settings.posterior == "recurrent":
            features, states = self._observe_recurrent(latent, action, reset, uniforms, 1, choose_latent)
            return features, states[0]
        reset = self._resets(reset)
        rows, time = reset.shape
        backbone_state = self.backbone.initial_state(rows)
        deterministic = torch.zeros(rows, time, self.backbone.width, device=action.device)
        if self.settings.posterior == "full":
            latent = self._full_posterior(latent, self._previous(action, reset), reset)[0].exp()
        z = choose_latent(latent, uniforms)
        if time > 1:
            y, backbone_state = self.backbone(self._elements(z[:, :-1], action[:, :-1]), backbone_state, reset[:, :-1])
            deterministic[:, 1:] = y
            deterministic = deterministic.masked_fill(reset[..., None], 0)
        features = torch.cat((z.flatten(-2), deterministic), -1)
        return features, LatentState(backbone_state, reset[:, -1], deterministic[:, -1], z[:, -1], z[:, -1], time - 1)

    @torch.no_grad()
    def observe_each(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None, last: int = 1
    ) -> tuple[Tensor, LatentState]:
        """Read all frames; see `WorldModel.observe_each`."""
        features, states = self._observe_recurrent(latent, action, reset, uniforms, last, draw_one_hot)
        tensors = [
            torch.stack(each, 1).flatten(0, 1) for each in zip(*(state_tensors(state) for state in states), strict=True)
        ]
        return features, with_tensors(states[-1], tensors)

    def _observe_recurrent(
        self,
        latent: Tensor,
        action: Tensor,
        reset: Tensor,
        uniforms: Tensor | None,
        last: int,
        choose_latent: Callable[[Tensor, Tensor | None], Tensor],
    ) -> tuple[Tensor, list[LatentState]]:
        """Read frame by frame; return the features of all, and the states at the `last` ones."""
        reset = self._resets(reset)
        rows, time = reset.shape
        if uniforms is None:
            uniforms = uniform((rows, time, self.uniforms_per_frame), action.device)
        opening = self._opening(rows)
        past, backbone_state = opening
        z = torch.zeros(rows, *self.tokenizer.shape, device=action.device)
        features, states = [], []
        clear: Tensor | None = None
        for t in range(time):
            if t:
                y, backbone_state = self.backbone.step(self._elements(z, action[:, t - 1]), backbone_state, clear)
                past = y.to(past.dtype)
            past, backbone_state, clear = self._open(reset[:, t], opening, past, backbone_state)
            posterior_input = torch.cat((latent[:, t], past.to(latent.dtype)), -1)
            z = choose_latent(self.tokenizer.posterior_of(posterior_input).exp(), uniforms[:, t])
            features.append(torch.cat((z.flatten(-2), past), -1))
            if t >= time - last:
                kept = backbone_state if t == time - 1 else map_state(Tensor.clone, backbone_state)
                states.append(LatentState(kept, clear, past, z, z, time - 1))
        return torch.stack(features, 1), states

    def _resets(self, reset: Tensor) -> Tensor:
        """Return where the state is cleared; nowhere without `reset_at_ends`."""
        return torch.zeros_like(reset) if self.across_ends and not self.settings.reset_at_ends else reset

    def find_ends(self, batch: Batch) -> Tensor:
        """Return `WorldModel.find_ends`; all False without `reset_at_ends`, since the model has learned to read on."""
        ends = super().find_ends(batch)
        return torch.zeros_like(ends) if self.across_ends and not self.settings.reset_at_ends else ends

    def imagine(
        self, state: LatentState, action: Tensor, uniforms: Tensor | None = None, *, likeliest: bool = False
    ) -> tuple[ImaginedStep, LatentState]:
        """Take one step, with the expected reward and the termination of the settings. See `WorldModel.imagine`.

        With `likeliest` the likeliest latent and termination replace samples. A backbone with a limited number of
        positions restarts from the current frame alone once they are used up. Where the gradient is enabled, and
        actions are continuous, samples have the gradient of their probabilities.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and action.is_floating_point()):
            return self._imagine(state, action, uniforms, likeliest)

    def _imagine(
        self, state: LatentState, action: Tensor, uniforms: Tensor | None, likeliest: bool
    ) -> tuple[ImaginedStep, LatentState]:
        deterministic, backbone_state, length = self._step(state, action)
        log_prior = self._prior(deterministic)
        prior = log_prior.exp()
        of_termination = None
        if self._samples_termination and not likeliest:
            if uniforms is None:
                uniforms = uniform((len(action), self.uniforms_per_step), action.device)
            uniforms, of_termination = uniforms[:, :-1], uniforms[:, -1]
        z = (_take_likeliest if likeliest else draw_one_hot)(prior, uniforms)
        if torch.is_grad_enabled():
            z = z + (prior - prior.detach())
        reading = self._reading(deterministic, z)
        reward = self._reward(reading)
        terminated, continuation = torch.zeros_like(reward, dtype=torch.bool), torch.ones_like(reward)
        if self.settings.predict_termination:
            logit = self.termination_head(reading).squeeze(-1)
            terminated = logit > 0 if of_termination is None else of_termination < logit.float().sigmoid()
            continuation = (-logit.float()).sigmoid()
        # The public code adds and subtracts the probabilities in float32 and stores the result as integers.
        dynamics_latent = ((z + prior) - prior).long().to(z.dtype) if self.settings.truncate_latents else z
        disagreement = None if self.ensemble is None else self.ensemble.disagreement(deterministic)
        return ImaginedStep(z, reward, terminated, disagreement, continuation, log_prior.detach()), LatentState(
            backbone_state, None, deterministic.to(z.dtype), dynamics_latent, z, length
        )

    def _step(self, state: LatentState, action: Tensor) -> tuple[Tensor, Any, int]:
        """Return the deterministic state (B, D) after the frame and its action (B, *axes), the backbone's state and its
        length."""
        backbone_state, is_first, length, limit = (
            state.backbone_state,
            state.is_first,
            state.length,
            self.backbone.max_length,
        )
        if limit is not None and length == limit:
            backbone_state, is_first, length = self.backbone.initial_state(len(action)), None, 0
        element = self._elements(state.latent, action)
        if torch.is_grad_enabled():  # `Backbone.step` may write in place
            reset = None if is_first is None else is_first[:, None]
            y, backbone_state = self.backbone(element[:, None], backbone_state, reset)
            return y[:, 0], backbone_state, length + 1
        deterministic, backbone_state = self.backbone.step(element, backbone_state, is_first)
        return deterministic, backbone_state, length + 1

    def replace_rows(self, state: LatentState, rows: Tensor, fresh: LatentState) -> LatentState:
        """See `WorldModel.replace_rows`."""
        assert state.window is None and state.posterior_encoder is None

        def first_rows(part: LatentState) -> Tensor:
            return part.latent.new_zeros(len(part.latent), dtype=torch.bool) if part.is_first is None else part.is_first

        return LatentState(
            self.backbone.replace_rows(state.backbone_state, rows, fresh.backbone_state),
            replace_rows(first_rows(state), rows, first_rows(fresh)),
            replace_rows(state.deterministic, rows, fresh.deterministic),
            replace_rows(state.latent, rows, fresh.latent),
            replace_rows(state.policy_latent, rows, fresh.policy_latent),
            min(state.length, fresh.length),
        )

    def features(self, state: LatentState) -> Tensor:
        """Return latent and deterministic state, (B, K * C + D) float32."""
        return torch.cat((state.policy_latent.flatten(-2), state.deterministic), -1)

    def memory(self, state: LatentState) -> Tensor:
        """Return the backbone's state, scaled to a root mean square of 1; zeros without a past.

        The deterministic state holds only the part of it that the next frame needs.
        """
        flat = flat_state(state.backbone_state)
        assert flat is not None, "a backbone without memory_features"
        flat = flat.float() if state.is_first is None else flat.float().masked_fill(state.is_first[:, None], 0)
        return F.rms_norm(flat, flat.shape[1:])

    def latent(self, state: LatentState) -> Tensor:
        """Return the controller's input for the current frame, (B, K, C)."""
        return state.policy_latent

    @torch.no_grad()
    def images(self, features: Tensor) -> Tensor:
        """Decode features (N, K * C + D), sampled latents included, to images (N, C, H, W) float32.

        This and `frame_error` are for a model whose frames are one image.
        """
        z, past = self._latents_and_past(features)
        return self.tokenizer.reconstruct(z, self._decoder_past(past))

    @torch.no_grad()
    def frame_error(self, features: Tensor, frames: Tensor) -> Tensor:
        """Return the squared error of decoded features, summed over an image's pixels, (N,).

        Args:
            features: (N, K * C + D), sampled latents included.
            frames: (N, H, W, C) uint8.
        """
        z, past = self._latents_and_past(features)
        return self.tokenizer.reconstruction_error(z, self._decoder_past(past), frames)

    @torch.no_grad()
    def arrival_reward(self, features: Tensor) -> Tensor:
        """Return the reward of the step that led to a frame, from its features (..., K * C + D): (...) float32."""
        return self._reward(features if self.settings.heads_read == "state" else features[..., self.frame_features :])

    def decode(self, latent: Tensor) -> Any:
        """Decode to frames (..., *part).

        Args:
            latent: (..., K, C), or features (..., K * C + D) for a model that decodes those.
        """
        if self.decodes == "latents":
            return self.tokenizer.decode(latent)
        z, past = self._latents_and_past(latent)
        return self.tokenizer.decode(z, self._decoder_past(past))

    def _latents_and_past(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Split features (..., K * C + D) into latents (..., K, C) and pasts (..., D)."""
        z, past = features.split((self.frame_features, self.backbone.width), -1)
        return z.unflatten(-1, self.tokenizer.shape), past

    # -- acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def perceive(
        self,
        state: LatentState | None,
        observation: Any,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> LatentState:
        """Read one real frame.

        With `act_window` the last frames of the episode are sampled and read again at every step, as in the public
        code. Else the backbone's state continues from frame to frame. With act_on = "prior" the controller gets the
        prediction for this frame. For an episode's first frame, which has no prediction, it gets the posterior.
        """
        latent = self.encode(observation)
        read_past = self._read_window if self.settings.act_window else self._read_on
        backbone_state, is_first, deterministic, length, window = read_past(
            state, latent, previous_action, reset, generator
        )
        posterior_encoder = None
        if self.settings.posterior == "recurrent":
            latent = self.tokenizer.posterior_of(torch.cat((latent, deterministic), -1)).exp()
        elif self.settings.posterior == "full":
            previous = encode_action(self.action_space, previous_action, latent.dtype).masked_fill(reset[:, None], 0)
            before = self.posterior_encoder.initial_state(len(latent)) if state is None else state.posterior_encoder
            log_posterior, posterior_encoder = self._full_posterior(
                latent[:, None], previous[:, None], reset[:, None], before
            )
            latent = log_posterior[:, 0].exp()
        z = policy_latent = _sample(latent, generator)
        if self.settings.act_on == "prior":
            predicted = _sample(self._prior(deterministic).exp(), generator)
            policy_latent = torch.where(is_first[:, None, None], z, predicted)
        clear = None if self.settings.opening == "learned" else is_first
        return LatentState(backbone_state, clear, deterministic, z, policy_latent, length, window, posterior_encoder)

    def _read_on(
        self,
        state: LatentState | None,
        latent: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Any, Tensor, Tensor, int, None]:
        """Continue from the frame before the current one.

        Returns:
            The backbone's state, (B,) bool where it is void, the deterministic state, the length, and no window.
        """
        opening = self._opening(len(latent))
        if state is None:
            return opening[1], torch.ones_like(reset), opening[0].to(latent.dtype), 0, None
        deterministic, backbone_state, length = self._step(state, previous_action)
        deterministic, backbone_state, _ = self._open(reset, opening, deterministic.to(latent.dtype), backbone_state)
        return backbone_state, reset, deterministic, length, None

    def _read_window(
        self,
        state: LatentState | None,
        latent: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Any, Tensor, Tensor, int, ActingWindow]:
        """Return the same as `_read_on`, from the frames of the window, and the window itself."""
        rows, window = len(latent), self.settings.act_window
        if state is None or state.window is None:
            frames = latent.new_zeros(rows, window, *latent.shape[1:])
            actions = no_action(self.action_space, (rows, window), latent.device)
            length = torch.zeros(rows, dtype=torch.int64, device=latent.device)
        else:
            frames = torch.cat((state.window.latent[:, 1:], state.window.current[:, None]), 1)
            actions = torch.cat((state.window.action[:, 1:], previous_action[:, None]), 1)
            length = (state.window.length + 1).clamp(max=window).masked_fill(reset, 0)
        elements = self._elements(_sample(frames, generator), actions)
        window_reset = torch.arange(window, device=latent.device) == (window - length)[:, None]
        y, backbone_state = self.backbone(elements, self.backbone.initial_state(rows), window_reset)
        is_first = length == 0
        deterministic = y[:, -1].to(latent.dtype).masked_fill(is_first[:, None], 0)
        return backbone_state, is_first, deterministic, window, ActingWindow(frames, actions, length, latent)


def _has_action(batch: Batch) -> Tensor:
    """Return (B, T) bool: whether an action was taken in the frame."""
    return torch.ones_like(batch.valid) if batch.is_closing is None else ~batch.is_closing


def _take_likeliest(probabilities: Tensor, uniforms: Tensor | None = None) -> Tensor:
    """Return the likeliest classes one-hot, in place of `draw_one_hot`; `uniforms` are ignored."""
    return one_hot(probabilities.argmax(-1), probabilities.shape[-1], probabilities.dtype)


def _sample(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Call `draw_one_hot` with random numbers from `generator`, on any device."""
    return draw_one_hot(probabilities, uniform(probabilities.shape[:-1], probabilities.device, generator))
