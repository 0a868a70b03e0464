"""Memory tasks from the script to the table: what is kept, how training goes on after a death, and what is measured.

Models are tiny and the tasks the smallest there are; measures are held to models whose answers are known.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import TINY_S4WM, Killed, copied, kill_at, latest, sha256, with_kinds

from wmcli.artifacts import Artifact, Run
from wmcli.assemble import build_world_model, load_world_model
from wmcli.cli.main import run as command
from wmcli.config import preset_names
from wmcli.envs import EnvironmentSettings, Streams, tiles
from wmcli.envs.memory_task import Task, play
from wmcli.envs.multi_doors_keys import TOGGLE
from wmcli.envs.rooms import TELEPORT
from wmcli.envs.tasks import TASKS
from wmcli.errors import ArtifactError, DivergedError, MachineError, UsageError
from wmcli.experience import read_segment
from wmcli.experience.load import HELD_OUT, SEGMENT
from wmcli.memory import Memory
from wmcli.metrics import memory_tasks as metrics
from wmcli.metrics.statistics import bootstrap_share
from wmcli.report.images import _BAR as BAR
from wmcli.report.images import _GAP as GAP
from wmcli.report.images import _ROW_GAP as ROW_GAP
from wmcli.report.images import _RULE as RULE
from wmcli.report.images import Phase
from wmcli.settings import resolve
from wmcli.stages import memory_strips as stage_strips
from wmcli.stages import memory_tasks as stage
from wmcli.stages.checks import check_memory, check_rows
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.loop import run_loop
from wmcli.stages.measures import check_measures, measures_of
from wmcli.stages.memory_table import table
from wmcli.stages.opening import open_context
from wmcli.trainers.batches import build_segment_sampler
from wmcli.trainers.best_weights import BestWeights
from wmcli.trainers.dynamics import world_model_update
from wmcli.training.checkpoint import TRAINING, WEIGHTS, load_tensors

SMALL = [
    *TINY_S4WM,
    "environment.id=wm/DistractingMemory-20-v0",
    "collect.episodes=6",
    "collect.validation=3",
    "collect.test=5",
    "dynamics.head_width=9",
    "dynamics.sequence_length=50",
    "dynamics.updates=5",
    "dynamics.validate_every=2",
    "dynamics.warmup=2",
    "training.log_every=1",
]
RSSM = [
    "dynamics.posterior=recurrent",
    "dynamics.rows=streams",
    "dynamics.sequence_length=17",
    "dynamics.context=3",
    "backbone.kind=dreamer-gru",
]
DOORS = ["environment.id=wm/MultiDoorsKeys-2-v0", "dynamics.sequence_length=150"]
ROOMS = [
    "environment.id=wm/TwoRoomsSmallTeleport-v0",
    "environment.size=32",
    "tokenizer.strides=[2, 2]",
    "dynamics.reward=none",
    "dynamics.sequence_length=100",
]


def opened(folder: Path, *overrides: str, new: bool = False, pictures: bool = False, **how: bool) -> Context:
    given = with_kinds(SMALL, *overrides) if new else overrides
    context = open_context(folder, "memory-small" if new else None, given, create=new, quiet=True, **how)
    context.pictures = pictures
    return context


def begun(folder: Path, *overrides: str) -> Path:
    """A run with its experience."""
    collect(opened(folder, *overrides, new=True))
    return folder


@pytest.fixture(scope="module")
def memory_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = begun(tmp_path_factory.mktemp("memory") / "run")
    train_dynamics(opened(folder))
    return folder


# -- collecting by the script -----------------------------------------------------------------------------------------


def test_scripted_experience_has_whole_episodes_and_compact_states(memory_run: Path) -> None:
    experience = latest(memory_run, "experience")
    task = TASKS["wm/DistractingMemory-20-v0"]
    arrays = read_segment(experience.path / SEGMENT)
    time = task.context + task.query
    assert "observation" not in arrays and arrays["sketch"].shape == (6 * time, 25)
    assert np.flatnonzero(arrays["first"]).tolist() == list(range(0, 6 * time, time))
    assert np.flatnonzero(arrays["terminated"]).tolist() == list(range(time - 1, 6 * time, time))
    assert not arrays["truncated"].any()
    about = json.loads((experience.path / SEGMENT / "zarr.json").read_text())["attributes"]
    again = play(task, np.array(about["seeds"]))
    assert np.array_equal(again.compact_states.reshape(-1, 25), arrays["sketch"])
    memory = opened(memory_run).experience(experience)
    assert np.array_equal(memory.observation.numpy(), task.draw(arrays["sketch"]))
    assert experience.metrics["episodes"] == 6 and experience.metrics["test"] == 5


def test_no_episode_is_in_two_parts(memory_run: Path) -> None:
    experience = latest(memory_run, "experience")
    folders = [experience.path / name for name in (SEGMENT, *HELD_OUT.values())]
    seeds = [json.loads((folder / "zarr.json").read_text())["attributes"]["seeds"] for folder in folders]
    assert [len(part) for part in seeds] == [6, 3, 5] and len(set().union(*seeds)) == 14


def test_more_episodes_are_others_and_the_same_are_not_played_again(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", "collect.validation=0", "collect.test=0")
    first = latest(run, "experience")
    second = collect(opened(run))
    assert second.version == 2 and second.metrics["total_episodes"] == 12
    frames = opened(run).experience(second).observation
    assert len(frames) == 2 * len(read_segment(first.path / SEGMENT)["sketch"])
    assert not torch.equal(*frames.chunk(2))
    with pytest.raises(ArtifactError, match="no validation episodes"):
        train_dynamics(opened(run))


@pytest.mark.parametrize(
    "overrides",
    [
        ["dynamics.rows=episodes"],
        ["dynamics.rows=streams", "dynamics.sequence_length=17"],
        ["dynamics.rows=windows", "dynamics.sequence_length=episode"],
        ["dynamics.rows=windows", "dynamics.sequence_length=17", "dynamics.batch=4"],
        ["dynamics.rows=windows", "dynamics.sequence_length=17", "dynamics.across_ends=true"],
    ],
    ids=["episodes", "streams", "windows as long as an episode", "windows", "windows across ends"],
)
def test_epochs_learn_so_often_from_each_frame(memory_run: Path, overrides: list[str]) -> None:
    """Counted in the batches themselves, in which padding teaches nothing."""
    context = opened(memory_run, *overrides, "dynamics.context=3", "dynamics.updates=20 epochs")
    settings, replay = context.settings, context.experience(latest(memory_run, "experience"))
    model = build_world_model(settings, None, context.spaces)
    sampler = build_segment_sampler(settings.training, replay, model, np.random.default_rng(0))
    times = np.zeros(len(replay))
    for _ in range(settings.dynamics.updates):
        windows = sampler.batch(settings.dynamics.batch)
        np.add.at(times, windows.rows[windows.valid], 1)
    assert times.mean() == pytest.approx(20, rel=0.01)


def test_epochs_of_few_episodes_are_an_update_at_least(memory_run: Path) -> None:
    few = ["collect.episodes=1", "dynamics.batch=8", "dynamics.updates=1 epoch"]
    assert opened(memory_run, *few).settings.dynamics.updates == 1


@pytest.mark.slow
def test_other_experience_than_is_collected_tells_how_often_it_is_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """5 updates of 2 episodes each: 10 / 6 times from each frame, and 10 / 12 once there are twice as many."""
    learn = ["dynamics.validate_every=0", "dynamics.updates=5"]
    run = begun(tmp_path / "run", "collect.validation=0", "collect.test=0", *learn)
    train_dynamics(opened(run))
    assert "times from each" not in capsys.readouterr().err
    collect(opened(run))
    train_dynamics(opened(run))
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "times from each" in each]
    assert "dynamics.updates = 5 learn 0.833 times from each of the 600 frames of experience@2" in line
    assert "1.67 times" in line and "collect.episodes = 6" in line and line.endswith("dynamics.updates=10")
    few = opened(tmp_path / "few", *learn, "collect.episodes=3", new=True)
    train_dynamics(few, experience=str(run / "experience" / "v0001"))
    assert "set dynamics.updates=10" in capsys.readouterr().err  # of 6 episodes


@pytest.mark.slow
def test_the_script_plays_in_every_round_also_once_there_is_a_controller(tmp_path: Path) -> None:
    rounds = ["run.epochs=2", "run.collect_epochs=2", "run.controller_after=0", "evaluation.measures=[]"]
    sizes = [
        "controller.kind=actor-critic",
        "controller.start=posterior",
        "controller.imagination_horizon=2",
        "controller.batch=3",
        "controller.updates=1",
        "evaluation.episodes=2",
    ]
    run_loop(opened(tmp_path / "run", *rounds, *sizes, "dynamics.updates=1", new=True, bind=True))
    run = Run.open(tmp_path / "run", create=False)
    assert run.versions("experience") == run.versions("controller") == [1, 2]


def test_the_script_through_gymnasium_shows_the_same_frames(memory_run: Path) -> None:
    """The environment that `wm collect` plays otherwise, under the actions that the script took."""
    streams = Streams(EnvironmentSettings(id="wm/MultiDoorsKeys-2-v0", size=40), train=True, seed=3)
    task = TASKS["wm/MultiDoorsKeys-2-v0"]
    words = np.random.SeedSequence((3, 0, 0)).generate_state(1)
    seed = np.random.Generator(np.random.PCG64(np.random.SeedSequence(int(words[0]) >> 1))).integers(2**31, size=1)
    played = play(task, seed)
    frames = task.draw(played.compact_states[0])
    for t, action in enumerate(played.action[0]):
        assert np.array_equal(streams.observation[0], frames[t])
        transition = streams.step(np.array([action]))
        assert transition.reward[0] == played.reward[0, t]
    assert transition.truncated[0] and streams.first[0]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["environment.id=wm/Catch-v0"], "has no script"),
        (["environment.size=64"], "environment.size=40"),
    ],
)
def test_environments_without_a_script_are_refused(tmp_path: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        begun(tmp_path / "run", *overrides)


def test_nobody_plays_on_behind_a_script(memory_run: Path, tmp_path: Path) -> None:
    run = copied(memory_run, tmp_path / "run")
    with pytest.raises(ArtifactError, match="played by a script"):
        collect(opened(run, "collect.policy=learned", "collect.steps=5"))
    with pytest.raises(UsageError, match="--steps"):
        collect(opened(run), steps=5)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], RSSM], ids=["episodes", "streams"])
@pytest.mark.parametrize("more", [False, True])
def test_killed_at_every_checkpoint_it_has_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], more: bool
) -> None:
    """Streams, what they carry, the schedule and the best weights so far are all in the checkpoint."""
    run = begun(tmp_path / "run", *overrides)
    train_dynamics(opened(run))
    how = {"more": more, "force": not more}
    whole = train_dynamics(opened(copied(run, tmp_path / "whole"), **how))
    eager = "training.checkpoint_seconds=0"
    deaths = 0
    while True:
        with monkeypatch.context() as patch:
            kill_at(patch, "checkpoint", 1)
            try:
                pieces = train_dynamics(opened(run, eager, **how))
                break
            except Killed:
                deaths += 1
        assert deaths < 20
    assert deaths == 5
    assert sha256(pieces) == sha256(whole)
    assert sha256(pieces, "training.safetensors") == sha256(whole, "training.safetensors")
    assert pieces.metrics["best_update"] == whole.metrics["best_update"]


@pytest.mark.parametrize(("overrides", "eps"), [([], 1e-8), (["dynamics.eps=1e-5"], 1e-5)])
def test_the_optimizer_has_the_eps_of_the_settings(tmp_path: Path, monkeypatch, overrides: list, eps: float) -> None:
    found: list[float] = []

    def build(machine, world_model, optimizer, *rest, **how):
        found.extend(group["eps"] for group in optimizer.param_groups)
        return world_model_update(machine, world_model, optimizer, *rest, **how)

    monkeypatch.setattr("wmcli.trainers.dynamics.world_model_update", build)
    train_dynamics(opened(begun(tmp_path / "run", *overrides, "dynamics.updates=1")))
    assert len(found) > 1 and set(found) == {eps}


def test_the_weights_of_the_lowest_validation_loss_are_taken() -> None:
    module = torch.nn.Linear(1, 1)
    losses = iter([3.0, 1.0, 2.0, 1.0])
    best, again = (BestWeights(module, lambda: next(losses)) for _ in range(2))
    best.restore()  # nothing was measured yet
    for update in range(1, 5):
        module.weight.data.fill_(update)
        best.validate(update)
    metrics = {"validation_loss": 1.0, "best_validation_loss": 1.0, "best_update": 2}
    assert best.metrics() == metrics
    again.load(best.state())
    assert again.metrics() == metrics
    again.restore()
    assert module.weight.item() == 2


def test_training_goes_on_from_the_last_weights_and_publishes_the_best(tmp_path: Path, monkeypatch) -> None:
    run = begun(tmp_path / "run")
    losses = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr("wmcli.trainers.dynamics.validation_loss", lambda *about, **how: lambda: next(losses))
    published = train_dynamics(opened(run))
    shorter = train_dynamics(
        opened(run, "dynamics.updates=2", "dynamics.validate_every=0", "dynamics.schedule=constant")
    )
    assert published.metrics["best_update"] == 2 and published.metrics["validation_loss"] == 3.0
    name = "model/dynamics/tokenizer.encoder.0.weight"
    best, last, two = (
        load_tensors(artifact.file(file))[0][name]
        for artifact, file in ((published, WEIGHTS), (published, TRAINING), (shorter, WEIGHTS))
    )
    assert torch.equal(best, two) and not torch.equal(best, last)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_weights_are_selected_where_no_validation_loss_is_finite(value: float) -> None:
    module = torch.nn.Linear(1, 1)
    losses = iter([value, 2.0, value])
    best, again = (BestWeights(module, lambda: next(losses)) for _ in range(2))
    best.validate(1)
    again.load(best.state())
    for each in (best, again):
        with pytest.raises(DivergedError, match="no validation loss was finite.*dynamics.validate_every=0"):
            each.restore()
    again.validate(2)
    module.weight.data.fill_(9)
    again.validate(3)
    again.restore()
    assert again.metrics()["best_update"] == 2 and module.weight.item() != 9


def test_training_without_a_finite_validation_loss_publishes_nothing(
    memory_run: Path, tmp_path: Path, monkeypatch
) -> None:
    run = copied(memory_run, tmp_path / "run")
    monkeypatch.setattr("wmcli.trainers.dynamics.validation_loss", lambda *about, **how: lambda: float("nan"))
    with pytest.raises(DivergedError, match="Go on with: wm train-dynamics .* dynamics.learning_rate="):
        train_dynamics(opened(run, "dynamics.updates=1"))
    assert Run.open(run, create=False).versions("dynamics") == [1]


def test_an_episode_longer_than_a_row_is_refused(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"dynamics.sequence_length = 40.*an episode of 50 frames.*set dynamics.sequence_length=50"
    ):
        train_dynamics(opened(run, "dynamics.sequence_length=40"))


# -- measuring --------------------------------------------------------------------------------------------------------


def model_of(folder: Path) -> tuple[Context, Artifact]:
    return opened(folder), latest(folder, "dynamics")


def test_generation_is_the_error_of_imagined_frames_and_reconstruction_of_seen_ones(
    memory_run: Path, tmp_path: Path
) -> None:
    """With latents that are never drawn both are what a loop over frames finds."""
    run = copied(memory_run, tmp_path / "run")
    context, dynamics = model_of(run)
    evaluation = stage.evaluate_memory(context, "generation")
    model = load_world_model(dynamics, context.machine)
    memory = context.held_out(latest(run, "experience"), "test")
    frames, action = memory.observation.view(5, 50, 40, 40, 3), memory.action.view(5, 50)
    first = torch.zeros(5, 39, dtype=torch.bool)
    first[:, 0] = True
    _, state = model.observe(model.encode(frames[:, :39]), action[:, :39], first, likeliest=True)
    errors = []
    for t in range(38, 49):
        _, state = model.imagine(state, action[:, t], likeliest=True)
        image = model.images(model.features(state)).permute(0, 2, 3, 1)
        errors.append((image - frames[:, t + 1] / 255).square().flatten(1).sum(1))
    want = torch.stack(errors, 1).mean().item()
    found = evaluation.metrics
    assert found["generation_likeliest"]["value"] == pytest.approx(want, rel=1e-4)
    assert len(found["curve"]["generation"]["mean"]) == 11
    assert np.mean(found["curve"]["generation"]["mean"]) == pytest.approx(found["generation"]["value"])
    assert found["reconstruction"]["value"] != found["generation"]["value"]


@pytest.mark.slow
def test_a_rerun_over_fewer_episodes_is_compared_with_warnings(
    memory_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [copied(memory_run, tmp_path / name) for name in ("one", "two")]
    for run, episodes in zip(runs, (5, 2), strict=True):
        stage.evaluate_memory(opened(run, f"evaluation.episodes={episodes}"), "generation")
    capsys.readouterr()
    assert command(["compare", *map(str, runs), "--protocol", "generation", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"][0]["runs"] == 2
    assert printed.err.splitlines() == [
        f"warning: episodes differ: 5 ({runs[0]}), 2 ({runs[1]})",
        f"warning: {runs[0]}, {runs[1]} have the same settings and the same seed, so they are no independent samples.",
    ]


def test_frames_seen_are_not_imagined(memory_run: Path) -> None:
    """All frames known: nothing of the query depends on the prior."""
    context, dynamics = model_of(memory_run)
    model = load_world_model(dynamics, context.machine)
    memory = context.held_out(latest(memory_run, "experience"), "test")
    frames, action = memory.observation.view(5, 50, 40, 40, 3), memory.action.view(5, 50)
    seen = stage.roll_out(model, frames, action, 50, likeliest=True)
    with torch.no_grad():
        for parameter in model.prior_head.parameters():
            parameter.zero_()
    assert torch.equal(seen, stage.roll_out(model, frames, action, 50, likeliest=True))
    assert not torch.equal(seen, stage.roll_out(model, frames, action, 39, likeliest=True))


def test_reward_accuracy_counts_the_last_step(memory_run: Path, tmp_path: Path, monkeypatch) -> None:
    """Heads that know the answer, its contrary, or only one of them."""
    run = copied(memory_run, tmp_path / "run")
    context, _ = model_of(run)
    memory = context.held_out(latest(run, "experience"), "test")
    true = memory.reward.view(5, 50)[:, 48]
    for name, told, want in (
        ("right", true, 1.0),
        ("wrong", 1 - true, 0.0),
        ("ones", torch.ones(5), true.mean().item()),
    ):
        monkeypatch.setattr(
            "wmcli.world_models.latent.LatentWorldModel.arrival_reward", lambda self, features, told=told: told
        )
        found = stage.evaluate_memory(opened(run, force=True), "reward").metrics
        assert found["inference"]["value"] == found["imagination"]["value"] == pytest.approx(want), name
    assert found["rewarded"] == pytest.approx(true.mean().item())


@pytest.mark.parametrize(
    ("picture", "state", "whole"), [("true", 1.0, 1.0), ("other color", 1.0, 0.0), ("open", None, None)]
)
def test_doors_are_read_off_the_picture(tmp_path: Path, monkeypatch, picture: str, state: float, whole: float) -> None:
    run = begun(tmp_path / "run", *DOORS)
    train_dynamics(opened(run))
    context = opened(run)
    compact_states = read_segment(latest(run, "experience").path / HELD_OUT["test"])["sketch"].reshape(5, -1, 25)
    task = TASKS["wm/MultiDoorsKeys-2-v0"]
    codes = compact_states[:, task.context :].copy()
    doors = np.isin(codes, tiles.DOORS)
    colors = len(tiles.COLORS)
    shown = codes.copy()
    if picture == "other color":
        kind, color = np.divmod(codes[doors] - tiles.LOCKED, colors)
        shown[doors] = tiles.LOCKED + kind * colors + (color + 1) % colors
    elif picture == "open":
        shown[doors] = tiles.OPEN + (codes[doors] - tiles.LOCKED) % colors
    drawn = torch.from_numpy(tiles.draw(shown).reshape(-1, 40, 40, 3)).permute(0, 3, 1, 2) / 255
    parts = iter(drawn.split(stage.FRAMES))
    monkeypatch.setattr("wmcli.world_models.latent.LatentWorldModel.images", lambda self, features: next(parts))
    found = stage.evaluate_memory(context, "doors").metrics
    counts = context.held_out(latest(run, "experience"), "test").action.view(5, -1).numpy() != task.padding
    counted = doors & counts[:, task.context - 1 : -1, None]
    assert found["number"] == counted.sum() > 50
    if state is None:  # every door is drawn open: right as often as one is
        state = whole = (codes[counted] >= tiles.OPEN).mean()
        assert 0.05 < state < 0.95
    for key, value in (("state", state), ("whole", whole)):
        assert found[key]["value"] == pytest.approx(value)
    hits, number = (part.reshape(5, -1).sum(1) for part in (counted & (codes >= tiles.OPEN), counted))
    low_high = [*bootstrap_share(hits, number, np.random.default_rng(0))[1:]] if picture == "open" else [state] * 2
    assert [found["state"][part] for part in ("low", "high")] == pytest.approx(low_high)


def test_recall_scores_the_same_frames_for_every_k(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", *ROOMS)
    train_dynamics(opened(run))
    found = stage.evaluate_memory(opened(run), "recall").metrics
    task = TASKS["wm/TwoRoomsSmallTeleport-v0"]
    ks = [k for k in stage.RECALLED if k + 1 < task.query]
    assert set(found["recall"]) == {str(k) for k in ks} and found["frames_scored"] == task.query - ks[-1] - 1
    row = table([latest(run, "evaluation")])[0]
    assert row["task"] == "TwoRoomsSmallTeleport" and f"k = {ks[-1]}" in row


def test_films_end_with_the_shortest_episode_and_strips_with_their_own(tmp_path: Path, monkeypatch) -> None:
    """What is behind is padding: the last frame again."""
    run = begun(tmp_path / "run", *DOORS)
    train_dynamics(opened(run))
    films: list[np.ndarray] = []
    strips: list[list[int]] = []
    monkeypatch.setattr(stage, "write_webp", lambda path, frames, fps: films.append(frames))
    monkeypatch.setattr(stage, "strip", lambda rows, steps, phases: strips.append(steps) or np.zeros((8, 8, 3), "u1"))
    context, task = opened(run, pictures=True), TASKS["wm/MultiDoorsKeys-2-v0"]
    stage.evaluate_memory(context, "generation")
    action = context.held_out(latest(run, "experience"), "test").action.view(5, -1).numpy()
    ends = [1 + np.flatnonzero(row[:-1] != task.padding).max() + 1 for row in action[: stage.FILMED]]
    assert len(set(ends)) > 1 and max(ends) < task.context + task.query
    assert len(films[0]) == min(ends) and max(strips[0]) == ends[0] - 1


@pytest.mark.parametrize(
    ("measure", "line"),
    [("recall", "--protocol recall: needs a task with a teleport"), ("doors", "a task with doors")],
)
def test_measures_that_do_not_fit_are_refused(memory_run: Path, measure, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        stage.evaluate_memory(opened(memory_run), measure)


def test_a_backbone_without_positions_for_an_episode_is_refused(tmp_path: Path) -> None:
    """Episodes have 50 frames. It may learn from shorter windows, and cannot read what it would be measured by."""
    short = ["backbone.kind=transformer", "backbone.heads=2", "dynamics.rows=windows"]
    short += ["dynamics.sequence_length=12"]
    run = begun(tmp_path / "run", *short)
    with pytest.raises(UsageError, match=r"dynamics.sequence_length = 12: .* 50 frames"):
        train_dynamics(opened(run))
    train_dynamics(opened(run, "dynamics.validate_every=0"))
    with pytest.raises(UsageError, match=r"dynamics.sequence_length = 12: .* 49 frames"):
        stage.evaluate_memory(opened(run), "generation")


# -- what `wm run` measures -------------------------------------------------------------------------------------------


TINY_PAPER = [  # of the presets of the paper, none of whose networks are small
    *TINY_S4WM,
    "dynamics.head_width=9",
    "dynamics.updates=2",
    "dynamics.validate_every=1",
    "collect.episodes=3",
    "collect.validation=1",
    "collect.test=2",
]
SIZES_2D = [f"wm/DistractingMemory-{width}-v0" for width in (100, 200, 400)]
SIZES_2D += [f"wm/MultiDoorsKeys-{keys}-v0" for keys in (3, 5, 7)]
SIZES_3D = [f"wm/{rooms}Rooms{kind}-v0" for rooms in ("Two", "Four", "Ten") for kind in ("", "Teleport")]
SIZES_3D += ["wm/Maze-9-v0", "wm/Maze-15-v0"]
ADVERTISED = {  # by `about`, the comments of a preset, README and docs/
    **dict.fromkeys(("s4wm-2d", "rssm-tbtt-2d", "tssm-xl-2d"), SIZES_2D),
    **dict.fromkeys(("s4wm-3d", "s4wm-3d-short", "s4wm-full-posterior", "s4wm-no-mlp", "s5wm"), SIZES_3D),
    **dict.fromkeys(("rssm-tbtt-3d", "tssm-xl-3d", "tssm-xl-3d-256", "tssm-xl-3d-512"), SIZES_3D),
    "memory-small": [f"wm/DistractingMemory-{width}-v0" for width in (12, 20)],
    "doors-small": ["wm/MultiDoorsKeys-2-v0"],
    "rooms-small": ["wm/TwoRoomsSmallTeleport-v0", "wm/TwoRoomsSmall-v0"],
}


def fitting(task: str) -> tuple[str, ...]:
    beside = {"Distracting": "reward", "MultiDoors": "doors", "Teleport": "recall"}
    return ("generation", *(measure for word, measure in beside.items() if word in task))


def test_every_preset_of_a_memory_task_is_looked_at() -> None:
    scripted = {name for name in preset_names() if resolve(name).collect.policy != "learned"}
    assert scripted == set(ADVERTISED)
    measured = {name for name in preset_names() if name not in scripted and resolve(name).evaluation.measures}
    assert measured == {"gridworld", "gridworld-long"}


@pytest.mark.parametrize(("preset", "task"), [(name, task) for name, tasks in ADVERTISED.items() for task in tasks])
def test_presets_measure_with_protocols_that_fit_their_tasks(preset: str, task: str) -> None:
    """A row holds an episode of each, and one that is too short is refused with the setting that makes it fit."""
    settings = resolve(preset, [f"environment.id={task}"])
    check_rows(settings)
    frames = TASKS[task].context + TASKS[task].query
    if settings.dynamics.rows == "episodes":
        with pytest.raises(UsageError, match=f"set dynamics.sequence_length={frames},"):
            check_rows(resolve(preset, [f"environment.id={task}", f"dynamics.sequence_length={frames - 1}"]))
    check_measures(settings)
    assert measures_of(settings) == fitting(task)
    assert settings.environment.size == TASKS[task].side


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("s4wm-2d", []),
        ("rssm-tbtt-2d", []),
        ("tssm-xl-2d", ["backbone.heads=2"]),
    ],
)
@pytest.mark.slow
def test_a_preset_of_the_paper_runs_on_another_task_of_its_own(
    tmp_path: Path, monkeypatch, preset: str, overrides: list[str]
) -> None:
    drawn_here = ("memory_tasks._write_film", "memory_tasks.write_curves")
    for picture in (*drawn_here, "dynamics.write_imagination", "train.write_figure"):
        monkeypatch.setattr(f"wmcli.stages.{picture}", lambda *_: None)
    small = [each for each in TINY_PAPER if preset.startswith("s4wm") or not each.startswith("backbone.state_size=")]
    given = ["environment.id=wm/MultiDoorsKeys-3-v0", *small, *overrides]
    context = open_context(tmp_path / "run", preset, given, create=True, quiet=True, bind=True)
    run_loop(context)
    made = Run.open(tmp_path / "run", create=False).artifacts("evaluation")
    assert [evaluation.metrics["protocol"] for evaluation in made] == ["generation", "doors"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["environment.id=wm/MultiDoorsKeys-2-v0", "dynamics.sequence_length=140"],
            "evaluation.measures holds reward, .*set evaluation.measures=auto, here generation, doors",
        ),
        (["dynamics.reward=none"], "reward, .* dynamics.reward = none: set evaluation.measures=auto, here generation"),
        (["environment.id=wm/Catch-v0"], "generation, which needs a memory task.*set evaluation.measures=\\[\\]"),
        (
            ["dynamics.kind=token", "tokenizer.kind=vq", "backbone.width=256"],
            "dynamics.kind = token: set evaluation.measures=\\[\\]",
        ),
        (["collect.test=0"], "test episodes, and collect.test = 0: set collect.test=100, or evaluation.measures="),
        (["collect.validation=0"], "collect.validation = 0: set .*, or dynamics.validate_every=0"),
        (["collect.policy=learned"], "collect.policy = learned holds none back: set collect.policy=scripted"),
        (["dynamics.sequence_length=49"], "dynamics.sequence_length = 49: .*set dynamics.sequence_length=50"),
    ],
)
def test_failures_after_training_are_refused_before_it(tmp_path: Path, overrides: list[str], line: str) -> None:
    given = with_kinds(SMALL, 'evaluation.measures=["generation", "reward"]', *overrides)
    context = open_context(tmp_path / "run", "memory-small", given, create=True, quiet=True, bind=True)
    with pytest.raises(UsageError, match=line) as caught:
        run_loop(context)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_collecting_refuses_episodes_that_no_row_holds(tmp_path: Path) -> None:
    """`wm collect` as well as `wm run`: else all episodes would be played before `wm train-dynamics` says so."""
    context = opened(tmp_path / "run", "dynamics.sequence_length=49", new=True)
    with pytest.raises(UsageError, match="dynamics.sequence_length = 49: .*set dynamics.sequence_length=50"):
        collect(context)
    assert not (tmp_path / "run").exists()


def test_more_frames_than_fit_in_memory_are_refused_before_they_are_played(tmp_path: Path, monkeypatch) -> None:
    """An episode has 50 frames of 40 x 40 pixels: 240,000 bytes."""
    context = opened(tmp_path / "run", "collect.episodes=100", new=True, bind=True)
    monkeypatch.setattr("wmcli.stages.checks.machine_memory", lambda: Memory(0, 23_999_999, is_limited=False))
    with pytest.raises(MachineError, match="collect.episodes = 100: .* lower collect.episodes, to 49 for instance"):
        run_loop(context)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("wmcli.stages.checks.machine_memory", lambda: Memory(0, 24_000_000, is_limited=False))
    check_memory(context.settings)
    check_memory(resolve("rem", ["collect.steps=1000000"]))  # only of episodes by a script


def test_measures_are_refused_only_where_they_are_due(tmp_path: Path) -> None:
    """Before the model is trained there is nothing to measure."""
    given = [*SMALL, 'evaluation.measures=["doors"]', "run.dynamics_after=1"]
    context = open_context(tmp_path / "run", "memory-small", given, create=True, quiet=True, bind=True)
    assert run_loop(context).kind == "experience"


def test_measures_that_are_named_are_those_made() -> None:
    """Those of runs whose run.toml names them, and the probe, which trains networks of its own."""
    named = 'evaluation.measures=["reward", "generation"]'
    assert measures_of(resolve("s4wm-2d", [named])) == ("reward", "generation")
    maze = resolve("s4wm-3d", ["environment.id=wm/Maze-9-v0", 'evaluation.measures=["probe"]'])
    check_measures(maze)
    assert measures_of(maze) == ("probe",)
    assert measures_of(resolve("rem", ["evaluation.measures=auto"])) == ()


@pytest.mark.slow
def test_films_and_curves_are_written(memory_run: Path, tmp_path: Path) -> None:
    run = copied(memory_run, tmp_path / "run")
    evaluation = stage.evaluate_memory(opened(run, pictures=True), "generation")
    for name in ("imagination.webp", "imagination.png", "generation.png"):
        assert evaluation.file(name).stat().st_size > 1000


# -- the numbers ------------------------------------------------------------------------------------------------------


HEADINGS = BAR + RULE + BAR  # of a strip: the phases, the bars below their names, the time steps


def drawn_strip(
    measure: str, runs: list[Path], file: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, np.ndarray], list[int], list[Phase]]:
    """Evaluate runs and draw their strip. Return its frames by row, the steps of its columns, and its phases."""
    drawn: list[tuple[dict[str, np.ndarray], list[int], list[Phase]]] = []
    strip = stage.strip

    def watched(rows: dict[str, np.ndarray], *, steps: list[int], phases: list[Phase]) -> np.ndarray:
        drawn.append((rows, steps, phases))
        return strip(rows, steps=steps, phases=phases)

    monkeypatch.setattr(stage, "strip", watched)
    stage.draw_strips(measure, [stage.evaluate_memory(opened(run), measure) for run in runs], file)
    (one,) = drawn
    height = HEADINGS + len(one[0]) * (tile_of(one[0]) + ROW_GAP) - ROW_GAP
    with Image.open(file) as picture:
        assert picture.width <= 1600 and picture.height == height
    return one


def tile_of(rows: dict[str, np.ndarray]) -> int:
    side = rows[next(iter(rows))].shape[1]
    return side * round(128 / side)


def truth_of(run: Path) -> tuple[Task, np.ndarray]:
    """Return the task and the frames of the first test episode, drawn from its compact states."""
    task = TASKS[opened(run).settings.environment.id]
    played = read_segment(latest(run, "experience").path / HELD_OUT["test"], "sketch")["sketch"]
    return task, task.draw(played[: task.context + task.query])


def test_strips_of_several_models_stand_below_the_truth(memory_run: Path, tmp_path: Path, monkeypatch) -> None:
    other, third = (copied(memory_run, tmp_path / name) for name in ("other", "third"))
    train_dynamics(opened(other, "backbone.kind=gru"))
    runs = [memory_run, other, third]
    rows, steps, phases = drawn_strip("generation", runs, tmp_path / "all.png", monkeypatch)
    assert list(rows) == ["real", "S4WM, run", "gru", "S4WM, third"]  # named as in the table
    task, truth = truth_of(memory_run)
    assert np.array_equal(rows["real"], truth)
    assert np.array_equal(rows["S4WM, run"], rows["S4WM, third"])  # one model, one seed
    assert len({frames.tobytes() for frames in rows.values()}) == 3
    assert [(phase.begin, phase.name) for phase in phases] == [(0, "context, observed"), (task.context, "imagined")]
    assert steps[1:3] == [task.context - 1, task.context] and steps[-1] == len(truth) - 1
    with Image.open(tmp_path / "all.png") as picture:
        pixels = np.asarray(picture)
    margin = pixels.shape[1] - len(steps) * (120 + GAP) + GAP
    for row, frames in enumerate(rows.values()):
        for column, step in enumerate(steps):
            top, left = HEADINGS + row * (120 + ROW_GAP), margin + column * (120 + GAP)
            assert np.array_equal(pixels[top : top + 120 : 3, left : left + 120 : 3], frames[step])


def test_the_strip_of_rewards_tells_the_true_one_and_each_models(memory_run: Path, tmp_path: Path, monkeypatch) -> None:
    rows, _, _ = drawn_strip("reward", [memory_run], tmp_path / "one.png", monkeypatch)
    earned = opened(memory_run).held_out(latest(memory_run, "experience"), "test").reward[:50][-2]
    real, imagined = rows
    assert real == f"real: reward {float(earned):g}" and re.fullmatch(r"S4WM: reward -?\d\.\d\d", imagined)
    generated, _, _ = drawn_strip("generation", [memory_run], tmp_path / "two.png", monkeypatch)
    assert np.array_equal(rows[imagined], generated["S4WM"])


@pytest.mark.parametrize(
    ("reward", "caption"), [(-0.004, "reward 0.00"), (-0.0, "reward 0.00"), (-0.006, "reward -0.01")]
)
def test_no_reward_of_a_strip_is_a_negative_zero(reward: float, caption: str) -> None:
    world_model: Any = SimpleNamespace(arrival_reward=lambda features: torch.tensor(reward))
    of = stage._MEASURES["reward"].caption
    assert of is not None and of(world_model, torch.zeros(1, 1)) == caption


@pytest.mark.slow
def test_the_strip_of_recall_marks_the_teleport_and_what_was_observed_after_it(tmp_path: Path, monkeypatch) -> None:
    run = begun(tmp_path / "run", *ROOMS)
    train_dynamics(opened(run))
    observed: list[int] = []
    roll_out = stage.roll_out
    monkeypatch.setattr(stage, "roll_out", lambda *given, **how: observed.append(given[3]) or roll_out(*given, **how))
    rows, steps, phases = drawn_strip("recall", [run], tmp_path / "one.png", monkeypatch)
    task, truth = truth_of(run)
    assert (task.context, task.query) == (61, 31) and observed[-1] == 61 + 1 + 5  # k = 5: 18 of 31 frames at most
    assert np.array_equal(rows["real"], truth)
    names = ["context, observed", "teleport, observed", "imagined"]
    assert [phase.begin for phase in phases] == [0, 61, 67] and [phase.name for phase in phases] == names
    assert steps[1:5] == [60, 61, 64, 66] and steps[5] == 67 and steps[-1] == 91
    action = opened(run).held_out(latest(run, "experience"), "test").action
    assert int(action[60]) == TELEPORT
    with Image.open(tmp_path / "one.png") as picture:
        assert any((np.asarray(picture) == stage_strips.TELEPORTED).all(-1).all(0))


@pytest.mark.slow
def test_the_strip_of_doors_shows_what_came_of_each_attempt(tmp_path: Path, monkeypatch) -> None:
    run = begun(tmp_path / "run", *DOORS)
    train_dynamics(opened(run))
    rows, steps, _ = drawn_strip("doors", [run], tmp_path / "one.png", monkeypatch)
    task, truth = truth_of(run)
    action = opened(run).held_out(latest(run, "experience"), "test").action[: len(truth)].tolist()
    tried = [step + 1 for step, each in enumerate(action) if each == TOGGLE]
    assert steps[2:] == tried and len(tried) == 6  # two after each of two keys, and both at the end
    assert np.array_equal(rows["real"], truth)


def test_columns_of_a_strip_are_at_even_distances_and_fit() -> None:
    assert stage_strips.evenly(61, 92, 12) == [61 + round(30 * place / 11) for place in range(12)]
    assert stage_strips.evenly(3, 6, 12) == [3, 4, 5] and stage_strips.evenly(3, 9, 1) == [3]
    for name, task in TASKS.items():
        nothing = np.zeros(task.context + task.query, int)
        plans = [stage_strips.plan_query, *([stage_strips.plan_recall] if "Teleport" in name else [])]
        for plan in plans:
            shown = plan(task, nothing, len(nothing), 12)
            assert len(shown.steps) <= 12 and shown.steps == sorted(set(shown.steps)), name
            assert shown.steps[-1] == len(nothing) - 1 and shown.observed in shown.steps
            assert shown.phases[-1].begin == shown.observed
            assert sum(step < task.context for step in shown.steps) == 2


def test_strips_of_other_episodes_are_refused(memory_run: Path, tmp_path: Path) -> None:
    other = begun(tmp_path / "other", "seed=2", "environment.id=wm/DistractingMemory-20-v0")
    train_dynamics(opened(other))
    evaluations = [stage.evaluate_memory(opened(run), "generation") for run in (memory_run, other)]
    with pytest.raises(UsageError, match="have different test episodes"):
        stage.draw_strips("generation", evaluations, tmp_path / "x.png")
    with pytest.raises(UsageError, match=r"\.png"):
        stage.draw_strips("generation", evaluations[:1], tmp_path / "x.jpg")
    assert not list(tmp_path.glob("x.*"))


def test_padding_counts_nowhere() -> None:
    error = np.array([[1.0, 2.0, 100.0], [3.0, 100.0, 100.0]])
    counts = np.array([[True, True, False], [True, False, False]])
    assert metrics.over_episodes(error, counts).tolist() == [1.5, 3.0]
    curve = metrics.curve(error, counts)
    assert curve["mean"] == [2.0, 2.0, None]
    half = 1.96 * np.sqrt(2) / np.sqrt(2)  # two values, one to either side of the mean
    assert curve["low"][0] == pytest.approx(2 - half) and curve["high"][0] == pytest.approx(2 + half)
    assert np.isnan(metrics.over_episodes(error, np.zeros_like(counts))).all()


def test_a_diverged_episode_leaves_no_mean_over_the_others() -> None:
    """An episode without frames that count is left out, and what is wrong in padding counts nowhere."""
    error = np.array([[1.0, np.nan], [3.0, 5.0], [7.0, 7.0]])
    counts = np.array([[True, False], [True, True], [False, False]])
    assert metrics.estimate(metrics.over_episodes(error, counts))["value"] == 2.5
    assert metrics.curve(error, counts)["mean"] == [2.0, 5.0]
    for wrong in (np.nan, np.inf):
        error[1, 1] = wrong
        found = metrics.estimate(metrics.over_episodes(error, counts))
        assert found == {"value": None, "low": None, "high": None, "diverged": 1}
        assert metrics.curve(error, counts) == {"mean": [2.0, None], "low": [pytest.approx(0.04), None]} | {
            "high": [pytest.approx(3.96), None]
        }


@pytest.mark.slow
def test_a_model_that_diverges_is_measured_and_says_so(memory_run: Path, tmp_path: Path, monkeypatch) -> None:
    run = copied(memory_run, tmp_path / "run")
    monkeypatch.setattr(stage, "frame_errors", lambda model, features, real: np.full(features.shape[:2], np.nan))
    evaluation = stage.evaluate_memory(opened(run, force=True, pictures=True), "generation")
    assert evaluation.metrics["generation"] == {"value": None, "low": None, "high": None, "diverged": 5}
    assert table([evaluation])[0]["generation"] == "diverged in 5"
    assert set(evaluation.metrics["curve"]["generation"]["mean"]) == {None}


def test_a_reward_that_is_no_number_is_no_hit(memory_run: Path, tmp_path: Path, monkeypatch) -> None:
    run = copied(memory_run, tmp_path / "run")
    model = type(load_world_model(latest(run, "dynamics"), opened(run).machine))
    monkeypatch.setattr(model, "arrival_reward", lambda self, last: torch.full(last.shape[:-1], torch.nan))
    found = stage.evaluate_memory(opened(run, force=True), "reward").metrics
    assert found["inference"]["value"] == found["imagination"]["value"] == 0 and found["rewarded"] < 1
