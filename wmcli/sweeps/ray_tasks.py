"""Runs of a sweep as tasks of Ray, on a cluster or on this machine.

A run whose node dies is run again on another one, from its last checkpoint. Run directories are on a file system that
all nodes share.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from wmcli.config import Section
from wmcli.errors import MachineError, Stopped, UsageError
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.sweeps.attempt import attempt

if TYPE_CHECKING:
    from wmcli.sweeps.plan import PlannedRun, Sweep

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0  # for all runs to reach a checkpoint


class RaySettings(Section):
    address: str = ""
    """Cluster: auto or host:port. Empty is RAY_ADDRESS, or Ray started on this machine for the length of the sweep."""
    cpus: int = Field(1, ge=1)
    """CPU cores of a run."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of a run; a fraction shares one."""
    memory: str = Field("", pattern=r"^(\d+(\.\d+)? ?(MB|GB|TB))?$")
    """Memory of a run, such as 16GB, for the choice of its node."""


def run_ray(sweep: Sweep, runs: Sequence[PlannedRun], progress: Progress) -> dict[str, int]:
    """Run some runs of a sweep as tasks, and return their exit codes by name.

    One that was stopped from outside at a checkpoint is begun again. Ctrl-C or SIGTERM stops all.

    Raises:
        UsageError: Ray is not installed, or there is no such cluster.
        MachineError: A run needs more than any node has.
        Stopped: A signal arrived. All runs are at a checkpoint.
    """
    ray = connect(sweep.ray.address)
    task = ray.remote(_run_task).options(
        num_cpus=sweep.ray.cpus,
        num_gpus=sweep.ray.gpus,
        memory=bytes_of(sweep.ray.memory),
        max_retries=-1,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}},
    )
    codes: dict[str, int] = {}
    waiting = deque(runs)
    working: dict[Any, PlannedRun] = {}
    with stop_requests() as stop, progress.bar("sweep", len(runs), "runs") as bar:
        try:
            while waiting or working:
                while waiting:  # Ray itself waits for resources
                    run = waiting.popleft()
                    working[task.remote(run, sweep.records, Path.cwd(), sweep.ray.cpus)] = run
                ready, _ = ray.wait(list(working), timeout=POLL_SECONDS)
                for reference in ready:
                    run = working.pop(reference)
                    code = _result(ray, reference, run)
                    if code == Stopped.exit_code:
                        waiting.append(run)
                        continue
                    codes[run.name] = code
                    bar.advance()
                if stop:
                    for reference in working:
                        ray.cancel(reference)
                    if working:
                        ray.wait(list(working), num_returns=len(working), timeout=STOP_SECONDS)
                    raise Stopped("sweep stopped; the same command goes on with it.")
        finally:
            ray.shutdown()
    return codes


def connect(address: str) -> Any:
    """Connect to a cluster, and return the module `ray`. It prints nothing on stdout.

    Raises:
        UsageError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("this needs Ray: pip install 'wmcli[ray]'") from None
    try:
        ray.init(
            address or None,
            include_dashboard=None if address else False,
            ignore_reinit_error=True,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"no Ray cluster at '{address or os.environ.get('RAY_ADDRESS', 'local')}': {reason}") from None
    return ray


def bytes_of(text: str) -> int | None:
    """Return an amount of memory such as 16GB in bytes; None for an empty text."""
    if not text:
        return None
    return int(float(text[:-2]) * {"MB": 10**6, "GB": 10**9, "TB": 10**12}[text[-2:]])


def _run_task(run: PlannedRun, records: Path, folder: Path, threads: int) -> int:
    """Make an attempt at a run on a node of the cluster."""
    import ray

    os.chdir(folder)
    job = ray.get_runtime_context().get_task_id() or ""
    return attempt(run, records, executor="ray", job=job, environment={"OMP_NUM_THREADS": str(threads)})


def _result(ray: Any, reference: Any, run: PlannedRun) -> int:
    """Return the exit code of a finished task."""
    try:
        code: int = ray.get(reference)
    except ray.exceptions.TaskCancelledError:
        return Stopped.exit_code
    except ray.exceptions.RayError as error:
        raise MachineError(f"{run.name}: Ray could not run it: {' '.join(str(error).split())[:300]}") from None
    return code
