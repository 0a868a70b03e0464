"""The checks of `wm doctor`: versions, devices, memory, disks and a run, each with what to do about it.

Nothing is changed: probes of the disk work in a temporary folder, see `wmcli.artifacts.filesystem`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import webbrowser
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from wmcli.artifacts import Run
from wmcli.artifacts.filesystem import (
    fault_of,
    fault_of_case,
    fault_of_folder_sync,
    fault_of_locks,
    fault_of_renames,
    fault_of_symlinks,
    is_passing,
    mount_of,
    probing,
    seconds_ahead,
    seconds_of_fsync,
    trouble_between_machines,
)
from wmcli.artifacts.job import has_checkpoint
from wmcli.artifacts.lock import describe_holder
from wmcli.artifacts.manifest import KINDS
from wmcli.artifacts.overview import is_locked, locked_folders
from wmcli.artifacts.removable import leftovers
from wmcli.artifacts.upgrade import is_outdated, plan_upgrade
from wmcli.errors import WmError
from wmcli.memory import CGROUP, machine_memory
from wmcli.progress import size

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "wmcli"
CPU = Path("/proc/cpuinfo")
NVIDIA = Path("/proc/driver/nvidia/version")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
FOR_DEVELOPERS = {"test", "docs", "dev", "oracle"}
LEAST_DISK, LITTLE_DISK = 1e9, 10e9  # bytes
LITTLE_MEMORY = 4e9  # bytes
SLOW_FSYNC = 0.1  # seconds
MOST_SKEW = 2.0  # seconds; younger files are not trusted to be unchanged (`wmcli.artifacts.manifest.CLOCK_TICK`)

State = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    name: str
    state: State
    found: str
    remedy: str = ""
    """What to do; also how to get what is missing and not needed."""


Findings = Iterator[Finding]


def examine_machine(folder: Path) -> Findings:
    """Yield the findings about this machine.

    Args:
        folder: A run, or the place of one that is not there yet.
    """
    yield from _versions()
    yield from _extras()
    yield from _devices()
    yield from _processor()
    yield from _memory()
    yield from _disk(folder)
    yield from _programs()


def examine_run(path: Path) -> Findings:
    """Yield the findings about a run. Its files are not verified: `wm verify` does that.

    Raises:
        ArtifactError: There is no such folder.
    """
    run = Run.open(path, create=False)
    permissions = _permissions(run)
    yield permissions
    if permissions.state == "problem":
        return
    yield from _content(run)
    yield from _work(run)


# -- the installation -------------------------------------------------------------------------------------------------


def _versions() -> Findings:
    """Compare what is installed with what wm needs."""
    find = partial(Finding, "versions")
    yield find("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    own = _installed(DISTRIBUTION)
    if own is None:
        yield find(DISTRIBUTION, "warning", "not installed, only on Python's path", "pip install .")
        return
    yield find(DISTRIBUTION, "ok", own)
    for wanted in _requirements(""):
        there = _installed(wanted.name)
        if there is not None and _fits(wanted, there):
            yield find(wanted.name, "ok", there)
        else:
            needed = f"{wanted.name}{wanted.specifier}"
            yield find(
                wanted.name, "problem", f"{there or 'not installed'}; wm needs {needed}", f"pip install '{needed}'"
            )


def _extras() -> Findings:
    """Say what is installed for optional parts of wm."""
    if _installed(DISTRIBUTION) is None:
        return
    for extra in sorted(set(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ()) - FOR_DEVELOPERS):
        find, get = partial(Finding, "extras", extra), f"pip install 'wmcli[{extra}]'"
        packages = {wanted: _installed(wanted.name) for wanted in _requirements(extra)}
        missing = [wanted.name for wanted, there in packages.items() if there is None]
        wrong = [f"{each.name} {there}" for each, there in packages.items() if there and not _fits(each, there)]
        if not packages:
            yield find("ok", f"not for Python {platform.python_version()}")
        elif missing:
            yield find("ok", f"not installed: {', '.join(missing)}", f"if you need it: {get}")
        elif wrong:
            yield find("warning", f"versions that were not tried: {', '.join(wrong)}", get)
        else:
            yield find("ok", ", ".join(f"{wanted.name} {there}" for wanted, there in packages.items()))


def _requirements(extra: str, of: str = DISTRIBUTION) -> list[Requirement]:
    """Return what a package needs on this machine, or what one of its extras needs besides."""
    from packaging.requirements import Requirement

    every = [Requirement(text) for text in metadata.requires(of) or ()] if _installed(of) else []
    always = [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]
    if not extra:
        return always
    own = [each for each in every if each not in always and each.marker and each.marker.evaluate({"extra": extra})]
    return own + [below for each in own for name in each.extras for below in _requirements(name, each.name)]


def _fits(wanted: Requirement, version: str) -> bool:
    return wanted.specifier.contains(version, prereleases=True)


def _installed(name: str) -> str | None:
    """Return the version of a package, None without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- the machine ------------------------------------------------------------------------------------------------------


def _devices() -> Findings:
    """Name the GPUs that torch can use, or say why it has none, and where Triton's kernels run."""
    find = partial(Finding, "devices")
    try:
        import torch

        from wmcli.kernels import dispatch
        from wmcli.training.device import has_bfloat16
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing
        yield find("torch", "problem", f"cannot be imported: {error}", "install it again: https://pytorch.org")
        return
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    version = re.search(r"\d+\.\d[\d.]*", _first_line(NVIDIA) or "")
    driver = f"driver {version[0]}" if version else "unknown driver"
    for device in devices:
        about = torch.cuda.get_device_properties(device)
        found = f"{about.name}, {size(about.total_memory)}, CUDA {torch.version.cuda}, {driver}"
        yield find(str(device), "ok", found)
    if not devices and version and torch.version.cuda is None:
        remedy = "install a torch for CUDA: https://pytorch.org"
        yield find("gpu", "warning", f"there is one ({driver}), but this torch is for CPUs", remedy)
    elif not devices and version:
        remedy = "update the driver, or install a torch for an older CUDA: https://pytorch.org"
        yield find("gpu", "warning", f"torch cannot use it ({driver}): {_reason_without_cuda()}", remedy)
    elif not devices:
        yield find("gpu", "ok", "none; wm computes on the CPU")
    for device in devices or [torch.device("cpu")]:
        reason = dispatch.unavailable(device)
        yield find("triton", "warning" if reason and devices else "ok", reason or f"its kernels run on {device}")
        precision = "bfloat16" if has_bfloat16(device) else "float32"
        yield find("precision", "ok", f"{precision} on {device} (training.precision = auto)")


def _reason_without_cuda() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "it sees no device; look at CUDA_VISIBLE_DEVICES"


def _processor() -> Findings:
    """Count the cores that this process may use, and name what speeds training on them up."""
    find = partial(Finding, "processor")
    flags = set(next((line for line in _lines(CPU) if line.startswith("flags")), "").split())
    present = [each for each in CPU_FEATURES if each in flags]
    yield find("features", "ok", ", ".join(present) or "none that are known")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_first_line(CGROUP / "cpu.max") or "max 1").partition(" ")
    limit = cores if quota == "max" else int(quota) / int(period)
    found = f"{cores} of {os.cpu_count()}" + ("" if limit >= cores else f", {limit:.2g} by the limit of a container")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if limit < cores and not threads:
        yield find("cores", "warning", found, f"set OMP_NUM_THREADS={max(1, int(limit))}, or training.threads")
    elif threads.isdigit() and int(threads) > cores:
        yield find("cores", "warning", f"{found}; OMP_NUM_THREADS={threads} is more", f"set OMP_NUM_THREADS={cores}")
    else:
        yield find("cores", "ok", found)


def _memory() -> Findings:
    """Say how much memory is free, also under the limit of a container."""
    free, total, is_limited = machine_memory()
    found = f"{size(free)} free of {size(total)}" + (", the limit of a container" if is_limited else "")
    if free < LITTLE_MEMORY:
        remedy = "end other programs; see what a run takes with: wm profile --estimate"
        yield Finding("memory", "memory", "warning", found, remedy)
    else:
        yield Finding("memory", "memory", "ok", found)


def _programs() -> Findings:
    """Look for what some commands need besides Python packages."""
    find = partial(Finding, "programs")
    try:
        from wmcli.envs.atari import describe, games

        describe("Pong", "rem")
        yield find("ALE ROMs", "ok", f"{len(games())} games")
    except (ImportError, OSError, WmError) as error:
        yield find(
            "ALE ROMs",
            "warning",
            f"Atari games cannot be played: {error}",
            "install ale-py again: pip uninstall ale-py, then pip install ale-py",
        )
    try:
        import imageio_ffmpeg

        yield find("ffmpeg", "ok", imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        yield find("ffmpeg", "ok", "not there; MP4 needs it", "if you need it: pip install 'wmcli[video]'")
    try:
        yield find("browser", "ok", getattr(webbrowser.get(), "name", "") or "the system's")
    except webbrowser.Error:
        remedy = "open the address of --browser on another machine, through: ssh -L"
        yield find("browser", "ok", "none on this machine", remedy)


# -- the disk ---------------------------------------------------------------------------------------------------------


def _disk(folder: Path) -> Findings:
    """Look at the disk of a folder and try all that a run directory relies on."""
    find = partial(Finding, "disk")
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    state: State = "problem" if free < LEAST_DISK else "warning" if free < LITTLE_DISK else "ok"
    remedy = "" if state == "ok" else f"free some, for example with: wm clean {folder}"
    yield find("space", state, f"{size(free)} free at {place}", remedy)
    mount = mount_of(place)
    if mount is None:
        yield find("file system", "ok", "this system does not tell which")
    elif (trouble := trouble_between_machines(mount)) is not None:
        yield find("file system", "warning", f"{mount.kind}: {trouble}", "docs/compatibility.md, Network file systems")
    elif (passing := is_passing(mount)) is not None:
        yield find("file system", "warning", f"{mount.kind}: {passing}", "give --run a folder on a disk")
    else:
        yield find("file system", "ok", mount.kind)
    try:
        with probing(place) as probe:
            yield from _probes(probe)
    except OSError as error:
        yield find("probes", "warning", f"nothing can be written at {place}: {error.strerror}", "choose another --run")


def _probes(place: Path) -> Findings:
    find = partial(Finding, "disk")
    another = "put runs on another file system"
    for name, probe, bad, remedy in _PROBES:
        fault = fault_of(probe, place)
        yield find(name, bad if fault else "ok", fault or "as needed", remedy or another if fault else "")
    seconds = seconds_of_fsync(place)
    slow = seconds > SLOW_FSYNC
    remedy = f"checkpoints will be slow; {another}" if slow else ""
    yield find("fsync", "warning" if slow else "ok", f"{seconds * 1000:.1f} ms", remedy)
    ahead = seconds_ahead(place)
    if abs(ahead) > MOST_SKEW:
        found = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        yield find("clock", "warning", found, "synchronize both clocks (NTP); times in lists are wrong until then")
    else:
        yield find("clock", "ok", "that of the files is this machine's")


_PROBES: tuple[tuple[str, Callable[[Path], str | None], State, str], ...] = (
    ("locks", fault_of_locks, "problem", ""),
    ("renames", fault_of_renames, "problem", ""),
    ("folder fsync", fault_of_folder_sync, "problem", ""),
    ("symlinks", fault_of_symlinks, "warning", "all works without; only the links latest and best are missing"),
    ("case", fault_of_case, "warning", "give runs names that differ in more than case"),
)


# -- a run ------------------------------------------------------------------------------------------------------------


def _permissions(run: Run) -> Finding:
    """Find what this user cannot read or write."""
    places = [run.path]
    if os.access(run.path, os.R_OK | os.X_OK):
        places += (entry for entry in sorted(run.path.iterdir()) if not entry.name.startswith("."))
    hidden = [each.name for each in places if not os.access(each, os.R_OK | (os.X_OK if each.is_dir() else 0))]
    fixed = [each.name for each in places if not os.access(each, os.W_OK)]
    find = partial(Finding, "run", "permissions")
    if hidden:
        return find("problem", f"not readable: {', '.join(hidden)}", f"chmod -R u+rX {run}")
    if fixed:
        return find("warning", f"not writable, so it can be read alone: {', '.join(fixed)}", f"chmod -R u+w {run}")
    return find("ok", "can be read and written")


def _content(run: Run) -> Findings:
    """Open settings and manifests, without the files of any version."""
    faults = []
    for kind in KINDS:
        for version in run.versions(kind):
            try:
                run.get(kind, version)
            except WmError as error:
                faults.append(str(error))
    for fault in faults:
        yield Finding("run", "manifest", "problem", fault, f"wm verify --run {run}")
    try:
        outdated = is_outdated(plan_upgrade(run))
    except WmError as error:
        if str(error) not in faults:
            yield Finding("run", "schema", "problem", str(error))
    else:
        found = "of an earlier wm, read as it is" if outdated else "that of this wm"
        yield Finding(
            "run", "schema", "ok", found, f"if no earlier wm is to read it: wm upgrade {run}" if outdated else ""
        )


def _work(run: Run) -> Findings:
    """Say who works on the run, what can go on and what was left behind."""
    find = partial(Finding, "run")
    busy = [folder for folder in locked_folders(run.path) if is_locked(folder)]
    for folder in busy:
        yield find("lock", "ok", f"{folder.name} is being written by {describe_holder(folder)}")
    if not busy:
        yield find("lock", "ok", "no process of this machine works on it")
    for folder in run.unfinished():
        if folder.parent not in busy and has_checkpoint(folder):
            remedy = "the same command resumes it"
            yield find("stopped work", "ok", f"{folder.parent.name}/{folder.name} has a checkpoint", remedy)
    if left := leftovers(run):
        names = ", ".join(each.name for each in left)
        yield find("leftovers", "warning", f"of killed processes: {names}", f"wm clean {run}")


# -- files of the system ----------------------------------------------------------------------------------------------


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _first_line(file: Path) -> str | None:
    return next(iter(_lines(file)), None)
