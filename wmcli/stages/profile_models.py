"""`wm profile --compare models`: whole world models, encoder and decoder included, by the length of an episode.

Training is a forward and a backward pass over a batch of episodes of T frames, without the optimizer. A model that
learns from streams (RSSM) goes through an episode in segments, with a backward pass each and its state carried on.
Imagination encodes and observes the first half of each episode, imagines the other half step by step, and decodes all
imagined frames at once.

Source: figures 3 and 15 of S4WM (Deng et al. 2023, arXiv 2307.02064).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from wmcli.assemble import build_tokenizer, build_world_model, count
from wmcli.errors import UsageError
from wmcli.nn.actions import random_observation
from wmcli.report.plots import cost_by_length, write_figure
from wmcli.settings import Settings
from wmcli.spaces import Spaces
from wmcli.stages.context import Context
from wmcli.stages.memory_tasks import roll_out
from wmcli.stages.profile_backbones import ROWS
from wmcli.stages.profile_cells import Cell, measure_cell, random_batch
from wmcli.training.device import Machine
from wmcli.training.measure import Bench, Job
from wmcli.world_models.base import Batch, WorldModel, part_of

MODELS = ("s4wm-3d", "rssm-tbtt-3d", "tssm-xl-3d", "tssm-xl-3d-256", "tssm-xl-3d-512")
LENGTHS = (128, 256, 512, 1024)
PATIENCE = 60.0  # seconds of a call; a slower model is left out at longer lengths
DIFFERENT = 64  # frames in random episodes


def compare_models(
    contexts: Mapping[str, Context], bench: Bench, lengths: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure the world models of several presets.

    Args:
        contexts: By preset. The batch of all is that of the first one's `dynamics.batch`.
        bench: Times calls.
        lengths: Frames of an episode, T.

    Returns:
        Backbone and size of each preset's model, and rows of cost, with `episodes_per_second` in those of training.

    """
    first, *_ = contexts
    rows_trained = cast(Any, contexts[first].settings.dynamics).batch
    machine = contexts[first].machine
    left = dict(contexts)
    rows: list[dict[str, Any]] = []
    for length in sorted(set(lengths)):

        def trained(name: str, length: int = length) -> Job:
            model = model_for(contexts[name], length).train()
            return training_job(model, episodes(model, contexts[name].spaces, rows_trained, length), machine)

        def imagined(name: str, length: int = length) -> Job:
            model = machine.freeze(model_for(contexts[name], length))
            batch = episodes(model, contexts[name].spaces, ROWS[machine.device.type], length)
            return partial(imagine_frames, model, batch.inputs, batch.action, machine)

        cell = Cell("training", f"{rows_trained} × {length} frames", length, rows_trained * length, "frames")
        training = measure_cell(cell, "preset", {name: partial(trained, name) for name in left}, first, bench, PATIENCE)
        rows += [
            row if "skipped" in row else row | {"episodes_per_second": rows_trained / row["seconds"]}
            for row in training
        ]
        ahead, side = length - length // 2, ROWS[machine.device.type]
        cell = Cell("imagination", f"{side} × {ahead} frames behind {length // 2}", length, side * ahead, "frames")
        imagination = measure_cell(
            cell, "preset", {name: partial(imagined, name) for name in left}, first, bench, PATIENCE
        )
        rows += imagination
        skipped = {row["preset"] for row in (*training, *imagination) if "skipped" in row}
        left = {name: context for name, context in left.items() if name not in skipped}
    return [_describe(name, context.settings, context.spaces) for name, context in contexts.items()], rows


def check_models(contexts: Mapping[str, Context], lengths: Sequence[int]) -> None:
    """Check that all models imagine the same frames.

    Raises:
        UsageError: One is no model over latents that decodes frames, another is shown something else, or a length is
            less than twice the frames of context that a model needs.
    """
    first, *_ = contexts
    shown = contexts[first].spaces.observation
    for name, context in contexts.items():
        if not context.settings.dynamics.scores_frames:
            raise UsageError(
                f"--compare models measures models over latents, and preset {name} has dynamics.kind ="
                f" {context.settings.dynamics.kind}: see --compare presets."
            )
        if context.spaces.observation != shown:
            raise UsageError(
                f"--compare models shows all models the same frames, and presets {first} and {name} have others: add"
                " --set environment.id=ID and --set environment.size=N."
            )
        for length in lengths:
            with torch.device("meta"):
                model_for(context, length).check_reads(length)


def model_for(context: Context, length: int) -> WorldModel:
    """Build the world model of a preset for episodes of `length` frames, on the device unless that is "meta".

    Where a row of a batch is a whole episode, `dynamics.sequence_length` is `length`; streams keep their segments.
    """
    settings, spaces = context.settings, context.spaces
    dynamics = cast(Any, settings.dynamics)
    longest = min(dynamics.sequence_length, length) if dynamics.rows == "streams" else length
    changed = {"sequence_length": longest, "context": min(dynamics.context, length // 2), "burn_in": 0}
    settings = settings.model_copy(update={"dynamics": dynamics.model_copy(update=changed)})
    tokenizer = build_tokenizer(settings, spaces) if settings.dynamics.trains_tokenizer else None
    model = build_world_model(settings, tokenizer, spaces)
    return model if next(model.parameters()).is_meta else model.to(context.machine.device)


def episodes(model: WorldModel, spaces: Spaces, rows: int, length: int) -> Batch:
    """Return random episodes of frames: rows x length, each opened by its first frame."""
    device = next(model.parameters()).device
    batch = random_batch(random_observation(spaces.observation, (DIFFERENT,), device), rows, length, spaces.action)
    is_first = batch.is_first.clone()
    is_first[:, 0] = True
    return batch._replace(is_first=is_first)


def training_job(model: WorldModel, batch: Batch, machine: Machine) -> Job:
    """Return the forward and backward pass over a batch of episodes (B, T)."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    spans = list(_segments(batch.action.shape[1], model.segment))

    def forward_and_backward() -> None:
        carry = model.initial_carry(len(batch.action)) if model.rows == "streams" else None
        for span in spans:
            with machine.autocast():
                if carry is None:
                    loss, _ = model.loss(batch)
                else:
                    loss, _, carry = model.carried_loss(part_of(batch, span), carry)
            torch.autograd.grad(loss, weights, allow_unused=True)

    return forward_and_backward


def _segments(length: int, longest: int) -> Iterator[slice]:
    """Cut an episode into as few segments as there can be, of nearly equal length."""
    pieces = math.ceil(length / longest)
    edges = [round(piece * length / pieces) for piece in range(pieces + 1)]
    return map(slice, edges[:-1], edges[1:])


def imagine_frames(model: WorldModel, frames: Tensor, action: Tensor, machine: Machine) -> Tensor:
    """Observe the first half of each episode, imagine the other, and decode it at once.

    Args:
        model: Frozen.
        frames: (B, T, H, W, C) uint8.
        action: (B, T, ...).
        machine: Its precision.

    Returns:
        Images (B (T - T // 2), C, H, W) float32.
    """
    context = action.shape[1] // 2
    with machine.autocast(), torch.no_grad():
        features = roll_out(model, frames, action, context)
        return model.images(features[:, context:].flatten(0, 1))


def _describe(name: str, settings: Settings, spaces: Spaces) -> dict[str, Any]:
    """Return backbone, cache and number of parameters of a preset's world model."""
    with torch.device("meta"):
        tokenizer = build_tokenizer(settings, spaces) if settings.dynamics.trains_tokenizer else None
        parameters = count(build_world_model(settings, tokenizer, spaces))
    backbone = settings.backbone
    return {
        "preset": name,
        "backbone": backbone.kind,
        "layers": backbone.layers,
        "width": backbone.width,
        "cache": getattr(backbone, "memory_length", None),
        "parameters": parameters,
        "frames_at_once": settings.training.frames_at_once or None,
    }


def draw_models(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw frames per second and peak memory of training and imagination over length, with quartiles of the rounds."""
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows:
        if row.get("skipped"):
            continue
        frames = row["rate"] * row["seconds"]
        values: dict[str, tuple[float, ...]] = {
            f"{row['what']}, frames/s": (row["rate"], frames / row["seconds_75"], frames / row["seconds_25"])
        }
        if row["peak_bytes"]:
            values[f"{row['what']}, MB at the peak"] = (row["peak_bytes"] / 1e6,)
        for panel, value in values.items():
            panels.setdefault(panel, {}).setdefault(row["preset"], []).append((row["length"], *value))
    if panels:
        write_figure(path, cost_by_length(panels, x_label="frames of an episode"))
