"""Presets: TOML files with the settings that differ from the defaults, or from the preset named in `base`.

A preset is the name of one in the package, or the path of a file that ends in `.toml`. A header describes it. Its
`[alternatives.backbone.KIND]` tables are the settings that `--backbone KIND` starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from wmcli.config.kinds import KINDS
from wmcli.config.migrations import keys_of_kind, refuse_old_keys
from wmcli.config.sections import did_you_mean, one_line
from wmcli.config.tables import merge
from wmcli.config.toml import MAX_TOML_BYTES, read_toml
from wmcli.errors import ArtifactError, UsageError
from wmcli.reading import read_file

PRESET_HEADER = ("about", "paper", "system", "cost", "base")
"""Keys of the header: description, publication, system, duration of a run, and the preset to start from."""


def preset_names() -> list[str]:
    """Return the names of the presets in the package, sorted."""
    folder = resources.files("wmcli.presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def is_file(preset: str) -> bool:
    """Return whether a preset is a path."""
    return preset.endswith(".toml")


def read_preset(name: str) -> dict[str, Any]:
    """Return a preset's own table, without that of its base.

    Raises:
        UsageError: The name is unknown, or the file is missing, no TOML or of another version.
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
        return read_file(path, MAX_TOML_BYTES, links=True).decode()
    except (ArtifactError, OSError, ValueError) as error:
        raise UsageError(f"preset {path}: {getattr(error, 'strerror', None) or error}") from None


def preset_values(name: str) -> dict[str, Any]:
    """Return the settings of a preset and its bases, without their headers."""
    return _values(name, ())


def preset_header(name: str) -> dict[str, Any]:
    """Return a preset's header, see `PRESET_HEADER`. Missing entries are those of its base."""
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
    """Return the base of a preset, or None. A path is relative to the file that names it."""
    base = table.get("base")
    if base is not None and not isinstance(base, str):
        raise UsageError(f"preset {name}: base = {one_line(repr(base))}: name one preset.")
    if base is not None and is_file(base) and is_file(name):
        return (Path(name).parent / base).as_posix()
    return base


def lay_over(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings table by table. Values of `over` win.

    Where `over` changes the kind of a section, the section keeps only the `shared` keys of its `KINDS`, and takes the
    `alternatives` of the new kind.
    """
    alternatives = merge(values.get("alternatives", {}), over.get("alternatives", {}))
    merged = {**values, **{key: _lay(key, values.get(key), over[key], alternatives) for key in over}}
    merged.pop("alternatives", None)
    return merged | ({"alternatives": alternatives} if alternatives else {})


def _lay(path: str, before: Any, over: Any, alternatives: Mapping[str, Any]) -> Any:
    """Merge the values of both at `path`."""
    if not isinstance(over, Mapping):
        return over
    table = dict(before) if isinstance(before, Mapping) else {}
    if path in KINDS and (kinds := KINDS[path]).tag in over:
        kind = over[kinds.tag]
        if kind != table.get(kinds.tag, kinds.default):
            shared = keys_of_kind(path, str(kind)).intersection(table if kinds.shared is None else kinds.shared)
            common = {key: value for key, value in table.items() if key in shared and key != kinds.tag}
            table = merge(common, _alternative(alternatives, path, kind))
    return table | {key: _lay(f"{path}.{key}", table.get(key), value, alternatives) for key, value in over.items()}


def _alternative(alternatives: Mapping[str, Any], path: str, kind: Any) -> Mapping[str, Any]:
    """Return the values that `alternatives` state for a kind of a section."""
    kinds = alternatives.get(path, {})
    table = kinds.get(kind, {}) if isinstance(kinds, Mapping) and isinstance(kind, str) else {}
    return table if isinstance(table, Mapping) else {}
