"""Estimate time and memory of a sweep before it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from wmcli.progress import Progress, duration, some
from wmcli.sweeps.local import share_out
from wmcli.sweeps.plan import PlannedRun, Sweep
from wmcli.sweeps.status import describe

SECONDS = 300  # for one estimate
MOST = 8  # measurements, unless there are more variants


def estimate_sweep(sweep: Sweep, runs: Sequence[PlannedRun], executor: str, progress: Progress) -> None:
    """Say how long runs take on this machine, from a few seconds of the work of one of each variant and environment.

    Environments beyond `MOST` measurements, and those without one, count with the mean of their variant. Of a run that
    has begun, the epochs that are left count.

    Args:
        sweep: The sweep.
        runs: Its runs that are left.
        executor: Where they are to run. A local run is measured with the threads of a slot.
        progress: Gets the estimates. Where one is not possible, it gets the reason.
    """
    slots = share_out(sweep.local, len(runs)) if executor == "local" else []
    variants: dict[str, dict[str | None, list[PlannedRun]]] = {}
    for run in runs:
        variants.setdefault(run.variant, {}).setdefault(run.environment, []).append(run)
    shares = {run.name: _share_left(run, sweep) for run in runs}
    measured = _measure_some(variants, slots[0] if slots else {}, progress)
    total = 0.0
    for variant, environments in variants.items():
        known = [seconds for (of, _), seconds in measured.items() if of == variant]
        if not known:
            continue
        mean = sum(known) / len(known)
        others = [environment for environment in environments if (variant, environment) not in measured]
        if others:
            progress.say(
                f"estimate: {variant}: not measured on {some([str(each) for each in others])}, counted with the mean"
                f" of the others ({duration(mean)})"
            )
        for environment, members in environments.items():
            seconds = measured.get((variant, environment), mean)
            total += seconds * sum(shares[run.name] for run in members)
    if total:
        at_a_time = f", {duration(total / len(slots))} with {len(slots)} at a time" if slots else ""
        begun = sum(share < 1 for share in shares.values())
        rest = f"; of {begun} {'run that has' if begun == 1 else 'runs that have'} begun the rest" if begun else ""
        progress.say(f"estimate: {duration(total)} in all{at_a_time}, without evaluation{rest}")


def _measure_some(
    variants: Mapping[str, Mapping[str | None, Sequence[PlannedRun]]],
    slot: Mapping[str, str],
    progress: Progress,
) -> dict[tuple[str, str | None], float]:
    """Measure a run of each variant in its first environment, then in its second and so on, and say what it takes.

    Returns:
        The seconds of a run by variant and environment, as far as measurements were possible.
    """
    places = sorted(
        ((place, variant, environment) for variant, each in variants.items() for place, environment in enumerate(each)),
        key=lambda place: place[0],
    )
    chosen = places[: max(MOST, len(variants))]
    seconds: dict[tuple[str, str | None], float] = {}
    with progress.bar("estimate", len(chosen), "runs") as bar:
        for _, variant, environment in chosen:
            members = variants[variant][environment]
            measured = _measure(members[0], slot, progress)
            if measured is not None:
                seconds[variant, environment] = measured["seconds"]
                progress.say(
                    f"estimate: {_name(members[0])}: {duration(measured['seconds'])} and"
                    f" {measured['memory'] / 1e9:.1f} GB for each of {len(members)} runs on this machine"
                )
            bar.advance()
    return seconds


def _share_left(run: PlannedRun, sweep: Sweep) -> float:
    """Return the share of a run's epochs that are not over."""
    about = describe(run, sweep.records)
    epoch, epochs = about["epoch"], about["epochs"]
    return 1 - (min(epoch, epochs) - 1) / epochs if epoch and epochs else 1.0


def _name(run: PlannedRun) -> str:
    """Return the name of a measurement."""
    return run.variant if run.environment is None else f"{run.variant} on {run.environment}"


def _measure(run: PlannedRun, environment: Mapping[str, str], progress: Progress) -> dict[str, Any] | None:
    """Measure a run in a process of its own; None, and a warning, where that is not possible."""
    command = [sys.executable, "-m", "wmcli", "profile", "--estimate", "--json", "--quiet", "--preset", run.preset]
    command += ["--run", str(run.folder), *(word for each in run.overrides for word in ("--set", each))]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        progress.warn(f"{_name(run)}: no estimate within {SECONDS} seconds")
        return None
    if done.returncode:
        progress.warn(f"{_name(run)}: no estimate: {(done.stderr.splitlines() or ['no message'])[-1]}")
        return None
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
