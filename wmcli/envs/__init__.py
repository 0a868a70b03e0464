"""Environments, in the form of `wmcli.spaces`.

Importing this package registers `wm/Catch-v0`, `wm/Quarters-v0`, `wm/DelayedCopy-v0`, `wm/GridWorld-v0`,
`wm/GridWorldGoal-v0`, the memory tasks (see tasks.py) and `wm/Dream-v0` (see `wmcli.dream`) with gymnasium. It imports
no torch.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from wmcli.envs.catch import CATCH_ID
from wmcli.envs.delayed_copy import DELAYED_COPY_ID, STEPS
from wmcli.envs.environment import list_environments, make, protocol
from wmcli.envs.grid_world import GRID_WORLD_GOAL_ID, GRID_WORLD_ID
from wmcli.envs.processes import AnyStreams, follows_seed, open_streams
from wmcli.envs.quarters import QUARTERS_ID
from wmcli.envs.settings import EnvironmentSettings
from wmcli.envs.tasks import TASKS
from wmcli.envs.vector import Streams, Transition

DREAM_ID = "wm/Dream-v0"
_entries: tuple[tuple[str, str, dict[str, Any], int | None], ...] = (
    (CATCH_ID, "wmcli.envs.catch:Catch", {}, None),
    (QUARTERS_ID, "wmcli.envs.quarters:Quarters", {}, None),
    (DELAYED_COPY_ID, "wmcli.envs.delayed_copy:DelayedCopy", {}, STEPS),
    (GRID_WORLD_ID, "wmcli.envs.grid_world:GridWorld", {"respawn": "both"}, None),
    (GRID_WORLD_GOAL_ID, "wmcli.envs.grid_world:GridWorld", {"respawn": "goal"}, None),
    *(
        (name, "wmcli.envs.memory_task:MemoryEnv", {"task": task}, task.context + task.query)
        for name, task in TASKS.items()
    ),
)
for _id, _entry_point, _kwargs, _steps in _entries:
    if _id not in gymnasium.registry:
        gymnasium.register(id=_id, entry_point=_entry_point, kwargs=_kwargs, max_episode_steps=_steps)
if DREAM_ID not in gymnasium.registry:
    gymnasium.register(DREAM_ID, "wmcli.dream:make", vector_entry_point="wmcli.dream:make_vec")

__all__ = [
    "AnyStreams",
    "EnvironmentSettings",
    "Streams",
    "Transition",
    "follows_seed",
    "list_environments",
    "make",
    "open_streams",
    "protocol",
]
