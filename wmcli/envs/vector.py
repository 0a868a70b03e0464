"""Parallel environments, whose state can be saved and restored exactly.

Axes: E environments (streams). Observations are trees of parts, and actions have the axes of their space, see
`wmcli.spaces`.

A *game* lasts from one real reset to the next, an *episode* to the next end that the learner sees. They differ if a
lost life ends an episode but not its game. Every game has a seed derived from (seed, stream, number of the game). After
the reset everything depends on the actions. So the state of a stream is the number of its game and the actions since
its reset; restoring replays them. If the replay gives other frames, after a fault, or instead of a very long game, a
new game starts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from wmcli.envs.atari import CONTINUES, Atari
from wmcli.envs.environment import make, time_limit
from wmcli.envs.settings import EnvironmentSettings
from wmcli.errors import ArtifactError, EnvironmentFault
from wmcli.spaces import Spaces, map_parts, parts_of

NO_LIVES = -1  # `lives` of an environment that does not tell
MOST_LIVES = np.iinfo(np.int16).max
BROKEN = -1  # in place of a frame's CRC-32 in a saved state: this game cannot be gone on with


class Transition(NamedTuple):
    """The result of one step of E environments."""

    reward: np.ndarray  # float32 (E,), as the environment gives it
    terminated: np.ndarray  # bool (E,)
    truncated: np.ndarray  # bool (E,)
    lives: np.ndarray  # int16 (E,), left after the step, before any reset; -1 where the environment does not tell
    game_over: np.ndarray  # bool (E,): the game ended, not only a life
    final: dict[int, Any]  # by environment, of those whose episode ended: the observation that its last action led to


class Streams:
    """`settings.count` parallel environments. One that ends an episode is reset within the same step.

    Args:
        settings: Of the environments.
        train: Play by the training rules of an Atari protocol, else by its test rules.
        seed: That the seeds of all games derive from.
        state: Of streams to go on with, see `restore`.
        numbers: Of the streams, where these are some of more; all from 0 on by default. A stream of the same number is
            the same alone and among others.

    Attributes:
        spaces: Of observations and actions.
        observation: Current observations, arrays (E, *part), new ones after every step.
        first: Whether the current observation is the first of an episode, (E,) bool.
        has_time_limit: Whether every episode has a last step.
        restarted: Whether restoring started a new game, because the replay gave other frames, (E,) bool.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        *,
        train: bool,
        seed: int,
        state: dict[str, Any] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._numbers = range(settings.count) if numbers is None else numbers
        count = len(self._numbers)
        if state is not None:
            check_count(settings.id, state, count)
        self.seed = seed
        self.first = np.ones(count, bool)
        self.restarted = np.zeros(count, bool)
        several = settings.count > 1
        self._envs: list[Any] = [make(settings, train=train, number=i if several else None) for i in self._numbers]
        self.spaces: Spaces = self._envs[0].spaces
        self.observation = self._empty()
        self.has_time_limit = settings.protocol != "plain" or time_limit(self._envs[0], settings) is not None
        self._games = [0] * count  # number of the running game
        self._played: list[list[np.ndarray]] = [[] for _ in self._envs]  # actions since its reset
        self._opened = [0] * count  # how many of them the running episode came after
        self._final: dict[int, Any] = {}
        if state is None:
            for stream in range(count):
                self._start_game(stream)
        else:
            self._replay(state)

    @classmethod
    def restore(cls, settings: EnvironmentSettings, train: bool, state: dict[str, Any]) -> Streams:
        """The streams that gave `state`, to the bit. Time: that of playing the running games again.

        A stream that does not come to the same frame stands at the start of its next game, and is marked `restarted`.
        Raises ArtifactError when the number of streams differs.
        """
        return cls(settings, train=train, seed=state["seed"], state=state)

    def step(self, action: np.ndarray) -> Transition:
        """Take one action (E, ...) in every environment. Afterwards `observation` is the next frame: the
        first one of the next episode where this one ended.

        Raises EnvironmentFault for whatever an environment does wrong. Then only `broken_state` and `close` are left.
        """
        count = len(self._envs)
        assert len(action) == count, f"{len(action)} actions for {count} environments"
        self.observation = self._empty()
        self.first = np.zeros(count, bool)
        reward = np.zeros(count, np.float32)
        terminated, truncated, game_over = (np.zeros(count, bool) for _ in range(3))
        lives = np.zeros(count, np.int16)
        self._final = {}
        for i in range(count):
            reward[i], terminated[i], truncated[i], lives[i], game_over[i] = self._step_one(i, action[i])
        return Transition(reward, terminated, truncated, lives, game_over, self._final)

    def age(self, across_ends: bool) -> np.ndarray:
        """Count the decisions since the running episode opened, or with `across_ends` since its game did: int64 (E,),
        0 where the current frame opens it."""
        opened = [0] * len(self._envs) if across_ends else self._opened
        return np.array([len(played) for played in self._played]) - opened

    def games(self) -> np.ndarray:
        """Return the numbers of the running games, int64 (E,)."""
        return np.array(self._games, np.int64)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`: the integer `seed` and arrays.

        `game`, `length` (E,) int64 are number and actions so far of each unfinished game, `action` (n, ...) int32 or
        float32 these actions, game after game, and `frame` (E,) int64 the CRC-32 of the current observations, to check
        the replay.
        """
        return {
            "seed": self.seed,
            "game": self.games(),
            "length": np.array([len(played) for played in self._played], np.int64),
            "action": self._actions(action for played in self._played for action in played),
            "frame": np.array([self._checksum(stream) for stream in range(len(self._envs))], np.int64),
        }

    def broken_state(self) -> dict[str, Any]:
        """Return the state for `restore` after a fault: every stream starts its next game.

        That includes all streams, because the environments before the faulty one have taken one step more.
        """
        count = len(self._envs)
        return {
            "seed": self.seed,
            "game": self.games(),
            "length": np.zeros(count, np.int64),
            "action": self._actions(()),
            "frame": np.full(count, BROKEN, np.int64),
        }

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def _empty(self) -> Any:
        """Return new arrays for the observations of all streams."""
        count = len(self._envs)
        return map_parts(lambda part: np.zeros((count, *part.shape), part.dtype), self.spaces.observation)

    def _show(self, stream: int, observation: Any) -> None:
        for name, part in parts_of(observation).items():
            parts_of(self.observation)[name][stream] = part

    def _actions(self, actions: Iterable[np.ndarray]) -> np.ndarray:
        space = self.spaces.action
        return np.array([*actions], space.dtype).reshape(-1, *space.shape)

    def _checksum(self, stream: int) -> int:
        """Return the CRC-32 of the current observation of a stream."""
        total = 0
        for part in parts_of(self.observation).values():
            total = zlib.crc32(part[stream].tobytes(), total)
        return total

    def _start_game(self, stream: int) -> None:
        words = np.random.SeedSequence((self.seed, self._numbers[stream], self._games[stream])).generate_state(1)
        seed = int(words[0]) >> 1  # some environments hand it to libraries that take 31 bits
        self._show(stream, self._envs[stream].reset(seed=seed)[0])
        self._played[stream], self._opened[stream] = [], 0
        self.first[stream] = True

    def _step_one(self, stream: int, action: np.ndarray) -> tuple[float, bool, bool, int, bool]:
        env = self._envs[stream]
        frame, reward, terminated, truncated, info = env.step(action)
        self._played[stream].append(np.array(action))
        ended = terminated or truncated
        if ended:
            self._final[stream] = map_parts(np.array, frame)
            self._opened[stream] = len(self._played[stream])
        continues = ended and info.get(CONTINUES, False)
        if continues:  # this reset is a consequence of the actions, so it is not part of the state
            frame, _ = env.reset()
        self._show(stream, frame)
        self.first[stream] = ended
        if ended and not continues:
            self._games[stream] += 1
            self._start_game(stream)
        lives = info.get("lives")
        if not isinstance(lives, int | np.integer) or not 0 <= lives <= MOST_LIVES:
            lives = NO_LIVES  # the word means something else there
        return float(reward), terminated, truncated, int(lives), ended and not continues

    def _replay(self, state: dict[str, Any]) -> None:
        actions_of = np.split(state["action"], np.cumsum(state["length"])[:-1])
        for stream, (game, actions, frame) in enumerate(zip(state["game"], actions_of, state["frame"], strict=True)):
            self._games[stream] = int(game)
            if frame == BROKEN or not self._play_again(stream, actions, int(frame)):
                self.restarted[stream] = frame != BROKEN
                self._games[stream] = int(game) + 1
                self._start_game(stream)

    def _play_again(self, stream: int, actions: np.ndarray, frame: int) -> bool:
        """Take the actions of the running game; returns whether they led to the frame with that CRC-32."""
        env, game = self._envs[stream].unwrapped, self._games[stream]
        try:
            self._start_game(stream)
            for i, action in enumerate(actions):
                if isinstance(env, Atari):
                    env.drawing = i == len(actions) - 1
                self._step_one(stream, action)
                if self._games[stream] != game:
                    return False
        except EnvironmentFault:  # these actions did no harm when they were taken first
            return False
        finally:
            if isinstance(env, Atari):
                env.drawing = True
        return self._checksum(stream) == frame


def check_count(name: str, state: dict[str, Any], count: int) -> None:
    """Raise ArtifactError unless a state is that of `count` streams of the environment `name`."""
    if (saved := len(state["game"])) != count:
        raise ArtifactError(
            f"{name}: {saved} environments were saved side by side, but the settings ask for {count};"
            f" use: --set environment.count={saved}"
        )


def without_long_games(state: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return a state in which the games of more than `longest` actions are given up: their streams start new ones."""
    return state | {"frame": np.where(state["length"] > longest, BROKEN, state["frame"])}


def state_of(state: dict[str, Any], streams: slice) -> dict[str, Any]:
    """Return the state of some consecutive streams."""
    ends = np.append(0, np.cumsum(state["length"]))
    start, stop, _ = streams.indices(len(state["length"]))
    some = {name: state[name][streams] for name in ("game", "length", "frame")}
    return {"seed": state["seed"], **some, "action": state["action"][ends[start] : ends[stop]]}


def join_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all streams of some states, which have one seed, in that order."""
    names = ("game", "length", "action", "frame")
    return {"seed": states[0]["seed"]} | {name: np.concatenate([each[name] for each in states]) for name in names}
