"""Experience in memory: loaded from artifacts or built from arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import settings_of
from wmcli.dream import Reference, machine_for, open_kind
from wmcli.errors import UsageError
from wmcli.experience import Replay
from wmcli.experience.load import load_experience, load_held_out
from wmcli.experience.sampler import WindowTable
from wmcli.settings import Settings
from wmcli.training.device import Machine
from wmcli.transfer import take_rows

HeldOut = Literal["validation", "test"]
"""Episodes of scripted and recorded experience that are not trained on."""


class Rows(NamedTuple):
    """Experience as tensors, (N, ...) or for segments (B, T, ...)."""

    frames: Tensor
    """uint8 (..., H, W, C)."""
    action: Tensor
    """int64, taken after this frame."""
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
    actions: int
    """Number of different actions, A."""
    artifact: Artifact | None = None
    """The artifact that it was loaded from."""

    @classmethod
    def load(cls, reference: Reference, *, device: str = "auto", held_out: HeldOut | None = None) -> Experience:
        """Load an experience artifact with all that it continues, or the episodes that it holds back.

        Raises:
            ArtifactError: See `load`; or no such episodes were held back.
        """
        artifact = open_kind(reference, "experience")
        training = settings_of(artifact).training
        machine = machine_for(training, device)
        if held_out is None:
            replay = load_experience(artifact, machine.device, frames_on=training.replay)
        else:
            replay = load_held_out(artifact, held_out, machine.device, frames_on=training.replay)
        return cls(replay, artifact.manifest["environment"]["actions"], artifact)

    @classmethod
    def from_arrays(
        cls,
        frames: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        *,
        actions: int,
        device: str = "cpu",
    ) -> Experience:
        """Build experience from arrays of one's own: episodes one after the other, in the order of time.

        Args:
            frames: (N, H, W, 3) uint8.
            action: (N,) integer, taken after each frame.
            reward: (N,), of each action.
            terminated: (N,) bool: the task ended with the action. The frame after it belongs to no episode.
            truncated: (N,) bool: the episode was cut off there.
            actions: Number of different actions, A.
            device: Where the tensors go.

        Raises:
            UsageError: The arrays do not fit together.
        """
        columns = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
        rows = len(frames)
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or frames.shape[1] != frames.shape[2]:
            raise UsageError(f"frames: {frames.dtype} {frames.shape}, but (N, H, H, 3) uint8 is needed.")
        for name, values in columns.items():
            if np.shape(values) != (rows,):
                raise UsageError(f"{name}: shape {np.shape(values)}, but there are {rows} frames.")
        if not rows or np.min(action) < 0 or np.max(action) >= actions:
            raise UsageError(f"action: values from 0 to {actions - 1} are needed, for at least one frame.")
        ended = np.asarray(terminated, bool) | np.asarray(truncated, bool)
        replay = Replay.empty(device)
        replay.extend(
            {
                "observation": frames,
                "action": np.asarray(action, np.int64),
                "reward": np.asarray(reward, np.float32),
                "terminated": np.asarray(terminated, bool),
                "truncated": np.asarray(truncated, bool),
                "first": np.concatenate(([True], ended[:-1])),
                "lives": np.full(rows, -1, np.int16),
                "stream": np.zeros(rows, np.int16),
            }
        )
        return cls(replay, actions)

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
        columns = replay.frames, replay.action, replay.reward, replay.terminated, replay.truncated, replay.first
        return Rows(*(take_rows(column, rows, replay.device) for column in columns))


def check_fits(experience: Experience, settings: Settings, machine: Machine) -> None:
    """Raise UsageError if experience has frames of another size than the settings, or lies on another device."""
    size, expected = experience.replay.frames.shape[1], settings.environment.size
    if size != expected:
        raise UsageError(
            f"the experience has frames of {size} pixels, but environment.size = {expected}: make them equal."
        )
    if experience.replay.device.type != machine.device.type:
        raise UsageError(
            f"the experience lies on {experience.replay.device}, the model on {machine.device}: load it with"
            f" device='{machine.device}'."
        )
