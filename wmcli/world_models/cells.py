"""A language model over the cells of the grid world: the long-sequence study of Drama on any backbone.

Drama (Wang et al. 2024, arXiv 2410.08893, table 2 and appendix A.6) compares backbones on sequences of 208 and 1,664
tokens. A frame of `wmcli/envs/grid_world.py` is 25 tokens, one per cell, row by row. The action taken in it is one
more. Each token is predicted from all tokens before it, actions included. There is no tokenizer and there are no heads.
The model is an embedding table, a backbone, and the table again for the logits. Fixed rules compute the reward from
frame and action: 1 where the agent moves onto the goal. Nothing ever terminates.

Axes: B batch, T time (frames), K = 25 cells, L = K + 1 tokens of a frame, V = 9 tokens (0 floor, 1 wall, 2 agent, 3
goal, 4 + action), D width of the backbone, H W C image. Time: see base.py.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, replace_rows
from wmcli.errors import UsageError
from wmcli.nn.categorical import sample, uniform
from wmcli.spaces import ActionSpace, Discrete, Image, to_action_space
from wmcli.world_models.base import Batch, DynamicsSettings, Elements, ImaginedStep, Parts, WorldModel, masked_mean
from wmcli.world_models.recent import RecentFrames, append_frame

SIDE = 5  # cells in a row or column
CELLS = SIDE**2
TOKENS = CELLS + 1  # a frame's cells and the action
FLOOR, WALL, AGENT, GOAL = range(4)
KINDS = 4  # kinds of cells; tokens from here on are actions
COLORS = ((16, 16, 24), (120, 120, 120), (70, 150, 255), (255, 220, 60))  # of floor, wall, agent and goal
NO_CELL = (255, 0, 255)  # of an action that an imagined frame holds in the place of a cell
MOVES = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1))  # rows and columns of each action
INIT_STD = 0.02


class CellsSettings(DynamicsSettings):
    """A language model over the grid world's cells, and its training. Defaults: Drama's study, short sequences."""

    predicts_cells: ClassVar[bool] = True

    kind: Literal["cells"] = "cells"
    """The grid world's cells as tokens, without a tokenizer."""
    sequence_length: int = Field(8, ge=2)
    """Training sequence length, 26 tokens per frame: 8 are 208 tokens, 64 are 1,664. [frames]"""
    context: int = Field(1, ge=1)
    """Real frames that imagination starts from. [frames]"""
    tied: bool = True
    """Compute logits with the embedding table; false: with a separate matrix."""
    batch: int = Field(64, ge=1)
    """Segments in an update. [sequences]"""
    updates: int = Field(1000, ge=0)
    """Updates in one call of the stage. [updates]"""
    optimizer: Literal["adamw", "adam", "laprop"] = "adamw"
    """Optimizer of all parameters."""
    learning_rate: float = Field(3e-3, gt=0)
    """Step size of the optimizer."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of matrices; biases, norms and the embedding table have none."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient of all parameters. Our choice: the sources name none."""
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""

    @model_validator(mode="after")
    def _check_lengths(self) -> CellsSettings:
        if self.context >= self.sequence_length:
            raise ValueError(
                f"context = {self.context} must be less than sequence_length = {self.sequence_length} frames."
            )
        return self

    @property
    def encoder(self) -> Literal["rules"]:
        return "rules"

    @property
    def longest_imagination(self) -> int:
        return self.sequence_length

    def build(self, parts: Parts) -> CellsWorldModel:
        backbone = parts.square_backbone(self.sequence_length * TOKENS, TOKENS)
        return CellsWorldModel(self, backbone, parts.action_space, parts.image_size(self.kind))


class CellsState(NamedTuple):
    """A point of imagination: the current frame, and the backbone's state."""

    backbone_state: Any
    """State of the backbone after all cells of the current frame; None if it has read nothing."""
    latent: Tensor
    """(B, K) int64, tokens of the current frame."""
    length: int
    """Tokens that the backbone has read, counted on the host: some backbones have a limited number of positions."""
    recent: RecentFrames | None = None
    """While acting: the frames that imagination starts from, which the backbone has not read yet."""


class CellsWorldModel(WorldModel):
    """Predicts the next token of a sequence of frames and actions.

    Latents are cells (..., K) int64. An imagined frame may hold any token in any place. An action in the place of a
    cell is a mistake of the model, and stays visible.

    Raises:
        UsageError: The environment has other actions than the grid world, or frames that cells do not tile.
    """

    frozen_encoder = True
    elements = TOKENS
    across_ends = False
    uniforms_per_step = CELLS

    def __init__(
        self, settings: CellsSettings, backbone: Backbone, actions: ActionSpace | int, image_size: int
    ) -> None:
        super().__init__()
        space = to_action_space(actions)
        if space != Discrete(len(MOVES)):
            others = space.count if isinstance(space, Discrete) else "others"
            raise UsageError(
                f"dynamics.kind = 'cells' needs the grid world's {len(MOVES)} actions; this environment has {others}: "
                "use --set environment.id=wm/GridWorld-v0"
            )
        if image_size % SIDE or (image_size < 40 and image_size not in (10, 20)):
            raise UsageError(
                f"environment.size = {image_size}: the grid world's cells are exact at 10, 20 and the multiples of 5 "
                "from 40 on; use one of these with dynamics.kind = 'cells'"
            )
        assert backbone.max_length is None or backbone.max_length >= settings.sequence_length * TOKENS
        self.settings = settings
        self.observation_space, self.action_space = Image(image_size, image_size), space
        self.context = settings.context
        self.segment = settings.sequence_length
        self.min_segment = self.min_context = settings.context + 1
        self.image_size = image_size
        self.feature_shape = (KINDS, SIDE, SIDE)
        self.embedding = nn.Embedding(KINDS + len(MOVES), backbone.width)
        self.backbone = backbone
        self.head = None if settings.tied else nn.Linear(backbone.width, KINDS + len(MOVES), bias=False)
        # With tied weights a small table makes the first logits near 0, so the first loss is that of a uniform guess.
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        self.colors: Tensor
        self.successor: Tensor
        self.register_buffer("colors", torch.tensor([*COLORS, *[NO_CELL] * len(MOVES)]), persistent=False)
        self.register_buffer("successor", torch.tensor(_successors()), persistent=False)

    @property
    def lookback(self) -> int:
        return self.context - 1

    # -- frames and cells ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Encode frames (..., H, W, C) uint8 as cells (..., K) int64 in 0..3: the color nearest to a cell's middle
        pixel."""
        pixels = self.image_size // SIDE
        middle = observation[..., pixels // 2 :: pixels, pixels // 2 :: pixels, :].flatten(-3, -2).long()
        return (middle[..., None, :] - self.colors[:KINDS]).square().sum(-1).argmin(-1)

    def decode(self, latent: Tensor) -> Tensor:
        """Decode tokens (..., K) to frames (..., H, W, C) uint8."""
        pixels = self.image_size // SIDE
        board = self.colors[latent].to(torch.uint8).unflatten(-2, (SIDE, SIDE))
        return board.repeat_interleave(pixels, -3).repeat_interleave(pixels, -2)

    def _one_hot(self, latent: Tensor) -> Tensor:
        """Return tokens (..., K) as (..., 4, 5, 5) float32; all zeros where a token is no cell."""
        kinds = torch.arange(KINDS, device=latent.device)
        return (latent[..., None, :] == kinds[:, None]).float().unflatten(-1, (SIDE, SIDE))

    @staticmethod
    def _tokens(latent: Tensor, action: Tensor) -> Tensor:
        """Return cells (B, T, K) and the actions (B, T) behind them as tokens (B, T * L)."""
        return torch.cat((latent, KINDS + action[..., None]), -1).flatten(1)

    def elements_of(self, latent: Tensor, action: Tensor) -> Elements:
        return Elements(self.embedding(self._tokens(latent, action)))

    # -- learning -----------------------------------------------------------------------------------------------------

    def _logits(self, y: Tensor) -> Tensor:
        """Map outputs of the backbone (..., D) to logits (..., V)."""
        return F.linear(y, self.embedding.weight if self.head is None else self.head.weight)

    def predict(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Predict all tokens of a segment without a past, from cells (B, T, K) and actions (B, T).

        Returns:
            The tokens (B, T * L) and the logits (B, T * L - 1, V) of all but the first.
        """
        tokens = self._tokens(latent, action)
        y, _ = self.backbone(self.embedding(tokens[:, :-1]), None)
        return tokens, self._logits(y)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross entropy (nats) of all tokens but a segment's first; padding is left out.

        The metrics are `cell_loss` and `action_loss` (nats a token), whose mean over all tokens is the loss, and
        `cell_accuracy`, the share of cells whose likeliest value is correct.
        """
        tokens, logits = self.predict(batch.inputs, batch.action)
        target = tokens[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none").view_as(target)
        scored = batch.valid.repeat_interleave(TOKENS, 1)[:, 1:]
        with torch.no_grad():
            is_cell = (torch.arange(1, tokens.shape[1], device=tokens.device) % TOKENS != CELLS).expand_as(target)
            log = {
                "cell_loss": masked_mean(losses, scored & is_cell),
                "action_loss": masked_mean(losses, scored & ~is_cell),
                "cell_accuracy": masked_mean(logits.argmax(-1) == target, scored & is_cell),
            }
        return masked_mean(losses, scored, batch.weight), log

    @torch.no_grad()
    def predict_frames(self, latent: Tensor, action: Tensor) -> Tensor:
        """Predict frames 1..T-1, each token one step ahead (teacher forcing), as (B, T - 1, K) int64.

        Each token is the likeliest given the real tokens (B, T, K) and actions (B, T) before it.
        """
        _, logits = self.predict(latent, action)
        likeliest = F.pad(logits.argmax(-1), (1, 0)).unflatten(1, (-1, TOKENS))
        return likeliest[:, 1:, :CELLS]

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, CellsState]:
        """Read the last `context` frames; features of all. Nothing is sampled. See `WorldModel.observe`."""
        return self._one_hot(latent), self._read_frames(latent, action, reset)

    def _read_frames(self, latent: Tensor, action: Tensor, reset: Tensor) -> CellsState:
        """Return the state after the last `context` of the frames (B, T, K), with actions and resets (B, T)."""
        time = latent.shape[1]
        context = slice(max(0, time - self.settings.context), time)
        # The last action is left to `imagine`.
        tokens = self._tokens(latent[:, context], action[:, context])[:, :-1]
        resets = F.pad(reset[:, context, None], (0, CELLS)).flatten(1)[:, :-1]  # True only at a frame's first cell
        return self._read(tokens, latent[:, -1], resets)

    def _read(self, tokens: Tensor, latent: Tensor, resets: Tensor | None = None) -> CellsState:
        """Return the state after `tokens` (B, n), of which the last K are the current frame `latent`."""
        # A single frame needs no reset.
        resets = resets if tokens.shape[1] > CELLS else None
        _, backbone_state = self.backbone(self.embedding(tokens), self.backbone.initial_state(len(tokens)), resets)
        return CellsState(backbone_state, latent, tokens.shape[1])

    @torch.no_grad()
    def imagine(
        self, state: CellsState, action: Tensor, uniforms: Tensor | None = None
    ) -> tuple[ImaginedStep, CellsState]:
        """Sample the next frame cell by cell at temperature 1.

        A backbone with a limited number of positions restarts from the current frame alone if the next frame does not
        fit.
        """
        if state.recent is not None:
            state = self._read_frames(state.recent.latent, state.recent.action, state.recent.reset)
        limit = self.backbone.max_length
        if state.backbone_state is None or (limit is not None and state.length + TOKENS > limit):
            state = self._read(state.latent, state.latent)
        if uniforms is None:
            uniforms = uniform((len(action), CELLS), action.device)
        backbone_state, token, cells, priors = state.backbone_state, KINDS + action, [], []
        for cell in range(CELLS):
            y, backbone_state = self.backbone.step(self.embedding(token), backbone_state)
            priors.append(self._logits(y))
            token = sample(priors[-1], uniforms[:, cell])
            cells.append(token)
        _, backbone_state = self.backbone.step(self.embedding(token), backbone_state)
        latent = torch.stack(cells, 1)
        reward = self._reaches_goal(state.latent, action).float()
        terminated = torch.zeros_like(action, dtype=torch.bool)
        imagined = ImaginedStep(latent, reward, terminated, prior=torch.stack(priors, 1))
        return imagined, CellsState(backbone_state, latent, state.length + TOKENS)

    def _reaches_goal(self, latent: Tensor, action: Tensor) -> Tensor:
        """Return (B,) bool: by the rules, `action` takes an agent of the frame (B, K) to a goal of the frame."""
        entered = latent.gather(-1, self.successor[action])  # kind of the cell entered from each cell
        return ((latent == AGENT) & (entered == GOAL)).any(-1)

    def replace_rows(self, state: CellsState, rows: Tensor, fresh: CellsState) -> CellsState:
        """See `WorldModel.replace_rows`."""
        assert state.recent is None and fresh.recent is None
        backbone_state = self.backbone.replace_rows(state.backbone_state, rows, fresh.backbone_state)
        latent = replace_rows(state.latent, rows, fresh.latent)
        return CellsState(backbone_state, latent, min(state.length, fresh.length))

    @torch.no_grad()
    def perceive(
        self,
        state: CellsState | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> CellsState:
        """Read the cells off the frame, and keep them with those of the last `context` frames.

        The backbone reads nothing here, since a frame holds all that matters. The first imagined step reads the kept
        frames, as `observe` does.
        """
        latent = self.encode(observation)
        before = None if state is None else state.recent
        return CellsState(None, latent, 0, append_frame(before, latent, previous_action, reset, self.context))

    def features(self, state: CellsState) -> Tensor:
        """Return the current frame's cells one-hot, (B, 4, 5, 5) float32."""
        return self._one_hot(state.latent)

    def latent(self, state: CellsState) -> Tensor:
        """Return the current frame's tokens, (B, K) int64."""
        return state.latent


def _successors() -> list[list[int]]:
    """Return, for each action and cell, the cell that the action takes an agent to: never into the wall."""

    def clamp(inner: int) -> int:
        return min(max(inner, 1), SIDE - 2)

    return [
        [SIDE * clamp(row + down) + clamp(column + right) for row in range(SIDE) for column in range(SIDE)]
        for down, right in MOVES
    ]
