"""Videos: a folder of `*.mp4`, one an episode, with `actions.csv`; and the reading and writing of any MP4.

Columns of actions.csv: `episode`, the name of a video without suffix (may be left out where there is one video);
`action`, or `action_0`, `action_1`, ... for vectors; `reward`; and `terminated` and `truncated`, 0 or 1. Rows are in
order of time, one for each action. A video has as many frames as rows, or one more: the closing one.
"""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from wmcli.errors import MachineError
from wmcli.exchange.convert import Raw, Stated
from wmcli.exchange.safe import MAX_ARRAY, damage, files_in, load_library, refuse, regular

TABLE = "actions.csv"
LOSSY = "video (mp4)"
MAX_TABLE = 256 << 20
MAX_PIXELS = 1 << 26


class Video:
    """A reader of a folder of MP4 videos with a table of actions."""

    format = "mp4"
    lossy: str | None = LOSSY

    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self.notes: list[str] = []
        self.source: dict[str, Any] = {}
        self.stated = Stated()
        videos = {video.stem: video for video in files_in(path, ".mp4")}
        self._table = regular(path, path / TABLE)
        rows = _read_table(self._table, sole=next(iter(videos), "") if len(videos) == 1 else None)
        if missing := [name for name in rows if name not in videos]:
            raise refuse(self._table, f"episode {missing[0][:60]!r} has no video {missing[0][:60]}.mp4 beside it")
        if unnamed := [name for name in videos if name not in rows]:
            raise refuse(self._table, f"names no actions for {unnamed[0]}.mp4")
        self._episodes = [(videos[name], rows[name]) for name in videos]

    def __len__(self) -> int:
        return len(self._episodes)

    def where(self, index: int) -> str:
        return str(self._episodes[index][0])

    def read(self, index: int) -> Raw:
        video, columns = self._episodes[index]
        time = len(columns["action"])
        frames = decode(video, most=time + 2)
        zeros = np.zeros(time, bool)
        ends = (columns.get(name, zeros) for name in ("terminated", "truncated"))
        return Raw({"": frames}, columns["action"], columns["reward"], *ends)

    def action(self, index: int) -> np.ndarray:
        return self._episodes[index][1]["action"]


def _read_table(path: Path, sole: str | None) -> dict[str, dict[str, np.ndarray]]:
    """Read actions.csv, the columns of each episode. `sole` is the name of the only video."""
    if path.stat().st_size > MAX_TABLE:
        raise refuse(path, f"larger than {MAX_TABLE} bytes")
    rows: dict[str, list[list[str]]] = {}
    with damage(path, csv.Error), path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        names = [name.strip() for name in next(reader, [])]
        vector = sorted(
            (name for name in names if re.fullmatch(r"action_[0-9]{1,4}", name)), key=lambda name: int(name[7:])
        )
        actions = ["action"] if "action" in names else vector
        if not actions or "reward" not in names or len(set(names)) != len(names):
            raise refuse(path, "needs the columns action (or action_0, action_1, ...) and reward, each once")
        if "episode" not in names and sole is None:
            raise refuse(path, "needs a column episode, since there are several videos or none")
        for row in reader:
            if len(row) != len(names):
                raise refuse(path, f"line {reader.line_num} has {len(row)} cells, not {len(names)}")
            episode = row[names.index("episode")].strip() if "episode" in names else str(sole)
            rows.setdefault(episode, []).append(row)
    wanted = [*actions, "reward", *(name for name in ("terminated", "truncated") if name in names)]
    return {
        name: _columns(path, [[row[names.index(each)] for each in wanted] for row in cells], wanted, len(actions))
        for name, cells in rows.items()
    }


def _columns(path: Path, cells: list[list[str]], wanted: Sequence[str], width: int) -> dict[str, np.ndarray]:
    with damage(path):
        numbers = np.array(cells, np.float64)
    action = numbers[:, :width]
    whole = all(re.fullmatch(r"\s*[+-]?[0-9]+\s*", cell) for row in cells for cell in row[:width])
    action = action.astype(np.int64) if whole else action
    columns = {name: numbers[:, place] for place, name in enumerate(wanted) if place >= width}
    return {"action": action[:, 0] if wanted[0] == "action" else action, **columns}


# -- MP4 ---------------------------------------------------------------------------------------------------------------


def decode(path: Path, *, most: int, start: float = 0.0) -> np.ndarray:
    """Decode frames of an MP4 file.

    Args:
        path: The file.
        most: Largest number of frames.
        start: Time of the first one. [seconds]

    Returns:
        uint8 (n, H, W, 3).

    Raises:
        UsageError: It is damaged or no MP4 file.
    """
    seek = ["-ss", f"{start:.6f}"] if start > 0 else []
    # The demuxer is named, so that no playlist under this name opens other files.
    source = ["-max_pixels", str(MAX_PIXELS), "-f", "mp4", *seek, "-i", str(path.absolute())]
    sink = ["-map", "0:v:0", "-frames:v", str(most), "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-"]
    frames: list[np.ndarray] = []
    with (
        damage(path),
        subprocess.Popen(
            [_ffmpeg(f"{path}: reading a video"), *source, *sink],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            while (frame := _read_ppm(process.stdout)) is not None:
                if most * frame.size > MAX_ARRAY:
                    raise refuse(path, f"{most} frames of {frame.shape} are too many for one episode")
                frames.append(frame)
        finally:
            process.kill()
    if not frames or len({frame.shape for frame in frames}) > 1:
        raise refuse(path, "has no frames of one size, or is no MP4 video")
    return np.stack(frames)


def _ffmpeg(purpose: str) -> str:
    executable: str = load_library("imageio_ffmpeg", "data", purpose).get_ffmpeg_exe()
    return executable


def _read_ppm(file: IO[bytes]) -> np.ndarray | None:
    """Read an image (H, W, 3) in ffmpeg's form of PPM; None at the end."""
    kind, sides, largest = file.readline(16), file.readline(32), file.readline(16)
    if kind != b"P6\n" or largest != b"255\n":
        return None
    width, height = map(int, sides.split())
    data = file.read(width * height * 3)
    return np.frombuffer(data, np.uint8).reshape(height, width, 3) if len(data) == width * height * 3 else None


def encode(path: Path, frames: Iterator[np.ndarray], size: tuple[int, int], fps: int) -> None:
    """Write frames, each uint8 (H, W, 3) with `size` = (H, W), as H.264, with loss."""
    even = size[0] % 2 == 0 and size[1] % 2 == 0
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[1]}x{size[0]}", "-r", str(fps), "-i", "-"]
    pixels = "yuv420p" if even else "yuv444p"
    codec = ["-c:v", "libx264", "-pix_fmt", pixels, "-crf", "18", "-g", "2", "-bf", "0", "-threads", "1"]
    with subprocess.Popen(
        [_ffmpeg("writing a video"), "-loglevel", "error", "-y", *source, *codec, str(path.absolute())],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the exit code says so
            for frame in frames:
                process.stdin.write(np.ascontiguousarray(frame).data)
            process.stdin.close()
    if process.returncode:
        raise MachineError(f"{path}: ffmpeg could not write the video (exit code {process.returncode}).")
