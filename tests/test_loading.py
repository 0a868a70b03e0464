"""A model that is built without initialization and loaded is the one that was saved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.config import preset_names
from wmcli.controllers.base import Controller
from wmcli.nn.initialize import DRAWING, without_initialization
from wmcli.settings import Settings, resolve
from wmcli.spaces import Spaces

ACTIONS = 5
LARGE = {f"dreamer-{millions}m" for millions in (50, 100, 200, 400)}  # `dreamer-25m` in other sizes: gigabytes each


def build(settings: Settings) -> dict[str, nn.Module]:
    """Return tokenizer, world model and controller, as far as a preset has them."""
    spaces = Spaces.of_images(settings.environment.size, ACTIONS)
    tokenizer = build_tokenizer(settings, spaces) if settings.dynamics.encoder in ("tokenizer", "dynamics") else None
    world_model = build_world_model(settings, tokenizer, spaces)
    models: dict[str, nn.Module] = {"dynamics": world_model}
    if tokenizer is not None:
        models["tokenizer"] = tokenizer
    if settings.controller.acts:
        controller = build_controller(settings, world_model)
        assert isinstance(controller, Controller)
        models["controller"] = controller
    return models


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a module: parameters, buffers, and those in attributes."""
    for name, part in module.named_modules():
        held = vars(part) | part._parameters | part._buffers
        for key, value in held.items():
            each = value if isinstance(value, list | tuple) else [value]
            yield from ((f"{name}.{key}.{i}", tensor) for i, tensor in enumerate(each) if isinstance(tensor, Tensor))


@pytest.mark.matrix
@pytest.mark.parametrize("preset", sorted(set(preset_names()) - LARGE))
def test_every_tensor_of_a_loaded_model_is_that_of_the_saved_one(preset: str) -> None:
    settings = resolve(preset)
    saved = build(settings)
    generator = torch.get_rng_state()
    with without_initialization():
        loaded = build(settings)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, module in loaded.items():
        module.load_state_dict(saved[name].state_dict())
    for name, module in loaded.items():
        found, wanted = dict(tensors(module)), dict(tensors(saved[name]))
        assert found.keys() == wanted.keys() and found
        for key, tensor in wanted.items():
            assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), f"{name} {key}"


def test_nothing_is_drawn_and_everything_is_put_back() -> None:
    before = {name: getattr(nn.init, name) for name in DRAWING}
    with pytest.raises(KeyError), without_initialization():
        layer = nn.Linear(2, 3)
        layer.weight.data.fill_(7)
        for name in DRAWING:
            getattr(nn.init, name)(layer.weight)
        assert (layer.weight == 7).all()
        raise KeyError
    assert {name: getattr(nn.init, name) for name in DRAWING} == before
