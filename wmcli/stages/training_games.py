"""`wm eval --protocol training`: the last games that a run played while it trained. Nothing is played for it.

A game is a whole one, over lost lives and segments, see `wmcli.experience.games`. So the score contains what collecting
adds to the policy: its temperature, its random actions, and at the beginning random play.

Source: Machado et al. (2018, arXiv 1709.06009); Drama (Wang et al. 2024, arXiv 2410.08893), section 4.1.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.artifacts.environment import check_same_environment, is_recorded
from wmcli.envs.atari import PROTOCOLS as ATARI
from wmcli.envs.grid_world import ENDLESS
from wmcli.errors import UsageError
from wmcli.experience import read_segment
from wmcli.experience.games import COLUMNS, Games, finished_games, running_mean
from wmcli.experience.load import SEGMENT, lives_end_episodes
from wmcli.experience.segment import IMPORTED
from wmcli.metrics import atari
from wmcli.report.plots import returns_over, write_figure
from wmcli.settings import Settings
from wmcli.stages.context import Context
from wmcli.stages.evaluate import score, table
from wmcli.stages.player import STREAMS
from wmcli.stages.protocol import Protocol

NAME = "training"
GAMES = 5  # of the running mean, as in Drama's paper
POINTS = 1000  # of a curve at most: its file has all games
FILE = "games.csv"


def evaluate_training(context: Context, *, experience: str | None = None, episodes: int | None = None) -> Artifact:
    """Publish the mean return of the last training games of a run, and its curve over environment steps.

    Args:
        context: Of the run.
        experience: Reference; None is the newest of the run.
        episodes: Games of the running mean; None is `GAMES`.

    Returns:
        The evaluation. Its metrics hold mean, median and standard error of the last returns, the `games` in all, and
        the `curve` of the running mean, pairs of environment step and mean.

    Raises:
        ArtifactError: There is no experience, or it is of another environment or damaged.
        UsageError: Fewer games have ended, or nothing plays while the run trains.
    """
    settings, run = context.settings, context.run
    newest = run.resolve(experience or "experience", "experience")
    check_same_environment(context.environment, newest)
    TRAINING.check(settings)
    count = episodes or GAMES
    identity = settings.identity("environment") | {"protocol": NAME, "episodes": count}
    job = run.job("evaluation", identity, {"experience": newest})
    if existing := context.done(job):
        context.progress.say(f"eval: {existing.name} is up to date, nothing to do")
        return existing
    lives = lives_end_episodes(newest.manifest["environment"])
    games = finished_games(_segments(context, newest), lives_end_episodes=lives)
    ended = len(games.score)
    if ended < count:
        remedy = f"; or of fewer games: --episodes {ended}" if ended else ""
        raise UsageError(
            f"--protocol {NAME} takes the last {count} games, and {ended} have ended in {newest.name}: collect more"
            f" with wm collect{remedy}"
        )
    with context.work(job, fresh=True) as work:
        means, name = running_mean(games, count), settings.environment.id
        steps = games.step[count - 1 :]
        lasts = np.flatnonzero(np.append(np.diff(steps) > 0, True))  # of several games that ended at one step
        shown = lasts[np.linspace(0, len(lasts) - 1, min(len(lasts), POINTS)).round().astype(int)]
        metrics = score(games.score[-count:].tolist()) | {
            "lengths": games.length[-count:].tolist(),
            "games": ended,
            "curve": [[int(steps[place]), float(means[place])] for place in shown],
            "random_mean": atari.reference(name, "random"),
            "human_normalized": atari.human_normalized(name, float(means[-1])),
            "protocol": NAME,
            "environment": name,
            "total_steps": int(newest.metrics["total_steps"]),
        }
        (work.payload / FILE).write_text(_as_csv(games), encoding="utf-8")
        if context.pictures:
            known = {column: atari.reference(name, column) for column in ("random", "human")}
            lines = {column: value for column, value in known.items() if value is not None}
            figure = returns_over({f"mean of {count} games": [metrics["curve"]]}, references=lines, title=name)
            write_figure(work.payload / "curve.png", figure)
        artifact = context.publish(work, metrics)
    context.progress.say(summarize(artifact))
    return artifact


def _segments(context: Context, newest: Artifact) -> Iterator[dict[str, np.ndarray]]:
    """Yield the columns of games of all segments up to `newest`, oldest first.

    Only a segment that the run itself played holds the state of its environments. Games of the others, imported or of a
    script, get the stream `IMPORTED` and do not count.
    """
    chain = [newest]
    while "previous" in chain[-1].inputs:
        chain.append(chain[-1].input("previous"))
    with context.progress.bar("read games", len(chain), "segments") as bar:
        for segment in reversed(chain):
            segment.verify()
            columns = read_segment(segment.path / SEGMENT, *COLUMNS, frames=False)
            if not (segment.path / STREAMS).exists():
                columns["stream"] = np.full_like(columns["stream"], IMPORTED)
            yield columns
            bar.advance()


def _as_csv(games: Games) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("step", "return", "length"))
    rows.writerows(zip(*(values.tolist() for values in games), strict=True))
    return text.getvalue()


# -- the protocol ------------------------------------------------------------------------------------------------------


def unfit(settings: Settings) -> str | None:
    """Return why a run has no training games, or None if it has some."""
    name, protocol = settings.environment.id, settings.environment.protocol
    if name in ENDLESS:
        return f"episodes of {name} never end, so they have no return: use --protocol gridworld"
    if is_recorded(name):
        return f"nobody can play {name}, so the run has no games"
    if protocol in ATARI and ATARI[protocol].train.clip_reward:
        return f"sums stored rewards, and environment.protocol = {protocol} clips them"
    if settings.collect.policy != "learned":
        return f"collect.policy = {settings.collect.policy}: no controller plays while the run trains"
    return None


def summarize(evaluation: Artifact) -> str:
    """Return an evaluation in one line."""
    metrics = evaluation.metrics
    return (
        f"eval: {evaluation.name}: mean return {metrics['mean']:.3f} of the last {metrics['episodes']} of"
        f" {metrics['games']} training games, at step {metrics['total_steps']}"
    )


TRAINING = Protocol(
    name=NAME,
    needs="experience",
    evaluate=evaluate_training,
    unfit=unfit,
    summarize=summarize,
    table=table,
    reads_experience=True,
)
