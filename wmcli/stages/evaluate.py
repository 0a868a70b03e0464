"""`wm eval`: scores of the trained controller in the real environment, and aggregates over runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.manifest import shown
from wmcli.assemble import load_controller, settings_of
from wmcli.config import did_you_mean
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.base import Actor
from wmcli.envs import EnvironmentSettings, Streams
from wmcli.envs.grid_world import ENDLESS
from wmcli.errors import ArtifactError, UsageError
from wmcli.metrics import atari, statistics
from wmcli.progress import Progress
from wmcli.report.images import write_gif
from wmcli.report.plots import return_curve, returns_histogram, write_figure
from wmcli.settings import flatten
from wmcli.stages.context import Context, check_same_environment
from wmcli.stages.pictures import Film, beside, draw_priors, write_side_by_side
from wmcli.training.device import derived_seed
from wmcli.world_models.base import WorldModel

PROTOCOL = "returns"  # what sets these evaluations apart from those of stages/grid_world.py
FILMED_STEPS = 300  # of the first episode
LONGEST_EPISODE = 100_000  # steps, in an environment without a time limit; Atari's longest protocol allows 108,000


class Played(NamedTuple):
    """Complete episodes, in the order in which they were started."""

    returns: list[float]
    lengths: list[int]
    film: Film
    """The first episode's first frames."""


def play_episodes(
    settings: EnvironmentSettings,
    agent: Actor,
    *,
    episodes: int,
    environments: int,
    seed: int,
    progress: Progress,
    what: str,
) -> Played:
    """Play exactly `episodes` complete test episodes, at most `environments` at a time (the rows that `agent` has).

    Every episode that is started counts, however long it takes, so that short ones are not over-represented. Raises
    UsageError when one of an environment without a time limit lasts longer than LONGEST_EPISODE.
    """
    count = min(environments, episodes)
    streams = Streams(settings.model_copy(update={"count": count}), train=False, seed=seed)
    number = np.arange(count)  # the episode each environment is playing; those from `episodes` on do not count
    started = count
    returns, lengths = np.zeros(episodes), np.zeros(episodes, dtype=np.int64)
    film = Film()
    with progress.bar(what, episodes, "episodes") as bar:
        while (number < episodes).any():
            frames = streams.observation
            action = agent.act(frames, streams.first)
            after = streams.step(action)
            if number[0] == 0 and len(film.frames) < FILMED_STEPS:
                film.add(frames[0], action[0], after.reward[0], agent.searched())
            counted = number < episodes
            returns[number[counted]] += after.reward[counted]
            lengths[number[counted]] += 1
            if not streams.has_time_limit and lengths[number[counted]].max() > LONGEST_EPISODE:
                raise UsageError(
                    f"{settings.id}: an episode has not ended after {LONGEST_EPISODE:,} steps, and the environment has"
                    " no time limit; register it with one: gymnasium.register(..., max_episode_steps=N)"
                )
            for environment in np.flatnonzero(after.terminated | after.truncated):
                if number[environment] < episodes:
                    bar.advance()
                number[environment] = started
                started += 1
    streams.close()
    return Played(returns.tolist(), lengths.tolist(), film)


def evaluate(context: Context, *, controller: str | None = None, episodes: int | None = None) -> Artifact:
    """Play complete episodes with the run's controller and publish the scores, with pictures.

    The metrics hold mean, median, standard error, all returns, the random policy's mean (published for the 26
    Atari-100k games, measured over as many episodes otherwise) and the human-normalised score where the game has
    reference scores.

    Raises ArtifactError when there is no controller or it is of another environment.
    """
    settings, run = context.settings, context.run
    actor = run.resolve(controller or "controller", "controller")
    environment = context.environment
    check_same_environment(environment, actor)
    if environment["id"] in ENDLESS:
        raise UsageError(f"episodes of {environment['id']} never end, so they have no return: use --protocol gridworld")
    episodes = episodes or settings.evaluation.episodes
    identity = settings.select("seed", "environment", "evaluation") | {"episodes": episodes, "protocol": PROTOCOL}
    identity |= settings.acting
    job = run.job("evaluation", identity, {"controller": actor})
    if (existing := job.done()) and not context.force:
        context.progress.say(f"eval: {existing.name} is this very job, nothing to do (--force plays again)")
        return existing
    with job.work(fresh=context.fresh) as work:
        context.progress.say(f"eval: {episodes} episodes of {environment['id']} by {actor.name} on {context.machine}")
        world_model, policy = load_controller(actor, context.machine, context.settings.acting)
        generator = torch.Generator().manual_seed(derived_seed(settings.seed, "eval actions"))
        rows = min(settings.evaluation.environments, episodes)
        agent = Agent(
            world_model, policy, rows, temperature=settings.evaluation.temperature, epsilon=0.0, generator=generator
        )
        with context.machine.autocast():
            played = play_episodes(
                settings.environment,
                agent,
                episodes=episodes,
                environments=rows,
                seed=derived_seed(settings.seed, "eval"),
                progress=context.progress,
                what="eval",
            )
            known = settings_of(actor.input("dynamics")).dynamics.context
            pictures = _first_episode_imagined(context, world_model, known, played.film)
        random_mean = atari.reference(environment["id"], "random")
        if random_mean is None:
            random_mean = float(np.mean(_random_episodes(context, episodes, rows).returns))
        metrics = score(played.returns) | {
            "random_mean": random_mean,
            "human_normalized": atari.human_normalized(environment["id"], float(np.mean(played.returns))),
            "lengths": played.lengths,
            "protocol": PROTOCOL,
            "environment": environment["id"],
            "total_steps": _steps_behind(actor),
        }
        write_gif(work.payload / "episode.gif", played.film.drawn(environment.get("action_meanings")), fps=10)
        write_side_by_side(work.payload, pictures)
        _write_plots(work.payload, run, metrics)
        artifact = work.publish(
            settings=settings.model_dump(mode="json"),
            metrics=metrics,
            environment=environment,
            machine=context.machine.block(),
        )
    context.progress.say(summary(artifact))
    return artifact


def summary(artifact: Artifact) -> str:
    """An evaluation in one line: the score beside random play, and where to look."""
    metrics, film = artifact.metrics, artifact.path / "imagination.gif"
    look = (
        f"imagination beside reality: {shown(film)}" if film.exists() else f"a film: {shown(film.with_stem('episode'))}"
    )
    return (
        f"eval: {artifact.name}: mean return {metrics['mean']:.3f} over {metrics['episodes']} episodes, random"
        f" {metrics['random_mean']:.3f}; {look}"
    )


def score(returns: Sequence[float]) -> dict[str, Any]:
    """Mean, median and standard error of the mean of some episodes' returns."""
    values = np.asarray(returns, dtype=np.float64)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "stderr": float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None,
        "episodes": len(values),
        "returns": values.tolist(),
    }


def _random_episodes(context: Context, episodes: int, environments: int) -> Played:
    settings = context.settings
    generator = torch.Generator().manual_seed(derived_seed(settings.seed, "eval random"))
    return play_episodes(
        settings.environment,
        UniformAgent(context.environment["actions"], environments, generator=generator),
        episodes=episodes,
        environments=environments,
        seed=derived_seed(settings.seed, "eval"),
        progress=context.progress,
        what="random play",
    )


def _first_episode_imagined(context: Context, world_model: WorldModel, known: int, film: Film):
    """The filmed episode's beginning beside its imagination under the same actions; None when it is too short."""
    length = min(len(film.frames), 32)
    if length <= known or not world_model.decodes:
        return None
    device = context.machine.device
    frames = torch.from_numpy(np.stack(film.frames[:length])[None]).to(device)
    actions = torch.tensor([film.actions[:length]], device=device)
    generator = derived_seed(context.settings.seed, "eval pictures")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(generator)
        return beside(world_model, frames, actions, known)


def _steps_behind(actor: Artifact) -> int:
    """Environment steps the controller's experience held."""
    return int(actor.input("experience").metrics["total_steps"])


def _write_plots(payload: Path, run: Run, metrics: dict[str, Any]) -> None:
    lines = {"random": metrics["random_mean"]}
    human = atari.reference(metrics["environment"], "human")
    if human is not None:
        lines["human"] = human
    title = metrics["environment"]
    write_figure(payload / "returns.png", returns_histogram(metrics["returns"], references=lines, title=title))
    scores = {earlier["total_steps"]: earlier["mean"] for earlier in _earlier(run)} | {
        metrics["total_steps"]: metrics["mean"]
    }
    steps = sorted(scores)
    write_figure(
        payload / "curve.png", return_curve(steps, [scores[step] for step in steps], references=lines, title=title)
    )


def _earlier(run: Run) -> list[dict[str, Any]]:
    every = [run.get("evaluation", version).metrics for version in run.versions("evaluation")]
    return [metrics for metrics in every if metrics["protocol"] == PROTOCOL]


# -- several runs -----------------------------------------------------------------------------------------------------


def aggregate(runs: Sequence[Path], against: Sequence[Path] | None = None) -> dict[str, Any]:
    """Statistics over the newest evaluations of several runs, a task being an environment (Agarwal et al. 2021).

    Scores are human-normalised when every environment has reference scores, else raw returns. With `against`, the
    probability that a run of `runs` beats one of `against`. Intervals are 95 % stratified bootstrap intervals.

    Raises ArtifactError for a run without evaluation, UsageError when protocols differ or tasks cannot be pooled.
    """
    tables = [_by_task(runs), _by_task(against)] if against else [_by_task(runs)]
    evaluated = [evaluation for table in tables for evaluations in table.values() for evaluation in evaluations]
    protocols = {evaluation.manifest["environment"]["protocol"] for evaluation in evaluated}
    if len(protocols) > 1:
        raise UsageError(
            f"these runs played under different protocols ({', '.join(sorted(protocols))}); compare runs of one."
        )
    normalized = all(evaluation.metrics["human_normalized"] is not None for evaluation in evaluated)
    if not normalized and len({evaluation.metrics["environment"] for evaluation in evaluated}) > 1:
        raise UsageError(
            "returns of different environments cannot be pooled without reference scores; give runs of one."
        )
    key = "human_normalized" if normalized else "mean"
    scores = [
        {task: np.array([evaluation.metrics[key] for evaluation in evaluations]) for task, evaluations in table.items()}
        for table in tables
    ]
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {
        "scores": {task: values.tolist() for task, values in scores[0].items()},
        "unit": "human-normalised score" if normalized else "return",
        "runs": len(runs),
        "tasks": len(scores[0]),
        **{name: estimate._asdict() for name, estimate in statistics.aggregate(scores[0], rng).items()},
    }
    low, high = min(map(np.min, scores[0].values())), max(map(np.max, scores[0].values()))
    thresholds = np.linspace(low, high, 21)
    profile = statistics.performance_profile(scores[0], thresholds)
    result["performance_profile"] = {"threshold": thresholds.tolist(), "share": np.asarray(profile.value).tolist()}
    if against:
        result["probability_of_improvement"] = statistics.bootstrap_improvement(scores[0], scores[1], rng)._asdict()
    return result


def compare_settings(runs: Sequence[Path], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a table: runs with equal values of these settings (`section.key`) together, in the order of their first.

    Each has those values, `runs`, and the `mean` of their scores with its 95 % bootstrap interval `low` to `high`.

    Raises ArtifactError for a run without evaluation, UsageError for an unknown key or runs that cannot be pooled.
    """
    unit = aggregate(runs)["unit"]
    groups: dict[tuple[Any, ...], list[Path]] = {}
    for run, evaluation in zip(runs, newest_evaluations(runs, PROTOCOL), strict=True):
        values = flatten(settings_of(evaluation))
        for key in keys:
            if key not in values:
                raise UsageError(f"--by {key}: no such setting; {did_you_mean(key, values)}")
        groups.setdefault(tuple(str(values[key]) for key in keys), []).append(run)
    rows = []
    for group, members in groups.items():
        result = aggregate(members)
        if result["unit"] != unit:
            raise UsageError("some of these runs have reference scores and some have none; compare runs of one game.")
        estimate = result["mean"]
        numbers = {"mean": estimate["value"], "low": estimate["low"], "high": estimate["high"]}
        rows.append({**dict(zip(keys, group, strict=True)), "runs": len(members), **numbers})
    return rows


def compare_priors(runs: Sequence[Path], out: Path) -> None:
    """Draw the attention priors that these runs learned. Raises UsageError where they learned none that match."""
    opened = [Run.open(path, create=False) for path in runs]
    draw_priors(opened, settings_of(newest_evaluations(runs[:1], PROTOCOL)[0]), out)


def _by_task(runs: Sequence[Path]) -> dict[str, list[Artifact]]:
    table: dict[str, list[Artifact]] = {}
    for newest in newest_evaluations(runs, PROTOCOL):
        table.setdefault(newest.metrics["environment"], []).append(newest)
    return table


def newest_evaluations(runs: Sequence[Path], protocol: str) -> list[Artifact]:
    """The newest evaluation of each run under a protocol. Raises ArtifactError for a run that has none."""
    found = []
    for path in runs:
        run = Run.open(path, create=False)
        every = (run.get("evaluation", version) for version in reversed(run.versions("evaluation")))
        newest = next((each for each in every if each.metrics["protocol"] == protocol), None)
        if newest is None:
            option = "" if protocol == PROTOCOL else f" --protocol {protocol}"
            raise ArtifactError(f"no such evaluation in {path}; make one with: wm eval --run {path}{option}")
        found.append(newest)
    return found
