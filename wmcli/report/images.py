"""Pictures and films of frames: real beside imagined, strips, reconstructions, captions; PNG, WebP, GIF and MP4 files.

Axes: T time, N pictures, H height, W width, and red, green, blue last. All frames are uint8. Equal inputs give equal
pixels.
"""

from __future__ import annotations

import bisect
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from wmcli.errors import UsageError
from wmcli.report.files import check_target, write_whole

BACKGROUND = (24, 24, 27)
TEXT = (236, 236, 240)
FAINT = (150, 150, 158)
LINE = (84, 84, 92)
MARKER = (255, 176, 0)  # border between context and imagination

# In pixels:
_PANEL = 192  # height of an animation's panel, about
_TILE = 128  # height of a picture in a strip or grid, about
_FONT = 13
_BAR = 20  # height of a line of text
_RULE = 3  # height of the bar over a phase
_GAP = 2  # between two panels, and between two columns of a strip or grid
_ROW_GAP = 8  # between two rows of a strip or grid, whose pictures may be dark
_SHARES = 40  # height of a bar for a share of 1
_WIDEST = 1600  # a longer strip continues in the next row
_WIDEST_LABEL = 320  # of a row in a strip; a longer one is cut
_NARROWEST = 44  # column of a strip, for time steps of five digits
_WIDE_SPACE = "   "  # between two parts of a caption's line
_FASTEST = 50  # frames per second of a looping film; browsers slow a faster one down
_GIF_COLORS = 255  # one index less than GIF has, so that the writer can mark unchanged pixels


# -- building blocks --------------------------------------------------------------------------------------------------


def upscale(frames: np.ndarray, height: int = _PANEL) -> np.ndarray:
    """Enlarge frames (T, H, W, 3) by the integer factor that brings them nearest to `height` pixels."""
    factor = max(1, round(height / frames.shape[1]))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def side_by_side(
    real: np.ndarray,
    imagined: np.ndarray,
    *,
    context: int = 0,
    labels: tuple[str, str] = ("real", "imagined"),
    error: bool = False,
    over: int | None = None,
    captions: Sequence[Sequence[str]] = (),
) -> np.ndarray:
    """Put real and imagined frames side by side, in panels with labels.

    Args:
        real: Frames (T, H, W, 3).
        imagined: Frames (T, H, W, 3).
        context: Number of leading frames that the model observed. There the right label reads "context", and the line
            between the panels is gray; it is amber afterwards.
        labels: Of the panels.
        error: Add a third panel with the absolute difference.
        over: First frame after the end of the real episode, which the label states.
        captions: T captions for each panel, as in `captioned`; none by default.

    Returns:
        Frames (T, H', W', 3).
    """
    real, imagined = _frames(real), _frames(imagined)
    assert real.shape == imagined.shape, (real.shape, imagined.shape)
    panels = [upscale(real), upscale(imagined)]
    if error:
        panels.append(upscale(_difference(real, imagined)))
    names = [*labels, "|difference|"][: len(panels)]
    if captions:
        assert len(captions) == len(panels), (len(captions), len(panels))
        together = _fitted([caption for each in captions for caption in each], panels[0].shape[2])
        lines = max(map(len, together))
        panels = [
            _over_captions(panel, together[index * len(panel) : (index + 1) * len(panel)], lines)
            for index, panel in enumerate(panels)
        ]
    time, height, width = panels[0].shape[:3]

    movie = np.empty((time, _BAR + height, len(panels) * (width + _GAP) - _GAP, 3), dtype=np.uint8)
    movie[:] = LINE
    movie[:, :_BAR] = BACKGROUND
    for index, (panel, name) in enumerate(zip(panels, names, strict=True)):
        left = index * (width + _GAP)
        movie[:, _BAR:, left : left + width] = panel
        movie[:, :_BAR, left : left + width] = _text(name, width, TEXT)
        if index == 0 and over is not None:
            movie[over:, :_BAR, :width] = _text(f"{name}: over", width, FAINT)
        if index == 1:
            movie[:context, :_BAR, left : left + width] = _text("context", width, FAINT)
            movie[context:, :, left - _GAP : left] = MARKER if context else LINE
    return movie


def captioned(frames: np.ndarray, captions: Sequence[str]) -> np.ndarray:
    """Enlarge frames (T, H, W, 3) and write each one's caption below it ("\\n" starts a second line)."""
    frames = upscale(_frames(frames))
    fitted = _fitted(captions, frames.shape[2])
    return _over_captions(frames, fitted, max(map(len, fitted), default=1))


def _fitted(captions: Sequence[str], width: int) -> list[list[str]]:
    """Return the lines of each caption. A line that is too long in any caption is broken in all, at wide spaces."""
    split = [caption.split("\n") for caption in captions]
    long = {place for lines in split for place, line in enumerate(lines) if _font().getlength(line) > _room(width)}
    return [
        [part for place, line in enumerate(lines) for part in (line.split(_WIDE_SPACE) if place in long else [line])]
        for lines in split
    ]


def _over_captions(frames: np.ndarray, captions: Sequence[Sequence[str]], lines: int) -> np.ndarray:
    """Return frames (T, H, W, 3), each over `lines` lines of text that hold its caption."""
    time, height, width = frames.shape[:3]
    assert len(captions) == time, (len(captions), time)
    movie = np.empty((time, height + lines * _BAR, width, 3), dtype=np.uint8)
    movie[:] = BACKGROUND
    movie[:, :height] = frames
    for index, caption in enumerate(captions):
        for row, line in enumerate(caption):
            top = height + row * _BAR
            movie[index, top : top + _BAR] = _text(line, width, TEXT)
    return movie


def over_shares(frames: np.ndarray, shares: np.ndarray, actions: Sequence[int]) -> np.ndarray:
    """Enlarge frames and draw the share of each action below them as a bar, that of the chosen action in amber.

    A share above 0 has a pixel at least. Of more actions than pixels, neighbors stand in one bar, the largest behind.

    Args:
        frames: (T, H, W, 3).
        shares: (T, A), in [0, 1].
        actions: T chosen actions, -1 for none.
    """
    frames = upscale(_frames(frames))
    time, _, width = frames.shape[:3]
    assert len(shares) == len(actions) == time, (len(shares), len(actions), time)
    band = np.empty((time, _SHARES, width, 3), dtype=np.uint8)
    band[:] = BACKGROUND
    count = shares.shape[1]
    bars = min(count, width)
    edges = np.linspace(0, width, bars + 1).round().astype(int)
    lefts, rights = edges[:-1] + (width >= 2 * bars), edges[1:] - (width >= 3 * bars)  # gaps where there is room
    bar_of = np.arange(count) * bars // count
    heights = np.maximum((shares * _SHARES).round().astype(int), shares > 0)
    for index, (row, chosen) in enumerate(zip(heights, actions, strict=True)):
        highest = np.zeros(bars, int)
        np.maximum.at(highest, bar_of, row)
        for bar, height in enumerate(highest):
            band[index, _SHARES - height :, lefts[bar] : rights[bar]] = FAINT
        if chosen >= 0:
            bar = bar_of[chosen]
            band[index, _SHARES - row[chosen] :, lefts[bar] : rights[bar]] = MARKER
    return np.concatenate((frames, band), axis=1)


def play_captions(
    actions: Sequence[int | Sequence[float]],
    rewards: Sequence[float],
    meanings: Sequence[str] | None = None,
    values: Sequence[float] | None = None,
) -> list[str]:
    """Return captions for an episode: step and action, then reward and return so far.

    Args:
        actions: T actions, each a number or several.
        rewards: T rewards.
        meanings: Names of the actions by index, as Atari gives them. None shows their numbers.
        values: Value of each step by search, for a third line.
    """
    captions, total = [], 0.0
    for step, (action, reward) in enumerate(zip(actions, rewards, strict=True)):
        total += float(reward)
        if isinstance(action, Sequence):
            name = f"action {' '.join(f'{number:z.3g}' for number in action)}"
        else:
            name = meanings[int(action)] if meanings else f"action {int(action)}"
        gained = f"reward {'+' if reward > 0 else ''}{short_number(float(reward))}"
        worth = f"\nsearched value {values[step]:z.2f}" if values else ""
        so_far = f"return {short_number(total)}"
        captions.append(f"step {step}{_WIDE_SPACE}{name}\n{gained}{_WIDE_SPACE}{so_far}{worth}")
    return captions


def short_number(value: float) -> str:
    """Return a reward or return in short form: four digits below 1,000, all digits of larger integers."""
    return f"{value:z.4g}" if abs(value) < 1000 else f"{value:.7g}"


class Phase(NamedTuple):
    """Consecutive frames of a strip, up to the next phase."""

    begin: int
    """Time step of the first frame."""
    name: str
    color: tuple[int, int, int] = FAINT
    """Of the line that precedes it, and of the bar over its columns."""


def strip(
    rows: Mapping[str, np.ndarray],
    *,
    steps: Sequence[int] | None = None,
    context: int = 0,
    phases: Sequence[Phase] = (),
) -> np.ndarray:
    """Draw frames as one picture: a row for each name, time to the right.

    A picture wider than 1,600 pixels is broken into rows of nearly equal length.

    Args:
        rows: name -> frames (T, H, W, 3), such as real and imagined ones.
        steps: Time steps to show, ascending; None shows all. Each column has its time step as heading.
        context: Number of leading frames that the model observed. An amber line precedes the first imagined frame.
        phases: Instead of `context`: phases in order, the first from step 0 on. A second heading names them, and a line
            in the color of each but the first precedes its first column.

    Returns:
        A picture (H', W', 3).
    """
    labels, frames = list(rows), [_frames(each) for each in rows.values()]
    assert len({each.shape for each in frames}) == 1, [each.shape for each in frames]
    steps = range(len(frames[0])) if steps is None else steps
    if context and not phases:
        phases = (Phase(0, ""), Phase(context, "", MARKER))
    begins = [phase.begin for phase in phases]
    columns = -(-len(steps) // -(-len(steps) // columns_that_fit(frames[0], labels)))
    blocks = []
    before = -1  # the phase of the column before
    for begin in range(0, len(steps), columns):
        shown = list(steps[begin : begin + columns])
        block, tile, margin = _table([each[shown] for each in frames], labels)
        bands = np.full((_BAR + _RULE, *block.shape[1:]), BACKGROUND, np.uint8)
        of_column = [bisect.bisect_right(begins, step) - 1 for step in shown]
        for index, (step, phase) in enumerate(zip(shown, of_column, strict=True)):
            left = margin + index * (tile + _GAP)
            head = f"t = {step}" if not begin and not index else str(step)
            head = head if _font().getlength(head) <= tile - 4 else str(step)
            color = FAINT if phases and phases[phase].color == FAINT else TEXT
            block[:_BAR, left : left + tile] = _text(head, tile, color, centre=True)
            if phases and before not in (-1, phase):
                block[:, left - _GAP : left] = bands[:, left - _GAP : left] = phases[phase].color
            if phases and (not index or before != phase):
                wide = (tile + _GAP) * of_column.count(phase) - _GAP
                bands[:_BAR, left : left + wide] = _text(phases[phase].name, wide, phases[phase].color)
                bands[_BAR:, left : left + wide] = phases[phase].color
            before = phase
        blocks.append(np.concatenate((bands, block)) if any(phase.name for phase in phases) else block)
    return _stacked(blocks)


def grid(
    originals: np.ndarray,
    reconstructions: np.ndarray,
    *,
    columns: int = 8,
    labels: tuple[str, str, str] = ("original", "decoded", "|difference|"),
) -> np.ndarray:
    """Draw pictures (N, H, W, 3), their reconstructions and the absolute difference below each other.

    Returns a picture (H', W', 3) with `columns` of them in a row.
    """
    originals, reconstructions = _frames(originals), _frames(reconstructions)
    assert originals.shape == reconstructions.shape, (originals.shape, reconstructions.shape)
    rows = [originals, reconstructions, _difference(originals, reconstructions)]
    blocks = [
        _table([row[start : start + columns] for row in rows], labels)[0][_BAR:]  # without the empty heading
        for start in range(0, len(originals), columns)
    ]
    return _stacked(blocks)


def _stacked(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Stack pictures (H, W, 3), the first one the widest, with wider gaps than between rows within them."""
    gap = 3 * _ROW_GAP
    height, width = blocks[0].shape[:2]
    picture = np.empty((len(blocks) * (height + gap) - gap, width, 3), dtype=np.uint8)
    picture[:] = BACKGROUND
    for index, block in enumerate(blocks):
        top = index * (height + gap)
        picture[top : top + height, : block.shape[1]] = block
    return picture


def columns_that_fit(frames: np.ndarray, labels: Sequence[str]) -> int:
    """Return the number of columns of a strip of frames (T, H, W, 3) that fit into one row, with these labels."""
    return max(1, (_WIDEST - _margin(labels) + _GAP) // (_tiles(frames[:1]).shape[2] + _GAP))


def _margin(labels: Sequence[str]) -> int:
    return min(_WIDEST_LABEL, max(int(np.ceil(_font().getlength(label))) for label in labels) + 16)


def _tiles(frames: np.ndarray) -> np.ndarray:
    """Enlarge frames (T, H, W, 3) for a strip or grid. Narrow ones stand amid a column of `_NARROWEST` pixels."""
    tiles = upscale(frames, _TILE)
    room = max(0, _NARROWEST - tiles.shape[2])
    picture = np.empty((*tiles.shape[:2], tiles.shape[2] + room, 3), np.uint8)
    picture[:] = BACKGROUND
    picture[:, :, room // 2 : room // 2 + tiles.shape[2]] = tiles
    return picture


def _table(rows: Sequence[np.ndarray], labels: Sequence[str]) -> tuple[np.ndarray, int, int]:
    """Draw rows of frames (N, H, W, 3) with labels at the left, below an empty heading.

    Returns the picture, the width of a tile and the left margin.
    """
    tiles = [_tiles(row) for row in rows]
    count, height, width = tiles[0].shape[:3]
    margin = _margin(labels)
    whole = _BAR + len(rows) * (height + _ROW_GAP) - _ROW_GAP, margin + count * (width + _GAP) - _GAP
    picture = np.empty((*whole, 3), np.uint8)
    picture[:] = BACKGROUND
    for row, (frames, label) in enumerate(zip(tiles, labels, strict=True)):
        top = _BAR + row * (height + _ROW_GAP)
        middle = top + (height - _BAR) // 2
        picture[middle : middle + _BAR, :margin] = _text(_shortened(label, _room(margin)), margin, TEXT)
        for column, frame in enumerate(frames):
            left = margin + column * (width + _GAP)
            picture[top : top + height, left : left + width] = frame
    return picture, width, margin


def _frames(frames: np.ndarray) -> np.ndarray:
    """Check frames (T, H, W, 1 or 3) uint8 and return them with three channels."""
    assert frames.dtype == np.uint8 and frames.ndim == 4, (frames.dtype, frames.shape)
    assert frames.shape[-1] in (1, 3) and frames.size, frames.shape
    return frames.repeat(3, axis=-1) if frames.shape[-1] == 1 else frames


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(a, b) - np.minimum(a, b)  # uint8, without wrapping round


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT)


def _room(width: int) -> int:
    """Return the pixels for a line of text in a panel."""
    return width - 8


def _shortened(line: str, room: int) -> str:
    """Return a line without its middle where it is too long, since both ends tell rows apart."""
    kept = len(line)
    shown = line
    while kept and _font().getlength(shown) > room:
        kept -= 1
        shown = f"{line[: kept // 2]}…{line[len(line) - (kept - kept // 2) :]}"
    return shown


def _text(line: str, width: int, color: tuple[int, int, int], *, centre: bool = False) -> np.ndarray:
    """Draw one line of text (_BAR, width, 3). A line that is too long ends in an ellipsis."""
    font = _font()
    room = width - 4 if centre else _room(width)
    if font.getlength(line) > room:
        while line and font.getlength(line + "…") > room:
            line = line[:-1]
        line += "…"
    image = Image.new("RGB", (width, _BAR), BACKGROUND)
    x, anchor = (width / 2, "mm") if centre else (6, "lm")
    ImageDraw.Draw(image).text((x, _BAR / 2), line, fill=color, font=font, anchor=anchor)
    return np.asarray(image)


# -- files ------------------------------------------------------------------------------------------------------------


def write_png(path: Path, picture: np.ndarray) -> None:
    """Write one picture (H, W, 3) as PNG."""
    assert picture.dtype == np.uint8 and picture.ndim == 3, (picture.dtype, picture.shape)
    write_whole(path, lambda draft: Image.fromarray(picture).save(draft, "PNG", optimize=True))


def check_animation(path: Path) -> None:
    """Raise UsageError if `write_animation` could not write this file."""
    check_target(path, (".webp", ".gif", ".mp4"))
    if path.suffix.lower() == ".mp4":
        _encoder(path)


def write_animation(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write frames (T, H, W, 3) as WebP, GIF or MP4, by the suffix of `path`.

    Raises UsageError as `check_animation` does.
    """
    check_animation(path)
    {".webp": write_webp, ".gif": write_gif, ".mp4": write_mp4}[path.suffix.lower()](path, frames, fps)


def write_webp(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write frames (T, H, W, 3) as a looping lossless WebP. Equal frames in a row become one that is shown for longer.

    Raises:
        UsageError: The rate is above 50 frames per second, or the file cannot be written.
    """
    durations = _durations(path, len(frames), fps, ticks=1000)
    images = [Image.fromarray(frame) for frame in _frames(frames)]
    data = io.BytesIO()
    # Of methods 0 to 6, 3 is the last that costs little. Without key frames (kmax) films are a quarter smaller.
    options: dict[str, Any] = {"lossless": True, "method": 3, "quality": 50, "kmax": 0}
    images[0].save(data, "WEBP", save_all=True, append_images=images[1:], duration=durations, loop=0, **options)
    write_whole(path, lambda draft: draft.write_bytes(data.getvalue()))


def write_gif(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write frames (T, H, W, 3) as a looping GIF with one palette of 255 colors.

    Up to 255 different colors are exact. More are clustered; a rare color (a ball of a few pixels) weighs more than its
    area. GIF counts time in hundredths of a second, so the rate holds on average.

    Raises:
        UsageError: The rate is above 50 frames per second, or the file cannot be written.
    """
    durations = _durations(path, len(frames), fps, ticks=100)
    palette, indices = _indexed(_frames(frames))
    images = []
    for index in indices:
        image = Image.frombytes("P", index.shape[::-1], index.tobytes())
        image.putpalette(palette.tobytes())
        images.append(image)
    data = io.BytesIO()
    images[0].save(
        data, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, disposal=1, optimize=False
    )
    write_whole(path, lambda draft: draft.write_bytes(data.getvalue()))


def _durations(path: Path, count: int, fps: float, *, ticks: int) -> list[int]:
    """Return the milliseconds of each frame, in whole ticks of which a second has so many.

    Raises:
        UsageError: Such a file cannot play at this rate.
    """
    if not 0 < fps <= _FASTEST:
        raise UsageError(
            f"{path}: a {path.suffix} plays at most {_FASTEST} frames per second, got {fps:g}; choose fewer, or write"
            " an .mp4."
        )
    ends = np.round(np.arange(count + 1) * ticks / fps).astype(int)
    return [int(each) * 1000 // ticks for each in np.diff(ends)]


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write frames (T, H, W, 3) as H.264 MP4. Raises UsageError if the extra `video` is not installed."""
    encoder = _encoder(path)
    if not 0 < fps < float("inf"):
        raise UsageError(f"{path}: a film plays at more than 0 frames per second, got {fps:g}.")
    frames = _frames(frames)
    height, width = frames.shape[1:3]
    even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # H.264 wants even sizes

    def write(draft: Path) -> None:
        size = (even.shape[2], even.shape[1])
        writer = encoder.write_frames(
            str(draft), size, fps=fps, codec="libx264", pix_fmt_out="yuv420p", quality=8, macro_block_size=2
        )
        writer.send(None)
        try:
            for frame in even:
                writer.send(np.ascontiguousarray(frame))
        finally:
            writer.close()

    write_whole(path, write)


def _encoder(path: Path) -> ModuleType:
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UsageError(
            f"{path}: MP4 needs an encoder; install it with: pip install 'wmcli[video]', or write a .webp instead."
        ) from None
    return imageio_ffmpeg


def _indexed(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one palette (K, 3) uint8 for all frames, K <= 255, and the frames as its indices (T, H, W) uint8."""
    occurs = np.zeros(1 << 24, dtype=bool)
    for frame in frames:
        occurs[_packed(frame)] = True
    colors = _unpacked(np.flatnonzero(occurs))  # (K, 3)
    palette = colors if len(colors) <= _GIF_COLORS else _clustered(frames)
    table = np.zeros(1 << 24, dtype=np.uint8)
    for start in range(0, len(colors), 8192):
        some = colors[start : start + 8192]
        distance = ((some[:, None].astype(np.int32) - palette.astype(np.int32)) ** 2).sum(axis=-1)
        table[_packed(some)] = distance.argmin(axis=1)
    return palette, np.stack([table[_packed(frame)] for frame in frames])


def _clustered(frames: np.ndarray) -> np.ndarray:
    """Return 255 colors (K, 3) by median cut and k-means, weighted by the root of the area.

    Colors that agree in their first five bits are merged into their mean before.
    """
    cells = 1 << 15
    sums = np.zeros((4, cells))  # red, green, blue, count
    for frame in frames:
        pixels = frame.reshape(-1, 3).astype(np.int32)
        cell = pixels[:, 0] >> 3 << 10 | pixels[:, 1] >> 3 << 5 | pixels[:, 2] >> 3
        for row, weight in enumerate((*pixels.T, None)):
            sums[row] += np.bincount(cell, weight, minlength=cells)
    sums = sums[:, sums[3] > 0]
    colors = (sums[:3] / sums[3]).round().astype(np.uint8).T
    weights = np.ceil(np.sqrt(sums[3] / sums[3].max()) * 256).astype(int)
    sample = Image.fromarray(colors.repeat(weights, axis=0)[None])
    palette = sample.quantize(_GIF_COLORS, Image.Quantize.MEDIANCUT, kmeans=1).getpalette()
    assert palette is not None
    return np.array(palette, dtype=np.uint8).reshape(-1, 3)[:_GIF_COLORS]


def _packed(colors: np.ndarray) -> np.ndarray:
    wide = colors.astype(np.int32)
    return wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]


def _unpacked(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=-1).astype(np.uint8)
