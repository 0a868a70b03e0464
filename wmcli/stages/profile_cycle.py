"""The time of a whole run: each kind of its work is measured, counted over all epochs, and summed.

Updates are those of the trainers, with the sampling and gathering of their batches, on random experience of half the
run's size. Around its work each stage also starts, saves and publishes. That is the rest of a stage of `wm run` in a
small run, whose stages make as few updates as a graph takes until it is replayed.

Evaluation is counted and not projected: it takes as long as the episodes are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.controllers.agent import Agent
from wmcli.controllers.base import Learner
from wmcli.errors import UsageError
from wmcli.experience import Replay
from wmcli.memory import peak_resident
from wmcli.progress import Progress
from wmcli.settings import LearnedCollectSettings, Settings, resolve
from wmcli.spaces import bytes_of, column_names, draw_actions, draw_part, first_part, map_parts
from wmcli.stages.binding import Binding
from wmcli.stages.collector import Collector
from wmcli.stages.context import Context
from wmcli.stages.loop import COLLECT, DYNAMICS, EVALUATE, IMAGINE, TOKENIZER, due, run_epoch
from wmcli.stages.player import build_agent
from wmcli.stages.profile import collect_randomly, has_tokenizer, time_collecting
from wmcli.trainers import DynamicsTrainer, ImaginationTrainer, ReanalysisTrainer, TokenizerTrainer
from wmcli.trainers.batches import ENCODE_BATCH, encode_frames
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.training.graph import WARM_UPS
from wmcli.training.measure import Bench, Job, time_call

RANDOM, ACTING, ENCODE = "collect, random policy", "collect, acting", "encode"
EPISODE = 1000  # frames of an episode of the random experience
ENCODED = 8 * ENCODE_BATCH  # frames
EPOCHS = 3  # of the small run, of which the last is timed
ESTIMATE_SECONDS = 1.5  # for each kind of work
MOST_CALLS = 50
FEW_ROWS = 5000  # of experience


def around(stage: str) -> str:
    """Return the name of what a stage does beside its work."""
    return f"{stage}, start and publish"


UNITS = {
    RANDOM: "steps",
    ACTING: "steps",
    TOKENIZER: "updates",
    DYNAMICS: "updates",
    ENCODE: "frames",
    IMAGINE: "updates",
    **{around(stage): "stages" for stage in (COLLECT, TOKENIZER, DYNAMICS, IMAGINE)},
}
"""Units of each kind of work, in the order of an epoch."""


# -- counting ---------------------------------------------------------------------------------------------------------


def count_work(settings: Settings) -> Counter[str]:
    """Count the work of all epochs of `wm run`, by the names of `UNITS`, and episodes of evaluation (`EVALUATE`)."""
    work: Counter[str] = Counter()
    for stages in work_by_epoch(settings):
        for done in stages.values():
            work += done
    return work


def work_by_epoch(settings: Settings) -> Iterator[dict[str, Counter[str]]]:
    """Count the work of each stage of each epoch as `count_work` does.

    Frames are counted where a stage encodes all of them: again whenever the encoder has been trained, else only the new
    ones.
    """
    trained: Counter[str] = Counter()  # versions of each model
    rows, encoded, encoded_by = 0, 0, None
    sections: dict[str, Any] = {
        TOKENIZER: settings.tokenizer,
        DYNAMICS: settings.dynamics,
        IMAGINE: settings.controller,
    }
    for epoch in range(1, settings.run.epochs + 1):
        stages: dict[str, Counter[str]] = {}
        for stage in due(settings, epoch):
            work: Counter[str] = Counter()
            if stage == COLLECT:
                steps = steps_in_epoch(settings)
                work[ACTING if trained[IMAGINE] else RANDOM] += steps
                rows += steps
            elif stage == EVALUATE:
                last = epoch == settings.run.epochs
                work[EVALUATE] += settings.evaluation.episodes if last else settings.run.evaluate_episodes
            elif stage in sections:
                if (encoder := _encoder(settings, stage, trained)) is not None:
                    work[ENCODE] += rows - (encoded if encoder == encoded_by else 0)
                    encoded, encoded_by = rows, encoder
                work[stage] += sections[stage].updates
                trained[stage] += 1
            else:
                continue
            if stage != EVALUATE:
                work[around(stage)] += 1
            stages[stage] = work
        yield stages


def epoch_seconds(settings: Settings, seconds: Mapping[str, float]) -> dict[str, float]:
    """Project the seconds of each stage in an epoch: the mean over the epochs of the run in which it is due.

    So epochs before a model is trained count for the other stages alone, and frames that are encoded again and again
    count as in the middle of the run.

    Args:
        settings: Of the run.
        seconds: Of one unit of each kind of work, by the names of `UNITS`. Others are left out, and so is evaluation.
    """
    totals: dict[str, list[float]] = {}
    for stages in work_by_epoch(settings):
        for stage, work in stages.items():
            done = [count * seconds[what] for what, count in work.items() if count and what in seconds]
            if done:
                totals.setdefault(stage, []).append(sum(done))
    return {stage: sum(each) / len(each) for stage, each in totals.items()}


def steps_in_epoch(settings: Settings) -> int:
    """Return the environment steps that one collect takes: as many in each environment."""
    assert isinstance(settings.collect, LearnedCollectSettings)
    count = settings.environment.count
    return -(-settings.collect.steps // count) * count


def _encoder(settings: Settings, stage: str, trained: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the model, and its version, with which a stage encodes all frames; None if it encodes none."""
    dynamics = settings.dynamics
    if stage == TOKENIZER or settings.controller.searches or (stage == DYNAMICS and not dynamics.takes_tokenizer):
        return None
    kind = TOKENIZER if dynamics.takes_tokenizer else DYNAMICS
    return kind, trained[kind]


def project(settings: Settings, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Project the time of a run of `settings` from the rows of its kinds of work.

    Args:
        settings: Of the run.
        measured: A row of each kind of work that the run has, by name, with `seconds` of one unit. Others, such as
            updates of a tokenizer that does not learn, are left out.

    Returns:
        `seconds` of the run without evaluation, `steps` in the environment, `seconds_per_step`, the `episodes` of
        evaluation, and the `rows` of the work, each with its `count`, `total_seconds`, `share` and `seconds_per_step`.
    """
    work = count_work(settings)
    steps, episodes = work[RANDOM] + work[ACTING], work.pop(EVALUATE, 0)
    totals = {what: work[what] * measured[what]["seconds"] for what in UNITS if work[what] and what in measured}
    whole = sum(totals.values())
    rows = [
        {
            **measured[what],
            "count": work[what],
            "unit": UNITS[what],
            "total_seconds": total,
            "share": total / whole,
            "seconds_per_step": total / steps,
        }
        for what, total in totals.items()
    ]
    return {
        "seconds": whole,
        "steps": steps,
        "seconds_per_step": whole / steps,
        "evaluation_episodes": episodes,
        "rows": rows,
    }


# -- measuring --------------------------------------------------------------------------------------------------------


def profile_cycle(context: Context, bench: Bench, folder: Path) -> dict[str, Any]:
    """Measure every kind of work of a run of the context's settings, and project its time.

    Args:
        context: Its settings train a controller.
        bench: Times calls.
        folder: An empty folder for the small run.

    Returns:
        See `project`.
    """
    settings, machine = context.settings, context.machine
    work = count_work(settings)
    measured: dict[str, dict[str, Any]] = {RANDOM: per_unit(*collect_randomly(context, bench))}
    with isolated_randomness(derived_seed(settings.seed, "profile"), machine.device):
        rows = steps_in_epoch(settings) if bench.quick else (work[RANDOM] + work[ACTING]) // 2
        for what, shape, job, count in updates_of(context, random_experience(context, rows), work):
            times = bench.time_jobs(what, {what: job})[what]
            measured[what] = per_unit(bench.row(what, shape, times), count)
        measured[ACTING] = per_unit(*time_collecting(context, bench, ACTING, fresh_agent(context)))
    small = _small_settings(context)
    made = count_work(small)
    for stage, seconds in _stages_of_small_run(context, small, folder).items():
        own = (
            measured[ACTING]["seconds"] * steps_in_epoch(settings)
            if stage == COLLECT
            else measured.get(stage, {"seconds": 0.0})["seconds"] * made[stage] / made[around(stage)]
        )
        measured[around(stage)] = per_unit(bench.row(around(stage), "a small run", [max(seconds - own, 0.0)]), 1)
    return project(settings, measured)


def estimate_run(context: Context) -> dict[str, Any]:
    """Estimate time and memory of a run from a few seconds of each kind of its work.

    Args:
        context: Its settings train a controller on what it collects.

    Returns:
        See `project`, and `memory` of the process in bytes when all is collected, `device_memory` of a GPU, or None.
        Starting and publishing of stages, and evaluation, are left out.

    Raises:
        UsageError: See `check_projected`.
    """
    check_projected(context, "--estimate")
    settings, machine = context.settings, context.machine
    work = count_work(settings)
    bench = Bench(machine, context.progress, quick=True)
    measured = {RANDOM: per_unit(*collect_randomly(context, bench))}
    with isolated_randomness(derived_seed(settings.seed, "profile"), machine.device):
        rows = min(steps_in_epoch(settings), FEW_ROWS)
        replay = random_experience(context, rows)
        for what, shape, job, count in updates_of(context, replay, work):
            measured[what] = per_unit(bench.row(what, shape, _some_calls(job, machine.device)), count)
        measured[ACTING] = per_unit(*time_collecting(context, bench, ACTING, fresh_agent(context)))
    to_come = (work[RANDOM] + work[ACTING] - rows) * bytes_of(replay.observation) // rows
    memory, device_memory = peak_resident(), None
    if machine.device.type == "cuda":
        device_memory = torch.cuda.max_memory_allocated(machine.device)
    if device_memory is None or replay.frames_on_host:
        memory += to_come
    else:
        device_memory += to_come
    return project(settings, measured) | {"memory": memory, "device_memory": device_memory}


def check_projected(context: Context, option: str) -> None:
    """Check that a run has all the work whose time is projected. `option` asks for it.

    Raises:
        UsageError: The settings have no controller, or nothing is collected by acting.
    """
    settings = context.settings
    if not settings.controller.acts or settings.collect.policy != "learned" or not settings.run.collect_epochs:
        raise UsageError(
            f"{option} counts acting and imagination, and preset {context.preset} has not both: see wm profile."
        )


def _some_calls(job: Job, device: torch.device) -> list[float]:
    """Return the seconds of some calls, behind two that may compile, allocate or record."""
    for _ in range(WARM_UPS):
        time_call(job, device)
    times: list[float] = []
    until = time.monotonic() + ESTIMATE_SECONDS
    while not times or (time.monotonic() < until and len(times) < MOST_CALLS):
        times.append(time_call(job, device))
    return times


def per_unit(row: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the row of a call that did `count` units, in seconds of one unit."""
    return {
        name: row[name] / count if name.startswith("seconds") else row[name]
        for name in ("what", "shape", "seconds", "seconds_low", "seconds_high")
    }


def random_experience(context: Context, rows: int) -> Replay:
    """Return experience of random frames and actions, with rewards of 0, interleaved as the environments play."""
    settings, rng = context.settings.environment, np.random.default_rng(0)
    time = np.arange(rows) // settings.count
    end = (time + 1) % EPISODE == 0
    frames = map_parts(lambda part: draw_part(part, rows, rng), context.spaces.observation)
    closing = context.settings.dynamics.reads_closing
    frames_on = context.settings.training.replay
    replay = Replay(context.machine.device, closing=closing, frames_on="host" if frames_on == "disk" else frames_on)
    replay.extend(
        {
            **column_names("observation", frames),
            "action": draw_actions(context.spaces.action, (rows,), rng),
            "reward": np.zeros(rows, np.float32),
            "terminated": end,
            "truncated": np.zeros(rows, bool),
            "first": time % EPISODE == 0,
            "lives": np.full(rows, -1, np.int16),
            "stream": np.arange(rows) % settings.count,
        }
    )
    return replay


def updates_of(context: Context, replay: Replay, work: Mapping[str, int]) -> Iterator[tuple[str, str, Job, int]]:
    """Yield name, shape, call and units of a call of the updates of all models, and of encoding, as far as due."""
    settings, machine = context.settings, context.machine
    parts: dict[str, Any] = {"machine": machine, "rng": np.random.default_rng(0)}
    held, training = f"from {len(replay):,} frames", settings.training
    tokenizer = None
    if has_tokenizer(settings):
        tokenizer = build_tokenizer(settings, context.spaces).to(machine.device)
        if work[TOKENIZER]:
            section = cast(Any, settings.tokenizer)
            trainer: Any = TokenizerTrainer(tokenizer, replay, section, training, **parts)
            if trainer.learns:
                yield TOKENIZER, f"{section.batch} frames, {held}", trainer.update, 1
        if settings.dynamics.takes_tokenizer:
            tokenizer = machine.freeze(tokenizer)
    section = cast(Any, settings.dynamics)
    world_model = build_world_model(settings, tokenizer, context.spaces).to(machine.device).train()
    trainer = DynamicsTrainer(world_model, replay, section, training, **parts)
    yield DYNAMICS, f"{section.batch} × {world_model.segment} frames, {held}", trainer.update, 1

    world_model = machine.freeze(world_model)
    if work[ENCODE]:
        frames = map_parts(lambda part: part[:ENCODED], replay.observation)
        count = len(first_part(frames))
        yield ENCODE, f"{count} frames", partial(encode_frames, world_model, frames, machine), count
    section = cast(Any, settings.controller)
    if not work[IMAGINE]:
        return
    controller = build_controller(settings, world_model, machine).to(machine.device)
    if settings.controller.searches:
        trainer = ReanalysisTrainer(world_model, controller, replay, section, **parts)
        yield IMAGINE, f"{section.batch} × {section.simulations} simulations, {held}", trainer.update, 1
        return
    assert isinstance(controller, Learner)
    ratio = settings.dynamics.batch / section.batch
    trainer = ImaginationTrainer(world_model, controller, replay, section, training, ratio=ratio, **parts)
    yield IMAGINE, f"{section.batch} × {section.imagination_horizon} steps, {held}", trainer.update, 1


def fresh_agent(context: Context) -> Agent:
    """Return a fresh agent, which costs as much as a trained one."""
    settings, machine = context.settings, context.machine
    tokenizer = machine.freeze(build_tokenizer(settings, context.spaces)) if has_tokenizer(settings) else None
    world_model = machine.freeze(build_world_model(settings, tokenizer, context.spaces))
    controller = machine.freeze(build_controller(settings, world_model, machine))
    count, generator = settings.environment.count, torch.Generator().manual_seed(0)
    return build_agent(settings, world_model, controller, environments=count, generator=generator)


def _small_settings(context: Context) -> Settings:
    """Return the settings of the small run: every stage is due in every epoch and makes few updates, if any.

    A collect takes as many steps as in the whole run.
    """
    settings = context.settings
    changes = {"run.collect_epochs": EPOCHS + 1, "run.epochs": EPOCHS + 1}  # one more: the last evaluates
    changes |= {f"run.{stage}_after": 0 for stage in ("tokenizer", "dynamics", "controller")}
    changes |= {"run.evaluate_every": 0, "run.patience": 0}
    if settings.run.tokenizer_epochs:
        changes["run.tokenizer_epochs"] = EPOCHS + 1
    fewest = WARM_UPS + 2 if context.machine.cuda_graph else 1
    for name in ("tokenizer", "dynamics", "controller"):
        if updates := getattr(getattr(settings, name), "updates", 0):
            changes[f"{name}.updates"] = min(updates, fewest)
    overrides = [*(f"{key}={value}" for key, value in changes.items()), "run.overlap=false"]
    return resolve(context.preset, overrides, base=settings.plain())


def _stages_of_small_run(context: Context, small: Settings, folder: Path) -> dict[str, float]:
    """Return the seconds of each stage in the last epoch of a small run, with the loop of `wm run`."""
    inside = Context(Run.open(folder, create=True), context.preset, small, Progress(quiet=True))
    inside.binding, inside.to_bind, inside.pictures = Binding(context.preset, small.plain()), True, False
    newest: dict[str, Artifact] = {}
    seconds: dict[str, float] = {}
    with closing(Collector(inside)) as beside, context.progress.bar("profile small run", EPOCHS, "epochs") as bar:
        for epoch in range(1, EPOCHS + 1):
            inside = inside.at(epoch)
            began = time.perf_counter()
            for stage, artifact in run_epoch(inside, beside, newest):
                newest[artifact.kind] = artifact
                seconds[stage] = time.perf_counter() - began
                began = time.perf_counter()
            bar.advance()
    return seconds
