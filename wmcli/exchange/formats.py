"""The formats: which one a path has, its reader, its writer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from wmcli.errors import UsageError
from wmcli.exchange import hdf5, lerobot, minari, npz, video, zarr_folder
from wmcli.exchange.convert import Reader, recording_of
from wmcli.exchange.episode import Recording
from wmcli.exchange.safe import refuse
from wmcli.spaces import Spaces

Format = Literal["npz", "hdf5", "zarr", "mp4", "minari", "lerobot"]
WritableFormat = Literal["npz", "minari", "lerobot"]
BLOCK = 1 << 20


def open_recording(
    source: str,
    *,
    form: Format | None = None,
    size: int | None = None,
    parts: Sequence[str] = (),
    spaces: Spaces | None = None,
    actions: npz.Actions | None = None,
) -> Recording:
    """Open recorded episodes. No episode is in memory until it is read.

    Args:
        source: A file, a folder, or `minari:ID`.
        form: Its format; None: what it looks like.
        size: Height and width that images are resized to, as environments do; None leaves them.
        parts: Names of the parts of the observation to read; all if empty.
        spaces: Those of an environment that the episodes must fit.
        actions: Of npz files in Dreamer's layout, see `Npz`.

    Raises:
        UsageError: There is nothing there, it has another format, it is damaged, or it does not fit.
    """
    reader = _reader(*located(source, form), actions)
    return recording_of(reader, size=size, parts=parts, spaces=spaces)


def located(source: str, form: Format | None = None) -> tuple[Path, Format]:
    """Return the path of a source and its format. Raises UsageError if there is none, or it cannot be told."""
    if source.startswith(minari.PREFIX):
        return minari.folder_of(source), "minari"
    path = Path(source).expanduser()
    if not path.exists():
        raise refuse(source, "no such file or folder")
    looks = _looks_like(path)
    if form is None and looks is None:
        raise refuse(source, f"none of {', '.join(get_args(Format))}; see docs/data.md, or name it with --from")
    return path, form or looks  # type: ignore[return-value]


def digest_of_files(path: Path) -> str:
    """Return the sha256 of all files in a source, with their names. Hidden files do not count."""
    if path.is_file():
        files = {path.name: path}
    else:
        walk = sorted(Path(folder) / name for folder, _, names in os.walk(path) for name in names)
        files = {each.relative_to(path).as_posix(): each for each in walk}
        files = {
            name: each for name, each in files.items() if not any(step.startswith(".") for step in name.split("/"))
        }
    sha256 = hashlib.sha256()
    for name, each in files.items():
        if not each.is_file():
            raise refuse(each, "is no regular file")
        sha256.update(f"{name}\n{each.stat().st_size}\n".encode())
        with each.open("rb") as file:
            while block := file.read(BLOCK):
                sha256.update(block)
    return sha256.hexdigest()


def write_recording(recording: Recording, form: WritableFormat, folder: Path, *, lossy: bool = False) -> None:
    """Write a recording as a new folder, in which it reads back as the same bits.

    Args:
        recording: The episodes.
        form: The format.
        folder: It must not exist or be empty.
        lossy: Write images as videos (LeRobot).

    Raises:
        UsageError: The folder is not empty, or the format has no such option.
    """
    if lossy and form != "lerobot":
        raise UsageError(f"--lossy is for --to lerobot; {form} is always exact.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise refuse(folder, "exists and is not empty; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    if form == "lerobot":
        lerobot.write_lerobot(recording, folder, lossy=lossy)
    elif form == "minari":
        minari.write_minari(recording, folder)
    else:
        npz.write_npz(recording, folder)


def _looks_like(path: Path) -> Format | None:
    if path.is_file():
        return "hdf5" if path.suffix.lower() in hdf5.SUFFIXES else "npz" if path.suffix.lower() == ".npz" else None
    if (path / lerobot.INFO).exists():
        return "lerobot"
    if (path / minari.METADATA).exists() or (path / minari.MAIN).exists():
        return "minari"
    if (path / zarr_folder.METADATA).exists():
        return "zarr"
    if (path / video.TABLE).exists():
        return "mp4"
    suffixes = {each.suffix.lower() for each in path.iterdir()} if path.is_dir() else set()
    return "npz" if ".npz" in suffixes else "hdf5" if suffixes & set(hdf5.SUFFIXES) else None


def _reader(path: Path, form: Format, actions: npz.Actions | None) -> Reader:
    if form == "npz":
        return npz.Npz(path, actions)
    if form != "hdf5" and not path.is_dir():
        raise refuse(path, f"is a file, but {form} is a folder")
    if form == "zarr":
        return zarr_folder.Segment([path]) if zarr_folder.is_segment(path) else zarr_folder.Zarr(path)
    readers: dict[str, Callable[[Path], Reader]] = {
        "hdf5": hdf5.Hdf5,
        "mp4": video.Video,
        "minari": minari.Minari,
        "lerobot": lerobot.LeRobot,
    }
    return readers[form](path)
