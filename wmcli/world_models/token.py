"""World models over discrete tokens: REM and IRIS.

A frame is K tokens of a tokenizer; a block is the K tokens of a frame followed by one token for the action taken in it.
A backbone reads block after block; small heads on its outputs give the next frame's tokens, the reward and the
termination. Which backbone, which tokenizer and how the next frame is predicted are free to combine:

- prediction "pop", Parallel Observation Prediction (REM: Cohen et al. 2024, ICML, arXiv 2402.05643): K learned query
  tokens, asked after a block, answer all K tokens of the next frame at once and leave no trace in the state.
- prediction "sequential" (IRIS: Micheli et al. 2023, ICLR, arXiv 2209.00588): every token predicts the token after it.

Reward and termination are read at the action token. Rewards are learned and imagined as signs: -1, 0, 1.

Axes: B batch, T time (frames, blocks), K tokens of a frame, L = K + 1 tokens of a block, N codes of the tokenizer,
D width of the backbone, A actions, H W C image, h w grid of tokens (h * w = K, raster order). Time: see base.py.
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
from wmcli.nn.categorical import sample, uniform
from wmcli.world_models.base import Batch, DynamicsSettings, Imagined, Parts, WorldModel, masked_mean
from wmcli.world_models.recent import Recent, with_frame


class TokenWorldModelSettings(DynamicsSettings):
    """A world model over the tokens of a frozen tokenizer, and how it is trained. Defaults: REM on Atari."""

    tokenizer_kind: ClassVar[str] = "vq"

    kind: Literal["token"] = "token"
    """Tokens of a frozen tokenizer (REM, IRIS); other kinds are latent and cells."""
    prediction: Literal["pop", "sequential"] = "pop"
    """How the next frame is predicted: "pop" all tokens at once (REM), "sequential" token by token (IRIS)."""
    shared_embeddings: bool = True
    """Tokens enter as the tokenizer's code vectors, without gradient (REM); false: from a table of their own (IRIS)."""
    initialization: Literal["torch", "gpt"] = "torch"
    """First values of tables and heads: "torch" N(0, 1) and torch's Linear (REM), "gpt" N(0, 0.02), biases 0 (IRIS)."""
    sequence_length: int = Field(10, ge=2)
    """Length of a training segment, in blocks."""
    context: int = Field(2, ge=1)
    """Real frames that imagination starts from."""
    observation_burn_in: int = Field(2, ge=0)
    """Blocks at a segment's start whose observation tokens are not scored (IRIS: 0)."""
    reward_burn_in: int = Field(1, ge=0)
    """The same for reward and termination. The public code has 2, so the first imagined reward is never trained."""
    end_on_truncation: bool = False
    """Learn time limits as terminations, as the public code of REM and IRIS stores them."""
    batch: int = Field(64, ge=1)
    """Segments in an update."""
    updates: int = Field(200, ge=0)
    """Updates in one call of the stage."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """adamw decays weights, adam does not."""
    learning_rate: float = Field(2e-4, gt=0)
    """Step size of the optimizer."""
    weight_decay: float = Field(0.05, ge=0)
    """Decoupled weight decay, on matrices only: not on biases, norms and embedding tables."""
    clip: float = Field(100.0, gt=0)
    """Largest norm of the whole gradient."""

    @model_validator(mode="after")
    def _fits_into_the_horizon(self) -> TokenWorldModelSettings:
        for key in ("context", "observation_burn_in", "reward_burn_in"):
            if getattr(self, key) >= self.sequence_length:
                raise ValueError(
                    f"{key} = {getattr(self, key)} leaves nothing of sequence_length = {self.sequence_length} blocks."
                )
        return self

    @property
    def encoder(self) -> Literal["tokenizer"]:
        return "tokenizer"

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
        return TokenWorldModel(self, backbone, parts.tokenizer, parts.actions)


class Tokenizer(Protocol):
    """What the model asks of a tokenizer."""

    tokens: int
    """K, tokens of a frame."""
    grid: tuple[int, int]
    """(h, w), the tokens' places in the frame."""
    codes: int
    """N, how many different tokens there are."""
    width: int
    """Length of a code vector."""

    def encode(self, observation: Tensor) -> Tensor:
        """Frames (..., H, W, C) uint8 to tokens (..., K) int64, without gradient."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (..., K) to code vectors (..., K, width)."""

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens (..., K) to frames (..., H, W, C) uint8."""


class TokenState(NamedTuple):
    """Where imagination stands: the current frame, and what the backbone has read of the past."""

    memory: Any
    """The backbone's state; None: it has read nothing."""
    latent: Tensor
    """(B, K) int64, tokens of the current frame."""
    held: int
    """How many of the current frame's tokens the memory has read already: the first `held`."""
    length: int
    """How many tokens the memory has read, counted on the host: attention has learned a limited number of positions."""
    recent: Recent | None = None
    """While acting: the frames that imagination is to start from, which the memory has not read yet."""


class Prediction(NamedTuple):
    """Logits for the blocks of a segment."""

    observation: Tensor
    """(B, T - b, K, N), for the tokens of blocks b..T-1, each given everything before its block ("pop") or itself."""
    reward: Tensor
    """(B, T, 3): negative, zero, positive."""
    termination: Tensor
    """(B, T, 2): goes on, ends."""


def _cross_entropy(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy of (..., N) against (...) over the places where `mask`, in nats, in float32."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction="none")
    return masked_mean(losses, mask.flatten())


def _head(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


class TokenWorldModel(WorldModel):
    """Predicts the tokens of the next frame, the sign of the reward, and termination.

    The tokenizer is used and never trained. It is an artifact of its own: not among this module's parameters, not in
    its `state_dict`, and not moved by `.to()`.

    Raises:
        UsageError: shared embeddings and the tokenizer's codes are not as wide as the backbone.
    """

    frozen_encoder = True
    across_ends = False

    def __init__(
        self, settings: TokenWorldModelSettings, backbone: Backbone, tokenizer: Tokenizer, actions: int
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
        self.actions = actions
        self.context = settings.context
        self.segment = settings.sequence_length
        self.min_segment = self.min_context = settings.context + 1
        self.elements = block
        self.feature_shape = (tokenizer.width, *tokenizer.grid)
        self.uniforms_per_step = tokens + 2  # the tokens, the reward and the termination
        self._tokenizer = (tokenizer,)  # in a tuple, where nn.Module does not look
        self.backbone = backbone
        self.action_embedding = nn.Embedding(actions, width)
        self.token_embedding = None if settings.shared_embeddings else nn.Embedding(codes, width)
        self.queries = nn.Embedding(tokens, width) if settings.prediction == "pop" else None
        self.observation_head = _head(width, codes)
        self.reward_head = _head(width, 3)
        self.termination_head = _head(width, 2)
        if settings.initialization == "gpt":
            self._initialize_like_gpt()

    @property
    def remembers(self) -> int:
        return self.context - 1

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which stays outside the module's parameters."""
        return self._tokenizer[0]

    def _initialize_like_gpt(self) -> None:
        """N(0, 0.02) for the tables and heads and zero biases; the backbone has its own initialization."""
        for name, module in self.named_modules():
            if name.startswith("backbone"):
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    # -- tokens in ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Frames (B, T, H, W, C) uint8 to tokens (B, T, K) int64."""
        return self.tokenizer.encode(observation)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Tokens (..., k) to (..., k, D)."""
        if self.token_embedding is not None:
            return self.token_embedding(tokens)
        with torch.no_grad():
            return self.tokenizer.embed(tokens)

    def _blocks(self, tokens: Tensor, action: Tensor) -> Tensor:
        """Tokens (..., k) and their actions (...) to sequence elements (..., k + 1, D), the action last."""
        return torch.cat([self._embed(tokens), self.action_embedding(action).unsqueeze(-2)], dim=-2)

    # -- learning -----------------------------------------------------------------------------------------------------

    def predict(self, latent: Tensor, action: Tensor) -> Prediction:
        """Logits for a segment that starts from nothing, all blocks at once, from tokens (B, T, K), actions (B, T).

        Observation logits begin at block b = `observation_burn_in`; with "pop" at 1 or later, since no query comes
        before the first block. With "sequential" the first token of block 0, which nothing precedes, gets zeros read
        by the head: leave it out of any loss.
        """
        answer = self._segment_pop if self.queries is not None else self._segment_sequential
        at_tokens, at_action = answer(self._blocks(latent, action))
        return Prediction(
            self.observation_head(at_tokens), self.reward_head(at_action), self.termination_head(at_action)
        )

    def _segment_pop(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks (B, T, L, D) to outputs for tokens of blocks b..T-1, (B, T - b, K, D), and at actions, (B, T, D)."""
        assert self.queries is not None
        batch, time, length, _ = blocks.shape
        unasked = max(1, self.settings.observation_burn_in) - 1  # blocks at the start without queries
        assert time > unasked + 1, f"{time} blocks leave none to predict"
        state = self.backbone.initial_state(batch)
        at_action = []
        if unasked:
            y, state = self.backbone(blocks[:, :unasked].flatten(1, 2), state)
            at_action.append(y[:, length - 1 :: length])
        y, at_tokens, state = self.backbone.fork(blocks[:, unasked:-1], self.queries.weight, state)
        at_action.append(y)
        # Queries after the last block would answer a block that the segment does not have, and would need positions
        # beyond the segment.
        y, _ = self.backbone(blocks[:, -1], state)
        at_action.append(y[:, -1:])
        return at_tokens, torch.cat(at_action, dim=1)

    def _segment_sequential(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """As `_segment_pop`, with each token's output standing one element before it."""
        batch, time, length, width = blocks.shape
        y, _ = self.backbone(blocks.flatten(1, 2), None)
        before = F.pad(y[:, :-1], (0, 0, 1, 0)).view(batch, time, length, width)
        return before[:, self.settings.observation_burn_in :, :-1], y[:, length - 1 :: length]

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of three mean cross entropies: observation tokens, sign of the reward, termination.

        Padding and burn-in are left out of each. The names: `observation_loss`, `reward_loss`, `termination_loss`
        (nats), `observation_accuracy` (share of tokens whose likeliest value is right), and two shares of all scored
        steps: `nonzero_rewards`, and `nonzero_rewards_hit`, those among them whose sign the model finds likeliest.
        The ratio of the averages of these two is the recall.
        """
        tokens, valid = batch.inputs, batch.valid
        logits = self.predict(tokens, batch.action)
        start = tokens.shape[1] - logits.observation.shape[1]
        target = tokens[:, start:]
        scored = valid[:, start:, None].expand_as(target)
        if start == 0:
            scored = scored.clone()
            scored[:, 0, 0] = False  # nothing comes before it
        observation_loss = _cross_entropy(logits.observation, target, scored)

        start = self.settings.reward_burn_in
        valid = valid[:, start:]
        sign = batch.reward[:, start:].sign().long() + 1
        ends = (batch.terminated | batch.truncated) if self.settings.end_on_truncation else batch.terminated
        reward_logits, termination_logits = logits.reward[:, start:], logits.termination[:, start:]
        reward_loss = _cross_entropy(reward_logits, sign, valid)
        termination_loss = _cross_entropy(termination_logits, ends[:, start:].long(), valid)

        with torch.no_grad():
            nonzero = sign != 1
            likeliest = logits.observation.max(-1).indices  # argmax, five times as fast in bfloat16 on a CPU
            log = {
                "observation_loss": observation_loss.detach(),
                "reward_loss": reward_loss.detach(),
                "termination_loss": termination_loss.detach(),
                "observation_accuracy": masked_mean(likeliest == target, scored),
                "nonzero_rewards": masked_mean(nonzero, valid),
                "nonzero_rewards_hit": masked_mean(nonzero & (reward_logits.argmax(-1) == sign), valid),
            }
        return observation_loss + reward_loss + termination_loss, log

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, TokenState]:
        """Read the last `context` frames; features of all frames. Nothing is drawn. See `WorldModel.observe`."""
        return self._codes(latent), self._read(latent, action, reset)

    def _read(self, latent: Tensor, action: Tensor, reset: Tensor) -> TokenState:
        """The state after the last `context` of the frames (B, T, K), with actions and resets (B, T)."""
        batch, time, tokens = latent.shape
        context = min(self.settings.context, time)
        past = slice(time - context, time - 1)
        # Only forward takes a reset, so at least one token of the current frame is read here, with its reset. Token by
        # token, all but the last are: what follows the last one needs the action.
        held = 1 if self.queries is not None else max(1, tokens - 1)
        elements = torch.cat(
            [self._blocks(latent[:, past], action[:, past]).flatten(1, 2), self._embed(latent[:, -1, :held])], dim=1
        )
        length = elements.shape[1]
        # (B, context) to one flag per token, True only at a block's first; a single frame starts from nothing anyway.
        resets = F.pad(reset[:, time - context :, None], (0, tokens)).flatten(1)[:, :length] if context > 1 else None
        _, memory = self.backbone(elements, self.backbone.initial_state(batch), resets)
        return TokenState(memory, latent[:, -1], held, length)

    @torch.no_grad()
    def imagine(self, state: TokenState, action: Tensor, uniforms: Tensor | None = None) -> tuple[Imagined, TokenState]:
        """Draw one step at temperature 1. Draws carry no gradient, so no graph is built.

        A backbone with a limited number of positions starts again from the current frame alone when the next step would
        not fit, as in IRIS.
        """
        if uniforms is None:
            uniforms = uniform((len(action), self.uniforms_per_step), action.device)
        of_tokens, of_reward, of_termination = uniforms.split((self.uniforms_per_step - 2, 1, 1), -1)
        reward, termination, state = self.advance(
            state, action, lambda logits, first: sample(logits, of_tokens[:, first : first + logits.shape[1]])
        )
        reward, termination = sample(reward[:, None], of_reward), sample(termination[:, None], of_termination)
        return Imagined(state.latent, reward[:, 0].float() - 1, termination[:, 0].bool()), state

    def advance(
        self, state: TokenState, action: Tensor, choose: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor, TokenState]:
        """One step whose tokens are picked by `choose`: logits (B, n, N), of the tokens from which on, to (B, n).

        `choose` is called once for all K tokens of "pop", K times for one token of "sequential". Returns the logits of
        reward (B, 3) and termination (B, 2), and the state at the next frame.
        """
        if state.recent is not None:
            state = self._read(state.recent.latent, state.recent.action, state.recent.reset)
        memory, latent, held, length, _ = state
        tokens = latent.shape[1]
        limit = self.backbone.max_length
        needed = (tokens - held + 1) + (tokens if self.queries is not None else tokens - 1)
        if memory is None or (limit is not None and length + needed > limit):
            memory, held, length = self.backbone.initial_state(latent.shape[0]), 0, 0
        block = self._blocks(latent[:, held:], action)
        length += block.shape[1]
        if self.queries is not None:
            # One call: the queries answer the next frame while the block becomes part of the past.
            y, answers, memory = self.backbone.fork(block[:, None], self.queries.weight, memory)
            at_action, held = y[:, 0], 0
            latent = choose(self.observation_head(answers[:, 0]), 0)
        else:
            y, memory = self.backbone(block, memory)
            at_action, held = y[:, -1], tokens - 1
            drawn = [choose(self.observation_head(at_action)[:, None], 0)]
            for token in range(1, tokens):
                y, memory = self.backbone.step(self._embed(drawn[-1])[:, 0], memory)
                drawn.append(choose(self.observation_head(y)[:, None], token))
            latent, length = torch.cat(drawn, dim=1), length + held
        state = TokenState(memory, latent, held, length)
        return self.reward_head(at_action), self.termination_head(at_action), state

    @torch.no_grad()
    def replace_rows(self, state: TokenState, rows: Tensor, fresh: TokenState) -> TokenState:
        """See `WorldModel.replace_rows`. All rows must have read equally many tokens of their current frame."""
        assert state.recent is None and fresh.recent is None and state.held <= fresh.held
        memory, length = state.memory, state.length
        if state.held < fresh.held:
            _, memory = self.backbone(self._embed(state.latent[:, state.held : fresh.held]), memory)
            length += fresh.held - state.held
        return TokenState(
            self.backbone.replace_rows(memory, rows, fresh.memory),
            replace_rows(state.latent, rows, fresh.latent),
            fresh.held,
            min(length, fresh.length),
        )

    @torch.no_grad()
    def perceive(
        self,
        state: TokenState | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> TokenState:
        """Encode the frame, and keep it with the last `context` ones. Nothing is drawn.

        The backbone reads nothing here, since the controller sees codes alone: the first imagined step reads the frames
        kept, as `observe` does.
        """
        latent = self.tokenizer.encode(observation)
        before = None if state is None else state.recent
        return TokenState(None, latent, 0, 0, with_frame(before, latent, previous_action, reset, self.context))

    # -- what the controller and the viewer see -----------------------------------------------------------------------

    def _codes(self, latent: Tensor) -> Tensor:
        """Tokens (..., K) to their code vectors on the grid, (..., width, h, w) float32."""
        with torch.no_grad():
            codes = self.tokenizer.embed(latent).float()
        return codes.transpose(-1, -2).unflatten(-1, self.tokenizer.grid)

    def features(self, state: TokenState) -> Tensor:
        """The tokenizer's code vectors of the current frame, (B, width, h, w) float32, without gradient."""
        return self._codes(state.latent)

    def latent(self, state: TokenState) -> Tensor:
        """Tokens of the current frame, (B, K) int64."""
        return state.latent

    def decode(self, latent: Tensor) -> Tensor:
        """Tokens (..., K) to frames (..., H, W, C) uint8."""
        return self.tokenizer.decode(latent)
