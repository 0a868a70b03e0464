"""Every setting with its type, default, unit and description, for `wm settings` and docs/settings.md.

`python -m wmcli.settings.describe > docs/settings.md` writes that page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic.fields import FieldInfo

from wmcli.config import Section, flat, kinds_above
from wmcli.settings.tree import Settings

# A description may end with its unit: "Training sequence length. [frames]".
_DESCRIPTION = re.compile(r"(?P<text>.*?)(?: \[(?P<unit>[^\[\]]+)\])?")
_BOUNDS = {
    Ge: ("ge", ">="),
    Gt: ("gt", ">"),
    Le: ("le", "<="),
    Lt: ("lt", "<"),
    MultipleOf: ("multiple_of", "multiple of"),
}


class Setting(NamedTuple):
    """A key of the settings."""

    key: str
    """`section.key`."""
    kind: str
    """Kinds of the sections that have the key, outermost first, joined by a space; empty where there is only one."""
    type: str
    """Values that it takes, as a person would write them."""
    default: Any
    """JSON value."""
    unit: str
    description: str


def settings_of_section(name: str | None = None) -> list[Setting]:
    """List every setting, or those of one section or key, in the order of sections and kinds."""
    return [each for each in _walk("", "", Settings) if name is None or f"{each.key}.".startswith(f"{name}.")]


def explained(settings: Settings) -> dict[str, dict[str, str]]:
    """Return unit and description of each key of some settings."""
    table = flat(settings.plain())
    return {
        each.key: {"unit": each.unit, "description": each.description}
        for each in settings_of_section()
        if each.kind == " ".join(kinds_above(each.key, table)[: len(each.kind.split())])
    }


def _walk(prefix: str, kind: str, section: type[Section]) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        sections = list(_sections(field.annotation))
        if not sections:
            yield _setting(prefix + name, kind, field)
        for each in sections:
            own = each.kind_name() if len(sections) > 1 else ""
            yield from _walk(f"{prefix}{name}.", " ".join(filter(None, (kind, own))), each)


def _setting(key: str, kind: str, field: FieldInfo) -> Setting:
    default = get_args(field.annotation)[0] if field.is_required() else field.get_default(call_default_factory=True)
    bounds = ", ".join(_bounds(field.metadata))
    text = _type(field.annotation) + (f" {bounds}" if bounds else "")
    parts = _DESCRIPTION.fullmatch(" ".join((field.description or "").split()))
    assert parts, key
    return Setting(key, kind, text, _plain(default), parts["unit"] or "", parts["text"])


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for each in get_args(annotation):
            yield from _sections(each)


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for each in metadata:
        if type(each) in _BOUNDS:
            name, sign = _BOUNDS[type(each)]
            yield f"{sign} {getattr(each, name):g}"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = ", ".join(_bounds([each for extra in arguments[1:] for each in getattr(extra, "metadata", [extra])]))
        return _type(arguments[0]) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        return " | ".join(str(each) for each in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_type(each) for each in arguments if each is not NoneType)
    if origin in (tuple, list):
        inside = [_type(each) for each in arguments if each is not Ellipsis]
        return f"list of {inside[0]}" if len(set(inside)) == 1 else f"[{', '.join(inside)}]"
    if origin is dict:
        return "table"
    return {bool: "true | false", str: "text", int: "int", float: "float"}.get(annotation, str(annotation))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def markdown() -> str:
    """Return docs/settings.md: a table for each kind of each section."""
    lines = [
        "# Settings",
        "",
        "Every key of the settings, made from the descriptions in the code. `wm settings` prints the same. Write a key",
        "in a preset file under its section, or behind `--set`, as in `--set dynamics.learning_rate=3e-4`.",
    ]
    shown: tuple[str, str] | None = None
    for each in settings_of_section():
        section = each.key.partition(".")[0] if "." in each.key else ""
        if (section, each.kind) != shown:
            shown = (section, each.kind)
            title = f"`{section}`" if section else "Top level"
            lines += ["", f"## {title}" + (f", kind `{each.kind}`" if each.kind else ""), ""]
            lines += ["| key | type | default | unit | description |", "|---|---|---|---|---|"]
        cells = (f"`{each.key}`", each.type, f"`{_toml(each.default)}`", each.unit, each.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
