"""The memory tasks by the names they are registered under: the sizes of the paper, and smaller ones for a CPU."""

from __future__ import annotations

from wmcli.envs.distracting_memory import DistractingMemory
from wmcli.envs.mazes import Maze
from wmcli.envs.memory_task import Task
from wmcli.envs.multi_doors_keys import MultiDoorsKeys
from wmcli.envs.rooms import FULL, SMALL, Rooms, TeleportRooms
from wmcli.envs.walking import COARSE

TASKS: dict[str, Task] = {
    **{f"wm/DistractingMemory-{width}-v0": DistractingMemory(width=width) for width in (12, 20, 40, 100, 200, 400)},
    **{f"wm/MultiDoorsKeys-{keys}-v0": MultiDoorsKeys(keys=keys) for keys in (2, 3, 5, 7)},
    **{
        f"wm/{name}Rooms{suffix}-v0": kind(rooms=rooms, size=size)
        for size, small in ((FULL, ""), (SMALL, "Small"))
        for kind, suffix in ((Rooms, small), (TeleportRooms, f"{small}Teleport"))
        for name, rooms in (("Two", 2), ("Four", 4), ("Ten", 10))
    },
    "wm/Maze-9-v0": Maze(),
    "wm/Maze-15-v0": Maze(cells=15, objects=6, rooms=9, largest=2),
    "wm/MazeSmall-v0": Maze(
        cells=7, objects=2, rooms=3, largest=2, loops=0.25, context=60, query=60, side=32, gait=COARSE
    ),
}
