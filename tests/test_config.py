"""Settings: what is wrong with them is said in one line, and what is right survives being written and read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, model_validator
from seconds import within

from wmcli.config import (
    Section,
    canonical_json,
    digest,
    merge,
    nested,
    parse_override,
    preset_names,
    preset_values,
    read_toml,
    to_toml,
    toml,
    validate,
)
from wmcli.config import presets as presets_file
from wmcli.errors import UsageError


class Optimizer(Section):
    learning_rate: float = Field(1e-4, gt=0)
    """Step size."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments."""


class Example(Section):
    seed: int = 1
    """Of every generator."""
    name: Literal["retnet", "transformer"] = "retnet"
    """Which."""
    compile: bool = False
    """Whether."""
    optimizer: Optimizer = Optimizer()
    second: Optimizer | None = None
    """None leaves it out."""
    many: tuple[Optimizer, ...] = ()

    @model_validator(mode="after")
    def _odd(self) -> Example:
        if self.seed == 13:
            raise ValueError("seed 13 and the name retnet do not go together")
        return self


def wrong(values: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        validate(Example, values, "--set x")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


# -- validation -------------------------------------------------------------------------------------------------------


def test_docstrings_describe_the_fields() -> None:
    assert Optimizer.model_fields["learning_rate"].description == "Step size."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sed": 1}, "--set x: unknown key 'sed'; did you mean 'seed'?"),
        ({"optimizer": {"learning_rat": 1.0}}, "unknown key 'optimizer.learning_rat'; did you mean 'learning_rate'?"),
        ({"second": {"beta": []}}, "unknown key 'second.beta'; did you mean 'betas'?"),
        ({"many": [{}, {"beta": []}]}, "unknown key 'many.1.beta'; did you mean 'betas'?"),
        ({"zzz": 1}, "unknown key 'zzz'; known: compile, many, name, optimizer, second, seed."),
        ({"seed": "1"}, "seed = '1': Input should be a valid integer"),
        ({"seed": True}, "seed = True: Input should be a valid integer"),
        ({"seed": 1.5}, "seed = 1.5: Input should be a valid integer"),
        ({"compile": "False"}, "compile = 'False': Input should be a valid boolean"),
        ({"compile": 0}, "compile = 0: Input should be a valid boolean"),
        ({"name": "mamba"}, "name = 'mamba': Input should be 'retnet' or 'transformer'"),
        ({"optimizer": 3}, "optimizer = 3: "),
        (
            {"optimizer": {"learning_rate": {"x": 1}}},
            "optimizer.learning_rate = {'x': 1}: Input should be a valid number",
        ),
        ({"optimizer": {"learning_rate": 0.0}}, "optimizer.learning_rate = 0.0: Input should be greater than 0"),
        (
            {"optimizer": {"learning_rate": float("inf")}},
            "optimizer.learning_rate = inf: Input should be a finite number",
        ),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate = nan: "),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"seed": 13}, "--set x: seed 13 and the name retnet do not go together"),
        ({"seed": "x" * 10_000}, "...: Input should be a valid integer"),
        ({"a\nb" * 1000: 1}, "unknown key 'a b"),
        (tomllib.loads("seed = 2020-01-01"), "seed = datetime.date(2020, 1, 1): Input should be a valid integer"),
    ],
)
def test_errors_are_one_line_with_the_nearest_key(values: dict[str, Any], message: str) -> None:
    assert message in wrong(values)


def test_lists_fit_tuples_and_whole_numbers_fit_floats() -> None:
    example = validate(Example, {"optimizer": {"learning_rate": 1, "betas": [0.5, 1]}}, "here")
    assert example.optimizer == Optimizer(learning_rate=1.0, betas=(0.5, 1.0))
    assert isinstance(example.optimizer.learning_rate, float)


def test_plain_values_of_a_section_make_it_again() -> None:
    example = Example(seed=4, second=Optimizer(learning_rate=0.1), many=(Optimizer(),))
    plain = example.model_dump(mode="json")
    assert validate(Example, plain, "here") == example
    assert validate(Example, read_toml(to_toml(plain), "here"), "here") == example


# -- digests ----------------------------------------------------------------------------------------------------------


def test_digest_depends_on_content_not_on_order() -> None:
    assert digest({"a": 1, "b": [1.5, None]}) == digest({"b": (1.5, None), "a": 1})
    assert len({digest(value) for value in ({"a": 1}, {"a": "1"}, {"a": [1]}, {"a": True}, {"b": 1})}) == 5
    assert canonical_json({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}'
    with pytest.raises(ValueError, match="JSON"):
        digest(float("nan"))


# -- TOML -------------------------------------------------------------------------------------------------------------


def test_toml_is_read_back_as_written() -> None:
    values = {
        "text": 'a "b" \\ \n \t \x00 \x7f ü 😀',
        "numbers": [1, -2, 2.5, 1e-5, 1e300, 10**15, 3.0],
        "flags": [True, False],
        "empty list": [],
        "empty": {},
        "a.b": {"": 1, "deep": {"er": {"x": "y"}}},
        "lists": [[1, 2], ["a"], [{"b c": {"d": 1}}, {}]],
    }
    read = read_toml(to_toml(values), "here")
    assert read == values
    assert [type(number) for number in read["numbers"]] == [type(number) for number in values["numbers"]]
    assert read_toml(to_toml({"x": None, "y": {"z": None}}), "here") == {"y": {}}
    assert read_toml(to_toml({}), "here") == {}


@pytest.mark.parametrize(
    "text",
    [
        "a = ",
        "a = 1\na = 2",
        "[" * 100_000,
        "a = " + "[" * 100_000,
        "a = " + "{b=" * 30_000,
        "a = " + "9" * 100_000,
        "a." * 100_000 + "a = 1",
        "[" + "a." * 20_000 + "a]",
        "a = {" + "a." * 20_000 + "a = 1}",
        "#" * (1 << 20),
        "\x00",
    ],
)
def test_hostile_toml_is_refused_quickly_in_one_line(text: str) -> None:
    with within(2), pytest.raises(UsageError, match="^run.toml: ") as caught:
        read_toml(text, "run.toml")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_toml_at_all_limits_together_is_quick() -> None:
    tail = ".a" * toml.MAX_TOML_DOTS + "=1\n"
    lines = [f"k{number:05d}{tail}" for number in range(toml.MAX_TOML_BYTES // (6 + len(tail)))]
    text = "".join(lines)
    with within(2):
        read_toml(text, "here")


# -- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("controller.lr=3e-4", ("controller", "lr"), 3e-4),
        ("seed=3", ("seed",), 3),
        ("a.b.c = true", ("a", "b", "c"), True),
        ("backbone.kind=transformer", ("backbone", "kind"), "transformer"),
        ("environment.id=ALE/Pong-v5", ("environment", "id"), "ALE/Pong-v5"),
        ("a='3'", ("a",), "3"),
        ("a=[1, 2]", ("a",), [1, 2]),
        ("a={b = 1}", ("a",), {"b": 1}),
        ("a=b=c", ("a",), "b=c"),
        ("a=", ("a",), ""),
        ("a=/x/y.safetensors", ("a",), "/x/y.safetensors"),
        ("a=1\nb = 2", ("a",), "1\nb = 2"),
        ("a=" + "[" * 100_000, ("a",), "[" * 100_000),
        ("a=" + "9" * 5_000, ("a",), "9" * 5_000),
    ],
)
def test_an_override_is_a_path_and_a_value(text: str, path: tuple[str, ...], value: Any) -> None:
    got = parse_override(text)
    assert got == (path, value)
    assert type(got[1]) is type(value)


@pytest.mark.parametrize("text", ["", "a", "=1", "a.=1", ".a=1", "a..b=1", " =1", "a." * 10_000 + "a=1"])
def test_a_malformed_override_is_answered_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write it as section.key=value"):
        parse_override(text)


def test_changed_are_the_values_that_are_not_at_their_defaults() -> None:
    class Part(Section):
        kind: Literal["x", "y"] = "x"
        """Which."""
        eps: float = 1e-8
        """Small."""

    class Whole(Section):
        seed: int = 1
        """Of every generator."""
        optimizer: Optimizer = Optimizer()
        part: Part = Part()

    assert Whole().changed() == {"part": {"kind": "x"}}, "the kind is always there: it says what the other keys mean"
    changed = Whole(optimizer=Optimizer(betas=(0.5, 0.9)), part=Part(eps=1e-5), seed=2).changed()
    assert changed == {"seed": 2, "optimizer": {"betas": [0.5, 0.9]}, "part": {"kind": "x", "eps": 1e-5}}


def test_merge_lays_tables_over_each_other_and_changes_neither() -> None:
    base = {"a": {"x": 1, "y": {"p": 1}}, "b": 2, "c": {"z": 1}}
    over = {"a": {"y": {"q": 2}}, "b": {"new": 1}, "c": 3}
    assert merge(base, over) == {"a": {"x": 1, "y": {"p": 1, "q": 2}}, "b": {"new": 1}, "c": 3}
    assert base == {"a": {"x": 1, "y": {"p": 1}}, "b": 2, "c": {"z": 1}}
    assert merge(base, {}) == base == merge({}, base)
    assert nested(("a", "b"), 1) == {"a": {"b": 1}}


# -- presets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(presets_file.resources, "files", lambda _: tmp_path)
    (tmp_path / "__init__.py").touch()
    (tmp_path / "rem.toml").write_text(
        "about = 'a'\npaper = 'p'\nseed = 1\n[optimizer]\nlearning_rate = 1e-3\nclip = 2\n"
    )
    return tmp_path


def test_a_preset_inherits_the_settings_of_its_base(presets: Path) -> None:
    (presets / "quick.toml").write_text("base = 'rem'\nabout = 'b'\n[optimizer]\nclip = 3\n")
    (presets / "quicker.toml").write_text("base = 'quick'\nseed = 7\n")
    assert preset_names() == ["quick", "quicker", "rem"]
    assert preset_values("rem") == {"seed": 1, "optimizer": {"learning_rate": 1e-3, "clip": 2}}
    assert preset_values("quick") == {"seed": 1, "optimizer": {"learning_rate": 1e-3, "clip": 3}}
    assert preset_values("quicker") == {"seed": 7, "optimizer": {"learning_rate": 1e-3, "clip": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = 'ren'", "no preset called 'ren'; did you mean 'rem'?"),
        ("base = 'bad'", "preset bad: base leads in a circle: bad -> bad"),
        ("base = 'other'", "preset bad: base leads in a circle: bad -> other -> bad"),
        ("base = 3", "preset bad: base = 3: name one preset."),
        ("base = ", "preset bad: not valid TOML"),
    ],
)
def test_errors_in_a_base(presets: Path, text: str, message: str) -> None:
    (presets / "bad.toml").write_text(text)
    (presets / "other.toml").write_text("base = 'bad'")
    with pytest.raises(UsageError) as caught:
        preset_values("bad")
    assert message in str(caught.value)


def test_an_unknown_preset_names_the_nearest(presets: Path) -> None:
    with pytest.raises(UsageError, match="no preset called 'rme'; did you mean 'rem'"):
        preset_values("rme")
    with pytest.raises(UsageError, match="no preset called '../rem'"):
        preset_values("../rem")
