"""Experience in memory: loaded from artifacts or built from arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import settings_of, spaces_of
from wmcli.dream import Reference, machine_for, open_kind
from wmcli.errors import UsageError
from wmcli.experience import Replay
from wmcli.experience.load import load_experience, load_held_out
from wmcli.experience.sampler import WindowTable
from wmcli.spaces import (
    ActionSpace,
    Categories,
    Discrete,
    Image,
    ObservationSpace,
    PartSpace,
    Spaces,
    Vector,
    column_names,
    describe_parts,
    first_part,
    map_parts,
    parts_of,
    to_action_space,
)
from wmcli.training.device import Machine
from wmcli.transfer import take_rows

HeldOut = Literal["validation", "test"]
"""Episodes of scripted and recorded experience that are not trained on."""


class Rows(NamedTuple):
    """Experience as tensors, (N, ...) or for segments (B, T, ...)."""

    frames: Any
    """Observations: a tensor (..., *part), for images uint8 (..., H, W, C), or a dict of the parts."""
    action: Tensor
    """(..., *action) int64, or float32 from -1 to 1 where actions are continuous, taken after this frame."""
    reward: Tensor
    """float32, of that action."""
    terminated: Tensor
    """bool: the task ended with it."""
    truncated: Tensor
    """bool: the episode was cut off behind it."""
    is_first: Tensor
    """bool: the frame opens an episode."""


@dataclass(frozen=True)
class Experience:
    """Experience in memory, on one device. Many frames may be in host memory (`training.replay`)."""

    replay: Replay
    spaces: Spaces
    """Of its observations and actions."""
    artifact: Artifact | None = None
    """The artifact that it was loaded from."""

    @classmethod
    def load(cls, reference: Reference, *, device: str = "auto", held_out: HeldOut | None = None) -> Experience:
        """Load an experience artifact with all that it continues, or the episodes that it holds back.

        Raises:
            ArtifactError: See `load`; or no such episodes were held back.
        """
        artifact = open_kind(reference, "experience")
        settings = settings_of(artifact)
        training, closing = settings.training, settings.dynamics.reads_closing
        machine = machine_for(training, device)
        if held_out is None:
            replay = load_experience(artifact, machine.device, closing=closing, frames_on=training.replay)
        else:
            replay = load_held_out(artifact, held_out, machine.device, closing=closing, frames_on=training.replay)
        return cls(replay, spaces_of(artifact), artifact)

    @classmethod
    def from_arrays(
        cls,
        frames: Any,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        *,
        actions: ActionSpace | int,
        observation: ObservationSpace | None = None,
        device: str = "cpu",
    ) -> Experience:
        """Build experience from arrays of one's own: episodes one after the other, in the order of time.

        Args:
            frames: Observations: an array (N, *part), for images (N, H, W, C) uint8, or a dict of the parts.
            action: (N, *action), taken after each frame: integers, or numbers from -1 to 1.
            reward: (N,), of each action.
            terminated: (N,) bool: the task ended with the action. The frame after it belongs to no episode.
            truncated: (N,) bool: the episode was cut off there.
            actions: The action space, or the number of discrete actions, A.
            observation: The observation space. None derives it: images of bytes, vectors of floats.
            device: Where the tensors go.

        Raises:
            UsageError: The arrays do not fit together.
        """
        columns = {"reward": reward, "terminated": terminated, "truncated": truncated}
        rows = len(first_part(frames))
        space = to_action_space(actions)
        seen = map_parts(_derived_space, frames) if observation is None else observation
        for name, values in parts_of(frames).items():
            check_values(f"frames {name}".strip(), values, rows, parts_of(seen)[name])
        check_values("action", action, rows, space)
        for name, values in columns.items():
            if np.shape(values) != (rows,):
                raise UsageError(f"{name}: shape {np.shape(values)}, but there are {rows} frames.")
        ended = np.asarray(terminated, bool) | np.asarray(truncated, bool)
        replay = Replay(device)
        replay.extend(
            {
                **column_names("observation", frames),
                "action": np.asarray(action, space.dtype),
                "reward": np.asarray(reward, np.float32),
                "terminated": np.asarray(terminated, bool),
                "truncated": np.asarray(truncated, bool),
                "first": np.concatenate(([True], ended[:-1])),
                "lives": np.full(rows, -1, np.int16),
                "stream": np.zeros(rows, np.int16),
            }
        )
        return cls(replay, Spaces(seen, space))

    def __len__(self) -> int:
        """Return the number of rows N."""
        return len(self.replay)

    @property
    def episodes(self) -> int:
        """Number of episodes, unfinished ones included."""
        return len(self.replay.episodes.start)

    def rows(self) -> Rows:
        """Return everything, episode after episode."""
        return self._at(self.replay.order)

    def sample(self, size: int, length: int, *, seed: int | np.random.Generator = 0) -> Rows:
        """Draw segments (B, T, ...) of whole frames, each inside one episode, uniformly and with replacement.

        Args:
            size: Segments, B.
            length: Frames of a segment, T.
            seed: Of the choice, or a generator.

        Raises:
            UsageError: No episode is as long.
        """
        runs, order = self.replay.runs(across_ends=False)
        table = WindowTable(runs, order, length=length, minimum=length, pad="right")
        return self._at(table.windows(np.random.default_rng(seed).integers(len(table), size=size)).rows)

    def _at(self, rows: np.ndarray) -> Rows:
        replay = self.replay
        columns = replay.observation, replay.action, replay.reward, replay.terminated, replay.truncated, replay.first
        return Rows(*(take_rows(column, rows, replay.device) for column in columns))


def _derived_space(values: np.ndarray) -> PartSpace:
    """Return the space of a part (N, ...) by its number type.

    Raises:
        UsageError: It is neither an image nor a vector.
    """
    if values.ndim == 4 and values.dtype == np.uint8:
        return Image(*values.shape[1:])
    if values.ndim == 2 and values.dtype.kind == "f":
        return Vector(values.shape[1])
    raise UsageError(
        f"frames: {values.dtype} {values.shape}, but images (N, H, W, C) uint8 or vectors (N, n) of floats are needed,"
        " or observation=, the space of something else."
    )


def check_values(name: str, values: Any, rows: int, space: PartSpace | ActionSpace) -> None:
    """Check an array of observations or actions.

    Args:
        name: For messages.
        values: The array.
        rows: Its length.
        space: Of each value.

    Raises:
        UsageError: Its shape does not fit, or a value is outside of the space.
    """
    values = np.asarray(values)
    if values.shape != (rows, *space.shape):
        raise UsageError(f"{name}: shape {values.shape}, but {(rows, *space.shape)} is needed.")
    if isinstance(space, Discrete | Categories):
        most = np.array(space.count if isinstance(space, Discrete) else space.sizes) - 1
        if not rows or values.dtype.kind not in "iu" or (values < 0).any() or (values > most).any():
            raise UsageError(f"{name}: whole numbers from 0 to {most} are needed, for at least one frame.")
    elif isinstance(space, Image) and values.dtype != np.uint8:
        raise UsageError(f"{name}: {values.dtype}, but images are uint8.")
    elif not np.isfinite(values).all():
        raise UsageError(f"{name}: a value is not finite.")


def check_fits(experience: Experience, spaces: Spaces | None, machine: Machine) -> None:
    """Raise UsageError if experience is of other spaces than a model, or lies on another device."""
    if spaces is not None and experience.spaces != spaces:
        raise UsageError(
            f"the experience has {describe_parts(experience.spaces.observation)} and actions"
            f" {experience.spaces.action}, but the model was made for {describe_parts(spaces.observation)} and actions"
            f" {spaces.action}."
        )
    if experience.replay.device.type != machine.device.type:
        raise UsageError(
            f"the experience lies on {experience.replay.device}, the model on {machine.device}: load it with"
            f" device='{machine.device}'."
        )
