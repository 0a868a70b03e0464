"""Copies of runs elsewhere: whole and checked, or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_stage import SETTINGS, publish

from wmcli.artifacts import Run, check
from wmcli.artifacts.remote import INDEX, pull, push
from wmcli.errors import ArtifactError, MachineError, UsageError
from wmcli.progress import Progress

fsspec = pytest.importorskip("fsspec")
QUIET = Progress(quiet=True)


@pytest.fixture
def full(run: Run) -> Run:
    """A run with settings, metrics, versions that follow one another, a pruned one and a best controller."""
    run.bind("catch", SETTINGS)
    run.log({"stage": "collect", "update": 1})
    tokenizer = publish(run, "tokenizer")
    publish(run, "tokenizer", 1, parent=tokenizer)
    publish(run, "controller")
    run.point("controller", "best", 1)
    run.prune("tokenizer", {1})
    return run


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://lab/runs/catch"
    fsspec.filesystem("memory").store.clear()


def files(folder: Path) -> dict[str, bytes]:
    """What matters of a run: no locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if ".pull-" in path.name or path == folder)


def test_a_run_goes_there_and_back(full: Run, memory: str, tmp_path: Path) -> None:
    sent = push(full, memory, QUIET)
    assert sent == {"url": memory, "versions": ["tokenizer@1", "tokenizer@2", "controller@1"]}
    copy = tmp_path / "copy"
    assert pull(memory, copy, QUIET)["versions"] == sent["versions"]
    assert files(copy) == files(full.path)
    assert [state for _, state, _ in check(Run(copy))] == ["pruned", "ok", "ok"]
    assert (copy / "tokenizer" / "latest").readlink() == Path("v0002")
    assert (copy / "controller" / "best").readlink() == Path("v0001")
    assert Run(copy).get("tokenizer", 2).input("parent").digest == full.get("tokenizer", 1).digest


def test_a_folder_is_written_in_place_and_whole(full: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes through /tmp, from where it would be copied: a full disk would leave half an index."""
    url = f"file://{tmp_path / 'store'}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    push(full, url, QUIET)
    before = files(tmp_path / "store")
    publish(full, "dynamics")
    with monkeypatch.context() as patch, pytest.raises(MachineError, match="No space left"):
        patch.setattr("wmcli.artifacts.files.os.fsync", full_disk)
        push(full, url, QUIET)
    assert files(tmp_path / "store") == before
    assert push(full, url, QUIET)["versions"] == ["dynamics@1"]


def full_disk(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_only_what_is_new_is_sent_and_fetched(full: Run, memory: str, tmp_path: Path) -> None:
    push(full, memory, QUIET)
    pull(memory, tmp_path / "copy", QUIET)
    publish(full, "dynamics")
    full.log({"stage": "train-dynamics", "update": 2})
    assert push(full, memory, QUIET)["versions"] == ["dynamics@1"]
    assert push(full, memory, QUIET)["versions"] == []
    assert pull(memory, tmp_path / "copy", QUIET)["versions"] == ["dynamics@1"]
    assert files(tmp_path / "copy") == files(full.path)
    there = fsspec.filesystem("memory").find("/lab/runs/catch/files")
    assert len(there) == 2, "earlier metrics are removed"


def test_a_copy_that_is_ahead_stays_so(full: Run, memory: str, tmp_path: Path) -> None:
    push(full, memory, QUIET)
    pull(memory, tmp_path / "copy", QUIET)
    ahead = Run(tmp_path / "copy")
    ahead.log({"stage": "eval"})
    publish(ahead, "dynamics")
    before = files(ahead.path)
    assert pull(memory, ahead.path, QUIET)["versions"] == []
    assert files(ahead.path) == before


@pytest.mark.parametrize("name", ["tokenizer/v0002/model.safetensors", "tokenizer/v0002/manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_on_the_way_is_refused_and_leaves_nothing(full: Run, name: str, damage: str, tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    push(full, f"file://{store}", QUIET)
    file = store / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if damage == "truncated" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises((ArtifactError, MachineError), match=name if damage != "missing" else "FileNotFoundError"):
        pull(f"file://{store}", copy, QUIET)
    assert kept(copy) == []


def test_damaged_metrics_are_refused(full: Run, tmp_path: Path) -> None:
    push(full, f"file://{tmp_path}/store", QUIET)
    (metrics,) = (tmp_path / "store" / "files").glob("*metrics.jsonl")
    metrics.write_bytes(metrics.read_bytes().replace(b"collect", b"COLLECT"))
    with pytest.raises(ArtifactError, match=r"metrics.jsonl: its sha256 is wrong"):
        pull(f"file://{tmp_path}/store", tmp_path / "copy", QUIET)
    assert kept(tmp_path / "copy") == []


def test_a_damaged_version_is_not_sent(full: Run, memory: str) -> None:
    file = full.path / "controller" / "v0001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(ArtifactError, match="sha256 is wrong"):
        push(full, memory, QUIET)
    with pytest.raises(ArtifactError, match="no wm-run.json"):
        pull(memory, full.path, QUIET)


def test_an_interrupted_push_leaves_the_copy_as_it_was(
    full: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store"
    push(full, url, QUIET)
    first = files(full.path)
    publish(full, "dynamics")
    full.log({"stage": "train-dynamics"})
    write = "wmcli.artifacts.remote._Store.write"

    def fails(store: Any, name: str, parts: Iterator[bytes]) -> None:
        if name == INDEX:
            raise MachineError("the network is gone")
        original(store, name, parts)

    from wmcli.artifacts.remote import _Store

    original = _Store.write
    with monkeypatch.context() as patch:
        patch.setattr(write, fails)
        with pytest.raises(MachineError):
            push(full, url, QUIET)
    pull(url, tmp_path / "copy", QUIET)
    assert files(tmp_path / "copy") == first
    push(full, url, QUIET)
    assert pull(url, tmp_path / "copy", QUIET)["versions"] == ["dynamics@1"]


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("tokenizer/v0002", "../../../escaped"),
        ("tokenizer/v0002", "/tmp/escaped"),
        ("tokenizer/v0002", "a//b"),
        ("../v0002", "model.safetensors"),
        ("tokenizer/v2", "model.safetensors"),
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(full: Run, key: str, path: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    push(full, f"file://{store}", QUIET)
    index = json.loads((store / INDEX).read_bytes())
    version = index["versions"].pop("tokenizer/v0002")
    version["files"][0]["path"] = path
    index["versions"][key] = version
    (store / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=f"{INDEX}: no index of a run"):
        pull(f"file://{store}", tmp_path / "copy", QUIET)
    assert kept(tmp_path / "copy") == [] and not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": "wm run", "schema": 2}', "{" * 9999])
def test_what_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ArtifactError, match="no index of a run" + (".*schema 2, but" if "2" in text else "")):
        pull(f"file://{tmp_path}", tmp_path / "copy", QUIET)


def test_a_file_with_more_than_is_known_is_refused(full: Run, tmp_path: Path) -> None:
    store = tmp_path / "store"
    push(full, f"file://{store}", QUIET)
    index = json.loads((store / INDEX).read_bytes())
    index["versions"]["tokenizer/v0002"]["files"][0]["mode"] = 511
    (store / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="no index of a run"):
        pull(f"file://{store}", tmp_path / "copy", QUIET)


def test_two_different_runs_do_not_mix(full: Run, memory: str, tmp_path: Path) -> None:
    push(full, memory, QUIET)
    other = Run.open(tmp_path / "other", create=True)
    other.log({"stage": "other"})
    with pytest.raises(ArtifactError, match="metrics.jsonl is not that of"):
        pull(memory, other.path, QUIET)
    publish(other, "tokenizer", "another")
    for attempt in (lambda: pull(memory, other.path, QUIET), lambda: push(other, memory, QUIET)):
        with pytest.raises(ArtifactError, match=r"another tokenizer@1"):
            attempt()
    assert files(other.path).keys() == {"metrics.jsonl", *(f"tokenizer/v0001/{name}" for name in _names(other))}


def _names(run: Run) -> list[str]:
    return [*(entry["path"] for entry in run.get("tokenizer", 1).manifest["files"]), "manifest.json"]


def test_inputs_of_other_runs_are_named(
    full: Run, memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run.open(tmp_path / "other", create=True)
    publish(other, "dynamics", tokenizer=full.get("tokenizer", 2))
    push(other, memory, QUIET)
    said = capsys.readouterr().err
    assert "dynamics@1 was made from tokenizer@2 of another run" in said and "wm push" in said


@pytest.mark.parametrize(
    ("url", "said"), [("nowhere://a/b", "Protocol not known"), ("s3://bucket/run", "s3|boto|S3|credential")]
)
def test_a_store_that_cannot_be_used_is_one_line(full: Run, url: str, said: str) -> None:
    if url.startswith("s3") and shutil.which("aws"):
        pytest.skip("may have credentials")
    with pytest.raises((UsageError, MachineError), match=said) as error:
        push(full, url, QUIET)
    assert "\n" not in str(error.value)
