"""Estimate time and memory of a sweep before it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from wmcli.progress import Progress, duration
from wmcli.sweeps.local import share_out
from wmcli.sweeps.plan import PlannedRun, Sweep

SECONDS = 300  # for one estimate


def estimate_sweep(sweep: Sweep, runs: Sequence[PlannedRun], executor: str, progress: Progress) -> None:
    """Say how long the runs of each variant take on this machine, from a few seconds of the first one's work.

    Args:
        sweep: The sweep.
        runs: Its runs that are left.
        executor: Where they are to run. A local run is measured with the threads of a slot.
        progress: Gets the estimates. Where one is not possible, it gets the reason.
    """
    slots = share_out(sweep.local, len(runs)) if executor == "local" else []
    variants: dict[str, list[PlannedRun]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    total = 0.0
    with progress.bar("estimate", len(variants), "variants") as bar:
        for variant, members in variants.items():
            measured = _measure(members[0], slots[0] if slots else {}, progress)
            if measured is not None:
                total += len(members) * measured["seconds"]
                progress.say(
                    f"estimate: {variant}: {duration(measured['seconds'])} and {measured['memory'] / 1e9:.1f} GB for"
                    f" each of {len(members)} runs on this machine"
                )
            bar.advance()
    if total:
        at_a_time = f", {duration(total / len(slots))} with {len(slots)} at a time" if slots else ""
        progress.say(f"estimate: {duration(total)} in all{at_a_time}, without evaluation")


def _measure(run: PlannedRun, environment: Mapping[str, str], progress: Progress) -> dict[str, Any] | None:
    """Measure a run in a process of its own; None, and a warning, where that is not possible."""
    command = [sys.executable, "-m", "wmcli", "profile", "--estimate", "--json", "--quiet", "--preset", run.preset]
    command += ["--run", str(run.folder), *(word for each in run.overrides for word in ("--set", each))]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        progress.warn(f"{run.variant}: no estimate within {SECONDS} seconds")
        return None
    if done.returncode:
        progress.warn(f"{run.variant}: no estimate: {(done.stderr.splitlines() or ['no message'])[-1]}")
        return None
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
