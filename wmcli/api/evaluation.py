"""Episodes of the real environment, without a run directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from wmcli.envs import EnvironmentSettings
from wmcli.errors import Stopped
from wmcli.progress import Progress
from wmcli.stages.episodes import play_episodes
from wmcli.training.device import derived_seed

Policy = Callable[[Any, np.ndarray], Any]
"""From observations (E, *part), for images (E, H, W, C) uint8, and `is_first` (E,) bool to actions (E, *action)."""


class EpisodeScores(NamedTuple):
    """Complete episodes, in the order in which they were started."""

    returns: np.ndarray
    """float64 (N,), sums of rewards."""
    lengths: np.ndarray
    """int64 (N,), steps."""

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def stderr(self) -> float:
        """Standard error of the mean; NaN of one episode."""
        return float(self.returns.std(ddof=1) / np.sqrt(len(self.returns))) if len(self.returns) > 1 else float("nan")


def evaluate(
    policy: Policy, environment: EnvironmentSettings, episodes: int = 100, *, num_envs: int = 8, seed: int = 0
) -> EpisodeScores:
    """Play complete test episodes with a policy of one's own.

    Args:
        policy: From observations (E, *part), for images (E, H, W, C) uint8, and `is_first` (E,) bool to actions
            (E, *action), continuous ones from -1 to 1. `is_first` marks the rows whose episode begins, for a policy
            that remembers. E is the smaller of `num_envs` and `episodes`.
        environment: The section of a run: frames are resized as the models of that run saw them.
        episodes: How many. All that are started count.
        num_envs: Environments side by side.
        seed: Of the environment.

    Raises:
        UsageError: The environment cannot be opened, or an episode does not end.
    """
    return play(_PolicyActor(policy), environment, episodes, num_envs, seed)


def play(actor: Any, environment: EnvironmentSettings, episodes: int, num_envs: int, seed: int) -> EpisodeScores:
    try:
        played = play_episodes(
            environment,
            actor,
            episodes=episodes,
            environments=num_envs,
            seed=derived_seed(seed, "eval"),
            progress=Progress(quiet=True),
            name="evaluate",
        )
    except Stopped:  # by Ctrl-C; there is no checkpoint that the message could speak of
        raise KeyboardInterrupt from None
    return EpisodeScores(np.asarray(played.returns), np.asarray(played.lengths))


class _PolicyActor:
    """A function as a `wmcli.controllers.base.Actor`, as far as playing without checkpoints asks."""

    across_ends = False

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def act(self, observation: Any, is_first: np.ndarray) -> np.ndarray:
        action = np.asarray(self._policy(observation, is_first))
        return action if action.dtype.kind == "f" else action.astype(np.int64)

    def summarize_search(self) -> dict[str, np.ndarray]:
        return {}
