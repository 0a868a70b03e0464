"""`wm run`: what is done in which epoch, and that stopping anywhere changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_run import Killed, copied, kill_at, latest, opened, sha256

from wmcli.artifacts import Artifact, Run, check, lock
from wmcli.artifacts.job import MadeMeanwhileError
from wmcli.artifacts.lock import exclusive
from wmcli.envs import Streams
from wmcli.errors import BusyError, Stopped, UsageError
from wmcli.progress import Bar, Progress
from wmcli.settings import resolve
from wmcli.stages import evaluate as evaluate_stage
from wmcli.stages import loop as module
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.imagine import imagine
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.stages.play import play
from wmcli.stages.scores import read_scores
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.trainers import dynamics as dynamics_trainer
from wmcli.trainers import imagination as imagination_trainer
from wmcli.trainers import tokenizer as tokenizer_trainer

LOOP = [  # everything starts in an epoch of its own
    "collect.steps=12",
    "tokenizer.updates=2",
    "dynamics.updates=3",
    "controller.updates=1",
    "evaluation.episodes=3",
    "run.epochs=5",
    "run.collect_epochs=4",
    "run.tokenizer_after=0",
    "run.dynamics_after=1",
    "run.controller_after=2",
    "run.evaluate_every=3",
    "run.evaluate_episodes=2",
    "run.keep=2",
]
EAGER = "training.checkpoint_seconds=0"


def names(folder: Path) -> dict[str, list[int]]:
    run = Run.open(folder, create=False)
    kinds = ("experience", "tokenizer", "dynamics", "controller", "evaluation")
    return {kind: run.versions(kind) for kind in kinds}


def inputs(artifact: Artifact) -> dict[str, str]:
    return {role: reference.name for role, reference in artifact.inputs.items()}


def content(folder: Path, kind: str, version: int) -> dict[str, str]:
    """sha256 of what a version holds besides times: experience, or weights. Also of one that was pruned."""
    files = Run.open(folder, create=False).get(kind, version).manifest["files"]
    found = {entry["path"]: entry["sha256"] for entry in files}
    return found if kind == "experience" else {"model.safetensors": found["model.safetensors"]}


def results(folder: Path) -> dict[str, object]:
    """All that a run leads to, without times."""
    run = Run.open(folder, create=False)
    return {
        "versions": names(folder),
        "returns": [run.get("evaluation", version).metrics["returns"] for version in run.versions("evaluation")],
        "content": [
            content(folder, kind, version) for kind in ("experience", *module.MODELS) for version in names(folder)[kind]
        ],
    }


@pytest.fixture(autouse=True, scope="module")
def no_plots() -> Iterator[None]:
    """They take half of the time here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wmcli.stages.evaluate._write_plots", lambda *_: None)
        patch.setattr("wmcli.stages.train.write_figure", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went through its epochs without a stop. Only to be read, or to be run again."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run_loop(opened(folder, *LOOP, new=True)).name == "evaluation@2"
    return folder


IRIS = ["backbone.kind=transformer", "dynamics.prediction=sequential", "controller.input=pixels"]


@pytest.mark.parametrize("system", [[], [*IRIS, "tokenizer.network=patch"], ["tokenizer.quantizer=fsq"]])
@pytest.mark.slow
def test_every_stage_runs_in_bfloat16(tmp_path: Path, system: list[str]) -> None:
    """Frozen models keep their matrices in it: whoever uses one outside autocast fails."""
    short = [*LOOP, "run.epochs=4", "dynamics.shared_embeddings=false", "training.precision=bfloat16", *system]
    run_loop(opened(tmp_path / "run", *short, new=True))
    context = opened(tmp_path / "run")
    assert collect(context).inputs["controller"].kind == "controller"  # behind rows of an earlier process
    for source in ("real", "imagination"):
        play(context, source=source, out=tmp_path / f"{source}.gif", controller=None, seed=1)  # type: ignore[arg-type]


# -- beside other processes -------------------------------------------------------------------------------------------


def test_a_run_waits_for_who_writes_a_kind_and_other_commands_do_not(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = opened(copied(tiny, tmp_path / "run"))
    job, other = context.run.job("dynamics", {"identity": 1}, {}), ExitStack()
    other.enter_context(exclusive(job.folder, "x"))
    with pytest.raises(BusyError), context.work(job):
        pass
    context.epoch = 1
    monkeypatch.setattr(lock.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped before wm train-dynamics began"), context.work(job):
        pass
    monkeypatch.setattr(lock.time, "sleep", lambda _: other.close())
    with context.work(job):
        pass
    line = f"waiting for process {os.getpid()}, which writes dynamics in {context.run}"
    assert capsys.readouterr().err == f"warning: {line}\n"


@pytest.mark.slow
def test_a_run_goes_on_with_what_another_process_made_meanwhile(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, left = module.train_dynamics, [MadeMeanwhileError("just published")]

    def meanwhile(*arguments: object, **options: object) -> Artifact:
        if left:
            raise left.pop()
        return train(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "train_dynamics", meanwhile)
    assert run_loop(opened(whole)).name == "evaluation@2" and not left


# -- an undisturbed run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_stage_begins_after_its_epoch(whole: Path) -> None:
    assert names(whole) == {
        "experience": [1, 2, 3, 4],
        "tokenizer": [1, 2, 3, 4, 5],
        "dynamics": [1, 2, 3, 4],
        "controller": [1, 2, 3],
        "evaluation": [1, 2],
    }


def test_each_goes_on_from_the_one_before(whole: Path) -> None:
    run = Run.open(whole, create=False)
    for kind, updates in [("tokenizer", 2), ("dynamics", 3), ("controller", 1)]:
        for version in run.versions(kind):
            artifact = run.get(kind, version)
            assert artifact.metrics["updates"] == version * updates
            assert inputs(artifact).get("parent") == (f"{kind}@{version - 1}" if version > 1 else None)


def test_each_stage_reads_the_newest_inputs_of_its_epoch(whole: Path) -> None:
    run = Run.open(whole, create=False)
    for epoch in range(1, 6):
        experience = f"experience@{min(epoch, 4)}"
        assert inputs(run.get("tokenizer", epoch))["experience"] == experience
        if epoch > 1:
            got = inputs(run.get("dynamics", epoch - 1))
            assert (got["experience"], got["tokenizer"]) == (experience, f"tokenizer@{epoch}")
        if epoch > 2:
            got = inputs(run.get("controller", epoch - 2))
            assert (got["experience"], got["dynamics"]) == (experience, f"dynamics@{epoch - 1}")
    assert [inputs(run.get("experience", version)) for version in (1, 2, 3, 4)] == [
        {},
        {"previous": "experience@1"},
        {"previous": "experience@2"},
        {"previous": "experience@3", "controller": "controller@1"},  # random play until there is one
    ]


def test_a_controller_is_calibrated_on_the_experience_that_its_parent_played(whole: Path) -> None:
    """Controller 2 goes on from controller 1, which played experience 4; later there is no newer experience."""
    run = Run.open(whole, create=False)
    found = {version: run.get("controller", version).metrics for version in run.versions("controller")}
    calibrated = {version: metrics for version, metrics in found.items() if "fresh_real_return" in metrics}
    assert set(calibrated) == {2}
    logged = [line for line in run.history() if "fresh_real_return" in line]
    assert {line["epoch"] for line in logged} == {4}
    assert {line["fresh_imagined_return"] for line in logged} == {calibrated[2]["fresh_imagined_return"]}


def test_evaluations_on_the_way_are_short_and_the_last_is_whole(whole: Path) -> None:
    run = Run.open(whole, create=False)
    evaluations = [run.get("evaluation", version) for version in (1, 2)]
    assert [inputs(each)["controller"] for each in evaluations] == ["controller@1", "controller@3"]
    assert [each.metrics["episodes"] for each in evaluations] == [2, 3]
    assert [each.metrics["total_steps"] for each in evaluations] == [36, 48]


def test_only_the_newest_weights_are_kept(whole: Path) -> None:
    states = {name: state for name, state, _ in check(Run.open(whole, create=False))}
    for kind, versions in names(whole).items():
        for version in versions:
            old = kind in module.MODELS and version <= versions[-1] - 2
            assert states[f"{kind}@{version}"] == ("pruned" if old else "ok")
    assert (whole / "tokenizer" / "v0005" / "model.safetensors").exists()
    assert not (whole / "tokenizer" / "v0003" / "model.safetensors").exists()


def test_run_again_it_has_nothing_to_do(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the weights of most jobs are gone."""
    before, lines = names(whole), Run.open(whole, create=False).history()
    monkeypatch.setattr("wmcli.stages.train.fit", None)
    monkeypatch.setattr("wmcli.stages.evaluate.play_episodes", None)
    assert run_loop(opened(whole)).name == "evaluation@2"
    assert names(whole) == before
    assert Run.open(whole, create=False).history() == lines


def test_the_tokenizer_trains_in_its_epochs_only(tmp_path: Path) -> None:
    short = [text for text in LOOP if "run.epochs" not in text]
    run_loop(opened(tmp_path / "run", *short, "run.epochs=4", "run.tokenizer_epochs=2", new=True))
    run = Run.open(tmp_path / "run", create=False)
    assert (run.versions("tokenizer"), run.versions("dynamics")) == ([1, 2], [1, 2, 3])
    assert [inputs(run.get("dynamics", version))["tokenizer"] for version in (1, 2, 3)] == ["tokenizer@2"] * 3
    assert inputs(run.get("tokenizer", 2))["experience"] == "experience@2"


@pytest.mark.slow
def test_more_epochs_go_on_from_where_it_ended(whole: Path, tmp_path: Path) -> None:
    short = [text for text in LOOP if "run.epochs" not in text]
    run_loop(opened(tmp_path / "run", *short, "run.epochs=2", new=True))
    artifact = run_loop(opened(tmp_path / "run", "run.epochs=5"))
    assert artifact.metrics["returns"] == latest(whole, "evaluation").metrics["returns"]
    assert sha256(latest(tmp_path / "run", "controller")) == sha256(latest(whole, "controller"))


@pytest.mark.parametrize(
    ("overrides", "last"),
    [
        (["run.epochs=1", "run.tokenizer_after=1"], "experience@1"),
        (["run.epochs=1"], "tokenizer@1"),
        (["run.epochs=2"], "dynamics@1"),
        (["run.epochs=3", "run.evaluate_every=0"], "evaluation@1"),
        (["run.epochs=4", "run.evaluate_every=2"], "evaluation@1"),
    ],
)
def test_the_last_artifact_is_returned(tmp_path: Path, overrides: list[str], last: str) -> None:
    assert run_loop(opened(tmp_path / "run", *LOOP, *overrides, new=True)).name == last


# -- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_every_few_checkpoints_it_ends_in_the_same_weights(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "run", *LOOP, new=True)
    last, kills = None, 0
    while last is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, "checkpoint", 4)
                last = run_loop(opened(tmp_path / "run", EAGER))
        except Killed:
            kills += 1
            assert kills < 99, "does not move on"
    assert kills > 5
    assert last.name == "evaluation@2"
    assert results(tmp_path / "run") == results(whole)


@pytest.mark.parametrize(
    ("owner", "name", "call", "epochs", "made"),
    [
        (Streams, "step", 2, 1, []),
        (Streams, "step", 4, 1, []),  # the last of its stage: it must not go over into the next one
        (tokenizer_trainer, "update", 2, 1, ["experience"]),
        (dynamics_trainer, "update", 1, 2, ["experience", "tokenizer"]),
        (imagination_trainer, "update", 1, 3, ["experience", "tokenizer", "dynamics"]),  # the only one
    ],
)
@pytest.mark.slow
def test_asked_to_stop_it_stops_in_that_stage_and_goes_on(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    call: int,
    epochs: int,
    made: list[str],
) -> None:
    short = [text for text in LOOP if "run.epochs" not in text]
    opened(tmp_path / "run", *short, f"run.epochs={epochs}", new=True)
    original, calls = getattr(owner, name), 0

    def signals(*given: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(owner, name, signals)
        run_loop(opened(tmp_path / "run"))
    assert [kind for kind, versions in names(tmp_path / "run").items() if versions] == made
    run_loop(opened(tmp_path / "run"))
    for kind in ("experience", *module.MODELS):
        for version in names(tmp_path / "run")[kind]:
            assert content(tmp_path / "run", kind, version) == content(whole, kind, version)


@pytest.mark.slow
def test_asked_to_stop_between_stages_it_stops_there(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "run", *LOOP, new=True)

    def signals(context: Context, **given: object) -> Artifact:
        artifact = train_tokenizer(context, **given)
        os.kill(os.getpid(), signal.SIGTERM)  # when it has published, and nothing is at work
        return artifact

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="epoch 1 after train-tokenizer") as stopped:
        patch.setattr(module, "train_tokenizer", signals)
        run_loop(opened(tmp_path / "run"))
    assert stopped.value.exit_code == 75
    assert names(tmp_path / "run") == {**dict.fromkeys(names(whole), []), "experience": [1], "tokenizer": [1]}
    run_loop(opened(tmp_path / "run"))
    assert results(tmp_path / "run") == results(whole)


def test_fresh_takes_up_nothing(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in a stage that comes after others which were done."""
    short = [text for text in LOOP if "run.epochs" not in text]
    opened(tmp_path / "run", *short, "run.epochs=1", new=True)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "checkpoint", 5)  # 3 while collecting
        run_loop(opened(tmp_path / "run", EAGER))
    assert names(tmp_path / "run")["experience"] == [1] and names(tmp_path / "run")["tokenizer"] == []
    loads: list[object] = []
    monkeypatch.setattr("wmcli.training.checkpoint.TrainState.load", lambda *given: loads.append(given))
    run_loop(opened(tmp_path / "run", fresh=True))
    assert loads == []
    assert content(tmp_path / "run", "tokenizer", 1) == content(whole, "tokenizer", 1)


# -- other settings ---------------------------------------------------------------------------------------------------


def bound(folder: Path, *overrides: str, **given: object) -> Context:
    """The context of `wm run`, whose settings stay with the run."""
    context = open_context(folder, None, overrides, create=False, quiet=True, bind=True, **given)
    context.pictures = False
    return context


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of a finished run to change at will."""
    return copied(whole, tmp_path / "run")


def test_a_finished_run_is_not_trained_anew_without_a_word(finished: Path) -> None:
    before = results(finished)
    with pytest.raises(UsageError, match=r"dynamics@1 .*dynamics.clip 1.0 -> 4.0.* --force"):
        run_loop(bound(finished, "dynamics.clip=4.0"))
    assert results(finished) == before
    run_loop(bound(finished))  # the settings did not stay
    assert results(finished) == before
    run_loop(bound(finished, "dynamics.clip=4.0", force=True))
    assert names(finished)["dynamics"] == list(range(1, 9))
    for version in range(1, 6):  # the tokenizers that the first dynamics saw by had been pruned
        assert content(finished, "tokenizer", version) == content(finished, "tokenizer", version + 5)
    states = {name: state for name, state, _ in check(Run.open(finished, create=False))}
    assert states["controller@3"] == states["controller@6"] == "ok"  # the finished result is still there
    again = names(finished)
    run_loop(bound(finished))  # they stay now
    run_loop(bound(finished, "dynamics.clip=4.0", force=True))  # and with --force as well
    assert names(finished) == again


def test_another_precision_is_another_setting(finished: Path) -> None:
    with pytest.raises(UsageError, match="training.precision float32 -> bfloat16"):
        run_loop(bound(finished, "training.precision=bfloat16"))


def test_settings_without_effect_on_results_may_change(finished: Path) -> None:
    before = results(finished)
    run_loop(bound(finished, "training.checkpoint_seconds=77.0", "training.log_every=3"))
    assert results(finished) == before
    assert Run.open(finished, create=False).bound()["settings"]["training"]["log_every"] == 3


def test_another_measure_of_a_finished_run_is_all_that_is_done(finished: Path) -> None:
    """The controllers that were scored on the way are pruned."""
    before = results(finished)
    assert run_loop(bound(finished, 'evaluation.measures=["training"]')).name == "evaluation@2"
    run = Run.open(finished, create=False)
    assert run.versions("evaluation") == [1, 2, 3] and run.get("evaluation", 3).metrics["protocol"] == "training"
    assert results(finished)["content"] == before["content"]
    assert run_loop(bound(finished)).name == "evaluation@2" and run.versions("evaluation") == [1, 2, 3]


def test_models_trained_by_hand_are_no_reason_to_refuse(tmp_path: Path) -> None:
    collect(opened(tmp_path / "run", *LOOP, "run.epochs=1", new=True))
    train_tokenizer(opened(tmp_path / "run", "tokenizer.updates=1"))
    run_loop(bound(tmp_path / "run"))
    assert names(tmp_path / "run")["tokenizer"] == [1, 2]


def test_more_epochs_stay_with_the_run(tmp_path: Path) -> None:
    short = [text for text in LOOP if "run.epochs" not in text]
    run_loop(opened(tmp_path / "run", *short, "run.epochs=2", new=True))
    run_loop(bound(tmp_path / "run", "run.epochs=3"))
    third = names(tmp_path / "run")
    assert third["controller"] == [1]
    assert run_loop(bound(tmp_path / "run")).name == "evaluation@1"
    assert names(tmp_path / "run") == third


def test_settings_change_from_an_epoch_on(whole: Path, finished: Path) -> None:
    with pytest.raises(UsageError, match="dynamics@4 .*dynamics.learning_rate"):  # that of epoch 5
        run_loop(bound(finished, "dynamics.learning_rate=0.001", from_epoch=5))
    run_loop(bound(finished, "dynamics.learning_rate=0.001", from_epoch=5, force=True))
    run = Run.open(finished, create=False)
    rates = [
        run.get("dynamics", version).settings["dynamics"]["learning_rate"] for version in names(finished)["dynamics"]
    ]
    assert rates == [*[rates[0]] * 4, 0.001] and rates[0] != 0.001
    assert inputs(run.get("dynamics", 5))["parent"] == "dynamics@3"
    before = names(finished)
    run_loop(bound(finished))
    assert names(finished) == before
    with pytest.raises(UsageError, match="only collect, tokenizer"):
        bound(finished, "backbone.layers=2", from_epoch=4)
    with pytest.raises(UsageError, match="give them with --set"):
        bound(finished, from_epoch=4)


# -- what is removed --------------------------------------------------------------------------------------------------


def test_models_trained_by_hand_and_their_inputs_are_not_removed(finished: Path) -> None:
    """As `wm train-tokenizer --more` twice, and then `wm run`."""
    for _ in range(2):
        train_tokenizer(opened(finished, more=True))
    before = {name: state for name, state, _ in check(Run.open(finished, create=False))}
    run_loop(bound(finished))
    assert {name: state for name, state, _ in check(Run.open(finished, create=False))} == before
    assert before["tokenizer@5"] == before["dynamics@4"] == before["controller@3"] == "ok"


@pytest.mark.slow
def test_inputs_of_another_run_are_not_removed(tmp_path: Path) -> None:
    short = [text for text in LOOP if "run.epochs" not in text]
    opened(tmp_path / "run", *short, "run.epochs=5", "run.keep=1", "evaluation.episodes=2", new=True)
    run_loop(bound(tmp_path / "run", "run.epochs=2"))
    run = Run.open(tmp_path / "run", create=False)
    other = opened(tmp_path / "other", *LOOP, new=True)
    imagine(
        other, experience=str(run.resolve("experience", "experience").path), dynamics=str(run.get("dynamics", 1).path)
    )
    run_loop(bound(tmp_path / "run", "run.epochs=5"))
    states = {name: state for name, state, _ in check(run)}
    assert states["dynamics@1"] == states["tokenizer@2"] == "ok"  # what the other controller acts in, and sees by
    assert states["dynamics@2"] == states["tokenizer@1"] == "pruned"
    assert {state for _, state, _ in check(Run.open(tmp_path / "other", create=False))} == {"ok"}


def test_the_best_controller_is_kept_with_its_models_and_offered_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = iter([0.75, 0.5, 0.25, 0.125])
    original = evaluate_stage.score
    monkeypatch.setattr(evaluate_stage, "score", lambda returns: original(returns) | {"mean": next(scores)})
    context = opened(tmp_path / "run", *LOOP, "run.epochs=6", "run.evaluate_every=1", "run.keep=1", new=True)
    context.progress = Progress()
    run_loop(context)
    run = Run.open(tmp_path / "run", create=False)
    best = run.resolve("best", "controller")
    assert best.version == 1 and (run.path / "controller" / "best").readlink() == Path("v0001")
    said = capsys.readouterr().err
    assert "controller@1 scored better: 0.750 over" in said and f"wm eval --run {run} --controller best" in said
    states = {name: state for name, state, _ in check(run)}
    assert [states[f"controller@{version}"] for version in (1, 2, 3, 4)] == ["ok", "pruned", "pruned", "ok"]
    assert states[best.input("dynamics").name] == states[best.input("dynamics").input("tokenizer").name] == "ok"


def test_weights_are_removed_before_those_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a fault ends it, no version is left unusable."""
    kinds, prune = [], Run.prune
    monkeypatch.setattr(Run, "prune", lambda run, kind, versions: kinds.append(kind) or prune(run, kind, versions))
    run_loop(opened(tmp_path / "run", *LOOP, "run.epochs=2", "run.keep=1", new=True))
    assert kinds[:3] == ["controller", "dynamics", "tokenizer"] and len(kinds) % 3 == 0


# -- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("means", "ends_after", "best"), [([0.5, 0.75, 0.25, 0.75], 6, 4), ([0.25, 0.5, 0.5, 0.75, 0.0], None, 4)]
)
def test_patience_ends_the_run_and_scores_the_best_controller(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    means: list[float],
    ends_after: int | None,
    best: int,
) -> None:
    """Evaluations begin in epoch 3. An equal mean is no better, but its controller is the newer one."""
    scores = iter([*means, 0.125])  # the last is of evaluation.episodes
    original = evaluate_stage.score
    monkeypatch.setattr(evaluate_stage, "score", lambda returns: original(returns) | {"mean": next(scores)})
    patient = [*LOOP, "run.epochs=8", "run.evaluate_every=1", "run.keep=1", "run.patience=2"]
    context = opened(tmp_path / "run", *patient, new=True)
    context.progress = Progress()
    last = run_loop(context)
    run = Run.open(tmp_path / "run", create=False)
    assert last.metrics["episodes"] == 3 and last.metrics["mean"] == 0.125
    said = capsys.readouterr().err
    assert read_scores([run.path], "returns", Progress())[0].evaluation.digest == last.digest
    assert capsys.readouterr().err == ""
    if ends_after is None:
        assert "run: ends after" not in said and len(run.versions("controller")) == 6
        assert last.inputs["controller"].version == 6 and f"controller@{best} scored better" in said
        return
    assert f"run: ends after epoch {ends_after} of 8: none of the last 2 evaluations" in said
    assert last.inputs["controller"].version == best and f"that of controller@{best}" in said
    assert len(run.versions("controller")) == ends_after - 2 and len(run.versions("experience")) == 4
    assert run_loop(opened(tmp_path / "run")).digest == last.digest  # nothing is played again
    scores = iter([0.0] * 3)
    assert run_loop(bound(tmp_path / "run", "run.patience=0")).inputs["controller"].version == 6


def test_training_draws_its_pictures_at_intervals_and_they_are_kept(tmp_path: Path) -> None:
    run_loop(opened(tmp_path / "run", *LOOP, "run.pictures_every=2", "run.keep=1", new=True))
    drawn = {path.parent.name for path in (tmp_path / "run" / "dynamics").glob("v*/imagination.webp")}
    assert drawn == {"v0001", "v0003", "v0004"}  # of epochs 2, 4 and 5
    states = {name: state for name, state, _ in check(Run.open(tmp_path / "run", create=False))}
    assert states["dynamics@1"] == "pruned" and states["dynamics@4"] == "ok"


def test_a_plan_that_ends_before_a_model_is_trained_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_loop(opened(tmp_path / "run", *LOOP, "run.epochs=1", "run.dynamics_after=1", new=True))
    said = capsys.readouterr().err
    assert "train-dynamics begins in epoch 2" in said and "run.epochs=2" in said


@pytest.mark.parametrize(
    ("preset", "overrides", "warned"),
    [
        ("rem", ["run.epochs=40"], ["imagine begins in epoch 51"]),
        ("rem", ["run.epochs=40", "controller.kind=none"], []),
        ("rem", ["run.epochs=51"], []),
        ("s4wm-2d", [], []),
        ("s4wm-2d", ["controller.kind=actor-critic"], ["imagine begins in epoch 2"]),
        ("gridworld", [], []),
    ],
)
def test_a_controller_without_an_epoch_of_training_is_reported(
    preset: str, overrides: list[str], warned: list[str], tmp_path: Path
) -> None:
    context = SimpleNamespace(preset=preset, settings=resolve(preset, overrides))
    assert [line.partition(",")[0] for line in module._idle(context)] == warned


def test_time_left_counts_remaining_work(tmp_path: Path) -> None:
    left = module._TimeLeft(opened(tmp_path / "run", *LOOP, new=True).settings)  # dynamics in 4 epochs, controller in 3
    left.took("collect", 1.0), left.took("train-tokenizer", 10.0)
    assert left.after(1) is None  # of an epoch in which all train nothing is known yet
    left.took("train-dynamics", 100.0)
    assert left.after(2) is None
    left.took("imagine", 1000.0)
    assert left.after(3) == 1 * 1.0 + 2 * 10.0 + 2 * 100.0 + 2 * 1000.0
    left.took("imagine", 500.0)
    assert left.after(4) == 10.0 + 100.0 + 500.0
    assert left.after(5) == 0


def test_every_line_of_the_log_has_its_epoch(whole: Path) -> None:
    lines = Run.open(whole, create=False).history()
    assert [line["epoch"] for line in lines if line["stage"] == "collect"] == [1, 2, 3, 4]
    assert [line["epoch"] for line in lines if line["stage"] == "eval"] == [3, 5]
    assert {line["epoch"] for line in lines if line["stage"] == "train-dynamics"} == {2, 3, 4, 5}
    assert latest(whole, "controller").manifest["extra"]["epoch"] == 5


def test_the_bar_shows_the_numbers_of_the_epoch_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = Bar.advance
    monkeypatch.setattr(
        Bar, "advance", lambda bar, n=1: (drawn.append((bar._label, dict(bar._values))), original(bar, n))
    )
    context = opened(tmp_path / "run", *LOOP, "run.epochs=2", new=True)
    run_loop(context)
    epochs = [values for what, values in drawn if what == "run"]
    run = Run.open(tmp_path / "run", create=False)
    for epoch, values in enumerate(epochs, start=1):
        assert values["reconstruction"] == run.get("tokenizer", epoch).metrics["reconstruction"]


# -- experience of its own --------------------------------------------------------------------------------------------


def test_experience_that_it_did_not_collect_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    collect(opened(tmp_path / "run", *LOOP, new=True), steps=6)
    train_tokenizer(opened(tmp_path / "run"))
    before = names(tmp_path / "run")
    with pytest.raises(UsageError, match="holds experience that wm run did not collect"):
        run_loop(opened(tmp_path / "run"))
    assert names(tmp_path / "run") == before


def test_its_own_first_collect_may_have_been_done_by_hand(tmp_path: Path) -> None:
    collect(opened(tmp_path / "run", *LOOP, "run.epochs=1", new=True))
    run_loop(opened(tmp_path / "run"))
    assert names(tmp_path / "run")["experience"] == [1]


def test_another_seed_needs_a_run_of_its_own(tmp_path: Path) -> None:
    run_loop(opened(tmp_path / "run", *LOOP, "run.epochs=1", new=True))
    with pytest.raises(UsageError, match="with these settings .*seed 1 -> 2"):
        run_loop(opened(tmp_path / "run", "seed=2"))
    assert names(tmp_path / "run")["experience"] == [1]


def test_a_loop_whose_last_evaluation_cannot_score_is_refused_before_it_collects(tmp_path):
    context = open_context(tmp_path / "run", "rem-quick", ["environment.id=wm/GridWorld-v0"], create=True, quiet=True)
    with pytest.raises(UsageError, match="--protocol returns: episodes of wm/GridWorld-v0 never end"):
        run_loop(context)
    assert not context.run.versions("experience")
