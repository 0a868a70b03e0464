"""Published experience, verified and loaded into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.envs.memory_task import Task
from wmcli.envs.tasks import TASKS
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience.replay import FramesOn, Replay
from wmcli.experience.segment import count_rows, open_frames, read_frames, read_segment

if TYPE_CHECKING:
    import torch

SEGMENT = "segment.zarr"
"""Segment of an experience artifact. Earlier segments are in its inputs."""
HELD_OUT = {"validation": "validation.zarr", "test": "test.zarr"}
"""Segments of held-out episodes in scripted and recorded experience."""
NONE_HELD_OUT = (
    "holds no test episodes back; import some with wm import --held-out N, or collect some with collect.test_games=N"
    " (by a script collect.test=N)"
)
"""Of an experience, in a message."""
DRAWN_AT_ONCE = 4096  # frames


def load_experience(
    artifact: Artifact,
    device: torch.device | str,
    loaded: Replay | None = None,
    *,
    closing: bool = False,
    frames_on: FramesOn = "auto",
    growth: float = 1.0,
) -> Replay:
    """Load an experience artifact and all earlier segments.

    Args:
        artifact: The newest segment.
        device: Device of the tensors.
        loaded: An earlier result. If the artifact continues it, it is extended in place by the newer segments.
        closing: Keep the observations that close episodes, see `Replay`.
        frames_on: Where the frames of a new replay go.
        growth: How many times these rows are to come in all. A new replay allocates their memory at once.

    Returns:
        `loaded` if it was extended, else a new replay.

    Raises:
        ArtifactError: A segment is missing, damaged or pruned.
    """
    if loaded is not None and loaded.closing != closing:
        loaded = None
    chain = [artifact]
    while not _ends_with(loaded, chain[-1]) and "previous" in chain[-1].inputs:
        chain.append(chain[-1].input("previous"))
    if loaded is not None and _ends_with(loaded, chain[-1]):
        replay = loaded
        chain.pop()
    else:
        for segment in chain:
            segment.verify()  # before anything is read of them
        replay = _empty(artifact, device, closing, frames_on)
        replay.expect(ceil(growth * sum(count_rows(segment.path / SEGMENT, closing=closing) for segment in chain)))
    for segment in reversed(chain):
        segment.verify()
        _extend(replay, segment, SEGMENT)
        replay.upto = segment.digest
    return replay


def load_held_out(
    artifact: Artifact,
    part: str,
    device: torch.device | str,
    *,
    closing: bool = False,
    frames_on: FramesOn = "auto",
) -> Replay:
    """Load held-out episodes: those of the newest segment that holds some back.

    Args:
        artifact: The newest segment.
        part: "validation" or "test".
        device: Device of the tensors.
        closing: Keep the observations that close episodes, see `Replay`.
        frames_on: Where the frames go.

    Raises:
        ArtifactError: The artifact has no such episodes, or is damaged.
    """
    holder = find_held_out(artifact, part)
    if holder is None:
        raise ArtifactError(
            f"{artifact.name} has no {part} episodes; make some with: wm collect --policy scripted --set"
            f" collect.{part}=100, or hold some of imported ones out: wm import --held-out N"
        )
    holder.verify()
    # They are few, and read as a whole.
    replay = _empty(holder, device, closing, "host" if frames_on == "disk" else frames_on)
    _extend(replay, holder, HELD_OUT[part])
    return replay


def find_held_out(artifact: Artifact, part: str) -> Artifact | None:
    """Return the newest segment up to `artifact` that holds back episodes of a part; None without one."""
    newest: Artifact | None = artifact
    while newest is not None and not (newest.path / HELD_OUT[part]).exists():
        newest = newest.input("previous") if "previous" in newest.inputs else None
    return newest


def lives_end_episodes(environment: Mapping[str, Any]) -> bool:
    """Return whether a lost life ends a training episode, but not its game, in an environment of a manifest."""
    return bool(environment["train"].get("life_loss_ends_episode", False))


def _ends_with(replay: Replay | None, artifact: Artifact) -> bool:
    return replay is not None and replay.upto == artifact.digest


def _empty(artifact: Artifact, device: torch.device | str, closing: bool, frames_on: FramesOn) -> Replay:
    lives = lives_end_episodes(artifact.manifest["environment"])
    return Replay(device, lives_end_episodes=lives, closing=closing, frames_on=frames_on)


def _extend(replay: Replay, artifact: Artifact, part: str) -> None:
    """Append the segment `part` to the replay, block by block. Without frames, draw them from compact states."""
    folder = artifact.path / part
    arrays = read_segment(folder, frames=False)
    if replay.keeps_images:
        frames = read_frames(folder)
        if frames is None:
            frames = _draw(TASKS[artifact.manifest["environment"]["id"]], arrays["sketch"])
        replay.extend(arrays, frames)
    elif stored := open_frames(folder):
        replay.extend(arrays, stored=stored)
    else:
        raise UsageError(
            f"training.replay = disk: {artifact.name} has no frames on disk, since they are drawn from compact states:"
            " use --set training.replay=host"
        )


def _draw(task: Task, compact_states: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the frames of compact states (N, S) in blocks (n, H, W, 3)."""
    pieces = np.split(compact_states, range(DRAWN_AT_ONCE, len(compact_states), DRAWN_AT_ONCE))
    count = os.cpu_count() or 1
    with ThreadPoolExecutor(count) as workers:  # NumPy releases the interpreter lock
        for start in range(0, len(pieces), count):
            yield from workers.map(task.draw, pieces[start : start + count])
