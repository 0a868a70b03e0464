"""Settings of the environment."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from wmcli.config import Section

OF_OTHERS = ("data/",)  # ids of imported data, which nobody opens
OPENING = ("GymV21", "GymV26")  # environments that open another one, which their arguments name
WRITING = ("RecordVideo",)  # wrappers that write to the folder that their arguments name


class EnvironmentSettings(Section):
    """The game and its protocol."""

    incidental: ClassVar[tuple[str, ...]] = ("processes", "step_seconds")

    id: str = Field(default="wm/Catch-v0", min_length=1)
    """Game: a gymnasium id, an Atari game (`Pong`), or `module:Id`, whose module, installed or in the current folder,
    is imported first; in a run from elsewhere with --trust only."""
    size: int = Field(default=64, ge=8, le=1024)
    """Height and width of a frame, which is size x size x 3, uint8. [pixels]"""
    protocol: Literal["plain", "rem", "drama", "unizero", "unizero-sticky"] = "plain"
    """Protocol: `plain` for any gymnasium environment; for Atari `rem` (REM, IRIS), `drama`, `unizero`, or
    `unizero-sticky`, with sticky actions."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment, as in `--set environment.kwargs.map_name=8x8` (plain)."""
    observe: Literal["observation", "render", "both"] = "observation"
    """What is observed: the environment's observation, the picture that it renders, or a dict of both (plain)."""
    wrappers: tuple[str, ...] = Field(default=(), strict=False)
    """Wrappers around the environment, the innermost first: of gymnasium.wrappers, or `module:Class`, with
    arguments as in `FrameStackObservation(stack_size=4)` (plain)."""
    time_limit: int = Field(default=0, ge=0)
    """Decisions after which an episode is cut off; 0 is the environment's own limit (plain). [decisions]"""
    action_repeat: int = Field(default=1, ge=1)
    """Steps of the environment that each action is repeated for, with rewards summed (plain). [steps]"""
    count: int = Field(default=1, ge=1, le=1024)
    """Parallel environments. [environments]"""
    processes: int = Field(default=0, ge=0, le=256)
    """Processes that step the environments, at most one for each; 0 steps them in wm's own. Results are the same.
    [processes]"""
    step_seconds: float = Field(default=0.0, ge=0)
    """Longest time that an environment may take for a step or a reset; then it is ended, and what was played before is
    kept. Needs a process beside wm's own, and takes one where `processes` is 0. 0 sets no limit. [seconds]"""

    @property
    def code(self) -> tuple[str, ...]:
        """What opening the environment imports by a name of the user's, or lets write: `module:Id`, and wrappers."""
        wrappers = [text for text in self.wrappers if ":" in text.partition("(")[0] or text.startswith(WRITING)]
        own = (":" in self.id and not self.id.startswith(OF_OTHERS)) or self.id.startswith(OPENING)
        return (*([self.id] if own else []), *wrappers)
