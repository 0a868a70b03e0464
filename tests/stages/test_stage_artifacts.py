"""What every stage promises: its files and manifest, the same again is found, more is more, wrong inputs are named."""

from __future__ import annotations

import gc
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from odd_lengths import ODD_LENGTHS
from tiny_run import EVERY_STAGE, TRAINING, copied, latest, opened, sha256

from wmcli.artifacts import KINDS, Run, check, make_command
from wmcli.assemble import load_controller
from wmcli.config import digest
from wmcli.envs import protocol
from wmcli.errors import ArtifactError, DivergedError, UsageError
from wmcli.experience import WindowSampler
from wmcli.settings import Settings, flatten
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.opening import open_context
from wmcli.stages.play import play
from wmcli.stages.tokenizer import train_tokenizer
from wmcli.training.checkpoint import load_tensors

MADE = ("experience", *EVERY_STAGE)
DOCS = Path(__file__).parents[2] / "docs" / "artifacts.md"
UPDATES = {"tokenizer": 6, "dynamics": 5, "controller": 4}
RATES = {kind: f"{kind}.learning_rate=0.004" for kind in UPDATES}


def versions(folder: Path) -> dict[str, list[int]]:
    run = Run.open(folder, create=False)
    return {kind: run.versions(kind) for kind in KINDS}


def complaint(call: Callable[[], object], *words: str) -> str:
    with pytest.raises(ArtifactError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    return message


# -- what is published ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MADE)
def test_an_artifact_holds_the_files_that_the_documents_promise(tiny: Path, kind: str) -> None:
    row = re.search(rf"^\| {kind} \| `[^`]*` \| (.*) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    promised = {name.rstrip("/") for name in re.findall(r"`([^`]+)`", row[1])}
    artifact = latest(tiny, kind)
    assert {entry["path"].split("/")[0] for entry in artifact.manifest["files"]} == promised
    assert {entry.name for entry in artifact.path.iterdir()} == promised | {"manifest.json"}
    assert all(entry["size"] > 0 for entry in artifact.manifest["files"])


@pytest.mark.parametrize("kind", MADE)
def test_a_manifest_names_its_kind_and_inputs(tiny: Path, kind: str) -> None:
    manifest = latest(tiny, kind).manifest
    bound = Run.open(tiny, create=False).bound()
    assert (manifest["kind"], manifest["version"], manifest["preset"]) == (kind, 1, bound["preset"])
    assert (
        manifest["settings"] == bound["settings"] == Settings.model_validate(bound["settings"]).model_dump(mode="json")
    )
    block = protocol(Settings.model_validate(bound["settings"]).environment)
    assert manifest["environment"] == block and block["actions"] == 3
    roles = {
        "experience": [],
        "tokenizer": ["experience"],
        "dynamics": ["experience", "tokenizer"],
        "controller": ["dynamics", "experience"],
        "evaluation": ["controller"],
    }
    assert sorted(manifest["inputs"]) == roles[kind]
    for role, reference in manifest["inputs"].items():
        assert reference["digest"] == latest(tiny, role).digest
        assert reference["path"] == f"{role}/v0001"  # relative, so that a run can be moved
    machine = manifest["machine"]
    assert {key: machine[key] for key in ("device", "precision", "threads")} == {
        "device": "cpu",
        "precision": "float32",
        "threads": 1,
    }
    assert digest({key: value for key, value in manifest.items() if key != "digest"}) == manifest["digest"]


def test_everything_verifies(tiny: Path) -> None:
    assert check(Run.open(tiny, create=False)) == [(f"{kind}@1", "ok", "") for kind in MADE]


@pytest.mark.parametrize("kind", TRAINING)
def test_a_training_stage_counts_updates_and_saves_the_state_for_further_training(tiny: Path, kind: str) -> None:
    artifact = latest(tiny, kind)
    assert artifact.metrics["updates"] == UPDATES[kind]
    assert artifact.metrics["loss"] > 0 and artifact.metrics["gradient_norm"] > 0
    weights, about = load_tensors(artifact.file("model.safetensors"))
    assert about == {"kind": kind}
    training, about = load_tensors(artifact.file("training.safetensors"))
    assert (about["update"], about["trained"]) == (UPDATES[kind], 0)
    assert set(weights) and not any(name.startswith("model/") for name in training), "weights are written once"
    assert {"optimizer/0/exp_avg", "optimizer/0/exp_avg_sq", "random/torch"} <= set(training)


def test_loading_a_controller_draws_no_random_numbers(tiny: Path) -> None:
    before = torch.get_rng_state()
    load_controller(latest(tiny, "controller"), opened(tiny).machine, {})
    assert torch.equal(torch.get_rng_state(), before)


EVERY_LOGGED = ("collect", "train-tokenizer", "train-dynamics", "imagine", "eval")


def test_lines_in_the_log_and_events_for_tensorboard(tiny: Path) -> None:
    lines = Run.open(tiny, create=False).history()
    by_stage = {stage: [line for line in lines if line["stage"] == stage] for stage in EVERY_LOGGED}
    updates = {stage: [line["update"] for line in by_stage[stage]] for stage in EVERY_LOGGED[1:-1]}
    assert updates == {"train-tokenizer": [2, 4, 6], "train-dynamics": [2, 4, 5], "imagine": [2, 4]}
    assert all({"loss", "updates_per_second"} <= set(line) for stage in updates for line in by_stage[stage])
    (played,), (scored,) = by_stage["collect"], by_stage["eval"]
    assert played["mean_return"] == latest(tiny, "experience").metrics["mean_return"]
    assert scored["mean_return"] == latest(tiny, "evaluation").metrics["mean"] and scored["episodes"] == 5
    jobs = {kind: latest(tiny, kind).manifest["job"] for kind in ("experience", *EVERY_STAGE)}
    for line in lines:
        kind = dict(zip(EVERY_LOGGED, jobs, strict=True))[line["stage"]]
        assert line["job"] == jobs[kind] and line["version"] == 1 and line["time"] and "epoch" not in line
        assert line["environment_step"] == 90
    assert {folder.name for folder in (tiny / "tensorboard").iterdir()} == set(EVERY_LOGGED)
    assert all(list(folder.glob("events*")) for folder in (tiny / "tensorboard").iterdir())


def test_a_command_that_ended_holds_no_file_and_no_thread(run: Path) -> None:
    """A program may call thousands of them."""

    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    def score() -> None:
        evaluate(opened(run, force=True))

    score()
    before = held()
    for _ in range(2):
        score()
    assert held() == before
    assert latest(run, "evaluation").version == 4


# -- the same again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY_STAGE)
def test_the_same_job_is_not_done_twice(run: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, lines = versions(run), Run.open(run, create=False).history()
    context = open_context(run, None, create=False)
    assert EVERY_STAGE[kind](context).digest == latest(run, kind).digest
    assert versions(run) == before
    assert Run.open(run, create=False).history() == lines
    assert f"{kind}@1 is up to date, nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize("kind", TRAINING)
def test_more_trains_further_each_time(run: Path, kind: str) -> None:
    for number in (2, 3):
        artifact = TRAINING[kind](opened(run, more=True))
        assert artifact.version == number
        assert artifact.metrics["updates"] == number * UPDATES[kind]
        assert artifact.inputs["parent"].name == f"{kind}@{number - 1}"
        assert load_tensors(artifact.file("training.safetensors"))[1]["trained"] == (number - 1) * UPDATES[kind]
        assert sha256(artifact) != sha256(artifact.input("parent"))
    steps = load_tensors(artifact.file("training.safetensors"))[0]["optimizer/0/step"]
    assert steps == 3 * UPDATES[kind]
    lines = [line for line in Run.open(run, create=False).history() if line.get("update") == 3 * UPDATES[kind]]
    assert len(lines) == 1
    assert TRAINING[kind](opened(run)).version == 1  # the command without --more still is the job it was


@pytest.mark.parametrize("kind", TRAINING)
def test_force_makes_another_of_the_same_bits(run: Path, kind: str) -> None:
    again = TRAINING[kind](opened(run, force=True))
    first = Run.open(run, create=False).get(kind, 1)
    assert again.version == 2 and "parent" not in again.inputs
    assert again.manifest["job"] == first.manifest["job"]
    assert sha256(again) == sha256(first)
    assert sha256(again, "training.safetensors") == sha256(first, "training.safetensors")
    assert TRAINING[kind](opened(run)).version == 2


def test_force_plays_again_and_gets_the_same_returns(run: Path) -> None:
    again, first = evaluate(opened(run, force=True)), latest(run, "evaluation")
    assert again.version == 2
    assert again.metrics == first.metrics


@pytest.mark.parametrize("kind", TRAINING)
def test_a_changed_setting_is_another_version_and_stays_with_it(run: Path, kind: str) -> None:
    changed = TRAINING[kind](opened(run, RATES[kind]))
    assert changed.version == 2
    assert sha256(changed) != sha256(Run.open(run, create=False).get(kind, 1))
    bound = Run.open(run, create=False).bound()["settings"]
    differ = {
        key: value
        for key, value in flatten(Settings.model_validate(changed.settings)).items()
        if flatten(Settings.model_validate(bound))[key] != value
    }
    assert differ == {f"{kind}.learning_rate": 0.004}  # counts for one command: run.toml is as it was
    assert TRAINING[kind](opened(run)).version == 1
    assert TRAINING[kind](opened(run, RATES[kind])).version == 2


@pytest.mark.parametrize("kind", EVERY_STAGE)
def test_another_seed_is_another_job(run: Path, kind: str) -> None:
    changed = EVERY_STAGE[kind](opened(run, "seed=2"))
    assert changed.version == 2
    if kind in TRAINING:
        assert sha256(changed) != sha256(Run.open(run, create=False).get(kind, 1))


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.parametrize("override", ["training.precision=bfloat16", "training.sampling=episodes"])
def test_how_it_is_trained_is_part_of_the_job(run: Path, kind: str, override: str) -> None:
    changed = TRAINING[kind](opened(run, override))
    assert changed.version == 2
    assert sha256(changed) != sha256(Run.open(run, create=False).get(kind, 1))


@pytest.mark.parametrize(
    ("kind", "override"),
    [
        ("tokenizer", "dynamics.updates=9"),
        ("tokenizer", "training.log_every=1"),
        ("dynamics", "controller.updates=9"),
        ("dynamics", "tokenizer.updates=9"),
        ("controller", "evaluation.episodes=9"),
        ("controller", "dynamics.context=1"),  # that of the dynamics it is given counts
        ("controller", "training.checkpoint_seconds=5"),
        ("evaluation", "collect.steps=9"),
    ],
)
def test_settings_of_other_stages_do_not_matter(run: Path, kind: str, override: str) -> None:
    assert EVERY_STAGE[kind](opened(run, override)).version == 1


@pytest.mark.parametrize("kind", ["dynamics", "controller"])
def test_a_new_input_is_another_job(run: Path, kind: str) -> None:
    collect(opened(run))
    assert TRAINING[kind](opened(run)).version == 2


# -- wrong inputs -----------------------------------------------------------------------------------------------------


def test_a_missing_input_ends_in_the_command_that_makes_it(run: Path) -> None:
    context, to = opened(run), f"--run {run}"
    for missing, command, stages in [
        (
            "controller",
            "wm imagine",
            [evaluate, lambda c: play(c, source="real", out=run / "a.gif", controller=None, seed=1)],
        ),
        ("dynamics", "wm train-dynamics", [imagine]),
        ("tokenizer", "wm train-tokenizer", [train_dynamics]),
        ("experience", "wm collect", [train_tokenizer, train_dynamics, imagine]),
    ]:
        shutil.rmtree(run / missing)
        for stage in stages:
            complaint(lambda stage=stage: stage(context), f"no {missing} in", f"{command} {to}")


@pytest.mark.parametrize("kind", TRAINING)
def test_there_must_be_something_to_train_further(run: Path, kind: str) -> None:
    shutil.rmtree(run / kind)
    complaint(
        lambda: TRAINING[kind](opened(run, more=True)), f"no {kind} in", f"make one with: {make_command(kind, run)}"
    )


def test_experience_of_another_environment_is_named_with_both(run: Path, elsewhere: Path) -> None:
    theirs = str(elsewhere / "experience" / "v0001")
    for stage in TRAINING.values():
        complaint(lambda stage=stage: stage(opened(run), experience=theirs), "experience@1", ODD_LENGTHS, "wm/Catch-v0")
    complaint(lambda: collect(opened(run), previous=theirs), "experience@1", ODD_LENGTHS, "wm/Catch-v0")


def test_a_tokenizer_of_another_environment_is_named_with_both(run: Path, elsewhere: Path) -> None:
    theirs = str(elsewhere / "tokenizer" / "v0001")
    complaint(
        lambda: train_dynamics(opened(run), tokenizer=theirs),
        "tokenizer@1 was made with environment id",
        ODD_LENGTHS,
        "wm/Catch-v0",
    )
    assert versions(run)["dynamics"] == [1]


def test_models_of_another_environment_are_named_with_both(tiny: Path, elsewhere: Path, tmp_path: Path) -> None:
    other = copied(elsewhere, tmp_path / "other")
    for kind, stage in [("dynamics", imagine), ("controller", evaluate)]:
        complaint(
            lambda kind=kind, stage=stage: stage(opened(other), **{kind: str(tiny / kind / "v0001")}),
            f"{kind}@1 was made with environment id = wm/Catch-v0",
            ODD_LENGTHS,
        )


def test_frames_of_another_size_are_another_environment(run: Path) -> None:
    for stage in (collect, *TRAINING.values(), evaluate):
        complaint(lambda stage=stage: stage(opened(run, "environment.size=32")), "environment size = 16", "needs 32")


def test_artifacts_of_another_run_can_be_used_by_their_path(run: Path, tiny: Path) -> None:
    shutil.rmtree(run / "tokenizer")
    artifact = train_dynamics(opened(run, force=True), tokenizer=str(tiny / "tokenizer" / "v0001"))
    assert artifact.inputs["tokenizer"].path == str(tiny / "tokenizer" / "v0001")
    assert sha256(artifact) == sha256(latest(tiny, "dynamics"))


def test_a_reference_of_the_wrong_kind_is_refused(run: Path) -> None:
    complaint(lambda: train_dynamics(opened(run), tokenizer="experience@1"), "a tokenizer is needed here")
    complaint(lambda: train_dynamics(opened(run), tokenizer=str(run / "experience" / "v0001")), "a tokenizer is needed")


def test_dynamics_go_on_only_with_a_tokenizer_that_descends_from_theirs(run: Path) -> None:
    train_tokenizer(opened(run, more=True))
    assert train_dynamics(opened(run, more=True)).inputs["tokenizer"].name == "tokenizer@2"
    train_tokenizer(opened(run, more=True))
    train_tokenizer(opened(run, more=True))
    assert train_dynamics(opened(run, more=True)).inputs["tokenizer"].name == "tokenizer@4"  # a grandchild
    train_tokenizer(opened(run, force=True))
    complaint(
        lambda: train_dynamics(opened(run, more=True)),
        "dynamics@3 learned the codes of tokenizer@4",
        "tokenizer@5 does not descend from it",
    )
    complaint(lambda: train_dynamics(opened(run, more=True), tokenizer="tokenizer@2"), "tokenizer@2 does not descend")
    assert train_dynamics(opened(run)).version == 4  # anew it may


def test_a_controller_goes_on_only_with_dynamics_whose_tokenizer_descends_from_its(run: Path) -> None:
    train_tokenizer(opened(run, more=True))
    train_dynamics(opened(run, more=True))
    assert imagine(opened(run, more=True)).inputs["dynamics"].name == "dynamics@2"
    train_tokenizer(opened(run, force=True))
    train_dynamics(opened(run))
    complaint(
        lambda: imagine(opened(run, more=True)),
        "controller@2 learned the codes of tokenizer@2",
        "tokenizer@3 does not descend from it",
    )


def test_imagination_begins_with_the_context_that_the_dynamics_were_made_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def sampler(*given: object, minimum: int, **named: object) -> WindowSampler:
        asked.append(minimum)
        return WindowSampler(*given, minimum=minimum, **named)

    monkeypatch.setattr("wmcli.trainers.batches.WindowSampler", sampler)
    imagine(opened(run, force=True))
    assert asked == [2]
    train_dynamics(opened(run, "dynamics.context=1", "dynamics.min_segment=1"))
    asked.clear()
    imagine(opened(run))
    assert asked == [1]


def test_a_damaged_input_stops_the_stage_that_reads_it(run: Path) -> None:
    weights = latest(run, "tokenizer").path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for stage in (train_dynamics, imagine):
        complaint(lambda stage=stage: stage(opened(run, force=True)), "model.safetensors", "damaged")
    assert versions(run)["dynamics"] == versions(run)["controller"] == [1]


def test_weights_that_do_not_fit_the_settings_are_refused(run: Path) -> None:
    complaint(lambda: train_dynamics(opened(run, "backbone.layers=2", more=True)), "do not fit", "missing")


@pytest.mark.parametrize("kind", TRAINING)
def test_a_diverged_stage_publishes_nothing(run: Path, kind: str) -> None:
    with pytest.raises(DivergedError):
        TRAINING[kind](opened(run, f"{kind}.learning_rate=1e30", f"{kind}.updates=8"))
    assert versions(run)[kind] == [1]


# -- contexts ---------------------------------------------------------------------------------------------------------


def test_a_run_keeps_to_its_preset(run: Path) -> None:
    with pytest.raises(UsageError, match="is bound to preset quickstart, not rem; give another --run"):
        open_context(run, "rem", create=True, quiet=True)
    assert open_context(run, "quickstart", create=True, quiet=True).preset == "quickstart"


def test_a_run_that_is_not_there_is_not_made_by_accident(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"no run at {tmp_path / 'x'}; start one with: wm collect --run"):
        open_context(tmp_path / "x", None, create=False, quiet=True)
    assert not (tmp_path / "x").exists()


def test_wrong_settings_leave_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_context(tmp_path / "x", "quickstart", ["controller.imagination_horizon=999"], create=True, quiet=True)
    assert not (tmp_path / "x").exists()
