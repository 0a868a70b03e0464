"""Calls of environments: their output goes to stderr, and any error becomes an `EnvironmentFault`.

An environment shares its process with wm. So what it changes there is put back behind every call: the handlers of
signals, which end in a checkpoint, torch's threads, on which results depend, and the working directory, which it has
again in its next call. A process that it forked ends where it would come back into wm's code.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces as gym

from wmcli.errors import EnvironmentFault, WmError
from wmcli.interrupt import ASKING, ENDING

T = TypeVar("T")

LARGEST = float(np.finfo(np.float32).max)  # rewards and vectors are stored as float32
REMEDY = "Fix the environment, then run the same command again."
_folder = ""  # the working directory of environments, where one changed it


def run(where: Callable[[], str], function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function`, which is an environment's own; stdout is stderr meanwhile, since stdout carries only results.

    Args:
        where: Describes the call. Called only if something goes wrong.

    Raises:
        EnvironmentFault: The function raised anything but KeyboardInterrupt or an error of wm, `sys.exit()` and
            `os._exit()` included.
    """
    with _kept(where):
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, WmError):
            raise
        except BaseException as error:
            raise EnvironmentFault(f"{where()} {_raised(error)} {REMEDY}") from error


@contextmanager
def _kept(where: Callable[[], str]) -> Iterator[None]:
    """Keep wm's process as it is for the length of a block in which an environment has its way."""
    global _folder
    process, thread, folder = os.getpid(), threading.get_ident(), _working_directory()
    leave, stdout, torch = os._exit, sys.stdout, sys.modules.get("torch")
    is_main = threading.current_thread() is threading.main_thread()  # no other can set handlers
    handlers = [(number, signal.getsignal(number)) for number in (*ENDING, *ASKING) if is_main]
    threads = torch.get_num_threads() if torch is not None else 0

    def exit_here(code: int) -> None:
        if (os.getpid(), threading.get_ident()) != (process, thread):  # a child of its own, or wm's stop of a hung call
            leave(code)
        raise SystemExit(code)  # or wm would end in silence, and with the code of success for 0

    sys.stdout, os._exit = sys.stderr, exit_here  # type: ignore[assignment]
    if _folder:
        with suppress(OSError):  # it was removed
            os.chdir(_folder)
    try:
        yield
    finally:
        if os.getpid() != process:  # a second wm in one run would be the end of it
            os.write(2, f"{where()} came back in a process that it forked, which was ended.\n".encode())
            leave(1)
        sys.stdout, os._exit = stdout, leave
        for number, handler in handlers:
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        theirs = _working_directory()
        _folder = "" if theirs == folder else theirs
        if _folder and folder:
            os.chdir(folder)
        if torch is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _working_directory() -> str:
    with suppress(OSError):  # it was removed
        return os.getcwd()  # noqa: PTH109 (at every step)
    return ""


class Checked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Holds an environment to gymnasium's contract, so that nothing else reaches whoever plays it.

    `reset` returns an observation as its space promises it, and a dict. `step` returns such an observation, a finite
    float, two bools and a dict; rewards and flags may come as arrays of one element. Numbers of an observation are
    finite and fit float32; whether they are within their bounds is not checked. Spaces stay as they were at first.
    Anything else is an EnvironmentFault that names the environment, the step since the last reset, the action, and the
    `number` of the environment where it is one of several.
    """

    def __init__(self, env: gymnasium.Env, name: str, number: int | None = None) -> None:
        super().__init__(env)
        self.spaces = getattr(env, "spaces", None)
        """Of an environment that has wm's own form already."""
        self._name = name
        self._which = "" if number is None else f" in environment {number}"
        self._call = "reset()"  # the one in progress, for messages
        self._steps = 0  # since the last reset
        self._action: Any = None

    @cached_property
    def observation_space(self) -> gymnasium.Space:  # type: ignore[override]
        """Of the environment when it was first asked."""
        return self.env.observation_space

    @cached_property
    def action_space(self) -> gymnasium.Space:  # type: ignore[override]
        """Of the environment when it was first asked."""
        return self.env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Return the first observation and info."""
        self._call = "reset()" if seed is None else f"reset(seed={seed})"
        self._steps = 0
        result = run(self._where, self.env.reset, seed=seed, options=options)
        observation, info = self._values(result, "(observation, info)", 2)
        return self._observation(self.observation_space, observation), self._info(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Return observation, reward, terminated, truncated and info."""
        self._call = "step()"
        self._steps += 1
        self._action = action
        result, actions = run(self._where, lambda: (self.env.step(action), self.env.action_space))
        if actions is not self.action_space and actions != self.action_space:
            raise self._fault(f"changed the action space from {self.action_space} to {actions}")
        values = self._values(result, "(observation, reward, terminated, truncated, info)", 5)
        observation, reward, terminated, truncated, info = values
        return (
            self._observation(self.observation_space, observation),
            self._reward(reward),
            self._flag("terminated", terminated),
            self._flag("truncated", truncated),
            self._info(info),
        )

    def close(self) -> None:
        """Close the environment and ignore its errors."""
        try:
            run(self._where, self.env.close)
        except EnvironmentFault:
            return

    def _where(self) -> str:
        if self._call != "step()":
            return f"{self._name}: {self._call}{self._which}"
        return f"{self._name}: step {self._steps} after reset, action {self._action}: step(){self._which}"

    def _fault(self, fault: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._where()} {fault}. {REMEDY}")

    def _values(self, result: Any, expected: str, count: int) -> Any:
        if isinstance(result, tuple | list) and len(result) == count:
            return result
        returned = f"{len(result)} values" if isinstance(result, tuple | list) else f"one {type(result).__name__}"
        raise self._fault(f"returned {returned}; it must return {expected}")

    def _observation(self, space: gymnasium.Space, value: Any, name: str = "") -> Any:
        """Check a value of a space, or of a part of it called `name`, and return it."""
        if isinstance(space, gym.Dict):
            missing = [key for key in space.spaces if not isinstance(value, Mapping) or key not in value]
            if missing:
                raise self._fault(f"returned an observation{name} without {', '.join(map(str, missing))}")
            return {key: self._observation(each, value[key], f"{name} {key}") for key, each in space.spaces.items()}
        if isinstance(space, gym.Tuple):
            if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
                raise self._fault(f"returned an observation{name} that is no tuple of {len(space.spaces)}")
            return tuple(
                self._observation(each, value[index], f"{name} {index}") for index, each in enumerate(space.spaces)
            )
        if isinstance(space, gym.Box) and space.dtype == np.uint8:
            if isinstance(value, np.ndarray) and value.shape == space.shape and value.dtype == np.uint8:
                return value
        elif isinstance(space, gym.Box):
            if (array := _array(value, space.shape, "biuf")) is not None:
                if not (np.abs(array) <= LARGEST).all():  # NaN is not <= anything
                    raise self._fault(f"returned an observation{name} with a number that is not finite (float32)")
                return array
        elif isinstance(space, gym.Discrete | gym.MultiDiscrete | gym.MultiBinary):
            if (array := _array(value, space.shape or (), "biu")) is not None:
                low: Any = 0 if isinstance(space, gym.MultiBinary) else space.start
                count: Any = 2 if isinstance(space, gym.MultiBinary) else getattr(space, "nvec", getattr(space, "n", 0))
                if (array < low).any() or (array >= low + count).any():
                    raise self._fault(f"returned an observation{name} with {_shown(value)}, which is not in {space}")
                return array
        else:
            return value  # no part that wm takes
        kind = getattr(value, "dtype", type(value).__name__)
        shape = getattr(value, "shape", "")
        raise self._fault(
            f"returned an observation{name} that is {kind} {shape}; its observation space is {space.dtype}"
            f" {space.shape}"
        )

    def _reward(self, reward: Any) -> float:
        value = reward if type(reward) is float else _number(reward)
        if value is None or not abs(value) <= LARGEST:  # NaN is not <= anything
            raise self._fault(f"returned the reward {_shown(reward)}; it must be one finite number (float32)")
        return value

    def _flag(self, name: str, value: Any) -> bool:
        if type(value) is bool:
            return value
        array = np.asarray(value)
        if array.dtype != np.bool_ or array.size != 1:
            raise self._fault(f"returned {name} = {_shown(value)}; it must be True or False")
        return bool(array.item())

    def _info(self, info: Any) -> dict:
        if not isinstance(info, dict):
            raise self._fault(f"returned info = {_shown(info)}; it must be a dict")
        return info


def _array(value: Any, shape: tuple[int, ...], kinds: str) -> np.ndarray | None:
    """Return a value as an array of a shape, None if it is not one of numbers of these kinds."""
    try:
        array = np.asarray(value)
    except Exception:  # a ragged list, or an object of the user's
        return None
    return array if array.shape == shape and array.dtype.kind in kinds else None


def one_line(text: object) -> str:
    """Return the text of an exception or a value on one line of at most 300 characters."""
    return " ".join(str(text).split())[:300]


def nearest(word: str, names: list[str]) -> str | None:
    """Return the name that a mistyped word may have meant."""
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.7)), None)


def _raised(error: BaseException) -> str:
    """Describe an exception: its type, its text, and where it was raised."""
    text = one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    frame = [each for each in frames if each.filename != __file__ or each is frames[0]][-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    fault = f"raised {type(error).__name__}{f': {text}' if text else ''} ({place})."
    if isinstance(error, ValueError) and "values to unpack" in text:  # raised by a wrapper of gymnasium
        fault += (
            " reset() must return (observation, info) and step() (observation, reward, terminated, truncated, info);"
            " environments for the older gym return fewer."
        )
    return fault


def _number(reward: Any) -> float | None:
    """Return a reward as a float, None if it is not one number."""
    try:
        array = np.asarray(reward)
        return float(array.item()) if array.dtype.kind in "biufO" else None
    except Exception:  # an array of several numbers, None, a tensor with a gradient, or an object of the user's
        return None


def _shown(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
