"""World models over discrete tokens: REM and IRIS.

A frame, which may be any observation, is K tokens of a tokenizer. A block is the K tokens of a frame followed by one
token for the action taken in it. A backbone reads block after block. Small heads on its outputs predict the next
frame's tokens, the reward and the termination. Backbone, tokenizer and kind of prediction combine freely:

- prediction "pop", Parallel Observation Prediction (REM: Cohen et al. 2024, ICML, arXiv 2402.05643): K learned query
tokens after a block predict all K tokens of the next frame at once. They leave the state unchanged.
- prediction "sequential" (IRIS: Micheli et al. 2023, ICLR, arXiv 2209.00588): every token predicts the token after it.

Reward and termination are read at the action token. Rewards are learned and imagined as signs, -1, 0, 1, or by value.

Axes: B batch, T time (frames, blocks), K tokens of a frame, L = K + 1 tokens of a block, N codes of the tokenizer, D
width of the backbone. An action has the axes of its space behind those given here, and an observation the parts of its
space (`wmcli.spaces`). Time: see base.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, BackboneSettings, replace_rows
from wmcli.errors import UsageError
from wmcli.nn import two_hot
from wmcli.nn.actions import action_embedding
from wmcli.nn.categorical import IMPOSSIBLE, sample, uniform
from wmcli.nn.ensemble import Ensemble
from wmcli.spaces import ActionSpace, ObservationSpace, to_action_space
from wmcli.world_models.base import Batch, DynamicsSettings, Elements, ImaginedStep, Parts, WorldModel, masked_mean
from wmcli.world_models.recent import RecentFrames, append_frame


class TokenWorldModelSettings(DynamicsSettings):
    """A world model over the tokens of a frozen tokenizer, and its training. Defaults: REM on Atari."""

    tokenizer_kind: ClassVar[str] = "vq"
    incidental: ClassVar[tuple[str, ...]] = ("pop_calls",)

    kind: Literal["token"] = "token"
    """Tokens of a frozen tokenizer (REM, IRIS)."""
    prediction: Literal["pop", "sequential"] = "pop"
    """Prediction of the next frame: "pop" all tokens at once (REM), "sequential" token by token (IRIS)."""
    pop_calls: int = Field(1, ge=1, le=2)
    """Calls of the backbone for an imagined frame with prediction "pop": 1 for block and queries together, 2 for one
    after the other (REM, table 6: its alternative and its default mode). Results differ by rounding only. [calls]"""
    shared_embeddings: bool = True
    """Embed tokens of images as the tokenizer's code vectors, without gradient (REM); false: in a learned table (IRIS).
    Other tokens are in a learned table anyway."""
    initialization: Literal["torch", "gpt"] = "torch"
    """Initialization of tables and heads: "torch" N(0, 1) and torch's Linear (REM), "gpt" N(0, 0.02), biases 0 (IRIS).
    """
    ensemble: int = Field(0, ge=0)
    """Further heads that predict the next frame's tokens, for `controller.curiosity`. No gradient of theirs reaches the
    rest of the model. 0 for none. [heads]"""
    sequence_length: int = Field(10, ge=2)
    """Training sequence length. [blocks]"""
    context: int = Field(2, ge=1)
    """Real frames that imagination starts from. [frames]"""
    min_segment: int = Field(0, ge=0)
    """Fewest frames of an episode in a training segment, and before a dream; 0: `context` + 1, as in the public code.
    Then no dream begins at an episode's first frames, and one from its last frame has a first reward and termination
    that were never learned. Equal to `context`, with a shorter `reward_burn_in`, both are mended. [frames]"""
    observation_burn_in: int = Field(2, ge=0)
    """Blocks at a segment's start whose observation tokens have no loss (IRIS: 0). [blocks]"""
    reward_burn_in: int = Field(1, ge=0)
    """Blocks at a segment's start without reward and termination loss. The public code uses 2, which never trains the
    first imagined reward. [blocks]"""
    reward: Literal["sign", "two-hot"] = "sign"
    """What is learned of the reward: its sign, sampled in imagination (REM, IRIS); or its value, as a distribution over
    255 bins whose mean is imagined (Simulus)."""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the reward loss, which is a mean over blocks. Above 1, rare rewards are learned sooner."""
    end_on_truncation: bool = False
    """Learn time limits as terminations, as the public code of REM and IRIS does."""
    closing_frames: bool = False
    """Learn from the observation that closes an episode as well; segments of earlier versions have none."""
    batch: int = Field(64, ge=1)
    """Segments in an update. [sequences]"""
    updates: int = Field(200, ge=0)
    """Updates in one call of the stage. [updates]"""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Optimizer: adamw decays weights, adam does not."""
    learning_rate: float = Field(2e-4, gt=0)
    """Step size of the optimizer after the warm-up."""
    warmup: int = Field(0, ge=0)
    """Updates over which the step size rises linearly. [updates]"""
    schedule: Literal["constant", "cosine"] = "constant"
    """Step size after the warm-up: constant, or falling to 0 at the last update as half a cosine."""
    weight_decay: float = Field(0.05, ge=0)
    """Decoupled weight decay of matrices; biases, norms and embedding tables have none."""
    clip: float = Field(100.0, gt=0)
    """Largest norm of the gradient of all parameters."""
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""

    @model_validator(mode="after")
    def _check_lengths(self) -> TokenWorldModelSettings:
        for key in ("context", "min_segment", "observation_burn_in", "reward_burn_in"):
            if getattr(self, key) >= self.sequence_length:
                raise ValueError(
                    f"{key} = {getattr(self, key)} must be less than sequence_length = {self.sequence_length} blocks."
                )
        if self.pop_calls != 1 and self.prediction != "pop":
            raise ValueError(
                f"pop_calls = {self.pop_calls} has an effect with prediction = 'pop' alone: set pop_calls = 1"
            )
        if 0 < self.min_segment < self.context:
            raise ValueError(
                f"min_segment = {self.min_segment} must be at least context = {self.context} frames, or 0: a dream"
                f" reads that many; set min_segment = {self.context}"
            )
        return self

    @property
    def encoder(self) -> Literal["tokenizer"]:
        return "tokenizer"

    @property
    def reads_closing(self) -> bool:
        return self.closing_frames

    @property
    def longest_imagination(self) -> int:
        return self.sequence_length

    def check(self, tokenizer: Any, backbone: BackboneSettings) -> None:
        if self.shared_embeddings and tokenizer.width != backbone.width:
            raise ValueError(
                f"tokenizer.width is {tokenizer.width} but backbone.width is {backbone.width}: shared"
                " embeddings need them equal, or set dynamics.shared_embeddings=false"
            )

    def build(self, parts: Parts) -> TokenWorldModel:
        block = parts.tokenizer.tokens + 1
        backbone = parts.square_backbone(self.sequence_length * block, block)
        return TokenWorldModel(self, backbone, parts.tokenizer, parts.action_space)


class Tokenizer(Protocol):
    """The interface that the model needs of a tokenizer."""

    observation_space: ObservationSpace
    """What the environment shows."""
    tokens: int
    """K, tokens of a frame."""
    codes: int
    """N, number of different tokens."""
    image_codes: int
    """Number of tokens that have a code vector. They are the first."""
    ranges: tuple[tuple[int, int], ...]
    """For each of the K tokens the first of its codes and the one behind the last."""
    width: int
    """Length of a code vector."""
    feature_shape: tuple[int, ...]
    """Shape of the features of a frame."""

    def encode(self, observation: Any) -> Tensor:
        """Encode observations (...) as tokens (..., K) int64, without gradient."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the code vectors (..., width) of tokens (...)."""

    def features(self, tokens: Tensor) -> Tensor:
        """Return the features (..., *feature_shape) float32 of tokens (..., K), without gradient."""

    def decode(self, tokens: Tensor) -> Any:
        """Decode tokens (..., K) to observations (...)."""


class TokenState(NamedTuple):
    """A point of imagination: the current frame, and the backbone's state of the past."""

    backbone_state: Any
    """State of the backbone; None if it has read nothing."""
    latent: Tensor
    """(B, K) int64, tokens of the current frame."""
    tokens_read: int
    """Number of leading tokens of the current frame that the backbone has read already."""
    length: int
    """Tokens that the backbone has read, counted on the host: attention has learned a limited number of positions."""
    recent: RecentFrames | None = None
    """While acting: the frames that imagination starts from, which the backbone has not read yet."""


class SegmentLogits(NamedTuple):
    """Logits for the blocks of a segment."""

    observation: Tensor
    """(B, T - b, K, N), for the tokens of blocks b..T-1, given everything before their block ("pop") or token."""
    reward: Tensor
    """(B, T, 3): negative, zero, positive; or (B, T, 255), the bins of `two_hot`."""
    termination: Tensor
    """(B, T, 2): continues, terminates."""
    at_tokens: Tensor
    """(B, T - b, K, D): the outputs behind the observation logits."""


def _cross_entropy(logits: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean cross entropy of (B, ..., N) against (B, ...) where `mask`, in nats, in float32."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction="none")
    return masked_mean(losses.view(target.shape), mask, weight)


def _head(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


class TokenWorldModel(WorldModel):
    """Predicts the tokens of the next frame, the reward or its sign, and termination.

    The tokenizer is used and never trained. It is an artifact of its own: not among this module's parameters, not in
    its `state_dict`, and not moved by `.to()`.

    Raises:
        UsageError: Embeddings are shared, but the tokenizer's codes are not as wide as the backbone.
    """

    frozen_encoder = True
    across_ends = False

    possible: Tensor | None
    """(K, N) bool: codes that each token can be; None where each can be any."""
    ranges: Tensor | None
    """(K, 2): the first and the last of these codes."""

    def __init__(
        self, settings: TokenWorldModelSettings, backbone: Backbone, tokenizer: Tokenizer, actions: ActionSpace | int
    ) -> None:
        super().__init__()
        width, tokens, codes = backbone.width, tokenizer.tokens, tokenizer.codes
        if settings.shared_embeddings and tokenizer.width != width:
            raise UsageError(
                f"tokenizer.width = {tokenizer.width} and backbone.width = {width} must be equal to share embeddings: "
                "change one, or set dynamics.shared_embeddings=false"
            )
        block = tokens + 1
        assert backbone.max_length is None or backbone.max_length >= settings.sequence_length * block
        self.settings = settings
        self.observation_space, self.action_space = tokenizer.observation_space, to_action_space(actions)
        self.context = settings.context
        self.segment = settings.sequence_length
        self.min_segment = self.min_context = settings.min_segment or settings.context + 1
        self.elements = block
        self.feature_shape = tokenizer.feature_shape
        self.uniforms_per_step = tokens + 2  # the tokens, the reward and the termination
        self._tokenizer = (tokenizer,)  # in a tuple: nn.Module does not register it
        self.backbone = backbone
        self.action_embedding = action_embedding(self.action_space, width)
        self._shared = tokenizer.image_codes if settings.shared_embeddings else 0  # codes without a row in the table
        self.token_embedding = nn.Embedding(codes - self._shared, width) if codes > self._shared else None
        self.queries = nn.Embedding(tokens, width) if settings.prediction == "pop" else None
        self.observation_head = _head(width, codes)
        self.reward_head = _head(width, 3 if settings.reward == "sign" else two_hot.BINS)
        self.termination_head = _head(width, 2)
        self.ensemble = Ensemble(settings.ensemble, width, 1, codes) if settings.ensemble else None
        self.has_ensemble = self.ensemble is not None
        if settings.initialization == "gpt":
            self._initialize_like_gpt()
        ranges = torch.tensor(tokenizer.ranges)
        code, apart = torch.arange(codes), len(set(tokenizer.ranges)) > 1
        possible = (ranges[:, :1] <= code) & (code < ranges[:, 1:])
        self.register_buffer("possible", possible if apart else None, persistent=False)
        self.register_buffer("ranges", ranges - torch.tensor([0, 1]) if apart else None, persistent=False)

    @property
    def lookback(self) -> int:
        return self.context - 1

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which stays outside the module's parameters."""
        return self._tokenizer[0]

    def _initialize_like_gpt(self) -> None:
        """Initialize tables and heads to N(0, 0.02), biases to 0. The backbone has its own initialization."""
        for name, module in self.named_modules():
            if name.startswith("backbone"):
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    # -- tokens in ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Any) -> Tensor:
        """Encode observations (B, T, *part) as tokens (B, T, K) int64."""
        return self.tokenizer.encode(observation)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (..., k) as (..., k, D)."""
        if not self._shared:
            assert self.token_embedding is not None
            return self.token_embedding(tokens)
        with torch.no_grad():
            if self.token_embedding is None:
                return self.tokenizer.embed(tokens)
            shared = self.tokenizer.embed(tokens.clamp(max=self._shared - 1))
        learned = self.token_embedding((tokens - self._shared).clamp(min=0))
        return torch.where((tokens < self._shared)[..., None], shared, learned)

    def _blocks(self, tokens: Tensor, action: Tensor) -> Tensor:
        """Embed tokens (..., k) and their actions (...) as sequence elements (..., k + 1, D), the action last."""
        return torch.cat([self._embed(tokens), self.action_embedding(action).unsqueeze(-2)], dim=-2)

    def elements_of(self, latent: Tensor, action: Tensor) -> Elements:
        return Elements(
            self._blocks(latent, action).flatten(1, 2), None if self.queries is None else self.queries.weight
        )

    def _token_logits(self, y: Tensor, places: int | slice = slice(None)) -> Tensor:
        """Return logits (..., N) of the tokens at `places` for outputs (..., D)."""
        logits = self.observation_head(y)
        return logits if self.possible is None else logits.masked_fill(~self.possible[places], IMPOSSIBLE)

    def _possible_variables(self) -> Tensor | None:
        """Return `possible` as the ensemble takes it, (K, 1, N)."""
        return None if self.possible is None else self.possible[:, None]

    # -- learning -----------------------------------------------------------------------------------------------------

    def learned_reward(self, reward: Tensor) -> Tensor:
        """Return the signs of rewards (...), or the rewards themselves."""
        return reward.sign() if self.settings.reward == "sign" else reward

    def predict(self, latent: Tensor, action: Tensor) -> SegmentLogits:
        """Return logits for a segment without a past, all blocks at once, from tokens (B, T, K) and actions (B, T).

        Observation logits begin at block b = `observation_burn_in`; with "pop" at 1 or later, since no query precedes
        the first block. With "sequential" no element precedes the first token of block 0. Its logits are those of zeros
        and belong in no loss.
        """
        answer = self._segment_pop if self.queries is not None else self._segment_sequential
        at_tokens, at_action = answer(self._blocks(latent, action))
        return SegmentLogits(
            self._token_logits(at_tokens), self.reward_head(at_action), self.termination_head(at_action), at_tokens
        )

    def _segment_pop(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Map blocks (B, T, L, D) to outputs for tokens of blocks b..T-1 (B, T - b, K, D) and at actions (B, T, D)."""
        assert self.queries is not None
        batch, time, length, _ = blocks.shape
        unpredicted = max(1, self.settings.observation_burn_in) - 1  # blocks at the start without queries
        assert time > unpredicted + 1, f"{time} blocks leave none to predict"
        state = self.backbone.initial_state(batch)
        at_action = []
        if unpredicted:
            y, state = self.backbone(blocks[:, :unpredicted].flatten(1, 2), state)
            at_action.append(y[:, length - 1 :: length])
        y, at_tokens, state = self.backbone.fork(blocks[:, unpredicted:-1], self.queries.weight, state)
        at_action.append(y)
        # Queries after the last block would predict a block beyond the segment, at positions that do not exist.
        y, _ = self.backbone(blocks[:, -1], state)
        at_action.append(y[:, -1:])
        return at_tokens, torch.cat(at_action, dim=1)

    def _segment_sequential(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Map as `_segment_pop`, where the output for a token stands one element before it."""
        batch, time, length, width = blocks.shape
        y, _ = self.backbone(blocks.flatten(1, 2), None)
        before = F.pad(y[:, :-1], (0, 0, 1, 0)).view(batch, time, length, width)
        return before[:, self.settings.observation_burn_in :, :-1], y[:, length - 1 :: length]

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum three mean cross entropies: observation tokens, reward (with its weight), termination.

        Padding and burn-in are left out of each. An observation that closes an episode has no reward and termination.
        The metrics are `observation_loss`, `reward_loss`, `termination_loss` (nats), and shares:

        - `observation_accuracy`: tokens whose likeliest value is correct, of all scored tokens.
        - `nonzero_rewards`: rewards other than 0, of all scored steps.
        - `nonzero_rewards_hit`: those among them whose sign is the likeliest, or, of "two-hot", from which the mean is
        less than half the reward away; of all scored steps. The ratio of the averages of these two is the recall.
        """
        tokens, valid = batch.inputs, batch.valid
        logits = self.predict(tokens, batch.action)
        start = tokens.shape[1] - logits.observation.shape[1]
        target = tokens[:, start:]
        scored = valid[:, start:, None].expand_as(target)
        if start == 0:
            scored = scored.clone()
            scored[:, 0, 0] = False  # no element precedes it
        observation_loss = _cross_entropy(logits.observation, target, scored, batch.weight)

        start = self.settings.reward_burn_in
        valid = (valid if batch.is_closing is None else valid & ~batch.is_closing)[:, start:]
        reward = self.learned_reward(batch.reward[:, start:])
        terminations = (batch.terminated | batch.truncated) if self.settings.end_on_truncation else batch.terminated
        reward_logits, termination_logits = logits.reward[:, start:], logits.termination[:, start:]
        by_sign = self.settings.reward == "sign"
        if by_sign:
            reward_loss = _cross_entropy(reward_logits, reward.long() + 1, valid, batch.weight)
        else:
            reward_loss = masked_mean(two_hot.loss(reward_logits, reward), valid, batch.weight)
        termination_loss = _cross_entropy(termination_logits, terminations[:, start:].long(), valid, batch.weight)

        with torch.no_grad():
            nonzero = reward != 0
            predicted = reward_logits.argmax(-1) - 1 if by_sign else two_hot.decode(reward_logits)
            hit = nonzero & (2 * (predicted - reward).abs() < reward.abs())
            likeliest = logits.observation.max(-1).indices  # argmax, five times as fast in bfloat16 on a CPU
            log = {
                "observation_loss": observation_loss.detach(),
                "reward_loss": reward_loss.detach(),
                "termination_loss": termination_loss.detach(),
                "observation_accuracy": masked_mean(likeliest == target, scored),
                "nonzero_rewards": masked_mean(nonzero, valid),
                "nonzero_rewards_hit": masked_mean(hit, valid),
            }
        total = observation_loss + self.settings.reward_weight * reward_loss + termination_loss
        if self.ensemble is not None:
            ensemble_losses = self.ensemble.loss(logits.at_tokens, target[..., None], self._possible_variables())
            ensemble_loss = masked_mean(ensemble_losses, scored, batch.weight)
            total, log["ensemble_loss"] = total + ensemble_loss, ensemble_loss.detach()
        return total, log

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, TokenState]:
        """Read the last `context` frames; features of all frames. Nothing is sampled. See `WorldModel.observe`."""
        return self.tokenizer.features(latent), self._read(latent, action, reset)

    def _read(self, latent: Tensor, action: Tensor, reset: Tensor) -> TokenState:
        """Return the state after the last `context` of the frames (B, T, K), with actions and resets (B, T)."""
        batch, time, tokens = latent.shape
        context = min(self.settings.context, time)
        past = slice(time - context, time - 1)
        # Only forward takes a reset, so at least one token of the current frame is read here, with its reset. For
        # "sequential" all but the last are read: the output at the last one depends on the action.
        tokens_read = 1 if self.queries is not None else max(1, tokens - 1)
        elements = torch.cat(
            [self._blocks(latent[:, past], action[:, past]).flatten(1, 2), self._embed(latent[:, -1, :tokens_read])],
            dim=1,
        )
        length = elements.shape[1]
        # (B, context) to one flag per token, True only at a block's first token. A single frame needs no reset.
        resets = F.pad(reset[:, time - context :, None], (0, tokens)).flatten(1)[:, :length] if context > 1 else None
        _, backbone_state = self.backbone(elements, self.backbone.initial_state(batch), resets)
        return TokenState(backbone_state, latent[:, -1], tokens_read, length)

    @torch.no_grad()
    def imagine(
        self, state: TokenState, action: Tensor, uniforms: Tensor | None = None
    ) -> tuple[ImaginedStep, TokenState]:
        """Sample one step at temperature 1. Samples carry no gradient, so no graph is built.

        A backbone with a limited number of positions restarts from the current frame alone if the next step does not
        fit, as in IRIS.
        """
        if uniforms is None:
            uniforms = uniform((len(action), self.uniforms_per_step), action.device)
        of_tokens, of_reward, of_termination = uniforms.split((self.uniforms_per_step - 2, 1, 1), -1)
        priors: list[Tensor] = []

        def draw(logits: Tensor, start: int) -> Tensor:
            priors.append(logits)
            places = slice(start, start + logits.shape[1])
            tokens = sample(logits, of_tokens[:, places])
            if self.ranges is not None:  # sums that a GPU rounds differently may draw a code of probability 0
                tokens = tokens.clamp(*self.ranges[places].unbind(1))
            return tokens

        reward, termination, at_tokens, state = self.advance(state, action, draw)
        if self.settings.reward == "sign":
            reward = sample(reward[:, None], of_reward)[:, 0].float() - 1
        else:
            reward = two_hot.decode(reward)
        termination = sample(termination[:, None], of_termination)[:, 0].bool()
        disagreement = None
        if self.ensemble is not None:
            disagreement = self.ensemble.disagreement(at_tokens, self._possible_variables()).mean(-1)
        prior = priors[0] if len(priors) == 1 else torch.cat(priors, 1)
        return ImaginedStep(state.latent, reward, termination, disagreement, prior=prior), state

    def advance(
        self, state: TokenState, action: Tensor, choose: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, TokenState]:
        """Take one step whose tokens are picked by `choose`.

        Args:
            state: At the current frame.
            action: (B, ...).
            choose: Maps logits (B, n, N), and the index of their first token, to tokens (B, n). It is called once for
                all K tokens of "pop", and K times for one token of "sequential".

        Returns:
            The logits of reward (B, 3 or 255) and termination (B, 2), the outputs that predict the tokens (B, K, D),
                and the state at the next frame.
        """
        if state.recent is not None:
            state = self._read(state.recent.latent, state.recent.action, state.recent.reset)
        backbone_state, latent, tokens_read, length, _ = state
        tokens = latent.shape[1]
        limit = self.backbone.max_length
        needed = (tokens - tokens_read + 1) + (tokens if self.queries is not None else tokens - 1)
        if backbone_state is None or (limit is not None and length + needed > limit):
            backbone_state, tokens_read, length = self.backbone.initial_state(latent.shape[0]), 0, 0
        block = self._blocks(latent[:, tokens_read:], action)
        length += block.shape[1]
        if self.queries is not None:
            at_action, at_tokens, backbone_state = self._answer(block, self.queries.weight, backbone_state)
            tokens_read = 0
            latent = choose(self._token_logits(at_tokens), 0)
        else:
            y, backbone_state = self.backbone(block, backbone_state)
            at_action, tokens_read = y[:, -1], tokens - 1
            choices, outputs = [choose(self._token_logits(at_action, 0)[:, None], 0)], [at_action]
            for token in range(1, tokens):
                y, backbone_state = self.backbone.step(self._embed(choices[-1])[:, 0], backbone_state)
                outputs.append(y)
                choices.append(choose(self._token_logits(y, token)[:, None], token))
            at_tokens = torch.stack(outputs, dim=1)
            latent, length = torch.cat(choices, dim=1), length + tokens_read
        state = TokenState(backbone_state, latent, tokens_read, length)
        return self.reward_head(at_action), self.termination_head(at_action), at_tokens, state

    def _answer(self, block: Tensor, queries: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Read a block (B, L, D), and answer the queries (K, D) as if they followed it.

        Returns:
            The output at the block's last element (B, D), the answers (B, K, D), and the backbone's state behind the
                block, which the queries did not enter.

        Source: REM (Cohen et al. 2024), appendix A.1.2 and table 6: two calls are the default mode, one the other.
        """
        if self.settings.pop_calls == 1:
            y, answers, state = self.backbone.fork(block[:, None], queries, state)
            return y[:, 0], answers[:, 0], state
        y, state = self.backbone.read(block, state)
        answers, _ = self.backbone(queries.to(block.dtype).expand(len(block), -1, -1), state)
        return y, answers, state

    @torch.no_grad()
    def replace_rows(self, state: TokenState, rows: Tensor, fresh: TokenState) -> TokenState:
        """See `WorldModel.replace_rows`. The rows of a state have read equally many tokens of their current frame."""
        assert state.recent is None and fresh.recent is None and state.tokens_read <= fresh.tokens_read
        backbone_state, length = state.backbone_state, state.length
        if state.tokens_read < fresh.tokens_read:
            _, backbone_state = self.backbone(
                self._embed(state.latent[:, state.tokens_read : fresh.tokens_read]), backbone_state
            )
            length += fresh.tokens_read - state.tokens_read
        return TokenState(
            self.backbone.replace_rows(backbone_state, rows, fresh.backbone_state),
            replace_rows(state.latent, rows, fresh.latent),
            fresh.tokens_read,
            min(length, fresh.length),
        )

    @torch.no_grad()
    def perceive(
        self,
        state: TokenState | None,
        observation: Any,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> TokenState:
        """Encode the frame, and keep it with the last `context` ones. Nothing is sampled.

        The backbone reads nothing here, since the controller uses tokens alone. The first imagined step reads the kept
        frames, as `observe` does.
        """
        latent = self.tokenizer.encode(observation)
        before = None if state is None else state.recent
        return TokenState(None, latent, 0, 0, append_frame(before, latent, previous_action, reset, self.context))

    # -- features and frames -----------------------------------------------------------------------

    def features(self, state: TokenState) -> Tensor:
        """Return the tokenizer's features of the current frame, (B, *feature_shape) float32, without gradient."""
        return self.tokenizer.features(state.latent)

    def latent(self, state: TokenState) -> Tensor:
        """Return the tokens of the current frame, (B, K) int64."""
        return state.latent

    def decode(self, latent: Tensor) -> Any:
        """Decode tokens (..., K) to observations (..., *part)."""
        return self.tokenizer.decode(latent)
