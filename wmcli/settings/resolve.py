"""From a preset and overrides to settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wmcli.config import Section, flat, lay_over, names_kind, nested, new_name, parse_override, preset_values, validate
from wmcli.errors import UsageError
from wmcli.settings.tree import Settings


def resolve(preset: str, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of a preset with overrides laid on top.

    An override that changes the `kind` of a section starts that section from the defaults of the new kind, from its
    `alternatives`, and from the keys that all kinds share. Overrides of its keys come after it in any order.

    Args:
        preset: Name, or path of a TOML file.
        overrides: Texts `section.key=value`, later ones first in rank.
        base: Plain values in place of the preset's.

    Raises:
        UsageError: An unknown preset or key, a wrong type or an impossible combination, in one line.
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
    """Say which setting would count for nothing. Runs of 0.1.0 may have it: they are read, and go on, as they began."""
    rows = getattr(settings.dynamics, "rows", "windows")
    if settings.training.sampling == "dfs" and rows != "windows":
        return (
            f"training.sampling = 'dfs' favors windows that were drawn less often, but dynamics.rows = '{rows}' takes"
            " all episodes in turn: set training.sampling=windows, or dynamics.rows=windows"
        )
    return None


def flatten(values: Section | Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, or their plain values, as `{"controller.learning_rate": 1e-4, ...}` in the same order."""
    return flat(values.plain() if isinstance(values, Section) else values)
