"""Nothing damaged or hostile is taken for an artifact."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seconds import within
from small_stage import SETTINGS, publish

from wmcli.artifacts import Artifact, Run, check, open_artifact
from wmcli.artifacts import manifest as module
from wmcli.artifacts.manifest import MANIFEST, render
from wmcli.config import digest
from wmcli.errors import ArtifactError

DIGEST = "0" * 64


def test_a_published_artifact_describes_itself(run: Run) -> None:
    run.bind("catch", SETTINGS)
    parent = publish(run, "tokenizer")
    artifact = publish(run, "dynamics", tokenizer=parent)
    assert open_artifact(artifact.path / "manifest.json") == open_artifact(artifact.path) == artifact
    assert (artifact.kind, artifact.version, artifact.name) == ("dynamics", 1, "dynamics@1")
    assert (artifact.settings, artifact.metrics) == (SETTINGS, {"loss": 1.25})
    assert artifact.manifest["preset"] == "catch"
    assert artifact.run == run.path
    content = {key: value for key, value in artifact.manifest.items() if key != "digest"}
    assert artifact.digest == digest(content)
    assert artifact.inputs["tokenizer"].path == "tokenizer/v0001"
    assert artifact.input("tokenizer") == parent
    assert artifact.file("model.safetensors").read_text() == "weights 0"
    assert artifact.file("chunks").is_dir()
    with pytest.raises(ArtifactError, match="has no 'chunk'; it has: chunks/c/0, model.safetensors"):
        artifact.file("chunk")


def test_an_input_in_another_run_is_recorded_by_its_absolute_path(run: Run, tmp_path: Path) -> None:
    parent = publish(Run.open(tmp_path / "other", create=True), "tokenizer")
    artifact = publish(run, "dynamics", tokenizer=parent)
    assert artifact.inputs["tokenizer"].path == str(parent.path)
    assert artifact.input("tokenizer") == parent


def test_a_moved_run_still_finds_its_inputs(run: Run, tmp_path: Path) -> None:
    publish(run, "dynamics", tokenizer=publish(run, "tokenizer"))
    run.path.rename(tmp_path / "moved")
    moved = Run.open(tmp_path / "moved", create=False)
    assert moved.resolve("dynamics", "dynamics").input("tokenizer").path == tmp_path / "moved" / "tokenizer" / "v0001"


def test_an_input_that_is_gone_or_another_names_both_sides(run: Run) -> None:
    first, second = publish(run, "tokenizer", 1), publish(run, "tokenizer", 2)
    artifact = publish(run, "dynamics", tokenizer=first)
    shutil.rmtree(first.path)
    with pytest.raises(ArtifactError, match=r"dynamics@1 .* made from tokenizer@1 .* cannot be read"):
        artifact.input("tokenizer")
    shutil.copytree(second.path, first.path)
    with pytest.raises(
        ArtifactError, match=rf"tokenizer@1 \({first.digest[:12]}\).*another one \({second.digest[:12]}\)"
    ):
        artifact.input("tokenizer")
    assert ("dynamics@1", "unusable") in [row[:2] for row in check(run)]


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_truncation_is_found(run: Run) -> None:
    artifact = publish(run, "tokenizer")
    for name in ("manifest.json", "model.safetensors", "chunks/c/0"):
        file = artifact.path / name
        whole = file.read_bytes()
        damaged = [whole[:length] for length in range(0, len(whole), 1 + len(whole) // 40)] + [whole + b"\n"]
        for bit in range(0, 8 * len(whole), 1 if len(whole) < 100 else 7):  # 7: nearly every byte, each in one bit
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            damaged.append(bytes(flipped))
        for data in damaged:
            file.write_bytes(data)
            with pytest.raises(ArtifactError, match=name):
                open_artifact(artifact.path).verify_again()
        file.write_bytes(whole)
        open_artifact(artifact.path).verify_again()


def _remove(file: Path) -> None:
    file.unlink()


def _link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to("../elsewhere")


def _link_folder(file: Path) -> None:
    file.parent.rename(file.parents[3] / "elsewhere")
    file.parent.symlink_to(file.parents[3] / "elsewhere")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _more(file: Path) -> None:
    file.with_name("1").write_bytes(b"a chunk nobody wrote")


@pytest.mark.parametrize("harm", [_remove, _link, _link_folder, _pipe, _folder, _more])
def test_anything_but_the_listed_regular_files_is_refused(run: Run, harm: Callable[[Path], None]) -> None:
    artifact = publish(run, "tokenizer")
    harm(artifact.path / "chunks" / "c" / "0")
    with pytest.raises(ArtifactError, match=r"tokenizer@1 .*'chunks/c(/0|/1)?'"):
        artifact.file("model.safetensors")
    [(name, state, detail)] = check(run)
    assert (name, state) == ("tokenizer@1", "damaged")
    assert "chunks/c" in detail


def test_verified_once_is_not_read_again(run: Run) -> None:
    artifact = publish(run, "tokenizer")
    artifact.verify()
    (artifact.path / "model.safetensors").write_bytes(b"changed")
    open_artifact(artifact.path).verify()
    with pytest.raises(ArtifactError):
        artifact.verify_again()


def test_what_this_process_published_is_not_read_again_but_by_wm_verify(run: Run) -> None:
    with run.job("profile", {}, {}).work() as work:
        (work.payload / "a").write_bytes(b"content")
        artifact = work.publish(settings={}, metrics={}, environment=None, machine={})
    (artifact.path / "a").write_bytes(b"changed")
    open_artifact(artifact.path).verify()
    assert [state for _, state, _ in check(run)] == ["damaged"]


def test_a_version_pruned_since_it_was_verified_is_refused(run: Run) -> None:
    artifact = publish(run, "tokenizer")
    artifact.verify()
    run.prune("tokenizer", {1})
    with pytest.raises(ArtifactError, match="was pruned"):
        artifact.file("model.safetensors")


def test_the_digest_that_a_writer_knows_is_taken_and_the_others_are_computed(run: Run) -> None:
    with run.job("profile", {}, {}).work() as work:
        for name in ("a", "b"):
            (work.payload / name).write_bytes(b"content")
        artifact = work.publish(settings={}, metrics={}, environment=None, machine={}, sha256={"a": "0" * 64})
    found = {entry["path"]: entry["sha256"] for entry in artifact.manifest["files"]}
    assert found == {"a": "0" * 64, "b": hashlib.sha256(b"content").hexdigest()}
    assert check(run)[0][2].startswith("profile@1 (") and "'a' is damaged" in check(run)[0][2]


def test_a_manifest_is_parsed_once_as_long_as_it_does_not_change(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = publish(run, "tokenizer")
    manifest = artifact.path / MANIFEST
    for _ in range(2):  # it may change again within a tick of the clock
        assert open_artifact(artifact.path) is not open_artifact(artifact.path)
    os.utime(manifest, (1, 1))
    monkeypatch.setattr(module, "CLOCK_TICK", 0)
    time.sleep(0.02)  # the time of the change of its time stamp
    known = open_artifact(artifact.path)
    assert open_artifact(artifact.path) is known and known == artifact
    manifest.write_bytes(manifest.read_bytes().replace(b"1.25", b"1.26"))
    with pytest.raises(ArtifactError, match="was changed after publication"):
        open_artifact(artifact.path)


@pytest.mark.parametrize("links", [{"latest": "latest"}, {"latest": "other", "other": "latest"}])
def test_a_loop_of_links_is_no_version(links: dict[str, str], tmp_path: Path) -> None:
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    with pytest.raises(ArtifactError, match="latest/manifest.json"):
        open_artifact(tmp_path / "latest")


def test_an_input_that_a_manifest_does_not_name_is_one_line(run: Run) -> None:
    with pytest.raises(ArtifactError, match="names no controller that it was made from"):
        publish(run, "evaluation").input("controller")


def test_hidden_files_of_a_file_manager_do_no_harm(run: Run) -> None:
    artifact = publish(run, "tokenizer")
    (artifact.path / "chunks" / ".DS_Store").write_bytes(b"?")
    artifact.verify()


# -- hostile manifests ------------------------------------------------------------------------------------------------


def sealed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], bytes]:
    """A manifest whose digest fits what `change` did to it, as an attacker would write it."""

    def write(manifest: dict[str, Any]) -> bytes:
        change(manifest)
        manifest["digest"] = digest({key: value for key, value in manifest.items() if key != "digest"})
        return render(manifest)

    return write


def entry(**values: Any) -> dict[str, Any]:
    return {"path": "model.safetensors", "size": 1, "sha256": DIGEST} | values


def reference(**values: Any) -> dict[str, Any]:
    return {"tokenizer": {"kind": "tokenizer", "version": 1, "digest": DIGEST, "path": "tokenizer/v0001"} | values}


PATHS = ["/etc/passwd", "../../x", "a/../../x", "..", ".", "", "a//b", "./a", "a/", "a\\b", "a\x00b", "a\nb", "/"]

HOSTILE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda _: b"",
    "no JSON": lambda _: b"\x80\x04K\x01.",
    "no object": lambda _: b"[1]",
    "null": lambda _: b"null",
    "zeros": lambda _: bytes(1000),
    "huge": lambda _: b'{"schema": 1, "x": "' + b"a" * (50 << 20) + b'"}',
    "wide": lambda _: b'{"schema": 1, "x": [' + b"[]," * 600_000 + b"[]]}",
    "deep": lambda _: b'{"schema": 1, "x": ' + b"[" * 1_000_000,
    "deep settings": lambda m: render(m).replace(
        b'"settings": {', b'"settings": {"x":' + b"[" * 700 + b"]" * 700 + b","
    ),
    "long number": lambda _: b'{"schema": ' + b"9" * 1_000_000 + b"}",
    "many long numbers": lambda _: b'{"schema": 1, "x": [' + (b"9" * 4000 + b",") * 900 + b"0]}",
    "unicode surrogate": lambda m: render(m).replace(b'"tokenizer"', b'"\\ud800"'),
    "NaN": lambda m: render(m).replace(b"1.25", b"NaN"),
    "infinite": lambda m: render(m).replace(b"1.25", b"1e999"),
    "repeated key": lambda m: render(m).replace(b'{\n "created"', b'{\n "kind": "dynamics",\n "created"'),
    "other spelling": lambda m: json.dumps(m).encode(),
    "newer": sealed(lambda m: m.update(schema=3)),
    "newer settings": sealed(lambda m: m.update(settings_schema=99)),
    "settings of no schema": sealed(lambda m: m.update(settings_schema=True)),
    "true as 1": sealed(lambda m: m.update(schema=True)),
    "no schema": sealed(lambda m: m.pop("schema")),
    "no files": sealed(lambda m: m.pop("files")),
    "unknown key": sealed(lambda m: m.update(verison=1)),
    "unknown kind": sealed(lambda m: m.update(kind="pickle")),
    "kind of wrong type": sealed(lambda m: m.update(kind=["tokenizer"])),
    "version 0": sealed(lambda m: m.update(version=0)),
    "version true": sealed(lambda m: m.update(version=True)),
    "version text": sealed(lambda m: m.update(version="1")),
    "settings list": sealed(lambda m: m.update(settings=[])),
    "files of numbers": sealed(lambda m: m.update(files=[1, 2])),
    "files of text": lambda m: render(m).replace(b'"files": [', b'"files": ["a",'),
    "files object": lambda m: render({**m, "files": []}).replace(b'"files": []', b'"files": {}'),
    "negative size": sealed(lambda m: m.update(files=[entry(size=-1)])),
    "size as float": sealed(lambda m: m.update(files=[entry(size=1.0)])),
    "short digest": sealed(lambda m: m.update(files=[entry(sha256="ab")])),
    "digest with a line end": sealed(lambda m: m.update(files=[entry(sha256=DIGEST + "\n")])),
    "same file twice": sealed(lambda m: m.update(files=[entry(), entry()])),
    "lists itself": sealed(lambda m: m.update(files=[entry(path="manifest.json")])),
    "input of unknown kind": sealed(lambda m: m.update(inputs=reference(kind="x"))),
    "long key": sealed(lambda m: m.update({"x\n" * 100_000: 1})),
    **{f"file {path!r}": sealed(lambda m, path=path: m.update(files=[entry(path=path)])) for path in PATHS},
    **{
        f"input {path!r}": sealed(lambda m, path=path: m.update(inputs=reference(path=path)))
        for path in PATHS
        if path != "/etc/passwd"  # absolute paths lead to other runs; what is there must fit the digest
    },
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return publish(Run.open(tmp_path_factory.mktemp("run"), create=True), "tokenizer")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused_quickly_in_one_line(published: Artifact, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "v0001"
    shutil.copytree(published.path, folder)
    (folder / "manifest.json").write_bytes(HOSTILE[name](json.loads(json.dumps(published.manifest))))
    with within(2), pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match="larger than"):
        open_artifact(tmp_path)


def test_the_corpus_is_refused_for_its_hostility_only(published: Artifact, tmp_path: Path) -> None:
    """The same writer without a change makes a manifest that opens, and so does a harmless input elsewhere."""
    for change in (lambda m: m, lambda m: m.update(inputs=reference(path="/runs/other/tokenizer/v0001"))):
        manifest = json.loads(json.dumps(published.manifest))
        (tmp_path / "manifest.json").write_bytes(sealed(change)(manifest))
        assert open_artifact(tmp_path).name == "tokenizer@1"


def test_a_manifest_that_is_no_regular_file_is_refused(published: Artifact, tmp_path: Path) -> None:
    place = tmp_path / "manifest.json"
    place.symlink_to(published.path / "manifest.json")
    with pytest.raises(ArtifactError, match="is a symlink"):
        open_artifact(tmp_path)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(ArtifactError, match="no regular file"):
        open_artifact(tmp_path)


@pytest.mark.parametrize("path", ["missing", "manifest.json", "a\x00b", "x" * 5000])
def test_a_path_to_nothing_is_an_artifact_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(ArtifactError):
        open_artifact(tmp_path / path)
