"""Streams in processes of their own, for environments that take longer to step than a message takes to send, and for
those that crash or hang.

Each process holds consecutive streams. Requests and small results go through a pipe, observations through shared
memory. There a process also notes which stream it plays and since when, so that its end can be told, and a step that
takes too long. The processes hear of signals only from this one, do not outlive it, and import no torch.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from wmcli.envs.settings import EnvironmentSettings
from wmcli.envs.vector import BROKEN, Streams, Transition, check_count, join_states, state_of
from wmcli.errors import EnvironmentFault
from wmcli.interrupt import ASKING, ENDING
from wmcli.spaces import ActionSpace, Spaces, draw_actions, map_parts, parts_of

PATIENCE = 2.0  # seconds that a process is given to close its environments
ALIGNMENT = 64  # bytes, of each part in shared memory; the first ones hold a process's note
SEED_CHECK_STEPS = 32
SEED_CHECK_SECONDS = 1.0  # a slow environment is given fewer steps
MAIN = "from wmcli.envs.processes import serve; serve({}, {})"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of NumPy


def open_streams(
    settings: EnvironmentSettings,
    *,
    train: bool,
    seed: int,
    state: dict[str, Any] | None = None,
    numbers: Sequence[int] | None = None,
) -> AnyStreams:
    """Open parallel environments, in processes of their own if `settings.processes` or `step_seconds` is not 0.

    Args:
        settings: Of the environments.
        train: Play by the training rules of an Atari protocol, else by its test rules.
        seed: See `Streams`.
        state: Of streams to go on with, from whatever processes.
        numbers: See `Streams`.

    Raises:
        WmError: See `Streams`.
    """
    kind = ProcessStreams if settings.processes or settings.step_seconds else Streams
    return kind(settings, train=train, seed=seed, state=state, numbers=numbers)


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
    """The same as `Streams`, in `settings.processes` processes, at least one and at most one for each environment.

    A process that ends is an EnvironmentFault, and so is a step or a reset that takes longer than
    `settings.step_seconds`: its process is ended. Where that happens while a game is played again, the streams of the
    process start their next games and are `restarted`. For the arguments and attributes see `Streams`.
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
        numbers = range(settings.count) if numbers is None else numbers
        if state is not None:
            check_count(settings.id, state, len(numbers))
        self.seed = seed
        shares = np.array_split(np.arange(len(numbers)), min(settings.processes or 1, len(numbers)))
        self._shares = [slice(int(share[0]), int(share[-1]) + 1) for share in shares]
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._workers)  # at the latest when this process ends
        self._moved: list[np.ndarray] = []  # after a fault: the games of each process up to the faulty one

        def start(share: slice, state: dict[str, Any] | None) -> _Worker:
            worker = _Worker(settings, numbers[share])
            worker.send((settings, train, seed, state, numbers[share]))
            return worker

        for share in self._shares:
            self._workers.append(start(share, None if state is None else state_of(state, share)))
        try:
            opened = [worker.receive() for worker in self._workers]
            for index, share in enumerate(self._shares):
                if state is not None and self._workers[index].ended:
                    worker, of_share = self._workers[index], state_of(state, share)
                    broken = _broken(seed, worker.moved(of_share["game"]), of_share["action"][:0])
                    worker.let_go()
                    worker.end(PATIENCE)
                    self._workers[index] = start(share, broken)
                    opened[index] = self._workers[index].receive()
                    if opened[index].error is None:
                        opened[index].result[2][:] = of_share["frame"] != BROKEN
            self._check(opened)
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
        space = self.spaces.action
        return _broken(self.seed, np.concatenate(game), np.zeros((0, *space.shape), space.dtype))

    def close(self) -> None:
        """Close every environment and end the processes."""
        self._end()

    def _receive(self) -> list[_Reply]:
        """Return the reply of each process. Raise the first error of an environment, in the order of the streams."""
        replies = [worker.receive() for worker in self._workers]
        self._check(replies)
        return replies

    def _check(self, replies: Sequence[_Reply]) -> None:
        """Raise the first error in some replies."""
        for index, reply in enumerate(replies):
            if reply.error is not None:
                moved = [each.standing.game for each in replies[: index + 1] if each.standing is not None]
                if self._workers[index].ended and hasattr(self, "_standing"):
                    moved.append(self._workers[index].moved(self._standing[index].game))
                self._moved = moved
                raise reply.error

    def _show(self, replies: list[_Reply]) -> None:
        """Copy what the processes show."""
        self._standing = [reply.standing for reply in replies if reply.standing is not None]
        self.first = np.concatenate([standing.first for standing in self._standing])
        self.observation = map_parts(lambda *parts: np.concatenate(parts), *self._views)


AnyStreams = Streams | ProcessStreams


class _Note:
    """What a process is doing, in memory that it shares with the one that waits for it."""

    def __init__(self, memory: int) -> None:
        os.ftruncate(memory, max(os.fstat(memory).st_size, ALIGNMENT))
        self._values = np.ndarray(4, np.float64, mmap.mmap(memory, ALIGNMENT))

    @contextmanager
    def of(self, stream: int, game: int, step: int) -> Iterator[None]:
        """Note a step, counted from 1 in its game, or the reset before it, 0, for the length of a block."""
        self._values[1:] = stream, game, step
        self._values[0] = time.monotonic()
        try:
            yield
        finally:
            self._values[0] = 0

    @property
    def began(self) -> float:
        """When the step or reset began, 0 between two of them."""
        return float(self._values[0])

    def read(self) -> tuple[int, int, int] | None:
        """Return stream, game and step, None between two of them."""
        stream, game, step = (int(value) for value in self._values[1:])
        return (stream, game, step) if self.began else None


class _Worker:
    """A process with the streams `numbers`, and the ends of its pipes on this side."""

    def __init__(self, settings: EnvironmentSettings, numbers: Sequence[int]) -> None:
        self._name, self._seconds = settings.id, settings.step_seconds
        self._numbers = numbers
        self.ended = False
        """Whether `receive` has found that the process is no more."""
        self._memory = _anonymous_file()
        self._note = _Note(self._memory)
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
        """Wait for the reply, and end the process if a step of it takes too long."""
        try:
            while self._seconds:
                began = self._note.began
                left = began + self._seconds - time.monotonic() if began else self._seconds
                if self._line.poll(max(left, 0.0)):
                    break
                if left <= 0:
                    os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it started
                    return self._death(f"took longer than environment.step_seconds = {self._seconds:g}")
            return self._line.recv()
        except (EOFError, OSError):
            return self._death()

    def moved(self, games: np.ndarray) -> np.ndarray:
        """Return the numbers of the games when the process ended, of those when it was heard of last."""
        games = games.copy()
        if (doing := self._note.read()) is not None:
            games[list(self._numbers).index(doing[0])] = doing[1]
        return games

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

    def _death(self, why: str = "") -> _Reply:
        self.ended = True
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            how = "closed its pipe"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        doing = self._note.read()
        if doing is None:
            which = " to ".join(str(number) for number in dict.fromkeys((self._numbers[0], self._numbers[-1])))
            what = f"the process of environment {which} {how}"
        else:
            stream, _, step = doing
            what = f"step {step} of a game in" if step else "reset() of"
            what = f"{what} environment {stream} {why or f'did not end: its process {how}'}"
        return _Reply(None, None, EnvironmentFault(f"{self._name}: {what}. Run the same command again to go on."))


def _broken(seed: int, games: np.ndarray, no_actions: np.ndarray) -> dict[str, Any]:
    """Return the state of streams that start the games behind those of the numbers `games` (n,)."""
    count = len(games)
    return {
        "seed": seed,
        "game": games,
        "length": np.zeros(count, np.int64),
        "action": no_actions,
        "frame": np.full(count, BROKEN, np.int64),
    }


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
    starts, size = {}, ALIGNMENT
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


def follows_seed(settings: EnvironmentSettings, space: ActionSpace) -> bool:
    """Return whether the environment shows the same twice under the same seeds and the same few random actions.

    A fault counts as following its seed: whoever plays the environment will meet it.
    """
    choices = draw_actions(space, (SEED_CHECK_STEPS, 1), np.random.default_rng(0))
    try:
        once = _shown(settings, choices, SEED_CHECK_SECONDS)
        return _shown(settings, choices[: len(once) - 1], math.inf) == once
    except EnvironmentFault:
        return True


def _shown(settings: EnvironmentSettings, actions: np.ndarray, seconds: float) -> list[list[bytes]]:
    """Return all that one stream shows at its beginning and after each action (T, 1, ...), for so long at most."""
    until = time.monotonic() + seconds
    streams = open_streams(settings.model_copy(update={"count": 1}), train=True, seed=0)
    shown = [[part.tobytes() for part in parts_of(streams.observation).values()]]
    for action in actions:
        after = streams.step(action)
        shown.append([column.tobytes() for column in (*parts_of(streams.observation).values(), *after[:-1])])
        if time.monotonic() > until:
            break
    streams.close()
    return shown


# -- in the other process ---------------------------------------------------------------------------------------------


def serve(handle: int, memory: int) -> None:
    """Hold the streams that are asked for over the connection `handle`, and step them until it closes.

    A request is what to open first, then an action (n, ...), or None for the state.
    """
    for number in (*ENDING, *ASKING):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which processes that an environment starts would inherit
    threading.Thread(target=_follow_parent, daemon=True).start()
    line = Connection(handle)
    note = _Note(memory)
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
                    streams = _Noted(note, settings, train=train, seed=seed, state=state, numbers=numbers)
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


class _Noted(Streams):
    """Streams that note what they do."""

    def __init__(self, note: _Note, *given: Any, **options: Any) -> None:
        self._note = note
        super().__init__(*given, **options)

    def _start_game(self, stream: int) -> None:
        with self._note.of(self._numbers[stream], self._games[stream], 0):
            super()._start_game(stream)

    def _step_one(self, stream: int, action: np.ndarray) -> tuple[float, bool, bool, int, bool]:
        with self._note.of(self._numbers[stream], self._games[stream], len(self._played[stream]) + 1):
            return super()._step_one(stream, action)


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
