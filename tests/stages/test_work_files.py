"""Damaged files of unfinished work are refused by name, publish nothing, and the way out in the message works.

A work file is flipped in its length, its header, its tensors and its end, or cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_run import EVERY_STAGE, Killed, copied, kill_at, latest, opened

from wmcli.artifacts import Artifact, Run
from wmcli.errors import ArtifactError
from wmcli.stages.collect import collect

EAGER = "training.checkpoint_seconds=0"
COLLECT = partial(collect, steps=30)


class Stopped(NamedTuple):
    """A stage that died after some checkpoints."""

    kind: str
    stage: Callable[..., Artifact]
    overrides: tuple[str, ...]
    checkpoints: int


APART = ("collect.apart=true",)
STAGES = {
    "tokenizer": Stopped("tokenizer", EVERY_STAGE["tokenizer"], (), 4),
    "dynamics": Stopped("dynamics", EVERY_STAGE["dynamics"], (), 4),
    "controller": Stopped("controller", EVERY_STAGE["controller"], (), 3),
    "collect": Stopped("experience", COLLECT, (), 3),
    "apart": Stopped("experience", COLLECT, APART, 12),  # the first environment is done after 9
    "eval": Stopped("evaluation", EVERY_STAGE["evaluation"], ("seed=7",), 3),
    "random play": Stopped("evaluation", EVERY_STAGE["evaluation"], ("seed=7",), 25),
}


def of(name: str, folder: Path, *, fresh: bool = False) -> Artifact:
    """The stage's artifact, of a command that ends."""
    how = STAGES[name]
    force = how.kind in ("tokenizer", "dynamics", "controller")
    return how.stage(opened(folder, *how.overrides, force=force, fresh=fresh))


def content(artifact: Artifact) -> object:
    """What does not depend on when it was made."""
    if artifact.kind == "evaluation":
        return {name: artifact.metrics[name] for name in ("returns", "lengths", "random_mean")}
    entries = artifact.manifest["files"]
    return {each["path"]: each["sha256"] for each in entries if each["path"] != "training.safetensors"}


@pytest.fixture
def stopped(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A copy of `tiny` in which a stage died."""

    def die(name: str) -> Path:
        how, run = STAGES[name], copied(tiny, tmp_path / "run")
        force = how.kind in ("tokenizer", "dynamics", "controller")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, "checkpoint", how.checkpoints)
            how.stage(opened(run, EAGER, *how.overrides, force=force))
        return run

    return die


def work_files(run: Path) -> list[Path]:
    return sorted(run.glob("*/.work-*/**/*.safetensors"))


def damages(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Spoilt copies of a work file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = data[8:begin]
    places = {
        "length": 0,
        "metadata": 8 + header.index(b'"wm"') + 10,
        "offset": 8 + header.rindex(b"data_offsets") + 15,
        "end of the header": begin - 1,
        "first tensor": begin,
        "middle": (begin + len(data)) // 2,
        "end": len(data) - 1,
    }
    for name, place in places.items():
        yield name, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    yield "cut", data[:-8]
    yield "longer", data + bytes(8)
    yield "empty", b""


def complaint(name: str, run: Path) -> str:
    """The message of the refusal; nothing is published."""
    before = Run.open(run, create=False).versions(STAGES[name].kind)
    with pytest.raises(ArtifactError) as caught:
        of(name, run)
    assert Run.open(run, create=False).versions(STAGES[name].kind) == before
    return str(caught.value)


def needed(name: str, run: Path) -> list[Path]:
    """The work files that the stage goes on from."""
    return [path for path in work_files(run) if "-before" not in path.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_every_damage_of_every_work_file_is_refused_by_name(stopped: Callable[[str], Path], name: str) -> None:
    run = stopped(name)
    files = needed(name, run)
    assert files and len(work_files(run)) > len(files)
    for path in files:
        data = path.read_bytes()
        for where, spoilt in damages(data):
            path.write_bytes(spoilt)
            message = complaint(name, run)
            assert message.startswith(f"{path} is damaged"), where
            assert "--fresh" in message or "remove it" in message
        path.write_bytes(data)
    of(name, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_the_way_out_leads_to_the_undisturbed_result(
    tiny: Path, tmp_path: Path, stopped: Callable[[str], Path], name: str
) -> None:
    undisturbed = content(of(name, copied(tiny, tmp_path / "whole")))
    run = stopped(name)
    for number, file in enumerate(path.relative_to(run) for path in needed(name, run)):
        damaged = copied(run, tmp_path / f"damaged-{number}")
        path = damaged / file
        data = path.read_bytes()
        path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
        message, fresh = complaint(name, damaged), False
        if way := re.search(r"to go on from the checkpoint before it \((.+)\), remove (\S+) and run", message):
            assert re.match(r"(update|step) [1-9]|\d+ episodes", way[1])
            Path(way[2]).unlink()
        elif "; remove it, and the same command plays that environment again." in message:
            path.unlink()
        else:
            assert message.endswith("; restart the stage with --fresh.") or "does not help; restart" in message
            fresh = True
        if file.name == "checkpoint.safetensors":
            assert way is not None
        artifact = of(name, damaged, fresh=fresh)
        assert content(artifact) == undisturbed
        assert artifact.version == latest(damaged, artifact.kind).version
