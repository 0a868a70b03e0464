"""Names of environments for gymnasium, which calls `register` as a plugin. Imports nothing else of wm."""

from __future__ import annotations

DREAM_ID = "wm/Dream-v0"


def register() -> None:
    """Register `wm/Dream-v0`, unless it is registered."""
    from gymnasium.envs.registration import register, registry

    if DREAM_ID not in registry:
        register(DREAM_ID, "wmcli.dream:DreamEnv", vector_entry_point="wmcli.dream:DreamVectorEnv")
