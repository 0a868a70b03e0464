"""A first-person view of a maze of cells, in NumPy: textured walls, a tiled floor, spheres half sunk into it, sky.

Everything is measured in cells. A wall cell is a box as wide as a cell and WALL high; the camera looks level from EYE
above the floor. Numbers are those of Memory Maze (Pasukonis, Lillicrap and Hafner 2022, arXiv 2210.13383), where a
cell is 2 units wide: walls 1.5 units, spheres of radius 0.6 with their centers in the floor, a vertical field of view
of 80 degrees. Textures are drawn by formulas and have the mean colors of its own. Light comes from the camera and, on
spheres, from above; walls that look east or west lie in a little shade, so that corners show.

Column c of a picture sees along the ray forward + x_c * right. Where that ray of forward length 1 meets a wall after t
times its length, t is the wall's depth, whatever the column: so straight walls stay straight.

Points are (x, y), x in columns to the east and y in rows to the *south* of the grid; cell (row, column) spans
[column, column + 1) x [row, row + 1). Headings are degrees, 0 east, growing to the left (90 north). N frames, H height,
W width, R rays, O spheres; pixels in work lie as (H, N * W), so that every operation runs over long rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

FIELD_OF_VIEW = 80.0  # degrees, vertical and (frames are square) horizontal
EYE = 0.3
WALL = 0.75
RADIUS = 0.3  # of a sphere
WALL_COLORS = {
    "yellow": (196, 169, 38),
    "blue": (32, 116, 177),
    "green": (85, 120, 75),
    "green bright": (166, 197, 156),
    "purple": (68, 80, 176),
    "red": (143, 32, 26),
    "red bright": (213, 123, 104),
    "cerise": (169, 65, 103),
}  # means of the wall textures
FLOOR_COLOR = (54, 89, 109)
SPHERE_COLORS = {
    "red": (170, 38, 30),
    "green": (99, 170, 88),
    "blue": (39, 140, 217),
    "purple": (93, 105, 199),
    "yellow": (220, 193, 59),
    "salmon": (220, 128, 107),
}  # in light of 220 / 255
SKY = ((51, 76, 102), (102, 153, 204))  # at the horizon, and at the top of a frame
SIDES = ((1, 0), (0, 1), (-1, 0), (0, -1))  # towards the wall seen: east, south, west, north
SHADE = 0.85  # of walls that look east or west
TEXELS = 32  # along a texture, which covers one cell's wall or floor
LEVELS = TEXELS.bit_length()  # of every texture: 32, 16, 8, 4, 2 and 1 texels along, for what is far away
TONES = 32  # brightnesses of a sphere
CHUNK = 2**17  # pixels worked on at once: few enough for caches, enough for NumPy's calls not to count


class Hits(NamedTuple):
    """Where R rays meet their first wall."""

    depth: np.ndarray
    """(R,): in lengths of the ray's direction."""
    cell: np.ndarray
    """(R,) int: the open cell in front of the wall, row * columns + column of its maze."""
    side: np.ndarray
    """(R,) int: where that cell's wall stands, see SIDES."""
    along: np.ndarray
    """(R,) in [0, 1): how far along the wall of that cell, growing with x or y."""


class RayCaster:
    """Draws one maze, or one for each frame. `walls`: bool (rows, columns) or (N, rows, columns), closed all round.
    `slots`: int (rows, columns, 4), for every open cell and side which of a frame's wall textures is seen there. Frames
    are `side` pixels high and wide."""

    def __init__(self, walls: np.ndarray, slots: np.ndarray, side: int) -> None:
        assert walls[..., [0, -1], :].all() and walls[..., [0, -1]].all(), "an open border"
        self._walls = walls
        self._slots = slots.reshape(-1)
        self._side = side
        steps = (np.arange(side, dtype=np.float32) + 0.5) / (side / 2) - 1
        self._across = steps * np.float32(_SLOPE)  # (W,): right for every length forward
        self._up = -self._across  # (H,): the same upwards
        self._focal = side / 2 / _SLOPE  # pixels
        self._palette = _palette()
        blend = (self._up[: side // 2] / _SLOPE)[:, None]
        sky = _pack(np.array(SKY[0]) * (1 - blend) + np.array(SKY[1]) * blend)
        self._sky = (len(self._palette.colors) + np.arange(side // 2, dtype=np.int32))[:, None]  # (H / 2, 1)
        self._colors = np.concatenate([self._palette.colors, sky])
        depth = EYE / self._up[: side // 2][::-1]  # of the floor in the lower half's rows
        self._floor_depth = depth[:, None]
        stretch = (
            np.square(depth) / (EYE * self._focal) * TEXELS
        )  # texels that one row spans: more than one column does
        self._floor_level = _level(stretch)[:, None].astype(np.int32)

    def draw(
        self,
        position: np.ndarray,
        heading: np.ndarray,
        textures: np.ndarray,
        spheres: np.ndarray,
        colors: np.ndarray,
    ) -> np.ndarray:
        """Draw the view of a camera, uint8 (N, H, W, 3). A nearer sphere hides a farther one; spheres may not overlap.

        Args:
            position: (N, 2), in open cells.
            heading: (N,), degrees.
            textures: int (N, slots), of WALL_COLORS.
            spheres: Centers (N, O, 2).
            colors: int (N, O), of SPHERE_COLORS.
        """
        frames = np.empty((len(position), self._side, self._side, 3), np.uint8)
        chunk = max(1, CHUNK // self._side**2)
        for start in range(0, len(position), chunk):
            part = slice(start, start + chunk)
            walls = self._walls if self._walls.ndim == 2 else self._walls[part]
            self._draw(walls, position[part], heading[part], textures[part], spheres[part], colors[part], frames[part])
        return frames

    def _draw(
        self,
        walls: np.ndarray,
        position: np.ndarray,
        heading: np.ndarray,
        textures: np.ndarray,
        spheres: np.ndarray,
        colors: np.ndarray,
        out: np.ndarray,
    ) -> None:
        count, side = len(position), self._side
        position = position.astype(np.float32)
        forward, right = (axis.astype(np.float32) for axis in axes(heading))
        ray = forward[:, None] + self._across[:, None] * right[:, None]  # (N, W, 2)
        ray = ray.reshape(-1, 2)
        origin = position.repeat(side, 0)
        frame = np.arange(count).repeat(side)
        hits = cast(walls, origin, ray, None if walls.ndim == 2 else frame)
        texture = textures[frame, self._slots[hits.cell * 4 + hits.side]]
        texels = self._wall(hits, texture)
        self._floor(origin, ray, hits.depth, texels)
        pixels = self._colors.take(texels)  # (H, N * W), red, green, blue and nothing
        self._spheres(position, forward, right, spheres, colors, hits.depth, pixels)
        channels = pixels.view(np.uint8).reshape(side, count, side, 4)
        for channel in range(3):
            out[..., channel] = channels[..., channel].transpose(1, 0, 2)

    def _wall(self, hits: Hits, texture: np.ndarray) -> np.ndarray:
        """Indices of colors, int32 (H, R): each ray's wall, and the sky above it. Below it they mean nothing."""
        level = _level(hits.depth * np.float32(TEXELS / WALL / self._focal))
        size = (TEXELS >> level).astype(np.float32)
        shade = 1 - hits.side % 2
        column = (hits.along * size).astype(np.int32) * (TEXELS >> level)
        first = (self._palette.walls[shade, texture, level] + column).astype(np.int32)
        height = self._up[:, None] * (hits.depth * size * np.float32(1 / WALL))
        height += size * np.float32(EYE / WALL)  # in texels above the floor
        texels = height.astype(np.int32)
        texels += first
        np.copyto(texels[: self._side // 2], self._sky, where=height[: self._side // 2] >= size)
        return texels

    def _floor(self, origin: np.ndarray, ray: np.ndarray, depth: np.ndarray, texels: np.ndarray) -> None:
        """Write the floor into `texels` (H, R), in the lower half, where it is nearer than the wall."""
        x, y = (self._floor_texel(origin[:, axis], ray[:, axis]) for axis in (0, 1))
        x <<= LEVELS - 1 - self._floor_level
        x += y
        x += self._palette.floor[self._floor_level]
        np.copyto(texels[self._side // 2 :], x, where=depth > self._floor_depth)

    def _floor_texel(self, origin: np.ndarray, ray: np.ndarray) -> np.ndarray:
        """How far along the floor's texture each ray (R,) strikes it, int32 (H / 2, R) in texels of its row's level."""
        place = ray * (self._floor_depth * TEXELS)
        place += origin * TEXELS
        texel = place.astype(np.int32)
        texel >>= self._floor_level
        texel &= (TEXELS >> self._floor_level) - 1
        return texel

    def _spheres(
        self,
        position: np.ndarray,
        forward: np.ndarray,
        right: np.ndarray,
        spheres: np.ndarray,
        colors: np.ndarray,
        depth: np.ndarray,
        pixels: np.ndarray,
    ) -> None:
        """Paint the visible parts of spheres onto `pixels` (H, R). Walls are at `depth` (R,).

        A pixel's ray t * (1, x, s), forward, right and up of the eye, meets the sphere at (f, l, -EYE) where
        a t^2 - 2 b t + c = 0 with a = 1 + x^2 + s^2, b = f + l x - EYE s, c = f^2 + l^2 + EYE^2 - RADIUS^2.
        """
        side = self._side
        offset = spheres.astype(np.float32) - position[:, None]  # (N, O, 2)
        ahead = np.einsum("noi,ni->no", offset, forward)
        aside = np.einsum("noi,ni->no", offset, right)
        reach = np.abs(aside) * np.float32(_COSINE) - ahead * np.float32(_SINE)  # outside the view's edge
        farthest = depth.reshape(len(position), side).max(1, keepdims=True)
        frame, which = np.nonzero((ahead > -RADIUS) & (reach < RADIUS) & (ahead - RADIUS < farthest))
        ahead, aside = ahead[frame, which], aside[frame, which]
        order = np.argsort(-(np.square(ahead) + np.square(aside)))  # the nearest is painted last
        frame, ahead, aside = frame[order], ahead[order], aside[order]
        color = colors[frame, which[order]].astype(np.int32)

        low, high = _columns(ahead, aside)
        edges = np.clip(np.stack([low, high]) * np.float32(self._focal) + side / 2, 0, side)
        start = np.floor(edges[0]).astype(np.int64)
        item, column = _ragged(start, np.ceil(edges[1]).astype(np.int64) - start)
        x, f, l = self._across[column], ahead[item], aside[item]  # noqa: E741 - the docstring's letters
        flat = 1 + x * x
        along = f + l * x
        squared = f * f + l * l
        under = along * along - flat * (squared - np.float32(RADIUS**2))
        near = (along - np.sqrt(np.maximum(under, 0))) / flat
        ray = frame[item] * side + column
        visible = (under > 0) & (near + np.sqrt(np.maximum(under, 0)) * 2 / flat > 0) & (near < depth[ray])
        item, column, ray, x, along, squared, flat, near = (
            values[visible] for values in (item, column, ray, x, along, squared, flat, near)
        )

        lowest = np.maximum(near, np.float32(1e-3))  # the bottom of what the floor leaves: EYE below, this deep or more
        top = np.maximum((RADIUS - EYE) / lowest, (RADIUS - EYE) / (lowest + 2 * RADIUS))
        begin = np.clip(np.floor(side / 2 - top * self._focal), 0, side).astype(np.int64)
        end = np.clip(np.ceil(side / 2 + EYE / lowest * self._focal), 0, side).astype(np.int64)
        part, row = _ragged(begin, end - begin)
        s = self._up[row]
        a = flat[part] + s * s
        b = along[part] - np.float32(EYE) * s
        under = b * b - a * (squared[part] + np.float32(EYE**2 - RADIUS**2))
        root = np.sqrt(np.maximum(under, 0))
        t = (b - root) / a
        height = np.float32(EYE) + s * t
        visible = (under > 0) & (t > 0) & (height > 0) & (t < depth[ray[part]])
        part, row, root, a, height = (values[visible] for values in (part, row, root, a, height))
        facing = root / (np.float32(RADIUS) * np.sqrt(a))  # cosine between the surface's normal and the way back
        light = np.float32(0.4) + np.float32(0.4) * facing + np.float32(0.2 / RADIUS) * height
        tone = (np.minimum(light, 1) * (TONES - 1) + np.float32(0.5)).astype(np.int32)
        pixels[row, ray[part]] = self._colors[self._palette.spheres + color[item[part]] * TONES + tone]


def axes(heading: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors forward and to the right, (..., 2) each, of headings (...)."""
    angle = np.deg2rad(heading.astype(np.float64))
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)


def cast(walls: np.ndarray, origin: np.ndarray, ray: np.ndarray, maze: np.ndarray | None = None) -> Hits:
    """Follow rays from cell to cell until they meet a wall.

    `origin` (R, 2) lies in open cells; `ray` (R, 2) has any length; `walls` is bool (rows, columns). With `maze`, int
    (R,), each ray is in one of the mazes `walls` (M, rows, columns).

    Source: Amanatides and Woo 1987."""
    rows, columns = walls.shape[-2:]
    solid = walls.reshape(-1)
    ray = np.where(np.abs(ray) < 1e-9, ray.dtype.type(1e-9), ray)
    corner = np.floor(origin)
    pace = 1 / np.abs(ray)  # between two grid lines of x, and of y
    next_line = np.where(ray > 0, corner + 1 - origin, origin - corner) * pace
    stride = np.where(ray > 0, 1, -1) * np.array([1, columns])
    cell = (corner[:, 1] * columns + corner[:, 0]).astype(np.int64)
    if maze is not None:
        cell += maze * (rows * columns)
    hits = Hits(np.empty(len(ray), ray.dtype), np.empty_like(cell), np.empty_like(cell), np.empty(len(ray), ray.dtype))
    pending = np.arange(len(ray))
    (x, y), (pace_x, pace_y), (stride_x, stride_y) = (
        np.ascontiguousarray(pair.T) for pair in (next_line, pace, stride)
    )
    while len(pending):
        vertical = x < y  # the line crossed next is one of x
        depth = np.where(vertical, x, y)
        beyond = cell + np.where(vertical, stride_x, stride_y)
        hit = solid[beyond]
        if hit.any():
            at = pending[hit]
            hits.depth[at] = depth[hit]
            hits.cell[at] = cell[hit]
            hits.side[at] = np.where(vertical[hit], 0, 1)
            go_on = ~hit
            pending, beyond, vertical, x, y, pace_x, pace_y, stride_x, stride_y = (
                values[go_on] for values in (pending, beyond, vertical, x, y, pace_x, pace_y, stride_x, stride_y)
            )
        cell = beyond
        x = x + pace_x * vertical
        y = y + pace_y * ~vertical
    if maze is not None:
        np.subtract(hits.cell, maze * (rows * columns), out=hits.cell)
    other = 1 - hits.side
    every = np.arange(len(ray))
    point = origin[every, other] + hits.depth * ray[every, other]
    np.subtract(point, np.floor(point), out=hits.along)
    np.minimum(hits.along, np.nextafter(ray.dtype.type(1), ray.dtype.type(0)), out=hits.along)
    hits.side[ray[every, hits.side] < 0] += 2
    return hits


def texture(name: str) -> np.ndarray:
    """The wall texture of a color of WALL_COLORS: uint8 (TEXELS along, TEXELS up, 3)."""
    number = list(WALL_COLORS).index(name)
    return _paint(_wall_pattern(number), WALL_COLORS[name]).round().astype(np.uint8)


def floor_texture() -> np.ndarray:
    """The floor of a cell: uint8 (TEXELS, TEXELS, 3)."""
    return _paint(_floor_pattern(), FLOOR_COLOR).round().astype(np.uint8)


_SINE, _COSINE = np.sin(np.deg2rad(FIELD_OF_VIEW / 2)), np.cos(np.deg2rad(FIELD_OF_VIEW / 2))
_SLOPE = _SINE / _COSINE


class _Palette(NamedTuple):
    """All colors that do not depend on a frame's size, and where they begin."""

    colors: np.ndarray  # uint32 (colors,), red in its first byte
    walls: np.ndarray  # int (2, 8, LEVELS): lit or in shade, texture, level
    floor: np.ndarray  # int (LEVELS,)
    spheres: int


@functools.cache
def _palette() -> _Palette:
    pieces: list[np.ndarray] = []
    begins: list[int] = [0]

    def add(image: np.ndarray) -> list[int]:
        """All levels of a square texture. Returns where each begins."""
        first = len(begins) - 1
        for level in range(LEVELS):
            size = TEXELS >> level
            shrunk = image.reshape(size, 1 << level, size, 1 << level, 3).mean((1, 3))
            pieces.append(_pack(shrunk.reshape(-1, 3)))
            begins.append(begins[-1] + size * size)
        return begins[first:-1]

    walls = [[add(texture(name) * shade) for name in WALL_COLORS] for shade in (1.0, SHADE)]
    floor = add(floor_texture())
    tones = np.arange(TONES)[:, None] / (TONES - 1)
    spheres = [_pack(np.minimum(np.array(rgb) * (255 / 220), 255) * tones) for rgb in SPHERE_COLORS.values()]
    return _Palette(np.concatenate(pieces + spheres), np.array(walls), np.array(floor, np.int32), begins[-1])


def _wall_pattern(number: int) -> np.ndarray:
    """Return the brightness pattern of each texture (TEXELS, TEXELS)."""
    u, v = np.meshgrid(*[(np.arange(TEXELS) + 0.5) / TEXELS] * 2, indexing="ij")
    course = np.floor(v * 4)
    patterns = (
        lambda: -1.0 * ((v * 4 % 1 < 0.25) | ((u * 2 + course / 2) % 1 < 0.125)),  # bricks
        lambda: np.sin(2 * np.pi * 4 * u),  # pillars
        lambda: 1.0 * ((np.floor(u * 4) + course) % 2),  # checkers
        lambda: -np.abs((np.abs(u - 0.5) + np.abs(v - 0.5)) * 4 % 2 - 1),  # diamonds
        lambda: np.sin(2 * np.pi * 4 * v),  # planks
        lambda: 1.0 * (((u + v) * 4) % 1 < 0.5),  # slanting stripes
        lambda: -1.0 * (np.hypot(u * 2 % 1 - 0.5, v * 2 % 1 - 0.5) < 0.3),  # discs
        lambda: np.cos(2 * np.pi * 6 * np.hypot(u - 0.5, v - 0.5)),  # rings
    )
    return patterns[number]()


def _floor_pattern() -> np.ndarray:
    """Four tiles a cell."""
    u, v = np.meshgrid(*[np.arange(TEXELS)] * 2, indexing="ij")
    half = TEXELS // 2
    joint = (u % half < 1) | (v % half < 1)
    return np.where(joint, -1.0, 0.35 * ((u // half + v // half) % 2))


def _paint(pattern: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """A pattern in shades of a color that is kept as the mean: float (TEXELS, TEXELS, 3)."""
    pattern = pattern - pattern.mean()
    return np.array(color) * (1 + 0.18 * pattern / np.abs(pattern).max())[..., None]


def _pack(colors: np.ndarray) -> np.ndarray:
    """(n, 3) in 0..255 to uint32 (n,)."""
    red, green, blue = np.rint(colors).astype(np.uint32).T
    return red | green << 8 | blue << 16


def _level(texels: np.ndarray) -> np.ndarray:
    """The level of a texture that shows about one texel a pixel, where level 0 shows `texels`: int of its shape."""
    return np.clip(np.log2(texels) + 0.5, 0, LEVELS - 1).astype(np.int64)


def _columns(ahead: np.ndarray, aside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Between which x the rays (1, x) can meet a circle of RADIUS at (ahead, aside); all x if it is beside the eye."""
    beyond = ahead * ahead - np.float32(RADIUS**2)
    spread = RADIUS * np.sqrt(np.maximum(beyond + aside * aside, 0))
    before = (ahead > RADIUS) & (beyond > 1e-4)
    beyond = np.where(before, beyond, 1)
    middle = aside * ahead / beyond
    spread = np.where(before, spread / beyond, np.inf)
    middle = np.where(before, middle, 0)
    return middle - spread, middle + spread


def _ragged(start: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of an item i and a number start[i] .. start[i] + count[i] - 1, in order: two int (sum of counts,)."""
    count = np.maximum(count, 0)
    item = np.arange(len(count)).repeat(count)
    first = np.cumsum(count) - count
    return item, np.arange(len(item)) - (first - start)[item]
