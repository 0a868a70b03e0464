"""Environments: what `wm` plays, always as size x size x 3 uint8 frames with actions 0 .. n-1.

Importing this package registers `wm/Catch-v0` with gymnasium. No torch in here.
"""

from __future__ import annotations

import gymnasium

from wmcli.envs.catch import CATCH_ID
from wmcli.envs.environment import list_environments, make, protocol
from wmcli.envs.settings import EnvironmentSettings
from wmcli.envs.vector import Streams, Transition

if CATCH_ID not in gymnasium.registry:
    gymnasium.register(id=CATCH_ID, entry_point="wmcli.envs.catch:Catch")

__all__ = ["EnvironmentSettings", "Streams", "Transition", "list_environments", "make", "protocol"]
