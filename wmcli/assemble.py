"""Settings → models, artifacts → models: the only file that knows every part."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from wmcli.artifacts import Artifact
from wmcli.backbones import build as build_backbone
from wmcli.config import validate
from wmcli.controllers.reinforce import ReinforceController
from wmcli.settings import Settings
from wmcli.tokenizers.vq import VQTokenizer
from wmcli.training.checkpoint import WEIGHTS, load_modules, load_tensors
from wmcli.world_models.token import TokenWorldModel

M = TypeVar("M", bound=nn.Module)


def build_tokenizer(settings: Settings) -> VQTokenizer:
    """A fresh tokenizer for the environment's image size."""
    return VQTokenizer(settings.tokenizer, settings.environment.size)


def build_world_model(settings: Settings, tokenizer: VQTokenizer, actions: int) -> TokenWorldModel:
    """A fresh world model around a tokenizer that it does not train."""
    block = tokenizer.tokens + 1
    backbone = build_backbone(settings.backbone, max_length=settings.dynamics.horizon * block, block=block)
    return TokenWorldModel(settings.dynamics, backbone, tokenizer, actions)


def build_controller(settings: Settings, world_model: TokenWorldModel) -> ReinforceController:
    """A fresh controller for what the world model shows."""
    return ReinforceController(
        settings.controller, world_model.feature_shape, settings.environment.size, world_model.actions
    )


def settings_of(artifact: Artifact) -> Settings:
    """The settings an artifact was made with."""
    return validate(Settings, artifact.settings, f"settings of {artifact.name}")


def load_tokenizer(artifact: Artifact, device: torch.device) -> VQTokenizer:
    """A published tokenizer, frozen. Raises ArtifactError when a file is damaged or does not fit its settings."""
    return _frozen(build_tokenizer(settings_of(artifact)), "tokenizer", artifact, device)


def load_world_model(artifact: Artifact, device: torch.device) -> TokenWorldModel:
    """Published dynamics with the tokenizer they were trained on, both frozen."""
    tokenizer = load_tokenizer(artifact.input("tokenizer"), device)
    model = build_world_model(settings_of(artifact), tokenizer, artifact.manifest["environment"]["actions"])
    return _frozen(model, "dynamics", artifact, device)


def load_controller(artifact: Artifact, device: torch.device) -> tuple[TokenWorldModel, ReinforceController]:
    """A published controller and the world model it was trained in, both frozen."""
    world_model = load_world_model(artifact.input("dynamics"), device)
    return world_model, _frozen(build_controller(settings_of(artifact), world_model), "controller", artifact, device)


def _frozen(module: M, name: str, artifact: Artifact, device: torch.device) -> M:
    artifact.verify()
    load_modules({name: module}, load_tensors(artifact.file(WEIGHTS))[0], artifact.name)
    return module.to(device).eval().requires_grad_(False)


def count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def parameter_counts(settings: Settings, actions: int) -> dict[str, int]:
    """Parameters of each model and of its direct parts: `{"tokenizer": n, "tokenizer.encoder": m, ...}`.

    Nothing is allocated: the models are built on torch's meta device.
    """
    with torch.device("meta"):
        tokenizer = build_tokenizer(settings)
        world_model = build_world_model(settings, tokenizer, actions)
        controller = build_controller(settings, world_model)
    counts: dict[str, int] = {}
    for name, module in {"tokenizer": tokenizer, "dynamics": world_model, "controller": controller}.items():
        counts[name] = count(module)
        for part, child in module.named_children():
            counts[f"{name}.{part}"] = count(child)
    return counts
