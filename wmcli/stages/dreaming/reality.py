"""The real side of a play: the environment, or recorded frames where it cannot be restored, with its past.

A *moment* is a frame, and once an action was taken in it, the outcome. One can go back to a moment and act otherwise:
the environment is restored from its seed and the actions since its game began, which is exact if it honors its seed.

Axes: T moments. Observations are trees of parts, see `wmcli.spaces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from wmcli.envs import AnyStreams, open_streams
from wmcli.envs.settings import EnvironmentSettings
from wmcli.errors import UsageError
from wmcli.spaces import map_parts, row_of, stack_parts

Source = Literal["environment", "recording", "none"]
"""Where a frame comes from; "none" where it is not known."""
Ended = Literal["terminated", "time limit"]
PLAYED_BACK = "this frame cannot be restored in the environment, so the left side plays back what was stored"
LEFT = "the stored frames end here, or were reached by another action; the dreams go on alone"
NO_WAY_BACK = "this environment does not honor its seed, so it cannot go back: a new game began"


class Outcome(NamedTuple):
    """The result of the action that was taken in a moment."""

    action: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    lives: int
    """Left after it, -1 where the environment does not tell."""
    final: Any = None
    """The observation that it led to where it ended the episode."""

    @property
    def ended(self) -> Ended | None:
        """How it ended the episode; None if that continues."""
        return "terminated" if self.terminated else "time limit" if self.truncated else None


@dataclass(frozen=True)
class Moment:
    """A real frame."""

    observation: Any
    """None where it is not known."""
    opens_episode: bool = False
    opens_game: bool = False
    outcome: Outcome | None = None
    """None until an action was taken."""
    game: int = 0
    """Number of the game, as `Streams` counts them."""
    age: int = 0
    """Actions since it began."""
    checksum: int = 0
    """CRC-32 of the observation, by which a restored environment is checked."""


class Start(NamedTuple):
    """A stored frame to start from."""

    moments: list[Moment]
    """The frame, moments of its game before it, and those that followed it, as stored."""
    at: int
    """Place of the frame in `moments`."""
    stream: int = 0
    """Number of the environment that collected it."""
    state: dict[str, Any] | None = None
    """Of `Streams` at this frame; None if it cannot be restored."""


class Reality:
    """The environment under the training rules.

    Args:
        settings: Of the environment; its `count` is not used. None for imported data, which needs a `start`.
        seed: Of the games.
        start: A stored frame; None begins a new game.

    Raises:
        EnvironmentFault: The environment failed.
    """

    def __init__(self, settings: EnvironmentSettings | None, seed: int, start: Start | None = None) -> None:
        self._settings = None if settings is None else settings.model_copy(update={"count": 1})
        self._seed, self._numbers = seed, [0]
        self._stored: list[Moment] = []  # by time
        self._departed: int | None = None  # the first moment in which another action was taken than was stored
        self._streams: AnyStreams | None = None
        self._actions: dict[int, list[np.ndarray]] = {}  # of each game
        self._stands = 0  # time of the environment
        self._forgotten = 0  # moments without their frames
        self.moments: list[Moment] = []
        """By time, those behind the current one included until the next step."""
        self.now = self.earliest = 0
        """Time of the current moment, and of the first one to go back to."""
        self.note: str | None = None
        """A remark on this side for the user."""
        if start is None:
            self._open(None)
            self.moments.append(self._moment(opens_game=True))
        else:
            self._start(start)

    def _start(self, start: Start) -> None:
        self._stored, self.moments = start.moments, start.moments[: start.at + 1]
        self.now = self.earliest = self._stands = start.at
        if start.state is not None and self._settings is not None:
            self._seed, self._numbers = start.state["seed"], [start.stream]
            self._open(start.state)
            assert self._streams is not None
            if not self._streams.restarted.any():
                restored, stored = self._moment(), self.moment
                self._actions[restored.game] = [*start.state["action"]]
                self.moments[-1] = replace(restored, opens_episode=stored.opens_episode, opens_game=stored.opens_game)
                return
            self._streams.close()
            self._streams = None
        self.note = PLAYED_BACK

    @property
    def source(self) -> Source:
        """Where the current frame comes from."""
        if self.moment.observation is None:
            return "none"
        return "recording" if self._streams is None else "environment"

    @property
    def moment(self) -> Moment:
        """The current moment."""
        return self.moments[self.now]

    @property
    def came(self) -> Outcome | None:
        """The outcome that led to the current moment."""
        return self.moments[self.now - 1].outcome if self.now > self.earliest else None

    def stored_action(self) -> np.ndarray | None:
        """Return the action that was stored in the current moment; None if this is no stored one, or the last."""
        if self.now >= len(self._stored) or (self._departed is not None and self._departed < self.now):
            return None
        outcome = self._stored[self.now].outcome
        return None if outcome is None else outcome.action

    def total(self) -> float:
        """Return the rewards so far of the current moment's episode, or of the one that the last action ended."""
        total = 0.0
        for time in reversed(range(self.now)):
            outcome = self.moments[time].outcome
            if outcome is None or (outcome.ended and time < self.now - 1):
                break
            total += outcome.reward
        return total

    def step(self, action: np.ndarray) -> None:
        """Take an action (...,) in the current moment, and move on. Moments behind it are forgotten.

        Raises:
            EnvironmentFault: The environment failed.
        """
        del self.moments[self.now + 1 :]
        if self._departed is not None and self._departed >= self.now:
            self._departed = None
        stored = self.stored_action()
        if self._departed is None and (stored is None or not np.array_equal(action, stored)):
            self._departed = self.now
        if self._streams is None:
            self._play_back()
        else:
            self._act(action)
        self.now += 1

    def go(self, time: int) -> None:
        """Go to another moment. The environment follows with the next step.

        Raises:
            UsageError: It is not kept.
        """
        if not self.earliest <= time < len(self.moments):
            raise UsageError(f"time {time}: moments from {self.earliest} to {len(self.moments) - 1} are kept.")
        self.now = time

    def forget(self, before: int) -> None:
        """Free the frames of all moments before a time; nobody goes back to them."""
        while self._forgotten < min(before, self.now):
            moment = self.moments[self._forgotten]
            outcome = None if moment.outcome is None else moment.outcome._replace(final=None)
            self.moments[self._forgotten] = replace(moment, observation=None, outcome=outcome)
            self._forgotten += 1

    def window(self, frames: int, across_ends: bool) -> list[Moment]:
        """Return up to `frames` moments before the current one, of its episode, or with `across_ends` of its game."""
        first = self.now
        while first > max(0, self.now - frames):
            moment = self.moments[first]
            if moment.opens_game if across_ends else moment.opens_episode:
                break
            first -= 1
        return self.moments[first : self.now]

    def close(self) -> None:
        """Close the environment."""
        if self._streams is not None:
            self._streams.close()

    def _play_back(self) -> None:
        """Go on in what was stored; behind another action nothing is known."""
        if self._departed is not None or self.now + 1 >= len(self._stored):
            self.moments[self.now] = replace(self.moment, outcome=None)
            self.moments.append(Moment(None))
            self.note = LEFT
            return
        self.moments[self.now] = self._stored[self.now]
        self.moments.append(self._stored[self.now + 1])
        self.note = PLAYED_BACK

    def _act(self, action: np.ndarray) -> None:
        self._bring()
        assert self._streams is not None
        after = self._streams.step(action[None])
        outcome = Outcome(
            np.array(action),
            float(after.reward[0]),
            bool(after.terminated[0]),
            bool(after.truncated[0]),
            int(after.lives[0]),
            after.final.get(0),
        )
        self.moments[self.now] = replace(self.moment, outcome=outcome)
        self._actions.setdefault(self.moment.game, []).append(outcome.action)
        self.moments.append(self._moment(opens_game=bool(after.game_over[0])))
        self._stands = self.now + 1

    def _bring(self) -> None:
        """Restore the environment at the current moment, unless it stands there."""
        assert self._streams is not None
        if self._stands == self.now:
            return
        game, age = self.moment.game, self.moment.age
        self._actions = {number: actions for number, actions in self._actions.items() if number <= game}
        actions = self._actions[game] = self._actions.get(game, [])[:age]
        space = self._streams.spaces.action
        state = {
            "seed": self._seed,
            "game": np.array([game]),
            "length": np.array([age]),
            "action": np.array(actions, space.dtype).reshape(-1, *space.shape),
            "frame": np.array([self.moment.checksum]),
        }
        self._streams.close()
        self._open(state)
        self._stands, self.note = self.now, None
        if self._streams.restarted.any():
            self.moments[self.now], self.note = self._moment(opens_game=True), NO_WAY_BACK

    def _open(self, state: dict[str, Any] | None) -> None:
        assert self._settings is not None
        self._streams = open_streams(self._settings, train=True, seed=self._seed, state=state, numbers=self._numbers)

    def _moment(self, opens_game: bool = False) -> Moment:
        """Return the moment at which the environment stands."""
        assert self._streams is not None
        state = self._streams.state()
        game, age, checksum = (int(state[name][0]) for name in ("game", "length", "frame"))
        observation = map_parts(np.array, row_of(self._streams.observation))
        return Moment(observation, bool(self._streams.first[0]), opens_game, None, game, age, checksum)


def stacked(moments: Sequence[Moment]) -> tuple[Any, np.ndarray]:
    """Return the observations (1, T, *part) and actions (1, T, ...) of known moments in which actions were taken."""
    observations = stack_parts([moment.observation for moment in moments])
    actions = np.stack([moment.outcome.action for moment in moments if moment.outcome is not None])
    return map_parts(lambda part: part[None], observations), actions[None]
