"""Playing environments apart on the machines of a Ray cluster, each as a task.

A task reads the controller and the experience before from the run, which all machines must see under the same path. It
writes nothing there: what it has played comes back to the process that publishes. Ray repeats a task whose machine is
lost on another one, and the same comes out. A worker process keeps the controller from one task to the next.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import wmcli
from wmcli.artifacts import Artifact, Run, open_artifact
from wmcli.envs.processes import ONE_THREAD, portable
from wmcli.errors import MachineError, Stopped, UsageError
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.settings import Settings
from wmcli.stages.apart import THREADS, PlayedApart, play_one, stream_folder
from wmcli.stages.context import Context
from wmcli.stages.player import Player, load_play
from wmcli.training.checkpoint import CHECKPOINT

POLL_SECONDS = 0.2  # interval of the checks for signals while waiting
CONNECT_SECONDS = 10.0
RETRIES = 3  # of a task whose machine or process is lost


class _Task(NamedTuple):
    """What the tasks of a segment have in common."""

    version: str  # of wm
    run: Path
    preset: str
    settings: Settings
    before: tuple[Path, str] | None  # path and digest
    actor: tuple[Path, str] | None
    rounds: int


class _Reply(NamedTuple):
    """What a task returns: what it played, or an error and the checkpoint before it, by the names of its files."""

    played: PlayedApart | None
    error: Exception | None
    files: dict[str, bytes]


def play_on_ray(
    context: Context, folder: Path, before: Artifact | None, actor: Artifact | None, rounds: int, streams: Sequence[int]
) -> Generator[tuple[int, PlayedApart]]:
    """Play environments on a cluster. Yield the number and the rows of each when it has been played.

    For the arguments see `play_apart`.

    Raises:
        EnvironmentFault: An environment failed. The same call goes on, with new games of that one.
        Stopped: A signal arrived.
        UsageError: Ray is not installed.
        MachineError: There is no such cluster, a machine does not see the run, or tasks were lost repeatedly.
    """
    machine = context.machine
    training = {"device": machine.device.type, "kernels": machine.kernels, "threads": THREADS}
    changed = {"training": context.settings.training.model_copy(update=training)}
    task = _Task(
        wmcli.__version__,
        context.run.path.absolute(),
        context.preset,
        context.settings.model_copy(update=changed),
        _place(before),
        _place(actor),
        rounds,
    )
    packed = pickle.dumps(task)
    with _cluster() as ray:
        on_gpu = machine.device.type == "cuda"
        if on_gpu and not ray.cluster_resources().get("GPU"):
            context.progress.warn("collect: the Ray cluster has no GPU: waiting for one")
        variables = ONE_THREAD | {"PYTHONPATH": os.pathsep.join(sys.path)}  # an environment may be a user's module
        remote = ray.remote(_play).options(
            num_cpus=1, num_gpus=int(on_gpu), max_retries=RETRIES, runtime_env={"env_vars": variables}
        )

        def start(stream: int) -> Any:
            own = stream_folder(folder, stream)
            load_play(own)  # a damaged file is named here, where it lies
            return remote.remote(packed, stream, _checkpoint(own) if own.is_dir() else {})

        running = {start(stream): stream for stream in streams}
        done = 0
        try:
            with stop_requests() as stop, context.progress.bar("collect on Ray", len(streams), "environments") as bar:
                while running:
                    ready, _ = ray.wait([*running], num_returns=1, timeout=POLL_SECONDS)
                    for reference in ready:
                        stream = running.pop(reference)
                        reply = _result(ray, reference, stream)
                        if reply.played is not None:
                            done += 1
                            bar.advance()
                            yield stream, reply.played
                            continue
                        _keep(stream_folder(folder, stream), reply.files)
                        assert reply.error is not None
                        if not isinstance(reply.error, Stopped):
                            raise reply.error
                        running[start(stream)] = stream  # its machine is going away
                    if stop and running:
                        raise Stopped(
                            f"collect stopped after {done} of {len(streams)} environments; the same command plays the"
                            " others."
                        )
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _place(artifact: Artifact | None) -> tuple[Path, str] | None:
    """Return the path of an artifact, and what identifies it there."""
    return None if artifact is None else (artifact.path.absolute(), artifact.digest)


@contextmanager
def _cluster() -> Iterator[Any]:
    """Connect to the cluster of RAY_ADDRESS, or start one on this machine, and yield the package.

    What Ray says goes to stderr meanwhile: it prints the loss of a machine whatever its settings of logging.

    Raises:
        UsageError: Ray is not installed.
        MachineError: There is no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("collect.on = 'ray' needs the package ray: pip install 'wmcli[ray]'") from error
    with redirect_stdout(sys.stderr):
        is_ours = not ray.is_initialized()
        if is_ours:
            _connect(ray)
        try:
            yield ray
        finally:
            if is_ours:
                with _own_signals():
                    ray.shutdown()


def _connect(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        with _own_signals():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"no Ray cluster at {address}" if address else "Ray does not start here"
        raise MachineError(f"{where}: {_one_line(error)}; give its address: --address HOST:PORT") from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of signals, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _result(ray: Any, reference: Any, stream: int) -> _Reply:
    """Return what a task returned. Raises MachineError if it returned nothing."""
    try:
        reply: _Reply = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise MachineError(
            f"Ray did not play environment {stream}: {type(error).__name__}: {_one_line(error)} Those that have been"
            " played are kept: run the same command again to go on."
        ) from error
    return reply


def _checkpoint(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint by their names, last the one that counts the others."""
    files = [file for file in folder.iterdir() if file.suffix != ".partial"]
    return {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name == CHECKPOINT)}


def _keep(folder: Path, files: dict[str, bytes]) -> None:
    """Put the files of a checkpoint into a folder, each atomically."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        partial = folder / f"{name}.partial"
        partial.write_bytes(content)
        partial.replace(folder / name)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


# -- on the other machines --------------------------------------------------------------------------------------------


def _play(packed: bytes, stream: int, files: dict[str, bytes]) -> _Reply:
    """Play one environment, from the checkpoint in some files on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _keep(folder, files)
        try:
            return _Reply(play_one(_player(packed), folder, stream), None, {})
        except Exception as error:
            return _Reply(None, portable(error, f"on {socket.gethostname()}"), _checkpoint(folder))


@functools.lru_cache(maxsize=1)
def _player(packed: bytes) -> Player:
    """Return the player of a segment, with the controller loaded.

    Raises:
        MachineError: This machine has another wm or does not see the same run.
        ArtifactError: An artifact is damaged.
    """
    task: _Task = pickle.loads(packed)
    host = socket.gethostname()
    if wmcli.__version__ != task.version:
        raise MachineError(
            f"{host} has wm {wmcli.__version__}, but this machine {task.version}: install the same on all."
        )

    def artifact(at: tuple[Path, str] | None) -> Artifact | None:
        if at is None:
            return None
        path, digest = at
        if not path.is_dir() or (found := open_artifact(path)).digest != digest:
            raise MachineError(
                f"{host} does not see {path} as this machine does: put --run on a file system that all machines of the"
                " cluster share."
            )
        found.verify()
        return found

    before, actor = artifact(task.before), artifact(task.actor)
    context = Context(Run(task.run), task.preset, task.settings, Progress(quiet=True))
    return Player(context, before, actor, task.rounds)
