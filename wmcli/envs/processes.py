"""Streams in processes of their own, for environments that take longer to step than a message takes to send.

Each process holds consecutive streams. Requests and small results go through a pipe, observations through shared
memory. The processes hear of Ctrl-C only from this one, do not outlive it, and import no torch.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from wmcli.envs.settings import EnvironmentSettings
from wmcli.envs.vector import BROKEN, Streams, Transition, check_count, join_states, state_of
from wmcli.errors import EnvironmentFault
from wmcli.spaces import Spaces, map_parts, parts_of

PATIENCE = 2.0  # seconds that a process is given to close its environments
ALIGNMENT = 64  # bytes, of each part in shared memory
MAIN = "from wmcli.envs.processes import serve; serve({}, {})"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of NumPy


def open_streams(
    settings: EnvironmentSettings, *, train: bool, seed: int, state: dict[str, Any] | None = None
) -> AnyStreams:
    """Open parallel environments, in `settings.processes` processes of their own if that is not 0.

    Args:
        settings: Of the environments.
        train: Play by the training rules of an Atari protocol, else by its test rules.
        seed: See `Streams`.
        state: Of streams to go on with, from whatever processes.

    Raises:
        WmError: See `Streams`.
    """
    kind = ProcessStreams if settings.processes else Streams
    return kind(settings, train=train, seed=seed, state=state)


class _Standing(NamedTuple):
    """Where the n streams of a process stand, beside what they show."""

    first: np.ndarray  # bool (n,)
    age: tuple[np.ndarray, np.ndarray]  # int64 (n,): within the episode, and within the game
    game: np.ndarray  # int64 (n,)


class _Reply(NamedTuple):
    """The reply of a process to a request."""

    result: Any
    standing: _Standing | None  # None where no environment is open, or the process is no more
    error: Exception | None = None


class ProcessStreams:
    """The same as `Streams`, in `settings.processes` processes, at most one for each environment.

    A process that ends is an EnvironmentFault. For the attributes see `Streams`.
    """

    def __init__(
        self, settings: EnvironmentSettings, *, train: bool, seed: int, state: dict[str, Any] | None = None
    ) -> None:
        if state is not None:
            check_count(settings.id, state, settings.count)
        self.seed = seed
        shares = np.array_split(np.arange(settings.count), min(settings.processes, settings.count))
        self._shares = [slice(int(share[0]), int(share[-1]) + 1) for share in shares]
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._workers)  # at the latest when this process ends
        self._moved: list[np.ndarray] = []  # after a fault: the games of each process up to the faulty one
        for share in self._shares:
            numbers = [*range(share.start, share.stop)]
            self._workers.append(_Worker(settings.id, numbers))
            of_share = None if state is None else state_of(state, share)
            self._workers[-1].send((settings, train, seed, of_share, numbers))
        try:
            opened = self._receive()
        except BaseException:
            self.close()
            raise
        self.spaces, self.has_time_limit = opened[0].result[:2]
        self.restarted = np.concatenate([each.result[2] for each in opened])
        self._views = [worker.shared(self.spaces) for worker in self._workers]
        self._show(opened)

    def step(self, action: np.ndarray) -> Transition:
        """Take one action (E, ...) in every environment, see `Streams.step`."""
        count = len(self.first)
        assert len(action) == count, f"{len(action)} actions for {count} environments"
        for worker, share in zip(self._workers, self._shares, strict=True):
            worker.send(action[share])
        replies = self._receive()
        self._show(replies)
        *columns, finals = zip(*(reply.result for reply in replies), strict=True)
        final = {
            share.start + stream: observation
            for share, of_share in zip(self._shares, finals, strict=True)
            for stream, observation in of_share.items()
        }
        reward, terminated, truncated, lives, game_over = (np.concatenate(column) for column in columns)
        return Transition(reward, terminated, truncated, lives, game_over, final)

    def age(self, across_ends: bool) -> np.ndarray:
        """Count the decisions since the running episode, or game, opened, see `Streams.age`."""
        return np.concatenate([standing.age[across_ends] for standing in self._standing])

    def state(self) -> dict[str, Any]:
        """Return the state for `open_streams`, the same as that of `Streams`."""
        for worker in self._workers:
            worker.send(None)
        return join_states([reply.result for reply in self._receive()])

    def broken_state(self) -> dict[str, Any]:
        """Return the state after a fault, the same as that of `Streams`.

        There the environments behind the faulty one have not taken the last step. So it does not count here.
        """
        game = [standing.game for standing in self._standing]
        game[: len(self._moved)] = self._moved
        space, count = self.spaces.action, len(self.first)
        return {
            "seed": self.seed,
            "game": np.concatenate(game),
            "length": np.zeros(count, np.int64),
            "action": np.zeros((0, *space.shape), space.dtype),
            "frame": np.full(count, BROKEN, np.int64),
        }

    def close(self) -> None:
        """Close every environment and end the processes."""
        self._end()

    def _receive(self) -> list[_Reply]:
        """Return the reply of each process. Raise the first error of an environment, in the order of the streams."""
        replies = [worker.receive() for worker in self._workers]
        for index, reply in enumerate(replies):
            if reply.error is not None:
                self._moved = [each.standing.game for each in replies[: index + 1] if each.standing is not None]
                raise reply.error
        return replies

    def _show(self, replies: list[_Reply]) -> None:
        """Copy what the processes show."""
        self._standing = [reply.standing for reply in replies if reply.standing is not None]
        self.first = np.concatenate([standing.first for standing in self._standing])
        self.observation = map_parts(lambda *parts: np.concatenate(parts), *self._views)


AnyStreams = Streams | ProcessStreams


class _Worker:
    """A process with the streams `numbers`, and the ends of its pipes on this side."""

    def __init__(self, name: str, numbers: Sequence[int]) -> None:
        self._name = name
        self._numbers = numbers
        self._memory = _anonymous_file()
        self._line, theirs = Pipe()
        with theirs:
            handles = theirs.fileno(), self._memory
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", MAIN.format(*handles)],
                env=ONE_THREAD | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # for a user's own module
                pass_fds=handles,
                stdin=subprocess.PIPE,  # which ends with this process
                stdout=2,  # stdout carries the command's results only
                start_new_session=True,  # Ctrl-C goes to a whole process group
            )

    def send(self, request: Any) -> None:
        """Send a request. If the process has ended, `receive` tells."""
        with suppress(OSError):
            self._line.send(request)

    def receive(self) -> _Reply:
        """Wait for the reply."""
        try:
            return self._line.recv()
        except (EOFError, OSError):
            return _Reply(None, None, self._death())

    def shared(self, spaces: Spaces) -> Any:
        """Return the observations (n, *part) in shared memory, once the process has opened its environments."""
        return _views(spaces, len(self._numbers), self._memory)

    def let_go(self) -> None:
        """Let the process close its environments and end."""
        self._line.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, seconds: float) -> None:
        """Wait for the process to end, for so long."""
        try:
            self._process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._memory)

    def _death(self) -> EnvironmentFault:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            how = "closed its pipe"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        which = " to ".join(str(number) for number in dict.fromkeys((self._numbers[0], self._numbers[-1])))
        return EnvironmentFault(
            f"{self._name}: the process of environment {which} {how}. Run the same command again to go on."
        )


def _end(workers: list[_Worker]) -> None:
    """End processes, all at the same time."""
    for worker in workers:
        worker.let_go()
    until = time.monotonic() + PATIENCE
    for worker in workers:
        worker.end(until - time.monotonic())


def _anonymous_file() -> int:
    """Return the handle of a new file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("wm")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _views(spaces: Spaces, count: int, handle: int) -> Any:
    """Return the observations (n, *part) of n streams as arrays in a file, which is made large enough."""
    starts, size = {}, 0
    for name, part in parts_of(spaces.observation).items():
        starts[name] = size
        size += -(-count * math.prod(part.shape) * np.dtype(part.dtype).itemsize // ALIGNMENT) * ALIGNMENT
    os.ftruncate(handle, size)
    memory = mmap.mmap(handle, size)
    arrays = {
        name: np.ndarray((count, *part.shape), part.dtype, memory, starts[name])
        for name, part in parts_of(spaces.observation).items()
    }
    return arrays if isinstance(spaces.observation, dict) else next(iter(arrays.values()))


# -- in the other process ---------------------------------------------------------------------------------------------


def serve(handle: int, memory: int) -> None:
    """Hold the streams that are asked for over the connection `handle`, and step them until it closes.

    A request is what to open first, then an action (n, ...), or None for the state.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which processes that an environment starts would inherit
    threading.Thread(target=_follow_parent, daemon=True).start()
    line = Connection(handle)
    streams: Streams | None = None
    views: Any = None
    try:
        while True:
            request = line.recv()
            error: Exception | None = None
            result: Any = None
            try:
                if streams is None:
                    settings, train, seed, state, numbers = request
                    streams = Streams(settings, train=train, seed=seed, state=state, numbers=numbers)
                    views = _views(streams.spaces, len(numbers), memory)
                    result = streams.spaces, streams.has_time_limit, streams.restarted
                else:
                    result = streams.state() if request is None else streams.step(request)
                _copy(streams.observation, views)
            except Exception as raised:
                error = portable(raised, "of environments")
            line.send(_Reply(result, None if streams is None else _standing(streams), error))
    except (EOFError, OSError):
        if streams is not None:
            streams.close()


def _standing(streams: Streams) -> _Standing:
    return _Standing(streams.first, (streams.age(False), streams.age(True)), streams.games())


def _copy(observation: Any, views: Any) -> None:
    for part, view in zip(parts_of(observation).values(), parts_of(views).values(), strict=True):
        view[...] = part


def _follow_parent() -> None:
    """Exit when the process that started this one ends, even amid a step."""
    while os.read(0, 1):
        pass
    time.sleep(PATIENCE)
    os._exit(0)


def portable(error: Exception, whose: str) -> Exception:
    """Return an exception to send to another process, or its text if it cannot be pickled, with its traceback.

    `whose`: names the process in a note.
    """
    where = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In the process {whose}:\n{where}")
    return error
