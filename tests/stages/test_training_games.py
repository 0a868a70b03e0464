"""`wm eval --protocol training`: the games of a run, from the artifact to the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import test_lives
from test_stage_joint import TINY as TINY_DRAMA
from tiny_run import copied, latest, opened

from wmcli.artifacts import Artifact, Run
from wmcli.cli import main
from wmcli.errors import UsageError
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT
from wmcli.settings import resolve
from wmcli.stages.collect import collect
from wmcli.stages.measures import check_measures
from wmcli.stages.opening import open_context
from wmcli.stages.training_games import GAMES, TRAINING, evaluate_training

LENGTH = 7  # steps of every game of Catch
SEGMENTS = (45, 9, 66)  # steps of three environments, none a multiple of their games'


def games_of(evaluation: Artifact) -> list[dict[str, float]]:
    with evaluation.file("games.csv").open(encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of random play in Catch, over segments that end amid games. Only to be read."""
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("training") / f"run-{seed}"
        opened(folder, f"seed={seed}", new=True)
        for steps in SEGMENTS:
            collect(opened(folder), steps=steps)
        evaluate_training(opened(folder, pictures=True))
        folders.append(folder)
    return folders


def test_the_score_is_the_mean_of_the_last_games_of_all_segments(runs: list[Path]) -> None:
    run = Run.open(runs[0], create=False)
    segments = [read_segment(each.path / SEGMENT) for each in run.artifacts("experience")]
    joined = {name: np.concatenate([each[name] for each in segments]) for name in ("reward", "stream")}
    rewards = np.stack([joined["reward"][joined["stream"] == stream] for stream in range(3)])
    count = sum(SEGMENTS) // 3 // LENGTH
    returns = rewards[:, : count * LENGTH].reshape(3, count, LENGTH).sum(2).T.reshape(-1)
    evaluation = latest(runs[0], "evaluation")
    games = games_of(evaluation)
    assert [game["return"] for game in games] == returns.tolist()
    assert [game["step"] for game in games] == np.repeat(3 * LENGTH * np.arange(1, count + 1), 3).tolist()
    assert {game["length"] for game in games} == {LENGTH}
    metrics = evaluation.metrics
    assert metrics["returns"] == returns[-GAMES:].tolist() and metrics["mean"] == returns[-GAMES:].mean()
    assert (metrics["episodes"], metrics["games"], metrics["total_steps"]) == (GAMES, 3 * count, sum(SEGMENTS))
    ends = {3 * LENGTH * (k + 1): returns[3 * k - 2 : 3 * k + 3].mean() for k in range(1, count)}
    assert dict(map(tuple, metrics["curve"])) == ends
    assert (evaluation.path / "curve.png").exists()


def test_it_is_one_job_for_each_experience_and_number_of_games(runs: list[Path], tmp_path: Path) -> None:
    run = copied(runs[0], tmp_path / "run")
    first = latest(run, "evaluation")
    assert evaluate_training(opened(run)).digest == first.digest
    before = evaluate_training(opened(run), experience="experience@2", episodes=3)
    assert before.metrics["total_steps"] == sum(SEGMENTS[:2]) and before.metrics["episodes"] == 3
    fewer = [game["return"] for game in games_of(first) if game["step"] <= sum(SEGMENTS[:2])]
    assert before.metrics["returns"] == fewer[-3:]
    assert evaluate_training(opened(run)).digest == first.digest


def test_what_has_no_such_games_says_so(runs: list[Path], tmp_path: Path) -> None:
    before = len(Run.open(runs[1], create=False).versions("evaluation"))
    with pytest.raises(UsageError, match="last 500 games, and 15 have ended in experience@3: .* --episodes 15"):
        evaluate_training(opened(runs[1]), episodes=500)
    assert len(Run.open(runs[1], create=False).versions("evaluation")) == before
    few = ["environment.id=wm/DistractingMemory-20-v0", "collect.episodes=2", "collect.validation=1", "collect.test=1"]
    context = open_context(tmp_path / "scripted", "memory-small", few, create=True, quiet=True)
    collect(context)
    with pytest.raises(UsageError, match="collect.policy = scripted: no controller plays"):
        evaluate_training(context)


def test_games_of_a_script_are_not_the_run_s_own(tmp_path: Path) -> None:
    task = ["environment.id=wm/DistractingMemory-20-v0", "environment.size=40", "environment.count=2"]
    task += ["tokenizer.downsamples=3"]
    script = ["collect.policy=scripted", "collect.episodes=3", "collect.validation=1", "collect.test=1"]
    run = tmp_path / "run"
    collect(open_context(run, "quickstart", task, create=True, quiet=True), steps=200)
    played = evaluate_training(opened(run), episodes=1)
    assert collect(opened(run, *script)).metrics["train"] == 3
    behind = evaluate_training(opened(run), episodes=1)
    assert games_of(behind) == games_of(played) and len(games_of(played)) == 4
    assert behind.metrics["total_steps"] == 350
    collect(open_context(tmp_path / "script", "quickstart", [*task, *script], create=True, quiet=True))
    with pytest.raises(UsageError, match="last 5 games, and 0 have ended in experience@1"):
        evaluate_training(opened(tmp_path / "script", "collect.policy=learned"))


@pytest.mark.parametrize("protocol", ["rem", "drama", "unizero", "unizero-sticky"])
def test_sums_of_clipped_rewards_are_no_scores(protocol: str) -> None:
    """They are clipped before they are stored."""
    atari = ["environment.id=Pong", f"environment.protocol={protocol}"]
    settings = resolve("quickstart", [*atari, 'evaluation.measures=["training"]'])
    if not protocol.startswith("unizero"):
        TRAINING.check(settings)
        check_measures(settings)
        return
    with pytest.raises(UsageError, match=f"--protocol training: sums .* environment.protocol = {protocol} clips them"):
        TRAINING.check(settings)
    with pytest.raises(UsageError, match=r"holds training, which sums .* set evaluation.measures=\[\]\."):
        check_measures(settings)


def test_runs_are_compared_by_it(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means = [latest(run, "evaluation").metrics["mean"] for run in runs]
    words = ["compare", *map(str, runs), "--protocol", "training"]
    assert main.run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"]["wm/Catch-v0"] == means and found["mean"]["value"] == pytest.approx(np.mean(means))
    assert [each["model"] for each in found["evaluations"]] == ["experience@3"] * 2
    picture = tmp_path / "curves.png"
    assert main.run([*words, "--by", "collect.temperature", "--curves", str(picture), "--format", "csv"]) == 0
    assert picture.stat().st_size > 10_000
    assert capsys.readouterr().out.splitlines()[1].startswith("1.0,2,")
    assert main.run([*words, "--curves", str(picture), "--over", "minutes"]) == 2
    assert "--over minutes is for curves of returns" in capsys.readouterr().err
    assert main.run(["eval", "--run", str(runs[0]), "--protocol", "training", "--controller", "latest"]) == 2
    assert "--protocol training scores experience: omit --controller." in capsys.readouterr().err
    run = str(copied(runs[0], tmp_path / "run"))
    assert main.run(["eval", "--run", run, "--protocol", "training", "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["episodes"] == 2


@pytest.mark.slow
def test_a_game_of_several_lives_and_segments_counts_once(tmp_path: Path) -> None:
    """Breakout as Drama plays it, in four segments, beside the same actions played again."""
    context = open_context(
        tmp_path / "run", "drama-quick", [*TINY_DRAMA, *test_lives.BREAKOUT], create=True, quiet=True
    )
    context.pictures = False
    for _ in range(4):
        collect(context, steps=300)
    run = Run.open(tmp_path / "run", create=False)
    rows = test_lives.rows_of(*run.artifacts("experience"))
    _, over = test_lives.games(context, rows)
    over, reward = over.reshape(-1, 2), rows["reward"].reshape(-1, 2)
    expected = []
    for stream in range(2):
        ends = np.flatnonzero(over[:, stream])
        for begin, end in zip([0, *ends[:-1] + 1], ends + 1, strict=True):
            expected.append((2.0 * end, float(reward[begin:end, stream].sum()), float(end - begin)))
    evaluation = evaluate_training(context, episodes=2)
    assert [tuple(game.values()) for game in games_of(evaluation)] == sorted(expected, key=lambda game: game[0])
    assert len(expected) >= 3 and max(length for _, _, length in expected) > 150
    assert rows["terminated"].sum() > 2 * len(expected)  # lives were lost
