"""`wm run --data`: a run from recorded data alone, and one that collects behind them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_systems import SYSTEMS
from test_stage_imported import SETTINGS, made
from tiny_run import Killed, kill_at, latest, sha256
from torch import Tensor

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.environment import check_same_environment
from wmcli.cli.main import run as command
from wmcli.errors import UsageError
from wmcli.exchange import Episode, Recording, write_recording
from wmcli.experience import Replay, load, read_segment
from wmcli.experience.segment import IMPORTED
from wmcli.progress import Progress
from wmcli.settings import resolve
from wmcli.spaces import Categories, Continuous, Image, Spaces, Vector, draw_actions, map_parts, parts_of
from wmcli.stages import held_out, loop
from wmcli.stages import player as player_module
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.exported import recording_in
from wmcli.stages.imagine import imagine
from wmcli.stages.imported import Importing, import_experience
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.trainers import dynamics as dynamics_trainer

LOOP = [*SETTINGS, "run.tokenizer_after=0", "run.dynamics_after=0", "run.controller_after=0", "run.epochs=2"]
LOOP += ["run.evaluate_every=0", "evaluation.episodes=3", "training.checkpoint_seconds=0"]
SPACES = {
    "vector": Spaces(Vector(5), Continuous((-1.0, -2.0), (1.0, 2.0))),
    "parts": Spaces({"camera": Image(16, 16, 3), "joints": Vector(4)}, Categories((3, 2))),
}
PLAYED = ["environment.id=wm/Catch-v0", "environment.size=16", "environment.count=3", "collect.steps=30"]
MIXED = [*PLAYED, "run.collect_epochs=2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recording(made(12), "npz", tmp_path / "made")
    return tmp_path / "made"


def runs(run: Path, source: Path | None, *overrides: str, held_out: int = 2, bind: bool = True) -> Artifact:
    """What `wm run --data` does."""
    importing = None if source is None else Importing(str(source), held_out=held_out)
    texts = [*LOOP, *overrides] if importing is not None or not run.exists() else list(overrides)
    texts += [] if importing is None else importing.defaults(run, texts)
    context = open_context(run, None, texts, create=True, quiet=True, bind=bind)
    return loop.run_loop(context, importing)


def results(folder: Path) -> dict[str, Any]:
    """All that a run leads to, without times."""
    run = Run.open(folder, create=False)
    kinds = ("experience", "tokenizer", "dynamics", "controller", "evaluation")
    files = {
        f"{kind}@{version}": {
            entry["path"]: entry["sha256"]
            for entry in run.get(kind, version).manifest["files"]
            if "training" not in entry["path"] and not entry["path"].endswith("curves.png")
        }
        for kind in kinds
        for version in run.versions(kind)
    }
    errors = [each.metrics.get("errors") or each.metrics["returns"] for each in run.artifacts("evaluation")]
    return {"files": files, "errors": errors}


def test_a_run_from_data_alone_trains_in_every_epoch_and_measures_its_dreams(folder: Path, tmp_path: Path) -> None:
    evaluation = runs(tmp_path / "run", folder)
    run = Run.open(tmp_path / "run", create=False)
    assert run.versions("experience") == [1]
    assert all(run.versions(kind) == [1, 2] for kind in loop.MODELS) and run.versions("evaluation") == [1]
    metrics = evaluation.metrics
    assert (metrics["protocol"], metrics["environment"], metrics["episodes"]) == ("held-out", "data/made", 2)
    assert set(metrics["errors"]) == set(held_out.KINDS) and metrics["reward"]["error"]["value"] > 0
    assert all(0 < error["value"] < 1 for error in metrics["errors"].values())
    assert {"imagination.webp", "imagination.png", "errors.png"} <= {each.name for each in evaluation.path.iterdir()}
    (axes,) = held_out.plot_curves([evaluation]).axes
    drawn = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert set(drawn) == set(held_out.KINDS)
    np.testing.assert_array_equal(drawn["generation"], np.array(metrics["curves"]["generation"]["mean"], float))
    (axes,) = held_out.plot_curves([evaluation, evaluation]).axes  # of several runs, the imagined frames
    assert {line.get_label() for line in axes.get_lines()} == {f"{tmp_path}/run: generation"}
    assert evaluation.inputs["dynamics"].digest == latest(tmp_path / "run", "dynamics").digest
    assert latest(tmp_path / "run", "controller").metrics["updates"] == 2 * 4
    assert [each.name for each in (latest(tmp_path / "run", "tokenizer").input("experience"),)] == ["experience@1"]


def test_imported_before_the_same_run_leads_to_the_same(folder: Path, tmp_path: Path) -> None:
    runs(tmp_path / "once", folder)
    importing = Importing(str(folder), held_out=2)
    texts = [*LOOP, *importing.defaults(tmp_path / "twice", LOOP)]
    import_experience(open_context(tmp_path / "twice", None, texts, create=True, quiet=True), importing)
    runs(tmp_path / "twice", None)
    assert results(tmp_path / "twice") == results(tmp_path / "once")
    before = results(tmp_path / "twice")
    runs(tmp_path / "twice", folder)  # the data are recognized, and so is all that was made of them
    assert results(tmp_path / "twice") == before


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], MIXED], ids=["data", "mixed"])
def test_killed_and_resumed_it_leads_to_the_same(
    extra: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(tmp_path / "whole", folder, *extra)
    for times in (3, 6, 9):
        with monkeypatch.context() as patch:
            kill_at(patch, "checkpoint", times)
            with pytest.raises(Killed):
                runs(tmp_path / "parts", folder, *extra)
    runs(tmp_path / "parts", folder, *extra)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def seen_rows(patch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, int]]:
    """Rows of every training batch of dynamics from here on, and the number of rows of the experience."""
    seen: list[tuple[np.ndarray, int]] = []
    gather: Callable[..., Any] = dynamics_trainer.gather

    def noted(replay: Replay, latents: Any, windows: Any, *rest: Any, **options: Any) -> Any:
        seen.append((windows.rows[windows.valid], len(replay)))
        return gather(replay, latents, windows, *rest, **options)

    patch.setattr(dynamics_trainer, "gather", noted)
    return seen


@pytest.mark.slow
def test_training_games_are_those_played_behind_the_data(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measures = 'evaluation.measures=["generation", "training"]'
    short = [*LOOP, *MIXED, "run.epochs=1", "collect.steps=60", "controller.updates=1", "evaluation.episodes=1"]
    context = open_context(tmp_path / "run", None, [*short, measures], create=True)
    loop.run_loop(context, Importing(str(folder), held_out=2))
    assert "measure generation by: left out" in capsys.readouterr().err
    run = Run.open(tmp_path / "run", create=False)
    protocols = {each.metrics["protocol"]: each.metrics for each in run.artifacts("evaluation")}
    assert protocols.keys() == {"held-out", "training", "returns"}
    last = run.get("experience", 1).metrics["steps"] + 42
    assert protocols["training"]["games"] == 6 and protocols["training"]["curve"][-1][0] == last


def test_a_mixed_run_trains_on_both(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_rows(monkeypatch)
    evaluation = runs(tmp_path / "run", folder, *MIXED, "dynamics.updates=20")
    run = Run.open(tmp_path / "run", create=False)
    assert run.versions("experience") == [1, 2, 3] and evaluation.metrics["protocol"] == "returns"
    first, second, third = run.artifacts("experience")
    assert second.input("previous").digest == first.digest and third.input("previous").digest == second.digest
    assert "source" in first.metrics and "source" not in second.metrics
    assert third.metrics["total_steps"] == first.metrics["steps"] + 60
    assert third.input("controller").version == 1
    for artifact in (second, third):
        check_same_environment(first.manifest["environment"], artifact)
    assert run.get("dynamics", 2).input("experience").digest == third.digest
    imported = first.metrics["steps"]
    rows = np.concatenate([each for each, total in seen if total == third.metrics["total_steps"]])
    assert (rows < imported).any() and (rows >= imported).any() and (rows >= imported + 30).any()
    dreams = next(each for each in run.artifacts("evaluation") if each.metrics["protocol"] == "held-out")
    assert dreams.inputs["experience"].digest == first.digest and dreams.metrics["episodes"] == 2


@pytest.mark.slow
def test_overlap_collects_behind_the_data_too(folder: Path, tmp_path: Path) -> None:
    runs(tmp_path / "run", folder, *MIXED, "run.overlap=true")
    first, second, third = Run.open(tmp_path / "run", create=False).artifacts("experience")
    assert second.input("previous").digest == first.digest and third.input("previous").digest == second.digest


def opened(run: Path, *overrides: str) -> Any:
    return open_context(run, None, overrides, create=not run.exists(), quiet=True)


def test_environments_go_on_where_they_stood_behind_data_in_between(folder: Path, tmp_path: Path) -> None:
    """An episode of Catch has 7 decisions, and a segment here 4 in each of 3 environments."""
    segments: dict[str, list[dict[str, np.ndarray]]] = {}
    for name, order in {"own": "cc", "between": "cic", "before": "icc"}.items():
        for step in order:
            context = opened(tmp_path / name, *([] if (tmp_path / name).exists() else [*SETTINGS, *PLAYED]))
            context.bind()
            _ = import_experience(context, Importing(str(folder))) if step == "i" else collect(context, steps=12)
        every = Run.open(tmp_path / name, create=False).artifacts("experience")
        segments[name] = [read_segment(each.path / load.SEGMENT) for each in every if "content" not in each.metrics]
    for name in ("between", "before"):
        for ours, theirs in zip(segments["own"], segments[name], strict=True):
            assert all(np.array_equal(ours[column], theirs[column]) for column in ("first", "stream"))
        assert np.flatnonzero(segments[name][1]["first"]).tolist() == [9, 10, 11]
        assert np.array_equal(segments["own"][0]["observation"][:3], segments[name][0]["observation"][:3])
    assert np.array_equal(segments["own"][1]["observation"][:3], segments["between"][1]["observation"][:3])
    imported = Run.open(tmp_path / "between", create=False).get("experience", 2)
    assert set(read_segment(imported.path / load.SEGMENT)["stream"]) == {IMPORTED}
    replay = load.load_experience(latest(tmp_path / "between", "experience"), "cpu")
    lengths = [len(episode) for episode in made(12)]
    assert sorted(replay.episodes.length.tolist()) == sorted([*lengths, 7, 7, 7, 1, 1, 1])
    assert not replay.truncated.numpy()[:12].any()  # nothing ended where the data begin
    streams, order = replay.runs(across_ends=True)
    assert streams.length.tolist() == [8, 8, 8, sum(lengths)]
    everything = recording_in(latest(tmp_path / "between", "experience"))
    assert sorted(map(len, everything)) == sorted([*lengths, 7, 7, 7, 1, 1, 1])


def test_a_controller_reads_its_last_frames_across_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*LOOP, *PLAYED, "collect.steps=12"]
    context = opened(tmp_path / "run", *texts)
    context.bind()
    collect(context)
    for stage in (train_tokenizer, train_dynamics, imagine):
        stage(opened(tmp_path / "run"))
    import_experience(opened(tmp_path / "run"), Importing(str(folder)))
    read: list[tuple[np.ndarray, np.ndarray]] = []
    last_frames = player_module._last_frames

    def noted(*arguments: Any, **options: Any) -> Any:
        frames, action, valid = last_frames(*arguments, **options)
        read.append((frames, valid))
        return frames, action, valid

    monkeypatch.setattr(player_module, "_last_frames", noted)
    collect(opened(tmp_path / "run"))
    (frames, valid), own = read[0], read_segment(latest(tmp_path / "run", "experience").path / load.SEGMENT)
    assert valid.all() and len(own["action"]) == 12
    first = read_segment(Run.open(tmp_path / "run", create=False).get("experience", 1).path / load.SEGMENT)
    length = frames.shape[1]
    for stream in range(3):
        assert np.array_equal(frames[stream], first["observation"][first["stream"] == stream][-length:])


@pytest.mark.parametrize("closing", [False, True])
def test_segments_with_and_without_closing_observations_join(closing: bool, tmp_path: Path) -> None:
    write_recording(made(5, closing=closing), "npz", tmp_path / "made")
    context = opened(tmp_path / "run", *SETTINGS, *PLAYED, "collect.steps=60")
    import_experience(context, Importing(str(tmp_path / "made")))
    experience = collect(opened(tmp_path / "run"))
    own = read_segment(experience.path / load.SEGMENT)
    replay = load.load_experience(experience, "cpu", closing=True)
    assert replay.is_closing is not None
    steps = sum(map(len, made(5, closing=closing)))
    ended = int((own["terminated"] | own["truncated"]).sum())
    assert ended > 0 and int(replay.is_closing.sum()) == ended + 5 * closing
    assert len(replay) == steps + 60 + ended + 5 * closing


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture, *words: str) -> str:
    """The one line in which `wm run` refuses."""
    sets = [word for text in LOOP for word in ("--set", text)]
    assert command(["run", *words, "--run", "run", "-q", *sets]) in (2, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and not Path("run").exists()
    return lines[0]


def test_refusals_are_one_line_and_leave_no_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "nothing: no such file or folder" in refused(capsys, "--data", "nothing")
    assert "no/such-v0: no such dataset" in refused(capsys, "--data", "minari:no/such-v0")
    assert "wm/Nothing-v0" in refused(capsys, "--data", "made", "--env", "wm/Nothing-v0")
    other = ["--env", "wm/Catch-v0", "--set", "environment.size=20"]
    assert "images are (16, 16, 3), not (20, 20, 3)" in refused(capsys, "--data", "made", *other)
    assert "--held-out 6: 12 episodes for validation and test leave none of 12" in refused(
        capsys, "--data", "made", "--held-out", "6"
    )
    assert "add --data PATH" in refused(capsys, "--held-out", "6")
    assert "give --data" in refused(capsys, "--set", "run.collect_epochs=0", "--env", "wm/Catch-v0")


def test_data_do_not_join_a_run_that_collected_and_are_not_imported_twice(folder: Path, tmp_path: Path) -> None:
    context = opened(tmp_path / "own", *LOOP, *MIXED)
    context.bind()
    collect(context)
    with pytest.raises(UsageError, match="holds experience that was collected before; give another --run"):
        runs(tmp_path / "own", folder, *MIXED)
    runs(tmp_path / "run", folder)
    with pytest.raises(UsageError, match="experience@1 of .* was made from the same files with other options"):
        runs(tmp_path / "run", folder, held_out=1)
    assert Run.open(tmp_path / "run", create=False).versions("experience") == [1]


def test_nothing_collects_in_data(folder: Path, tmp_path: Path) -> None:
    import_experience(
        opened(tmp_path / "run", *SETTINGS, *Importing(str(folder)).defaults(tmp_path / "run", SETTINGS)),
        Importing(str(folder)),
    )
    with pytest.raises(UsageError, match="'data/made' is imported data, which nobody can play"):
        collect(opened(tmp_path / "run"))
    settings = resolve("quickstart", ["environment.id=data/made"])
    assert loop.COLLECT not in loop.due(settings, 1) and loop.EVALUATE not in loop.due(settings, 1)


# -- the measure -------------------------------------------------------------------------------------------------------


def test_measures_that_do_not_apply_are_named_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sets = [word for text in [*LOOP, 'evaluation.measures=["generation", "training"]'] for word in ("--set", text)]
    assert command(["run", "--data", str(folder), "--run", str(tmp_path / "run"), *sets]) == 0
    lines = capsys.readouterr().err
    for line in ("measure generation, training by: left out", "dreams are not measured", "returns are not measured"):
        assert lines.count(line) == 1
    assert command(["eval", "--run", str(tmp_path / "run"), "--protocol", "training"]) == 2
    line = "wm eval: --protocol training: nobody can play data/made, so the run has no games.\n"
    assert capsys.readouterr().err == line
    assert not Run.open(tmp_path / "run", create=False).versions("evaluation")
    assert sha256(latest(tmp_path / "run", "controller"))


@pytest.mark.parametrize("episodes", [0, 2])
def test_held_out_episodes_are_never_said_to_be_left_out(
    episodes: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    importing = Importing(str(folder), held_out=episodes)
    texts = [*LOOP, 'evaluation.measures=["generation", "held-out"]']
    texts += importing.defaults(tmp_path / "run", texts)
    context = open_context(tmp_path / "run", None, texts, create=True)
    start = import_experience(context, importing)
    capsys.readouterr()
    loop._describe(context, start)
    said = capsys.readouterr().err
    assert "imported data have no states to measure generation by: left out" in said
    assert ("dreams are not measured" in said) == (episodes == 0)


def test_errors_are_those_of_each_part() -> None:
    real = torch.tensor([[[0, 255], [51, 0]]], dtype=torch.uint8)
    guess = torch.tensor([[[255, 255], [0, 0]]], dtype=torch.uint8)
    assert held_out._error(Image(1, 2, 1), guess, real)[0].tolist() == pytest.approx([0.5, 0.02])
    numbers = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert held_out._error(Vector(2), numbers + 2, numbers)[0].tolist() == [4, 4]
    assert held_out._error(Categories((9, 9)), numbers.int(), torch.tensor([[[1, 2], [3, 5]]]))[0].tolist() == [0, 0.5]
    error, counts = np.array([[1.0, 3.0], [5.0, 9.0], [2.0, 2.0]]), np.array([[1, 1], [1, 0], [0, 0]], bool)
    over = held_out._over_episodes(error, counts, np.array([0, 0, 1]))
    assert over[0] == 3 and np.isnan(over[1])


def test_windows_cover_episodes_and_score_the_last_reward(folder: Path, tmp_path: Path) -> None:
    runs(tmp_path / "run", folder, "run.epochs=1")
    from wmcli.assemble import load_world_model

    context = opened(tmp_path / "run")
    model = load_world_model(latest(tmp_path / "run", "dynamics"), context.machine)
    replay = context.held_out(latest(tmp_path / "run", "experience"), "test")
    windows = held_out._windows(model, replay, 99)
    size, observed = windows.rows.shape[1], windows.context
    assert (observed, size) == (2, 6)  # of TINY
    for number in (0, 1):
        time = len(made(12).read(10 + number))
        mine = windows.episode == number
        begins = range(0, time + 1 - observed, size)
        assert mine.sum() == len(begins)
        assert windows.known[mine].sum() == sum(min(size, time - begin) for begin in begins)
        assert windows.taken[mine][-1].sum() == min(size, time + 1 - begins[-1])
    assert len(held_out._windows(model, replay, 1).rows) == (windows.episode == 0).sum()


class StandsStill:
    """A world model of one number that imagines zeros, and so errs by the square of each frame."""

    context, decodes, learns_rewards, observation_space = 1, "latents", True, Vector(1)
    settings = SimpleNamespace(longest_imagination=3)
    encode = decode = learned_reward = staticmethod(lambda given: given)

    def observe(self, latent: Tensor, action: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        return latent, latent[:, -1]

    def imagine(self, state: Tensor, action: Tensor) -> tuple[Any, Tensor]:
        return SimpleNamespace(latent=0 * state, reward=torch.zeros(len(state))), state

    def features(self, state: Tensor) -> Tensor:
        return state


def two_episodes(closing: bool) -> Replay:
    """Of 5 and of 2 actions. Frames are the roots of their errors; zeros open the windows, of 3 frames each."""
    reward = np.array([1, 0, 0, 0, 5, 0, 7], np.float32)
    ends = np.isin(np.arange(7), (4, 6))
    replay = Replay("cpu", closing=closing)
    replay.extend(
        {"observation": np.sqrt(np.array([[0], [1], [2], [0], [3], [0], [10]], np.float32)), "reward": reward}
        | {"closing": np.sqrt(np.array([[4], [20]], np.float32)), "action": np.zeros(7, np.int64)}
        | {"first": np.isin(np.arange(7), (0, 5)), "terminated": ends, "truncated": ends & False}
        | {"lives": np.full(7, -1, np.int16), "stream": np.zeros(7, np.int16)}
    )
    return replay


@pytest.mark.parametrize(
    ("closing", "errors", "last"),
    [(True, (2.5, 15.0), (3.0, 20.0)), (False, (2.0, 10.0), (2.0,))],
    ids=["closing frames", "without"],
)
def test_every_episode_counts_alike_in_errors_and_curves(
    closing: bool, errors: tuple[float, ...], last: tuple[float, ...]
) -> None:
    """Two windows of the first episode, errors 1 and 2, 3 and 4, and one of the second, 10 and 20.

    The frames behind the last actions, of errors 4 and 20, are known with closing frames alone. Their rewards, 5 and 7,
    are those of the last actions either way, and the closing frames have none.
    """
    model: Any = StandsStill()
    replay, context = two_episodes(closing), SimpleNamespace(progress=Progress(quiet=True), pictures=False)
    windows = held_out._windows(model, replay, 9)
    assert windows.episode.tolist() == [0, 0, 1] and windows.rows.shape == (3, 3) and windows.taken.all()
    scores = held_out._measure(context, model, replay, windows, None)
    assert scores["errors"]["generation"]["value"] == pytest.approx(np.mean(errors))
    curve = scores["curves"]["generation"]
    assert curve["mean"] == pytest.approx([(2 + 10) / 2, np.mean(last)])
    assert curve["high"][0] == pytest.approx(6 + 1.96 * np.std([2, 10], ddof=1) / np.sqrt(2))
    assert scores["reward"]["error"]["value"] == pytest.approx(((1 + 0 + 0 + 5) / 4 + (0 + 7) / 2) / 2)
    constant = (1 + 0 + 0 + 5 + 0 + 7) / 6
    off = [np.mean([abs(constant - reward) for reward in rewards]) for rewards in ((1, 0, 0, 5), (0, 7))]
    assert scores["reward"]["constant"]["value"] == pytest.approx(np.mean(off))


@pytest.mark.parametrize("closing", [True, False])
def test_episodes_shorter_than_the_context_leave_a_known_frame_to_imagine(closing: bool) -> None:
    model: Any = StandsStill()
    model.context, model.settings = 8, SimpleNamespace(longest_imagination=9)
    windows = held_out._windows(model, two_episodes(closing), 9)
    assert windows.context == (5 if closing else 4)
    assert windows.known[:, windows.context :].sum() == 1


def test_an_episode_that_diverged_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = StandsStill()
    off = torch.tensor([[math.nan], [0], [0]])  # of the first of three windows
    monkeypatch.setattr(
        StandsStill,
        "imagine",
        lambda self, state, action: (
            SimpleNamespace(latent=0 * state + off, reward=torch.zeros(len(state))),
            state,
        ),
    )
    replay, context = two_episodes(True), SimpleNamespace(progress=Progress(quiet=True), pictures=False)
    windows = held_out._windows(model, replay, 9)
    scores = held_out._measure(context, model, replay, windows, None)
    assert scores["errors"]["generation"] == {"value": None, "low": None, "high": None, "diverged": 1}
    assert scores["curves"]["generation"]["mean"] == [None, None]
    assert "diverged" not in scores["errors"]["reconstruction"]
    about = {"episodes": 2, "errors": scores["errors"], "reward": scores["reward"]}
    said = held_out.summarize(SimpleNamespace(name="evaluation@1", metrics=about))
    assert "2 held-out episodes: generation diverged in 1, reconstruction 0 (" in said


@pytest.mark.parametrize("closing", [True, False])
def test_a_film_shows_the_windows_that_have_imagined_frames(closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without closing frames the second window of an episode of 4 actions is its last frame, and no film of one."""
    drawn: list[Any] = []
    monkeypatch.setattr(held_out, "beside", lambda model, frames, action, context: drawn.append(frames))
    monkeypatch.setattr(held_out, "write_side_by_side", lambda folder, pictures: None)
    for name in ("error_curves", "write_figure"):
        monkeypatch.setattr(held_out, name, lambda *given, **named: None)
    replay = Replay("cpu", closing=closing)
    ends = np.isin(np.arange(8), (3, 7))
    replay.extend(
        {"observation": np.arange(8, dtype=np.float32)[:, None], "action": np.zeros(8, np.int64)}
        | {"closing": np.full((2, 1), 9, np.float32), "reward": np.zeros(8, np.float32)}
        | {"first": np.isin(np.arange(8), (0, 4)), "terminated": ends, "truncated": ends & False}
        | {"lives": np.full(8, -1, np.int16), "stream": np.zeros(8, np.int16)}
    )
    context: Any = SimpleNamespace(settings=SimpleNamespace(environment=SimpleNamespace(id="numbers")))
    work: Any = SimpleNamespace(payload=Path())
    windows = held_out._windows(StandsStill(), replay, 9)
    held_out._draw(context, StandsStill(), replay, windows, {}, work)
    shown = [[0, 1, 2], [4, 5, 6]]
    assert [row.flatten().tolist() for row in drawn[0]] == ([[0, 1], [3, 9], [4, 5]] if closing else shown)


@pytest.mark.slow
@pytest.mark.parametrize("spaces", [SPACES["vector"], SPACES["parts"]], ids=["vector", "parts"])
@pytest.mark.parametrize("system", ["drama", "unizero", "rem"])
def test_other_spaces_and_systems_run_from_data(system: str, spaces: Spaces, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def read(number: int) -> Episode:
        last = np.arange(14) == 13
        observation = map_parts(lambda part: drawn(part, 15, rng), spaces.observation)
        return Episode(observation, drawn(spaces.action, 14, rng), last.astype(np.float32), last, ~last & False)

    write_recording(Recording("made", "wm", spaces, 8, read), "npz", tmp_path / "made")
    preset, texts = SYSTEMS[system]
    texts = [text for text in texts if not text.startswith(("environment", "collect"))]
    texts += ["run.epochs=1", "run.dynamics_after=0", "run.controller_after=0", "run.tokenizer_after=0"]
    texts += ["tokenizer.updates=2"] * (system == "rem") + ["dynamics.updates=2", "controller.updates=2"]
    importing = Importing(str(tmp_path / "made"), held_out=2)
    texts += importing.defaults(tmp_path / "run", texts)
    evaluation = loop.run_loop(open_context(tmp_path / "run", preset, texts, create=True, quiet=True), importing)
    metrics = evaluation.metrics
    names = sorted(parts_of(spaces.observation))
    decodes = system != "unizero"
    expected = [f"{kind} {name}".rstrip() for kind in held_out.KINDS for name in names] if decodes else []
    assert sorted(metrics["errors"]) == sorted(expected) and metrics["reward"]["constant"]["value"] > 0
    assert held_out.table([evaluation])[0]["reward"] and (evaluation.path / "errors.png").exists() == decodes


def drawn(space: Any, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Values (rows, ...) of a part or of actions."""
    match space:
        case Image():
            return rng.integers(0, 256, (rows, *space.shape), dtype=np.uint8)
        case Vector():
            return rng.normal(size=(rows, *space.shape)).astype(np.float32)
        case Categories():
            return rng.integers(0, space.sizes, (rows, *space.shape)).astype(np.int32)
    return draw_actions(space, (rows,), rng)
