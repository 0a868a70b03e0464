"""`wm train-tokenizer`: fit observation ⇄ latent to the experience."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import build_tokenizer
from wmcli.errors import UsageError
from wmcli.report.images import grid, write_png
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.sampling import build_sampler
from wmcli.stages.train import Lesson, newest_fitted_alone, optimizer_for, parent_of, train
from wmcli.tokenizers.vq import TokenizerSettings, perceptual_in_use
from wmcli.training.loop import Trainee
from wmcli.training.optim import update

PICTURED_FRAMES = 8
REPORT_FRAMES = 512  # frames the published usage figures are measured on


def train_tokenizer(context: Context, *, experience: str | None = None, parent: str | None = None) -> Artifact:
    """Train the run's tokenizer for `tokenizer.updates` updates and publish it.

    Raises ArtifactError when there is no experience or it is of another environment, UsageError when the version to
    train further belongs to a dynamics model or there is no use for one, DivergedError, Stopped.
    """
    if context.settings.dynamics.encoder == "itself":
        raise UsageError(
            f"dynamics.kind = '{context.settings.dynamics.kind}' encodes frames itself and has no tokenizer;"
            " go on with: wm train-dynamics"
        )
    settings = context.settings.tokenizer
    frames = context.run.resolve(experience or "experience", "experience")
    check_same_environment(context.environment, frames)
    inputs = {"experience": frames} | _parent(context, parent)
    if (
        isinstance(settings, TokenizerSettings)
        and settings.perceptual == "auto"
        and perceptual_in_use(settings) == "none"
    ):
        context.progress.warn(
            "training without the perceptual loss, since tokenizer.lpips_weights names no file: published scores used"
            " LPIPS, so ours are not comparable with them. Make the file with: wm convert-lpips"
        )

    def prepare(rng: np.random.Generator) -> Lesson:
        device = context.machine.device
        memory = context.experience(frames)
        tokenizer = build_tokenizer(context.settings).to(device)
        sampler = build_sampler(context.settings, memory, rng, length=1, minimum=1, pad="right")
        optimizer = optimizer_for(settings, tokenizer.parameters())

        def step() -> Mapping[str, Tensor]:
            rows = torch.from_numpy(sampler.batch(settings.batch).rows[:, 0]).to(device)
            with context.machine.autocast():
                loss, metrics = tokenizer.loss(memory.frames[rows])
            return {"loss": loss, **metrics, "gradient_norm": update(optimizer, loss, settings.clip)}

        def measure() -> dict[str, Any]:
            tokenizer.eval()
            rows = torch.linspace(0, len(memory) - 1, min(REPORT_FRAMES, len(memory)), device=device).long()
            with context.machine.autocast():
                return tokenizer.usage(memory.frames[rows])

        def draw(payload: Path) -> None:
            # Drawn, not spread evenly: that falls into step with the lengths of episodes.
            chosen = np.random.default_rng(0).choice(len(memory), min(PICTURED_FRAMES, len(memory)), replace=False)
            frames = memory.frames[torch.from_numpy(np.sort(chosen)).to(device)]
            with context.machine.autocast():
                decoded = tokenizer.decode(tokenizer.encode(frames))
            write_png(payload / "reconstructions.png", grid(frames.cpu().numpy(), decoded.cpu().numpy()))

        trainee = Trainee({"tokenizer": tokenizer}, optimizer, rng, {"sampler": sampler})
        return Lesson(trainee, step, draw, measure)

    return train(
        context,
        "train-tokenizer",
        "tokenizer",
        sections=("environment", "tokenizer"),
        inputs=inputs,
        updates=settings.updates,
        prepare=prepare,
    )


def _parent(context: Context, reference: str | None) -> dict[str, Artifact]:
    """The version to train further: one that was fitted by itself, since a dynamics model trains its own."""
    if reference is None and context.more and (fitted := newest_fitted_alone(context)) is not None:
        reference = str(fitted.path)
    inputs = parent_of(context, "tokenizer", reference)
    if "parent" in inputs and "dynamics" in inputs["parent"].inputs:
        raise UsageError(
            f"{inputs['parent'].name} came out of {inputs['parent'].inputs['dynamics'].name}, which trains it further:"
            " wm train-dynamics --more"
        )
    return inputs
