"""`wm profile`: time the stages and kernels of a preset on this machine, at the shapes of its settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from wmcli.artifacts import Artifact, Work
from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.controllers.agent import UniformAgent
from wmcli.controllers.base import Actor, Learner
from wmcli.envs import open_streams
from wmcli.errors import UsageError
from wmcli.kernels import tiles
from wmcli.kernels.dispatch import using
from wmcli.nn.actions import random_observation
from wmcli.settings import LearnedCollectSettings, Settings
from wmcli.spaces import describe_parts, map_parts
from wmcli.stages.context import Context
from wmcli.stages.profile_cells import random_batch
from wmcli.stages.profile_experience import profile_experience
from wmcli.stages.profile_kernels import profile_kernels
from wmcli.trainers.dynamics import world_model_update
from wmcli.trainers.imagination import controller_update
from wmcli.trainers.tokenizer import tokenizer_update
from wmcli.training.device import Machine, derived_seed, isolated_randomness
from wmcli.training.measure import (
    Bench,
    Job,
    count_launches,
    count_operations,
    count_waits,
    peak_memory,
    profile_operators,
    ratio,
)
from wmcli.training.optim import optimizer_for
from wmcli.world_models.base import Batch, WorldModel

Part = Literal["stages", "kernels", "experience"]

DEFAULT_PARTS: tuple[Part, ...] = ("stages", "kernels")
FRAMES = 100_000  # of experience, as Atari 100k collects
COLLECT_STEPS = 400
MANY_ROOTS = 128  # as a search over stored frames may have at once
SOME_FRAMES = 64  # different frames in random segments
PARALLEL, SEQUENTIAL = "imagination, pop", "imagination, sequential"
EAGER = ", without the graph"


def profile(
    context: Context,
    *,
    parts: Sequence[Part] = DEFAULT_PARTS,
    frames: int = FRAMES,
    trace: bool = False,
) -> Artifact:
    """Measure the machine's ceilings and then the parts, and publish.

    Models are fresh and frames random: speed depends on shapes, not on weights.

    Args:
        context: The run, with the settings to profile.
        parts: Parts to measure.
        frames: Frames of the experience that is written and read.
        trace: Leave one call of each stage in the artifact, for Perfetto.

    Raises:
        WmError: A result is wrong at the shape that is to be timed.
    """
    with measuring(context) as (work, bench):
        metrics: dict[str, Any] = {"ceilings": bench.ceilings}
        rows: dict[str, list[dict[str, Any]]] = {}
        if "stages" in parts:
            traces = work.payload / "traces" if trace else None
            rows["stages"], metrics["operators"] = profile_stages(context, bench, traces)
        if "kernels" in parts:
            rows["kernels"] = profile_kernels(context.settings, context.machine, bench, elements_of(context))
        if "experience" in parts:
            rows["experience"] = profile_experience(context, bench, frames, work.path / "experience")
        return publish_rows(context, work, metrics, rows)


@contextmanager
def measuring(context: Context) -> Iterator[tuple[Work, Bench]]:
    """Begin a new profile of a run, and measure the machine's ceilings."""
    settings, machine = context.settings, context.machine
    job = context.run.job("profile", settings.identity(*type(settings).model_fields), {})
    with (
        context.work(job, fresh=True) as work,
        isolated_randomness(derived_seed(settings.seed, "profile"), machine.device),
    ):
        context.progress.say(f"profile: preset {context.preset} on {machine}")
        yield work, Bench(machine, context.progress)


def publish_rows(
    context: Context, work: Work, metrics: dict[str, Any], rows: Mapping[str, Sequence[dict[str, Any]]]
) -> Artifact:
    """Publish a profile: its metrics, and the rows of its parts."""
    metrics["rows"] = [{"part": part, **row} for part, some in rows.items() for row in some]
    artifact = context.publish(work, metrics)
    context.progress.say(f"profile: published {artifact.name}")
    return artifact


def tune_kernels(context: Context) -> dict[str, Any]:
    """Time the tiles of every kernel within the stages that launch it, and store the fastest for all later processes.

    Returns:
        The `file` of all choices, and a row for each that is new (`chosen`): the stage in which it was timed, the
        kernel with its shape, and the tile.

    Raises:
        UsageError: The settings do not run Triton's kernels on a GPU.
    """
    machine = context.machine
    if machine.device.type != "cuda" or machine.kernels != "triton":
        raise UsageError(
            f"--tune times Triton's kernels on a GPU, not kernels in {machine.kernels} on {machine.device}: give"
            " --device cuda, and training.kernels=auto."
        )
    rows: list[dict[str, Any]] = []
    with isolated_randomness(derived_seed(context.settings.seed, "profile"), machine.device):
        for group in _groups(context):
            for stage in group:
                context.progress.say(f"profile: tiles of the kernels in {stage.label}")
                chosen = tiles.tune(stage.unrecorded or stage.call)
                rows += [{"stage": stage.label, "kernel": key, "tile": tile} for key, tile in chosen.items()]
    return {"file": str(tiles.path()), "chosen": rows}


# -- stages -----------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """One call of a stage, and the work that it does."""

    label: str
    shape: str
    done: int
    unit: str
    call: Job
    in_epoch: float = 0
    """Calls in an epoch of `wm run` in which every stage is due."""
    unrecorded: Job | None = None
    """The same without the graph that `call` replays, whose operations cannot be counted; None if it replays none."""


def profile_stages(
    context: Context, bench: Bench, traces: Path | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of all stages, and the operators that their time goes to. Traces go into a folder, if given.

    A call that replays a recorded graph has a row of the same call without it beside, `EAGER`.
    """
    collected, steps = collect_randomly(context, bench)
    rows, where = [collected | {"in_epoch": _steps_in_epoch(context.settings) / steps}], []
    for group in _groups(context):
        forms = [each for stage in group for each in _forms(stage)]
        times = bench.time_jobs(", ".join(stage.label for stage in group), {each.label: each.call for each in forms})
        for stage in forms:
            file = None if traces is None else traces / f"{re.sub('[^a-z]+', '-', stage.label).strip('-')}.json.gz"
            with bench.progress.bar(f"profile {stage.label}, cost", 4, "calls") as bar:
                # Counted on the torch forms: operations inside other kernels are not visible.
                with using("torch"):
                    operations = count_operations(stage.unrecorded or stage.call)
                bar.advance()
                memory = peak_memory(stage.unrecorded or stage.call, bench.device)  # a graph keeps its memory
                bar.advance()
                launches, waits = count_launches(stage.call, bench.device), count_waits(stage.call, bench.device)
                bar.advance()
                spent = profile_operators(stage.call, bench.device, bench.arithmetic, file)
                bar.advance()
            row = bench.row(
                stage.label,
                stage.shape,
                times[stage.label],
                count=stage.done,
                unit=stage.unit,
                operations=operations,
                memory=memory,
                in_epoch=stage.in_epoch,
                launches=launches and launches[0],
                device_operations=launches and launches[1],
                waits=waits,
            )
            rows.append(row)
            where += [{"what": stage.label, **each} for each in spent]
        if {PARALLEL, SEQUENTIAL} == set(times):
            rows.append(ratio("imagination, sequential over pop", group[0].shape, times[SEQUENTIAL], times[PARALLEL]))
    return _with_shares(rows), where


def _forms(stage: Stage) -> list[Stage]:
    """Return a stage and, if it replays a graph, the same without."""
    if stage.unrecorded is None:
        return [stage]
    return [stage, stage._replace(label=stage.label + EAGER, call=stage.unrecorded, in_epoch=0)]


def _with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each stage's time and share of an epoch; not for encoding, which depends on the number of frames."""
    spent = [row["seconds"] * row["in_epoch"] if row.get("in_epoch") else None for row in rows]
    total = sum(filter(None, spent))
    return [
        row if part is None else row | {"epoch_seconds": part, "epoch_share": part / total}
        for row, part in zip(rows, spent, strict=True)
    ]


def collect_randomly(context: Context, bench: Bench) -> tuple[dict[str, Any], int]:
    """Time collecting with a random policy; see `time_collecting`."""
    return time_collecting(context, bench, "collect, random policy", random_agent(context))


def random_agent(context: Context) -> UniformAgent:
    """Return an agent that plays at random in all environments."""
    generator = torch.Generator().manual_seed(0)
    return UniformAgent(context.spaces.action, context.settings.environment.count, generator=generator)


def time_collecting(context: Context, bench: Bench, label: str, agent: Actor) -> tuple[dict[str, Any], int]:
    """Time collecting with an agent; return the row, and the steps of a call."""
    least = 2 * context.settings.environment.count if bench.quick else COLLECT_STEPS
    with collecting(context, agent, least) as (some_steps, steps, shape):
        times = bench.time_jobs(label, {label: some_steps})[label]
    return bench.row(label, shape, times, count=steps, unit="steps"), steps


@contextmanager
def collecting(context: Context, agent: Actor, least: int) -> Iterator[tuple[Job, int, str]]:
    """Open the environments, and give a call in which an agent collects `least` steps or some more, their number, and
    its shape."""
    settings = context.settings.environment
    streams = open_streams(settings, train=True, seed=0)
    rounds = -(-least // settings.count)
    steps = rounds * settings.count

    def some_steps() -> None:
        for _ in range(rounds):
            with context.machine.autocast():
                action = agent.act(streams.observation, streams.age(agent.across_ends) == 0)
            streams.step(action)
            agent.summarize_search()

    try:
        yield some_steps, steps, f"{steps} steps, {settings.count} × {settings.id}"
    finally:
        streams.close()


def _steps_in_epoch(settings: Settings) -> int:
    """Return the environment steps that one collect takes; 0 where it collects whole episodes."""
    return settings.collect.steps if isinstance(settings.collect, LearnedCollectSettings) else 0


def has_tokenizer(settings: Settings) -> bool:
    """Return whether the dynamics take or train a tokenizer."""
    return settings.dynamics.takes_tokenizer or settings.dynamics.trains_tokenizer


def elements_of(context: Context) -> int:
    """Return the elements of the backbone that a frame and its action take, 0 without a backbone."""
    settings = context.settings
    with torch.device("meta"):
        tokenizer = build_tokenizer(settings, context.spaces) if has_tokenizer(settings) else None
        return build_world_model(settings, tokenizer, context.spaces).elements


def _groups(context: Context) -> Iterator[list[Stage]]:
    """Yield the stages that learn or imagine, grouped by those that are timed in turn, with models frozen as needed."""
    settings, machine = context.settings, context.machine
    device, spaces = machine.device, context.spaces

    def random_frames(count: int) -> Any:
        return random_observation(spaces.observation, (count,), device)

    tokenizer = None
    if has_tokenizer(settings):
        learning, frozen = (
            build_tokenizer(settings, spaces).to(device),
            machine.freeze(build_tokenizer(settings, spaces)),
        )
        yield list(_tokenizer_stages(context, learning, frozen, random_frames))
        tokenizer = frozen if settings.dynamics.takes_tokenizer else learning

    world_model = build_world_model(settings, tokenizer, spaces).to(device).train()
    some = random_frames(SOME_FRAMES)
    with machine.autocast():
        latents = map_parts(lambda part: part[0], world_model.encode(map_parts(lambda part: part[None], some)))
    batch, length = settings.dynamics.batch, world_model.segment
    segments = random_batch(latents if world_model.frozen_encoder else some, batch, length, spaces.action)
    optimizer = optimizer_for(settings.dynamics, world_model.parameter_groups())

    def train_dynamics(machine: Machine) -> Job:
        return partial(world_model_update(machine, world_model, optimizer, settings.dynamics.clip), segments)

    elements = max(1, world_model.elements)
    unit = "frames" if elements == 1 else f"frames of {elements} tokens"
    shape = f"{batch} × {length} {unit}, {_name(settings, world_model)}"
    count = batch * length * elements
    unit = "frames" if elements == 1 else "tokens"
    updates = settings.dynamics.updates
    unrecorded = _unrecorded(machine, train_dynamics)
    yield [Stage("train-dynamics", shape, count, unit, train_dynamics(machine), updates, unrecorded)]

    world_model = machine.freeze(world_model)
    if not settings.controller.acts:
        yield list(_imagination(context, world_model, random_batch(latents, batch, world_model.context, spaces.action)))
        return
    controller = build_controller(settings, world_model, machine).to(device)
    if settings.controller.searches:
        yield list(_searches(context, world_model, some))
        return
    assert isinstance(controller, Learner)
    learns: Any = settings.controller
    windows = random_batch(latents, learns.batch, controller.window, spaces.action)
    learner = optimizer_for(learns, controller.parameter_groups())

    rollouts, horizon = learns.batch, learns.imagination_horizon
    shape = f"{rollouts} rollouts of {horizon} steps, {settings.backbone.kind}"
    label, updates = "imagine (controller update)", learns.updates

    def train(machine: Machine) -> Job:
        return partial(controller_update(machine, world_model, controller, learner, learns.clip), windows)

    unrecorded = _unrecorded(machine, train)
    yield [Stage(label, shape, rollouts * horizon, "frames", train(machine), updates, unrecorded)]
    yield list(_imagination(context, world_model, windows))


def _tokenizer_stages(
    context: Context, learning: Any, frozen: Any, random_frames: Callable[[int], Any]
) -> Iterator[Stage]:
    """Yield training of a tokenizer, if it learns, and encoding with a frozen one."""
    settings, machine = context.settings, context.machine
    tokenizer: Any = settings.tokenizer
    frames = random_frames(tokenizer.batch)
    shape = f"{tokenizer.batch} frames of {describe_parts(context.spaces.observation)}"
    if any(True for _ in learning.parameters()):
        optimizer = optimizer_for(tokenizer, learning.parameters())

        def train(machine: Machine) -> Job:
            return partial(tokenizer_update(machine, learning, optimizer, tokenizer.clip), frames)

        alone = settings.run.tokenizer_epochs > 0  # else it learns inside the dynamics model
        updates = tokenizer.updates if alone else 0
        unrecorded = _unrecorded(machine, train)
        yield Stage("train-tokenizer", shape, tokenizer.batch, "frames", train(machine), updates, unrecorded)

    def encode() -> None:
        with machine.autocast(), torch.no_grad():
            frozen.encode(frames)

    yield Stage("encode", shape, tokenizer.batch, "frames", encode)


def _searches(context: Context, world_model: WorldModel, frames: Any) -> Iterator[Stage]:
    """Yield searches from as many frames as there are environments, from a batch of reanalysis and from many."""
    settings, machine = context.settings, context.machine
    search: Any = settings.controller
    acted, again = settings.environment.count, search.batch
    for roots in sorted({acted, again, MANY_ROOTS}):
        windows = random_batch(frames, roots, world_model.context, world_model.action_space)
        with machine.autocast(), torch.no_grad():
            _, state = world_model.observe(world_model.encode(windows.inputs), windows.action, windows.is_first)

        def plan(machine: Machine, state: Any = state, roots: int = roots) -> Job:
            controller = build_controller(settings, world_model, machine).to(machine.device)
            generator = torch.Generator().manual_seed(0)

            def decide() -> None:
                with machine.autocast(), torch.no_grad():
                    controller.decide(world_model, state, controller.initial_state(roots), generator)

            return decide

        in_epoch = (roots == acted) * _steps_in_epoch(settings) / roots + (roots == again) * search.updates
        shape = f"{roots} roots × {search.simulations} simulations, {_name(settings, world_model)}"
        label, unrecorded = f"search, {roots} roots", _unrecorded(machine, plan)
        yield Stage(label, shape, roots * search.simulations, "simulations", plan(machine), in_epoch, unrecorded)


def _unrecorded(machine: Machine, make: Callable[[Machine], Job]) -> Job | None:
    """Return the job that `make` makes for a machine without graphs; None if this one records none either."""
    return make(replace(machine, cuda_graph=False)) if machine.cuda_graph else None


def _name(settings: Settings, world_model: WorldModel) -> str:
    """Return the name of the backbone, or "convolutions" for a world model without one."""
    return settings.backbone.kind if world_model.elements else "convolutions"


def _imagination(context: Context, world_model: WorldModel, windows: Batch) -> Iterator[Stage]:
    """Yield one imagined step; of a model over tokens, predicted in parallel and token by token."""
    settings, machine = context.settings, context.machine
    batch, tokens = len(windows.action), world_model.elements - 1
    shape = f"{batch} frames{f' of {tokens} tokens' if tokens else ''}, {settings.backbone.kind}"
    models = {"imagination": world_model}
    if "prediction" in type(settings.dynamics).model_fields:
        tokenizer: Any = world_model.tokenizer
        models = {}
        for label, prediction in ((PARALLEL, "pop"), (SEQUENTIAL, "sequential")):
            dynamics = settings.dynamics.model_copy(update={"prediction": prediction})
            changed = settings.model_copy(update={"dynamics": dynamics})
            models[label] = machine.freeze(build_world_model(changed, tokenizer, context.spaces))

    def stage(label: str, model: WorldModel) -> Stage:
        with machine.autocast():
            _, state = model.observe(windows.inputs, windows.action, windows.is_first)

        def imagine() -> None:
            with machine.autocast(), torch.no_grad():
                model.imagine(state, windows.action[:, -1])

        return Stage(label, shape, batch, "frames", imagine)

    for label, model in models.items():
        yield stage(label, model)
