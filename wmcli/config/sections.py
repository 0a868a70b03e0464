"""The base class of all settings, and validation with messages of one line.

A section is a frozen pydantic model in the file of the part that it configures. The docstring below a field describes
it and ends with its unit. `wmcli.settings` combines the sections.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from wmcli.config.kinds import KINDS
from wmcli.errors import UsageError


class Section(BaseModel):
    """A group of settings: immutable, strictly typed, without unknown keys. Numbers are finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    tag: ClassVar[str] = "kind"
    """Key that names the kind of the section, where there are several."""
    incidental: ClassVar[tuple[str, ...]] = ()
    """Keys that say how a result is computed and not what it is. They identify no job."""

    @classmethod
    def kind_name(cls) -> str:
        """Return the value of the tag that chooses this class; empty for a section of a single kind."""
        field = cls.model_fields.get(cls.tag)
        return str(get_args(field.annotation)[0]) if field and get_origin(field.annotation) is Literal else ""

    def plain(self) -> dict[str, Any]:
        """Return all values as JSON has them."""
        return self.model_dump(mode="json")

    def changed(self) -> dict[str, Any]:
        """Return the plain values that differ from the defaults of this class, and its `kind`.

        Those of `incidental` keys are left out. They identify a job, so a new key at its default does not change the
        identity of an older job.
        """
        plain, values = self.plain(), {}
        for name, field in type(self).model_fields.items():
            if name in self.incidental:
                continue
            value = getattr(self, name)
            if isinstance(value, Section):
                if inside := value.changed():
                    values[name] = inside
            elif name == "kind" or value != field.get_default(call_default_factory=True):
                values[name] = plain[name]
        return values


T = TypeVar("T", bound=Section)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the nearest candidate, or all of them."""
    candidates = list(candidates)
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(sorted(candidates))}." if candidates else "it has no keys."


def validate(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a section from plain values.

    Values are read as JSON. A list fits a tuple and a whole number fits a float, but a text does not fit a number.

    Args:
        kind: Class of the section.
        values: Nested tables.
        where: Source of the values, for messages.

    Raises:
        UsageError: A value is wrong. The message names the key, the problem and the nearest key.
    """
    try:
        plain = _numbers(values, where)
        return kind.model_validate_json(json.dumps(plain, default=str))  # str: TOML has dates, but no setting does
    except ValidationError as error:
        raise UsageError(f"{where}: {problem(kind, values, error)}") from None


LARGEST = 2**63 - 1
"""Of the whole numbers in settings: what arrays can count."""


def _numbers(value: Any, where: str, key: str = "") -> Any:
    """Return plain values with -0.0 as 0.0, which is equal but would identify another job.

    Raises:
        UsageError: A whole number is too large.
    """
    if isinstance(value, Mapping):
        return {name: _numbers(each, where, f"{key}.{name}" if key else str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(each, where, key) for each in value]
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UsageError(f"{where}: {one_line(key)}: a number of more digits than wm counts with ({LARGEST} is most).")
    return value + 0.0 if isinstance(value, float) else value


def problem(kind: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> str:
    """Describe the first problem of `values` in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    loc, section, kinds = _place(kind, first["loc"])
    path = [str(part) for part in loc]
    key = one_line(".".join(path))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        fields = list(section.model_fields) if section else []
        owners = [name for name, each in kinds.items() if path[-1] in each.model_fields]
        if owners and isinstance(section, type) and issubclass(section, Section):
            have = f"only {owners[0]} has it" if len(owners) == 1 else f"{', '.join(owners)} have it"
            return f"unknown key '{key}': {section.tag} '{section.kind_name()}' has no such key, {have}."
        return f"unknown key '{key}'; {did_you_mean(path[-1][:100], fields)}"
    if first["type"] == "union_tag_invalid":
        tag, tags = first["ctx"]["tag"], first["ctx"]["expected_tags"].replace("'", "").split(", ")
        name = KINDS[key].tag if key in KINDS else "kind"
        return f"{key}.{name} = '{tag}': there is none; {did_you_mean(tag, tags)}"
    if first["type"] == "missing":
        return f"{key} is missing."
    if first["type"] == "value_error" or not key:  # the message of a validator, which names the keys
        return f"{key}: {message}" if key else message
    return f"{key}{_value_at(values, loc)}: {message}"


def _value_at(values: Any, path: tuple[int | str, ...]) -> str:
    """Return ` = value` for the value at `path`. Empty if a part of the path is no key."""
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return ""
    return f" = {one_line(repr(values))}"


def one_line(text: str) -> str:
    """Return a text in one line of at most 100 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


class _Place(NamedTuple):
    """Place of an error."""

    path: tuple[int | str, ...]
    """As a user would write it."""
    section: type[BaseModel] | None
    """Section that the key is missing from or wrong in; None where that is no section."""
    kinds: dict[str, type[BaseModel]]
    """All kinds of that section; empty where there is only one."""


def _place(kind: type[BaseModel], loc: tuple[int | str, ...]) -> _Place:
    """Find an error by pydantic's location, which has the kind of a section that has several in its path."""
    path: list[int | str] = []
    section: type[BaseModel] | None = kind
    kinds: dict[str, type[BaseModel]] = {}
    below: dict[str, type[BaseModel]] = {"": kind}  # the sections that the next part may be a key of
    siblings: dict[str, type[BaseModel]] = {}
    for part in loc:
        if len(below) > 1 and part in below:
            siblings, below = below, {"": below[str(part)]}
            continue
        path.append(part)
        section, kinds, siblings = next(iter(below.values()), None), siblings, {}
        if section is not None and part in section.model_fields:
            below = _kinds(section.model_fields[str(part)].annotation)
        elif isinstance(part, str):  # a number is a place in a list, whose sections are those of the list
            below = {}
    return _Place(tuple(path), section, kinds)


def _kinds(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the sections that a field may hold, by their kind; by their class where they have none."""
    if not _is_section(annotation):
        return {name: each for inner in get_args(annotation) for name, each in _kinds(inner).items()}
    name = annotation.kind_name() if issubclass(annotation, Section) else ""
    return {name or str(annotation): annotation}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
