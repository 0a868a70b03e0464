"""`wm profile --suite`: all measurements of a new machine, part by part into one file.

The parts are the machine itself, the kernels and the stages at the shapes of the presets of the papers, and the time of
a whole run of each Atari preset. A part is measured again when anything it depends on has changed. A part that fails
leaves its error in the file, and the others are measured.
"""

from __future__ import annotations

import gc
import hashlib
import json
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import wmcli
from wmcli.artifacts import Run
from wmcli.artifacts.files import disk_errors, write_durable
from wmcli.config import digest
from wmcli.errors import MachineError, Stopped, UsageError, WmError
from wmcli.kernels import dispatch
from wmcli.progress import Progress
from wmcli.report.profile_tables import suite_page
from wmcli.settings import LearnedCollectSettings, Settings, flatten, resolve
from wmcli.stages.binding import fix_precision
from wmcli.stages.context import Context
from wmcli.stages.profile import elements_of, profile_stages
from wmcli.stages.profile_cycle import profile_cycle
from wmcli.stages.profile_kernels import kernel_cases, profile_kernel
from wmcli.stages.profile_public import first_line, versions
from wmcli.training.device import Machine, derived_seed, isolated_randomness
from wmcli.training.measure import Bench

FORMAT = 1
MACHINE = "machine"
PRESETS = ("rem", "iris", "drama", "storm", "unizero", "muzero", "s4wm-3d")
OTHER_BACKBONES = ("drama-mamba1", "s5wm")
"""Presets of which only the kernels of the backbone are measured."""
GOALS = {"drama": 20.0, "rem": 60.0, "unizero": 20.0}
"""Minutes that a run of 100,000 steps should take on one H100 or H200."""
QUICK = {
    "collect.steps": 64,
    "tokenizer.batch": 2,
    "dynamics.batch": 2,
    "dynamics.sequence_length": 20,
    "controller.batch": 2,
    "controller.imagination_horizon": 2,
    "controller.simulations": 2,
}
"""Largest values of settings in a quick suite. Widths stay, so that kernels are those of the whole suite."""


class Part(NamedTuple):
    """One part of the suite: its name, its settings, and how to measure them."""

    name: str
    preset: str
    settings: Settings
    measure: Callable[[Context, Bench, Path], dict[str, Any]]


def profile_suite(
    file: Path,
    *,
    presets: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    quick: bool = False,
    force: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """Measure the parts that are missing in a file, and write it and a page of tables beside it after each of them.

    Args:
        file: JSON file. The page has its name with `.md`.
        presets: Presets to measure; None takes those of the papers.
        overrides: Settings for all of them, as `section.key=value`.
        quick: Take small batches and one sample: a trial of everything, not a measurement.
        force: Measure all parts again.
        progress: Display of progress.

    Returns:
        The content of the file.

    Raises:
        UsageError: The file cannot be used, or the settings do not resolve.
        MachineError: The machine could not be measured, or its device is unusable after a part.
        WmError: Some parts failed; the file names them.
    """
    document = _read(file)
    measured = document["parts"]
    parts = list(_parts(presets, overrides, quick))
    code = _code()
    keys = {part.name: _key(part, quick, code) for part in parts}

    def is_done(part: Part) -> bool:
        found = measured.get(part.name, {})
        return found.get("key") == keys[part.name] and "error" not in found

    todo = [part for part in parts if force or not is_done(part)]
    # What failed before comes last: it may take the device down with it.
    todo.sort(key=lambda part: "error" in measured.get(part.name, {}) and part.name != MACHINE)
    if not todo:
        _write(file, document)  # the page may be that of an older version
        progress.say(f"profile: {file} has all {len(parts)} parts; to measure them again add --force")
        return document
    progress.say(f"profile: {len(todo)} of {len(parts)} parts to measure into {file}")
    with progress.bar("profile suite", len(parts), "parts", start=len(parts) - len(todo)) as bar:
        for part in todo:
            progress.say(f"profile: {part.name}")
            began = time.monotonic()
            try:
                result = _measure(part, measured.get(MACHINE, {}), quick, progress)
            except Stopped:
                raise
            except Exception as error:  # whatever it is, the other parts are measured
                result = {"error": str(error) if isinstance(error, WmError) else first_line(error)}
                progress.warn(f"profile: {part.name} failed: {result['error']}")
            about = {"key": keys[part.name], "finished": datetime.now(UTC).isoformat(timespec="seconds")}
            measured[part.name] = about | {"duration": time.monotonic() - began} | result
            order = [each.name for each in parts]
            document["parts"] = measured = dict(
                sorted(measured.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
            )
            _write(file, document)
            bar.advance()
            if "error" in result:
                _check_device(part, result["error"])
    failed = [part.name for part in parts if "error" in measured[part.name]]
    if failed:
        raise WmError(
            f"profile: {len(failed)} of {len(parts)} parts failed: {', '.join(failed)}; {file} has their errors, and"
            " the same command tries them again."
        )
    return document


# -- the file ---------------------------------------------------------------------------------------------------------


def _read(file: Path) -> dict[str, Any]:
    if file.suffix != ".json":
        raise UsageError(f"--suite {file}: name a file that ends in .json; the tables go beside it.")
    if not file.parent.is_dir():
        raise UsageError(f"--suite {file}: there is no folder {file.parent}; make it first.")
    if not file.exists():
        return {"format": FORMAT, "parts": {}}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--suite {file}: cannot be read ({error}); name another file.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"--suite {file}: holds no measurements of this version of wm; name another file.")
    return document


def _write(file: Path, document: dict[str, Any]) -> None:
    with disk_errors(file):
        write_durable(file, [json.dumps(document, indent=1).encode()])
        write_durable(file.with_suffix(".md"), [suite_page(document, GOALS).encode()])


def _key(part: Part, quick: bool, code: str) -> dict[str, Any]:
    """Return everything that a part's results depend on."""
    return {
        "machine": Machine.choose(part.settings.training).describe(),
        "code": code,
        "settings": None if part.name == MACHINE else digest(part.settings.plain()),
        "packages": versions(),
        "quick": quick,
    }


def _code() -> str:
    """Return a digest of the source of this package, which names code that was never committed as well."""
    content = hashlib.sha256()
    for name in ("", "kernels", "presets"):  # the latter two may be links to folders elsewhere
        folder = Path(wmcli.__file__).parent / name
        for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"))):
            content.update(f"{name}/{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return content.hexdigest()[:12]


# -- the parts --------------------------------------------------------------------------------------------------------


def _parts(presets: Sequence[str] | None, overrides: Sequence[str], quick: bool) -> Iterator[Part]:
    """Yield all parts in order."""
    names = tuple(presets or PRESETS)
    settings = {name: _resolve(name, overrides, quick) for name in (*names, *(() if presets else OTHER_BACKBONES))}
    yield Part(MACHINE, names[0], settings[names[0]], _profile_machine)
    for name in settings:
        yield Part(f"kernels of {name}", name, settings[name], _kernels)
    for name in names:
        yield Part(f"stages of {name}", name, settings[name], _stages)
    for name in names:
        if settings[name].controller.acts and isinstance(settings[name].collect, LearnedCollectSettings):
            yield Part(f"run of {name}", name, settings[name], _run)


def _resolve(preset: str, overrides: Sequence[str], quick: bool) -> Settings:
    """Return a preset's settings. On CUDA they record graphs unless an override says otherwise."""
    settings = resolve(preset, overrides)
    added = []
    if Machine.choose(settings.training).device.type == "cuda":
        added.append("training.cuda_graph=true")
    if quick:
        values = flatten(settings.plain())
        added += [f"{key}={most}" for key, most in QUICK.items() if values.get(key, 0) > most]
    return fix_precision(resolve(preset, [*added, *overrides]))


def _measure(part: Part, machine: dict[str, Any], quick: bool, progress: Progress) -> dict[str, Any]:
    """Measure one part in a folder of its own."""
    if part.name != MACHINE and "rows" not in machine:
        raise MachineError(f"the ceilings of the machine could not be measured ({machine.get('error')})")
    with tempfile.TemporaryDirectory(prefix="wm-profile-") as folder:
        context = Context(Run(Path(folder)), part.preset, part.settings, progress.inside())
        device = context.machine.device
        ceilings = None if part.name == MACHINE else machine["rows"]
        try:
            with isolated_randomness(derived_seed(part.settings.seed, "profile"), device):
                bench = Bench(context.machine, context.progress, ceilings, quick=quick)
                return part.measure(context, bench, Path(folder) / "run")
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _check_device(part: Part, error: str) -> None:
    """Raise MachineError if no more work runs on the device, as after a fault inside a kernel."""
    try:
        if Machine.choose(part.settings.training).device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        raise MachineError(
            f"profile: {part.name} failed ({error}), and the process cannot use the device any more; run the same"
            " command again: it goes on with the parts that were not tried yet."
        ) from None


def _profile_machine(context: Context, bench: Bench, folder: Path) -> dict[str, Any]:
    return {"about": _about_machine(context), "rows": bench.ceilings, "launches": bench.time_launches()}


def _about_machine(context: Context) -> dict[str, Any]:
    """Return what a table says of the machine and of the software."""
    machine = context.machine
    about = machine.describe() | {"processor": _processor(), "commit": _commit()}
    about["triton"] = getattr(dispatch.triton, "__version__", None)
    if machine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(machine.device)
        about |= {"memory": properties.total_memory, "cuda": torch.version.cuda, "driver": _driver()}
    return about


def _processor() -> str:
    """Return the name of the processor."""
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, None if nothing tells it."""
    told = re.search(r"Driver Version\s*:\s*(\S+)", _output("nvidia-smi", "-q") or "")
    return told and told[1]


def _commit() -> str | None:
    """Return the commit of a source checkout, with `+` if files differ from it; None elsewhere."""
    root = Path(wmcli.__file__).parent.parent
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD") if (root / ".git").exists() else None
    return commit and commit[:7] + ("+" if _output("git", "-C", str(root), "status", "-s", "-uno") else "")


def _output(*command: str) -> str | None:
    """Return what a command prints, None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _kernels(context: Context, bench: Bench, folder: Path) -> dict[str, Any]:
    """Measure the kernels of the preset's backbone, and those of no backbone."""
    kinds = {context.settings.backbone.kind, None} - ({None} if context.preset in OTHER_BACKBONES else set())
    cases = kernel_cases(context.settings, context.machine, elements_of(context), kinds)
    return {"rows": [row for case in cases for row in profile_kernel(case, bench)]}


def _stages(context: Context, bench: Bench, folder: Path) -> dict[str, Any]:
    rows, operators = profile_stages(context, bench)
    return {"rows": rows, "operators": operators}


def _run(context: Context, bench: Bench, folder: Path) -> dict[str, Any]:
    return profile_cycle(context, bench, folder)
