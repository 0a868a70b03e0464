"""Presets: TOML files that state what differs from the defaults, or from the preset that they name in `base`.

A preset is named as one of those that ship with the package, or by the path of a file that ends in `.toml`. Beside the
sections of the settings it has a header, and `[alternatives.backbone.KIND]` tables: settings that `--backbone KIND`
brings along.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from wmcli.config.migrations import refuse_old_keys
from wmcli.config.sections import did_you_mean, one_line
from wmcli.config.tables import merge
from wmcli.config.toml import MAX_TOML_BYTES, read_toml
from wmcli.errors import UsageError

PRESET_HEADER = ("about", "paper", "system", "cost", "base")
"""Description in a line, publication, system, minutes of a run, and the preset that it differs from."""

DEFAULT_KINDS = {"tokenizer": "vq", "dynamics": "token", "backbone": "retnet", "controller": "reinforce"}
"""The sections that there are several kinds of, and the kind of each where none is named."""

SHARED_KEYS = {"backbone": ("width", "layers", "dropout")}
"""Keys of a section that every kind of it has and that a change of `kind` keeps."""


def preset_names() -> list[str]:
    """Return the presets that ship with the package, sorted."""
    folder = resources.files("wmcli.presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def is_file(preset: str) -> bool:
    """Return whether a preset is named by the path of a file."""
    return preset.endswith(".toml")


def read_preset(name: str) -> dict[str, Any]:
    """Return a preset's own table, as written.

    Raises UsageError for an unknown name, or a file that is missing, no TOML or written for another version.
    """
    if is_file(name):
        table = read_toml(_read_text(Path(name)), name)
        refuse_old_keys(table, name)
        return table
    names = preset_names()
    if name not in names:
        raise UsageError(f"no preset called '{name}'; {did_you_mean(name, names)} A file of your own ends in .toml.")
    text = resources.files("wmcli.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return read_toml(text, f"preset {name}")


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TOML_BYTES:
            raise UsageError(f"{path}: larger than {MAX_TOML_BYTES} bytes, so it is no preset.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"preset {path}: {getattr(error, 'strerror', None) or error}") from None


def preset_values(name: str) -> dict[str, Any]:
    """Return the settings that a preset states, with those of its `base`, without its header."""
    return _values(name, ())


def preset_header(name: str) -> dict[str, Any]:
    """Return a preset's header (see `PRESET_HEADER`), with its base's entries for its own missing ones."""
    own = {key: value for key, value in read_preset(name).items() if key in PRESET_HEADER}
    base = _base(name, own)
    above = preset_header(base) if base is not None else dict.fromkeys(PRESET_HEADER)
    return above | {"base": None} | own


def _values(name: str, above: tuple[str, ...]) -> dict[str, Any]:
    if name in above:
        raise UsageError(f"preset {above[0]}: base leads in a circle: {' -> '.join((*above, name))}")
    table = read_preset(name)
    base = _base(name, table)
    values = {} if base is None else _values(base, (*above, name))
    return lay_over(values, {key: value for key, value in table.items() if key not in PRESET_HEADER})


def _base(name: str, table: Mapping[str, Any]) -> str | None:
    """Return the preset that one differs from; a path is relative to the file that names it."""
    base = table.get("base")
    if base is not None and not isinstance(base, str):
        raise UsageError(f"preset {name}: base = {one_line(repr(base))}: name one preset.")
    if base is not None and is_file(base) and is_file(name):
        return (Path(name).parent / base).as_posix()
    return base


def lay_over(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values` with `over` laid on them, table by table.

    Where `over` changes the `kind` of a section, only its `SHARED_KEYS` stay, and the section takes what
    `alternatives` state for the new kind.
    """
    values = {**values, "alternatives": merge(values.get("alternatives", {}), over.get("alternatives", {}))}
    for section, table in over.items():
        if section == "alternatives":
            continue
        before = values.get(section, {})
        if _changes_kind(section, before, table):
            kept = {key: before[key] for key in SHARED_KEYS.get(section, ()) if key in before}
            values[section] = merge(kept, _alternative(values, section, table["kind"]))
        values = merge(values, {section: table})
    if not values["alternatives"]:
        del values["alternatives"]
    return values


def _changes_kind(section: str, before: Any, table: Any) -> bool:
    if not isinstance(before, Mapping) or not isinstance(table, Mapping) or "kind" not in table:
        return False
    return bool(table["kind"] != before.get("kind", DEFAULT_KINDS.get(section)))


def _alternative(values: Mapping[str, Any], section: str, kind: Any) -> Mapping[str, Any]:
    table = values["alternatives"].get(section, {})
    found = table.get(kind, {}) if isinstance(table, Mapping) and isinstance(kind, str) else {}
    return found if isinstance(found, Mapping) else {}
