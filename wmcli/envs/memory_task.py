"""Memory tasks: the first phase of an episode shows facts that its second phase needs.

S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064) compares the memory of world models with them. An episode is determined
by its seed and has C + Q frames: a scripted policy shows all of it in C frames of context and returns to it in Q frames
of query. For other policies the task is an ordinary environment with a time limit of C + Q frames. The action in the
last frame ends the episode and has no other effect.

Frames are stored as *compact states* of a few bytes, from which they are drawn.

Axes: E parallel episodes, N frames, H height, W width, S bytes of a compact state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np


class EpisodeBatch(ABC):
    """E episodes of one task side by side, each deterministic once it has begun."""

    @abstractmethod
    def compact_state(self) -> np.ndarray:
        """The current frames as uint8 (E, S): a new array."""

    @abstractmethod
    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take the actions (E,) of 0 .. A-1. Returns rewards float32 (E,) and bool (E,): the frame in which the action
        was taken was the episode's last. An episode that is over stands still and earns nothing."""

    @abstractmethod
    def script(self) -> np.ndarray:
        """Return the actions of the scripted policy from the first frame on, int32 (E, C + Q).

        The last one is that of the last frame, where it has no effect.
        """

    # What people see of an episode, and no agent: see top_view.py.

    cells: tuple[int, int]
    """Rows and columns of the boards."""

    @abstractmethod
    def board(self) -> np.ndarray:
        """Draw the boards from above, without the agents: uint8 (E, height, width, 3)."""

    @abstractmethod
    def position(self) -> np.ndarray:
        """Return where the agents are, float (E, 2): cells (x, y), y to the south, from the board's corner."""


class Task(ABC):
    """A memory task. Its subclasses are frozen dataclasses with the sizes of its variants."""

    meanings: ClassVar[tuple[str, ...]]
    """The name of each action."""
    padding: ClassVar[int | None] = None
    """Action with which the script fills a phase up, if any. Measures skip the frames after it."""

    @property
    @abstractmethod
    def about(self) -> str:
        """One line for people."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Frames that show the episode, C."""

    @property
    @abstractmethod
    def query(self) -> int:
        """Frames that come back to it, Q."""

    @property
    @abstractmethod
    def side(self) -> int:
        """Height and width of a frame (pixels)."""

    @abstractmethod
    def begin(self, seeds: np.ndarray) -> EpisodeBatch:
        """The episodes of these seeds, int64 (E,), at their first frames. A seed always makes the same episode,
        whichever stand beside it."""

    @abstractmethod
    def draw(self, compact_states: np.ndarray) -> np.ndarray:
        """Return the frames (..., H, W, 3) uint8 of compact states (..., S) uint8."""


class MemoryEnv(gymnasium.Env[np.ndarray, int]):
    """A task as a gymnasium environment: frames (H, W, 3) uint8, actions 0 .. A-1.

    The seed of an episode is the first number that the environment's generator draws after `reset`.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, task: Task) -> None:
        self.task = task
        self.observation_space = gymnasium.spaces.Box(0, 255, (task.side, task.side, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(task.meanings))  # type: ignore[assignment]
        self._episode: EpisodeBatch | None = None

    def get_action_meanings(self) -> list[str]:
        """The name of each action."""
        return list(self.task.meanings)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """A new episode."""
        super().reset(seed=seed)
        self._episode = self.task.begin(self.np_random.integers(2**31, size=1))
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """One action; terminated when it was taken in the task's last frame."""
        assert self._episode is not None, "reset before the first step"
        reward, over = self._episode.step(np.array([action]))
        return self._frame(), float(reward[0]), bool(over[0]), False, {}

    def _frame(self) -> np.ndarray:
        assert self._episode is not None
        return self.task.draw(self._episode.compact_state())[0]


class Played(NamedTuple):
    """Whole episodes of T = C + Q frames each, played by the script."""

    compact_states: np.ndarray
    """uint8 (E, T, S)."""
    action: np.ndarray
    """int32 (E, T), taken in each frame."""
    reward: np.ndarray
    """float32 (E, T), of each action."""
    over: np.ndarray
    """bool (E, T): the action was taken in the task's last frame."""


def play(task: Task, seeds: np.ndarray) -> Played:
    """The episodes of these seeds, int64 (E,), as the task's script plays them."""
    episodes = task.begin(seeds)
    action = episodes.script()
    frames, reward, over = [], [], []
    for column in action.T:
        frames.append(episodes.compact_state())
        earned, ended = episodes.step(column)
        reward.append(earned)
        over.append(ended)
    return Played(np.stack(frames, 1), action, np.stack(reward, 1), np.stack(over, 1))
