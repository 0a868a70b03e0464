"""Complete episodes of the real environment, played so that every one that starts counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from wmcli.artifacts.failpoint import failpoint
from wmcli.controllers.base import Actor
from wmcli.envs import AnyStreams, EnvironmentSettings, Transition, open_streams
from wmcli.envs.vector import BROKEN
from wmcli.errors import EnvironmentFault, Stopped, UsageError
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.spaces import row_of
from wmcli.stages.pictures import Film, ending
from wmcli.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint

FILMED_STEPS = 300  # of the first episode
LONGEST_EPISODE = 100_000  # steps, in an environment without a time limit; Atari's longest protocol allows 108,000


class PlayedEpisodes(NamedTuple):
    """Complete episodes, in the order in which they started."""

    returns: list[float]
    """Undiscounted."""
    lengths: list[int]
    """Environment steps."""
    film: Film
    """The first frames of the first episode."""


class _Tally:
    """Returns and lengths so far of N episodes in E environments."""

    def __init__(self, episodes: int, environments: int) -> None:
        self.number = np.arange(environments)  # (E,), the episode that each plays; those from N on do not count
        self.started = environments
        self.returns, self.lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
        self.film = Film()

    @property
    def complete(self) -> bool:
        return bool((self.number >= len(self.returns)).all())

    @property
    def ended(self) -> int:
        """Number of episodes that have ended and count."""
        return min(self.started, len(self.returns)) - int((self.number < len(self.returns)).sum())

    def add(self, after: Transition) -> None:
        """Add one step of every environment."""
        counted = self.number < len(self.returns)
        self.returns[self.number[counted]] += after.reward[counted]
        self.lengths[self.number[counted]] += 1
        for environment in np.flatnonzero(after.terminated | after.truncated):
            self.number[environment] = self.started
            self.started += 1

    def save(self, path: Path, state: dict[str, Any], agent: Actor) -> None:
        """Write a checkpoint, with the state of the environments."""
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        tensors = {f"streams/{name}": torch.from_numpy(value) for name, value in arrays.items()}
        tensors |= {f"agent/{name}": value for name, value in agent.state().items()}
        tensors |= {f"film/{name}": torch.from_numpy(value) for name, value in self.film.arrays().items()}
        counts = {"number": self.number, "returns": self.returns, "lengths": self.lengths}
        tensors |= {f"counts/{name}": torch.from_numpy(value) for name, value in counts.items()}
        about = {"seed": state["seed"], "started": self.started}
        save_checkpoint(path, tensors, about, f"{self.ended} episodes")

    def load(self, path: Path, settings: EnvironmentSettings, agent: Actor) -> AnyStreams | None:
        """Load a checkpoint. Return its environments, or None if every episode has ended."""
        tensors, about, _ = load_checkpoint(path)

        def part(name: str) -> dict[str, torch.Tensor]:
            return {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}

        counts = {name: value.numpy() for name, value in part("counts").items()}
        self.number, self.returns, self.lengths = counts["number"], counts["returns"], counts["lengths"]
        self.started = about["started"]
        self.film = Film.of({name: value.numpy() for name, value in part("film").items()})
        if self.complete:
            return None
        agent.load(part("agent"))
        state = {name: value.numpy() for name, value in part("streams").items()}
        streams = open_streams(settings, train=False, seed=about["seed"], state={"seed": about["seed"], **state})
        # Environments that ignore their seed, or failed, start these episodes again.
        restarted = streams.restarted | (state["frame"] == BROKEN)
        again = self.number[restarted & (self.number < len(self.returns))]
        self.returns[again], self.lengths[again] = 0, 0
        if 0 in again:
            self.film = Film()
        return streams


def play_episodes(
    settings: EnvironmentSettings,
    agent: Actor,
    *,
    episodes: int,
    environments: int,
    seed: int,
    progress: Progress,
    name: str,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 30.0,
) -> PlayedEpisodes:
    """Play exactly `episodes` complete test episodes.

    Every episode that starts counts, however long it takes, so that short ones are not over-represented.

    Args:
        settings: Of the environment; its `count` is not used.
        agent: With as many rows as there are environments.
        episodes: Number of episodes.
        environments: Most environments side by side.
        seed: Of the environments.
        progress: Gets the progress bar.
        name: Of the progress bar, and in messages.
        checkpoint: File to resume from, if it exists, and to write. None writes none.
        checkpoint_seconds: Seconds between two checkpoints. Another one is written at the end.

    Raises:
        ArtifactError: The checkpoint is damaged.
        Stopped: A signal arrived.
        EnvironmentFault: The environment failed. The same call goes on, with new games.
        UsageError: An episode of an environment without a time limit is longer than LONGEST_EPISODE.
    """
    count = min(environments, episodes)
    settings = settings.model_copy(update={"count": count})
    tally = _Tally(episodes, count)
    if checkpoint is not None and find_checkpoint(checkpoint):
        streams = tally.load(checkpoint, settings, agent)
        if streams is None:
            return PlayedEpisodes(tally.returns.tolist(), tally.lengths.tolist(), tally.film)
        progress.say(f"{name}: resuming after {tally.ended} of {episodes} episodes")
    else:
        streams = open_streams(settings, train=False, seed=seed)
    saved_at = time.monotonic()
    with stop_requests() as stop, progress.bar(name, episodes, "episodes", start=tally.ended) as bar:
        while not tally.complete:
            frames = streams.observation
            action = agent.act(frames, streams.first)
            try:
                after = streams.step(action)
            except EnvironmentFault as fault:
                if checkpoint is None:
                    raise
                tally.save(checkpoint, streams.broken_state(), agent)
                raise EnvironmentFault(
                    f"{fault} The {tally.ended} of {episodes} episodes before it are saved; those that it was amid"
                    " begin again."
                ) from fault
            if tally.number[0] == 0 and tally.film.ended is None:
                tally.film.add(row_of(frames), action[0], after.reward[0], agent.summarize_search())
                if how := ending(after):
                    tally.film.end(after.final[0], how)
                elif len(tally.film.frames) == FILMED_STEPS:
                    tally.film.end(row_of(streams.observation), "cut")
            before = tally.ended
            tally.add(after)
            if not streams.has_time_limit and tally.lengths.max() > LONGEST_EPISODE:
                raise UsageError(
                    f"{settings.id}: an episode has not ended after {LONGEST_EPISODE:,} steps, and the environment has"
                    " no time limit; register it with one: gymnasium.register(..., max_episode_steps=N)"
                )
            bar.advance(tally.ended - before)
            due = stop or tally.complete or time.monotonic() - saved_at >= checkpoint_seconds
            if checkpoint is not None and due:
                tally.save(checkpoint, streams.state(), agent)
                failpoint("checkpoint")
                saved_at = time.monotonic()
            if stop:
                raise Stopped(
                    f"{name} stopped after {tally.ended} of {episodes} episodes; the same command resumes it."
                )
    streams.close()
    return PlayedEpisodes(tally.returns.tolist(), tally.lengths.tolist(), tally.film)
