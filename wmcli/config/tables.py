"""Nested tables of plain values: parse overrides, merge and flatten."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from wmcli.config.toml import MAX_TOML_DOTS
from wmcli.errors import UsageError


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse `'run.keep=3'` to `(('run', 'keep'), 3)`. A value that is no TOML is a string.

    Raises:
        UsageError: The text has another form.
    """
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path) or len(path) > MAX_TOML_DOTS:
        raise UsageError(f"--set {text}: write it as section.key=value, for example --set dynamics.learning_rate=3e-4")
    value = value.strip()
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return path, value
    return path, table["value"] if len(table) == 1 else value  # a second line could have made a second key


def format_override(key: str, value: Any) -> str:
    """Return the text that `parse_override` reads as a value: a plain one where that is no other TOML value."""
    if isinstance(value, str) and parse_override(f"key={value}")[1] == value:
        return f"{key}={value}"
    text = json.dumps(value, ensure_ascii=False)  # which is TOML for numbers, booleans, lists, and texts but for this:
    return f"{key}={text}".replace("\x7f", "\\u007f")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested tables key by key. Values of `over` win."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return `{'a': {'b': 1}}` for `(('a', 'b'), 1)`."""
    for part in reversed(path):
        value = {part: value}
    return value


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables to `{"controller.learning_rate": 1e-4, ...}`, in the same order."""

    def walk(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield prefix + key, value

    return dict(walk("", table))


def unflat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested tables of a flat one: the inverse of `flat`."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values = merge(values, nested(tuple(key.split(".")), value))
    return values
