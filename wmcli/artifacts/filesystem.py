"""What the file system of a folder can do: its kind, and probes of all that a run directory relies on.

Probes work in a temporary folder beside or inside the run, and remove it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from wmcli.artifacts.files import sync_folder

PROBE = ".doctor-"
"""Prefix of the temporary folders of probes."""
MOUNTS = Path("/proc/self/mountinfo")
WRITES = 8  # that `seconds_of_fsync` measures


class Mount(NamedTuple):
    """A mounted file system."""

    kind: str
    """As in /proc: `ext4`, `nfs4`, `fuse.sshfs`."""
    options: frozenset[str]


def mount_of(path: Path) -> Mount | None:
    """Return the file system that holds a path; None where the system does not tell."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    here, found, depth = path.resolve(), None, -1
    for line in lines:
        words, _, behind = line.partition(" - ")
        fields, (kind, _, options) = words.split(), behind.split(" ", 2)
        place = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))  # a space is \040
        if here.is_relative_to(place) and len(place.parts) >= depth:  # of mounts at one place the last one counts
            found, depth = Mount(kind, frozenset(f"{fields[5]},{options}".split(","))), len(place.parts)
    return found


def trouble_between_machines(mount: Mount) -> str | None:
    """Return why several machines cannot safely write a run on this file system; None if nothing is known against it.

    A file system of one machine has no other machines, so nothing is against it.
    """
    kind, options = mount
    local = next((each for each in options if each in ("nolock", "local_lock=flock", "local_lock=all")), None)
    if kind in ("nfs", "nfs4") and local is not None:
        return f"mounted with {local}, so locks hold on this machine only; mount it without."
    if kind in ("cifs", "smb3") and "nobrl" in options:
        return "mounted with nobrl, so locks hold on this machine only; mount it without."
    if kind == "lustre" and "flock" not in options:
        return "mounted without flock, so locks hold on this machine only, or nowhere; mount it with flock."
    if kind == "fuse.sshfs":
        return "sshfs keeps locks on this machine and lists folders from memory; let one machine write a run."
    if kind in ("9p", "virtiofs"):
        return f"{kind} may keep locks inside this machine; let one machine write a run."
    if kind.startswith("fuse.") and kind not in ("fuse.ceph", "fuse.glusterfs", "fuse.juicefs"):
        return f"{kind} is not known to share locks or to rename in one step; let one machine write a run."
    return None


def is_passing(mount: Mount) -> str | None:
    """Return why the files of this file system will not last; None if they will."""
    if mount.kind in ("tmpfs", "ramfs"):
        return "in memory: gone when the machine restarts."
    if mount.kind == "overlay":
        return "in the layer of a container: gone with it, unless a volume is mounted."
    return None


@contextmanager
def probing(folder: Path) -> Iterator[Path]:
    """Make a temporary folder for probes inside `folder`, and remove it. Raises OSError."""
    place = Path(tempfile.mkdtemp(prefix=PROBE, dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def seconds_of_fsync(place: Path) -> float:
    """Return the median time to force a small new file to the disk. Raises OSError."""
    seconds = []
    for number in range(WRITES):
        with (place / f"write-{number}").open("wb") as file:
            file.write(b"wm" * 2048)
            began = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return sorted(seconds)[WRITES // 2]


def seconds_ahead(place: Path) -> float:
    """Return by how much the clock of the file system is ahead of this machine's. Raises OSError."""
    before = time.time()
    (place / "clock").touch()
    stamp = (place / "clock").stat().st_mtime
    return stamp - time.time() if stamp > before else min(0.0, stamp - before)


def fault_of_locks(place: Path) -> str | None:
    """Return what is wrong with locks."""
    (place / "lock").touch()
    with (place / "lock").open("r+") as first, (place / "lock").open("r+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"cannot be taken: {error.strerror}"
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return "two holders at once"


def fault_of_renames(place: Path) -> str | None:
    """Return what is wrong with renames, by which versions appear and files are replaced."""
    (place / "new").write_bytes(b"new")
    (place / "old").write_bytes(b"old")
    (place / "new").replace(place / "old")
    if (place / "old").read_bytes() != b"new":
        return "a file does not replace another one"
    for name in ("draft", "taken"):
        (place / name).mkdir()
        (place / name / "file").touch()
    (place / "draft").rename(place / "free")
    try:
        (place / "free").rename(place / "taken")
    except OSError:
        return None
    return "a folder replaces another one that is in use"


def fault_of_folder_sync(place: Path) -> str | None:
    """Return why new names in a folder are not forced to the disk."""
    sync_folder(place)
    return None


def fault_of_symlinks(place: Path) -> str | None:
    """Return what is wrong with symlinks."""
    (place / "link").symlink_to("target")
    return None if (place / "link").readlink() == Path("target") else "a link has another target"


def fault_of_case(place: Path) -> str | None:
    """Return whether names that differ in case are one."""
    (place / "case").touch()
    return "names that differ in case are one file" if (place / "CASE").exists() else None


def fault_of(probe: Callable[[Path], str | None], place: Path) -> str | None:
    """Return the fault that a probe finds, or the error that ends it."""
    try:
        return probe(place)
    except OSError as error:
        return error.strerror or str(error)
