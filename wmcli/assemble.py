"""Settings → models, artifacts → models: the only file that knows every part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from wmcli.artifacts import Artifact
from wmcli.backbones import Backbone
from wmcli.backbones import build as build_backbone
from wmcli.config import validate
from wmcli.controllers.actor_critic import ActorCritic
from wmcli.controllers.base import Controller
from wmcli.controllers.mcts import MCTS, MCTSSettings
from wmcli.controllers.reinforce import ReinforceController, ReinforceSettings
from wmcli.errors import UsageError
from wmcli.settings import Settings
from wmcli.tokenizers.categorical import CategoricalTokenizer, CategoricalTokenizerSettings
from wmcli.tokenizers.vq import TokenizerSettings, VQTokenizer
from wmcli.training.checkpoint import WEIGHTS, load_modules, load_tensors
from wmcli.training.device import Machine
from wmcli.world_models.base import WorldModel
from wmcli.world_models.cells import TOKENS, CellsSettings, CellsWorldModel
from wmcli.world_models.latent import LatentWorldModel, LatentWorldModelSettings
from wmcli.world_models.muzero import MuZero, MuZeroSettings
from wmcli.world_models.token import TokenWorldModel, TokenWorldModelSettings
from wmcli.world_models.unizero import UniZero, UniZeroSettings

M = TypeVar("M", bound=nn.Module)
Tokenizer = VQTokenizer | CategoricalTokenizer


def build_tokenizer(settings: Settings) -> Tokenizer:
    """A fresh tokenizer for the environment's image size."""
    size = settings.environment.size
    if isinstance(settings.tokenizer, TokenizerSettings):
        return VQTokenizer(settings.tokenizer, size)
    return CategoricalTokenizer(settings.tokenizer, size)


def _build_square(settings: Settings, max_length: int, block: int) -> Backbone:
    """A backbone for a world model whose elements are as wide as what it makes of them."""
    backbone = build_backbone(settings.backbone, max_length=max_length, block=block)
    if backbone.inputs != backbone.width:
        raise UsageError(
            f"backbone.input_width = {backbone.inputs}: the elements of dynamics of kind"
            f" '{settings.dynamics.kind}' are as wide as backbone.width = {backbone.width}; set it to 0."
        )
    return backbone


def _build_latent(settings: Settings, tokenizer: Tokenizer | None, actions: int) -> LatentWorldModel:
    dynamics = settings.dynamics
    assert isinstance(dynamics, LatentWorldModelSettings)
    backbone = build_backbone(settings.backbone, max_length=dynamics.sequence_length, block=1)
    evidence = None
    if dynamics.posterior == "full":
        evidence = build_backbone(settings.backbone, max_length=dynamics.sequence_length, block=1)
    if tokenizer is None:  # posterior or decoder read more than a frame and its latent
        assert isinstance(settings.tokenizer, CategoricalTokenizerSettings)
        size = settings.environment.size
        reads = LatentWorldModel.tokenizer_reads(dynamics, settings.tokenizer.stack.features(size), backbone.width)
        tokenizer = CategoricalTokenizer(settings.tokenizer, size, **reads)
    assert isinstance(tokenizer, CategoricalTokenizer)
    return LatentWorldModel(dynamics, backbone, tokenizer, actions, evidence)


def build_world_model(settings: Settings, tokenizer: Tokenizer | None, actions: int) -> WorldModel:
    """A fresh world model around a tokenizer, which it uses, trains or does without: see `Settings.encoder`."""
    dynamics = settings.dynamics
    if isinstance(dynamics, TokenWorldModelSettings):
        assert isinstance(tokenizer, VQTokenizer)
        block = tokenizer.tokens + 1
        backbone = _build_square(settings, max_length=dynamics.sequence_length * block, block=block)
        return TokenWorldModel(dynamics, backbone, tokenizer, actions)
    if isinstance(dynamics, UniZeroSettings):
        backbone = _build_square(settings, max_length=2 * dynamics.sequence_length, block=2)
        return UniZero(dynamics, backbone, actions, settings.environment.size)
    if isinstance(dynamics, MuZeroSettings):
        return MuZero(dynamics, actions, settings.environment.size)
    if isinstance(dynamics, CellsSettings):
        backbone = _build_square(settings, max_length=dynamics.sequence_length * TOKENS, block=TOKENS)
        return CellsWorldModel(dynamics, backbone, actions, settings.environment.size)
    return _build_latent(settings, tokenizer, actions)


def build_controller(settings: Settings, world_model: WorldModel, machine: Machine | None = None) -> Controller:
    """A fresh controller for what the world model shows. On a `machine` that replays graphs a search is one."""
    if isinstance(settings.controller, MCTSSettings):
        repeated = {} if machine is None else {"repeated": machine.repeated}
        return MCTS(settings.controller, world_model.actions, **repeated)
    if isinstance(settings.controller, ReinforceSettings):
        return ReinforceController(
            settings.controller, world_model.feature_shape, settings.environment.size, world_model.actions
        )
    seen = world_model.feature_shape
    if settings.controller.input == "frame":
        if world_model.frame_features is None:
            raise UsageError(
                f"controller.input = frame: dynamics of kind '{settings.dynamics.kind}' do not show it the past beside"
                " the frame; set controller.input = state."
            )
        seen = (world_model.frame_features,)
    if settings.controller.input == "memory":
        if world_model.memory_features is None:
            raise UsageError(
                f"controller.input = memory: dynamics of kind '{settings.dynamics.kind}' on the backbone"
                f" '{settings.backbone.kind}' keep no state of one size; set controller.input = state, or another"
                " backbone.kind, for example s4."
            )
        seen = (math.prod(seen) + world_model.memory_features,)
    return ActorCritic(settings.controller, seen, world_model.actions, window=world_model.context)


def settings_of(artifact: Artifact) -> Settings:
    """The settings an artifact was made with."""
    return validate(Settings, artifact.settings, f"settings of {artifact.name}")


def load_tokenizer(artifact: Artifact, machine: Machine) -> Tokenizer:
    """A published tokenizer, frozen. Raises ArtifactError when a file is damaged or does not fit its settings."""
    return _frozen(build_tokenizer(settings_of(artifact)), "tokenizer", artifact, machine)


def load_world_model(artifact: Artifact, machine: Machine) -> WorldModel:
    """Published dynamics with the tokenizer they were trained on, or with the one that they hold, both frozen."""
    settings = settings_of(artifact)
    tokenizer = None
    if settings.dynamics.encoder == "tokenizer":
        tokenizer = load_tokenizer(artifact.input("tokenizer"), machine)
    elif settings.dynamics.encoder == "dynamics":
        tokenizer = build_tokenizer(settings)
    model = build_world_model(settings, tokenizer, artifact.manifest["environment"]["actions"])
    return _frozen(model, "dynamics", artifact, machine)


def load_controller(artifact: Artifact, machine: Machine, acting: Mapping[str, Any]) -> tuple[WorldModel, Controller]:
    """A published controller and the world model it was trained in, both frozen.

    `acting` (see `Settings.acting`) goes before what they were trained with, if they have such settings.
    """
    world_model = load_world_model(artifact.input("dynamics"), machine)
    settings = settings_of(artifact)
    if isinstance(world_model, LatentWorldModel):
        world_model.settings = world_model.settings.model_copy(update=dict(acting))
    elif isinstance(settings.controller, MCTSSettings) and "search" in acting:
        searching = settings.controller.model_copy(update=acting["search"])
        settings = settings.model_copy(update={"controller": searching})
    return world_model, _frozen(build_controller(settings, world_model, machine), "controller", artifact, machine)


def _frozen(module: M, name: str, artifact: Artifact, machine: Machine) -> M:
    artifact.verify()
    load_modules({name: module}, load_tensors(artifact.file(WEIGHTS))[0], artifact.name)
    return machine.freeze(module)


def count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def parameter_counts(settings: Settings, actions: int) -> dict[str, int]:
    """Parameters of each model and, as `model.part`, of its direct parts: `{"tokenizer": n, ...}`.

    A tokenizer that learns with the dynamics model is counted in both. Nothing is allocated: the models are built on
    torch's meta device.
    """
    with torch.device("meta"):
        tokenizer = build_tokenizer(settings) if settings.dynamics.encoder in ("tokenizer", "dynamics") else None
        world_model = build_world_model(settings, tokenizer, actions)
        controller = build_controller(settings, world_model)
    counts: dict[str, int] = {}
    models = {"tokenizer": tokenizer, "dynamics": world_model, "controller": controller}
    for name, module in models.items():
        if module is None:
            continue
        counts[name] = count(module)
        for part, child in module.named_children():
            counts[f"{name}.{part}"] = count(child)
    return counts
