"""Reading TOML from people and files that may be hostile, and writing it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from wmcli.errors import UsageError

MAX_TOML_BYTES = 1 << 18  # a preset is a page; anything larger is a mistake and could be hostile to the parser
MAX_TOML_DOTS = 50  # in a line: the parser's time grows with the square of a dotted key's parts


def read_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML. Raises UsageError with one line that names `where`."""
    if len(text) > MAX_TOML_BYTES:
        raise UsageError(f"{where}: larger than {MAX_TOML_BYTES} bytes, so it is no settings file.")
    if any(line.count(".") > MAX_TOML_DOTS for line in text.splitlines()):
        raise UsageError(f"{where}: a line with more than {MAX_TOML_DOTS} dots, so it is no settings file.")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a plain ValueError comes of an integer of thousands of digits
        raise UsageError(f"{where}: not valid TOML: {error}") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """Write nested tables of text, numbers, truth values and lists so that `read_toml` returns the same.

    TOML has no null. A None is left out; settings read it as their default, the only place it can come from.
    """
    return tomli_w.dumps(_without_none(values))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value
