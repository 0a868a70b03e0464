"""The ray-caster: projection by hand, every pixel against a picture put together in the plainest way, textures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wmcli.envs.ray_caster import (
    EYE,
    FLOOR_COLOR,
    RADIUS,
    SPHERE_COLORS,
    WALL,
    WALL_COLORS,
    RayCaster,
    cast,
    floor_texture,
    texture,
)

RED = list(WALL_COLORS).index("red")
SLOPE = math.tan(math.radians(40))
NOTHING = np.zeros((1, 0, 2)), np.zeros((1, 0), np.uint8)


def random_maze(rng: np.random.Generator, rows: int = 9, columns: int = 11, share: float = 0.25) -> np.ndarray:
    walls = rng.random((rows, columns)) < share
    walls[[0, -1]] = walls[:, [0, -1]] = True
    return walls


def open_points(rng: np.random.Generator, walls: np.ndarray, count: int) -> np.ndarray:
    cells = np.argwhere(~walls)[:, ::-1]
    return cells[rng.integers(len(cells), size=count)] + rng.uniform(0.12, 0.88, (count, 2))


def room_of(side: int, pixels: int = 64) -> RayCaster:
    """One square room, each wall with a slot of its own."""
    walls = np.ones((side + 2, side + 2), bool)
    walls[1:-1, 1:-1] = False
    return RayCaster(walls, np.broadcast_to(np.arange(4), (*walls.shape, 4)), pixels)


def look(caster: RayCaster, x: float, y: float, heading: float, textures=(RED,) * 4, spheres=NOTHING) -> np.ndarray:
    return caster.draw(np.array([[x, y]]), np.array([heading]), np.array([textures]), *spheres)[0].astype(int)


def by_hand(walls: np.ndarray, position, heading: float, spheres, side: int) -> np.ndarray:
    """What each pixel shows, (H, W): -3 sky, -2 floor, -1 wall, else a sphere. One pixel after the other; walls by
    every grid line that a ray crosses, spheres by the distance of a ray from their middle."""
    seen = np.empty((side, side), int)
    angle = math.radians(heading)
    for row in range(side):
        for column in range(side):
            right, up = ((column + 0.5) / side * 2 - 1) * SLOPE, (1 - (row + 0.5) / side * 2) * SLOPE
            ray = np.array([math.cos(angle) + right * math.sin(angle), -math.sin(angle) + right * math.cos(angle), up])
            length = math.inf
            for axis in (0, 1):
                for line in range(walls.shape[1 - axis] + 1):
                    t = (line - position[axis]) / ray[axis]
                    if 0 < t < length:
                        beyond = np.floor([position[0] + t * ray[0], position[1] + t * ray[1]]).astype(int)
                        beyond[axis] = line if ray[axis] > 0 else line - 1
                        inside = 0 <= beyond[0] < walls.shape[1] and 0 <= beyond[1] < walls.shape[0]
                        if inside and walls[beyond[1], beyond[0]]:
                            length = t
            what = -1 if EYE + length * up < WALL else -3
            if up < 0 and EYE / -up < length:
                what, length = -2, EYE / -up
            for number, centre in enumerate(spheres):
                way = np.array([*(np.asarray(centre) - position), -EYE])
                closest = way @ ray / (ray @ ray)
                gap = RADIUS**2 - np.sum((closest * ray - way) ** 2)
                if gap > 0:
                    t = closest - math.sqrt(gap / (ray @ ray))
                    if 0 < t < length:
                        what, length = number, t
            seen[row, column] = what
    return seen


@pytest.mark.parametrize("name", WALL_COLORS)
def test_textures_have_the_mean_colors_and_a_pattern(name) -> None:
    image = texture(name).astype(float)
    assert np.abs(image.mean((0, 1)) - WALL_COLORS[name]).max() < 0.5
    assert image.std((0, 1)).max() > 5
    assert np.abs(floor_texture().mean((0, 1)) - FLOOR_COLOR).max() < 0.5


def test_patterns_tell_textures_apart_without_color() -> None:
    gray = [texture(name).mean(-1) / np.mean(WALL_COLORS[name]) for name in WALL_COLORS]
    assert all(np.abs(one - other).mean() > 0.05 for i, one in enumerate(gray) for other in gray[:i])


@pytest.mark.parametrize(("distance", "above", "below"), [(1.0, 17, 11), (2.0, 9, 6), (4.0, 4, 3)])
def test_a_wall_fills_the_rows_that_perspective_gives_it(distance, above, below) -> None:
    """32 / tan 40 = 38.137 pixels for each unit of slope. Two cells away the wall's top is 0.45 / 2 * 38.137 = 8.6 rows
    above the middle and its foot 0.3 / 2 * 38.137 = 5.7 rows below; a pixel shows what its middle hits. It does so in
    every column, which a fisheye would bend."""
    frame = look(room_of(9), 10 - distance, 5.5, 0.0)
    wall = (frame[..., 0] > 2 * frame[..., 2]) & (frame[..., 0] > 2 * frame[..., 1])
    rows = np.zeros((64, 1), bool)
    rows[32 - above : 32 + below] = True
    assert (wall == rows).all()


def test_each_side_shows_its_own_wall() -> None:
    names = ("red", "blue", "green", "purple")
    numbers = [list(WALL_COLORS).index(name) for name in names]
    for name, heading in zip(names, (0, -90, 180, 90), strict=True):  # east, south, west, north
        middle = look(room_of(3), 2.5, 2.5, heading, numbers)[22:38].mean((0, 1))
        color = np.array(WALL_COLORS[name])
        assert middle @ color / np.linalg.norm(middle) / np.linalg.norm(color) > 0.998


def test_rays_meet_the_first_wall_of_a_dense_march() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        walls = random_maze(rng)
        origin, angle = open_points(rng, walls, 100), rng.uniform(0, 2 * np.pi, 100)
        ray = np.stack([np.cos(angle), np.sin(angle)], -1) * rng.uniform(0.5, 2, (100, 1))
        hits = cast(walls, origin, ray)
        marched = origin[:, None] + np.linspace(0, 1 - 1e-6, 4000)[:, None] * (hits.depth[:, None] * ray)[:, None]
        column, row = np.floor(marched).astype(int).transpose(2, 0, 1)
        assert not walls[row, column].any()
        column, row = np.floor(origin + (hits.depth + 1e-6)[:, None] * ray).astype(int).T
        assert walls[row, column].all()
        east, south = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])[hits.side].T
        assert (hits.cell == (row - south) * walls.shape[1] + column - east).all()
        point = origin + hits.depth[:, None] * ray
        assert np.allclose(hits.along, np.where(east != 0, point[:, 1], point[:, 0]) % 1, atol=1e-9)


def test_every_pixel_shows_the_nearest_surface() -> None:
    """Walls before spheres, spheres before walls, spheres before spheres, the floor before their lower halves."""
    rng = np.random.default_rng(1)
    side, colors = 24, np.array([[1, 2, 4]])
    hues = np.array([SPHERE_COLORS[name] for name in ("green", "blue", "yellow")], float)
    hues /= np.linalg.norm(hues, axis=-1, keepdims=True)
    compared, wrong, found = 0, 0, np.zeros(6, int)
    for _ in range(40):
        walls = random_maze(rng, 7, 7, 0.1)
        caster = RayCaster(walls, np.zeros((*walls.shape, 4), int), side)
        spheres = rng.permutation(np.argwhere(~walls)[:, ::-1])[:3] + 0.5
        position, heading = open_points(rng, walls, 1), rng.uniform(0, 360, 1)
        want = by_hand(walls, position[0], heading[0], spheres, side)
        frame, bare = (
            caster.draw(position, heading, np.array([[RED]]), *shown)[0].astype(float)
            for shown in ((spheres[None], colors), NOTHING)
        )
        got = np.where(bare[..., 0] > 2 * bare[..., 2], -1, np.where(np.arange(side)[:, None] < side // 2, -3, -2))
        got = np.where((frame != bare).any(-1), (frame @ hues.T).argmax(-1), got)
        wrong += (got != want).sum()
        compared += got.size
        found += [(want == number).sum() for number in range(-3, 3)]
    assert wrong <= 1e-4 * compared and found.min() > 40  # rounding at edges


def test_a_wall_hides_the_sphere_behind_it() -> None:
    walls = np.ones((3, 8), bool)
    walls[1, 1:-1] = False
    spheres = np.array([[[5.5, 1.5]]]), np.array([[1]])
    free, shut = walls.copy(), walls.copy()
    shut[1, 3] = True
    changed = []
    for maze in (free, shut):
        caster = RayCaster(maze, np.zeros((*maze.shape, 4), int), 64)
        changed.append((look(caster, 1.5, 1.5, 0, (RED,), spheres) != look(caster, 1.5, 1.5, 0, (RED,))).any())
    assert changed == [True, False]


def test_turning_left_moves_things_right() -> None:
    caster, columns = room_of(9), []
    spheres = np.array([[[8.5, 5.5]]]), np.array([[1]])
    for heading in (-20.0, 0.0, 20.0):
        changed = look(caster, 4.5, 5.5, heading, spheres=spheres) != look(caster, 4.5, 5.5, heading)
        columns.append(np.nonzero(changed.any(-1))[1].mean())
    middle = [31.5 + 32 * math.tan(math.radians(heading)) / SLOPE for heading in (-20, 0, 20)]
    assert np.allclose(columns, middle, atol=0.7)


def test_many_frames_are_each_drawn_as_if_alone() -> None:
    rng = np.random.default_rng(2)
    walls = random_maze(rng)
    caster = RayCaster(walls, rng.integers(5, size=(*walls.shape, 4)), 32)
    count = 300  # more than one chunk
    spheres = np.stack([rng.permutation(np.argwhere(~walls)[:, ::-1])[:4] + 0.5 for _ in range(count)])
    batch = (
        open_points(rng, walls, count),
        rng.uniform(0, 360, count),
        rng.integers(8, size=(count, 5)),
        spheres,
        rng.integers(6, size=(count, 4)),
    )
    together = caster.draw(*batch)
    assert together.shape == (count, 32, 32, 3) and together.dtype == np.uint8
    for number in range(0, count, 7):
        assert (caster.draw(*(part[number : number + 1] for part in batch))[0] == together[number]).all()
    assert caster.draw(*(part[:0] for part in batch)).shape == (0, 32, 32, 3)
