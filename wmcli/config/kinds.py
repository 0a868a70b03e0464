"""Sections of the settings that have several kinds, each with keys of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Discriminator


class Kinds(NamedTuple):
    """The kinds of a section."""

    default: str
    """Kind of a section that names none."""
    tag: str = "kind"
    """Key that names the kind."""
    shared: tuple[str, ...] | None = ()
    """Keys that a change of kind keeps, where the new kind has them; None keeps every such key."""


KINDS: Mapping[str, Kinds] = {
    "collect": Kinds("learned", tag="policy", shared=None),
    "tokenizer": Kinds("vq"),
    "dynamics": Kinds("token"),
    "backbone": Kinds("retnet", shared=("width", "layers", "dropout")),
    "backbone.prior": Kinds("none", shared=None),
    "controller": Kinds("reinforce"),
}
"""By the path of the section."""


def chosen_by_kind(path: str) -> Discriminator:
    """Return pydantic's discriminator of the section at `path`, one of `KINDS`."""
    kinds = KINDS[path]

    def kind_of(value: Any) -> str:
        if isinstance(value, Mapping):
            return str(value.get(kinds.tag, kinds.default))
        return str(getattr(value, kinds.tag, kinds.default))

    return Discriminator(kind_of)


def names_kind(key: str) -> bool:
    """Return whether a key, `section.key`, names the kind of its section."""
    section, _, name = key.rpartition(".")
    return section in KINDS and KINDS[section].tag == name


def kinds_above(key: str, table: Mapping[str, Any]) -> list[str]:
    """Return the kinds of the sections that a key lies in, the outermost first.

    Args:
        key: `section.key`.
        table: Flat settings that state the kinds.
    """
    parts = key.split(".")[:-1]
    sections = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    return [
        str(table.get(f"{section}.{KINDS[section].tag}", KINDS[section].default))
        for section in sections
        if section in KINDS
    ]
