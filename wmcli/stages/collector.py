"""Collecting in a second process, while this one trains.

A stage seeds torch's global generators and catches signals, so two stages at a time need two processes. The second one
lasts for the whole run: it imports torch once and keeps its environments between segments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from wmcli.artifacts import Artifact, Run, open_artifact
from wmcli.envs.processes import portable
from wmcli.errors import MachineError, Stopped
from wmcli.interrupt import ASKING, ENDING, PASSED_ON, stop_requests
from wmcli.progress import Progress
from wmcli.settings import Settings
from wmcli.stages.collect import collect, collect_job, summary
from wmcli.stages.context import Context

THREADS = 1  # acting on a few frames gains nothing from more, and training needs them
POLL_SECONDS = 0.1  # interval of the checks for signals while waiting


class _Other(NamedTuple):
    process: subprocess.Popen[bytes]
    line: Connection


class Collector:
    """Collects for the run of `context` beside this process, one segment at a time: `begin`, then `result`.

    The other process is started by the first `begin` that finds something to do. It says nothing, acts on one thread,
    hears of Ctrl-C only from this one, and does not outlive it.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._other: _Other | None = None
        self._busy = False
        self._is_new = False
        """This command bound a new run."""
        self._existing: Artifact | None = None

    def begin(self, context: Context, controller: Artifact | None, previous: Artifact | None) -> None:
        """Start to collect behind `previous` with `controller`, None for random play; found again if done before.

        `context` is that of the epoch which it is collected for.
        """
        assert not self._busy, "one segment at a time"
        optional = {"previous": previous, "controller": controller}
        inputs = {role: artifact for role, artifact in optional.items() if artifact is not None}
        job = collect_job(context, inputs)
        self._existing = job.done()
        if self._existing is not None:
            return
        context.prepare(job)
        self._is_new |= context.is_new
        if self._other is None:
            self._other = self._start()
        references = {role: str(artifact.path) for role, artifact in inputs.items()}
        with suppress(OSError):  # it ended: `result` reports that
            about = {"epoch": context.epoch, "settings": _beside(context.settings)}
            self._other.line.send((about, {"controller": "random", "previous": None} | references))
        self._busy = True

    def result(self) -> Artifact:
        """Wait for the segment of the last `begin`.

        Raises:
            WmError: `collect` raised it in the other process.
            MachineError: The other process ended.
            Stopped: A signal arrived.
        """
        if self._existing is not None:
            return self._existing
        assert self._other is not None and self._busy
        process, line = self._other
        progress, is_stopping = self._context.progress, False
        with stop_requests() as stop, progress.bar("collect", 1, "segments") as bar:
            while not line.poll(POLL_SECONDS):
                if stop and not is_stopping:
                    process.send_signal(PASSED_ON)
                    is_stopping = True
            stopped = Stopped("collect stopped; the same command resumes it.")
            try:
                reply = line.recv()
            except (EOFError, OSError):
                code = process.wait()
                reply = stopped if stop or -code in (*ENDING, *ASKING) else _death(code)
            self._busy = False
            if isinstance(reply, Exception):
                if self._is_new:
                    self._context.run.unbind()
                raise reply
            if stop:
                raise stopped
            bar.advance()
        artifact = open_artifact(reply)
        progress.say(summary(artifact))
        return artifact

    def close(self) -> None:
        """End the process, at a checkpoint if it is at work. Nothing happens where there is none."""
        if self._other is None:
            return
        (process, line), self._other = self._other, None
        try:
            if self._busy:
                self._busy = False
                process.send_signal(PASSED_ON)
                with suppress(EOFError, OSError):
                    line.recv()
        finally:  # by now it only waits for a request; or a second Ctrl-C here does not wait for its checkpoint
            process.kill()
            process.wait()
            line.close()

    def _start(self) -> _Other:
        context = self._context
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "wmcli.stages.collector", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # an environment may be a user's module
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout carries the command's results only
                start_new_session=True,  # Ctrl-C goes to a whole process group; here we pass it on, once
            )
        with suppress(OSError):
            ours.send(
                {
                    "run": context.run.path,
                    "preset": context.preset,
                    "settings": _beside(context.settings),
                    "fresh": context.fresh,
                }
            )
        return _Other(process, ours)


def _beside(settings: Settings) -> Settings:
    """Return settings for the other process: few threads, and no process of its own that sends the run's records."""
    sinks = tuple(name for name in settings.training.log_to if name == "tensorboard")
    training = settings.training.model_copy(update={"threads": THREADS, "log_to": sinks})
    return settings.model_copy(update={"training": training})


def _death(code: int) -> MachineError:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return MachineError(f"the process that collects was ended {how}; run the same command again to go on.")


# -- in the other process ---------------------------------------------------------------------------------------------


def serve(handle: int) -> None:
    """Collect for each request over the connection `handle`. Reply with the path of the artifact, or the exception."""
    line = Connection(handle)
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(line, requests), daemon=True).start()
    about = requests.get()
    run = Run.open(about["run"], create=False)
    context = Context(run, about["preset"], about["settings"], Progress(quiet=True), fresh=about["fresh"])
    while True:
        about, request = requests.get()
        context.epoch, context.settings = about["epoch"], about["settings"]
        reply: str | Exception
        try:
            reply = str(collect(context, **request, extend=False).path)
        except Exception as error:
            reply = portable(error, "that collects")
        line.send(reply)


def _listen(line: Connection, requests: SimpleQueue[Any]) -> None:
    """Queue the requests, and exit when the requesting process ends."""
    try:
        while True:
            requests.put(line.recv())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
