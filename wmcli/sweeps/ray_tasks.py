"""Runs as tasks of Ray: on a cluster that exists, or on one that is started on this machine for the sweep.

Ray runs the task of a lost node or worker again elsewhere, as often as it takes. Run directories and records are on a
file system that all nodes share, so the run goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from wmcli.artifacts.files import make_folder
from wmcli.config import Section
from wmcli.errors import MachineError, Stopped, UsageError
from wmcli.interrupt import PATIENCE, stop_requests
from wmcli.progress import Progress
from wmcli.sweeps.attempt import LONGER, RUNNING, attempt, read_record, record_end

if TYPE_CHECKING:
    from wmcli.sweeps.plan import PlannedRun, Sweep

POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0
GIB = 2**30
LOG = "ray.log"  # in the folder of records


class RaySettings(Section):
    """Which Ray cluster runs the sweep, and what each run takes of it."""

    address: str = ""
    """Address of the cluster, or auto for the one that this machine belongs to; empty starts one here for the sweep."""
    cpus: float = Field(1.0, gt=0)
    """CPU cores of one run."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of one run. Runs with 0.5 share one by twos."""
    memory: float = Field(0.0, ge=0)
    """Memory of one run in GiB; 0 sets none aside."""


def run_ray(sweep: Sweep, runs: Sequence[PlannedRun], progress: Progress) -> dict[str, int]:
    """Run a task for each run and wait for their ends.

    A run that stopped without being asked to by this process, for example because its node shuts down, is submitted
    again. On a request to stop this process, the runs stop at their checkpoints.

    Args:
        sweep: The sweep.
        runs: Those of its runs that are not done.
        progress: Where to talk.

    Returns:
        Exit codes by name of the run. 75: it stopped at a checkpoint, or has not begun.

    Raises:
        UsageError: There is no Ray, no such cluster, or no node of it can ever hold a run.
    """
    from wmcli.exchange.safe import load_library  # it loads the formats of experience

    ray = load_library("ray", "ray", "a sweep on Ray")
    codes: dict[str, int] = {}
    with stop_requests(PATIENCE + 2 * LONGER) as stop, _cluster(ray, sweep, progress):
        task = ray.remote(**_resources(sweep.ray), max_retries=-1)(_run)

        def submit(run: PlannedRun) -> Any:
            return task.remote(run, sweep.records, Path.cwd(), sweep.ray.cpus)

        tasks = {submit(run): run for run in runs}
        asked, shown = False, 0
        with progress.bar("sweep", len(runs), "runs") as bar:
            while tasks:
                for each in ray.wait(list(tasks), timeout=POLL_SECONDS)[0]:
                    run = tasks.pop(each)
                    code = _code(ray, each, run, sweep.records)
                    if code == Stopped.exit_code and not stop:
                        tasks[submit(run)] = run
                        continue
                    codes[run.name] = code
                    bar.advance(code != Stopped.exit_code)
                if stop and not asked:
                    asked = True
                    for each in tasks:
                        ray.cancel(each)  # Ctrl-C in the worker; a task that waits does not begin
                running = sum(_is_running(run, sweep.records) for run in tasks.values())
                if running != shown:  # a log gets no line that says nothing new
                    bar.show(**({"running": running} if running else {}))
                    bar.advance(0)
                    shown = running
    return codes


def _run(run: PlannedRun, records: Path, folder: Path, cpus: float) -> int:
    """Attempt a run in a worker, from the folder that the sweep was started in, where this node has it."""
    import ray

    if folder.is_dir():
        os.chdir(folder)
    job = ray.get_runtime_context().get_task_id() or ""
    return attempt(run, records, executor="ray", job=job, environment={"OMP_NUM_THREADS": str(max(int(cpus), 1))})


def _code(ray: Any, task: Any, run: PlannedRun, records: Path) -> int:
    """Return the exit code of a task that ended. Record the end if the worker could not."""
    try:
        return int(ray.get(task))
    except ray.exceptions.TaskCancelledError:
        return Stopped.exit_code
    except ray.exceptions.RayError as error:
        code, last = MachineError.exit_code, str(error).strip().splitlines()[-1]
        record_end(run, records, executor="ray", job=task.task_id().hex(), code=code, last=last)
        return code


def _is_running(run: PlannedRun, records: Path) -> bool:
    record = read_record(run, records)
    return record is not None and record["state"] == RUNNING


# -- the cluster ------------------------------------------------------------------------------------------------------


def _resources(settings: RaySettings) -> dict[str, float]:
    """Return the resources of a task as Ray names them."""
    memory = {"memory": settings.memory * GIB} if settings.memory else {}
    return {"num_cpus": settings.cpus, "num_gpus": settings.gpus} | memory


@contextmanager
def _cluster(ray: Any, sweep: Sweep, progress: Progress) -> Iterator[None]:
    """Connect to the cluster of the settings for the length of the block. Ray's words go to a file, not to stdout."""
    make_folder(sweep.records)
    with (sweep.records / LOG).open("a") as log, redirect_stdout(log):
        try:
            _connect(ray, sweep)
            _check_room(ray, sweep, progress)
            yield
        finally:
            ray.shutdown()


def _connect(ray: Any, sweep: Sweep) -> None:
    address, handler = sweep.ray.address, signal.getsignal(signal.SIGTERM)
    about: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        about["include_dashboard"] = False
    try:
        if address not in ("", "auto"):  # Ray tries for minutes
            host, _, port = address.rpartition("/")[2].rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address or "local", **about)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"no Ray cluster at {address or 'this machine'}: {reason}; correct address under [ray] in {sweep.file}."
        ) from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray exits at once on SIGTERM


def _check_room(ray: Any, sweep: Sweep, progress: Progress) -> None:
    """Refuse runs that no node can ever hold; warn where the cluster may grow."""
    settings = sweep.ray
    needs = {"CPU": settings.cpus, "GPU": settings.gpus, "memory": settings.memory * GIB}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0.0) >= amount for name, amount in needs.items()) for node in nodes):
        return
    wanted = f"cpus = {settings.cpus:g}, gpus = {settings.gpus:g}, memory = {settings.memory:g}"
    have = "; ".join(
        f"{node.get('CPU', 0):g}, {node.get('GPU', 0):g}, {node.get('memory', 0) / GIB:.1f}" for node in nodes
    )
    message = f"no node of the Ray cluster has room for a run with {wanted} (nodes: {have})"
    if settings.address:
        progress.warn(f"{message}; the runs wait for one that has.")
    else:
        raise UsageError(f"{message}; correct [ray] in {sweep.file}.")
