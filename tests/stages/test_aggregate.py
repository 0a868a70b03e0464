"""Statistics over the evaluations of several runs, and which of them may stand together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from tiny_run import copied, latest, opened

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.overview import describe_run, seconds_of_work
from wmcli.errors import ArtifactError, UsageError
from wmcli.metrics import atari
from wmcli.progress import Progress
from wmcli.settings import flatten, resolve
from wmcli.stages import aggregate as stage
from wmcli.stages import pools
from wmcli.stages import score_pictures as pictures
from wmcli.stages import scores as pooled
from wmcli.stages.collect import collect
from wmcli.stages.evaluate import evaluate, score
from wmcli.stages.imagine import imagine
from wmcli.stages.scores import read_scores

QUIET = Progress(quiet=True)


def scored(
    folder: Path,
    mean: float,
    environment: str = "ALE/Pong-v5",
    normalized: float | None = None,
    settings: dict[str, Any] | None = None,
    epoch: int | None = None,
    episodes: int = 1,
    steps: int = 400,
    kind: str = "returns",
    controller: Artifact | None = None,
    **block: Any,
) -> Path:
    """A run with one more evaluation, of this mean return."""
    run = Run.open(folder, create=True)
    identity, inputs = {"mean": mean, "kind": kind, "epoch": epoch}, {"controller": controller} if controller else {}
    with run.job("evaluation", identity, inputs).work() as work:
        (work.payload / "x").touch()
        work.publish(
            settings=settings or {},
            metrics=score([mean] * episodes)
            | {"environment": environment, "human_normalized": normalized, "protocol": kind}
            | {"random_mean": -20.0, "total_steps": steps},
            environment={"id": environment, "protocol": "rem"} | block,
            machine={},
            extra={} if epoch is None else {"epoch": epoch},
        )
    return folder


def aggregate(runs: list[Path], against: list[Path] | None) -> dict[str, Any]:
    scores = read_scores([*runs, *(against or ())], "returns", QUIET)
    return stage.aggregate(scores[: len(runs)], scores[len(runs) :], QUIET)


def compare_settings(runs: list[Path], keys: list[str]) -> list[dict[str, Any]]:
    return stage.compare_settings(read_scores(runs, "returns", QUIET), keys, QUIET)


def draw_returns(runs: list[Path], keys: list[str], out: Path, over: pictures.Over = "steps", **options: Any) -> None:
    scores = read_scores(runs, "returns", QUIET)
    groups = pooled.label_groups(scores, keys) if keys else {str(score.run): [score] for score in scores}
    pictures.draw_curves(groups, out, QUIET, over=over, **options)


def damage(folder: Path, version: int) -> None:
    (folder / "evaluation" / f"v{version:04d}" / "manifest.json").write_text("{}")


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


# -- which evaluation -------------------------------------------------------------------------------------------------


def test_a_final_evaluation_stands_for_a_run_and_not_a_newer_one_on_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"run": {"epochs": 4}}
    run = scored(tmp_path / "run", 1.0, settings=settings, epoch=2)
    assert read_scores([run], "returns", QUIET)[0].metrics["mean"] == 1.0
    assert warnings(capsys) == [f"warning: {run} has no final evaluation: taking evaluation@1, of epoch 2 of 4."]
    scored(run, 2.0, settings=settings, epoch=4)
    scored(run, 3.0, settings={"run": {"epochs": 9}}, epoch=5)
    assert read_scores([run], "returns", QUIET)[0].metrics["mean"] == 2.0
    scored(run, 4.0)  # by wm eval, or from before epochs were recorded
    scored(run, 5.0, kind="recall")
    assert read_scores([run], "returns", QUIET)[0].metrics["mean"] == 4.0
    assert warnings(capsys) == []


class Made(NamedTuple):
    """An evaluation."""

    epoch: int | None
    """Of `wm run`; None by hand."""
    mean: float
    of: int | None = None
    """Epoch of its controller, if it is another."""
    episodes: int = 2
    kind: str = "returns"
    epochs: int = 8
    """`run.epochs` at that time."""


ANEW = None  # a new line of controllers begins
WAY = [Made(1, 0.5), Made(2, 0.75), Made(3, 0.25), Made(4, 0.5)]
LAST = Made(4, 0.25, of=2, episodes=4)  # after which `run.patience` = 2 ends the run
BY_HAND = Made(None, 0.9, of=3, episodes=4)
GAMES = Made(4, 0.5, kind="training")
PATIENCE: dict[str, tuple[list[str], list[Made | None], int, bool]] = {
    # settings of the run, its evaluations, which one represents it, whether as its final one
    "ended": ([], [*WAY, LAST], 5, True),
    "ended behind fewer epochs": ([], [WAY[0], Made(2, 0.5, episodes=4, epochs=2), *WAY[1:], LAST], 6, True),
    "ended with one by hand amid": ([], [*WAY[:3], BY_HAND, WAY[3], LAST], 6, True),
    "ended and then one by hand": ([], [*WAY, LAST, BY_HAND], 6, True),
    "ended and the last is one on the way": (["evaluation.episodes=2"], WAY, 2, True),
    "the same with one by hand amid": (["evaluation.episodes=2"], [*WAY[:3], BY_HAND, WAY[3]], 2, True),
    "stopped before the last": ([], WAY, 4, False),
    "stopped before patience ended": ([], WAY[:3], 3, False),
    "stopped without patience": (["run.patience=0"], WAY, 4, False),
    "more epochs are as many": (["run.epochs=12"], [*WAY, LAST], 5, True),
    "more patience": (["run.patience=4"], [*WAY, LAST], 5, False),
    "more patience and stopped": (["run.patience=4"], [*WAY, LAST, Made(5, 0.25)], 6, False),
    "more patience and ended": (["run.patience=3"], [*WAY, LAST, Made(5, 0.25)], 5, True),
    "patience no more": (["run.patience=0"], [*WAY, LAST, Made(5, 0.1), Made(8, 0.5, episodes=4)], 7, True),
    "patience later": ([], [*WAY, Made(5, 0.1), Made(8, 0.5, episodes=4), LAST], 7, True),
    "trained anew and stopped": ([], [*WAY, LAST, ANEW, Made(1, 0.5), Made(2, 0.1)], 7, False),
    "trained anew and ended": (
        [],
        [*WAY, LAST, ANEW, Made(1, 0.75), Made(2, 0.5), Made(3, 0.5), Made(3, 0.1, of=1, episodes=4)],
        9,
        True,
    ),
    "a measure": ([], [*WAY, GAMES, LAST], 5, True),
    "a measure behind fewer epochs": ([], [Made(2, 0.5, kind="training", epochs=2), *WAY, GAMES, LAST], 6, True),
    "a measure and more patience": (["run.patience=4"], [*WAY, GAMES, LAST], 5, False),
}


def patient(folder: Path, overrides: list[str], evaluations: Sequence[Made | None]) -> Run:
    """A run of `run.patience` = 2 with these evaluations."""
    plan = [
        "run.epochs=8",
        "run.evaluate_every=1",
        "run.evaluate_episodes=2",
        "run.patience=2",
        "evaluation.episodes=4",
    ]
    run, line = Run.open(folder, create=True), list[Artifact]()
    for number, made in enumerate(evaluations):
        if made is ANEW:
            line = []
            continue
        of = made.of or made.epoch or 0
        while len(line) < of:
            parent = {"parent": line[-1]} if line else {}
            with run.job("controller", {"number": number, "epoch": len(line) + 1}, parent).work() as work:
                about: dict[str, Any] = {"settings": {}, "metrics": {}, "environment": None, "machine": {}}
                line.append(work.publish(**about, extra={"epoch": len(line) + 1}))
        scored(
            run.path,
            made.mean,
            settings={"run": {"epochs": made.epochs}},
            epoch=made.epoch,
            episodes=made.episodes,
            kind=made.kind,
            controller=line[of - 1],
        )
    run.bind("quickstart", resolve("quickstart", [*plan, *overrides]).plain())
    return run


@pytest.mark.parametrize("case", PATIENCE)
def test_the_last_evaluation_of_a_run_that_patience_ended_is_final(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, evaluations, chosen, is_final = PATIENCE[case]
    run = patient(tmp_path / "run", overrides, evaluations)
    protocol = "training" if GAMES in evaluations else "returns"
    found = read_scores([run.path], protocol, QUIET)[0].evaluation
    assert (found.version, warnings(capsys) == []) == (chosen, is_final)
    assert (describe_run(run.path)["status"] == "finished") == is_final


@pytest.mark.parametrize(("epoch", "status"), [(5, "idle"), (4, "finished")])
def test_the_episodes_that_end_patience_are_those_of_its_epoch(epoch: int, status: str, tmp_path: Path) -> None:
    """The last evaluation, of epoch 4, is of two episodes."""
    run = patient(tmp_path / "run", [], WAY)
    bound = run.bound()
    assert bound is not None
    changes = [{"epoch": epoch, "set": ["evaluation.episodes=2"]}]
    run.bind(bound["preset"], bound["settings"], changes, expected=bound)
    assert describe_run(run.path)["status"] == status


def test_a_damaged_evaluation_matters_only_where_it_is_the_newest(tmp_path: Path) -> None:
    run = scored(scored(tmp_path / "a run", 1.0), 2.0)
    damage(run, 1)
    assert read_scores([run], "returns", QUIET)[0].metrics["mean"] == 2.0
    damage(run, 2)
    with pytest.raises(ArtifactError, match=f"cannot be read .*; make another with: wm eval --run '{run}' --force"):
        read_scores([run], "returns", QUIET)
    scored(run, 3.0)
    assert read_scores([run], "returns", QUIET)[0].metrics["mean"] == 3.0


@pytest.mark.parametrize("how", ["again", "link", "copy"])
def test_one_run_does_not_count_twice(how: str, tmp_path: Path) -> None:
    run = other = scored(tmp_path / "run", 1.0)
    if how == "link":
        other = tmp_path / "link"
        other.symlink_to(run)
    elif how == "copy":
        other = copied(run, tmp_path / "copy")
    for sides in [([run, other], None), ([run], [other])]:
        with pytest.raises(UsageError, match=r"hold the very same evaluation@1, which would count twice"):
            aggregate(*sides)
    with pytest.raises(UsageError, match="count twice"):
        compare_settings([run, other], ["seed"])


# -- what may stand together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        ({"episodes": 3}, {"episodes": 5}, "episodes differ: 3 ({a}), 5 ({b})"),
        ({"steps": 400}, {"steps": 800}, "environment steps differ: 400 ({a}), 800 ({b})"),
        (
            {},
            {"settings": {"seed": 2, "evaluation": {"temperature": 0.0}}},
            "evaluation.temperature differ: 0.5 ({a}), 0.0 ({b})",
        ),
        ({"size": 64}, {"size": 96}, "ALE/Pong-v5 size differ: 64 ({a}), 96 ({b})"),
        (
            {"settings": {"seed": 1, "backbone": {"kind": "gru"}}},
            {},
            "runs of different settings are pooled into one number: backbone.kind ({a}, {b}); group them with: --by"
            " backbone.kind",
        ),
        (
            {"settings": {"seed": 2}},
            {},
            "{a}, {b} have the same settings and the same seed, so they are no independent samples.",
        ),
    ],
)
def test_each_difference_has_one_line(
    one: dict[str, Any], other: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = scored(tmp_path / "a", 1.0, **{"settings": {"seed": 1}} | one)
    b = scored(tmp_path / "b", 2.0, **{"settings": {"seed": 2}} | other)
    assert aggregate([a, b], None)["runs"] == 2
    assert warnings(capsys) == [f"warning: {line.format(a=a, b=b)}"]


def test_settings_of_a_search_are_compared_where_both_sides_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, seed: int, **controller: Any) -> Path:
        settings = {"seed": seed, "dynamics": {"kind": "unizero"}, "controller": {"kind": "mcts"} | controller}
        return scored(tmp_path / name, float(seed), settings=settings)

    searches = [run("few", 1, simulations=5), run("many", 2, simulations=50)]
    other = scored(tmp_path / "other", 1.0)
    key = "controller.simulations"
    compare_settings(searches, [key])
    assert warnings(capsys) == []  # that was the purpose
    aggregate([searches[0]], [other])
    assert warnings(capsys) == []  # another system
    aggregate([searches[0]], [searches[1]])
    assert warnings(capsys) == [f"warning: {key} differ: 5 ({searches[0]}), 50 ({searches[1]})"]


def test_other_test_episodes_are_other_tasks(tmp_path: Path) -> None:
    short = scored(tmp_path / "short", 1.0, test={"time_limit": 100})
    long = scored(tmp_path / "long", 1.0, test={"time_limit": 200})
    with pytest.raises(UsageError, match="these runs have different test episodes: ALE/Pong-v5 test differ"):
        aggregate([short, long], None)


# -- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_of_one_environment_are_pooled_as_returns(run: Path, tiny: Path) -> None:
    evaluate(opened(run), episodes=3)
    result = aggregate([tiny, run], None)
    scores = [latest(folder, "evaluation").metrics["mean"] for folder in (tiny, run)]  # the newest of each
    assert result["scores"] == {"wm/Catch-v0": scores}
    assert (result["unit"], result["runs"], result["tasks"]) == ("return", 2, 1)
    assert result["mean"]["value"] == pytest.approx(np.mean(scores))
    for name in ("mean", "median", "iqm"):
        assert set(result[name]) == {"value", "low", "high"}
    assert not {"optimality_gap", "superhuman"} & set(result)  # 1 is no goal of raw returns
    profile = result["performance_profile"]
    assert len(profile["threshold"]) == len(profile["share"]) == 21 and profile["share"][-1] == 0
    assert "probability_of_improvement" not in result
    json.dumps(result, allow_nan=False)


def test_games_with_reference_scores_are_pooled_as_human_normalized_scores(tmp_path: Path) -> None:
    runs = [
        scored(tmp_path / "a", 10.0, normalized=0.5),
        scored(tmp_path / "b", 20.0, normalized=1.5),
        scored(tmp_path / "c", 7.0, "ALE/Breakout-v5", normalized=3.0),
    ]
    result = aggregate(runs, None)
    assert result["scores"] == {"ALE/Pong-v5": [0.5, 1.5], "ALE/Breakout-v5": [3.0]}
    assert (result["unit"], result["runs"], result["tasks"]) == ("human-normalized score", 3, 2)
    assert result["mean"]["value"] == pytest.approx(2.0)  # of the two games' means
    assert result["optimality_gap"]["value"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert result["mean"]["low"] < 2.0 < result["mean"]["high"]
    assert result["superhuman"] == {"value": 2, "low": 1, "high": 2}  # of Pong one run in four ways lies below 1


def test_one_set_of_runs_against_another(tmp_path: Path) -> None:
    ours = [scored(tmp_path / f"a{mean}", mean) for mean in (1.0, 3.0)]
    theirs = [scored(tmp_path / f"b{mean}", mean) for mean in (0.0, 2.0)]
    result = aggregate(ours, theirs)
    assert result["probability_of_improvement"]["value"] == pytest.approx(3 / 4)
    assert result["scores"] == {"ALE/Pong-v5": [1.0, 3.0]}
    assert result["runs"] == 2
    assert aggregate(theirs, ours)["probability_of_improvement"]["value"] == pytest.approx(1 / 4)


def test_of_the_settings_of_training_only_sampling_is_a_difference() -> None:
    """A new key belongs to one side or the other."""
    keys = {key for key in flatten(resolve("rem")) if key.startswith("training.")}
    learning = {key for key in keys if not key.startswith(pooled.NOT_LEARNING)}
    assert learning == {
        key for key in keys if key.startswith(("training.sampling", "training.dfs", "training.priority"))
    }


def test_runs_are_grouped_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    def run(name: str, mean: float, **settings: Any) -> Path:
        return scored(tmp_path / name, mean, settings=settings)

    runs = [
        run("a", 1.0, seed=1, backbone={"kind": "gru"}),
        run("b", 5.0, seed=1),
        run("c", 2.0, seed=2, backbone={"kind": "gru"}),
        run("d", 6.0, seed=1, dynamics={"batch": 3}),
    ]
    rows = compare_settings(runs, ["backbone.kind", "dynamics.batch"])
    assert [(row["backbone.kind"], row["dynamics.batch"], row["runs"], row["mean"]) for row in rows] == [
        ("gru", "64", 2, 1.5),
        ("retnet", "64", 1, 5.0),
        ("retnet", "3", 1, 6.0),
    ]
    assert rows[0]["low"] == 1.0 and rows[0]["high"] == 2.0 and rows[1]["low"] is None
    with pytest.raises(UsageError, match="--by backbone.nam: no such setting; did you mean 'backbone.kind'"):
        compare_settings(runs, ["backbone.nam"])


def test_environments_stand_beside_each_other_and_are_not_pooled(tmp_path: Path) -> None:
    settings = [{"environment": {"id": name}} for name in ("wm/Catch-v0", "ALE/Pong-v5")]
    runs = [
        scored(tmp_path / "a", 1.0, "wm/Catch-v0", settings=settings[0]),
        scored(tmp_path / "b", 12.0, normalized=0.9, settings=settings[1]),
    ]
    rows = compare_settings(runs, ["environment.id"])
    assert [(row["environment.id"], row["mean"], row["unit"], row["human_normalized"]) for row in rows] == [
        ("wm/Catch-v0", 1.0, "return", None),
        ("ALE/Pong-v5", 12.0, "return", pytest.approx(atari.human_normalized("Pong", 12.0))),
    ]
    with pytest.raises(UsageError, match="different environments cannot be pooled"):
        compare_settings(runs, ["seed"])


def test_incomparable_runs_are_refused(tmp_path: Path) -> None:
    pong = scored(tmp_path / "pong", 1.0)
    known = scored(tmp_path / "known", 1.0, normalized=0.5)
    for other, words in [
        (scored(tmp_path / "breakout", 1.0, "ALE/Breakout-v5"), "different environments cannot be pooled"),
        (scored(tmp_path / "sticky", 1.0, protocol="plain"), r"different protocols of play \(plain, rem\)"),
    ]:
        with pytest.raises(UsageError, match=words):
            aggregate([pong, other], None)
        with pytest.raises(UsageError, match=words):
            aggregate([pong], [other])
    with pytest.raises(UsageError, match="only one of them has: ALE/Breakout-v5"):
        aggregate([known], [scored(tmp_path / "other", 1.0, "ALE/Breakout-v5", normalized=0.5)])


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_runs_aggregates_and_published_scores(tmp_path: Path) -> None:
    runs = [
        scored(tmp_path / "a", 10.0, normalized=0.5, episodes=3),
        scored(tmp_path / "b", 7.0, "ALE/Breakout-v5", normalized=3.0),
        scored(tmp_path / "c", 20.0, normalized=1.5),
    ]
    rows = aggregate(runs, None)["rows"]
    assert len({tuple(row) for row in rows}) == 1  # the same columns
    mine = [row for row in rows if row["evaluation"]]
    assert [(row["name"], row["score"], row["stderr"], row["episodes"]) for row in mine] == [
        (str(runs[1]), 7.0, None, 1),
        (str(runs[0]), 10.0, 0.0, 3),
        (str(runs[2]), 20.0, None, 1),
    ]
    ours = {row["statistic"]: row for row in rows if row["name"] == "all"}
    assert list(ours) == ["mean", "median", "iqm", "optimality_gap", "superhuman"]
    assert (ours["superhuman"]["score"], ours["superhuman"]["unit"]) == (2, "games")
    assert ours["mean"]["score"] == 2.0 and ours["mean"]["low"] < 2.0 < ours["mean"]["high"]
    rem = {(row["environment"], row["statistic"]): row["score"] for row in rows if row["name"] == "REM"}
    pong, breakout = (atari.reference(game, "REM") for game in ("Pong", "Breakout"))
    normalized = [atari.human_normalized("Pong", pong), atari.human_normalized("Breakout", breakout)]
    every = np.sort(np.concatenate([atari.normalized_runs("REM")[game] for game in ("Pong", "Breakout")]))
    middle = every[2:8]  # of ten
    assert rem == {
        ("ALE/Pong-v5", "mean"): pong,
        ("ALE/Breakout-v5", "mean"): breakout,
        ("all", "mean"): pytest.approx(np.mean(normalized)),
        ("all", "median"): pytest.approx(np.mean(normalized)),
        ("all", "iqm"): pytest.approx(np.mean(middle)),
        ("all", "optimality_gap"): pytest.approx(1 - np.minimum(every, 1).mean()),
        ("all", "superhuman"): sum(score >= 1 for score in normalized),
    }
    assert {row["statistic"] for row in rows if row["name"] == "Drama"} == {"mean", "median", "superhuman"}


def test_beside_an_unpublished_game_stands_random_play(tmp_path: Path) -> None:
    rows = aggregate([scored(tmp_path / "a", 1.0, "wm/Catch-v0")], None)["rows"]
    assert [(row["name"], row["score"]) for row in rows][-1] == ("random", -20.0)


# -- pictures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to the plot."""
    calls: list[Any] = []
    monkeypatch.setattr(
        "wmcli.stages.score_pictures.returns_over",
        lambda groups, x_label, references, title, band: calls.append((groups, references, title, x_label, band)),
    )
    monkeypatch.setattr("wmcli.stages.score_pictures.write_figure", lambda *_: None)
    return calls


def test_curves_follow_the_newest_controller_and_its_parents(run: Path, tmp_path: Path, drawn: list[Any]) -> None:
    imagine(opened(run, force=True))  # another beginning
    collect(opened(run))
    sleep(1)  # points at the same second are one
    imagine(opened(run, more=True))
    evaluate(opened(run), episodes=3)
    evaluate(opened(run), controller="controller@2", episodes=2)
    means = [latest(run, "evaluation").metrics["mean"]]
    means.append(Run.open(run, create=False).get("evaluation", 2).metrics["mean"])
    draw_returns([run], [], tmp_path / "x.png")
    groups, references, title, x_label, _ = drawn[0]
    assert groups == {str(run): [[(90, means[0]), (180, means[1])]]}  # not evaluation@1, of controller@1
    assert set(references) == {"random"} and title == "wm/Catch-v0" and x_label == "environment steps"
    draw_returns([run], [], tmp_path / "x.png", "minutes")
    ((points,),) = drawn[1][0].values()
    history = Run.open(run, create=False).history()
    controllers = [Run.open(run, create=False).get("controller", version) for version in (2, 3)]
    trained = [datetime.fromisoformat(each.manifest["created"]) + timedelta(seconds=1) for each in controllers]
    assert points == list(zip([seconds_of_work(history, each) / 60 for each in trained], means, strict=True))
    assert points[0][0] < points[1][0] and drawn[1][3] == "minutes of work"


def test_curves_of_seeds_stand_together(tiny: Path, tmp_path: Path, drawn: list[Any]) -> None:
    other = opened(copied(tiny, tmp_path / "other"), "seed=2")
    evaluate(other)
    draw_returns([tiny, other.run.path], ["backbone.kind"], tmp_path / "x.png")
    assert {name: len(runs) for name, runs in drawn[0][0].items()} == {"backbone.kind=retnet": 2}
    draw_returns([tiny, other.run.path], ["seed"], tmp_path / "x.png")
    assert list(drawn[1][0]) == ["seed=1", "seed=2"]


def test_a_curve_leaves_out_a_damaged_evaluation_with_a_warning(
    run: Path, tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(opened(run), episodes=3)
    damage(run, 1)
    draw_returns([run], [], tmp_path / "x.png")
    assert warnings(capsys)[0].startswith(f"warning: left out of the curve of {run}: ")


def test_curves_are_written(tiny: Path, tmp_path: Path) -> None:
    draw_returns([tiny], [], tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as picture:
        picture.load()


def test_published_scores_are_lines_in_the_curves_of_their_game_and_games_have_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [scored(tmp_path / game, 1.0, f"ALE/{game}-v5") for game in ("Pong", "Krull")]
    monkeypatch.setattr(pictures, "read_curve", lambda *_: [pictures.Point(100, None, 1.0)])
    files: dict[Path, Any] = {}
    monkeypatch.setattr(pictures, "write_figure", files.__setitem__)
    columns = [atari.column_of(name) for name in ("REM", "REM-4x4-tokenizer")]
    draw_returns(runs, [], tmp_path / "x.png", published=columns, band="range")
    assert [file.name for file in files] == ["x-Pong-v5.png", "x-Krull-v5.png"]
    pong, krull = ([text.get_text() for text in figure.axes[0].texts] for figure in files.values())
    assert [text.split()[0] for text in pong] == ["random", "human", "REM"]
    assert {text.split()[0] for text in krull} == {"random", "human", "REM", "REM-4x4-tokenizer"}
    line = "the curves of ALE/Pong-v5 have no line of REM-4x4-tokenizer: no score is published"
    assert warnings(capsys) == [f"warning: {line}"]


def test_pictures_of_several_environments_have_files_that_differ(tmp_path: Path) -> None:
    out = tmp_path / "x.png"

    def names(*environments: str) -> list[str]:
        return [file.name for file in pictures.picture_files(out, environments).values()]

    assert names("ALE/Pong-v5") == ["x.png"]
    assert names("ALE/Pong-v5", "wm/Catch-v0") == ["x-Pong-v5.png", "x-Catch-v0.png"]
    assert names("ALE/Pong-v5", "mine/Pong-v5") == ["x-ALE-Pong-v5.png", "x-mine-Pong-v5.png"]


def test_a_run_without_evaluation_ends_in_the_command_that_makes_one(tmp_path: Path, elsewhere: Path) -> None:
    line = f"{elsewhere} has no evaluation of --protocol returns; make one with: wm eval --run {elsewhere}"
    with pytest.raises(ArtifactError, match=line):
        aggregate([elsewhere], None)
    with pytest.raises(ArtifactError, match="no run at"):
        aggregate([tmp_path / "nowhere"], None)


def test_other_protocols_of_a_run_are_named(tmp_path: Path) -> None:
    run = scored(scored(tmp_path / "run", 1.0, kind="recall"), 2.0, kind="generation")
    with pytest.raises(ArtifactError, match=r"--protocol returns \(it has some of --protocol generation, recall\)"):
        read_scores([run], "returns", QUIET)


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, dict[str, Any], str]]:
    """Arguments of the plot of performance profiles."""
    calls: list[Any] = []
    monkeypatch.setattr(
        pictures, "performance_profiles", lambda taus, bands, *, xlabel: calls.append((taus, bands, xlabel))
    )
    monkeypatch.setattr(pictures, "write_figure", lambda *_: None)
    return calls


def pooled_by(runs: list[Path], keys: list[str], *published: str) -> pools.Pools:
    groups = pooled.label_groups(read_scores(runs, "returns", QUIET), keys)
    return pools.pool_variants(groups, [atari.column_of(name) for name in published])


def seeds(folder: Path, means: dict[str, list[float]], game: str = "Pong") -> list[Path]:
    """A run of each mean, by backbone."""
    return [
        scored(
            folder / f"{kind} {game} {seed}",
            mean,
            f"ALE/{game}-v5",
            atari.human_normalized(game, mean),
            settings={"seed": seed, "backbone": {"kind": kind}},
        )
        for kind, of_kind in means.items()
        for seed, mean in enumerate(of_kind)
    ]


def test_profiles_have_a_line_for_each_group_and_published_column_with_runs(
    tmp_path: Path, profiles: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = seeds(tmp_path, {"gru": [1.0, 3.0], "s4": [2.0, 5.0]})
    pictures.draw_profiles(pooled_by(runs, ["backbone.kind"], "REM", "Drama"), tmp_path / "x.png", QUIET)
    ((taus, bands, xlabel),) = profiles
    assert list(bands) == ["backbone.kind=gru", "backbone.kind=s4", "REM"] and xlabel == "human-normalized score τ"
    line = "left out of the performance profiles: of Drama only means over runs are published"
    assert warnings(capsys) == [f"warning: {line}"]
    for (share, low, high), means in zip(
        bands.values(), ([1.0, 3.0], [2.0, 5.0], atari.reference_runs("Pong", "REM")), strict=True
    ):
        normalized = np.array([atari.human_normalized("Pong", mean) for mean in means])
        assert np.array_equal(share, [np.mean(normalized > tau) for tau in taus])
        assert (low <= share).all() and (share <= high).all() and (low < high).any()


@pytest.mark.parametrize("score", [0.5, 0.0, -21.0, 0.1 + 0.2])
def test_a_profile_of_equal_scores_falls_where_they_are(score: float, profiles: list[Any]) -> None:
    table = {"wm/Catch-v0": np.array([score, score * (1 + 1e-15)])}
    pictures.plot_profiles({name: pools.Pool(table, None) for name in ("gru", "s4")})
    ((taus, bands, _),) = profiles
    share, *_ = bands["gru"]
    assert taus[0] < score - 0.01 and score + 0.01 < taus[-1]
    assert share[0] == 1 and share[-1] == 0 and (np.diff(taus) > 0).all()


def test_profiles_are_of_the_environments_that_all_groups_have(
    tmp_path: Path, profiles: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [*seeds(tmp_path, {"gru": [1.0], "s4": [2.0]}), *seeds(tmp_path, {"gru": [3.0]}, "Boxing")]
    pictures.draw_profiles(pooled_by(runs, ["backbone.kind"]), tmp_path / "x.png", QUIET)
    line = "the 1 environments that all variants have: backbone.kind=s4 lacks ALE/Boxing-v5"
    assert warnings(capsys) == [f"warning: statistics are over {line}"]
    apart = [*seeds(tmp_path / "apart", {"gru": [1.0]}), *seeds(tmp_path / "apart", {"s4": [1.0]}, "Boxing")]
    with pytest.raises(UsageError, match="no environment has scores of all variants"):
        pictures.draw_profiles(pooled_by(apart, ["backbone.kind"]), tmp_path / "x.png", QUIET)


def test_intervals_have_a_panel_for_each_statistic_and_values_of_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "interval_panels", lambda panels, x_label: drawn.append((panels, x_label)))
    monkeypatch.setattr(pictures, "write_figure", lambda *_: None)
    runs = [*seeds(tmp_path, {"gru": [1.0, 3.0]}), *seeds(tmp_path, {"gru": [30.0, 50.0]}, "Boxing")]
    found = pooled_by(runs, ["backbone.kind"], "REM", "Drama")
    pictures.draw_intervals(found, tmp_path / "x.png", QUIET)
    ((panels, x_label),) = drawn
    assert list(panels) == ["mean", "median", "interquartile mean", "optimality gap"]
    assert x_label == "human-normalized score" and list(panels["mean"]) == ["backbone.kind=gru", "REM", "Drama"]
    assert list(panels["interquartile mean"]) == ["backbone.kind=gru", "REM"]
    games = [atari.normalized_runs("REM")[game] for game in ("Pong", "Boxing")]
    assert panels["mean"]["REM"].value == pytest.approx(np.mean(games))
    assert panels["mean"]["REM"].low < panels["mean"]["REM"].value < panels["mean"]["REM"].high
    assert panels["mean"]["Drama"].low is None
    pictures.draw_intervals(pooled_by(runs[:2], ["backbone.kind"], "REM"), tmp_path / "x.png", QUIET)
    assert "median" not in drawn[1][0]  # of one game it is the mean


def test_improvement_is_ours_over_our_first_and_over_published_ones_or_the_first_published_over_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "improvement", drawn.append)
    monkeypatch.setattr(pictures, "write_figure", lambda *_: None)
    runs = seeds(tmp_path, {"gru": [-21.0, 18.0], "s4": [20.6, 30.0]})
    pictures.draw_improvement(pooled_by(runs, ["backbone.kind"], "REM"), tmp_path / "x.png", QUIET)
    gru, s4 = "backbone.kind=gru", "backbone.kind=s4"
    # REM's runs of Pong are 8.15, 20, 20.15, 20.52 and 21.
    assert {pair: chance.value for pair, chance in drawn[0].items()} == {
        (s4, gru): 1.0,
        (gru, "REM"): pytest.approx(1 / 10),
        (s4, "REM"): pytest.approx(9 / 10),
    }
    alone = pools.pool_variants({}, [atari.column_of(name) for name in ("REM", "IRIS", "Drama")])
    pictures.draw_improvement(alone, tmp_path / "x.png", QUIET)
    assert {pair: round(chance.value, 3) for pair, chance in drawn[1].items()} == {("REM", "IRIS"): 0.594}


def test_what_is_not_published_is_refused(tmp_path: Path) -> None:
    catch = scored(tmp_path / "a", 1.0, "wm/Catch-v0", settings={"seed": 1})
    with pytest.raises(UsageError, match=r"--published REM: .* these runs are of wm/Catch-v0: omit --published"):
        pooled_by([catch], ["seed"], "REM")
    means = pools.pool_variants({}, [atari.column_of("Drama")])
    with pytest.raises(UsageError, match=r"no performance profiles: of Drama only means .* such as: --published REM"):
        pictures.draw_profiles(means, tmp_path / "x.png", QUIET)
    others = [scored(tmp_path / name, 1.0, f"wm/{name}", settings={"seed": 1}) for name in ("Catch-v0", "Rooms-v0")]
    with pytest.raises(UsageError, match="returns of different environments cannot be pooled"):
        pictures.draw_intervals(pooled_by(others, ["seed"]), tmp_path / "x.png", QUIET)


def test_pictures_are_written(tmp_path: Path) -> None:
    found = pooled_by(seeds(tmp_path, {"gru": [1.0, 3.0], "s4": [2.0, 5.0]}), ["backbone.kind"], "REM")
    for draw in (pictures.draw_profiles, pictures.draw_intervals, pictures.draw_improvement):
        draw(found, tmp_path / f"{draw.__name__}.png", QUIET)
        with Image.open(tmp_path / f"{draw.__name__}.png") as picture:
            assert picture.format == "PNG" and picture.size[0] > 400
