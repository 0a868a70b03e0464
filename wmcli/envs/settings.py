"""Settings of the environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wmcli.config import Section


class EnvironmentSettings(Section):
    """Which game is played, and how."""

    id: str = Field(default="wm/Catch-v0", min_length=1)
    """The game: a gymnasium id, `module:Id` (the module, installed or in the current folder, is imported first), or an
    Atari game (`Pong`)."""
    size: int = Field(default=64, ge=8, le=1024)
    """Height and width of a frame (pixels); frames are size x size x 3, uint8."""
    protocol: Literal["plain", "rem", "drama", "unizero", "unizero-sticky"] = "plain"
    """How it is played: `plain` for any gymnasium environment with images, `rem` for Atari as REM and IRIS play it,
    `drama` as Drama does, `unizero` as UniZero does, `unizero-sticky` the same with sticky actions."""
    count: int = Field(default=1, ge=1, le=1024)
    """Environments played side by side (number)."""
