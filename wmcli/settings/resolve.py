"""Resolve settings from a preset and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wmcli.config import Section, flat, lay_over, names_kind, nested, new_name, parse_override, preset_values, validate
from wmcli.errors import UsageError
from wmcli.settings.tree import Settings


def resolve(preset: str, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of a preset with overrides.

    An override of the kind of a section restarts that section from the defaults of the new kind, its `alternatives`,
    and the keys that both kinds share. Overrides of other keys apply after it, in whatever order they are given.

    Args:
        preset: Name, or path of a TOML file.
        overrides: Texts `section.key=value`. The last one of a key wins.
        base: Plain values in place of the preset's.

    Raises:
        UsageError: A preset or key is unknown, a value is wrong, or values contradict each other.
    """
    values = dict(base) if base is not None else preset_values(preset)
    where = f"preset {preset}"
    parsed = [(text, *parse_override(text)) for text in overrides]
    # A kind first, then its keys; outer kinds before inner ones.
    for text, path, value in sorted(parsed, key=lambda each: len(each[1]) if names_kind(".".join(each[1])) else 99):
        if (name := new_name(".".join(path))) is not None:
            raise UsageError(f"--set {text}: {'.'.join(path)} is called {name} since wm 0.2.0.")
        values = lay_over(values, nested(path, value))
        where = f"--set {text}" if len(overrides) == 1 else "--set"
    settings = validate(Settings, values, where)
    ignored = _ignored(settings)
    if ignored and (base is None or not _ignored(validate(Settings, base, where))):
        raise UsageError(f"{where}: {ignored}")
    return settings


def _ignored(settings: Settings) -> str | None:
    """Describe a setting that cannot have its effect. None if there is none; old runs may have one and stay usable."""
    rows = getattr(settings.dynamics, "rows", "windows")
    sampling = settings.training.sampling
    if sampling in ("dfs", "prioritized") and rows != "windows":
        return (
            f"training.sampling = '{sampling}' favors some windows, but dynamics.rows = '{rows}' takes all"
            " episodes in turn: set training.sampling=windows, or dynamics.rows=windows"
        )
    if (at_once := settings.training.frames_at_once) and not settings.dynamics.learns_in_parts:
        return (
            f"training.frames_at_once = {at_once} has no effect on dynamics of kind '{settings.dynamics.kind}':"
            " set training.frames_at_once=0"
        )
    if at_once and getattr(settings.tokenizer, "norm", None) == "batch":
        return (
            f"training.frames_at_once = {at_once} would change the statistics of tokenizer.norm = 'batch', which are"
            " those of a whole batch: set training.frames_at_once=0, or another tokenizer.norm"
        )
    return None


def flatten(values: Section | Mapping[str, Any]) -> dict[str, Any]:
    """Flatten settings, or their plain values, to `{"controller.learning_rate": 1e-4, ...}` in the same order."""
    return flat(values.plain() if isinstance(values, Section) else values)
