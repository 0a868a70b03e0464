"""`wm profile`: how fast each stage is on this machine, at the shapes of the run's settings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from wmcli.artifacts import Artifact
from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.controllers.agent import UniformAgent
from wmcli.envs import Streams
from wmcli.errors import UsageError
from wmcli.stages.context import Context
from wmcli.stages.train import optimiser_for
from wmcli.tokenizers.vq import VQTokenizer
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.training.optim import update
from wmcli.world_models.base import Batch, WorldModel
from wmcli.world_models.token import TokenWorldModel, TokenWorldModelSettings

REPEATS = 5
COLLECT_STEPS = 400
SOME_FRAMES = 64  # different ones, of which random segments are made


def profile(context: Context) -> Artifact:
    """Measure and publish: collection, one update of each model, imagination in parallel and token by token.

    Fresh models on random frames: speed depends on shapes, not on what was learned. Each row gives the median of
    REPEATS timings after a warm-up, with the fastest and slowest. The two ways to imagine are timed in turn, in one
    process.
    """
    settings, machine = context.settings, context.machine
    job = context.run.job("profile", settings.select(*type(settings).model_fields), {})
    with job.work(fresh=True) as work, isolated_randomness(derived_seed(settings.seed, "profile"), machine.device):
        context.progress.say(f"profile: preset {context.preset} on {machine}")
        rows = [_collection(context), *_models(context)]
        artifact = work.publish(
            settings=settings.model_dump(mode="json"),
            metrics={"rows": rows},
            environment=context.environment,
            machine=machine.block(),
        )
    context.progress.say(f"profile: published {artifact.name}")
    return artifact


def _collection(context: Context) -> dict[str, Any]:
    settings = context.settings.environment
    streams = Streams(settings, train=True, seed=0)
    agent = UniformAgent(context.environment["actions"], settings.count, generator=torch.Generator().manual_seed(0))
    rounds = -(-COLLECT_STEPS // settings.count)

    def some_steps() -> None:
        for _ in range(rounds):
            streams.step(agent.act(streams.observation, streams.first))

    times = _timed(context, {"collect": some_steps})["collect"]
    streams.close()
    return _row("collect, random policy", "steps", rounds * settings.count, times, f"{settings.count} × {settings.id}")


def _models(context: Context) -> list[dict[str, Any]]:
    settings, machine = context.settings, context.machine
    device, actions = machine.device, context.environment["actions"]
    if settings.encoder == "rules":
        raise UsageError(f"preset {context.preset} has no tokenizer to profile; time its training steps with wm eval.")
    tokenizer = build_tokenizer(settings).to(device)
    batch = settings.tokenizer.batch
    size = settings.environment.size
    frames = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8, device=device)
    optimiser = optimiser_for(settings.tokenizer, tokenizer.parameters())

    def train_tokenizer() -> None:
        with machine.autocast():
            loss, _ = tokenizer.loss(frames)
        update(optimiser, loss, settings.tokenizer.clip)

    def encode() -> None:
        with machine.autocast():
            tokenizer.encode(frames)

    times = _timed(context, {"tokenizer": train_tokenizer, "encode": encode})
    rows = [
        _row("train-tokenizer", "updates", 1, times["tokenizer"], f"{batch} frames of {size}×{size}"),
        _row("encode", "frames", batch, times["encode"], f"{batch} frames of {size}×{size}"),
    ]

    world_model = build_world_model(settings, tokenizer, actions).to(device)
    length = settings.dynamics.horizon
    with machine.autocast():
        latents = world_model.encode(frames[None, :SOME_FRAMES])[0]
    segments = _random_batch(
        latents if world_model.frozen_encoder else frames, settings.dynamics.batch, length, actions
    )
    optimiser = optimiser_for(settings.dynamics, world_model.parameter_groups())

    def train_dynamics() -> None:
        with machine.autocast():
            loss, _ = world_model.loss(segments)
        update(optimiser, loss, settings.dynamics.clip)

    times = _timed(context, {"dynamics": train_dynamics})
    unit = f"blocks of {tokenizer.tokens + 1} tokens" if isinstance(tokenizer, VQTokenizer) else "frames"
    shape = f"{settings.dynamics.batch} × {length} {unit}, {settings.backbone.name}"
    rows.append(_row("train-dynamics", "updates", 1, times["dynamics"], shape))

    world_model.eval().requires_grad_(False)
    controller = build_controller(settings, world_model).to(device)
    windows = _random_batch(latents, settings.controller.batch, controller.window, actions)
    optimiser = optimiser_for(settings.controller, controller.parameter_groups())

    def train_controller() -> None:
        with machine.autocast():
            loss, _ = controller.loss(world_model, windows)
        update(optimiser, loss, settings.controller.clip)
        controller.after_update()

    times = _timed(context, {"controller": train_controller})
    shape = f"{settings.controller.batch} rollouts of {settings.controller.horizon} steps"
    rows.append(_row("imagine (controller update)", "updates", 1, times["controller"], shape))
    rows += _imagination(context, world_model, windows)
    return rows


def _imagination(context: Context, world_model: WorldModel, windows: Batch) -> list[dict[str, Any]]:
    """One imagined step; of a model over tokens, predicted in parallel and token by token, on the same shapes."""
    settings, machine = context.settings, context.machine
    batch, name = len(windows.action), settings.backbone.name
    models: dict[str, WorldModel] = {"imagination": world_model}
    shape = f"batch {batch}, {name}"
    if isinstance(settings.dynamics, TokenWorldModelSettings):
        assert isinstance(world_model, TokenWorldModel)
        models, tokenizer = {}, world_model.tokenizer
        assert isinstance(tokenizer, VQTokenizer)
        for prediction in ("pop", "sequential"):
            dynamics = settings.dynamics.model_copy(update={"prediction": prediction})
            changed = settings.model_copy(update={"dynamics": dynamics})
            model = build_world_model(changed, tokenizer, world_model.actions).to(machine.device)
            models[f"imagination, {prediction}"] = model.eval()
        shape = f"{batch} × {tokenizer.tokens} tokens, {name}"
    states = {each: model.observe(windows.latent, windows.action, windows.first)[1] for each, model in models.items()}

    def step(each: str) -> Callable[[], None]:
        def imagine() -> None:
            with machine.autocast():
                models[each].imagine(states[each], windows.action[:, -1])

        return imagine

    times = _timed(context, {each: step(each) for each in models})
    rows = [_row(each, "frames", batch, times[each], shape) for each in models]
    if len(models) == 2:
        fast, slow = times.values()
        ratio = [b / a for a, b in zip(fast, slow, strict=True)]
        rows.append(
            {
                "what": "imagination, pop over sequential",
                "rate": statistics.median(ratio),
                "unit": "times as fast",
                "low": min(ratio),
                "high": max(ratio),
                "shape": f"pairs timed in turn, {shape}",
            }
        )
    return rows


def _random_batch(source: torch.Tensor, rows: int, length: int, actions: int) -> Batch:
    """Segments whose latents (or frames) are drawn from `source` (N, ...)."""
    device = source.device
    no = torch.zeros(rows, length, dtype=torch.bool, device=device)
    return Batch(
        latent=source[torch.randint(len(source), (rows, length), device=device)],
        action=torch.randint(actions, (rows, length), device=device),
        reward=torch.zeros(rows, length, device=device),
        terminated=no,
        truncated=no,
        first=no,
        valid=~no,
    )


def _timed(context: Context, jobs: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each job, REPEATS times in turn after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    with context.progress.bar(f"profile {', '.join(jobs)}", REPEATS, "rounds") as bar:
        for repeat in range(REPEATS + 1):
            for name, job in jobs.items():
                _wait(context.machine.device)
                started = time.perf_counter()
                job()
                _wait(context.machine.device)
                if repeat:
                    times[name].append(time.perf_counter() - started)
            if repeat:
                bar.advance()
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(what: str, unit: str, count: int, times: list[float], shape: str) -> dict[str, Any]:
    rates = [count / seconds for seconds in times]
    return {
        "what": what,
        "rate": float(np.median(rates)),
        "unit": f"{unit}/s",
        "low": min(rates),
        "high": max(rates),
        "shape": shape,
    }
