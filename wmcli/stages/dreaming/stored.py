"""Stored frames that a play can start from: the episodes of an experience artifact.

Axes: N rows. Observations are trees of parts, see `wmcli.spaces`.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience import Replay
from wmcli.experience.load import SEGMENT, load_experience
from wmcli.experience.replay import FramesOn
from wmcli.experience.segment import IMPORTED, open_frames
from wmcli.spaces import map_parts, parts_of
from wmcli.stages.dreaming.reality import Moment, Outcome, Start
from wmcli.stages.player import STREAMS, played_before
from wmcli.training.checkpoint import load_tensors
from wmcli.transfer import take_rows

MOST_FOLLOWING = 1000  # frames of the episode from the one to start from on, to play back


class StoredEpisodes:
    """The episodes of an experience artifact and all that it continues.

    Args:
        artifact: The newest segment.

    Raises:
        ArtifactError: A segment is missing, damaged or pruned.
    """

    def __init__(self, artifact: Artifact) -> None:
        # Few frames are shown, so images stay on disk, unless they are drawn from compact states.
        frames_on: FramesOn = "disk" if open_frames(artifact.path / SEGMENT) else "host"
        self.replay: Replay = load_experience(artifact, "cpu", frames_on=frames_on)
        self.name = artifact.name
        self._seed = _seed_of(artifact)
        runs, order = self.replay.runs(across_ends=False)
        self._starts, self._lengths, self._order = runs.start, runs.length, order
        reward = self.replay.reward.double().numpy()
        self.returns = np.add.reduceat(reward[order], runs.start) if len(runs.start) else np.zeros(0)
        """float64 (E,), of each episode."""

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._starts)

    def describe(self, most: int) -> list[dict[str, Any]]:
        """Return number, frames and return of the newest `most` episodes, the newest first."""
        newest = reversed(range(max(0, len(self) - most), len(self)))
        return [
            {
                "number": number,
                "frames": int(self._lengths[number]),
                "return": float(self.returns[number]),
                "source": self.name,
            }
            for number in newest
        ]

    def start(self, episode: int, frame: int, before: int) -> Start:
        """Return a frame to start from.

        Args:
            episode: Its number.
            frame: Of the episode, from 0.
            before: Frames before it that models read, as far as its game has them.

        Raises:
            UsageError: There is no such frame.
        """
        if not 0 <= episode < len(self):
            raise UsageError(f"episode {episode}: {self.name} has episodes 0 to {len(self) - 1}.")
        if not 0 <= frame < self._lengths[episode]:
            raise UsageError(f"frame {frame}: episode {episode} has frames 0 to {self._lengths[episode] - 1}.")
        first = self._starts[episode]
        row = int(self._order[first + frame])
        stream = int(self.replay.stream[row])
        rows = np.flatnonzero(self.replay.stream == stream)  # in order of time
        at = int(np.searchsorted(rows, row))
        opens = self.replay.opens_game.numpy()[rows]
        game_start = int(np.flatnonzero(opens[: at + 1])[-1])
        from_ = max(game_start, at - before)
        moments = self._moments(rows[from_ : at + min(int(self._lengths[episode]) - frame, MOST_FOLLOWING)])
        state = None
        if self._seed is not None and stream != IMPORTED:
            action = self.replay.action[rows[game_start:at]].numpy()
            state = {
                "seed": self._seed,
                "game": np.array([int(opens[: at + 1].sum()) - 1]),
                "length": np.array([at - game_start]),
                "action": action,
                "frame": np.array([_checksum(moments[at - from_].observation)]),
            }
        return Start(moments, at - from_, stream, state)

    def _moments(self, rows: np.ndarray) -> list[Moment]:
        replay = self.replay
        frames = map_parts(lambda part: part.cpu().numpy(), take_rows(replay.observation, rows, replay.device))
        names = "action", "reward", "terminated", "truncated", "first", "opens_game"
        columns = {name: getattr(replay, name)[rows].numpy() for name in names}
        return [
            Moment(
                map_parts(lambda part, at=place: part[at], frames),
                bool(columns["first"][place]),
                bool(columns["opens_game"][place]),
                Outcome(
                    columns["action"][place],
                    float(columns["reward"][place]),
                    bool(columns["terminated"][place]),
                    bool(columns["truncated"][place]),
                    -1,
                ),
            )
            for place in range(len(rows))
        ]


def _seed_of(artifact: Artifact) -> int | None:
    """Return the seed of the environments that were played; None where none can be restored."""
    try:
        played = played_before(artifact)
        if played is None or not (played.path / STREAMS).exists():
            return None
        return int(load_tensors(played.file(STREAMS))[1]["seed"])
    except ArtifactError:
        return None


def _checksum(observation: Any) -> int:
    """Return the CRC-32 of an observation, as `Streams` computes it."""
    total = 0
    for part in parts_of(observation).values():
        total = zlib.crc32(np.ascontiguousarray(part).tobytes(), total)
    return total
