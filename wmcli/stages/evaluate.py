"""`wm eval`: scores of the trained controller in the real environment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from wmcli.artifacts import Artifact, Run, Work
from wmcli.artifacts.environment import check_same_environment
from wmcli.artifacts.failpoint import failpoint
from wmcli.artifacts.manifest import shown
from wmcli.artifacts.store import BEST
from wmcli.assemble import load_controller, settings_of
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.base import Actor
from wmcli.envs import EnvironmentSettings, Streams, Transition
from wmcli.envs.grid_world import ENDLESS
from wmcli.errors import ArtifactError, Stopped, UsageError
from wmcli.interrupt import stop_requests
from wmcli.metrics import atari
from wmcli.progress import Progress
from wmcli.report.images import write_gif
from wmcli.report.plots import return_curve, returns_histogram, write_figure
from wmcli.settings import MAX_EPISODES, Settings
from wmcli.stages.context import Context
from wmcli.stages.pictures import Film, beside, ending, write_side_by_side
from wmcli.stages.protocol import Protocol
from wmcli.training.checkpoint import load_tensors, save_tensors
from wmcli.training.device import derived_seed
from wmcli.world_models.base import WorldModel

PROTOCOL = "returns"  # what sets these evaluations apart from those of other protocols
COLUMNS = ("name", "score", "stderr", "human_normalized", "runs", "episodes", "lowest", "highest", "caveat")
FILMED_STEPS = 300  # of the first episode
IMAGINED_FRAMES = 32  # of these at most, beside the real ones
LONGEST_EPISODE = 100_000  # steps, in an environment without a time limit; Atari's longest protocol allows 108,000


class Played(NamedTuple):
    """Complete episodes, in the order in which they were started."""

    returns: list[float]
    lengths: list[int]
    film: Film
    """The first episode's first frames."""


class _Tally:
    """What has been counted of N episodes in E environments so far."""

    def __init__(self, episodes: int, environments: int) -> None:
        self.number = np.arange(environments)  # the episode each environment plays; those from N on do not count
        self.started = environments
        self.returns, self.lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
        self.film = Film()

    @property
    def complete(self) -> bool:
        return bool((self.number >= len(self.returns)).all())

    @property
    def ended(self) -> int:
        """Episodes that have ended and count."""
        return min(self.started, len(self.returns)) - int((self.number < len(self.returns)).sum())

    def add(self, after: Transition) -> None:
        counted = self.number < len(self.returns)
        self.returns[self.number[counted]] += after.reward[counted]
        self.lengths[self.number[counted]] += 1
        for environment in np.flatnonzero(after.terminated | after.truncated):
            self.number[environment] = self.started
            self.started += 1

    def save(self, path: Path, streams: Streams, agent: Actor) -> None:
        """Write all that playing on from here needs."""
        state = streams.state()
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        tensors = {f"streams/{name}": torch.from_numpy(value) for name, value in arrays.items()}
        tensors |= {f"agent/{name}": value for name, value in agent.state().items()}
        tensors |= {f"film/{name}": torch.from_numpy(value) for name, value in self.film.arrays().items()}
        counts = {"number": self.number, "returns": self.returns, "lengths": self.lengths}
        tensors |= {f"counts/{name}": torch.from_numpy(value) for name, value in counts.items()}
        save_tensors(path, tensors, {"seed": state["seed"], "started": self.started})

    def load(self, path: Path, settings: EnvironmentSettings, agent: Actor) -> Streams | None:
        """Take up what `save` wrote; returns the environments, None where every episode has ended."""
        tensors, about = load_tensors(path)

        def part(name: str) -> dict[str, torch.Tensor]:
            return {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}

        counts = {name: value.numpy() for name, value in part("counts").items()}
        self.number, self.returns, self.lengths = counts["number"], counts["returns"], counts["lengths"]
        self.started = about["started"]
        self.film = Film.of({name: value.numpy() for name, value in part("film").items()})
        if self.complete:
            return None
        agent.load(part("agent"))
        state = {name: value.numpy() for name, value in part("streams").items()}
        streams = Streams.restore(settings, False, {"seed": about["seed"], **state})
        # An environment that does not follow its seed begins these episodes again.
        again = self.number[streams.restarted & (self.number < len(self.returns))]
        self.returns[again], self.lengths[again] = 0, 0
        if 0 in again:
            self.film = Film()
        return streams


def play_episodes(
    settings: EnvironmentSettings,
    agent: Actor,
    *,
    episodes: int,
    environments: int,
    seed: int,
    progress: Progress,
    what: str,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 30.0,
) -> Played:
    """Play exactly `episodes` complete test episodes, at most `environments` at a time (the rows that `agent` has).

    Every episode that is started counts, however long it takes, so that short ones are not over-represented. What the
    file `checkpoint` holds is taken up; it is written every `checkpoint_seconds`, and when all is played.

    Raises Stopped after a signal, UsageError when an episode of an environment without a time limit lasts longer than
    LONGEST_EPISODE.
    """
    count = min(environments, episodes)
    settings = settings.model_copy(update={"count": count})
    tally = _Tally(episodes, count)
    if checkpoint is not None and checkpoint.exists():
        streams = tally.load(checkpoint, settings, agent)
        if streams is None:
            return Played(tally.returns.tolist(), tally.lengths.tolist(), tally.film)
        progress.say(f"{what}: resuming after {tally.ended} of {episodes} episodes")
    else:
        streams = Streams(settings, train=False, seed=seed)
    saved_at = time.monotonic()
    with stop_requests() as stop, progress.bar(what, episodes, "episodes", start=tally.ended) as bar:
        while not tally.complete:
            frames = streams.observation
            action = agent.act(frames, streams.first)
            after = streams.step(action)
            if tally.number[0] == 0 and len(tally.film.frames) < FILMED_STEPS:
                tally.film.add(frames[0], action[0], after.reward[0], agent.summarize_search())
                if how := ending(after):
                    tally.film.end(after.final[0], how)
                elif len(tally.film.frames) == FILMED_STEPS:
                    tally.film.end(streams.observation[0], "cut")
            before = tally.ended
            tally.add(after)
            if not streams.has_time_limit and tally.lengths.max() > LONGEST_EPISODE:
                raise UsageError(
                    f"{settings.id}: an episode has not ended after {LONGEST_EPISODE:,} steps, and the environment has"
                    " no time limit; register it with one: gymnasium.register(..., max_episode_steps=N)"
                )
            bar.advance(tally.ended - before)
            due = stop or tally.complete or time.monotonic() - saved_at >= checkpoint_seconds
            if checkpoint is not None and due:
                tally.save(checkpoint, streams, agent)
                failpoint("checkpoint")
                saved_at = time.monotonic()
            if stop:
                raise Stopped(
                    f"{what} stopped after {tally.ended} of {episodes} episodes; the same command goes on from there."
                )
    streams.close()
    return Played(tally.returns.tolist(), tally.lengths.tolist(), tally.film)


def evaluate(context: Context, *, controller: str | None = None, episodes: int | None = None) -> Artifact:
    """Play complete episodes with the run's controller and publish the scores, with pictures.

    The metrics hold mean, median, standard error, all returns, the random policy's mean (published for the 26
    Atari-100k games, measured over as many episodes otherwise) and the human-normalized score where the game has
    reference scores.

    Raises ArtifactError when there is no controller or it is of another environment, Stopped after a signal.
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
    identity = settings.identity("seed", "environment", "evaluation") | {"episodes": episodes, "protocol": PROTOCOL}
    identity |= settings.acting_identity()
    job = run.job("evaluation", identity, {"controller": actor})
    if existing := context.done(job):
        context.progress.say(f"eval: {existing.name} is this very job, nothing to do (--force plays again)")
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
            played = _play(context, work, agent, episodes, "eval")
            known = settings_of(actor.input("dynamics")).dynamics.context
            pictures = _first_episode_imagined(context, world_model, known, played.film)
        random_mean = atari.reference(environment["id"], "random")
        if random_mean is None:
            generator = torch.Generator().manual_seed(derived_seed(settings.seed, "eval random"))
            uniform = UniformAgent(environment["actions"], rows, generator=generator)
            random_mean = float(np.mean(_play(context, work, uniform, episodes, "random play").returns))
        metrics = score(played.returns) | {
            "random_mean": random_mean,
            "human_normalized": atari.human_normalized(environment["id"], float(np.mean(played.returns))),
            "lengths": played.lengths,
            "protocol": PROTOCOL,
            "environment": environment["id"],
            "total_steps": _steps_behind(actor),
        }
        logged = {"mean_return": metrics["mean"], "median_return": metrics["median"], "stderr": metrics["stderr"]}
        context.log(job, metrics["total_steps"], {"stage": "eval", **logged, "episodes": episodes})
        write_gif(work.payload / "episode.gif", played.film.drawn(environment.get("action_meanings")), fps=10)
        write_side_by_side(work.payload, pictures)
        _write_plots(work.payload, run, actor, metrics)
        artifact = context.publish(work, metrics)
    _point_best(run)
    context.progress.say(summary(artifact))
    return artifact


def _play(context: Context, work: Work, agent: Actor, episodes: int, what: str) -> Played:
    """Play test episodes of the run's environment, resumably."""
    settings = context.settings
    return play_episodes(
        settings.environment,
        agent,
        episodes=episodes,
        environments=min(settings.evaluation.environments, episodes),
        seed=derived_seed(settings.seed, "eval"),
        progress=context.progress,
        what=what,
        checkpoint=work.path / f"{what.replace(' ', '-')}.safetensors",
        checkpoint_seconds=settings.training.checkpoint_seconds,
    )


def _point_best(run: Run) -> None:
    """Let `controller/best` point to the controller of this run with the highest mean return, the newer of equals."""
    scored = [each for each in run.artifacts("evaluation") if each.metrics["protocol"] == PROTOCOL]
    for evaluation in sorted(scored, key=lambda each: (each.metrics["mean"], each.version), reverse=True):
        controller = evaluation.inputs["controller"]
        with suppress(ArtifactError):
            if run.get("controller", controller.version).digest == controller.digest:
                run.point("controller", BEST, controller.version)
                return


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
    """Mean, median and standard error of the mean of some episodes' returns."""
    values = np.asarray(returns, dtype=np.float64)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "stderr": float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None,
        "episodes": len(values),
        "returns": values.tolist(),
    }


def _first_episode_imagined(context: Context, world_model: WorldModel, known: int, film: Film):
    """The filmed episode's beginning beside its imagination under the same actions; None when it is too short."""
    length = min(len(film.frames), IMAGINED_FRAMES)  # without the outcome: models learn nothing behind an end
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


def _write_plots(payload: Path, run: Run, actor: Artifact, metrics: dict[str, Any]) -> None:
    lines = {"random": metrics["random_mean"]}
    human = atari.reference(metrics["environment"], "human")
    if human is not None:
        lines["human"] = human
    title = metrics["environment"]
    write_figure(payload / "returns.png", returns_histogram(metrics["returns"], references=lines, title=title))
    evaluations = [each | {"environment_step": each["total_steps"]} for each in [*_earlier(run, actor), metrics]]
    write_figure(payload / "curve.png", return_curve(evaluations, references=lines, title=title))


def _earlier(run: Run, actor: Artifact) -> list[dict[str, Any]]:
    """Metrics of the newest evaluation of each controller that this one goes on from, oldest first."""
    line = set()
    ancestor: Artifact | None = actor
    while ancestor is not None and "parent" in ancestor.inputs:
        line.add(ancestor.inputs["parent"].digest)
        try:
            ancestor = ancestor.input("parent")
        except ArtifactError:  # it is gone, and so is what was before it
            break
    scored = [each for each in run.artifacts("evaluation") if each.metrics["protocol"] == PROTOCOL]
    newest = {each.inputs["controller"].digest: each.metrics for each in scored}
    return sorted((newest[digest] for digest in line & newest.keys()), key=lambda metrics: metrics["total_steps"])


RETURNS = Protocol(
    name=PROTOCOL,
    about="returns of the controller's episodes",
    needs="controller",
    evaluate=evaluate,
    unfit=unfit,
    summarize=summary,
    table=table,
)
