"""A process that has imported everything and forks a child for every command, so that a command starts in milliseconds.

`Warm` starts it and asks it for commands. The process itself (`serve`) computes nothing and has one thread.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fault_shim

HERE = Path(__file__).parent
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2", "-m", "--", "wmcli")
MODULES = [
    *("wmcli.cli.main", "wmcli.artifacts", "wmcli.stages.apart", "wmcli.stages.collect"),
    *("wmcli.stages.dynamics", "wmcli.stages.evaluate", "wmcli.stages.exported", "wmcli.stages.imagine"),
    *("wmcli.stages.imported", "wmcli.stages.loop", "wmcli.stages.opening", "wmcli.stages.pictures"),
    *("wmcli.stages.play", "wmcli.stages.profile", "wmcli.stages.profile_backbones", "wmcli.stages.profile_cycle"),
    *("wmcli.stages.profile_kernels",),
    *("wmcli.stages.profile_experience", "wmcli.stages.tokenizer", "wmcli.stages.train", "wmcli.stages.variants"),
    *("wmcli.stages.score_pictures", "wmcli.exchange", "wmcli.sweeps.local", "wmcli.artifacts.remote"),
    *("wmcli.training.logs", "wmcli.training.sinks", "ale_py", "typer._adapters", "typer._click.decorators"),
    *("importlib.resources.readers", "PIL.JpegImagePlugin", "PIL.PpmImagePlugin", "PIL.BmpImagePlugin"),
    *("wmcli.trainers.dynamics", "wmcli.trainers.imagination", "wmcli.trainers.tokenizer", "wmcli.cli.human"),
    *("zarr", "zarr.codecs", "zarr.storage", "numcodecs", "matplotlib.figure", "matplotlib.backends.backend_agg"),
    *("PIL.Image", "PIL.WebPImagePlugin", "PIL.PngImagePlugin", "PIL.GifImagePlugin", "tensorboardX"),
    *("gymnasium", "fsspec.implementations.local", "filelock", "safetensors.torch", "rich.console", "rich.live"),
    *("rich.table", "torch.optim", "torch._dynamo", "torch.distributions"),
]


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None
    """Exit code, negative for a signal; None if it took too long and was killed."""
    out: str
    said: str


class Warm:
    """The warm process. Close it at the end.

    Args:
        folder: For its files: the control file and what a command prints.
        modules: Modules to import beside those of wm.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(HERE), *sys.path])
        left_out = ("WM_RUN", "WM_FAILPOINT", "FAULT_CONTROL")
        environment = {key: value for key, value in os.environ.items() if key not in left_out}
        environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(fault_shim.built())}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._reply() == "ready"

    def run(
        self,
        *arguments: str,
        control: fault_shim.Control | None = None,
        broken: str | None = None,
        cwd: Path | None = None,
        seconds: float = 120,
    ) -> Ended:
        """Run `wm ARGUMENTS` to its end, and to that of all processes that it started.

        Args:
            arguments: Of `wm`, or TORCHRUN and those.
            control: Which of its calls fails.
            broken: Name of a way to break wm, of `broken_publishing.WAYS`.
            cwd: Its current folder.
            seconds: It is killed if it takes longer.
        """
        request = {
            "arguments": arguments,
            "control": None if control is None else str(control.path),
            "broken": broken,
            "cwd": str(cwd or self.folder),
            "out": str(self.folder / "stdout"),
            "said": str(self.folder / "stderr"),
            "seconds": seconds,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = json.loads(self._reply())
        return Ended(code, (self.folder / "stdout").read_text(), (self.folder / "stderr").read_text(errors="replace"))

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _reply(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the warm process ended"
        return line.strip()


# -- the process itself -----------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer each request with the exit code of its command. A child returns from here to run it."""
    for name in MODULES:
        importlib.import_module(name)
    _shorten()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a warm process with {threads} threads cannot be forked"
    gc.freeze()  # else each child copies all of it when it collects garbage
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request)
            return
        print(json.dumps(_wait(child, request["seconds"])), flush=True)
    os._exit(0)


def _wait(child: int, seconds: float) -> int | None:
    handle = os.pidfd_open(child)
    try:
        in_time, _, _ = select.select([handle], [], [], seconds)
        if not in_time:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(handle)
    with suppress(ChildProcessError):
        while True:  # the processes that it started, which may hold locks until they notice its end
            os.waitpid(-1, 0)
    return code if in_time else None


def _shorten() -> None:
    """Leave out what takes most of the time of tiny commands: drawing, and products of large matrices."""
    plots, measure = (importlib.import_module(f"wmcli.{name}") for name in ("report.plots", "training.measure"))
    plots._rendered = lambda figure, suffix: b"a figure"
    measure.MATMUL_SIZES, measure.COPY_BYTES, measure.SAMPLE_SECONDS = (16, 16), (1 << 20, 1 << 20), 1e-9


def _become(request: Mapping[str, object]) -> None:
    """Turn this child into the command of a request."""
    os.setsid()
    os.chdir(str(request["cwd"]))
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        file = os.open(str(name), flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    if request["broken"] is not None:
        from broken_publishing import WAYS

        WAYS[str(request["broken"])]()
    if request["control"] is not None:
        os.environ["FAULT_CONTROL"] = str(request["control"])
        library = ctypes.CDLL(None)
        assert library.attach_control(str(request["control"]).encode()) == 0
        _mark_promises(library.mark)
    sys.argv = ["wm", *request["arguments"]]  # type: ignore[misc]
    if sys.argv[1] == TORCHRUN[0]:
        from torch.distributed.run import main

        del sys.argv[0]
        main()
        os._exit(0)


def _mark_promises(mark: Callable[[bytes], None]) -> None:
    """Record when a publication and a binding have returned: from then on they survive a power cut."""
    from wmcli.artifacts import Run, Work

    publish, bind = Work.publish, Run.bind

    def marked_publish(*given: Any, **named: Any) -> Any:
        artifact = publish(*given, **named)
        mark(f"published {artifact.name}".encode())
        return artifact

    def marked_bind(*given: Any, **named: Any) -> None:
        bind(*given, **named)
        mark(b"bound")

    Work.publish, Run.bind = marked_publish, marked_bind


if __name__ == "__main__":
    serve()
    from wmcli.cli.main import main

    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)  # the interpreter's own end takes a second
