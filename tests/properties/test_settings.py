"""Settings survive every form in which they are written, and an identity is that of the values in force."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from searching import counts, searching

from wmcli.config import canonical_json, format_override, parse_override, preset_names, read_toml, to_toml, validate
from wmcli.errors import UsageError
from wmcli.settings import Settings, flatten, resolve

SECTIONS = ("environment", "collect", "tokenizer", "dynamics", "backbone", "controller", "evaluation", "run")
ODD = st.sampled_from(
    [" a ", "nan", "1", "true", "[]", '"', "\\", "'", "\x7f", "\x00", "\u2028", "\n", "a\nb=1", "\U0001f600"]
)
TEXT = ODD | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.recursive(
    st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner | TEXT, max_size=3),
    max_leaves=4,
)
NAMES = st.text("abcdefgh_", min_size=1, max_size=6)


def changed(value: Any) -> st.SearchStrategy[Any]:
    """Other values of the kind of a value in force, not always in their bounds."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from([value + 1, value + 2, max(value - 1, 0), value * 2, 0, 1])
    if isinstance(value, float):
        return st.sampled_from([value / 2, value * 0.75, value + 0.25, 0.0, 1.0, 1e-7, 3])
    if isinstance(value, list):
        return st.sampled_from([value, value[:1], [*value, *value[-1:]]])
    return st.just(value)


@st.composite
def resolved(draw: st.DrawFn) -> Settings:
    """The settings of a preset with some values changed."""
    preset = draw(st.sampled_from(preset_names()))
    values = flatten(resolve(preset))
    keys = draw(st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True))
    overrides = [format_override(key, draw(changed(values[key]))) for key in keys if values[key] is not None]
    kwargs = draw(st.dictionaries(NAMES, PLAIN, max_size=2))
    if values["environment.protocol"] == "plain":
        overrides += [format_override(f"environment.kwargs.{name}", value) for name, value in kwargs.items()]
    try:
        return resolve(preset, overrides)
    except UsageError as error:
        assert "\n" not in str(error)
        assume(False)
        raise


@counts(6, 300)
def test_settings_come_back_from_every_form(examples: int) -> None:
    @searching(examples)
    @given(resolved())
    def holds(settings: Settings) -> None:
        plain = settings.plain()
        assert validate(Settings, read_toml(to_toml(plain), "toml"), "toml") == settings
        assert validate(Settings, json.loads(json.dumps(plain)), "json") == settings
        given = {key: value for key, value in flatten(settings).items() if value is not None}  # TOML has no null
        assert resolve("rem", [format_override(key, value) for key, value in given.items()], base={}) == settings

    holds()


@counts(60, 3000)
def test_an_override_is_read_as_it_was_written(examples: int) -> None:
    @searching(examples)
    @given(PLAIN)
    def holds(value: Any) -> None:
        assert parse_override(format_override("a.b", value)) == (("a", "b"), value)

    holds()


@counts(6, 300)
def test_an_identity_is_that_of_the_values_in_force(examples: int) -> None:
    @searching(examples)
    @given(resolved(), st.data())
    def holds(settings: Settings, data: st.DataObject) -> None:
        values = flatten(settings)
        key = data.draw(st.sampled_from(sorted(key for key in values if key.partition(".")[0] in SECTIONS)))
        value = data.draw(changed(values[key]))
        try:
            other = resolve("rem", [format_override(key, value)], base=settings.plain())
        except UsageError:
            assume(False)
        for section in SECTIONS:
            ours, theirs = (canonical_json(each.identity(section).values) for each in (settings, other))
            mine, their = (section_of(each, section) for each in (settings, other))
            assert (ours == theirs) == (mine == their), (section, key)

    holds()


def section_of(settings: Settings, section: str) -> dict[str, Any]:
    """The values of a section without those that change no result."""
    values = flatten(getattr(settings, section))
    return {key: value for key, value in values.items() if f"{section}.{key}" not in settings.incidental_keys}


@counts(15, 500)
def test_a_misspelt_key_names_the_nearest(examples: int) -> None:
    settings = resolve("rem")
    known = [key for key in flatten(settings) if key.count(".") == 1 and not key.startswith("alternatives")]

    @searching(examples)
    @given(st.sampled_from(known), st.integers(0, 100), st.sampled_from("abcxyz_"), st.booleans())
    def holds(key: str, place: int, letter: str, drops: bool) -> None:
        section, _, name = key.partition(".")
        place %= len(name)
        wrong = name[:place] + ("" if drops else letter) + name[place + (1 if drops else 0) :]
        fields = list(type(getattr(settings, section)).model_fields)
        assume(wrong and wrong not in fields and len(name) > 3)
        with pytest.raises(UsageError) as caught:
            resolve("rem", [f"{section}.{wrong}=1"])
        named = re.search(rf"unknown key '{section}\.{wrong}'; did you mean '(\w+)'\?$", str(caught.value))
        if named is None:  # a key of another kind, or one that was renamed
            assert re.search(r"no such key, |is called .* since wm", str(caught.value)), caught.value
            return
        near = difflib.SequenceMatcher(None, wrong, named[1]).ratio()
        assert named[1] in fields and near >= difflib.SequenceMatcher(None, wrong, name).ratio() - 1e-9

    holds()
