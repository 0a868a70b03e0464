"""How fresh models start: mean and deviation of every weight against those that the public code draws.

`fresh_weights.json` holds, for each preset, the repository and commit whose models were built, the mean and the
deviation of each of their tensors over five seeds (three for LightZero's) under our names, and those that are drawn
once and equal in all layers. `*` stands for every layer of a backbone; a projection that ours has in one piece and
the public code in several is one row; a mean within a twentieth of the deviation is given as 0. Biases in front of a
batch norm, which ours leaves out of MuZero, are not in it, nor are S4 and S5: what they begin with is in
tests/backbones.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.settings import resolve

TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("fresh_weights.json").read_text("utf-8"))
ERRORS = 6.0  # standard errors of a mean or a deviation, the table's own included
FEW = 16  # numbers, of which no deviation is worth comparing


@cache
def fresh(preset: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    settings = resolve(preset)
    tokenizer = build_tokenizer(settings) if settings.encoder in ("tokenizer", "dynamics") else None
    world_model = build_world_model(settings, tokenizer, TABLE.get(preset, TABLE["rem"])["actions"])
    modules = {"dynamics": world_model, "controller": build_controller(settings, world_model)}
    if settings.encoder == "tokenizer":
        modules["tokenizer"] = tokenizer
    return {f"{kind}.{name}": each.detach() for kind, part in modules.items() for name, each in part.named_parameters()}


def row_of(name: str) -> str:
    return re.sub(r"(backbone\.layers)\.\d+", r"\1.*", name)


def differences(preset: str) -> list[str]:
    """The tensors that are drawn otherwise than the table says."""
    found = []
    for name, tensor in fresh(preset).items():
        if ".target." in name:
            continue
        mean, deviation = TABLE[preset]["tensors"][row_of(name)]
        count = tensor.numel()
        actual = tensor.double()
        if deviation == 0:
            right = float((actual - mean).abs().max()) <= 1e-6
        else:
            right = abs(float(actual.mean()) - mean) < (ERRORS / math.sqrt(count) + 0.05) * deviation
            right &= bool(tensor.any())
        if deviation and count >= FEW:
            right &= abs(float(actual.std()) / deviation - 1) < ERRORS / math.sqrt(2 * count) + 1e-3
        if not right:
            found.append(f"{name}: {float(actual.mean()):.5f} +- {float(actual.std()):.5f}, not {mean} +- {deviation}")
    return found


@pytest.mark.parametrize("preset", TABLE)
def test_every_tensor_has_a_row_and_every_row_a_tensor(preset: str) -> None:
    assert {row_of(name) for name in fresh(preset) if ".target." not in name} == set(TABLE[preset]["tensors"])


@pytest.mark.parametrize("preset", TABLE)
def test_fresh_weights_are_drawn_as_the_public_code_draws_them(preset: str) -> None:
    assert differences(preset) == []


@pytest.mark.parametrize("preset", ["unizero", "muzero"])
def test_targets_start_as_copies(preset: str) -> None:
    tensors = fresh(preset)
    copies = [name for name in tensors if ".target." in name]
    assert copies
    assert all(torch.equal(tensors[name], tensors[name.replace(".target.", ".")]) for name in copies)


@pytest.mark.parametrize("preset", ["drama", "storm"])
def test_slow_critics_start_as_copies(preset: str) -> None:
    tensors = fresh(preset)
    copies = [name for name in tensors if ".slow_critic." in name]
    assert copies and all(
        torch.equal(tensors[name], tensors[name.replace(".slow_critic.", ".critic.")]) for name in copies
    )


@pytest.mark.parametrize("preset", TABLE)
def test_layers_differ_where_the_public_code_has_them_differ(preset: str) -> None:
    """The layers of REM's backbone begin as copies of one there; `rem` has them independent, `rem-code` not."""
    tensors = fresh("rem-code" if preset == "rem" else preset)
    for name, tensor in tensors.items():
        first = re.sub(r"(backbone\.layers)\.\d+", r"\1.0", name)
        if name != first and ".target." not in name and TABLE[preset]["tensors"][row_of(name)][1]:
            assert torch.equal(tensor, tensors[first]) == (row_of(name) in TABLE[preset]["equal"]), name
