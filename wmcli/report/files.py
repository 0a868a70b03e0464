"""Write a file completely or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

from wmcli.errors import MachineError, UsageError

_LIMITS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE}
_MANIFEST = "manifest.json"  # wmcli.artifacts.manifest, which this layer does not import
_MANIFEST_KEYS = {"kind", "version", "job", "files", "digest"}


def check_target(path: Path, suffixes: Collection[str] = ()) -> None:
    """Check that a file can be written, before the work.

    Args:
        path: The file.
        suffixes: Possible suffixes in lower case, such as ".png"; all by default.

    Raises:
        UsageError: The suffix is another one, the folder is missing or not writable, the path is a folder, or the file
            lies inside an artifact (symbolic links are followed).
    """
    if suffixes and path.suffix.lower() not in suffixes:
        allowed = " or ".join(suffixes)
        raise UsageError(f"cannot write {path}: its name must end in {allowed}, not '{path.suffix}'.")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}; create it first.")
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; name a file in it.")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: the folder {path.parent} is not writable.")
    artifact = _artifact_around(path)
    if artifact is not None:
        raise UsageError(
            f"cannot write {path}: it lies inside the artifact {artifact}, which never changes; choose another place."
        )


def _artifact_around(path: Path) -> Path | None:
    """Return the folder of the artifact that holds `path` or the file that it links to."""
    for place in (path.parent.resolve() / path.name, path.resolve()):
        for folder in place.parents:
            if _holds_manifest(folder):
                return folder
    return None


def _holds_manifest(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.keys() >= _MANIFEST_KEYS


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a hidden file beside `path`, then rename that file to `path`.

    Raises:
        UsageError: See `check_target`.
        MachineError: The disk is full or failing, or too many files are open.
    """
    check_target(path)
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(draft)
        draft.replace(path)
    except OSError as error:
        kind = MachineError if error.errno in _LIMITS else UsageError
        raise kind(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
