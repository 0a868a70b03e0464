"""`training.replay`: every stage learns the same from frames in memory and from frames on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_systems import SYSTEMS, begun, learn, same, weights

from wmcli.errors import UsageError
from wmcli.experience.segment import read_frames
from wmcli.experience.stored import StoredColumn
from wmcli.stages.collect import collect
from wmcli.stages.opening import open_context
from wmcli.stages.tokenizer import train_tokenizer

FEW = ("dynamics.updates=12", "controller.updates=6")


@pytest.mark.parametrize("name", ["rem", "drama", "dreamer", "unizero"])
def test_frames_on_disk_are_as_good(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two segments, and no stage reads a column as a whole."""
    monkeypatch.setattr("wmcli.experience.load.read_frames", _refused)
    runs = {}
    for where in ("host", "disk"):
        with monkeypatch.context() as patch:
            if where == "host":
                patch.setattr("wmcli.experience.load.read_frames", read_frames)
            preset, overrides = SYSTEMS[name]
            folder = tmp_path / where
            context = open_context(folder, preset, [*overrides, f"training.replay={where}"], create=True, quiet=True)
            context.pictures = False
            collect(context)
            collect(context)
            made = [train_tokenizer(context)] if context.settings.dynamics.encoder == "tokenizer" else []
            made += [learn(folder, kind, *FEW)[0] for kind in ("dynamics", "controller")]
            runs[where] = made
            if where == "disk":
                assert isinstance(
                    context.experience(context.run.resolve("experience", "experience")).observation, StoredColumn
                )
    for one, other in zip(runs["host"], runs["disk"], strict=True):
        if one.kind != "controller" or name != "unizero":  # a planner has no weights
            assert same(weights(one), weights(other)), one.name


def _refused(folder: Path) -> None:
    raise AssertionError(f"{folder} is read as a whole")


def test_frames_that_are_drawn_are_not_on_disk(tmp_path: Path) -> None:
    folder = begun("s4wm", tmp_path / "run")
    with pytest.raises(UsageError, match=r"training.replay = disk: experience@1 has no frames on disk"):
        learn(folder, "dynamics", "training.replay=disk")
