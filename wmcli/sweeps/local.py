"""Runs of a sweep on this machine, several at a time."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from wmcli.config import Section
from wmcli.errors import MachineError, Stopped, UsageError
from wmcli.interrupt import PATIENCE, stop_requests
from wmcli.memory import free_memory
from wmcli.progress import Progress
from wmcli.sweeps.attempt import LONGER, attempt

if TYPE_CHECKING:
    from wmcli.sweeps.plan import PlannedRun, Sweep

POLL_SECONDS = 0.2
GIB = 2**30


class LocalSettings(Section):
    slots: int = Field(0, ge=0)
    """Runs at a time; 0 takes as many as GPUs, cores and memory allow."""
    gpus: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """GPUs of a run; auto is one where there are some. Runs with 0.5 share one by twos. 0 leaves them to other
    programs."""
    threads: int = Field(0, ge=0)
    """CPU threads of a run; 0 shares the cores out among the slots, or is 1 where nothing limits the slots."""
    memory: float = Field(0.0, ge=0)
    """Memory of a run in GiB: no more run at a time than fit, also with `slots`. 0 does not limit them."""

    @model_validator(mode="after")
    def _check_gpus(self) -> LocalSettings:
        if self.gpus != "auto" and (0 < self.gpus < 0.01 or (self.gpus > 1 and self.gpus % 1)):
            raise ValueError(f"gpus = {self.gpus:g}: whole GPUs, or a part of one such as 0.5, at least 0.01")
        return self


def share_out(settings: LocalSettings, runs: int) -> list[dict[str, str]]:
    """Share this machine out among the runs of a sweep.

    Args:
        settings: Of the sweep.
        runs: Number of runs: no more slots are needed.

    Returns:
        The environment variables of each slot, which runs take in turn.

    Raises:
        UsageError: It has not the GPUs that the settings want.
        MachineError: A run does not fit into memory.
    """
    gpus, cores = visible_gpus(), os.cpu_count() or 1
    wanted = settings.gpus if settings.gpus != "auto" else float(bool(gpus))
    if wanted > len(gpus):
        raise UsageError(f"local.gpus = {wanted:g}: this machine has {len(gpus)}; lower it, or use --on slurm.")
    shares = _share_gpus(gpus, wanted)
    count = min(settings.slots or (len(shares) if wanted else max(1, cores // (settings.threads or 1))), runs)
    if wanted and count > len(shares):
        raise UsageError(
            f"local.slots = {count} with {wanted:g} GPUs each: this machine has {len(gpus)}; lower one of them."
        )
    if settings.memory:
        free = free_memory() / GIB
        if free < settings.memory:
            raise MachineError(
                f"local.memory = {settings.memory:g} GiB: only {free:.1f} are free; lower it, or use --on slurm."
            )
        count = int(min(count, free / settings.memory))
    threads = settings.threads or max(1, cores // count)
    slots = [{"OMP_NUM_THREADS": str(threads)} for _ in range(count)]
    if gpus:
        for slot, share in zip(slots, shares or [""] * count, strict=False):
            slot["CUDA_VISIBLE_DEVICES"] = share
    return slots


def _share_gpus(gpus: list[str], wanted: float) -> list[str]:
    """Return the GPUs of each possible slot, as CUDA_VISIBLE_DEVICES names them; slots with a part take turns."""
    if not wanted:
        return []
    if wanted < 1:
        return gpus * int(1 / wanted)
    count = int(wanted)
    return [",".join(gpus[start : start + count]) for start in range(0, len(gpus) - count + 1, count)]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name and name != "-1"]
    found = [re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*")]
    return sorted((match[1] for match in found if match), key=int)


def run_local(sweep: Sweep, runs: Sequence[PlannedRun], progress: Progress) -> dict[str, int]:
    """Run some runs of a sweep, one after another in each slot, and return their exit codes by name.

    One that is stopped from outside at a checkpoint is begun again behind the others. Ctrl-C or SIGTERM stops all.

    Raises:
        Stopped: A signal arrived. All runs are at a checkpoint.
    """
    slots = share_out(sweep.local, len(runs))
    threads = slots[0]["OMP_NUM_THREADS"]
    progress.say(f"sweep: {len(runs)} runs, {len(slots)} at a time, CPU threads of each: {threads}")
    waiting, free = deque(runs), list(slots)
    codes: dict[str, int] = {}
    working: dict[Future[int], tuple[PlannedRun, dict[str, str]]] = {}
    with (
        stop_requests(PATIENCE + LONGER) as stop,  # the attempts in the threads hear it as well
        ThreadPoolExecutor(len(slots)) as workers,
        progress.bar("sweep", len(runs), "runs") as bar,
    ):
        while waiting or working:
            while waiting and free and not stop:
                run, slot = waiting.popleft(), free.pop(0)
                job = workers.submit(attempt, run, sweep.records, executor="local", environment=slot)
                working[job] = run, slot
            if stop:
                waiting.clear()
            done, _ = wait(working, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
            for job in done:
                run, slot = working.pop(job)
                free.append(slot)
                code = job.result()
                if code == Stopped.exit_code and not stop:
                    waiting.append(run)
                    continue
                codes[run.name] = code
                bar.advance()
        if stop:
            raise Stopped("sweep stopped; the same command goes on with it.")
    return codes
