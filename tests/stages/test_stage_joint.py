"""A tokenizer that learns inside the dynamics model: what is published, what goes on from what, and that kills cost
nothing. The run is Drama's, so this is also where frequency sampling and the actor-critic go through their stages."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from PIL import Image
from tiny_run import Killed, command, kill_at, settings, sha256, with_kinds

from wmcli.artifacts import Artifact, Run
from wmcli.artifacts.lineage import lineage
from wmcli.assemble import load_controller, load_world_model
from wmcli.config import preset_names
from wmcli.errors import ArtifactError, UsageError
from wmcli.experience.load import SEGMENT
from wmcli.stages import dynamics as dynamics_stage
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.stages.pictures import Dream
from wmcli.stages.play import play
from wmcli.stages.profile import profile
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.training.checkpoint import TRAINING, load_tensors, read_part
from wmcli.training.device import Machine

CPU = Machine(torch.device("cpu"), "float32", 1)
TINY = [
    "environment.size=16",
    "environment.count=3",
    "collect.steps=90",
    "tokenizer.categoricals=4",
    "tokenizer.classes=5",
    "tokenizer.channels=[6, 8]",
    "tokenizer.strides=[2, 2]",
    "tokenizer.batch=7",
    "tokenizer.updates=3",
    "dynamics.sequence_length=9",
    "dynamics.context=3",
    "dynamics.act_window=4",
    "dynamics.head_width=10",
    "dynamics.batch=4",
    "dynamics.updates=5",
    "backbone.width=16",
    "backbone.layers=1",
    "backbone.dropout=0.25",
    "backbone.head_width=8",
    "controller.actor_width=12",
    "controller.critic_width=14",
    "controller.imagination_horizon=2",
    "controller.batch=6",
    "controller.updates=4",
    "evaluation.episodes=3",
    "evaluation.environments=2",
    "training.device=cpu",
    "training.precision=float32",
    "training.threads=1",
    "training.log_every=2",
]
EAGER = "training.checkpoint_seconds=0"
BATCH, UPDATES = 4, 5


def opened(folder: Path, *overrides: str, new: bool = False, pictures: bool = False, **how: bool) -> Context:
    preset, given = ("drama-quick", with_kinds(TINY, *overrides)) if new else (None, list(overrides))
    context = open_context(folder, preset, given, create=new, quiet=True, **how)
    context.pictures = pictures
    return context


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with experience. Only to be read."""
    folder = tmp_path_factory.mktemp("joint") / "run"
    collect(opened(folder, new=True))
    return folder


@pytest.fixture
def run(collected: Path, tmp_path: Path) -> Path:
    """A copy of `collected` to change at will."""
    shutil.copytree(collected, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def tokenizers(folder: Path) -> list[Artifact]:
    run = Run.open(folder, create=False)
    return [run.get("tokenizer", version) for version in run.versions("tokenizer")]


def weights(artifact: Artifact, prefix: str) -> dict[str, torch.Tensor]:
    tensors, _ = load_tensors(artifact.file("model.safetensors"))
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys() and one
    return all(torch.equal(value, other[name]) for name, value in one.items())


INSIDE = "model/dynamics/tokenizer."
ALONE = "model/tokenizer/"


def test_dynamics_need_no_tokenizer_and_publish_theirs(run: Path) -> None:
    dynamics = train_dynamics(opened(run))
    (tokenizer,) = tokenizers(run)
    assert set(dynamics.inputs) == {"experience"}
    assert same_weights(weights(dynamics, INSIDE), weights(tokenizer, ALONE))
    assert tokenizer.metrics["updates"] == UPDATES
    tree = lineage(tokenizer)
    assert tree.inputs["dynamics"].name == "dynamics@1"
    assert tree.inputs["dynamics"].inputs["experience"].name == "experience@1"


def test_done_again_it_does_nothing(run: Path) -> None:
    first = train_dynamics(opened(run))
    assert train_dynamics(opened(run)).digest == first.digest
    assert len(tokenizers(run)) == 1


def test_a_tokenizer_fitted_before_is_where_it_starts(run: Path) -> None:
    fitted = train_tokenizer(opened(run))
    dynamics = train_dynamics(opened(run, "dynamics.updates=0"))
    assert dynamics.inputs["tokenizer"].digest == fitted.digest
    assert same_weights(weights(fitted, ALONE), weights(tokenizers(run)[-1], ALONE))
    learned = train_dynamics(opened(run))
    assert learned.inputs["tokenizer"].digest == fitted.digest  # not what came out of the dynamics before
    assert not same_weights(weights(fitted, ALONE), weights(tokenizers(run)[-1], ALONE))
    assert train_dynamics(opened(run)).digest == learned.digest


def test_it_learns_encoder_and_decoder(run: Path) -> None:
    start = train_dynamics(opened(run, "dynamics.updates=0"))
    end = train_dynamics(opened(run))
    before, after = weights(start, INSIDE), weights(end, INSIDE)
    moved = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"encoder", "posterior_head", "decoder"}


def test_more_goes_on_with_the_tokenizer_inside(run: Path) -> None:
    first = train_dynamics(opened(run))
    more = train_dynamics(opened(run, "dynamics.updates=0", more=True))
    assert set(more.inputs) == {"experience", "parent"}
    assert same_weights(weights(first, "model/"), weights(more, "model/"))
    further = train_dynamics(opened(run, more=True))
    assert further.metrics["updates"] == 2 * UPDATES
    assert tokenizers(run)[-1].inputs["dynamics"].digest == further.digest


def test_more_takes_no_other_tokenizer(run: Path) -> None:
    train_dynamics(opened(run))
    with pytest.raises(UsageError, match="--tokenizer tokenizer: dynamics@1 continues with its own tokenizer"):
        train_dynamics(opened(run, more=True), tokenizer="tokenizer")


def test_a_tokenizer_of_a_dynamics_model_is_trained_further_only_with_it(run: Path) -> None:
    train_dynamics(opened(run))
    with pytest.raises(UsageError, match="tokenizer@1 came out of dynamics@1.*wm train-dynamics --more"):
        train_tokenizer(opened(run, more=True))
    fitted = train_tokenizer(opened(run))
    train_dynamics(opened(run))
    assert train_tokenizer(opened(run, more=True)).inputs["parent"].digest == fitted.digest


def test_it_can_start_without_the_fitted_tokenizer(run: Path) -> None:
    train_tokenizer(opened(run))
    assert "tokenizer" not in train_dynamics(opened(run), tokenizer="none").inputs


def test_the_settings_of_the_run_hold_for_a_tokenizer_fitted_with_others(run: Path) -> None:
    train_tokenizer(opened(run, "tokenizer.unimix=0.2"))
    dynamics = train_dynamics(opened(run))
    imagine(opened(run))
    world_model = load_world_model(dynamics, CPU)
    assert world_model.get_submodule("tokenizer").settings.unimix == opened(run).settings.tokenizer.unimix != 0.2
    train_tokenizer(opened(run, "tokenizer.classes=8"))
    with pytest.raises(ArtifactError, match="weights of the tokenizer do not fit its settings"):
        train_dynamics(opened(run))


def test_a_tokenizer_of_another_kind_is_one_line(run: Path, tiny: Path) -> None:
    theirs = str(tiny / "tokenizer" / "v0001")
    with pytest.raises(ArtifactError, match="tokenizer@1 is of kind 'vq', but these dynamics work on 'categorical'"):
        train_dynamics(opened(run), tokenizer=theirs)


def test_moments_of_another_optimizer_are_one_line(run: Path) -> None:
    train_dynamics(opened(run))
    other = ["dynamics.optimizer=adamw", "dynamics.warmup=0"]
    with pytest.raises(ArtifactError, match="trained with an optimizer whose moments do not suit AdamW"):
        train_dynamics(opened(run, *other, more=True))
    train_dynamics(opened(run, *other))
    with pytest.raises(ArtifactError, match="trained with an optimizer whose moments do not suit LaProp"):
        train_dynamics(opened(run, more=True))


def test_how_it_acts_is_chosen_when_it_acts(run: Path) -> None:
    train_dynamics(opened(run))
    imagine(opened(run))
    first = evaluate(opened(run))
    assert evaluate(opened(run, "dynamics.act_window=4")).digest == first.digest  # as in the run's settings
    other = evaluate(opened(run, "dynamics.act_on=prior"))
    assert other.digest != first.digest
    assert imagine(opened(run)).version == 1
    assert collect(opened(run, "dynamics.act_window=0")).metrics["steps"] == 90


@pytest.mark.parametrize("backbone", [[], ["backbone.kind=transformer"]], ids=["mamba2", "transformer"])
@pytest.mark.slow
def test_every_stage_runs_in_bfloat16(tmp_path: Path, backbone: list[str]) -> None:
    """Frozen models keep their matrices in it: whoever uses one outside autocast fails."""
    small = ["run.epochs=2", "run.collect_epochs=2", "evaluation.episodes=1", "training.precision=bfloat16"]
    run_loop(opened(tmp_path / "run", *small, *backbone, new=True, pictures=True))
    context = opened(tmp_path / "run")
    assert collect(context).inputs["controller"].kind == "controller"  # behind rows of an earlier process
    for source in ("real", "imagination"):
        play(context, source=source, out=tmp_path / f"{source}.gif", controller=None, seed=1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_loop_begins_with_no_tokenizer_but_its_own(run: Path, tmp_path: Path) -> None:
    small = ["run.epochs=2", "run.collect_epochs=2", "evaluation.episodes=1"]
    folder = tmp_path / "loop"
    last = run_loop(opened(folder, *small, new=True))
    train_tokenizer(opened(folder))
    assert run_loop(opened(folder)).digest == last.digest
    fitting = [*small, "run.tokenizer_after=0", "run.tokenizer_epochs=2", "run.keep=1"]
    run_loop(opened(tmp_path / "fitting", *fitting, new=True))
    first = Run.open(tmp_path / "fitting", create=False).get("dynamics", 1)
    assert first.inputs["tokenizer"].name == "tokenizer@1"
    kinds = [set(each.inputs) & {"dynamics"} for each in tokenizers(tmp_path / "fitting")]
    assert kinds == [set(), {"dynamics"}, {"dynamics"}]  # fitted once: after that the dynamics model trains it


def test_killed_between_the_two_publications_the_same_command_makes_it_good(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Killed("between")

    with monkeypatch.context() as patch:
        patch.setattr(dynamics_stage, "_publish_tokenizer", die)
        with pytest.raises(Killed):
            train_dynamics(opened(run))
    assert not tokenizers(run)
    dynamics = train_dynamics(opened(run))
    assert dynamics.version == 1
    assert same_weights(weights(dynamics, INSIDE), weights(tokenizers(run)[0], ALONE))


STAGES: dict[str, Callable[[Context], Artifact]] = {"dynamics": train_dynamics, "controller": imagine}


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("times", [1, 3])
def test_killed_in_the_middle_it_ends_in_the_same_bits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, times: int
) -> None:
    """Batch statistics, slow critic, normalizer, scale, counters and generators included: all are in the weights."""
    if kind == "controller":
        train_dynamics(opened(run))
    other = tmp_path / "other"
    shutil.copytree(run, other, symlinks=True)
    undisturbed = STAGES[kind](opened(other, EAGER))
    with monkeypatch.context() as patch:
        kill_at(patch, "checkpoint", times)
        with pytest.raises(Killed):
            STAGES[kind](opened(run, EAGER))
    resumed = STAGES[kind](opened(run, EAGER))
    assert sha256(resumed) == sha256(undisturbed)
    assert sha256(resumed, TRAINING) == sha256(undisturbed, TRAINING)


@pytest.mark.slow
def test_a_process_killed_in_the_middle_of_joint_training_is_finished_by_the_same_command(
    run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other, symlinks=True)
    longer = [EAGER, "dynamics.updates=60"]
    undisturbed = train_dynamics(opened(other, *longer))
    line = ["train-dynamics", *settings(*longer)]
    child = command(run, *line)
    deadline = time.monotonic() + 60
    while not list((run / "dynamics").glob(".work-*/checkpoint.safetensors")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not Run.open(run, create=False).versions("dynamics")
    again = command(run, *line)
    _, talk = again.communicate(timeout=120)
    assert again.returncode == 0 and "resuming at update" in talk
    resumed = Run.open(run, create=False).get("dynamics", 1)
    assert sha256(resumed) == sha256(undisturbed)
    assert sha256(resumed, TRAINING) == sha256(undisturbed, TRAINING)
    assert same_weights(weights(resumed, INSIDE), weights(tokenizers(run)[0], ALONE))


def test_an_agent_that_draws_while_it_looks_is_resumed_exactly(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_dynamics(opened(run))
    imagine(opened(run))
    other = tmp_path / "other"
    shutil.copytree(run, other, symlinks=True)
    undisturbed = collect(opened(other, EAGER))
    with monkeypatch.context() as patch:
        kill_at(patch, "checkpoint", 4)
        with pytest.raises(Killed):
            collect(opened(run, EAGER))
    resumed = collect(opened(run, EAGER))

    def content(artifact: Artifact) -> list[str]:
        return [entry["sha256"] for entry in artifact.manifest["files"] if entry["path"].startswith(SEGMENT)]

    assert content(resumed) == content(undisturbed)


def test_controllers_use_the_tokenizer_inside_the_dynamics(run: Path) -> None:
    dynamics = train_dynamics(opened(run))
    controller = imagine(opened(run))
    shutil.rmtree(run / "tokenizer")
    world_model, _ = load_controller(controller, CPU, {})
    assert same_weights(weights(dynamics, INSIDE), dict(world_model.get_submodule("tokenizer").state_dict()))
    assert evaluate(opened(run)).metrics["episodes"] == 3
    assert evaluate(opened(run, "evaluation.temperature=0.5")).metrics["episodes"] == 3


def test_a_controller_goes_on_only_with_dynamics_that_descend_from_its(run: Path) -> None:
    train_dynamics(opened(run))
    imagine(opened(run))
    train_dynamics(opened(run, more=True))
    assert imagine(opened(run, more=True)).metrics["updates"] == 8
    train_dynamics(opened(run, "seed=7"))
    with pytest.raises(ArtifactError, match="learned the latents of dynamics@2, and dynamics@3 does not descend"):
        imagine(opened(run, more=True))


def test_frequencies_are_counted_and_go_on_from_stage_to_stage(run: Path) -> None:
    dynamics = train_dynamics(opened(run))
    counts = read_part(dynamics.file(TRAINING), "sampler")["counts"]
    assert counts.shape == (90,) and counts.sum() == BATCH * UPDATES
    further = train_dynamics(opened(run, more=True))
    grown = read_part(further.file(TRAINING), "sampler")["counts"]
    assert grown.sum() == 2 * BATCH * UPDATES and (grown >= counts).all()
    controller = imagine(opened(run))
    imagined = read_part(controller.file(TRAINING), "sampler")["counts"]
    assert imagined.sum() == 6 * 4
    collect(opened(run))
    later = read_part(train_dynamics(opened(run, more=True)).file(TRAINING), "sampler")["counts"]
    assert later.shape == (180,) and (later[:90] >= grown).all()
    assert later[90:].sum() > 0  # new rows, never trained on, are likelier


def test_imagination_samples_by_the_counts_of_dynamics_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wmcli.experience import frequency

    seen: list[np.ndarray] = []
    scores = frequency.imagination_scores

    def spy(trained: np.ndarray, *rest: object) -> np.ndarray:
        seen.append(trained.copy())
        return scores(trained, *rest)  # type: ignore[arg-type]

    dynamics = train_dynamics(opened(run))
    monkeypatch.setattr(frequency, "imagination_scores", spy)
    imagine(opened(run))
    counts = read_part(dynamics.file(TRAINING), "sampler")["counts"]
    assert seen and 0 < seen[0].sum() <= counts.sum()  # a few rows start no window of imagination
    assert set(seen[0].tolist()) <= set(counts.tolist())


@pytest.mark.parametrize("sampling", ["dfs", "uniform"])
def test_any_system_can_sample_so(tiny: Path, tmp_path: Path, sampling: str) -> None:
    """REM's stages: windows within episodes, padded on the right in training and on the left in imagination."""
    folder = tiny_run.copied(tiny, tmp_path / "rem")
    for kind, stage in tiny_run.TRAINING.items():
        artifact = stage(tiny_run.opened(folder, f"training.sampling={sampling}"))
        assert artifact.version == 2
        if sampling == "dfs":
            drawn = {"tokenizer": 7 * 6, "dynamics": 4 * 5, "controller": 5 * 4}[kind]  # batch, updates
            assert read_part(artifact.file(TRAINING), "sampler")["counts"].sum() == drawn


def test_other_frequencies_are_another_job(run: Path) -> None:
    first = train_dynamics(opened(run))
    assert train_dynamics(opened(run, "training.dfs.temperature=3.0")).digest != first.digest
    uniform = train_dynamics(opened(run, "training.sampling=uniform"))
    same = train_dynamics(opened(run, "training.sampling=uniform", "training.dfs.temperature=3.0"))
    assert same.digest == uniform.digest


def test_episodes_shorter_than_the_context_can_be_learned_from_one_by_one(run: Path) -> None:
    """Catch has 7 frames an episode; windows of 8 and 12 are padded, and what is real is enough."""
    alone = ["dynamics.across_ends=false", "dynamics.context=8", "dynamics.sequence_length=12"]
    dynamics = train_dynamics(opened(run, *alone))
    assert dynamics.metrics["observation_loss"] > 0
    assert imagine(opened(run, *alone)).metrics["updates"] == 4


@pytest.mark.slow
def test_pictures_films_and_profiles(run: Path, tmp_path: Path) -> None:
    dynamics = train_dynamics(opened(run, pictures=True))
    assert (dynamics.path / "imagination.webp").exists()
    tokenizer = train_tokenizer(opened(run, pictures=True))
    assert (tokenizer.path / "reconstructions.png").exists()
    assert 0 <= tokenizer.metrics["object_recall"] <= 1
    imagine(opened(run))
    for source in ("real", "imagination"):
        film = play(opened(run), source=source, out=tmp_path / f"{source}.gif", controller=None, seed=1)  # type: ignore[arg-type]
        assert film.path.stat().st_size > 0
    rows = {row["what"]: row for row in profile(opened(run), parts=("stages",)).metrics["rows"]}
    assert {"train-dynamics", "imagine (controller update)", "imagination"} <= set(rows)
    assert all(row["rate"] > 0 for row in rows.values())


def test_a_model_that_decodes_from_its_state_dreams_too(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Dream.render
    state = ["dynamics.decoder_reads=state", "dynamics.act_window=0"]
    train_dynamics(opened(run, *state))
    imagine(opened(run, *state))
    kept = []
    monkeypatch.setattr(Dream, "render", lambda dream, *given: [kept.append(dream), drawn(dream, *given)][1])
    for known in (None, 5, 30):
        film = play(
            opened(run, *state),
            source="imagination",
            out=tmp_path / "x.gif",
            controller=None,
            seed=1,
            context_frames=known,
        )
    assert [dream.context for dream in kept] == [3, 5, 7], "as in training, as asked for, and all of a short episode"
    with Image.open(film.path) as picture:
        assert picture.width == 2 * 192 + 2


def test_the_presets_are_there() -> None:
    wanted = {"drama", "drama-s", "drama-mamba1", "drama-uniform", "storm", "drama-quick"}
    assert wanted | {"drama-pong-small", "drama-code", "drama-paper"} <= set(preset_names())
