"""Reading of files that others wrote: every size is checked before memory is taken, every path before it is opened."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from wmcli.errors import UsageError

MAX_ARRAY = 4 << 30
"""Bytes of one array of one episode in memory."""
MAX_UNPACKED = 256 << 20
"""Bytes that may come out of compression at any ratio."""
MAX_RATIO = 100
"""Of unpacked to stored bytes above that."""
MAX_CHUNK = 1 << 30
"""Bytes of a chunk in memory."""
MAX_JSON = 64 << 20
MAX_EPISODES = 10_000_000


def refuse(where: Path | str, problem: object) -> UsageError:
    """Return the error of one line for data that cannot be used."""
    return UsageError(f"{where}: {' '.join(str(problem).split())[:300]}.")


_DAMAGE: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, MemoryError)


@contextmanager
def damage(where: Path | str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a library that reads `where` into a UsageError of one line."""
    try:
        yield
    except UsageError:
        raise
    except (*_DAMAGE, *errors) as error:
        raise refuse(where, f"cannot be read: {error or type(error).__name__}") from error


def inside(folder: Path, relative: str) -> Path:
    """Return the path of a file that data in a folder names.

    Raises:
        UsageError: The name is absolute, leads out of the folder, or there is no such file.
    """
    if not relative or not relative.isprintable() or "\\" in relative or Path(relative).is_absolute():
        raise refuse(folder, f"{relative[:80]!r} is no path inside this folder")
    return regular(folder, folder / relative)


def regular(folder: Path, path: Path) -> Path:
    """Return the path of a file in a folder. Raises UsageError if it is none, or lies outside of the folder."""
    if ".." in path.relative_to(folder).parts:
        raise refuse(folder, f"{str(path.relative_to(folder))[:80]!r} leads out of this folder")
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise refuse(path, getattr(error, "strerror", None) or error) from None
    if not real.is_relative_to(folder.resolve()):
        raise refuse(path, "is a link that leads out of its folder; put the file itself there")
    if not real.is_file():
        raise refuse(path, "is no regular file")
    return path


def files_in(folder: Path, *suffixes: str) -> list[Path]:
    """Return the files of a folder with one of the suffixes, sorted by name. Raises UsageError, see `regular`."""
    return [regular(folder, path) for path in sorted(folder.iterdir()) if path.suffix.lower() in suffixes]


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """Read a JSON object. Raises UsageError if it is none, too large or too deep."""
    try:
        if path.stat().st_size > limit:
            raise refuse(path, f"larger than {limit} bytes")
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise refuse(path, "is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise refuse(path, f"no valid JSON: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(value, dict):
        raise refuse(path, "no JSON object")
    return value


def check_size(
    where: Path | str, shape: Sequence[int], dtype: np.dtype, stored: int | None = None, limit: int = MAX_ARRAY
) -> None:
    """Check an array before it is read.

    Args:
        where: For messages.
        shape: Its shape.
        dtype: Its number type.
        stored: Bytes that it takes up on disk, where it is compressed.
        limit: Bytes that it may have.

    Raises:
        UsageError: It has no numbers, or more of them than fit in memory or in so few bytes.
    """
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise refuse(where, f"holds {dtype}, not plain numbers")
    size = math.prod(int(each) for each in shape) * dtype.itemsize
    if size > limit:
        raise refuse(where, f"shape {_short(shape)} takes {size:.3g} bytes, more than {limit}: cut it into episodes")
    if stored is not None and size > MAX_UNPACKED and size > MAX_RATIO * stored:
        raise refuse(where, f"{stored} bytes would unpack to {size}: cut it into shorter episodes")


def _short(shape: Sequence[int]) -> str:
    return f"({', '.join(str(each)[:20] for each in shape[:8])})"


def load_library(name: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional library. Raises UsageError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{purpose} needs {name.partition('.')[0]}: pip install 'wmcli[{extra}]'") from None
