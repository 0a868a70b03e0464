"""`wm eval`: score the trained controller in the real environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wmcli.artifacts import Artifact, Run, Work, film_of
from wmcli.artifacts.environment import check_same_environment
from wmcli.artifacts.files import disk_errors
from wmcli.artifacts.manifest import shown
from wmcli.artifacts.store import BEST
from wmcli.assemble import load_controller, settings_of
from wmcli.config import Identity
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.base import Actor
from wmcli.envs.grid_world import ENDLESS
from wmcli.errors import ArtifactError, MachineError, UsageError, WmError
from wmcli.metrics import atari
from wmcli.nn.actions import put_observation
from wmcli.report.images import write_webp
from wmcli.report.plots import return_curve, returns_histogram, write_figure
from wmcli.settings import MAX_EPISODES, Settings
from wmcli.spaces import map_parts, stack_parts
from wmcli.stages.context import Context
from wmcli.stages.episodes import PlayedEpisodes, play_episodes
from wmcli.stages.pictures import Film, SideBySide, beside, write_imagination
from wmcli.stages.protocol import Protocol
from wmcli.training.device import derived_seed
from wmcli.world_models.base import WorldModel

PROTOCOL = "returns"
COLUMNS = ("name", "score", "stderr", "human_normalized", "runs", "episodes", "lowest", "highest", "caveat")
IMAGINED_FRAMES = 32  # at most, beside the real ones
UNRELATED = ("measures", "probe_updates", "episodes")
"""Settings of evaluation that returns do not depend on: other protocols, and the default of the number of episodes."""


def evaluate(context: Context, *, controller: str | None = None, episodes: int | None = None) -> Artifact:
    """Play complete episodes with a controller and publish their returns, with pictures.

    Args:
        context: Of the run.
        controller: Reference; None is the newest of the run.
        episodes: Number of episodes; None is `evaluation.episodes`.

    Returns:
        The evaluation. Its metrics hold mean, median and standard error of the returns, and all returns and lengths.
        `random_mean` is published for the 26 games of Atari-100k, and else measured over as many episodes.
        `human_normalized` is None for other environments.

    Raises:
        ArtifactError: There is no controller, or it is of another environment.
        UsageError: Episodes of the environment never end, or there are too many for one evaluation.
        Stopped: A signal arrived; the same command resumes.
    """
    settings, run = context.settings, context.run
    actor = run.resolve(controller or "controller", "controller")
    environment = context.environment
    check_same_environment(environment, actor)
    RETURNS.check(settings)
    episodes = episodes or settings.evaluation.episodes
    if episodes > MAX_EPISODES:
        raise UsageError(
            f"--episodes {episodes}: at most {MAX_EPISODES:,} make one evaluation; run several with --seed."
        )
    played = Identity({"episodes": episodes, "protocol": PROTOCOL}) | settings.acting_identity()
    own = Identity.of_part("evaluation", settings.evaluation, without=UNRELATED)
    identity = settings.identity("seed", "environment") | own | played
    job = run.job("evaluation", identity, {"controller": actor})
    existing = context.done(job)
    if existing is None:  # only now, since former identities take a look at every evaluation
        identity = identity.instead_of(*(former | played for former in _former_identities(context, actor)))
        job = run.job("evaluation", identity, {"controller": actor})
        existing = context.done(job)
    if existing is not None:
        with suppress(MachineError):  # the run may be read-only
            _point_best(run)
        context.progress.say(f"eval: {existing.name} is up to date, nothing to do (--force plays again)")
        return existing
    with context.work(job) as work:
        context.progress.say(f"eval: {episodes} episodes of {environment['id']} by {actor.name} on {context.machine}")
        world_model, policy = load_controller(actor, context.machine, context.settings.acting)
        generator = torch.Generator().manual_seed(derived_seed(settings.seed, "eval actions"))
        rows = min(settings.evaluation.environments, episodes)
        agent = Agent(
            world_model, policy, rows, temperature=settings.evaluation.temperature, epsilon=0.0, generator=generator
        )
        with context.machine.autocast():
            result = _play(context, work, agent, episodes, "eval")
            context_frames = settings_of(actor.input("dynamics")).dynamics.context
            pictures = _imagine_first_episode(context, world_model, context_frames, result.film)
        random_mean = atari.reference(environment["id"], "random")
        if random_mean is None:
            generator = torch.Generator().manual_seed(derived_seed(settings.seed, "eval random"))
            uniform = UniformAgent(context.spaces.action, rows, generator=generator)
            random_mean = float(np.mean(_play(context, work, uniform, episodes, "random play").returns))
        metrics = score(result.returns) | {
            "random_mean": random_mean,
            "human_normalized": atari.human_normalized(environment["id"], float(np.mean(result.returns))),
            "lengths": result.lengths,
            "protocol": PROTOCOL,
            "environment": environment["id"],
            "total_steps": _environment_steps(actor),
        }
        logged = {"mean_return": metrics["mean"], "median_return": metrics["median"], "stderr": metrics["stderr"]}
        context.log(job, metrics["total_steps"], {"stage": "eval", **logged, "episodes": episodes})
        write_webp(
            work.payload / "episode.webp",
            result.film.render(context.spaces.observation, environment.get("action_meanings")),
            fps=10,
        )
        write_imagination(work.payload, pictures)
        _write_plots(work.payload, run, actor, metrics)
        artifact = context.publish(work, metrics)
    _point_best(run)
    context.progress.say(summary(artifact))
    return artifact


def _former_identities(context: Context, actor: Artifact) -> Iterator[Identity]:
    """Yield the settings that identified scores when all of the section `evaluation` did.

    They have the values of `UNRELATED` in this command, and in each evaluation of the controller that can be read.
    """
    settings = context.settings
    made = [settings.evaluation]
    for each in context.run.artifacts("evaluation"):
        if each.metrics["protocol"] == PROTOCOL and each.inputs["controller"].digest == actor.digest:
            with suppress(WmError):
                made.append(settings_of(each).evaluation)
    for then in dict.fromkeys(made):
        section = settings.evaluation.model_copy(update={key: getattr(then, key) for key in UNRELATED})
        yield settings.model_copy(update={"evaluation": section}).identity("seed", "environment", "evaluation")


def _play(context: Context, work: Work, agent: Actor, episodes: int, name: str) -> PlayedEpisodes:
    """Play test episodes of the run's environment, with checkpoints in the work folder."""
    settings = context.settings
    return play_episodes(
        settings.environment,
        agent,
        episodes=episodes,
        environments=min(settings.evaluation.environments, episodes),
        seed=derived_seed(settings.seed, "eval"),
        progress=context.progress,
        name=name,
        checkpoint=work.path / f"{name.replace(' ', '-')}.safetensors",
        checkpoint_seconds=settings.training.checkpoint_seconds,
    )


def best_evaluation(run: Run) -> Artifact | None:
    """Return the evaluation of the run's best controller: the one with the highest mean return that has its weights.

    Of a controller's evaluations the one with the most episodes counts, the newest of equals. Of equal means, more
    episodes and then the newer evaluation win. None if no such controller was evaluated.
    """
    of_controller: dict[str, Artifact] = {}
    for evaluation in run.artifacts("evaluation"):
        if evaluation.metrics["protocol"] != PROTOCOL:
            continue
        digest = evaluation.inputs["controller"].digest
        if digest not in of_controller or evaluation.metrics["episodes"] >= of_controller[digest].metrics["episodes"]:
            of_controller[digest] = evaluation
    ranked = sorted(
        of_controller.values(), key=lambda each: (each.metrics["mean"], each.metrics["episodes"], each.version)
    )
    for evaluation in reversed(ranked):
        controller = evaluation.inputs["controller"]
        with suppress(ArtifactError):
            published = run.get("controller", controller.version)
            if published.digest == controller.digest and not published.pruned:
                return evaluation
    return None


def _point_best(run: Run) -> None:
    """Point `controller/best` to the controller of `best_evaluation`."""
    evaluation = best_evaluation(run)
    if evaluation is not None:
        with disk_errors(run.path):
            run.point("controller", BEST, evaluation.inputs["controller"].version)


def summary(artifact: Artifact) -> str:
    """Return an evaluation in one line: the score beside random play, and the path of a film."""
    metrics, look = artifact.metrics, ""
    if film := film_of(artifact, "imagination"):
        look = f"; imagination beside reality: {shown(film)}"
    elif film := film_of(artifact, "episode"):
        look = f"; a film: {shown(film)}"
    return (
        f"eval: {artifact.name}: mean return {metrics['mean']:.3f} over {metrics['episodes']} episodes, random"
        f" {metrics['random_mean']:.3f}{look}"
    )


def unfit(settings: Settings) -> str | None:
    """Return why episodes of the environment have no return, or None if they have one."""
    name = settings.environment.id
    return (
        f"episodes of {name} never end, so they have no return: use --protocol gridworld" if name in ENDLESS else None
    )


def table(evaluations: Sequence[Artifact]) -> list[dict[str, Any]]:
    """Return a row for each evaluation, then the published scores of its environment."""
    rows: list[dict[str, Any]] = []
    for evaluation in evaluations:
        metrics = evaluation.metrics
        ours = {"name": evaluation.name, "score": metrics["mean"], "stderr": metrics["stderr"]}
        ours |= {"human_normalized": metrics["human_normalized"], "runs": 1, "episodes": metrics["episodes"]}
        published = atari.references(metrics["environment"], metrics["random_mean"])
        rows += [{column: row.get(column) for column in COLUMNS} for row in (ours, *published)]
    return rows


def score(returns: Sequence[float]) -> dict[str, Any]:
    """Return mean, median and standard error of the mean of some returns."""
    values = np.asarray(returns, dtype=np.float64)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "stderr": float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None,
        "episodes": len(values),
        "returns": values.tolist(),
    }


def _imagine_first_episode(
    context: Context, world_model: WorldModel, context_frames: int, film: Film
) -> SideBySide | None:
    """Imagine the filmed episode under its actions. Return None if it is too short or the model decodes nothing."""
    length = min(len(film.frames), IMAGINED_FRAMES)  # without the outcome: models learn nothing after an end
    if length <= context_frames or not world_model.decodes:
        return None
    device = context.machine.device
    stacked = put_observation(stack_parts(film.frames[:length]), device)
    frames = map_parts(lambda part: part[None], stacked)
    actions = torch.tensor([film.actions[:length]], device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derived_seed(context.settings.seed, "eval pictures"))
        return beside(world_model, frames, actions, context_frames)


def _environment_steps(actor: Artifact) -> int:
    """Return the environment steps of the controller's experience."""
    return int(actor.input("experience").metrics["total_steps"])


def _write_plots(payload: Path, run: Run, actor: Artifact, metrics: dict[str, Any]) -> None:
    lines = {"random": metrics["random_mean"]}
    if (human := atari.reference(metrics["environment"], "human")) is not None:
        lines["human"] = human
    title = metrics["environment"]
    write_figure(payload / "returns.png", returns_histogram(metrics["returns"], references=lines, title=title))
    evaluations = [each | {"environment_step": each["total_steps"]} for each in [*_earlier(run, actor), metrics]]
    write_figure(payload / "curve.png", return_curve(evaluations, references=lines, title=title))


def _earlier(run: Run, actor: Artifact) -> list[dict[str, Any]]:
    """Return the metrics of the newest evaluation of each ancestor of a controller, oldest first."""
    ancestors = set()
    ancestor: Artifact | None = actor
    while ancestor is not None and "parent" in ancestor.inputs:
        ancestors.add(ancestor.inputs["parent"].digest)
        try:
            ancestor = ancestor.input("parent")
        except ArtifactError:  # deleted, and its own ancestors with it
            break
    evaluations = [each for each in run.artifacts("evaluation") if each.metrics["protocol"] == PROTOCOL]
    newest = {each.inputs["controller"].digest: each.metrics for each in evaluations}
    return sorted((newest[digest] for digest in ancestors & newest.keys()), key=lambda metrics: metrics["total_steps"])


RETURNS = Protocol(
    name=PROTOCOL,
    needs="controller",
    evaluate=evaluate,
    unfit=unfit,
    summarize=summary,
    table=table,
)
