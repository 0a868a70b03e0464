"""Models that are planned in: what their stages read and publish, that reanalysis refreshes targets, and that kills
cost nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import Killed, kill_at, sha256

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import load_controller
from wmcli.errors import UsageError
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT
from wmcli.progress import Progress
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.stages.pictures import Film
from wmcli.stages.play import play
from wmcli.stages.score_pictures import compare_priors
from wmcli.stages.scores import Score
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.training.checkpoint import TRAINING, read_part
from wmcli.training.device import Machine

CPU = Machine(torch.device("cpu"), "float32", 1)
QUIET = Progress(quiet=True)
COMMON = [
    "environment.size=16",
    "environment.count=3",
    "collect.steps=60",
    "dynamics.td_steps=2",
    "dynamics.channels=[6, 8]",
    "dynamics.batch=4",
    "dynamics.updates=3",
    "controller.rule=mctx",  # shares of visits, which the tests can recognize
    "controller.simulations=3",
    "controller.batch=5",
    "controller.updates=4",
    "evaluation.episodes=3",
    "evaluation.environments=2",
    "evaluation.temperature=0",
    "training.device=cpu",
    "training.precision=float32",
    "training.threads=1",
    "training.log_every=2",
]
UNIZERO = [
    "dynamics.sequence_length=4",
    "dynamics.context=2",
    "backbone.width=16",
    "backbone.layers=1",
    "backbone.dropout=0.25",
    "backbone.heads=2",
    "backbone.prior.kind=gaussian_span",
    "backbone.prior.regularizer=l1",
]
MUZERO = ["dynamics.unroll_steps=2", "dynamics.frame_stack=3"]
EVERY = {"unizero-quick": UNIZERO, "muzero-quick": MUZERO}
EAGER = "training.checkpoint_seconds=0"


def opened(folder: Path, *overrides: str, preset: str | None = None, pictures: bool = False, **how: bool) -> Context:
    given = [*COMMON, *EVERY[preset], *overrides] if preset else list(overrides)
    context = open_context(folder, preset, given, create=preset is not None, quiet=True, **how)
    context.pictures = pictures
    return context


@pytest.fixture(scope="module", params=EVERY)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that collected at random, learned, searched again, and collected by search. Only to be read."""
    folder = tmp_path_factory.mktemp("planning") / "run"
    collect(opened(folder, preset=request.param))
    train_dynamics(opened(folder, pictures=True))
    imagine(opened(folder, pictures=True))
    collect(opened(folder))
    return folder


@pytest.fixture
def run(played: Path, tmp_path: Path) -> Path:
    """A copy of `played` to change at will."""
    shutil.copytree(played, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def version(folder: Path, kind: str, number: int) -> Artifact:
    return Run.open(folder, create=False).get(kind, number)


@pytest.mark.slow
def test_a_searching_agent_records_its_search(played: Path) -> None:
    at_random, searched = (read_segment(version(played, "experience", n).path / SEGMENT) for n in (1, 2))
    assert "policy" not in at_random and "value" not in at_random
    assert searched["policy"].shape == (60, 3) and searched["value"].shape == (60,)
    np.testing.assert_allclose(searched["policy"].sum(1), 1, rtol=1e-6)
    shares = searched["policy"] * 3  # of three simulations
    np.testing.assert_allclose(shares, shares.round(), atol=1e-5)
    assert (searched["policy"][np.arange(60), searched["action"]] > 0).all(), "an action that was never searched"


def test_reanalysis_searches_the_least_searched_rows_and_dynamics_learn_from_it(run: Path) -> None:
    first = version(run, "controller", 1)
    again = read_part(first.file(TRAINING), "targets")
    assert again["rows"].tolist() == list(range(20)) and (again["again"] == 1).all()  # 4 updates of 5 rows
    np.testing.assert_allclose(again["policy"].sum(1), 1, rtol=1e-6)
    assert first.metrics["updates"] == 4 and "search_value" in first.metrics

    learned = train_dynamics(opened(run, more=True))
    assert learned.inputs["controller"].digest == first.digest
    second = imagine(opened(run, more=True))
    rows = read_part(second.file(TRAINING), "targets")["rows"]
    assert rows.tolist() == list(range(40)), "those searched before keep what was found"
    alone = imagine(opened(run, "controller.updates=13", force=True))
    due = read_part(alone.file(TRAINING), "targets")
    assert due["rows"].tolist() == list(range(60)), "those played at random come first"
    assert due["again"].tolist() == [2] * 5 + [1] * 55


def test_without_reanalysis_only_played_searches_are_learned_from(run: Path) -> None:
    """`none` as controller, or one that searched nothing again: the targets are those of the experience."""
    assert "controller" not in train_dynamics(opened(run, force=True), controller="none").inputs
    published = imagine(opened(run, "controller.updates=0", force=True))
    assert published.metrics["updates"] == 0
    assert "controller" not in train_dynamics(opened(run, force=True)).inputs
    assert collect(opened(run)).inputs["controller"].digest == published.digest


@pytest.mark.parametrize("sampling", ["windows", "episodes", "uniform", "dfs"])
def test_planners_sample_as_they_are_told(run: Path, sampling: str) -> None:
    """Four windows in each of three updates: rounds of them are counted by "windows", starts by "dfs"."""
    learned = train_dynamics(opened(run, f"training.sampling={sampling}", force=True))
    found = read_part(learned.file(TRAINING), "sampler")
    drawn = sum(found["counts"]) if sampling == "dfs" else found["drawn"]
    assert drawn == {"windows": 12, "dfs": 12}.get(sampling, 0)


def test_the_policy_is_learned_only_where_something_searched(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(memory, actions):
        targets = original(memory, actions)
        seen.append(targets)
        return targets

    from wmcli.stages import dynamics as stage
    from wmcli.trainers import dynamics as trainer

    original = stage.SearchTargets
    for module in (stage, trainer):
        monkeypatch.setattr(module, "SearchTargets", watched)
    train_dynamics(opened(run, force=True), experience="experience@1", controller="none")
    train_dynamics(opened(run, force=True), controller="none")
    train_dynamics(opened(run, force=True))
    assert [int(targets.is_searched.sum()) for targets in seen] == [0, 60, 80]


def test_films_show_the_search(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Film] = []
    original = Film.render

    def watched(film: Film, *given: Any) -> np.ndarray:
        drawn.append(film)
        return original(film, *given)

    monkeypatch.setattr(Film, "render", watched)
    evaluation = evaluate(opened(run, pictures=True))
    play(opened(run), source="real", out=tmp_path / "x.gif", controller=None, seed=1)
    assert len(drawn) == 2
    for film in drawn:
        assert len(film.frames) == len(film.actions) == len(film.values) > 1
        shares = np.stack(film.policies)
        assert shares.shape == (len(film.frames), 3)
        np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
        assert (shares[range(len(shares)), film.actions] == shares.max(1)).all(), "it plays what was searched most"
    for path in (evaluation.path / "episode.webp", tmp_path / "x.gif"):
        with Image.open(path) as picture:
            assert picture.height - picture.width == 40 + 3 * 20  # bars, and three lines


def test_every_stage_goes_through_twice_and_then_finds_nothing_to_do(run: Path) -> None:
    context = opened(run, pictures=True)
    evaluation = evaluate(context)
    assert len(evaluation.metrics["returns"]) == 3
    assert (evaluation.path / "episode.webp").exists() and not (evaluation.path / "imagination.webp").exists()
    assert evaluate(opened(run)).digest == evaluation.digest
    assert evaluate(opened(run, "controller.simulations=2")).digest != evaluation.digest, "another search plays"
    for stage in (train_dynamics, imagine):
        first = stage(opened(run, more=True))
        assert stage(opened(run), parent=str(first.input("parent").path)).digest == first.digest


@pytest.mark.slow
def test_the_loop_goes_on_where_it_was(tmp_path: Path, played: Path) -> None:
    preset = Run.open(played, create=False).bound()["preset"]
    short = ["run.epochs=3", "run.collect_epochs=3"]
    folder = tmp_path / "loop"
    last = run_loop(opened(folder, *short, preset=preset))
    assert last.kind == "evaluation"
    kinds = {kind: Run.open(folder, create=False).versions(kind) for kind in ("experience", "dynamics", "controller")}
    assert run_loop(opened(folder)).digest == last.digest
    assert kinds == {kind: Run.open(folder, create=False).versions(kind) for kind in kinds}
    assert not Run.open(folder, create=False).versions("tokenizer")
    third = version(folder, "dynamics", kinds["dynamics"][-1])
    assert third.inputs["controller"].version == 2 and third.inputs["parent"].version == 2


@pytest.mark.slow
def test_the_loop_ends_without_reanalysis(tmp_path: Path, played: Path) -> None:
    """A controller that was never searched with logged nothing, and so there are no curves of it."""
    preset = Run.open(played, create=False).bound()["preset"]
    short = ["run.epochs=2", "run.collect_epochs=2", "controller.updates=0"]
    last = run_loop(opened(tmp_path / "loop", *short, preset=preset))
    assert last.kind == "evaluation" and run_loop(opened(tmp_path / "loop")).digest == last.digest
    controller = last.input("controller")
    assert controller.metrics["updates"] == 0 and not (controller.path / "curves.png").exists()


@pytest.mark.parametrize("stage", [train_dynamics, imagine])
def test_killed_at_every_checkpoint_it_ends_in_the_same(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage
) -> None:
    shutil.copytree(run, tmp_path / "whole", symlinks=True)
    whole = stage(opened(tmp_path / "whole", more=True))
    artifact, kills = None, 0
    while artifact is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, "checkpoint", 1)
                artifact = stage(opened(run, EAGER, more=True))
        except Killed:
            kills += 1
            assert kills < 99, "does not move on"
    assert kills == (3 if stage is train_dynamics else 4)
    assert sha256(artifact) == sha256(whole)
    if stage is imagine:
        one, other = (read_part(each.file(TRAINING), "targets") for each in (artifact, whole))
        assert all(np.array_equal(one[name], other[name]) for name in other)


def test_collecting_killed_at_a_checkpoint_goes_on_with_the_same_searches(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "whole", symlinks=True)
    whole = collect(opened(tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 7)
        collect(opened(run, EAGER))
    resumed = collect(opened(run))
    assert [each["sha256"] for each in resumed.manifest["files"]] == [
        each["sha256"] for each in whole.manifest["files"]
    ]


def test_search_settings_of_now_go_before_those_of_training(run: Path) -> None:
    controller = version(run, "controller", 1)
    context = opened(run, "controller.simulations=9")
    _, as_now = load_controller(controller, CPU, context.settings.acting)
    _, as_trained = load_controller(controller, CPU, {"dynamics": {}, "controller": {}})
    assert (as_now.settings.simulations, as_trained.settings.simulations) == (9, 3)


def test_misplaced_options_end_in_one_clear_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="encodes frames itself and has no tokenizer; go on with: wm train-dynamics"):
        train_tokenizer(opened(run))
    with pytest.raises(UsageError, match="plans in latents that no picture is made of"):
        play(opened(run), source="imagination", out=tmp_path / "x.gif", controller=None, seed=1)
    assert play(opened(run), source="real", out=tmp_path / "x.gif", controller=None, seed=1).path.exists()
    with pytest.raises(UsageError, match="dynamics of kind 'token' learn none: set dynamics.kind to unizero or muzero"):
        open_context(tmp_path / "y", "quickstart", ["controller.kind=mcts"], create=True)


def test_learned_priors_are_logged_published_and_drawn(played: Path) -> None:
    artifact = version(played, "dynamics", 1)
    if artifact.settings["dynamics"]["kind"] != "unizero":
        assert "priors" not in artifact.metrics and not (artifact.path / "priors.png").exists()
        return
    priors = artifact.metrics["priors"]
    assert sorted(priors) == ["deviation", "mean", "span"]
    assert all(np.shape(values) == (1, 2) for values in priors.values())
    logged = [record for record in Run.open(played, create=False).history() if record["stage"] == "train-dynamics"]
    assert [record["update"] for record in logged] == [2, 3] and logged[-1]["priors"] == priors
    assert logged[0]["priors"] != priors and logged[-1]["prior_penalty"] > 0
    assert (artifact.path / "priors.png").exists()


def test_priors_of_several_runs_are_drawn_together(run: Path, played: Path, tmp_path: Path) -> None:
    out = tmp_path / "priors.png"
    shutil.copytree(run, tmp_path / "other", symlinks=True)
    scores = [Score(folder, evaluate(opened(folder), episodes=1)) for folder in (run, tmp_path / "other")]
    if version(run, "dynamics", 1).settings["dynamics"]["kind"] != "unizero":
        with pytest.raises(UsageError, match="no priors to draw"):
            compare_priors({"one": scores[:1], "two": scores[1:]}, out, QUIET)
        assert not out.exists()
        return
    compare_priors({"all": scores}, out, QUIET)
    assert out.read_bytes().startswith(b"\x89PNG")
    train_dynamics(opened(run, more=True))  # its newer records are not in the other run
    compare_priors({"all": scores}, out, QUIET)
    compare_priors({"one": scores[:1], "two": scores[1:]}, tmp_path / "bars.png", QUIET)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    for stage in (train_dynamics, imagine):
        stage(opened(run, "backbone.prior.span=5"))
    other = Score(run, evaluate(opened(run, "backbone.prior.span=5"), episodes=1))
    for groups in ({"all": [other, scores[1]]}, {"one": scores[:1], "two": [other, scores[1]]}):
        with pytest.raises(UsageError, match="different attention priors, .*: add --by backbone.prior.span"):
            compare_priors(groups, out, QUIET)


@pytest.mark.parametrize("controller", ["reinforce", "actor-critic"])
@pytest.mark.slow
def test_other_controllers_learn_in_the_imagination_of_these_models(played: Path, tmp_path: Path, controller) -> None:
    preset = Run.open(played, create=False).bound()["preset"]
    given = [each for each in COMMON + EVERY[preset] if not each.startswith("controller.")]
    small = {
        "reinforce": ["width=8", "latent_channels=[4]", "burn_in=2"],
        "actor-critic": ["actor_width=8", "critic_width=8"],
    }[controller]
    changes = [*given, f"controller.kind={controller}", *(f"controller.{each}" for each in small)]
    changes += ["controller.imagination_horizon=3", "controller.batch=4", "controller.updates=2"]
    folder = tmp_path / "other"
    collect(open_context(folder, preset, changes, create=True, quiet=True))
    for stage in (train_dynamics, imagine):
        first = stage(opened(folder))
        assert stage(opened(folder, more=True)).inputs["parent"].digest == first.digest
    assert "policy" not in read_segment(collect(opened(folder)).path / SEGMENT)
    assert evaluate(opened(folder), episodes=1).metrics["episodes"] == 1
    with pytest.raises(UsageError, match="takes imagined frames"):
        opened(folder, "controller.kind=reinforce", "controller.input=pixels")
