"""The grid-world study: errors of a model on cells, and the cost of a training step. `wm eval --protocol gridworld`.

The errors and their floors are in wmcli/metrics/grid_world.py. The paper does not say how its frames were generated, so
both ways are measured: freely, and from real frames. S sequences, T frames, K = 25 cells.

Source: Drama (Wang et al. 2024, arXiv 2410.08893, table 2).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wmcli.artifacts import Artifact
from wmcli.artifacts.environment import check_same_environment
from wmcli.assemble import load_world_model, settings_of
from wmcli.backbones import BackboneSettings, build
from wmcli.controllers.agent import UniformAgent
from wmcli.envs import open_streams
from wmcli.envs.grid_world import GRID_WORLD_GOAL_ID
from wmcli.errors import MachineError, UsageError
from wmcli.experience import Recorder, Replay
from wmcli.memory import PROC, peak_resident, resident
from wmcli.metrics import grid_world as metrics
from wmcli.settings import Settings
from wmcli.stages.context import Context
from wmcli.stages.player import step_columns
from wmcli.stages.protocol import Protocol
from wmcli.training.device import Machine, derived_seed, isolated_randomness
from wmcli.training.optim import build_optimizer, update
from wmcli.transfer import take_rows
from wmcli.world_models.base import Batch
from wmcli.world_models.cells import KINDS, MOVES, TOKENS, CellsSettings, CellsWorldModel
from wmcli.world_models.open_loop import open_loop

ALIKE = ("tokens", "backbone", "environment", "parameters", "updates", "batch")  # equal within a row
WARM_UP = 2  # training steps before any is timed
ENVIRONMENTS = 64  # side by side

PAPER: dict[tuple[str, int], tuple[str, str, str]] = {
    ("mamba2", 208): ("25", "13", "15.6 ± 2.6"),
    ("mamba1", 208): ("34", "14", "13.9 ± 0.4"),
    ("gru", 208): ("75", "66", "21.3 ± 0.3"),
    ("transformer", 208): ("45", "17", "75.0 ± 1.1"),
    ("mamba2", 1664): ("214", "55", "14.2 ± 0.3"),
    ("mamba1", 1664): ("299", "52", "14.0 ± 0.4"),
    ("gru", 1664): ("628", "68", "34.7 ± 25.4"),
    ("transformer", 1664): ("out of memory", "out of memory", "out of memory"),
}
"""Table 2 of the paper, by backbone and tokens: ms per training step, memory in % of 8 GB, error in %."""


def evaluate_grid_world(context: Context, *, dynamics: str | None = None) -> Artifact:
    """Score a dynamics model on fresh sequences of random play, time a training step, and publish both.

    There are `evaluation.episodes` sequences of `dynamics.sequence_length` frames.

    Args:
        context: Of the run.
        dynamics: Reference; None is the newest of the run.

    Raises:
        ArtifactError: There is no dynamics model, or it is of another environment.
        MachineError: A training step does not fit into memory.
        UsageError: The dynamics model is of another kind.
    """
    settings, machine, run = context.settings, context.machine, context.run
    model = run.resolve(dynamics or "dynamics", "dynamics")
    check_same_environment(context.environment, model)
    trained = settings_of(model)
    GRID_WORLD.check(trained)
    world_model = load_world_model(model, machine)
    assert isinstance(world_model, CellsWorldModel)
    dynamics_settings: CellsSettings = world_model.settings
    sequences = settings.evaluation.episodes
    identity = settings.identity("seed", "environment") | {"sequences": sequences, "protocol": "gridworld"}
    identity |= {"precision": machine.precision, "device": str(machine.device), "threads": machine.threads}
    job = run.job("evaluation", identity, {"dynamics": model})
    if existing := context.done(job):
        context.progress.say(f"eval: {existing.name} is up to date, nothing to do (--force measures again)")
        return existing
    with context.work(job) as work:
        context.progress.say(f"eval: {sequences} sequences of {dynamics_settings.sequence_length} frames on {machine}")
        replay = _play(context, sequences, dynamics_settings.sequence_length)
        respawn: metrics.Respawn = "goal" if context.environment["id"] == GRID_WORLD_GOAL_ID else "both"
        with machine.autocast():
            scores = grid_world_scores(
                world_model,
                replay,
                respawn=respawn,
                sequences=sequences,
                seed=derived_seed(settings.seed, "eval"),
            )
        cost = time_and_memory(dynamics_settings, trained.backbone, machine)
        artifact = context.publish(
            work,
            scores
            | cost
            | {
                "protocol": "gridworld",
                "environment": context.environment["id"],
                "backbone": trained.backbone.kind,
                "tokens": dynamics_settings.sequence_length * TOKENS,
                "batch": dynamics_settings.batch,
                "updates": model.metrics["updates"],
            },
        )
    context.progress.say(summarize(artifact))
    return artifact


def unfit(settings: Settings) -> str | None:
    """Return why dynamics with these settings cannot be scored, or None if they can."""
    if settings.dynamics.predicts_cells:
        return None
    return f"needs dynamics of kind 'cells', and dynamics.kind = {settings.dynamics.kind}: start with wm run gridworld"


def summarize(evaluation: Artifact) -> str:
    """Return an evaluation in one line."""
    row = table([evaluation])[0]
    return (
        f"eval: {evaluation.name}: error {row['error %']} % generating, {row['teacher %']} % on real frames;"
        f" {row['ms per step']} ms per training step"
    )


def table(evaluations: Sequence[Artifact]) -> list[dict[str, Any]]:
    """Return a row for each backbone and sequence length, beside the paper's numbers.

    Numbers are means over runs ± their standard deviation. Other rules, sizes or budgets make a row of their own.
    Errors, in %, are (geometric + logic) / 2 over all frames. `error` is of freely generated frames, `teacher` of the
    likeliest frames after real ones. `without hits` leaves out frames after a hit, which are chance. Memory is in MB.
    """
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in evaluations:
        cells.setdefault(tuple(each.metrics[key] for key in ALIKE), []).append(each.metrics)
    rows = []
    for (tokens, backbone, *_), runs in sorted(cells.items()):
        paper = PAPER.get((backbone.removesuffix("-xl"), tokens), ("-", "-", "-"))
        rows.append(
            {
                **{key: runs[0][key] for key in ("backbone", "tokens", "parameters", "updates", "batch")},
                "runs": len(runs),
                "ms per step": _mean([each["milliseconds"] for each in runs], "{:.0f}"),
                "peak MB": _mean([each["peak_bytes"] / 1e6 for each in runs if each["peak_bytes"]], "{:.0f}"),
                "error %": _mean([100 * each["free"]["all"]["error"] for each in runs]),
                "without hits %": _mean(
                    [100 * each["free"]["without_hits"]["error"] for each in runs if each["free"]["without_hits"]]
                ),
                "teacher %": _mean([100 * each["teacher"]["all"]["error"] for each in runs]),
                "loss": _mean([each["loss"] for each in runs], "{:.4f}"),
                "best loss": f"{runs[0]['best_loss']:.4f}",
                "paper ms": paper[0],
                "paper memory %": paper[1],
                "paper error %": paper[2],
            }
        )
    return rows


def _mean(values: Sequence[float], form: str = "{:.1f}") -> str:
    if not values:
        return "-"
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


def _play(context: Context, sequences: int, length: int) -> Replay:
    """Play randomly for `sequences` sequences of `length` frames, on seeds that training does not use."""
    settings = context.settings
    count = min(sequences, ENVIRONMENTS)
    rounds = length * -(-sequences // count)
    seed = derived_seed(settings.seed, "eval gridworld")
    streams = open_streams(settings.environment.model_copy(update={"count": count}), train=False, seed=seed)
    agent = UniformAgent(context.spaces.action, count, generator=torch.Generator().manual_seed(seed))
    recorder = Recorder(rounds, count)
    with context.progress.bar("random play", rounds * count, "steps") as bar:
        for _ in range(rounds):
            observation, first = streams.observation, streams.first
            action = agent.act(observation, first)
            after = streams.step(action)
            recorder.add(step_columns(observation, first, action, after), after.final)
            bar.advance(count)
    streams.close()
    replay = Replay(context.machine.device)
    replay.extend(recorder.arrays())
    return replay


# -- errors -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def grid_world_scores(
    world_model: CellsWorldModel,
    replay: Replay,
    *,
    respawn: metrics.Respawn,
    sequences: int = 512,
    batch: int = 64,
    seed: int,
) -> dict[str, Any]:
    """Measure loss and errors on held-out sequences.

    Args:
        world_model: In eval mode.
        replay: Frames of random play that the model has not learned from.
        respawn: Rule of the environment of the replay.
        sequences: Number of sequences, as long as in training. They do not overlap.
        batch: Sequences side by side.
        seed: Of the choice of sequences, the actions and the samples.

    Returns:
        `loss`: mean cross entropy (nats per token). `best_loss`: the lowest possible.
        `teacher`: errors of the likeliest frames, each cell predicted from real tokens. The agent must be in its real
        place. `logic_floor`: the expected `logic` of a perfect model.
        `free`: errors of frames sampled at temperature 1 from the first frame on, under uniformly random actions.
        The agent must be where the rules move it from the sampled frame before, which is the goal after a hit. With
        respawn "both" a perfect model has an error of `logic_floor` here, too.
        Both hold errors of `all` frames, and those `without_hits`: of frames before which no goal was reached.
        Frames after a hit are chance, and their likeliest cells need not make a board.
        `hit_rate`: share of the real steps that reach the goal. `sequences`, `frames`: their numbers.

    Raises:
        UsageError: The replay has fewer sequences.
    """
    assert not world_model.training, "dropout while evaluating: call world_model.eval() first"
    length = world_model.settings.sequence_length
    parts = []
    with isolated_randomness(seed, replay.device) as rng:
        for rows in np.split(_cut(replay, length, sequences, rng), range(batch, sequences, batch)):
            frames, action = (take_rows(column, rows, replay.device) for column in (replay.observation, replay.action))
            cells = world_model.encode(frames)
            loss, _ = world_model.loss(_batch_of(cells, action))
            teacher = world_model.predict_frames(cells, action)
            random = torch.from_numpy(rng.integers(len(MOVES), size=(len(rows), length - 2))).to(replay.device)
            forced = torch.cat((action[:, :1], random), 1)
            # open_loop takes an action for every frame, the last one included.
            _, steps = open_loop(world_model, cells[:, :1], F.pad(forced, (0, 1)))
            generated = torch.stack([cells[:, 0], *(step.latent for step in steps)], 1)
            parts.append((loss.expand(len(rows)), cells, action[:, :-1], teacher, forced, generated))
    losses, real, real_action, likeliest, forced_action, free = (
        torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True)
    )
    hit, free_hit = metrics.hits(real[:, :-1], real_action), metrics.hits(free[:, :-1], forced_action)
    return {
        "sequences": sequences,
        "frames": length,
        "hit_rate": float(hit.mean()),
        "loss": float(losses.mean()),
        "best_loss": metrics.best_loss(length, respawn),
        "logic_floor": metrics.logic_floor(respawn),
        "teacher": _errors(likeliest, metrics.agents(real[:, 1:]), hit),
        "free": _errors(free[:, 1:], metrics.moved(free[:, :-1], forced_action), free_hit),
    }


def _errors(frames: np.ndarray, agent: np.ndarray, hit: np.ndarray) -> dict[str, dict[str, float] | None]:
    some = None if hit.all() else metrics.errors(frames[~hit], agent[~hit])._asdict()
    return {"all": metrics.errors(frames, agent)._asdict(), "without_hits": some}


def _cut(replay: Replay, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return rows (count, length) of random sequences that do not overlap."""
    episodes = zip(*replay.episodes, strict=True)
    starts = np.concatenate([start + np.arange(0, rows - length + 1, length) for start, rows in episodes])
    if len(starts) < count:
        raise UsageError(
            f"scoring needs {count} sequences of {length} frames, and the experience has {len(starts)}: "
            "collect more with: wm collect"
        )
    return replay.order[rng.choice(starts, count, replace=False)[:, None] + np.arange(length)]


def _batch_of(cells: Tensor, action: Tensor) -> Batch:
    """Return a batch without padding, episode ends or rewards."""
    no = torch.zeros_like(action, dtype=torch.bool)
    return Batch(cells, action, no.float(), terminated=no, truncated=no, is_first=no, valid=~no)


# -- time and memory --------------------------------------------------------------------------------------------------


def time_and_memory(
    settings: CellsSettings, backbone: BackboneSettings, machine: Machine, *, repeats: int = 20
) -> dict[str, Any]:
    """Measure the cost of a training step at these sizes: fresh model, random cells, forward, backward and optimizer.

    Returns:
        `milliseconds`: median of `repeats` steps after a warm-up. `milliseconds_low` and `milliseconds_high`: the
        fastest and the slowest. `parameters`: their number.
        `peak_bytes`: peak memory of training with weights and optimizer, None where it cannot be measured.
        `peak_of`: the kind of that number, in words. On CUDA it counts bytes that torch allocates. On a CPU it is the
        rise of a fresh process's resident set in two steps, above its size with all code loaded.

    Raises:
        MachineError: The step does not fit into memory.
    """
    peak: int | None = None
    try:
        if machine.device.type == "cuda":
            peak_of = "most bytes allocated by torch on the device, above what was allocated before"
            torch.cuda.reset_peak_memory_stats(machine.device)
            before = torch.cuda.memory_allocated(machine.device)
            times, parameters = _time(settings, backbone, machine, repeats)
            peak = torch.cuda.max_memory_allocated(machine.device) - before
        else:
            peak_of = "not measured: needs CUDA or Linux"
            if PROC.exists():
                peak_of = "peak resident bytes of a fresh process in two steps, above what it holds when idle"
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                    peak = fresh.submit(_resident_rise, settings, backbone, machine).result()
            times, parameters = _time(settings, backbone, machine, repeats)
    except (RuntimeError, MemoryError) as error:
        # Torch's CPU allocator has no exception of its own. A child that the system kills breaks its pool.
        full = isinstance(error, torch.OutOfMemoryError | BrokenProcessPool | MemoryError)
        if not full and "allocate memory" not in str(error):
            raise
        raise MachineError(
            f"a training step of {backbone.kind} on {settings.batch} x {settings.sequence_length * TOKENS} tokens does"
            f" not fit into the memory of {machine.device}: lower dynamics.batch or dynamics.sequence_length"
        ) from error
    return {
        "milliseconds": statistics.median(times),
        "milliseconds_low": min(times),
        "milliseconds_high": max(times),
        "parameters": parameters,
        "peak_bytes": peak,
        "peak_of": peak_of,
    }


def _training_step(
    settings: CellsSettings, backbone: BackboneSettings, machine: Machine
) -> tuple[Callable[[], None], int]:
    """Return a training step of a fresh model on random cells, and its number of parameters."""
    network = build(backbone, max_length=settings.sequence_length * TOKENS, block=TOKENS)
    model = CellsWorldModel(settings, network, actions=len(MOVES), image_size=10).to(machine.device)
    optimizer = build_optimizer(
        settings.optimizer, model.parameter_groups(), settings.learning_rate, settings.weight_decay
    )
    shape = (settings.batch, settings.sequence_length)
    batch = _batch_of(
        torch.randint(KINDS, (*shape, TOKENS - 1), device=machine.device),
        torch.randint(len(MOVES), shape, device=machine.device),
    )

    def step() -> None:
        with machine.autocast():
            loss, _ = model.loss(batch)
        update(optimizer, loss, settings.clip)

    return step, sum(parameter.numel() for parameter in model.parameters())


def _time(
    settings: CellsSettings, backbone: BackboneSettings, machine: Machine, repeats: int
) -> tuple[list[float], int]:
    """Return the milliseconds of each of `repeats` steps, and the number of parameters."""
    times = []
    with isolated_randomness(0, machine.device):
        step, parameters = _training_step(settings, backbone, machine)
        for repeat in range(WARM_UP + repeats):
            _wait(machine.device)
            started = time.perf_counter()
            step()
            _wait(machine.device)
            if repeat >= WARM_UP:
                times.append(1000 * (time.perf_counter() - started))
    return times, parameters


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident_rise(settings: CellsSettings, backbone: BackboneSettings, machine: Machine) -> int:
    """Return the rise in resident bytes at the peak of two training steps. To be called in a fresh process."""
    torch.set_num_threads(machine.threads)

    def steps(of: CellsSettings) -> None:
        step, _ = _training_step(of, backbone, machine)
        step()
        step()  # with the optimizer's moments

    steps(settings.model_copy(update={"batch": 1, "sequence_length": 2}))  # loads a hundred megabytes of code
    gc.collect()
    idle = resident()
    steps(settings)
    return peak_resident() - idle


GRID_WORLD = Protocol(
    name="gridworld",
    needs="dynamics",
    evaluate=evaluate_grid_world,
    unfit=unfit,
    summarize=summarize,
    table=table,
)
