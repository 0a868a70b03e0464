"""The base class of all settings, and validation with one clear line.

A section is a frozen pydantic model in the file of the part that it configures. Each field has a line that describes
it, with its unit. `wmcli.settings` puts the sections together.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError

from wmcli.errors import UsageError


class Section(BaseModel):
    """A group of settings: immutable, typed strictly, unknown keys refused, numbers finite (JSON has no others)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def plain(self) -> dict[str, Any]:
        """Return all values as JSON has them."""
        return self.model_dump(mode="json")

    def changed(self) -> dict[str, Any]:
        """Return the plain values that differ from the defaults of this class, and `kind` where it has one.

        A job is known by these, so that a key added later, at its default, changes no job of an earlier version.
        """
        plain, values = self.plain(), {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                if inside := value.changed():
                    values[name] = inside
            elif name == "kind" or value != field.get_default(call_default_factory=True):
                values[name] = plain[name]
        return values


T = TypeVar("T", bound=Section)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The second half of a "no such thing" message: the nearest known word, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(sorted(known))}." if known else "it has no keys."


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
    key = one_line(".".join(path))
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
    return f" = {one_line(repr(values))}"


def one_line(text: str) -> str:
    """Return a text in one line of at most 100 characters."""
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
