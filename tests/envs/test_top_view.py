"""Memory tasks from above: the walk is the one that compact states tell, and things lie where they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from wmcli.cli.main import run
from wmcli.envs import tiles
from wmcli.envs.mazes import Maze
from wmcli.envs.memory_task import play
from wmcli.envs.ray_caster import FLOOR_COLOR, SPHERE_COLORS, WALL_COLORS
from wmcli.envs.rooms import TELEPORT, Rooms
from wmcli.envs.tasks import TASKS
from wmcli.envs.top_view import FACE, PIXELS, WALL, top_view
from wmcli.report.top_view import top_views

SMALL = ("DistractingMemory-12", "MultiDoorsKeys-2", "MazeSmall", "TwoRoomsSmall", "TwoRoomsSmallTeleport")
LARGE = ("DistractingMemory-100", "MultiDoorsKeys-5", "Maze-9", "FourRooms", "FourRoomsTeleport", "TenRoomsSmall")
EVERY = [f"wm/{name}-v0" for name in SMALL] + [pytest.param(f"wm/{name}-v0", marks=pytest.mark.slow) for name in LARGE]
MAZES = [
    "wm/TwoRoomsSmallTeleport-v0",
    "wm/MazeSmall-v0",
    pytest.param("wm/FourRooms-v0", marks=pytest.mark.slow),
    pytest.param("wm/Maze-9-v0", marks=pytest.mark.slow),
]
PAINTS, SPHERES = (np.array([*table.values()]) for table in (WALL_COLORS, SPHERE_COLORS))


@pytest.mark.parametrize("name", EVERY)
def test_the_walk_and_the_teleport_are_those_of_the_script(name: str) -> None:
    task, seed = TASKS[name], 5
    found, played = top_view(task, seed), play(task, np.array([seed]))
    assert len(found.position) == task.context + task.query and found.context == task.context
    jumped = np.append(False, played.action[0, :-1] == TELEPORT) & ("Teleport" in name)
    assert np.array_equal(found.jumps, jumped) and jumped.sum() == ("Teleport" in name)
    if isinstance(task, Rooms | Maze):
        np.testing.assert_allclose(found.position, task.read(played.compact_states[0]).position, atol=1e-5)
    else:  # what the agent sees around it is the board around its position, but for what has changed since
        board = found.board.reshape(found.cells[0], tiles.PIXELS, found.cells[1], tiles.PIXELS, 3).swapaxes(1, 2)
        around = np.pad(board, ((2, 2), (2, 2), (0, 0), (0, 0), (0, 0)))
        around[:2], around[-2:], around[:, :2], around[:, -2:] = (tiles.PICTURES[tiles.WALL],) * 4
        for frame in range(task.context):
            column, row = np.floor(found.position[frame]).astype(int)
            seen = tiles.PICTURES[played.compact_states[0, frame]].reshape(5, 5, 8, 8, 3)
            here = around[row : row + 5, column : column + 5].copy()
            here[2, 2] = seen[2, 2]  # the agent
            assert np.array_equal(seen, here), frame


@pytest.mark.parametrize("name", MAZES)
def test_walls_faces_and_spheres_of_a_maze_lie_where_they_are(name: str) -> None:
    task = TASKS[name]
    assert isinstance(task, Rooms | Maze)
    view, content = top_view(task, 5), task.read(play(task, np.array([5])).compact_states[0, 0])
    walls = task.layout.walls if isinstance(task, Rooms) else content.walls
    assert view.cells == walls.shape and view.board.shape == (*(PIXELS * size for size in walls.shape), 3)
    blocks = view.board.reshape(walls.shape[0], PIXELS, walls.shape[1], PIXELS, 3).swapaxes(1, 2)
    middle = blocks[:, :, PIXELS // 2, PIXELS // 2]
    assert (middle[walls] == WALL).all()
    colors = content.colors.reshape(-1) if isinstance(task, Rooms) else np.arange(task.objects)
    objects = content.objects.reshape(-1, 2)
    for (x, y), color in zip(objects, colors, strict=True):
        assert (view.board[int(y * PIXELS), int(x * PIXELS)] == SPHERES[color]).all()
    free = ~walls
    free[np.floor(objects[:, 1]).astype(int), np.floor(objects[:, 0]).astype(int)] = False
    assert (middle[free] == FLOOR_COLOR).all()
    if isinstance(task, Rooms):  # each room's east, south, west and north wall, in front of its middle
        reach = task.size.room // 2
        for (x, y), textures in zip(task.layout.middles, content.textures, strict=True):
            for texture, (east, south) in zip(textures, ((1, 0), (0, 1), (-1, 0), (0, -1)), strict=True):
                # beside the middle, where there is no corridor
                row, column = int(y) + south * (reach + 1), int(x) + east * (reach + 1)
                row, column = row + reach * (east != 0), column + reach * (south != 0)
                near = {1: slice(0, FACE), -1: slice(-FACE, None), 0: slice(None)}
                face = blocks[row, column][near[south], near[east]]
                assert (face == PAINTS[texture]).all()


def test_episodes_differ_and_a_seed_is_always_the_same() -> None:
    task = TASKS["wm/TwoRoomsSmall-v0"]
    one, again, other = (top_view(task, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.board, again.board) and np.array_equal(one.position, again.position)
    assert not np.array_equal(one.board, other.board)


def test_the_picture_has_a_board_for_each_task_and_breaks_the_line_at_a_teleport() -> None:
    views = {name: top_view(TASKS[name], 3) for name in ("wm/TwoRoomsSmallTeleport-v0", "wm/DistractingMemory-12-v0")}
    figure = top_views(views)
    rooms, hall = figure.axes
    assert (
        rooms.get_title(loc="left") == "wm/TwoRoomsSmallTeleport-v0" and hall.get_images()[0].get_array().shape[2] == 3
    )
    (jump,) = np.flatnonzero(views["wm/TwoRoomsSmallTeleport-v0"].jumps)
    context, query, dots, arrival, _ = (line.get_xydata() for line in rooms.get_lines())
    assert len(context) == 61 and np.isnan(query).any(1).sum() == 1 and len(query) == 31 + 1 + 1
    walk = views["wm/TwoRoomsSmallTeleport-v0"].position
    np.testing.assert_allclose(dots, walk[jump - 1 : jump + 1])
    np.testing.assert_allclose(arrival[0], walk[jump])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["context", "query", "teleport", "start"]
    alone = dataclasses.replace(TASKS["wm/TwoRoomsSmall-v0"])
    assert "teleport" not in [text.get_text() for text in top_views({"a": top_view(alone, 3)}).legends[0].get_texts()]


def test_the_command_draws_tasks_and_refuses_what_it_cannot_draw(tmp_path, capsys) -> None:
    file = tmp_path / "a.png"
    assert run(["envs", "wm/MultiDoorsKeys-2-v0", "wm/MazeSmall-v0", "--picture", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    with Image.open(file) as picture:
        assert picture.height > picture.width / 2
    for arguments, line in (
        (
            ["wm/Catch-v0", "--picture", "x.png"],
            "--picture draws memory tasks, and wm/Catch-v0 is none: choose",
        ),
        (["--picture", "x.png"], "--picture draws the tasks that you name"),
        (["wm/MazeSmall-v0"], "wm/MazeSmall-v0: ENV is for --picture FILE"),
        (["wm/MazeSmall-v0", "--picture", "x.txt"], "cannot write x.txt: "),
        (["wm/MazeSmall-v0", "--picture", "x.png", "--json"], "--picture prints no table"),
    ):
        assert run(["envs", *arguments]) == 2
        assert capsys.readouterr().err.startswith(f"wm envs: {line}")
