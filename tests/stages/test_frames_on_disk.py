"""`training.replay = disk`: every stage reads frames from disk, no more than it needs, and gives the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_systems import STAGES, Make, learn, opened, same, weights
from tiny_run import latest, sha256

from wmcli.dream import open_dreams
from wmcli.experience import load, segment, stored
from wmcli.experience.stored import StoredColumn
from wmcli.progress import Progress
from wmcli.stages.collect import collect
from wmcli.stages.held_out import evaluate_held_out
from wmcli.stages.profile_cycle import random_experience
from wmcli.trainers import batches

ON_DISK = "training.replay=disk"
SYSTEMS = {
    "rem": ("rem", ()),
    "drama": ("drama", ()),
    "prioritized": ("drama", ("training.sampling=prioritized",)),
    "dreamer": ("dreamer", ()),
    "unizero": ("unizero", ()),
    "muzero": ("muzero", ()),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and shards in each segment, no chunk kept, and few frames encoded at a time."""
    monkeypatch.setattr(segment, "CHUNK", 8)
    monkeypatch.setattr(segment, "SHARD", 24)
    monkeypatch.setattr(stored, "CACHE", 0)
    monkeypatch.setattr(batches, "ENCODE_BATCH", 20)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of all rows that each read from disk takes."""
    shares: list[float] = []
    read = StoredColumn.read

    def watched(column: StoredColumn, rows: np.ndarray, into: torch.Tensor) -> None:
        shares.append(len(rows) / len(column))
        read(column, rows, into)

    monkeypatch.setattr(StoredColumn, "read", watched)
    return shares


def refuse(*_: object) -> None:
    pytest.fail("a whole segment of frames was loaded")


@pytest.mark.parametrize(
    "case", [*list(SYSTEMS)[:2], *(pytest.param(c, marks=pytest.mark.slow) for c in list(SYSTEMS)[2:])]
)
def test_every_stage_makes_the_same(make: Make, monkeypatch, reads: list[float], case: str) -> None:
    name, overrides = SYSTEMS[case]
    run = make(name)
    collect(opened(run))  # a second segment, in the middle of episodes
    settings = opened(run).settings
    for kind in (*["tokenizer"] * (settings.dynamics.encoder == "tokenizer"), "dynamics", "controller"):
        in_memory, updates = learn(run, kind, *overrides, force=True)
        assert not reads
        with monkeypatch.context() as patch:
            patch.setattr(load, "read_frames", refuse)
            on_disk, again = learn(run, kind, *overrides, ON_DISK, force=True)
        assert [each.metrics for each in again] == [each.metrics for each in updates]
        assert same(weights(on_disk), weights(in_memory)) and sha256(on_disk) == sha256(in_memory)
        assert reads and max(reads) < 0.6, "each read takes some rows"
        reads.clear()
