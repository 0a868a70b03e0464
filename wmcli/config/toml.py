"""Read TOML, possibly hostile, and write it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from wmcli.config.digests import is_deeper
from wmcli.errors import UsageError

MAX_TOML_BYTES = 1 << 18  # a preset is a page; a larger file is a mistake, or hostile to the parser
MAX_TOML_DOTS = 50  # in a line; the parser takes quadratic time in the parts of a dotted key


def read_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML.

    Args:
        text: TOML.
        where: Source of the text, for messages.

    Raises:
        UsageError: The text is too large or no TOML.
    """
    if len(text) > MAX_TOML_BYTES:
        raise UsageError(f"{where}: larger than {MAX_TOML_BYTES} bytes, so it is no settings file.")
    if any(line.count(".") > MAX_TOML_DOTS for line in text.splitlines()):
        raise UsageError(f"{where}: a line with more than {MAX_TOML_DOTS} dots, so it is no settings file.")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits raises a plain ValueError
        raise UsageError(f"{where}: not valid TOML: {error}") from None
    if is_deeper(values, MAX_TOML_DOTS):
        raise UsageError(f"{where}: nested more than {MAX_TOML_DOTS} deep, so it is no settings file.")
    return values


def to_toml(values: Mapping[str, Any]) -> str:
    """Return nested tables of text, numbers, booleans and lists as TOML.

    TOML has no null, so None is left out. Settings then take their default, the only source of a None.
    """
    return tomli_w.dumps(_without_none(values))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value
