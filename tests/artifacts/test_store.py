"""The run directory: binding, versions, references, jobs, prune, metrics."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_stage import SETTINGS, publish, stage

from wmcli.artifacts import KINDS, Run, check, lineage
from wmcli.errors import ArtifactError, DivergedError, UsageError

# -- opening and binding ----------------------------------------------------------------------------------------------


def test_a_missing_run_names_the_command_that_starts_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=r"^no run at runs/a b; start one with: wm collect --run 'runs/a b'$"):
        Run.open(Path("runs/a b"), create=False)
    assert Run.open("runs/a b", create=True).path == tmp_path / "runs" / "a b"
    assert Run.open("runs/a b", create=False).versions("dynamics") == []


@pytest.mark.parametrize("create", [True, False])
def test_a_file_in_the_way_is_a_usage_error(tmp_path: Path, create: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        Run.open(tmp_path / "file", create=create)
    with pytest.raises(UsageError if create else ArtifactError):
        Run.open(tmp_path / "file" / "run", create=create)


def test_a_folder_that_cannot_be_written_to_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root everything can be
    with pytest.raises(UsageError, match="the folder is not writable; name another one"):
        Run.open(tmp_path, create=True)
    Run.open(tmp_path, create=False)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        Run.open(tmp_path / "run", create=True)


def test_binding_is_read_back_and_is_for_good(run: Run) -> None:
    assert run.bound() is None
    run.bind("catch", SETTINGS)
    assert run.bound() == {"preset": "catch", "settings": SETTINGS, "changes": []}
    run.bind("catch", SETTINGS)
    with pytest.raises(UsageError, match="bound to preset catch"):
        run.bind("catch", {**SETTINGS, "seed": 4})
    assert run.bound() == {"preset": "catch", "settings": SETTINGS, "changes": []}


def test_a_binding_is_replaced_by_whoever_knows_it(run: Run) -> None:
    run.bind("catch", SETTINGS)
    known = run.bound()
    changes = [{"epoch": 3, "set": ["dynamics.clip=4.0"]}]
    run.bind("catch", {**SETTINGS, "seed": 4}, changes, expected=known)
    assert run.bound() == {"preset": "catch", "settings": {**SETTINGS, "seed": 4}, "changes": changes}
    with pytest.raises(UsageError, match="bound to preset catch"):  # another command was faster
        run.bind("catch", {**SETTINGS, "seed": 5}, expected=known)


def test_a_run_in_which_nothing_was_made_is_taken_back(run: Run) -> None:
    run.bind("catch", SETTINGS)
    run.unbind()
    assert not run.path.exists()
    again = Run.open(run.path, create=True)
    again.bind("catch", SETTINGS)
    publish(again, "profile")
    again.unbind()
    assert again.bound() is not None and again.versions("profile") == [1]


@pytest.mark.parametrize("text", ["preset = 3\n[settings]", "preset = 'x'", "preset", "\x00", "#" * (1 << 20)])
def test_a_damaged_binding_is_one_line(run: Run, text: str) -> None:
    (run.path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match="run.toml") as caught:
        run.bound()
    assert "\n" not in str(caught.value)


def test_a_binding_that_is_no_text_is_one_line(run: Run) -> None:
    (run.path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="run.toml"):
        run.bound()


# -- references -------------------------------------------------------------------------------------------------------

COMMANDS = {
    "experience": "wm collect",
    "tokenizer": "wm train-tokenizer",
    "dynamics": "wm train-dynamics",
    "controller": "wm imagine",
    "evaluation": "wm eval",
    "profile": "wm profile",
}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_artifacts_are_named_with_the_command_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.open("runs/default", create=True)
    for reference in (kind, f"{kind}@7", "7"):
        with pytest.raises(ArtifactError) as caught:
            run.resolve(reference, kind)
        assert str(caught.value) == f"no {kind} in runs/default; make one with: {COMMANDS[kind]} --run runs/default"
    assert run.latest(kind) is None


def test_references(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = publish(run, "tokenizer", 1), publish(run, "tokenizer", 2)
    publish(run, "dynamics")
    monkeypatch.chdir(tmp_path)
    for reference in ("tokenizer", "tokenizer@latest", "tokenizer@2", "2", "run/tokenizer/latest"):
        assert run.resolve(reference, "tokenizer") == second
    for reference in ("tokenizer@1", "1", "run/tokenizer/v0001", str(first.path), f"{first.path}/manifest.json"):
        assert run.resolve(reference, "tokenizer") == first
    other = Run.open(tmp_path / "other", create=True)
    assert other.resolve("run/tokenizer/v0001", "tokenizer") == first


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tokenizer@3", "no tokenizer@3 in .*, which has 2 versions, 1 to 2; see: wm artifacts"),
        ("tokenizer@0", "no tokenizer@0"),
        ("tokenizer@1000000000", "no tokenizer 'tokenizer@1000000000': write"),
        ("dynamics", "'dynamics' means a dynamics, but a tokenizer is needed"),
        ("tokeniser", "no tokenizer 'tokeniser': write .*make one with: wm train-tokenizer"),
        ("tokenizer@-1", "write tokenizer, tokenizer@7 or the path"),
        ("", "No such|no tokenizer|manifest"),
        ("a\x00b", "no tokenizer"),
        ("9" * 5000, "no tokenizer"),
    ],
)
def test_references_to_nothing(run: Run, reference: str, message: str) -> None:
    publish(run, "tokenizer", 1), publish(run, "tokenizer", 2)
    with pytest.raises(ArtifactError, match=message):
        run.resolve(reference, "tokenizer")


def test_a_path_to_another_kind_is_refused(run: Run) -> None:
    dynamics = publish(run, "dynamics")
    with pytest.raises(ArtifactError, match="is a dynamics, but a tokenizer is needed"):
        run.resolve(str(dynamics.path), "tokenizer")


def test_versions_go_by_number_and_latest_is_a_relative_link_that_readers_mend(run: Run) -> None:
    for identity in range(11):
        publish(run, "profile", identity)
    folder = run.path / "profile"
    (folder / "v12").mkdir()  # not how versions are spelled
    (folder / "v0099").touch()
    assert run.versions("profile") == list(range(1, 12))
    for harm in (lambda: (folder / "latest").unlink(), lambda: None):
        harm()
        newest = run.latest("profile")
        assert newest is not None and newest.version == 11
        assert (folder / "latest").readlink() == Path("v0011")
        (folder / "latest").unlink()
        (folder / "latest").symlink_to("v0003")
    assert publish(run, "profile", "next").version == 100  # whatever uses a number keeps it


def test_a_renamed_version_is_refused(run: Run) -> None:
    publish(run, "profile").path.rename(run.path / "profile" / "v0005")
    with pytest.raises(ArtifactError, match=r"v0005 holds profile@1"):
        run.latest("profile")


def test_reading_needs_no_write_permission(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(run, "profile")
    (run.path / "profile" / "latest").unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    newest = run.latest("profile")
    assert newest is not None and newest.version == 1


# -- jobs -------------------------------------------------------------------------------------------------------------


def test_a_job_is_its_kind_identity_and_inputs(run: Run) -> None:
    one, two = publish(run, "experience", 1), publish(run, "experience", 2)
    base = run.job("dynamics", {"seed": 1, "width": 2}, {"experience": one})
    assert run.job("dynamics", {"width": 2, "seed": 1}, {"experience": one}).digest == base.digest
    others = [
        run.job("controller", {"seed": 1, "width": 2}, {"experience": one}),
        run.job("dynamics", {"seed": 2, "width": 2}, {"experience": one}),
        run.job("dynamics", {"seed": 1, "width": 2}, {"experience": two}),
        run.job("dynamics", {"seed": 1, "width": 2}, {"previous": one}),
        run.job("dynamics", {"seed": 1, "width": 2}, {}),
    ]
    assert len({job.digest for job in [base, *others]}) == 6


def test_done_finds_the_newest_version_of_this_very_job(run: Run) -> None:
    job = run.job("tokenizer", {"identity": 1}, {})
    assert job.done() is None
    publish(run, "tokenizer", 1)
    again = publish(run, "tokenizer", 1)
    other = publish(run, "tokenizer", 2)
    assert job.done() == again
    (other.path / "manifest.json").write_text("damaged")
    assert job.done() == again
    run.prune("tokenizer", {1, 2})
    done = job.done()
    assert done is not None and done.pruned


def test_the_same_command_twice_publishes_once(tmp_path: Path) -> None:
    assert stage(tmp_path / "run") == stage(tmp_path / "run")
    assert stage(tmp_path / "run", identity=2).version == 2


def test_work_is_resumed_with_its_checkpoints_but_an_empty_payload(run: Run) -> None:
    job = run.job("dynamics", {}, {})
    with pytest.raises(KeyboardInterrupt), job.work() as work:
        assert not work.resumed
        (work.path / "checkpoint").write_text("half")
        (work.payload / "stale").write_text("")
        raise KeyboardInterrupt
    assert run.job("dynamics", {"other": 1}, {}).done() is None
    with run.job("dynamics", {"other": 1}, {}).work() as work:  # leaves the first one's work alone
        assert not work.resumed
    with job.work() as work:
        assert work.resumed
        assert (work.path / "checkpoint").read_text() == "half"
        assert list(work.payload.iterdir()) == []
    with job.work(fresh=True) as work:
        assert not work.resumed
        assert not (work.path / "checkpoint").exists()
    assert not job.work_folder.exists(), "nothing of use was in it"


def test_a_half_written_checkpoint_is_none(run: Run) -> None:
    job = run.job("dynamics", {}, {})
    with job.work() as work:
        (work.path / "checkpoint").write_text("")
        (work.path / ".checkpoint.partial").write_text("")
        (work.path / "checkpoint").unlink()
    with job.work() as work:
        assert not work.resumed


def test_unpublishable_work_is_refused(run: Run) -> None:
    def attempt(metrics: dict[str, object]) -> None:
        with run.job("dynamics", {}, {}).work() as work:
            (work.payload / "x").symlink_to("/etc/passwd") if not metrics else (work.payload / "x").touch()
            work.publish(settings={}, metrics=metrics, environment=None, machine={})

    for metrics in ({"loss": float("nan")}, {"returns": [1.0, float("inf")]}):
        with pytest.raises(DivergedError, match=f"{next(iter(metrics))} is not finite"):
            attempt(metrics)
    with pytest.raises(ArtifactError, match="'x' is a symlink"):
        attempt({})
    assert run.versions("dynamics") == []
    attempt({"mean": 1.0, "returns": (1.0, 2)})
    assert run.versions("dynamics") == [1]


def test_keys_and_values_survive_as_json(run: Run) -> None:
    """Number keys sort otherwise than text keys: the digest is of what is read back."""
    with run.job("profile", {}, {}).work() as work:
        artifact = work.publish(
            settings={"ü": (1, 2)},
            metrics={"by": {10: 1, 9: 2}},
            environment=None,
            machine={},
            extra={"note": "\x7f\u2028"},
        )
    assert artifact.metrics == {"by": {"10": 1, "9": 2}}
    assert artifact.settings == {"ü": [1, 2]}
    assert artifact.manifest["extra"] == {"note": "\x7f\u2028"}
    assert check(run) == [("profile@1", "ok", "")]


# -- prune and lineage ------------------------------------------------------------------------------------------------


def test_prune_keeps_manifests_pictures_and_lineage(run: Run) -> None:
    first = publish(run, "dynamics", 1)
    second = publish(run, "dynamics", 2, parent=first)
    kept = ["curves.png", "imagination.gif", "imagination.json", "imagination.webp"]
    for name in (*kept, "settings.json", "films.webp.txt"):
        (first.path / name).write_bytes(b"a film")
    assert run.prune("dynamics", {1}) == [1]
    assert sorted(entry.name for entry in first.path.iterdir()) == [*kept, "manifest.json", "pruned"]
    assert run.prune("dynamics", {1}) == []
    with pytest.raises(ArtifactError, match=r"dynamics@1 .* was pruned"):
        run.resolve("dynamics@1", "dynamics").verify()
    assert [row[:2] for row in check(run)] == [("dynamics@1", "pruned"), ("dynamics@2", "ok")]
    assert [(role, tree.name, tree.pruned) for _, role, tree in lineage(second).rows()] == [
        ("", "dynamics@2", False),
        ("parent", "dynamics@1", True),
    ]


def test_lineage_shows_each_version_once_and_missing_ones(run: Run) -> None:
    gone = publish(run, "experience", 1)
    experience = publish(run, "experience", 2, previous=gone)
    tokenizer = publish(run, "tokenizer", experience=experience)
    dynamics = publish(run, "dynamics", tokenizer=tokenizer, experience=experience)
    (gone.path / "manifest.json").unlink()
    rows = [
        (depth, role, tree.name, tree.repeated, bool(tree.problem)) for depth, role, tree in lineage(dynamics).rows()
    ]
    assert rows == [
        (0, "", "dynamics@1", False, False),
        (1, "experience", "experience@2", False, False),
        (2, "previous", "experience@1", False, True),
        (1, "tokenizer", "tokenizer@1", False, False),
        (2, "experience", "experience@2", True, False),
    ]


def test_lineage_of_a_long_run_is_neither_exponential_nor_recursive(run: Run) -> None:
    inputs = {"previous": publish(run, "experience", 0)}
    for identity in range(1, 60):
        inputs["controller"] = publish(run, "controller", identity, experience=inputs["previous"])
        inputs["previous"] = publish(run, "experience", identity, **inputs)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        rows = list(lineage(inputs["previous"]).rows())
    finally:
        sys.setrecursionlimit(limit)
    assert len({tree.digest for _, _, tree in rows}) == 119
    assert len(rows) == 1 + 59 * 3  # an edge each


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_one_object_a_line_after_a_crash(run: Run) -> None:
    assert run.history() == []
    run.log({"stage": "x", "loss": 0.5})
    with run.metrics.open("a") as file:
        file.write('{"stage": "x", "lo')
    run.log({"stage": "x", "loss": float("nan"), "all": [float("inf"), 1]})
    assert run.metrics.read_text().count("\n") == 3
    assert run.history() == [{"loss": 0.5, "stage": "x"}, {"all": [None, 1], "loss": None, "stage": "x"}]


# -- import -----------------------------------------------------------------------------------------------------------


def test_importing_the_store_is_cheap() -> None:
    code = (
        "import sys, wmcli.artifacts, wmcli.progress, wmcli.config;"
        "print([name for name in ('torch', 'zarr', 'numpy', 'rich', 'filelock') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
