"""Settings: the base class of every section, presets, overrides.

A section is a frozen pydantic model that stands in the file of the part it configures; each field carries one line that
says what it is, with its unit. `wmcli.settings` puts the sections together. A preset is a TOML file in `presets/` that
states only what differs from the defaults, or from another preset that it names in `base`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError

from wmcli.errors import UsageError

MAX_TOML_BYTES = 1 << 18  # a preset is a page; anything larger is a mistake and could be hostile to the parser
MAX_TOML_DOTS = 50  # in a line: the parser's time grows with the square of a dotted key's parts


class Section(BaseModel):
    """A group of settings: immutable, typed strictly, unknown keys refused, numbers finite (JSON has no others)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def identity(self) -> dict[str, Any]:
        """Return the plain values that jobs are known by: without keys `ADDED` by a later version that stand at their
        default, so that what an earlier version made is found again."""
        values = self.model_dump(mode="json")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                values[name] = value.identity()
            elif field.json_schema_extra == ADDED and value == field.default:
                del values[name]
        return values


ADDED: dict[str, Any] = {"added": True}
"""`Field(json_schema_extra=ADDED)` marks a key that version 0.1.0 did not have: its default does what was done without
it."""


T = TypeVar("T", bound=Section)


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value that digests are taken of: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The second half of a "no such thing" message: the nearest known word, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(sorted(known))}." if known else "it has no keys."


def read_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; a syntax error becomes one line that names `where`."""
    if len(text) > MAX_TOML_BYTES:
        raise UsageError(f"{where}: larger than {MAX_TOML_BYTES} bytes, so it is no settings file.")
    if any(line.count(".") > MAX_TOML_DOTS for line in text.splitlines()):
        raise UsageError(f"{where}: a line with more than {MAX_TOML_DOTS} dots, so it is no settings file.")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a plain ValueError comes of an integer of thousands of digits
        raise UsageError(f"{where}: not valid TOML: {error}") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """Write nested tables of text, numbers, truth values and lists so that `read_toml` gives the same back.

    TOML has no null: a None is left out, which the settings read as their default, the only place it can come from.
    """
    return "\n".join(_toml_table((), values)).strip() + "\n"


def _toml_table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (plain or not tables):
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    for key, value in plain.items():
        yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in tables.items():
        yield from _toml_table((*path, key), value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):  # JSON's escapes are TOML's, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):  # a table in a list
        inside = ", ".join(f"{_toml_key(key)} = {_toml_value(each)}" for key, each in value.items() if each is not None)
        return f"{{{inside}}}"
    raise TypeError(f"no TOML for {type(value).__name__}")


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`'run.keep=3'` -> `(('run', 'keep'), 3)`. The value is read as TOML, else taken as a string."""
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


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it, tables merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """`(('a', 'b'), 1)` -> `{'a': {'b': 1}}`."""
    for part in reversed(path):
        value = {part: value}
    return value


def validate(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build `kind` from plain values. Raises UsageError with one line: the key, what is wrong, the nearest key.

    The values are read as JSON is: a list fits a tuple and a whole number fits a float, but no text fits a number.
    """
    try:
        return kind.model_validate_json(json.dumps(values, default=str))  # str: TOML has dates, no setting is one
    except ValidationError as error:
        raise UsageError(f"{where}: {problem(kind, values, error)}") from None


def problem(kind: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> str:
    """The first thing that is wrong with `values`, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    loc, section = _place(kind, first["loc"])
    path = [str(part) for part in loc]
    key = _one_line(".".join(path))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        fields = list(section.model_fields) if section else []
        return f"unknown key '{key}'; {did_you_mean(path[-1][:100], fields)}"
    if first["type"] == "union_tag_invalid":
        tag, known = first["ctx"]["tag"], first["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f"{key}.kind = '{tag}': there is none; {did_you_mean(tag, known)}"
    if first["type"] == "missing":
        return f"{key} is missing."
    if first["type"] == "value_error" or not key:  # a check that names what it found itself
        return f"{key}: {message}" if key else message
    return f"{key}{_given(values, loc)}: {message}"


def _given(values: Any, path: tuple[int | str, ...]) -> str:
    """` = value` for the value at `path`; nothing if a part of the path is no key, as the name of an alternative."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return ""
    return f" = {_one_line(repr(values))}"


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def _place(kind: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], type[BaseModel] | None]:
    """Where an error is, as a user would write it, and the section it is in: None where that is no section.

    Pydantic puts the `kind` of a section that has several into the path; it is taken out.
    """
    place: list[int | str] = []
    section: type[BaseModel] | None = kind
    below: dict[str, type[BaseModel]] = {"": kind}  # the sections that the next part may be a key of
    for part in loc:
        if len(below) > 1 and part in below:
            below = {"": below[str(part)]}
            continue
        place.append(part)
        section = next(iter(below.values()), None)
        if section is not None and part in section.model_fields:
            below = _kinds(section.model_fields[str(part)].annotation)
        elif isinstance(part, str):  # a number is a place in a list, whose sections are those of the list
            below = {}
    return tuple(place), section


def _kinds(annotation: Any) -> dict[str, type[BaseModel]]:
    """The sections that a field may hold, by their `kind` (by their class where they have none)."""
    if _is_section(annotation):
        found = [annotation]
    else:
        found = [section for each in get_args(annotation) for section in _kinds(each).values()]
    return {str(each.model_fields["kind"].default if "kind" in each.model_fields else each): each for each in found}


def chosen_by_kind(default: str) -> Discriminator:
    """For a field whose section is one of several: the one that its key `kind` names, `default` where it names none."""

    def kind_of(value: Any) -> str:
        return str(value.get("kind", default) if isinstance(value, Mapping) else getattr(value, "kind", default))

    return Discriminator(kind_of)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


# -- presets ----------------------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    """Every preset that ships with the package, sorted."""
    folder = resources.files("wmcli.presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


PRESET_HEADER = ("about", "paper", "system", "cost", "base")
"""What a preset says of itself beside its settings: in a line what it is, where it is published, which system it is one
of, how long `wm run` takes with it, and the preset it differs from."""


def read_preset(name: str) -> dict[str, Any]:
    """A preset's own table, as written: of its header what is not its base's, and the sections that differ."""
    names = preset_names()
    if name not in names:
        raise UsageError(f"no preset called '{name}'; {did_you_mean(name, names)}")
    text = resources.files("wmcli.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return read_toml(text, f"preset {name}")


def preset_values(name: str) -> dict[str, Any]:
    """The settings a preset states, those of its `base` included; its header is left out."""
    return _preset_values(name, ())


def preset_header(name: str) -> dict[str, Any]:
    """What a preset says of itself (see `PRESET_HEADER`), else what its `base` does; `base` is None without one."""
    own = {key: value for key, value in read_preset(name).items() if key in PRESET_HEADER}
    above = preset_header(own["base"]) if "base" in own else dict.fromkeys(PRESET_HEADER)
    return above | {"base": None} | own


def _preset_values(name: str, above: tuple[str, ...]) -> dict[str, Any]:
    if name in above:
        raise UsageError(f"preset {above[0]}: base leads in a circle: {' -> '.join((*above, name))}")
    table = read_preset(name)
    base = table.get("base")
    if base is not None and not isinstance(base, str):
        raise UsageError(f"preset {name}: base = {_one_line(repr(base))}: name one preset.")
    values = {} if base is None else _preset_values(base, (*above, name))
    return merge(values, {key: value for key, value in table.items() if key not in PRESET_HEADER})
