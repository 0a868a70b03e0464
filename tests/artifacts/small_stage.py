"""A small stage to try the run directory with, and processes to kill."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wmcli.artifacts import Artifact, Run, manifest
from wmcli.artifacts.failpoint import failpoint
from wmcli.artifacts.files import write_durable

SETTINGS = {"seed": 3, "tokenizer": {"codes": 17}}


def publish(run: Run, kind: str, identity: Any = 0, **inputs: Artifact) -> Artifact:
    """One more version, whether or not the same was published before."""
    with run.job(kind, {"identity": identity}, inputs).work() as work:
        (work.payload / "chunks" / "c").mkdir(parents=True)
        (work.payload / "chunks" / "c" / "0").write_bytes(b"chunk of \x00 zeros")
        (work.payload / "model.safetensors").write_bytes(f"weights {identity}".encode())
        artifact = work.publish(
            settings=SETTINGS, metrics={"loss": 1.25}, environment={"id": "wm/Catch-v0"}, machine={"threads": 1}
        )
    manifest._verified.discard((artifact.path, artifact.digest))  # as a later process finds it
    return artifact


def stage(folder: Path, identity: int = 0, updates: int = 3) -> Artifact:
    """A whole command: bind, skip what was done, resume, checkpoint, publish. Kills do not change the result."""
    run = Run.open(folder, create=True)
    run.bind("catch", SETTINGS)
    job = run.job("tokenizer", {"identity": identity}, {})
    if (existing := job.done()) is not None:
        return existing
    with job.work() as work:
        checkpoint = work.path / "checkpoint"
        update = int(checkpoint.read_bytes()) if work.resumed else 0
        while update < updates:
            update += 1
            write_durable(checkpoint, [str(update).encode()])
            failpoint("checkpoint")
        (work.payload / "chunks").mkdir()
        (work.payload / "chunks" / "0").write_bytes(bytes(range(200)))
        (work.payload / "model.safetensors").write_bytes(f"weights {identity} after {update}".encode())
        return work.publish(settings=SETTINGS, metrics={"updates": update}, environment=None, machine={"threads": 1})


def start(function: Callable[[], object], environment: dict[str, str] | None = None) -> int:
    """Run `function` in a process of its own and return its id. The exit status is 0, or 1 after an exception."""
    child = os.fork()
    if child == 0:
        try:
            os.environ.update(environment or {})
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def wait(child: int) -> int:
    """The exit status, negative if a signal ended the process."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
