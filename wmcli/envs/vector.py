"""Environments stepped side by side, whose state can be saved and restored exactly.

E environments side by side (streams), H height, W width, C colour channel.

A *game* runs from one real reset to the next, an *episode* to the next end that the learner sees. They differ where a
lost life ends an episode but not its game. Every game is reset with a seed of its own, derived from (seed, stream,
number of the game), and what follows depends on the actions alone. So the state of a stream is the number of its game
and the actions taken since its reset; restoring plays them again.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

from wmcli.envs.atari import CONTINUES, Atari
from wmcli.envs.environment import make
from wmcli.envs.settings import EnvironmentSettings
from wmcli.errors import ArtifactError

NO_LIVES = -1  # `lives` of an environment that does not tell


class Transition(NamedTuple):
    """What one step brought, for each of the E environments."""

    reward: np.ndarray  # float32 (E,), as the environment gives it
    terminated: np.ndarray  # bool (E,)
    truncated: np.ndarray  # bool (E,)
    lives: np.ndarray  # int16 (E,), left after the step, before any reset; -1 where the environment does not tell
    game_over: np.ndarray  # bool (E,): the game ended, not only a life
    final: dict[int, np.ndarray]  # by environment, of those whose episode ended: the frame that its last action led to


class Streams:
    """`settings.count` environments side by side. An environment that ends an episode is reset within the same step.

    `observation` (E, H, W, C) uint8: the current frames, a new array after every step.
    `first` (E,) bool: the current frame opens an episode.
    `state` is what another Streams gave as its `state()`; without it every stream stands at the start of its game 0.
    """

    def __init__(
        self, settings: EnvironmentSettings, *, train: bool, seed: int, state: dict[str, Any] | None = None
    ) -> None:
        self.seed = seed
        self.observation = np.zeros((settings.count, settings.size, settings.size, 3), np.uint8)
        self.first = np.ones(settings.count, bool)
        self._id = settings.id
        self._envs = [make(settings, train=train) for _ in range(settings.count)]
        self._games = [0] * settings.count  # number of the running game
        self._played: list[list[int]] = [[] for _ in self._envs]  # actions since its reset
        self._final: dict[int, np.ndarray] = {}
        if state is None:
            for stream in range(settings.count):
                self._start_game(stream)
        else:
            self._replay(state)

    @classmethod
    def restore(cls, settings: EnvironmentSettings, train: bool, state: dict[str, Any]) -> Streams:
        """The streams that gave `state`, to the bit. Time: that of playing the running games again.

        Raises ArtifactError when the number of streams differs or an environment does not come to the same frame.
        """
        return cls(settings, train=train, seed=state["seed"], state=state)

    def step(self, action: np.ndarray) -> Transition:
        """Take one action in every environment. action (E,) integer. Afterwards `observation` is the next frame: the
        first one of the next episode where this one ended."""
        count = len(self._envs)
        assert action.shape == (count,), f"{action.shape} actions for {count} environments"
        self.observation = np.empty_like(self.observation)
        self.first = np.zeros(count, bool)
        reward = np.zeros(count, np.float32)
        terminated, truncated, game_over = (np.zeros(count, bool) for _ in range(3))
        lives = np.zeros(count, np.int16)
        self._final = {}
        for i in range(count):
            reward[i], terminated[i], truncated[i], lives[i], game_over[i] = self._step_one(i, int(action[i]))
        return Transition(reward, terminated, truncated, lives, game_over, self._final)

    def state(self) -> dict[str, Any]:
        """What `restore` needs: one integer and arrays. `game`, `length` (E,) int64: number and actions so far of each
        running game; `action` int32: those actions, one game after the other; `frame` (E,) int64: CRC-32 of the current
        frames, by which restoring proves itself."""
        return {
            "seed": self.seed,
            "game": np.array(self._games, np.int64),
            "length": np.array([len(played) for played in self._played], np.int64),
            "action": np.array([action for played in self._played for action in played], np.int32),
            "frame": np.array([zlib.crc32(frame.tobytes()) for frame in self.observation], np.int64),
        }

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def _start_game(self, stream: int) -> None:
        words = np.random.SeedSequence((self.seed, stream, self._games[stream])).generate_state(1)
        seed = int(words[0]) >> 1  # some environments hand it to libraries that take 31 bits
        self.observation[stream], _ = self._envs[stream].reset(seed=seed)
        self._played[stream] = []
        self.first[stream] = True

    def _step_one(self, stream: int, action: int) -> tuple[float, bool, bool, int, bool]:
        env = self._envs[stream]
        frame, reward, terminated, truncated, info = env.step(action)
        self._played[stream].append(action)
        ended = terminated or truncated
        if ended:
            self._final[stream] = np.array(frame)
        continues = ended and info.get(CONTINUES, False)
        if continues:  # this reset is a consequence of the actions, so it is not part of the state
            frame, _ = env.reset()
        self.observation[stream] = frame
        self.first[stream] = ended
        if ended and not continues:
            self._games[stream] += 1
            self._start_game(stream)
        return float(reward), terminated, truncated, info.get("lives", NO_LIVES), ended and not continues

    def _replay(self, state: dict[str, Any]) -> None:
        count = len(self._envs)
        if len(state["game"]) != count:
            raise ArtifactError(
                f"{self._id}: {len(state['game'])} environments were saved side by side, but the settings ask for "
                f"{count}; use: --set environment.count={len(state['game'])}"
            )
        stops = np.cumsum(state["length"])
        for stream in range(count):
            game = int(state["game"][stream])
            self._games[stream] = game
            self._start_game(stream)
            env, length = self._envs[stream], int(state["length"][stream])
            for i, action in enumerate(state["action"][stops[stream] - length : stops[stream]]):
                if isinstance(env, Atari):
                    env.drawing = i == length - 1
                self._step_one(stream, int(action))
            same_frame = zlib.crc32(self.observation[stream].tobytes()) == int(state["frame"][stream])
            if self._games[stream] != game or not same_frame:
                raise ArtifactError(
                    f"{self._id}: playing the saved actions again led elsewhere; the environment does not follow its "
                    f"seed, or another version of it made this experience."
                )
