"""Build models from settings, and load them from artifacts. The only file that imports every part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from wmcli.artifacts import Artifact
from wmcli.backbones import build as build_backbone
from wmcli.config import canonical_json, validate
from wmcli.controllers.base import Controller
from wmcli.errors import UsageError
from wmcli.nn.initialize import without_initialization
from wmcli.settings import Settings
from wmcli.spaces import Spaces
from wmcli.tokenizers.categorical import CategoricalTokenizer
from wmcli.tokenizers.vq import VQTokenizer
from wmcli.training.checkpoint import WEIGHTS, load_modules, load_tensors
from wmcli.training.device import Machine
from wmcli.world_models.base import Parts, WorldModel

M = TypeVar("M", bound=nn.Module)
Tokenizer = VQTokenizer | CategoricalTokenizer


def build_tokenizer(settings: Settings, spaces: Spaces) -> Tokenizer:
    """Build a freshly initialized tokenizer for what the environment shows."""
    return settings.tokenizer.build(spaces.observation)


def build_world_model(settings: Settings, tokenizer: Tokenizer | None, spaces: Spaces) -> WorldModel:
    """Build a freshly initialized world model.

    Args:
        settings: Sections `dynamics`, `backbone`, `tokenizer` and `training` count.
        tokenizer: Tokenizer to use or to train; None for a model without, see `DynamicsSettings.encoder`.
        spaces: Of the environment.
    """
    new_backbone = partial(build_backbone, settings.backbone)
    parts = Parts(
        spaces.observation,
        spaces.action,
        new_backbone,
        settings.tokenizer,
        tokenizer,
        settings.training.frames_at_once,
    )
    return settings.dynamics.build(parts)


def build_controller(settings: Settings, world_model: WorldModel, machine: Machine | None = None) -> Controller:
    """Build a freshly initialized controller.

    Args:
        settings: The section `controller` counts.
        world_model: World model whose features it takes.
        machine: Device that may record a search as a CUDA graph; None records nothing.

    Raises:
        UsageError: The settings have no controller, or the world model lacks what it needs.
    """
    wrap_repeated = machine.wrap_repeated if machine is not None else _as_it_is
    return settings.controller.build(world_model, wrap_repeated)


def _as_it_is(function: Callable) -> Callable:
    return function


def settings_of(artifact: Artifact) -> Settings:
    """Return the settings that an artifact was made with."""
    try:
        return _settings(canonical_json(artifact.settings))
    except UsageError as error:
        raise UsageError(f"{artifact.name}: {error}") from None


@lru_cache(maxsize=16)
def _settings(text: str) -> Settings:
    """Return settings of their JSON; the artifacts of a run have mostly the same."""
    return validate(Settings, json.loads(text), "its settings")


def spaces_of(artifact: Artifact) -> Spaces:
    """Return the spaces of the environment that an artifact was made in."""
    return Spaces.of(artifact.manifest["environment"])


def load_tokenizer(artifact: Artifact, machine: Machine) -> Tokenizer:
    """Load a published tokenizer, frozen. Raises ArtifactError if a file is damaged or does not fit its settings.

    This and the other functions that load draw no random numbers.
    """
    return _frozen(lambda: build_tokenizer(settings_of(artifact), spaces_of(artifact)), "tokenizer", artifact, machine)


def load_world_model(artifact: Artifact, machine: Machine, now: Settings | None = None) -> WorldModel:
    """Load a published dynamics model with its tokenizer, both frozen.

    Args:
        artifact: The dynamics model.
        machine: Device of both.
        now: Settings in force. Of a model of their kind they replace the keys that say how it computes and not what
            (`Section.incidental`). None keeps those that it was trained with.
    """
    settings = settings_of(artifact)
    if now is not None and now.dynamics.kind == settings.dynamics.kind:
        how = {key: getattr(now.dynamics, key) for key in now.dynamics.incidental}
        settings = settings.model_copy(update={"dynamics": settings.dynamics.model_copy(update=how)})

    def build() -> WorldModel:
        tokenizer = None
        if settings.dynamics.encoder == "tokenizer":
            tokenizer = load_tokenizer(artifact.input("tokenizer"), machine)
        elif settings.dynamics.encoder == "dynamics":
            tokenizer = build_tokenizer(settings, spaces_of(artifact))
        return build_world_model(settings, tokenizer, spaces_of(artifact))

    return _frozen(build, "dynamics", artifact, machine)


def load_controller(
    artifact: Artifact, machine: Machine, acting: Mapping[str, Mapping[str, Any]]
) -> tuple[WorldModel, Controller]:
    """Load a published controller and the world model it was trained in, both frozen.

    Args:
        artifact: The controller.
        machine: Device of both.
        acting: Settings to act with, see `Settings.acting`. They replace those of training where the kind is the same.
    """
    world_model = load_world_model(artifact.input("dynamics"), machine)
    settings = settings_of(artifact)
    changed = {key: value for key, value in acting.get("dynamics", {}).items() if key in settings.dynamics.acting_keys}
    if changed:
        world_model.settings = settings_of(artifact.input("dynamics")).dynamics.model_copy(update=changed)
    changed = {
        key: value for key, value in acting.get("controller", {}).items() if key in settings.controller.acting_keys
    }
    settings = settings.model_copy(update={"controller": settings.controller.model_copy(update=changed)})
    controller = _frozen(lambda: build_controller(settings, world_model, machine), "controller", artifact, machine)
    return world_model, controller


def _frozen(build: Callable[[], M], name: str, artifact: Artifact, machine: Machine) -> M:
    artifact.verify()
    with without_initialization():
        module = build()
    load_modules({name: module}, load_tensors(artifact.file(WEIGHTS))[0], artifact.name)
    return machine.freeze(module)


def count(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def parameter_counts(settings: Settings, spaces: Spaces) -> dict[str, int]:
    """Count the parameters of each model and its parts, as `model` and `model.part`.

    `model.trained` leaves out slow copies, and stands where a model has one. Both the dynamics model and a tokenizer
    inside it count the tokenizer. Models are built on torch's meta device, without memory.
    """
    with torch.device("meta"):
        tokenizer = (
            build_tokenizer(settings, spaces) if settings.dynamics.encoder in ("tokenizer", "dynamics") else None
        )
        world_model = build_world_model(settings, tokenizer, spaces)
        controller = build_controller(settings, world_model) if settings.controller.acts else None
    counts: dict[str, int] = {}
    models = {"tokenizer": tokenizer, "dynamics": world_model, "controller": controller}
    for name, module in models.items():
        if module is None:
            continue
        counts[name] = count(module)
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        if trained < counts[name]:
            counts[f"{name}.trained"] = trained
        for part, child in module.named_children():
            counts[f"{name}.{part}"] = count(child)
    return counts
