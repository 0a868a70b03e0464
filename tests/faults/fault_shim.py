"""The preloaded library that makes system calls fail, and the control file that says which one."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("shim.c")
COMPILER = os.environ.get("CC", "cc")
KINDS = (
    *("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "symlink", "link", "mmap", "truncate", "flock"),
    "read",
)
"""As `enum kind` in shim.c. `open` is for writing, `read` is an open for reading, which `any` does not count."""
MARK = len(KINDS)
ANY, KILL = -1, -9
_HEAD = struct.Struct("=1024s1024siiqiiqq")
_COUNTS = struct.Struct(f"={len(KINDS)}q")
_RECORD = struct.Struct("=IIIIqQ")


def missing() -> str | None:
    """Return why calls cannot be made to fail here, or None if they can."""
    if sys.platform != "linux":
        return "system calls are preloaded on Linux only"
    return None if shutil.which(COMPILER) else f"no C compiler ({COMPILER})"


def built() -> Path:
    """Return the library, from the user's cache if it is there.

    Raises:
        RuntimeError: It cannot be compiled; the message is the compiler's.
    """
    key = hashlib.sha256(f"{COMPILER} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wm-tests"
    path = cache / f"faults-{key}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            made = Path(place) / path.name
            command = [COMPILER, "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(made), "-ldl", "-lpthread"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stderr}")
            made.rename(path)
    return path


class Call(NamedTuple):
    """A recorded call."""

    kind: str
    """Of KINDS, or "mark"."""
    path: str
    other: str
    """Target of a rename or a link; "truncate" of an open, "written" of a shared writable mapping."""
    offset: int
    data: bytes


class Control:
    """The control file of one command: what fails, and afterwards what was called.

    Args:
        path: The file, which is written anew.
        folder: Calls that concern paths in it are counted.
        kind: Of KINDS, or "any".
        at: Number of the call that fails, from 1.
        action: Its errno, or KILL; 0 only counts.
        lasting: Later calls of the kind fail as well.
        recording: Keep every call in a log beside the file.
    """

    def __init__(
        self,
        path: Path,
        folder: Path,
        *,
        kind: str = "any",
        at: int = 0,
        action: int = 0,
        lasting: bool = False,
        recording: bool = False,
    ) -> None:
        self.path, self.log = path, path.with_name(f"{path.name}.log")
        number = ANY if kind == "any" else KINDS.index(kind)
        head = _HEAD.pack(str(folder).encode(), b"", number, action, at, lasting, recording, 0, 0)
        self.log.unlink(missing_ok=True)
        path.write_bytes(head + bytes(_COUNTS.size))

    @property
    def counts(self) -> dict[str, int]:
        """Calls by kind."""
        return dict(zip(KINDS, _COUNTS.unpack_from(self.path.read_bytes(), _HEAD.size), strict=True))

    @property
    def total(self) -> int:
        """Calls of all kinds that `any` counts."""
        return int(_HEAD.unpack_from(self.path.read_bytes())[-1])

    @property
    def hit(self) -> str | None:
        """The path of the call that failed; None if none was reached."""
        values = _HEAD.unpack_from(self.path.read_bytes())
        return values[1].rstrip(b"\0").decode() if values[-2] else None

    def calls(self) -> Iterator[Call]:
        """Yield the recorded calls in their order."""
        data, place = self.log.read_bytes(), 0
        while place < len(data):
            kind, path, other, _, offset, size = _RECORD.unpack_from(data, place)
            place += _RECORD.size
            parts = []
            for length in (path, other, size):
                parts.append(data[place : place + length])
                place += length
            name = "mark" if kind == MARK else KINDS[kind]
            yield Call(name, parts[0].decode(), parts[1].decode(), offset, parts[2])
