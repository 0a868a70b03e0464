"""The machine a stage runs on is what was asked for or an error, and its randomness is its own."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from wmcli.errors import UsageError
from wmcli.kernels import dispatch
from wmcli.training.device import Machine, derived_seed, isolated_randomness
from wmcli.training.settings import TrainingSettings

CPU = torch.device("cpu")
TF32: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)  # each has a flag `allow_tf32`


def choose(**settings: Any) -> Machine:
    return Machine.choose(TrainingSettings(**settings))


# -- the machine ------------------------------------------------------------------------------------------------------


def test_the_requested_device_is_chosen_and_reported() -> None:
    machine = choose(device="cpu", precision="bfloat16", threads=1)
    assert (machine.device, machine.precision, machine.threads) == (CPU, "bfloat16", 1)
    assert torch.get_num_threads() == 1
    assert str(machine) == "cpu, bfloat16, 1 thread, kernels in torch"
    block = machine.describe()
    assert {key: block[key] for key in ("device", "precision", "threads")} == {
        "device": "cpu",
        "precision": "bfloat16",
        "threads": 1,
    }
    assert {"wm", "torch", "numpy", "python", "platform", "device_name"} <= set(block)


def test_no_number_of_threads_keeps_torchs() -> None:
    torch.set_num_threads(2)
    assert choose(device="cpu", threads=0).threads == 2


def test_auto_is_a_device_that_is_there_in_a_precision_that_it_has() -> None:
    machine = choose(device="auto", precision="auto")
    assert machine.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert machine.precision in ("float32", "bfloat16")
    assert torch.zeros(2, device=machine.device).sum() == 0


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_it)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert choose(device="cpu", precision="auto").precision == ("bfloat16" if has_it else "float32")
    assert choose(device="cpu", precision="float32").precision == "float32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_device_that_is_not_there_is_no_reason_to_take_another(device: str) -> None:
    with pytest.raises(UsageError, match=f"training.device = '{device}' is not on this machine; run with --device cpu"):
        choose(device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_beyond_the_last_is_an_error() -> None:
    with pytest.raises(UsageError, match="not on this machine"):
        choose(device=f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("device", ["", "gpu", "cuda:x", "cuda:-1", "toaster", "CPU"])
def test_nonsense_is_no_device(device: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(device=device)
    assert f"training.device = '{device}' is not a device of torch" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_devices_of_other_kinds_are_not_supported(device: str) -> None:
    with pytest.raises(UsageError, match=f"training.device = '{device}' is not supported"):
        choose(device=device)


def test_autocast_only_in_bfloat16() -> None:
    a = torch.randn(3, 4)
    with choose(device="cpu", precision="bfloat16").autocast():
        assert (a @ a.T).dtype == torch.bfloat16
    with choose(device="cpu", precision="float32").autocast():
        assert (a @ a.T).dtype == torch.float32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.exact = Exact(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exact(self.linear(self.conv(x).mean((2, 3))))


class Exact(nn.Linear):
    in_float32 = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_frozen_model_gives_the_same_bits(precision: str) -> None:
    machine = choose(device="cpu", precision=precision)
    model, x = Model(), torch.randn(4, 3, 9, 9)
    with machine.autocast():
        want = model(x)
        model = machine.freeze(model)
        assert torch.equal(model(x), want)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    low = torch.bfloat16 if precision == "bfloat16" else torch.float32
    assert [each.weight.dtype for each in (model.conv, model.linear, model.exact)] == [low, low, torch.float32]


def test_parts_prepare_from_the_weights_they_are_frozen_with() -> None:
    class Part(nn.Linear):
        prepared: torch.Tensor

        def freeze(self) -> None:
            assert not self.training and not self.weight.requires_grad
            self.prepared = self.weight.clone()

    model = nn.Sequential(nn.Sequential(Part(2, 3)), nn.ReLU())
    choose(device="cpu", precision="bfloat16").freeze(model)
    part: Any = model[0][0]
    assert part.prepared.dtype == torch.bfloat16 and torch.equal(part.prepared, part.weight)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_float32_is_never_tf32_on_a_gpu(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    for each in TF32:
        each.allow_tf32 = True
    choose(device="cpu", precision=precision)
    assert [each.allow_tf32 for each in TF32] == [True, True]
    monkeypatch.setattr("wmcli.training.device._device", torch.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(device="cuda", precision=precision, kernels="torch").device.type == "cuda"
    assert [each.allow_tf32 for each in TF32] == [False, False]
    with torch.backends.cudnn.flags(allow_tf32=False):
        pass  # torch refuses to read a state that was written through both of its interfaces


@pytest.mark.parametrize("deterministic", [True, False])
def test_operations_on_a_gpu_are_deterministic(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """Attention that sums its gradients in any order is off as well: torch would only warn of it."""
    choose(device="cpu")
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    monkeypatch.setattr("wmcli.training.device._device", torch.device)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    choose(device="cuda", kernels="torch", precision="bfloat16", deterministic=deterministic)
    assert torch.are_deterministic_algorithms_enabled() == torch.backends.cudnn.deterministic == deterministic
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled() == torch.backends.cuda.cudnn_sdp_enabled() != deterministic
    assert torch.backends.cuda.flash_sdp_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_kernels_asked_for_are_there_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(device="cpu").kernels == "torch"
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with pytest.raises(UsageError, match="training.kernels = 'triton': triton .*; use auto or torch"):
        choose(device="cpu", kernels="triton")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    if dispatch.triton is not None:
        assert choose(device="cpu", kernels="triton").kernels == "triton"
        assert dispatch.on_triton(torch.zeros(1)) and not dispatch.on_triton(torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(dispatch, "triton", None)
    with pytest.raises(UsageError, match="triton is not installed"):
        choose(device="cpu", kernels="triton")
    assert choose(device="cpu", kernels="auto").kernels == "torch"
    assert not dispatch.on_triton(torch.zeros(1))


# -- seeds ------------------------------------------------------------------------------------------------------------

PATHS: list[tuple[int | str, ...]] = [
    ("collect",),
    ("collect actions", 1),
    ("collect actions", 2),
    ("train-tokenizer", 0),
    ("train-tokenizer", 200),
    ("train-dynamics", 0),
    ("imagine", 0),
    ("eval",),
    ("eval actions",),
    ("eval random",),
    ("play",),
    ("play actions",),
    ("profile",),
]


def test_every_stream_of_every_seed_is_its_own() -> None:
    seeds = [derived_seed(seed, *path) for seed, path in itertools.product([0, 1, 2, 12345, 1 << 40], PATHS)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert max(seeds) > 1 << 61
    assert seeds == [derived_seed(seed, *path) for seed, path in itertools.product([0, 1, 2, 12345, 1 << 40], PATHS)]


def test_draws_of_neighboring_streams_are_unrelated() -> None:
    neighbors = [("imagine", 0), ("imagine", 1), ("imagine", 2)]
    draws = [np.random.default_rng(derived_seed(seed, *path)).random(4000) for seed in (1, 2) for path in neighbors]
    correlation = np.corrcoef(draws)
    assert np.abs(correlation - np.eye(len(draws))).max() < 0.08  # five standard deviations


# -- randomness -------------------------------------------------------------------------------------------------------


def test_the_callers_generators_are_left_alone() -> None:
    torch.manual_seed(11)
    state, numpys = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with isolated_randomness(5, CPU) as rng:
        torch.rand(100)
        rng.random(100)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpys
    with pytest.raises(ZeroDivisionError), isolated_randomness(5, CPU):
        torch.rand(100)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)


def test_inside_only_the_seed_counts() -> None:
    drawn = []
    for before, seed in [(1, 5), (2, 5), (1, 6)]:
        torch.manual_seed(before)
        with isolated_randomness(seed, CPU) as rng:
            drawn.append((torch.rand(3).tolist(), rng.random(3).tolist()))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0] and drawn[0][1] != drawn[2][1]
