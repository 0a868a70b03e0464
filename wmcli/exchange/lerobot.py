"""LeRobot datasets of version 3, read and written, without the lerobot package.

`meta/info.json` describes the columns; `meta/episodes/**.parquet` says which rows of which `data/**.parquet` and which
part of which video make an episode. Row t has `observation.*`, `action` and `next.reward`, `next.done` of that action.
Images are PNG files inside the table, or MP4 videos, which are lossy.

The layout has no closing observation. Ours lie in `wm/closing.parquet`, which LeRobot does not read.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as Picture

from wmcli.exchange.convert import Raw, Stated, check_spaces, spaces_entry
from wmcli.exchange.episode import Episode, Recording
from wmcli.exchange.minari import decoded
from wmcli.exchange.safe import (
    MAX_ARRAY,
    MAX_RATIO,
    MAX_UNPACKED,
    damage,
    inside,
    load_library,
    read_json,
    refuse,
    regular,
)
from wmcli.exchange.video import LOSSY, decode, encode
from wmcli.spaces import Categories, Image, ObservationSpace, PartSpace, Vector, images_of, parts_of

INFO, EPISODES, TASKS, STATS = "meta/info.json", "meta/episodes", "meta/tasks.parquet", "meta/stats.json"
CLOSING = "wm/closing.parquet"
VERSION = "v3.0"
OURS = "wm"
"""Key of info.json for what only wm reads."""
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH, VIDEO_PATH = f"data/{FILE}.parquet", f"videos/{{video_key}}/{FILE}.mp4"
CHUNK = 1000  # files in a folder
FILE_BYTES = 100 << 20  # about, of a file of rows
FPS = 10  # of what we write, since wm has no clock
REWARD = ("next.reward", "reward")
TASK = "task"


class Place(NamedTuple):
    """Where an episode lies."""

    number: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, float]]
    """By feature: file, and the time of the first frame in seconds."""


class LeRobot:
    """A reader of the folder of one dataset."""

    format = "lerobot"

    def __init__(self, path: Path) -> None:
        self.path, where = path, str(path / INFO)
        info = read_json(inside(path, INFO))
        version = str(info.get("codebase_version", ""))[:20]
        if not re.fullmatch(r"v3(\.[0-9]+)?", version):
            raise refuse(where, f"codebase_version {version!r}; only v3 is read: convert it with lerobot's own script")
        self.name = path.resolve().name
        self.notes: list[str] = []
        self.source = {key: info[key] for key in ("robot_type", "fps") if info.get(key)} | _license(path)
        self._features = _features(info, where)
        self._seen = [name for name in self._features if _is_seen(name)]
        if "action" not in self._features or not self._seen:
            raise refuse(where, "needs the features action and observation or observation.NAME")
        self._reward = next((name for name in REWARD if name in self._features), None)
        if self._reward is None:
            self.notes.append("without next.reward, all rewards are 0")
        self._videos = [name for name in self._seen if self._features[name].dtype == "video"]
        self.lossy: str | None = LOSSY if self._videos else None
        self.stated = Stated({_part_name(name): space for name in self._seen if (space := self._space(name))})
        if isinstance(ours := info.get(OURS), dict):
            self.stated = Stated(spaces=check_spaces(where, ours.get("spaces")))
            self.source = ours["source"] if isinstance(ours.get("source"), dict) else {}
            self.name = str(ours.get("name", self.name))
        self._episodes = list(self._find(info))
        if not self._episodes:
            raise refuse(path, "no episodes in it")
        self._table: tuple[Path | None, Any] = (None, None)
        self._closing = self._find_closing()

    def __len__(self) -> int:
        return len(self._episodes)

    def where(self, index: int) -> str:
        return f"{self.path} episode {self._episodes[index].number}"

    def read(self, index: int) -> Raw:
        place, where = self._episodes[index], self.where(index)
        table = self._rows(place)
        seen = {}
        for name in self._seen:
            if name in place.videos:
                file, start = place.videos[name]
                seen[_part_name(name)] = decode(file, most=place.length, start=start)
            else:
                seen[_part_name(name)] = self._column(table, name, where)
        if (closing := self._closing.get(place.number)) is not None:
            for name in self._seen:
                row = self._column(closing, name, where)
                seen[_part_name(name)] = np.concatenate([seen[_part_name(name)], row])
        time = place.length
        reward = self._column(table, self._reward, where).reshape(time) if self._reward else np.zeros(time)
        return Raw(seen, self._column(table, "action", where), reward, *self._ends(table, time, where))

    def action(self, index: int) -> np.ndarray:
        return self._column(self._rows(self._episodes[index]), "action", self.where(index))

    def _ends(self, table: Any, time: int, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return `terminated` and `truncated` (T,). `next.done` ends the task, unless `next.success` denies it."""
        flags = {
            name: self._column(table, f"next.{name}", where).reshape(time).astype(bool)
            for name in ("terminated", "truncated", "done", "success")
            if f"next.{name}" in self._features
        }
        if "terminated" in flags and "truncated" in flags:
            return flags["terminated"], flags["truncated"]
        last = np.arange(time) == time - 1
        done = flags.get("done", last & False) & last
        success = flags.get("success", last)
        return done & success, done & ~success

    def _space(self, name: str) -> PartSpace | None:
        """Return the space of a feature; None where the data say it."""
        feature = self._features[name]
        if feature.dtype in ("image", "video"):
            return Image(*feature.shape)
        return Vector(math.prod(feature.shape)) if feature.dtype.startswith("float") else None

    def _column(self, table: Any, name: str, where: str) -> np.ndarray:
        """Return a column of some rows as an array (n, *shape)."""
        feature, place = self._features[name], f"{where}: {name}"
        if name not in table.column_names:
            raise refuse(place, "is missing in its data")
        with damage(place):
            column = table.column(name).combine_chunks()
        if feature.dtype == "image":
            return self._images(column, feature.shape, place)
        rows = len(column)
        with damage(place):
            if column.null_count:
                raise refuse(place, "has missing values")
            while "list" in str(column.type):
                column = column.flatten()
            array = np.asarray(column.to_numpy(zero_copy_only=False))
        if array.size != rows * math.prod(feature.shape) or array.dtype.kind not in "biuf":
            raise refuse(place, f"{array.size} values of {array.dtype} for {rows} rows of {feature.shape}")
        return array.reshape(rows, *feature.shape) if feature.shape != (1,) else array.reshape(rows)

    def _images(self, column: Any, shape: tuple[int, ...], place: str) -> np.ndarray:
        if len(column) * math.prod(shape) > MAX_ARRAY:
            raise refuse(place, f"{len(column)} images of {shape} are too many for one episode")
        images = []
        for value in column:
            with damage(place):
                file = value.as_py()
            if not isinstance(file, dict):
                raise refuse(place, "holds no image files")
            data = file.get("bytes")
            if data is None:
                path = inside(self.path, str(file.get("path")))
                if path.stat().st_size > MAX_UNPACKED:
                    raise refuse(path, "too large for an image")
                data = path.read_bytes()
            if data[:3] == b"\xff\xd8\xff":
                self.lossy = "jpeg (lerobot)"
            images.append(decoded(data, shape, place, "PNG", "JPEG"))
        return np.stack(images)

    # -- places --------------------------------------------------------------------------------------------------------

    def _find(self, info: dict[str, Any]) -> Iterator[Place]:
        library = load_library("pyarrow.parquet", "data", f"{self.path}: reading a LeRobot dataset")
        keys = ["episode_index", "length", "data/chunk_index", "data/file_index"]
        for name in self._videos:
            keys += [f"videos/{name}/{each}" for each in ("chunk_index", "file_index", "from_timestamp")]
        folder = self.path / EPISODES
        files = sorted(folder.rglob("*.parquet")) if folder.is_dir() else []
        for file in files:
            self._check_table(regular(self.path, file))
            with damage(file):
                missing = [key for key in keys if key not in library.read_schema(file).names]
                if missing:
                    raise refuse(file, f"no column {missing[0]}")
                rows = library.read_table(file, columns=keys).to_pylist()
            for row in rows:
                yield self._place(row, info, file)

    def _place(self, row: dict[str, Any], info: dict[str, Any], file: Path) -> Place:
        numbers = [value for key, value in row.items() if not key.endswith("timestamp")]
        if not all(type(value) is int and 0 <= value < 1 << 40 for value in numbers) or row["length"] < 1:
            raise refuse(file, f"episode {str(row['episode_index'])[:20]} has no place or no rows")
        data = _path(self.path, info.get("data_path"), DATA_PATH, row["data/chunk_index"], row["data/file_index"])
        videos = {}
        for name in self._videos:
            chunk, number = (row[f"videos/{name}/{each}"] for each in ("chunk_index", "file_index"))
            start = row[f"videos/{name}/from_timestamp"]
            if not isinstance(start, float) or not 0 <= start < 1e9:
                raise refuse(file, f"{name} begins at {start!r}")
            path = _path(self.path, info.get("video_path"), VIDEO_PATH, chunk, number, name)
            videos[name] = (path, max(0.0, start - 0.5 / float(info.get("fps") or FPS)))
        return Place(row["episode_index"], row["length"], data, videos)

    def _rows(self, place: Place) -> Any:
        """Return the rows of an episode in order. The file is kept for the next one."""
        library = load_library("pyarrow.parquet", "data", f"{self.path}: reading a LeRobot dataset")
        if self._table[0] != place.data:
            self._check_table(place.data)
            with damage(place.data):
                names = set(library.read_schema(place.data).names)
                wanted = [name for name in self._features if name in names]
                wanted += [name for name in ("episode_index", "frame_index") if name in names and name not in wanted]
                self._table = (place.data, library.read_table(place.data, columns=wanted))
        table = self._table[1]
        with damage(place.data):
            chosen = np.flatnonzero(table.column("episode_index").to_numpy() == place.number)
            if len(chosen) != place.length:
                raise refuse(place.data, f"{len(chosen)} rows of episode {place.number}, not {place.length}")
            frames = table.column("frame_index").to_numpy()[chosen]
            if not np.array_equal(np.sort(frames), np.arange(place.length)):
                raise refuse(place.data, f"frame_index of episode {place.number} does not count from 0")
            return table.take(chosen[np.argsort(frames)])

    def _check_table(self, path: Path) -> None:
        """Raise UsageError if a parquet file unpacks to too much."""
        library = load_library("pyarrow.parquet", "data", f"{path}: reading a LeRobot dataset")
        with damage(path):
            metadata = library.read_metadata(path)
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            unpacked = sum(
                group.column(each).total_uncompressed_size for group in groups for each in range(group.num_columns)
            )
        stored = path.stat().st_size
        values = metadata.num_rows * max(1, metadata.num_columns)
        if unpacked > MAX_ARRAY or max(unpacked, values) > max(MAX_UNPACKED, MAX_RATIO * stored):
            raise refuse(path, f"{stored} bytes would unpack to {max(unpacked, values)} or more")

    def _find_closing(self) -> dict[int, Any]:
        """Return the closing observation of each episode that has one, a row of a table each."""
        path = self.path / CLOSING
        if not path.exists():
            return {}
        library = load_library("pyarrow.parquet", "data", f"{self.path}: reading a LeRobot dataset")
        self._check_table(inside(self.path, CLOSING))
        with damage(path):
            table = library.read_table(path)
            numbers = table.column("episode_index").to_pylist()
            closing = {number: table.slice(row, 1) for row, number in enumerate(numbers)}
        for name in self._videos:  # they lie in the table even where the others are a video
            self._features = {**self._features, name: self._features[name]._replace(dtype="image")}
        return closing


class Feature(NamedTuple):
    """A column of a dataset."""

    dtype: str
    shape: tuple[int, ...]
    """Of one row; of images (H, W, C)."""


def _features(info: dict[str, Any], where: str) -> dict[str, Feature]:
    """Return the features that are read. Raises UsageError if info.json describes them wrongly."""
    features: dict[str, Feature] = {}
    described = info.get("features")
    if not isinstance(described, dict):
        raise refuse(where, "has no features")
    for name, about in described.items():
        if not (_is_seen(name) or name == "action" or name in REWARD or name.startswith("next.")):
            continue
        shape, dtype = (about.get("shape"), about.get("dtype")) if isinstance(about, dict) else (None, None)
        if not isinstance(dtype, str) or not isinstance(shape, list) or not 0 < len(shape) <= 5:
            raise refuse(where, f"feature {name[:60]!r} has no dtype and shape")
        if not all(type(each) is int and 0 < each < 1 << 20 for each in shape):
            raise refuse(where, f"feature {name[:60]!r} has shape {str(shape)[:60]}")
        if dtype in ("image", "video"):
            names = about.get("names")
            first = names[0] if isinstance(names, list) and names else ""
            if len(shape) == 3 and (
                first in ("channels", "channel") or (shape[0] in (1, 3) and shape[2] not in (1, 3))
            ):
                shape = [*shape[1:], shape[0]]
            if len(shape) != 3 or (dtype == "video" and shape[2] != 3):
                raise refuse(where, f"feature {name[:60]!r} has shape {shape}, not that of an image in color")
        features[name] = Feature(dtype, tuple(shape))
    return {name: feature for name, feature in features.items() if feature.dtype != "string"}


def _is_seen(name: str) -> bool:
    return name == "observation" or name.startswith("observation.")


def _part_name(name: str) -> str:
    return name.removeprefix("observation").removeprefix(".")


def _path(folder: Path, template: Any, default: str, chunk: int, number: int, video: str = "") -> Path:
    """Return the file of a template in info.json, which is filled in without Python's formatting of objects."""
    text = template if isinstance(template, str) else default

    def fill(match: re.Match[str]) -> str:
        value = {"chunk_index": chunk, "file_index": number}[match[1]]
        return str(value).zfill(int(match[2] or 0))

    text = re.sub(r"\{(chunk_index|file_index)(?::0?([0-9]{1,2})d)?\}", fill, text).replace("{video_key}", video)
    if "{" in text or "}" in text:
        raise refuse(folder / INFO, f"{str(template)[:80]!r} is no template of a path")
    return inside(folder, text)


def _license(path: Path) -> dict[str, str]:
    """Return the license that the head of README.md names."""
    card = path / "README.md"
    if not card.is_file():
        return {}
    with regular(path, card).open(encoding="utf-8", errors="replace") as file:
        head = file.read(1 << 16)
    match = re.match(r"---\n(?:.*\n)*?license: *([^\n]{1,60})\n", head.split("\n---", 1)[0] + "\n")
    return {"license": match[1].strip()} if match else {}


# -- writing -----------------------------------------------------------------------------------------------------------


def write_lerobot(recording: Recording, folder: Path, *, lossy: bool = False) -> None:
    """Write a recording as a LeRobot dataset that reads back as the same bits.

    Args:
        recording: The episodes. Continuous actions are in [-1, 1].
        folder: An empty folder.
        lossy: Write images as H.264 videos, a twentieth of the size or less.

    Raises:
        UsageError: `lossy`, and images have other than three colors.
    """
    arrow = load_library("pyarrow", "data", "writing a LeRobot dataset")
    parquet = load_library("pyarrow.parquet", "data", "writing a LeRobot dataset")
    space = recording.spaces.observation
    images = {_feature(name, part): part for name, part in images_of(space).items()}
    videos = list(images) if lossy else []
    if any(image.channels not in ((3,) if lossy else (1, 3, 4)) for image in images.values()):
        raise refuse(folder, f"images of {[image.channels for image in images.values()]} channels cannot be written")
    schema = _schema(arrow, recording)
    (folder / CLOSING).parent.mkdir()
    (folder / EPISODES / "chunk-000").mkdir(parents=True)
    statistics: dict[str, _Statistics] = {}
    episodes: list[dict[str, Any]] = []
    rows, file, written, writer = 0, -1, FILE_BYTES, None
    row_schema = arrow.schema([field for field in schema if field.name not in videos])
    closing_schema = arrow.schema(
        [field for field in schema if field.name.startswith(("observation", "episode_index"))]
    )
    with parquet.ParquetWriter(folder / CLOSING, closing_schema) as closings:
        for index, episode in enumerate(recording):
            if written >= FILE_BYTES:
                if writer is not None:
                    writer.close()
                file, written = file + 1, 0
                path = folder / DATA_PATH.format(chunk_index=file // CHUNK, file_index=file % CHUNK)
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = parquet.ParquetWriter(path, row_schema, compression="snappy")
            seen = _seen_columns(episode, space)
            columns = _columns(episode, index, rows, {name: seen[name] for name in seen if name not in videos})
            table = arrow.table([arrow.array(columns[each.name], each.type) for each in row_schema], row_schema)
            assert writer is not None
            writer.write_table(table)
            written += table.nbytes
            about = {
                "episode_index": index,
                "tasks": [TASK],
                "length": len(episode),
                "data/chunk_index": file // CHUNK,
                "data/file_index": file % CHUNK,
                "dataset_from_index": rows,
                "dataset_to_index": rows + len(episode),
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
            for name in videos:
                about |= _write_video(folder, name, index, seen[name][: len(episode)])
            episodes.append(about)
            rows += len(episode)
            if episode.has_closing:
                values = {name: _values(part[-1:]) for name, part in seen.items()} | {"episode_index": [index]}
                arrays = [arrow.array(values[each.name], each.type) for each in closing_schema]
                closings.write_table(arrow.table(arrays, closing_schema))
            for name, array in (seen | {"action": episode.action, "next.reward": episode.reward}).items():
                statistics.setdefault(name, _Statistics()).add(array[: len(episode)])
    if writer is not None:
        writer.close()
    parquet.write_table(arrow.Table.from_pylist(episodes), folder / EPISODES / "chunk-000" / "file-000.parquet")
    parquet.write_table(_tasks(arrow), folder / TASKS)
    features = _described(recording)
    for name in videos:
        features[name] |= {"dtype": "video", "info": {"video.codec": "h264", "video.fps": FPS}}
    info = {
        "codebase_version": VERSION,
        "robot_type": None,
        "total_episodes": len(recording),
        "total_frames": rows,
        "total_tasks": 1,
        "chunks_size": CHUNK,
        "data_files_size_in_mb": FILE_BYTES >> 20,
        "video_files_size_in_mb": 200,
        "fps": FPS,
        "splits": {"train": f"0:{len(recording)}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if videos else None,
        "features": features,
        OURS: {"spaces": spaces_entry(recording.spaces), "name": recording.name, "source": recording.source},
    }
    for name, value in ((INFO, info), (STATS, {name: each.summary() for name, each in statistics.items()})):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _feature(part: str, space: PartSpace) -> str:
    """Return the name of a part's feature. LeRobot's policies look for these names of a single one."""
    return f"observation.{part or ('image' if isinstance(space, Image) else 'state')}"


def _seen_columns(episode: Episode, space: ObservationSpace) -> dict[str, np.ndarray]:
    """Return the parts of the observation by the names of their features."""
    parts = parts_of(episode.observation)
    return {_feature(name, part): parts[name] for name, part in parts_of(space).items()}


_INDICES = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def _described(recording: Recording) -> dict[str, dict[str, Any]]:
    """Return the features of info.json."""
    features: dict[str, dict[str, Any]] = {}
    for name, part in parts_of(recording.spaces.observation).items():
        dtype = {Image: "image", Vector: "float32", Categories: "int64"}[type(part)]
        names = ["height", "width", "channels"] if isinstance(part, Image) else None
        features[_feature(name, part)] = {"dtype": dtype, "shape": list(part.shape), "names": names}
    space = recording.spaces.action
    dtype = "float32" if space.dtype == np.float32 else "int64"
    features["action"] = {"dtype": dtype, "shape": list(space.shape) or [1], "names": None}
    features["next.reward"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("done", "terminated", "truncated"):
        features[f"next.{name}"] = {"dtype": "bool", "shape": [1], "names": None}
    for name in _INDICES:
        features[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    return features


def _schema(arrow: Any, recording: Recording) -> Any:
    """Return the schema of all columns. Images are files with a name."""

    def of(feature: dict[str, Any]) -> Any:
        if feature["dtype"] == "image":
            return arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
        number = {"float32": arrow.float32(), "int64": arrow.int64(), "bool": arrow.bool_()}[feature["dtype"]]
        return number if feature["shape"] == [1] else arrow.list_(number, feature["shape"][0])

    return arrow.schema([(name, of(feature)) for name, feature in _described(recording).items()])


def _columns(episode: Episode, index: int, rows: int, seen: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the columns of the rows of an episode."""
    time = len(episode)
    return {name: _values(part[:time]) for name, part in seen.items()} | {
        "action": _values(episode.action),
        "next.reward": episode.reward,
        "next.done": episode.terminated | episode.truncated,
        "next.terminated": episode.terminated,
        "next.truncated": episode.truncated,
        "timestamp": np.arange(time, dtype=np.float32) / FPS,
        "frame_index": np.arange(time),
        "episode_index": np.full(time, index),
        "index": rows + np.arange(time),
        "task_index": np.zeros(time, np.int64),
    }


def _values(array: np.ndarray) -> Any:
    """Return a column as pyarrow takes it: numbers, lists of numbers, or image files."""
    if array.dtype == np.uint8:
        return [{"bytes": _png(image), "path": f"frame-{row:06d}.png"} for row, image in enumerate(array)]
    array = array.astype(np.int64) if array.dtype == np.int32 else array
    return list(array) if array.ndim == 2 and array.shape[1] > 1 else array.reshape(-1)


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Picture.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _write_video(folder: Path, name: str, index: int, frames: np.ndarray) -> dict[str, Any]:
    """Write the video of an episode, a file of its own, and return its place."""
    chunk, number = index // CHUNK, index % CHUNK
    path = folder / VIDEO_PATH.format(video_key=name, chunk_index=chunk, file_index=number)
    path.parent.mkdir(parents=True, exist_ok=True)
    encode(path, iter(frames), frames.shape[1:3], FPS)
    place = {"chunk_index": chunk, "file_index": number, "from_timestamp": 0.0, "to_timestamp": len(frames) / FPS}
    return {f"videos/{name}/{key}": value for key, value in place.items()}


def _tasks(arrow: Any) -> Any:
    """Return the table of tasks, whose index pandas finds in the metadata."""
    column = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    number = {**column, "name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": [number, column], "pandas_version": "2.0.0"}
    table = arrow.table({"task_index": arrow.array([0], arrow.int64()), "task": [TASK]})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


IMAGE_AXES = 4


class _Statistics:
    """Least, largest, mean and standard deviation of a feature; of images by channel, in [0, 1]."""

    def __init__(self) -> None:
        self.count = self.values = 0
        self.low: Any = np.inf
        self.high: Any = -np.inf
        self.sum: Any = 0.0
        self.squares: Any = 0.0
        self.shape: tuple[int, ...] = ()

    def add(self, array: np.ndarray) -> None:
        """Count the rows (T, ...)."""
        self.count += len(array)
        if array.ndim == IMAGE_AXES:
            self.shape, array = (-1, 1, 1), array.reshape(-1, array.shape[-1]) / 255
        else:
            self.shape, array = (-1,), array.reshape(len(array), -1).astype(np.float64)
        self.values += len(array)
        self.low, self.high = np.minimum(self.low, array.min(0)), np.maximum(self.high, array.max(0))
        self.sum, self.squares = self.sum + array.sum(0), self.squares + (array**2).sum(0)

    def summary(self) -> dict[str, Any]:
        """Return the entries of stats.json."""
        mean = self.sum / self.values
        deviation = np.sqrt(np.maximum(self.squares / self.values - mean**2, 0))
        values = {"min": self.low, "max": self.high, "mean": mean, "std": deviation}
        return {name: value.reshape(self.shape).tolist() for name, value in values.items()} | {"count": [self.count]}
