"""What can be used, what is still needed, what may go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_stage import SETTINGS, publish

from wmcli.artifacts import Artifact, Run, check, examine, find_removable, needed, needed_elsewhere
from wmcli.errors import ArtifactError


def states(run: Run) -> dict[str, str]:
    return {name: state for name, state, _ in check(run)}


@pytest.fixture
def chain(run: Run) -> dict[str, Artifact]:
    """Tokenizer, dynamics that see by it, and a controller that acts in them; all from one experience."""
    experience = publish(run, "experience")
    tokenizer = publish(run, "tokenizer", experience=experience)
    dynamics = publish(run, "dynamics", experience=experience, tokenizer=tokenizer)
    controller = publish(run, "controller", experience=experience, dynamics=dynamics)
    return {each.kind: each for each in (experience, tokenizer, dynamics, controller)}


def test_versions_with_a_pruned_input_cannot_be_used(run: Run, chain: dict[str, Artifact]) -> None:
    run.prune("tokenizer", {1})
    assert states(run) == {
        "experience@1": "ok",
        "tokenizer@1": "pruned",
        "dynamics@1": "unusable",
        "controller@1": "unusable",
    }
    assert "tokenizer@1" in examine(chain["dynamics"])[1] and "dynamics@1" in examine(chain["controller"])[1]


def test_a_version_with_a_removed_input_is_intact(run: Run, chain: dict[str, Artifact]) -> None:
    shutil.rmtree(chain["experience"].path)
    found = {name: (state, detail) for name, state, detail in check(run)}
    assert {state for state, _ in found.values()} == {"ok"}
    assert "experience@1" in found["controller@1"][1]


def test_a_damaged_picture_is_reported_and_the_weights_still_load(run: Run) -> None:
    with run.job("dynamics", {}, {}).work() as work:
        (work.payload / "model.safetensors").write_bytes(b"weights")
        (work.payload / "curves.png").write_bytes(b"a picture")
        artifact = work.publish(settings=SETTINGS, metrics={}, environment=None, machine={})
    (artifact.path / "curves.png").write_bytes(b"overwritten")
    assert artifact.file("model.safetensors").read_bytes() == b"weights"
    state, detail = examine(artifact)
    assert state == "damaged pictures" and "curves.png" in detail
    (artifact.path / "model.safetensors").write_bytes(b"Weights")
    assert examine(artifact)[0] == "damaged"
    with pytest.raises(ArtifactError, match="model.safetensors"):
        artifact.verify_again()


def test_a_version_behind_a_link_is_a_version(run: Run, chain: dict[str, Artifact], tmp_path: Path) -> None:
    place, elsewhere = chain["tokenizer"].path, tmp_path / "other disk"
    shutil.move(place, elsewhere)
    place.symlink_to(elsewhere)
    assert run.versions("tokenizer") == [1]
    moved = run.resolve("tokenizer", "tokenizer")
    assert moved.path == place and moved.run == run.path.resolve()
    assert chain["dynamics"].input("tokenizer").file("model.safetensors").read_bytes() == b"weights 0"
    assert run.resolve(str(run.path / "tokenizer" / "latest"), "tokenizer").path == place
    assert set(states(run).values()) == {"ok"}
    shutil.rmtree(elsewhere)
    assert states(run)["tokenizer@1"] == "damaged" and states(run)["dynamics@1"] == "unusable"


def test_needed_files_are_those_read_by_use(chain: dict[str, Artifact], run: Run) -> None:
    assert [each.kind for each in needed([chain["controller"]])] == ["controller", "dynamics", "tokenizer"]
    more = publish(run, "experience", 2, previous=chain["experience"])
    assert list(needed([more])) == [more, chain["experience"]]


def test_inputs_of_another_run_are_kept(run: Run, chain: dict[str, Artifact], tmp_path: Path) -> None:
    other = Run.open(tmp_path / "other", create=True)
    assert list(needed_elsewhere(run)) == []
    run.note_use(chain["dynamics"].digest, other.path)
    assert list(needed_elsewhere(run)) == []  # nothing came of it so far
    job = other.job("controller", {}, {"dynamics": chain["dynamics"]})
    with job.work() as work:
        assert list(needed_elsewhere(run)) == [chain["dynamics"]]
        (work.payload / "model.safetensors").write_bytes(b"weights")
        work.publish(settings=SETTINGS, metrics={}, environment=None, machine={})
    assert list(needed_elsewhere(run)) == [chain["dynamics"]]
    other.prune("controller", {1})
    assert other.artifacts("controller") == []
    shutil.rmtree(other.path)
    assert list(needed_elsewhere(run)) == []


def test_an_evaluation_elsewhere_needs_no_weights(run: Run, chain: dict[str, Artifact], tmp_path: Path) -> None:
    other = Run.open(tmp_path / "other", create=True)
    run.note_use(chain["controller"].digest, other.path)
    publish(other, "evaluation", controller=chain["controller"])
    assert list(needed_elsewhere(run)) == []


# -- wm clean ---------------------------------------------------------------------------------------------------------


def test_removing_leaves_all_that_is_needed(run: Run, chain: dict[str, Artifact], tmp_path: Path) -> None:
    tokenizer = publish(run, "tokenizer", 2)  # newer, but the dynamics see by the first
    dynamics = publish(run, "dynamics", 2, tokenizer=chain["tokenizer"])
    publish(run, "controller", 2, dynamics=dynamics)
    publish(run, "dynamics", 3, tokenizer=tokenizer)
    run.point("controller", "best", 1)
    assert find_removable(run) == []
    run.point("controller", "best", 2)
    found = {each.name: each for each in find_removable(run)}
    assert set(found) == {"dynamics@1", "controller@1"}
    assert found["dynamics@1"].size == len(b"weights 0") + len(b"chunk of \x00 zeros")
    for each in found.values():
        each.remove()
    assert find_removable(run) == [] and states(run)["dynamics@1"] == "pruned"
    assert states(run)["controller@2"] == "ok"


def test_stopped_work_is_removable(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt), run.job("dynamics", {}, {}).work() as work:
        (work.path / "checkpoint").write_bytes(b"123")
        assert find_removable(run) == []  # somebody is at it
        raise KeyboardInterrupt
    (found,) = find_removable(run)
    assert found.size == 3 and found.name.startswith("dynamics/.work-")
    found.remove()
    assert find_removable(run) == [] and run.unfinished() == []
