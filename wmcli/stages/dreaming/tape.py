"""What a user plays, recorded: rows in a file that outlives a killed process, then a version of experience.

Observations are trees of parts, see `wmcli.spaces`.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.numpy import load, save

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.environment import check_same_environment
from wmcli.artifacts.files import disk_errors
from wmcli.exchange.episode import Episode, Recording, digest_of
from wmcli.spaces import column_names, from_columns, map_parts, stack_parts
from wmcli.stages.context import Context
from wmcli.stages.dreaming.reality import Moment, Outcome
from wmcli.stages.imported import publish_recording

PLAYED = "played"  # format of recordings
FOLDER = "played"  # in the run, of tapes that are not published yet
SUFFIX = ".tape"
_LENGTH = struct.Struct("<Q")


class Tape:
    """Moments in which actions were taken, in a file of the run.

    Args:
        run: The run.

    Raises:
        UsageError, MachineError: The run cannot be written.
    """

    def __init__(self, run: Run) -> None:
        self.moments: list[Moment] = []
        with disk_errors(run.path):
            folder = run.path / FOLDER
            folder.mkdir(exist_ok=True)
            name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
            number = 1
            while True:
                self.path = folder / f"{name}-{number}{SUFFIX}"
                with suppress(FileExistsError):
                    self._file: IO[bytes] = self.path.open("xb")
                    break
                number += 1
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __len__(self) -> int:
        """Return the number of moments."""
        return len(self.moments)

    def add(self, moment: Moment) -> None:
        """Append a moment with its outcome; it is on disk when this returns, unless the machine itself fails."""
        self.moments.append(moment)
        self._write(_columns(moment))

    def cut(self, length: int) -> None:
        """Forget all moments behind the first `length`."""
        if length < len(self.moments):
            del self.moments[length:]
            self._write({"cut": np.array(length)})

    def close(self, *, keep: bool) -> None:
        """Close the file, and remove it unless it is to be published later."""
        if not keep:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):
                self.path.parent.rmdir()
        self._file.close()

    def _write(self, columns: dict[str, np.ndarray]) -> None:
        block = save({name: np.array(column, order="C") for name, column in columns.items()})
        with disk_errors(self.path):
            self._file.write(_LENGTH.pack(len(block)) + block)
            self._file.flush()


def _columns(moment: Moment) -> dict[str, np.ndarray]:
    outcome = moment.outcome
    assert outcome is not None
    columns = column_names("observation", moment.observation)
    if outcome.final is not None:
        columns |= column_names("final", outcome.final)
    flags = [moment.opens_episode, moment.opens_game, outcome.terminated, outcome.truncated]
    return columns | {
        "action": outcome.action,
        "reward": np.array(outcome.reward),
        "flags": np.array(flags),
        "lives": np.array(outcome.lives),
    }


def _moment(columns: dict[str, np.ndarray]) -> Moment:
    opens_episode, opens_game, terminated, truncated = columns["flags"].tolist()
    final = from_columns("final", columns) if any(name.partition(".")[0] == "final" for name in columns) else None
    outcome = Outcome(columns["action"], float(columns["reward"]), terminated, truncated, int(columns["lives"]), final)
    return Moment(from_columns("observation", columns), opens_episode, opens_game, outcome)


def read_tape(path: Path) -> list[Moment]:
    """Read the moments of a tape, without a last one that was not written to its end."""
    moments: list[Moment] = []
    with path.open("rb") as file:
        for columns in _blocks(file):
            if "cut" in columns:
                del moments[int(columns["cut"]) :]
            else:
                moments.append(_moment(columns))
    return moments


def _blocks(file: IO[bytes]) -> Iterator[dict[str, np.ndarray]]:
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        block = file.read(length)
        if len(block) < length:
            return
        yield load(block)


def left_tapes(run: Run) -> list[Path]:
    """Return the tapes of processes that ended before they published them."""
    return [path for path in sorted((run.path / FOLDER).glob(f"*{SUFFIX}")) if not _is_locked(path)]


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def episodes_of(moments: Sequence[Moment]) -> list[Episode]:
    """Return moments with their outcomes as episodes. One that was not played to its end has neither flag set."""
    episodes: list[list[Moment]] = []
    for moment in moments:
        if not episodes or moment.opens_episode or _ended(episodes[-1][-1]):
            episodes.append([])
        episodes[-1].append(moment)
    return [_episode(each) for each in episodes]


def _ended(moment: Moment) -> bool:
    return moment.outcome is not None and moment.outcome.ended is not None


def _episode(moments: Sequence[Moment]) -> Episode:
    outcomes = [moment.outcome for moment in moments if moment.outcome is not None]
    observations = [moment.observation for moment in moments]
    if outcomes[-1].final is not None:
        observations.append(outcomes[-1].final)
    action = np.stack([outcome.action for outcome in outcomes])
    return Episode(
        map_parts(np.ascontiguousarray, stack_parts(observations)),
        action.astype(np.float32 if action.dtype.kind == "f" else np.int32),
        np.array([outcome.reward for outcome in outcomes], np.float32),
        np.array([outcome.terminated for outcome in outcomes]),
        np.array([outcome.truncated and not outcome.terminated for outcome in outcomes]),
    )


def publish_moments(context: Context, moments: Sequence[Moment], name: str) -> Artifact:
    """Publish played moments behind the newest experience of the run.

    Args:
        context: Of the run.
        moments: With their outcomes; at least one.
        name: Of the recording.

    Raises:
        BusyError: Another process works on the run's experience.
        ArtifactError: The run has experience of another environment.
        MachineError: The disk is full.
    """
    episodes = episodes_of(moments)
    recording = Recording(name, PLAYED, context.spaces, len(episodes), episodes.__getitem__)
    before = context.run.latest("experience")
    if before is not None:
        check_same_environment(context.environment, before)
    content = digest_of(episodes)
    identity = context.settings.identity("environment") | {"policy": PLAYED, "content": content}
    job = context.run.job("experience", identity, {} if before is None else {"previous": before})
    if existing := context.done(job):
        return existing
    with context.work(job, fresh=True) as work:
        chosen: dict[str, Any] = {"train": list(range(len(episodes)))}
        return publish_recording(context, work, before, recording, chosen, {"content": content}, command="play")


def publish_left(context: Context) -> list[Artifact]:
    """Publish the tapes that ended processes left behind, and remove them."""
    published = []
    for path in left_tapes(context.run):
        moments = read_tape(path)
        if moments:
            published.append(publish_moments(context, moments, path.stem))
            context.progress.say(f"play: {len(moments)} steps of an interrupted recording are now {published[-1].name}")
        path.unlink(missing_ok=True)
    with suppress(OSError):
        (context.run.path / FOLDER).rmdir()
    return published
