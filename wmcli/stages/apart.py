"""Playing the environments of a segment apart: here one after another, or on other machines.

An environment that is played alone depends on the settings, its number, the controller and the experience before. So it
comes out the same wherever it is played, on processors of one kind. The rows of the segment are sorted by environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from wmcli.artifacts import Artifact
from wmcli.envs.vector import join_states
from wmcli.errors import ArtifactError
from wmcli.settings import LearnedCollectSettings
from wmcli.stages.context import Context
from wmcli.stages.player import Player, streams_from, streams_tensors
from wmcli.training.checkpoint import DamagedFileError, load_work, save_work

THREADS = 1  # results depend on their number, and acting on one frame gains nothing from more


class PlayedApart(NamedTuple):
    """Environments that were played apart."""

    arrays: dict[str, np.ndarray]
    """Columns for `write_segment`, sorted by environment."""
    state: dict[str, Any]
    """Of the streams behind it."""


def play_apart(
    context: Context, folder: Path, before: Artifact | None, actor: Artifact | None, rounds: int
) -> PlayedApart:
    """Play all environments that a folder does not hold yet, and return all.

    Args:
        context: Of the run.
        folder: Of the work. An environment that has been played is a file in it, one that was interrupted a folder.
        before: The experience to go on behind.
        actor: The controller; None plays uniformly at random.
        rounds: Steps of each environment.

    Raises:
        EnvironmentFault, Stopped: See `Player.play`.
        ArtifactError: A file of an environment is damaged.
        MachineError: The cluster failed.
    """
    collecting, count = context.settings.collect, context.settings.environment.count
    assert isinstance(collecting, LearnedCollectSettings)
    finished = {stream: _load(_file(folder, stream)) for stream in range(count) if _file(folder, stream).exists()}
    missing = [stream for stream in range(count) if stream not in finished]
    if missing and finished:
        context.progress.say(f"collect: {len(finished)} of {count} environments have been played")
    if missing:
        play = _play_here
        if collecting.on == "ray":
            from wmcli.stages.on_ray import play_on_ray as play
        with closing(play(context, folder, before, actor, rounds, missing)) as playing:
            for stream, played in playing:
                tensors, about = streams_tensors(played.state)
                rows = {f"rows/{name}": torch.tensor(array) for name, array in played.arrays.items()}
                save_work(_file(folder, stream), rows | tensors, about)
                finished[stream] = _load(_file(folder, stream))
                shutil.rmtree(stream_folder(folder, stream), ignore_errors=True)
    return _joined([finished[stream] for stream in range(count)])


def stream_folder(folder: Path, stream: int) -> Path:
    """Return the folder of the checkpoints of an environment."""
    return folder / f"stream-{stream:04d}"


def play_one(player: Player, folder: Path, stream: int) -> PlayedApart:
    """Play one environment, from the checkpoint in a folder on if it has one."""
    played = player.play(folder, stream)
    state = played.streams.state()
    played.streams.close()
    return PlayedApart(played.arrays, state)


def _play_here(
    context: Context, folder: Path, before: Artifact | None, actor: Artifact | None, rounds: int, streams: Sequence[int]
) -> Generator[tuple[int, PlayedApart]]:
    """Play environments in this process, one after another."""
    player = Player(context, before, actor, rounds)
    with _on_one_thread():
        for stream in streams:
            own = stream_folder(folder, stream)
            own.mkdir(exist_ok=True)
            yield stream, play_one(player, own, stream)


@contextmanager
def _on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _file(folder: Path, stream: int) -> Path:
    return folder / f"stream-{stream:04d}.safetensors"


def _load(file: Path) -> PlayedApart:
    try:
        tensors, about = load_work(file)
    except DamagedFileError as error:
        raise ArtifactError(f"{error}; remove it, and the same command plays that environment again.") from None
    rows = {name: tensor for name, tensor in tensors.items() if name.startswith("rows/")}
    arrays = {name.removeprefix("rows/"): tensor.numpy() for name, tensor in rows.items()}
    return PlayedApart(arrays, streams_from(tensors, about))


def _joined(parts: Sequence[PlayedApart]) -> PlayedApart:
    arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
    return PlayedApart(arrays, join_states([part.state for part in parts]))
