"""Fresh models of paper size against those of the public code: mean, deviation and distribution of every tensor.

`fresh_weights.json` holds what the public code drew when it was run with fresh weights. For each preset:

- `sources`: repository and commit (`from`), how many models were drawn (`draws`), and for each tensor, under our names,
  `[mean, deviation, kind]`. `layers.*` and `blocks.*` stand for every layer, `*.running_mean` for every batch norm's. A
  matrix that the public code has in several pieces is one row. A mean that cannot be told from 0 is given as 0.
- `copies`: tensors that begin as copies of others. All others that are drawn differ from one another.
- `copied_layers`: layers that begin as copies of the first only under the setting it names.
- `on_purpose`: why ours follows a later source, in rows that two sources have.
- `not_here`: what only the public code has, and why.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.settings import resolve
from wmcli.spaces import Spaces

TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("fresh_weights.json").read_text("utf-8"))
ERRORS = 5  # standard errors of this model and of the table's together
ROUNDING = 1e-4  # relative, of the table's numbers

# Fourth moment, and how many deviations from its mean a distribution reaches; "truncated": a normal cut at two.
KURTOSIS = {"uniform": 1.8, "truncated": 2.3666, "normal": 3.0}
REACH = {"uniform": math.sqrt(3), "truncated": 2 / 0.87962566}
LARGEST_KURTOSIS = 4.0  # of the other distributions


class Row(NamedTuple):
    """How a tensor begins.

    Kinds: "constant"; "fixed", the same numbers in every model; "phases", the same but for the phases of eigenvectors,
    of which only the root mean square is compared; and those that are drawn: "uniform", "normal", "truncated", "other".
    """

    mean: float
    deviation: float
    kind: str
    draws: int

    @property
    def drawn(self) -> bool:
        return self.kind not in ("constant", "fixed", "phases")


class Model(NamedTuple):
    preset: str
    tensors: dict[str, Tensor]

    def without_row(self, name: str) -> bool:
        """Whether a tensor is a copy of another one."""
        return name.startswith(tuple(TABLE[self.preset].get("copies", ())))

    def compared(self) -> Iterator[tuple[str, Tensor, Row]]:
        table = rows(self.preset)
        for name, tensor in self.tensors.items():
            if not self.without_row(name):
                yield name, tensor, next(table[key] for key in keys(name) if key in table)

    def differences(self) -> dict[str, str]:
        found = {name: difference(tensor.double(), row) for name, tensor, row in self.compared()}
        return {name: text for name, text in found.items() if text}


def rows(preset: str) -> dict[str, Row]:
    """The table of a preset; a later source goes before an earlier one."""
    return {
        key: Row(mean, deviation, kind, source["draws"])
        for source in TABLE[preset]["sources"]
        for key, (mean, deviation, kind) in source["tensors"].items()
    }


def keys(name: str) -> list[str]:
    """The rows in which a tensor may stand."""
    layer = re.sub(r"\b(layers|blocks)\.\d+", r"\1.*", name)
    return list(dict.fromkeys((name, layer, "*." + name.rpartition(".")[2])))


def build(preset: str, *overrides: str) -> Model:
    torch.manual_seed(0)
    settings = resolve(preset, overrides)
    spaces = Spaces.of_images(settings.environment.size, TABLE[preset]["actions"])
    tokenizer = build_tokenizer(settings, spaces) if settings.dynamics.encoder in ("tokenizer", "dynamics") else None
    world_model = build_world_model(settings, tokenizer, spaces)
    modules = {"dynamics": world_model}
    if settings.controller.acts:
        modules["controller"] = build_controller(settings, world_model)
    if settings.dynamics.encoder == "tokenizer":
        assert tokenizer is not None
        modules["tokenizer"] = tokenizer
    tensors = {f"{part}.{name}": each for part, module in modules.items() for name, each in module.state_dict().items()}
    return Model(preset, {name: each for name, each in tensors.items() if each.is_floating_point()})


@pytest.fixture(scope="module", params=TABLE)
def model(request: pytest.FixtureRequest) -> Model:
    return build(request.param)


@pytest.mark.slow
def test_every_tensor_has_one_row_and_every_row_a_tensor(model: Model) -> None:
    table = rows(model.preset)
    found = {name: [key for key in keys(name) if key in table] for name in model.tensors}
    assert [name for name, used in found.items() if len(used) != 1 and not model.without_row(name)] == []
    assert {key for used in found.values() for key in used} == set(table)


def test_fresh_tensors_are_those_of_the_public_code(model: Model) -> None:
    assert model.differences() == {}


def difference(tensor: Tensor, row: Row) -> str:
    """What of a tensor is not as its row has it; empty if all is."""
    count, mean, deviation = tensor.numel(), tensor.mean().item(), tensor.std(correction=0).item()
    seen = f"{mean:.5g} +- {deviation:.5g}, not {row.mean} +- {row.deviation} ({row.kind})"
    if row.kind == "constant":
        constant = torch.allclose(tensor, torch.full_like(tensor, row.mean), rtol=ROUNDING, atol=1e-7)
        return "" if constant else seen
    if row.kind == "phases":
        mean, deviation = 0.0, math.hypot(mean, deviation)
    if not row.drawn:
        close = abs(mean - row.mean) <= ROUNDING * row.deviation
        return "" if close and math.isclose(deviation, row.deviation, rel_tol=ROUNDING) else seen

    errors = ERRORS * math.sqrt(1 + 1 / row.draws)
    if abs(mean - row.mean) > errors * row.deviation / math.sqrt(count) + ROUNDING * abs(row.mean):
        return seen
    relative = errors * math.sqrt((KURTOSIS.get(row.kind, LARGEST_KURTOSIS) - 1) / (4 * count)) + ROUNDING
    expected = row.deviation * math.sqrt(1 - 1 / count)  # around the mean of so few
    if abs(deviation - expected) > relative * row.deviation or not tensor.any():
        return seen
    reach = (tensor - row.mean).abs().max().item() / row.deviation
    if reach > REACH.get(row.kind, math.inf) * (1 + relative / math.sqrt(row.draws)):
        return f"{seen}: up to {reach:.3f} deviations from the mean"
    if row.kind in KURTOSIS and count > 1:
        kurtosis = (tensor - mean).pow(4).mean().item() / deviation**4
        if abs(kurtosis - KURTOSIS[row.kind]) > errors * math.sqrt(24 / count):
            return f"{seen}: kurtosis {kurtosis:.2f}, not {KURTOSIS[row.kind]:.2f}"
    return ""


def test_copies_are_equal_and_all_else_is_drawn_independently(model: Model) -> None:
    for copy, original in TABLE[model.preset].get("copies", {}).items():
        names = [name for name in model.tensors if name.startswith(copy)]
        assert names
        for name in names:
            assert torch.equal(model.tensors[name], model.tensors[original + name.removeprefix(copy)]), name
    assert equal_draws(model) == []


def equal_draws(model: Model) -> list[tuple[str, str]]:
    """Pairs of tensors that are drawn and yet begin equal."""
    seen: dict[tuple[Any, ...], str] = {}
    found = []
    for name, tensor, row in model.compared():
        if row.drawn and tensor.numel() > 1:
            other = seen.setdefault((*tensor.shape, *tensor.flatten()[:4].tolist()), name)
            if other != name and torch.equal(tensor, model.tensors[other]):
                found.append((other, name))
    return found


@pytest.mark.parametrize("preset", [preset for preset, table in TABLE.items() if "copied_layers" in table])
def test_layers_begin_as_copies_of_the_first_under_their_setting(preset: str) -> None:
    copied = TABLE[preset]["copied_layers"]
    model = build(preset, copied["with"])
    layer = re.compile(rf"({re.escape(copied['tensors'])})\.\d+\.")
    names = [name for name in model.tensors if layer.match(name)]
    assert names
    for name in names:
        assert torch.equal(model.tensors[name], model.tensors[layer.sub(r"\1.0.", name)]), name
    assert model.differences() == {}


@pytest.mark.parametrize("preset", TABLE)
def test_intended_differences_are_named_and_real(preset: str) -> None:
    """A reason goes when it stands for no difference any more."""
    table = TABLE[preset]
    tensors = [source["tensors"] for source in table["sources"]]
    twice = {key for key, times in Counter(key for each in tensors for key in each).items() if times > 1}
    assert twice == {key for named in table.get("on_purpose", {}).values() for key in named}
    for key in twice:
        first, last = (each[key] for each in tensors if key in each)
        assert first[1:] != last[1:] or first[0] != last[0]
