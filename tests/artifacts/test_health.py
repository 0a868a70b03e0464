"""What can be used, what is still needed, what may go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_stage import SETTINGS, publish

from wmcli.artifacts import Artifact, Run, check, examine, find_removable, needed, needed_elsewhere
from wmcli.artifacts.lock import HOLDER, exclusive
from wmcli.artifacts.manifest import MODEL_FORMAT
from wmcli.errors import ArtifactError, MachineError


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


@pytest.mark.parametrize("name", ["curves.png", "imagination.webp", "imagination.gif", "imagination.json"])
def test_a_damaged_picture_is_reported_and_the_weights_still_load(run: Run, name: str) -> None:
    with run.job("dynamics", {}, {}).work() as work:
        (work.payload / "model.safetensors").write_bytes(b"weights")
        (work.payload / name).write_bytes(b"a picture")
        artifact = work.publish(settings=SETTINGS, metrics={}, environment=None, machine={})
    (artifact.path / name).write_bytes(b"overwritten")
    assert artifact.file("model.safetensors").read_bytes() == b"weights"
    state, detail = examine(artifact)
    assert state == "damaged pictures" and name in detail
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
    other.path.rename(tmp_path / "a disk that is not mounted")
    assert list(needed_elsewhere(run)) == [chain["dynamics"]] and run.missing_users()[0].path == other.path
    (run.path / "used-by.txt").unlink()
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


def test_work_that_vanishes_while_it_is_looked_at_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), run.job("dynamics", {}, {}).work() as work:
        (work.path / "checkpoint").write_bytes(b"123")
        raise KeyboardInterrupt
    monkeypatch.setattr("wmcli.artifacts.removable.has_checkpoint", lambda folder: shutil.rmtree(folder) is None)
    assert run.unfinished() and find_removable(run) == [] and not run.unfinished()


def test_weights_stay_while_a_process_works_on_the_run(run: Run, chain: dict[str, Artifact]) -> None:
    """It may read any version: here an old dynamics model."""
    publish(run, "dynamics", 2, tokenizer=chain["tokenizer"])
    publish(run, "controller", 2)
    assert [each.name for each in find_removable(run)] == ["controller@1", "dynamics@1"]
    with pytest.raises(KeyboardInterrupt), run.job("evaluation", {}, {"controller": chain["controller"]}).work():
        assert find_removable(run) == []
        raise KeyboardInterrupt
    assert len(find_removable(run)) == 2


def test_weights_stay_where_it_is_unknown_who_needs_them(
    run: Run, chain: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(run, "tokenizer", 2)
    publish(run, "dynamics", 2)
    publish(run, "controller", 2)
    assert len(find_removable(run)) == 3
    run.point("controller", "best", 1)
    assert find_removable(run) == []  # all of them: controller@1 sees by dynamics@1 and tokenizer@1
    with monkeypatch.context() as patch, pytest.raises(MachineError, match="disk"):
        patch.setattr(Artifact, "input", failing_disk)
        find_removable(run)
    (run.path / "dynamics" / "v0001" / "manifest.json").write_text("{")
    assert find_removable(run) == []


def failing_disk(artifact: Artifact, role: str) -> None:
    raise MachineError("check the disk")


def test_weights_stay_for_a_run_that_is_not_there(run: Run, chain: dict[str, Artifact], tmp_path: Path) -> None:
    publish(run, "dynamics", 2)
    publish(run, "controller", 2)
    run.note_use(chain["dynamics"].digest, tmp_path / "not mounted")
    assert [each.name for each in find_removable(run)] == ["controller@1"]
    (tmp_path / "not mounted").mkdir()
    assert [each.name for each in find_removable(run)] == ["controller@1", "dynamics@1"]


def test_the_controller_of_an_exported_folder_stays(run: Run, chain: dict[str, Artifact]) -> None:
    marker = {**MODEL_FORMAT, "controller": "controller/v0001"}
    (run.path / "model.json").write_text(json.dumps(marker))
    publish(run, "dynamics", 2)
    publish(run, "controller", 2)
    assert find_removable(run) == []


def test_what_killed_processes_left_is_removable(run: Run, chain: dict[str, Artifact]) -> None:
    kind = run.path / "dynamics"
    for folder in (kind / ".trash-1", run.path / ".doctor-1", kind / ".work-012345"):
        (folder / "inside").mkdir(parents=True)
        (folder / "inside" / "file").write_bytes(b"123")
    (kind / ".draft-1").symlink_to("v0001")
    (run.path / ".run.toml.partial").write_bytes(b"12")
    (kind / HOLDER).write_text("1")
    with exclusive(kind, "dynamics"):
        assert [each.name for each in find_removable(run)] == [".doctor-1", ".run.toml.partial"]
    (kind / HOLDER).write_text("1")
    found = {each.name: each for each in find_removable(run)}
    assert {name: each.size for name, each in found.items() if "draft" not in name} == {
        ".doctor-1": 3,
        ".run.toml.partial": 2,
        "dynamics/.trash-1": 3,
        "dynamics/.holder": 1,
        "dynamics/.work-012345": 3,
    }
    assert "dynamics/.draft-1" in found
    for each in found.values():
        each.remove()
    assert find_removable(run) == [] and set(states(run).values()) == {"ok"}
    assert {each.name for each in kind.iterdir()} == {".lock", "latest", "v0001"}
