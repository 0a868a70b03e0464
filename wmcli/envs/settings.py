"""Settings of the environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wmcli.config import Section


class EnvironmentSettings(Section):
    """The game and its protocol."""

    id: str = Field(default="wm/Catch-v0", min_length=1)
    """Game: a gymnasium id, an Atari game (`Pong`), or `module:Id`, whose module, installed or in the current folder,
    is imported first."""
    size: int = Field(default=64, ge=8, le=1024)
    """Height and width of a frame, which is size x size x 3, uint8. [pixels]"""
    protocol: Literal["plain", "rem", "drama", "unizero", "unizero-sticky"] = "plain"
    """Protocol: `plain` for any gymnasium environment with images; for Atari `rem` (REM, IRIS), `drama`, `unizero`, or
    `unizero-sticky`, with sticky actions."""
    count: int = Field(default=1, ge=1, le=1024)
    """Parallel environments. [environments]"""
