"""Where results may be written, and where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from wmcli.artifacts.manifest import MANIFEST, write_manifest
from wmcli.errors import UsageError
from wmcli.report.files import check_target, write_whole


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A published version with a picture in a folder of its own."""
    folder = tmp_path / "run" / "dynamics" / "v0001"
    (folder / "pictures").mkdir(parents=True)
    write_manifest(folder, {"kind": "dynamics", "version": 1, "job": "0" * 64, "files": []})
    return folder


def test_nothing_is_written_into_an_artifact(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "dynamics" / "latest").symlink_to("v0001")
    (tmp_path / "elsewhere").symlink_to(artifact / "pictures")
    (tmp_path / "link.png").symlink_to(artifact / "a.png")
    (artifact / "out.png").symlink_to(tmp_path / "b.png")
    inside = ["v0001/a.png", "v0001/pictures/a.png", "latest/a.png", "v0001/out.png", "../dynamics/v0001/a.png"]
    for place in [*(tmp_path / "run" / "dynamics" / name for name in inside), tmp_path / "elsewhere" / "a.png"] + [
        tmp_path / "link.png"
    ]:
        with pytest.raises(UsageError, match="inside the artifact .*v0001") as caught:
            check_target(place)
        assert str(place) in str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises(UsageError, match="inside the artifact"):
            write_whole(place, lambda draft: draft.write_text("x"))
    assert sorted(each.name for each in artifact.iterdir()) == [MANIFEST, "out.png", "pictures"]


@pytest.mark.parametrize("text", ['{"name": "an extension", "version": "1"}', "[]", "no JSON", "\xff"])
def test_the_manifests_of_others_do_not_count(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    check_target(tmp_path / "a.png")


def test_beside_an_artifact_there_is_room(artifact: Path) -> None:
    check_target(artifact.parent / "a.png")
    write_whole(artifact.parent.parent / "a.txt", lambda draft: draft.write_text("x"))
    assert (artifact.parent.parent / "a.txt").read_text() == "x"


def test_unwritable_values_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name, problem in [
        ("a.txt", "must end in .png or .svg, not '.txt'"),
        ("none/a.png", "there is no folder .*none; create it first"),
        ("folder.png", "it is a folder"),
    ]:
        with pytest.raises(UsageError, match=problem):
            check_target(tmp_path / name, (".png", ".svg"))
    check_target(tmp_path / "A.PNG", (".png",))
