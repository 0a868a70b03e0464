"""Data-parallel training: two ranks with half of each batch equal one process with the whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from wmcli import ranks
from wmcli.errors import UsageError
from wmcli.stages.checks import check_batches
from wmcli.training.device import Machine
from wmcli.training.settings import TrainingSettings

HERE = Path(__file__).parent
EVEN = ["dynamics.batch=4", "controller.batch=4", "tokenizer.batch=6"]
PLAIN = [each for each in EVEN if not each.startswith("tokenizer")]
PRIORITY = ["training.sampling=prioritized", "dynamics.free_nats_of=mean", "dynamics.free_nats=0.77"]
FEW = [
    ("rem", "dynamics", 6, "float32", [*EVEN, "backbone.dropout=0.25"]),
    ("drama", "dynamics", 6, "float32", [*EVEN, *PRIORITY]),
    ("unizero", "dynamics", 6, "float64", PLAIN),
    ("unizero", "controller", 3, "float32", PLAIN),
]
MANY = [
    ("rem", "tokenizer", 20, "float32", EVEN),
    ("rem", "tokenizer", 9, "float64", [*EVEN, "tokenizer.object_share=0.5"]),
    ("rem", "tokenizer", 9, "float32", [*EVEN, "tokenizer.quantizer=vq-ema"]),
    ("rem", "dynamics", 20, "float32", EVEN),
    ("rem", "dynamics", 9, "float64", [*EVEN, "dynamics.ensemble=2"]),
    ("rem", "controller", 20, "float32", EVEN),
    ("rem", "controller", 9, "float64", [*EVEN, "controller.learn_after_end=false"]),
    ("drama", "tokenizer", 9, "float32", [*EVEN, "tokenizer.object_share=0.5"]),
    ("drama", "dynamics", 20, "float32", EVEN),
    ("drama", "dynamics", 6, "float64", [*EVEN, "training.sampling=dfs"]),
    ("drama", "controller", 20, "float32", [*EVEN, "controller.normalize_inputs=true", "controller.starts=1"]),
    ("drama", "controller", 9, "float64", [*EVEN, "controller.least_range=0.01"]),
    ("rssm", "dynamics", 20, "float64", [*EVEN, "training.frames_at_once=7"]),
    ("rssm", "controller", 9, "float32", [*EVEN, "controller.start=posterior", "controller.starts=2"]),
    ("unizero", "dynamics", 20, "float64", PLAIN),
    # Few updates: SGD on this model makes 0.2 of a difference of 1e-10 in one weight within twenty.
    ("muzero", "dynamics", 5, "float64", [*PLAIN, "dynamics.shift=2", "dynamics.intensity=0.1"]),
    ("muzero", "controller", 9, "float32", PLAIN),
]
ODD = [("unizero", "controller", 9, "float32", [*PLAIN, "controller.batch=5"])]
"""A search at a number of frames that two ranks cannot share out equally draws other noise."""


def train(cases: list[tuple[Any, ...]], count: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Train in `count` processes side by side: what each of them found, by rank."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    about = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = os.pathsep.join([str(HERE), *sys.path])
    results = folder / f"of-{count}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "as_rank.py"), str(folder / "cases.json"), str(results)],
            env=os.environ | about | {"PYTHONPATH": path, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
    return [torch.load(results.with_suffix(f".{rank}.pt"), weights_only=False) for rank in range(count)]


def is_free(name: str) -> bool:
    """Whether a tensor may differ: a bias in front of a BatchNorm has no gradient but rounding, and shifts its mean."""
    before_norm = ("encoder.0.bias", "encoder.3.bias", "decoder.layers.2.bias")
    return name.endswith((*before_norm, "running_mean"))


def check(cases: list[tuple[Any, ...]], folder: Path) -> None:
    (alone,) = train(cases, 1, folder)
    one, other = train(cases, 2, folder)
    for case, whole, first, second in zip(cases, alone, one, other, strict=True):
        name, _, updates, dtype, _ = case
        assert same(first["weights"], second["weights"]), f"{case}: the ranks hold different weights"
        assert first["metrics"] == second["metrics"] and torch.equal(first["random"], second["random"])
        assert_equal_states(first["parts"], second["parts"], f"{case}, second rank")
        if whole["encoded"] is not None:
            assert all(torch.equal(whole["encoded"], each["encoded"]) for each in (first, second)), f"{case}: latents"
        assert first["names"] == whole["names"]
        if case in ODD:
            continue
        assert torch.equal(whole["random"], first["random"]), f"{case}: other random numbers were drawn"
        assert_equal_states(whole["parts"], first["parts"], f"{case}")
        scale = whole["losses"].abs().clamp(min=1)
        off = ((first["losses"] - whole["losses"]) / scale).abs()
        assert off[0].max() < 1e-6 and off.max() < (1e-6 if dtype == "float64" else 1e-5) * updates, f"{case}: {off}"
        for key, value in whole["weights"].items():
            if isinstance(value, Tensor) and value.numel() and not (name == "drama" and is_free(key)):
                assert torch.allclose(first["weights"][key], value, rtol=1e-5, atol=1e-5), f"{case}: {key}"


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def assert_equal_states(one: dict[str, Any], other: dict[str, Any], where: str) -> None:
    """Samplers stand at the same place, and hold the same numbers up to rounding."""
    assert one.keys() == other.keys()
    for part, state in one.items():
        assert state.keys() == other[part].keys()
        for key, value in state.items():
            if hasattr(value, "dtype"):
                close = torch.allclose(torch.as_tensor(value), torch.as_tensor(other[part][key]), rtol=1e-3, atol=1e-4)
                assert value.shape == other[part][key].shape and close, f"{where}: {part} {key}"
            else:
                assert value == other[part][key], f"{where}: {part} {key}"


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    check(FEW, tmp_path)


@pytest.mark.slow
def test_two_ranks_equal_one_process_in_every_system(tmp_path: Path) -> None:
    check([*MANY, *ODD], tmp_path)


def test_a_batch_must_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    from wmcli.settings import resolve

    monkeypatch.setattr(ranks, "_size", 3)
    with pytest.raises(UsageError, match=r"dynamics.batch = 64 rows .* among 3 processes.*dynamics.batch=66"):
        check_batches(resolve("rem", ["dynamics.batch=64"]))
    check_batches(resolve("muzero-quick", ["dynamics.batch=66", "controller.batch=64"]))


def test_ranks_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_size", 2)
    with pytest.raises(UsageError, match="every process needs its own"):
        Machine.choose(TrainingSettings(device="cuda:1"))
    assert Machine.choose(TrainingSettings(device="cpu")).describe()["ranks"] == 2


def test_alone_everything_is_as_it_was() -> None:
    x = torch.arange(6.0).view(3, 2)
    with ranks.sharing_rows():
        assert not ranks.is_sharing()
        assert ranks.own_rows(x) is x and ranks.total(x) is x and ranks.mean(x) is x and ranks.gather_rows(x) is x
        assert ranks.all_rows(3) == 3 and ranks.agree(False, True) == [False, True] and ranks.first(lambda: 5) == 5
