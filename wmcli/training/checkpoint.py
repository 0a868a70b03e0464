"""Everything that changes while a stage trains, in one safetensors file: nothing is pickled, resume is bit-exact.

Tensor names: `model/<module>/<parameter>`, `optimizer/<index>/<moment>`, `random/torch`, `random/cuda`, and
`parts/<part>/<array>` for the arrays among the states of samplers and the like. The rest of those states, counters and
the NumPy generator's state are canonical JSON under the one metadata key `wm` (with several keys the bytes differ from
save to save).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from wmcli.artifacts.files import write_durable
from wmcli.config import canonical_json
from wmcli.errors import ArtifactError
from wmcli.training.optim import LAPROP_MOMENT, LaProp

WEIGHTS = "model.safetensors"
"""The file of a model's weights inside its artifact."""
TRAINING = "training.safetensors"
"""Optimizer, generators and counters beside the weights: what training further goes on from."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Any) -> None:
    """Write atomically and durably: a kill leaves the old file or the new one."""
    data = save(
        {key: value.detach().cpu().contiguous() for key, value in tensors.items()}, {"wm": canonical_json(about)}
    )
    write_durable(path, data)


def load_tensors(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """`(tensors on the CPU whose names begin with prefix, what save_tensors was told about all)`. Raises ArtifactError
    for a file that is not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["wm"])
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (a file, not a dict)
            return {_current_name(key): file.get_tensor(key) for key in names}, about
    except (SafetensorError, KeyError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}); see what else is with wm verify, or begin the stage again with --fresh."
        ) from None


RENAMED = (("optimiser/", "optimizer/"), ("/quantiser.", "/quantizer."), ("/normaliser.", "/normalizer."))
"""Parts of tensor names in files of wm 0.1.0, and what they are called now."""


def _current_name(name: str) -> str:
    for before, now in RENAMED:
        name = name.replace(before, now)
    return name


def module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of some modules under `model/<module>/`."""
    return {
        f"model/{name}/{key}": value for name, module in modules.items() for key, value in module.state_dict().items()
    }


def load_modules(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], where: str) -> None:
    """Load `model/...` tensors. Raises ArtifactError naming missing, unexpected and misshapen ones together."""
    for name, module in modules.items():
        prefix = f"model/{name}/"
        found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        wanted = module.state_dict()
        missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        shapes = [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
        if missing or unexpected or shapes:
            raise ArtifactError(
                f"{where}: weights of the {name} do not fit its settings"
                f" (missing: {missing[:3]}, unexpected: {unexpected[:3]}, other shape: {sorted(shapes)[:3]})."
            )
        module.load_state_dict(found)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts of every parameter, by its index."""
    state = optimizer.state_dict()["state"]
    return {f"optimizer/{index}/{name}": value for index, moments in state.items() for name, value in moments.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` took; learning rates and the like come from the settings.

    Raises ArtifactError when the moments are those of another kind of optimizer.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, index, name = key.split("/")
            state.setdefault(int(index), {})[name] = value
    if state and _kind(next(iter(state.values()))) != _kind_of(optimizer):
        raise ArtifactError(
            f"these weights were trained with another optimizer, whose moments {type(optimizer).__name__} cannot take"
            " over: keep the optimizer they were trained with, or train anew without --more."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(
        value.dim() == 0 or value.shape == parameters[index].shape
        for index, moments in state.items()
        for value in moments.values()
    ), "moments of other parameters"
    for number, moments in state.items():
        for name, value in moments.items():
            if value.dim():  # fused optimizers go through parameter and moments as they lie in memory
                like: Tensor = parameters[number]
                moments[name] = torch.empty_like(like, dtype=value.dtype).copy_(value)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _kind(moments: Mapping[str, Tensor]) -> str:
    """The kind of optimizer that these moments of a parameter are of."""
    marks = {LAPROP_MOMENT: "laprop", "momentum_buffer": "sgd"}
    return next((name for mark, name in marks.items() if mark in moments), "adam")


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    kinds = ((LaProp, "laprop"), (torch.optim.SGD, "sgd"))
    return next((name for kind, name in kinds if isinstance(optimizer, kind)), "adam")


def part_tensors(states: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """States of parts, such as samplers, split in two: NumPy arrays as tensors, and all else, which is plain JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for part, state in states.items():
        plain[part] = {}
        for key, value in state.items():
            assert "/" not in part + key
            if isinstance(value, np.ndarray):
                tensors[f"parts/{part}/{key}"] = torch.tensor(value)
            else:
                plain[part][key] = value
    return tensors, plain


def part_states(tensors: Mapping[str, Tensor], plain: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Put together again what `part_tensors` split."""
    states = {part: dict(state) for part, state in plain.items()}
    for name, tensor in tensors.items():
        if name.startswith("parts/"):
            _, part, key = name.split("/")
            states[part][key] = tensor.numpy()
    return states


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """State of torch's global generators."""
    states = {"random/torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    return states


def load_random(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Put back what `random_tensors` took."""
    torch.set_rng_state(tensors["random/torch"])
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """A NumPy generator's state as JSON."""
    return dict(rng.bit_generator.state)


def load_generator(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Put back what `generator_state` took."""
    rng.bit_generator.state = dict(state)
