"""The tokens of all frames, kept: the same as encoded afresh, whatever came before in the process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import latest, opened

from wmcli.artifacts import Run
from wmcli.assemble import load_world_model
from wmcli.experience import Windows
from wmcli.progress import Progress
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.train import latents_of
from wmcli.trainers import batches
from wmcli.trainers.batches import gather
from wmcli.training.device import Machine

CPU = Machine(torch.device("cpu"), "float32", 1)


class Counting:
    """Stands for a world model: the latent of a frame is a sum over it and the number of frames encoded with it."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, observation: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        frames = observation.shape[1]
        self.encoded.append(frames)
        pixels = observation.flatten(2).long()  # (1, T, H W C)
        total = (pixels * torch.arange(pixels.shape[2])).sum(2)
        return torch.stack([total, torch.full_like(total, frames)], -1)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "ENCODE_BATCH", 20)


@pytest.fixture
def longer(run: Path) -> Path:
    """Experience of 90, 102 and 108 rows at its three versions."""
    for steps in (12, 6):
        collect(opened(run), steps=steps, controller="random")
    return run


def encoded(context: Context, version: int, model: Counting) -> torch.Tensor:
    run = context.run
    return latents_of(
        context, model, run.get("tokenizer", 1).digest, context.experience(run.get("experience", version))
    )


def test_kept_tokens_are_those_of_each_frame(longer: Path) -> None:
    context = opened(longer)
    world_model = load_world_model(latest(longer, "dynamics"), CPU)
    memory = context.experience(latest(longer, "experience"))
    tokens = latents_of(context, world_model, latest(longer, "tokenizer").digest, memory)
    assert tokens.shape == (108, 16) and tokens.dtype == torch.int64
    assert len(tokens.unique(dim=0)) > 1
    chunks = [world_model.encode(memory.observation[None, begin : begin + 20])[0] for begin in range(0, 108, 20)]
    assert torch.equal(tokens, torch.cat(chunks))
    alone = torch.stack([world_model.encode(frame[None, None])[0, 0] for frame in memory.observation])
    assert (tokens == alone).float().mean() > 0.99  # other sizes of a batch may round otherwise


def test_added_rows_are_encoded_like_earlier_ones(longer: Path) -> None:
    """The bits of a frame may depend on the batch that it is encoded in, so the batches must be the same."""
    growing, model = opened(longer), Counting()
    for version, sizes in [(1, [20] * 4 + [10]), (2, [20, 2]), (3, [8])]:
        model.encoded.clear()
        tokens = encoded(growing, version, model)
        assert model.encoded == sizes
        assert torch.equal(tokens, encoded(opened(longer), version, Counting()))
    model.encoded.clear()
    assert torch.equal(encoded(growing, 3, model), tokens)
    assert sum(model.encoded) <= 8


def test_older_experience_after_newer(longer: Path) -> None:
    context = opened(longer)
    encoded(context, 3, Counting())
    assert torch.equal(encoded(context, 1, Counting()), encoded(opened(longer), 1, Counting()))


def test_other_experience_has_other_tokens(longer: Path) -> None:
    """Another time line after this one, in one process: nothing of the first is left."""
    collect(opened(longer, "seed=9"), extend=False, controller="random")
    context = opened(longer)
    first = encoded(context, 1, Counting())
    other = encoded(context, 4, Counting())
    assert len(first) == len(other) == 90
    assert not torch.equal(first, other)
    assert torch.equal(other, encoded(opened(longer), 4, Counting()))


def test_only_the_tokens_of_one_tokenizer_are_kept(longer: Path) -> None:
    context = opened(longer)
    run = Run.open(longer, create=False)
    memory = context.experience(run.get("experience", 1))
    for kind in ("tokenizer", "dynamics"):  # any digest will do
        latents_of(context, Counting(), latest(longer, kind).digest, memory)
        assert list(context.latents) == [latest(longer, kind).digest]


def test_a_batch_holds_the_rows_of_its_windows(longer: Path) -> None:
    context = opened(longer)
    memory = context.experience(latest(longer, "experience"))
    latents = encoded(context, 3, Counting())
    rows = np.array([[0, 0, 3], [6, 9, 12]])
    windows = Windows(rows, np.array([[False, True, True], [True, True, True]]))
    batch = gather(memory, latents, windows)
    assert torch.equal(batch.inputs, latents[torch.from_numpy(rows)])
    for name in ("action", "reward", "terminated", "truncated"):
        assert torch.equal(getattr(batch, name), getattr(memory, name)[torch.from_numpy(rows)])
    assert memory.first[0]
    assert batch.is_first.tolist() == [[False, True, False], [False, False, False]]  # padding opens nothing
    assert batch.valid.tolist() == windows.valid.tolist()
    assert batch.is_last is None
    memory._columns["opens_game"][6], memory._columns["ends_game"][3] = True, True  # as if a game began and ended there
    batch = gather(memory, latents, windows, across_ends=True)
    assert batch.is_first.tolist() == [[False, True, False], [True, False, False]]
    assert batch.is_last is not None and batch.is_last.tolist() == [[False, False, True], [False, False, False]]


@pytest.mark.parametrize("where", ["auto", "device", "host"])
def test_frames_are_kept_where_the_setting_says_and_a_line_tells(longer: Path, where: str, capsys) -> None:
    """On a device that holds no numbers: what is on the host still has them."""
    context = opened(longer, f"training.replay={where}")
    context.progress = Progress()
    context.machine = replace(context.machine, device=torch.device("meta"))
    told = "108 frames (0.0 GB) stay in host memory (training.replay = host)"
    memory = context.experience(latest(longer, "experience"))
    assert memory.frames_on_host == (where == "host") and memory.action.device.type == "meta"
    assert (told in capsys.readouterr().err) == (where == "host")
    assert context.experience(latest(longer, "experience")) is memory
    assert told not in capsys.readouterr().err
