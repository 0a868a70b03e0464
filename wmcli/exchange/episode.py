"""Recorded experience in wm's own form, whatever file it came from.

Axes: T decisions of one episode. Observations and actions are as in `wmcli.spaces`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wmcli.spaces import Spaces, column_names, first_part, map_parts


@dataclass(frozen=True)
class Episode:
    """One episode. The observation that its last action led to may be known: it *closes* the episode."""

    observation: Any
    """Tree of (T, ...), or of (T + 1, ...) with the closing one."""
    action: np.ndarray
    """int32 (T,), int32 (T, K) or float32 (T, N)."""
    reward: np.ndarray
    """float32 (T,), of each action."""
    terminated: np.ndarray
    """bool (T,): the task ended with the action. Only the last one may be set."""
    truncated: np.ndarray
    """bool (T,): the episode was cut off behind it. Only the last one may be set. Neither: recording stopped."""

    def __len__(self) -> int:
        """Return the number of decisions T."""
        return len(self.action)

    @property
    def has_closing(self) -> bool:
        """Whether the closing observation is known."""
        return len(first_part(self.observation)) > len(self)

    @property
    def ended(self) -> bool:
        """Whether the last action ended the episode."""
        return bool(self.terminated[-1] or self.truncated[-1])

    def without_last_action(self) -> Episode | None:
        """Return the episode cut off before its last action, so that its last observation closes it; None if T = 1."""
        if len(self) == 1:
            return None
        last = np.arange(len(self) - 1) == len(self) - 2
        observation = map_parts(lambda part: part[: len(self)], self.observation)
        return Episode(observation, self.action[:-1], self.reward[:-1], last & False, last)


@dataclass(frozen=True)
class Recording:
    """Episodes of one source, read one at a time."""

    name: str
    """Letters, digits, dots, dashes and underscores."""
    format: str
    """See `wmcli.exchange.formats`."""
    spaces: Spaces
    count: int
    """Number of episodes."""
    read: Callable[[int], Episode]
    """Reads one episode. Raises UsageError if it is damaged or does not fit the spaces."""
    lossy: str | None = None
    """How images were compressed with loss; None where they are exact."""
    notes: tuple[str, ...] = ()
    """What had to be assumed."""
    source: dict[str, Any] = field(default_factory=dict)
    """What the source says about its origin: license, authors, environment, ..."""

    def __len__(self) -> int:
        """Return the number of episodes."""
        return self.count

    def __iter__(self) -> Iterator[Episode]:
        """Read one episode after the other."""
        return (self.read(index) for index in range(self.count))


def digest_of(episodes: Iterable[Episode]) -> str:
    """Return the sha256 of episodes: equal for equal data, whatever file it lies in."""
    sha256 = hashlib.sha256()
    for episode in episodes:
        columns = column_names("observation", episode.observation)
        columns |= {name: getattr(episode, name) for name in ("action", "reward", "terminated", "truncated")}
        for name, array in sorted(columns.items()):
            sha256.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            sha256.update(np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()
