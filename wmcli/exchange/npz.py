"""Folders of npz files, read and written.

A file has one of three layouts; docs/data.md has their keys:

- wm's: `observation` or `observation.NAME`, `action`, `reward`, `terminated`, `truncated`; outcomes follow actions.
- Dreamer's replay: a row for each observation with `is_first`, `is_last`, `is_terminal`. The reward led to it.
- Memory Maze's: a row for each observation with `action` and `reward` that led to it.

Rows of Dreamer's chunk files continue in the file that their names say.
"""

from __future__ import annotations

import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from wmcli.exchange.convert import Raw, Stated, check_spaces, spaces_entry, split_at
from wmcli.exchange.episode import Episode, Recording
from wmcli.exchange.safe import MAX_ARRAY, check_size, damage, files_in, read_json, refuse
from wmcli.spaces import SEPARATOR, column_names

DESCRIPTION = "recording.json"
FORMAT = {"format": "wm-recording", "schema": 1}
COLUMNS = ("action", "reward", "terminated", "truncated")
MOST_MEMBERS = 1000
CHUNK = re.compile(r"[0-9TF]+-([0-9A-Za-z]{1,32})-([0-9A-Za-z]{1,32})-[0-9]+")
DREAMER_FLAGS = ("is_first", "is_last", "is_terminal")
MAZE_FLAGS = ("reset", "terminal", "maze_layout")
NOT_SEEN = {*COLUMNS, *DREAMER_FLAGS, *MAZE_FLAGS, "discount", "stepid", "consec", "seed", "episode", "logprob"}
"""Keys of Dreamer's files that are no observations. Those with a slash are none either."""
Actions = Literal["after", "before"]

_DAMAGE = (zipfile.BadZipFile, zlib.error, NotImplementedError, tokenize.TokenError)  # NumPy tokenizes headers


class Piece(NamedTuple):
    """Rows of a file that belong to one episode."""

    path: Path
    start: int
    stop: int


class Npz:
    """A reader of one npz file or a folder of them.

    Args:
        path: The file or folder.
        actions: Whether `action` of a row in Dreamer's layout was taken after or before its observation. None:
            after it in the chunk files of DreamerV3, before it in files with `discount`, else as its zeros say.
    """

    format = "npz"
    lossy: str | None = None

    def __init__(self, path: Path, actions: Actions | None = None) -> None:
        self.path, self.name = path, path.stem if path.is_file() else path.resolve().name
        self.notes: list[str] = []
        self.source: dict[str, Any] = {}
        self.stated = Stated()
        files = [path] if path.is_file() else files_in(path, ".npz")
        if not files:
            raise refuse(path, "no npz files in this folder")
        description = path / DESCRIPTION
        if path.is_dir() and description.exists():
            self._describe(description)
        headers = {file: headers_of(file) for file in files}
        layouts = {_layout(file, keys) for file, keys in headers.items()}
        if len(layouts) > 1:
            raise refuse(path, "its files have different layouts, see docs/data.md")
        self.layout = layouts.pop()
        self._actions = self._alignment(headers, actions)
        find = self._find_ours if self.layout == "wm" else self._find_rows
        self._episodes = find(headers)
        if not self._episodes:
            raise refuse(path, "no episode with an action in it")

    def __len__(self) -> int:
        return len(self._episodes)

    def where(self, index: int) -> str:
        pieces = self._episodes[index]
        return f"{pieces[0].path} rows {pieces[0].start} to {pieces[-1].stop - 1}"

    def read(self, index: int) -> Raw:
        pieces = self._episodes[index]
        if self.layout == "wm":
            return self._read_ours(pieces[0])
        keys = headers_of(pieces[0].path)
        seen = [key for key in keys if key not in NOT_SEEN and "/" not in key and keys[key].shape]
        if self.layout == "maze":
            seen = ["image"]
        flags = [key for key in ("is_last", "is_terminal", "terminal") if key in keys]
        rows = _rows(pieces, [*seen, "action", "reward", *flags])
        time = len(rows["action"]) - 1
        last = np.arange(time) == time - 1
        for key in flags:
            if rows[key].shape != (time + 1,) or rows[key][:-1].any():
                raise refuse(self.where(index), f"{key} is set in the middle of an episode, or has other rows")
        ended = last & bool(rows[flags[-1]][-1] if flags and flags[-1] != "is_last" else False)
        return Raw(
            {key: rows[key] for key in seen}, self._aligned(rows["action"]), rows["reward"][1:], ended, last & ~ended
        )

    def action(self, index: int) -> np.ndarray:
        pieces = self._episodes[index]
        action = _rows(pieces, ["action"])["action"]
        return action if self.layout == "wm" else self._aligned(action)

    def _describe(self, path: Path) -> None:
        values = read_json(path)
        if {key: values.get(key) for key in FORMAT} != FORMAT:
            raise refuse(path, f"not written as {FORMAT}")
        self.stated = Stated(spaces=check_spaces(str(path), values.get("spaces")))
        self.name = str(values.get("name", self.name))
        if isinstance(values.get("source"), dict):
            self.source = values["source"]

    # -- wm's layout ---------------------------------------------------------------------------------------------------

    def _find_ours(self, headers: dict[Path, dict[str, Header]]) -> list[list[Piece]]:
        episodes = []
        for path, keys in headers.items():
            time, seen = keys["action"].shape[0], [keys[key].shape[0] for key in keys if _is_seen(key)]
            if set(seen) == {time}:
                flags = [key for key in ("terminated", "truncated") if key in keys]
                columns = read_arrays(path, flags, keys)
                ended = np.zeros(time, bool)
                for key in flags:
                    if columns[key].shape != (time,):
                        raise refuse(path, f"{key} is {columns[key].shape}, not ({time},)")
                    ended |= columns[key] != 0
                episodes += [[Piece(path, start, stop)] for start, stop in split_at(ended)] if time else []
            else:
                episodes.append([Piece(path, 0, time)])  # `convert` checks the lengths
        return episodes

    def _read_ours(self, piece: Piece) -> Raw:
        keys = headers_of(piece.path)
        arrays = read_arrays(piece.path, [key for key in keys if _is_seen(key) or key in COLUMNS], keys)
        time = len(arrays["action"])
        whole = (piece.start, piece.stop) == (0, time)
        seen = {_part_name(key): array for key, array in arrays.items() if _is_seen(key)}
        if not whole:
            seen = {name: array[piece.start : piece.stop] for name, array in seen.items()}
        rows = slice(piece.start, piece.stop)
        reward, terminated, truncated = (arrays.get(key, np.zeros(time, bool)) for key in COLUMNS[1:])
        for key, array in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if len(array) != time:
                raise refuse(piece.path, f"{key} has {len(array)} rows, but action {time}")
        return Raw(seen, arrays["action"][rows], reward[rows], terminated[rows], truncated[rows])

    # -- a row for each observation ------------------------------------------------------------------------------------

    def _find_rows(self, headers: dict[Path, dict[str, Header]]) -> list[list[Piece]]:
        episodes, begun = [], 0
        for stream in _streams(list(headers)):
            running: list[Piece] = []
            for path in stream:
                keys = headers[path]
                rows = keys["action"].shape[0]
                key = "is_first" if self.layout == "dreamer" else "reset"
                opens = read_arrays(path, [key], keys)[key] if key in keys else np.arange(rows) == 0
                if opens.shape != (rows,):
                    raise refuse(path, f"{key} is {opens.shape}, not ({rows},)")
                places = np.flatnonzero(opens).tolist()
                if not running and rows and (not places or places[0]):
                    places, begun = [0, *places], begun + 1
                if places and places[0]:
                    running.append(Piece(path, 0, places[0]))
                for start, stop in zip(places, [*places[1:], rows], strict=True):
                    episodes += [running] if running else []
                    running = [Piece(path, start, stop)]
                if not places and rows:
                    running.append(Piece(path, 0, rows))
            episodes += [running] if running else []
        lengths = [sum(piece.stop - piece.start for piece in pieces) for pieces in episodes]
        if begun:
            self.notes.append(f"{begun} episodes begin in their middle, where the replay had dropped their beginning")
        if short := sum(length < 2 for length in lengths):
            self.notes.append(f"{short} episodes have a single observation and are left out")
        return [pieces for pieces, length in zip(episodes, lengths, strict=True) if length > 1]

    def _alignment(self, headers: Mapping[Path, Mapping[str, Header]], actions: Actions | None) -> Actions:
        """Return whether a row's action was taken after or before its observation."""
        if self.layout == "wm" or actions is not None:
            return actions or "after"
        if self.layout == "maze":
            return "before"
        path, keys = next(iter(headers.items()))
        if CHUNK.fullmatch(path.stem) or {"stepid", "consec"} & set(keys):
            return "after"
        if "discount" in keys:
            return "before"
        action = read_arrays(path, ["action"], keys)["action"]
        first, last = (bool(np.any(row)) for row in (action[:1], action[-1:]))
        guess: Actions = "before" if last and not first else "after"
        self.notes.append(f"actions are taken {guess} the observation of their row; to say otherwise: --actions")
        return guess

    def _aligned(self, action: np.ndarray) -> np.ndarray:
        """Return the actions after the observations 0 to T - 1, of those in T + 1 rows."""
        return action[:-1] if self._actions == "after" else action[1:]


def _layout(path: Path, keys: Mapping[str, Any]) -> Literal["wm", "dreamer", "maze"]:
    missing = [key for key in ("action", "reward") if key not in keys]
    if missing:
        raise refuse(path, f"no {' and no '.join(missing)} in it, but {', '.join(sorted(keys))[:120]}")
    if scalars := [key for key in keys if not keys[key].shape and (key in COLUMNS or _is_seen(key))]:
        raise refuse(path, f"{scalars[0]} is a single number")
    if any(flag in keys for flag in DREAMER_FLAGS):
        if "is_first" not in keys:
            raise refuse(path, "no is_first in it")
        return "dreamer"
    if any(_is_seen(key) for key in keys) and not any(flag in keys for flag in MAZE_FLAGS):
        return "wm"
    if "image" not in keys:
        raise refuse(path, "no observation, no observation.NAME and no image in it")
    return "maze"


def _is_seen(key: str) -> bool:
    """Whether a key of wm's layout is an observation."""
    return key in ("observation", "image") or key.startswith(f"observation{SEPARATOR}")


def _part_name(key: str) -> str:
    return "" if key == "observation" else key.removeprefix(f"observation{SEPARATOR}")


def _streams(files: list[Path]) -> list[list[Path]]:
    """Return the files of each stream in order: those that name one another, every other one alone."""
    names = {path: CHUNK.fullmatch(path.stem) for path in files}
    follows = {path: match[2] for path, match in names.items() if match}
    by_name = {match[1]: path for path, match in names.items() if match}
    later = {by_name[after] for after in follows.values() if after in by_name}
    streams, seen = [], set()
    for path in [*(path for path in files if path not in later), *files]:  # a circle has no first one
        stream: list[Path] = []
        at: Path | None = path
        while at is not None and at not in seen:
            seen.add(at)
            stream.append(at)
            at = by_name.get(follows.get(at, ""))
        streams += [stream] if stream else []
    return streams


def _rows(pieces: list[Piece], keys: list[str]) -> dict[str, np.ndarray]:
    """Return the rows of an episode, from all its files."""
    parts = []
    for piece in pieces:
        headers = headers_of(piece.path)
        if missing := [key for key in keys if key not in headers]:
            raise refuse(piece.path, f"no {missing[0]} in it, as its first file has")
        arrays = read_arrays(piece.path, keys, headers)
        total = headers["action"].shape[0]
        for key, array in arrays.items():
            if len(array) != total:
                raise refuse(piece.path, f"{key} has {len(array)} rows, but action {total}")
        parts.append({key: array[piece.start : piece.stop] for key, array in arrays.items()})
    if len({tuple((part[key].dtype, part[key].shape[1:]) for key in keys) for part in parts}) > 1:
        raise refuse(pieces[0].path, "the file that continues it has arrays of other shapes")
    return {key: np.concatenate([part[key] for part in parts]) for key in keys}


# -- files -------------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """What an array in an npz file will be."""

    shape: tuple[int, ...]
    dtype: np.dtype


def headers_of(path: Path) -> dict[str, Header]:
    """Read the shapes of all arrays in an npz file. Raises UsageError if it is damaged or unpacks to too much."""
    with damage(path, *_DAMAGE), ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        members = archive.infolist()
        if len(members) > MOST_MEMBERS:
            raise refuse(path, f"{len(members)} arrays, more than {MOST_MEMBERS}")
        if sum(member.file_size for member in members) > MAX_ARRAY:
            raise refuse(path, f"unpacks to more than {MAX_ARRAY} bytes: cut it into shorter episodes")
        return {member.filename.removesuffix(".npy"): _header(path, archive, member) for member in members}


def _header(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Header:
    where = f"{path}: {member.filename[:80]!r}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or not member.filename.endswith(".npy"):
        raise refuse(where, "not written by numpy.savez")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise refuse(where, f"version {version} of the npy format")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        begin = file.tell()
    check_size(where, shape, dtype, member.compress_size)
    if math.prod(shape) * dtype.itemsize != member.file_size - begin:
        raise refuse(where, f"{member.file_size - begin} bytes for shape {shape}")
    return Header(shape, dtype)


def read_arrays(path: Path, keys: Iterable[str], headers: Mapping[str, Header]) -> dict[str, np.ndarray]:
    """Read arrays of a file whose headers were checked."""
    with damage(path, *_DAMAGE), zipfile.ZipFile(path) as archive:
        arrays = {}
        for key in keys:
            with archive.open(f"{key}.npy") as file:
                arrays[key] = np.lib.format.read_array(file, allow_pickle=False)
            if (arrays[key].shape, arrays[key].dtype) != headers[key]:
                raise refuse(path, f"{key} has changed meanwhile")
        return arrays


def write_npz(recording: Recording, folder: Path) -> None:
    """Write a recording as a folder of npz files, one an episode, that reads back as the same bits."""
    import json

    about = {
        **FORMAT,
        "name": recording.name,
        "spaces": spaces_entry(recording.spaces),
        "source": recording.source,
        "episodes": len(recording),
    }
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    for index, episode in enumerate(recording):
        with (folder / f"episode-{index:07d}.npz").open("wb") as file:
            _write_arrays(file, columns_of(episode))


def columns_of(episode: Episode) -> dict[str, np.ndarray]:
    """Return the arrays of an episode by their names in files."""
    return column_names("observation", episode.observation) | {name: getattr(episode, name) for name in COLUMNS}


def _write_arrays(file: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an npz file at zlib's level 1: numpy's own level 6 takes five times as long for a tenth of the size."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # its fixed date makes equal files of equal data
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
