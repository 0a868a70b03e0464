"""Updates of every stage of the papers' presets, on a GPU and beside it.

On a GPU the models have the papers' sizes and small batches. The same code runs tiny on the CPU, so that no line of it
is new on the day there is a GPU, and on the pretended device (`-p pretended_cuda.plugin -m gpu`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from paper_trainers import (
    DROPOUT,
    PRESETS,
    SameSamples,
    machine_of,
    settings_of,
    stages,
    tensors_of,
    trainer_of,
    updates,
)
from torch import nn
from torch.testing import assert_close
from watching import DEVICES

from wmcli.kernels import dispatch

REAL = torch.cuda.is_available() and torch.cuda.get_device_name() != "pretended"
TINY = not REAL
KERNELS = "triton" if REAL else "torch"  # its interpreter takes minutes
CASES = [pytest.param(name, kind, id=f"{name}-{kind}") for name in PRESETS for kind in stages(name)]
GPU = [DEVICES[1]]  # graphs are CUDA's


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Stages choose kernels for the process, and other tests leave them to the operands."""
    chosen = dispatch._chosen
    yield
    dispatch.use(chosen)


def assert_agree(want: dict[str, float], got: dict[str, float]) -> None:
    """Compare metrics of an update: losses to 1e-3; the gradient norm and what searches find to 1e-2."""
    assert want.keys() == got.keys()
    for key in want:
        coarse = key in ("gradient_norm", "search_value", "search_entropy", "policy_change", "value_change")
        assert got[key] == pytest.approx(want[key], rel=1e-2 if coarse else 1e-3, abs=1e-4), key


@pytest.mark.matrix
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_update_is_that_of_the_cpu(name: str, kind: str, device: str) -> None:
    """Loss to 1e-3 and gradient norm to 1e-2, in float32, with the same random numbers and samples."""
    settings, same = settings_of(name, TINY, *DROPOUT), SameSamples()
    made = []
    for where in ("cpu", device):
        with same(second=len(made) > 0):
            made += updates(trainer_of(settings, kind, machine_of(where)), 1)
    assert_agree(*made)


@pytest.mark.matrix
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_kernels_of_triton_and_torch_agree(name: str, kind: str, device: str) -> None:
    settings, same = settings_of(name, TINY, *DROPOUT), SameSamples()
    if (reason := dispatch.unavailable(torch.device(device))) is not None:
        pytest.skip(reason)
    made = []
    for kernels in ("torch", "triton"):
        with same(second=len(made) > 0):
            made += updates(trainer_of(settings, kind, machine_of(device, kernels)), 1)
    assert_agree(*made)


@pytest.mark.matrix
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_twice_and_resumed_it_has_the_same_bits(name: str, kind: str, device: str, tmp_path: Path) -> None:
    """Four updates; and two with a checkpoint, from which another trainer does the last two."""
    settings, machine = settings_of(name, TINY), machine_of(device, KERNELS)
    made = []
    for parts in ([4], [2, 2]):
        for part, count in enumerate(parts):
            trainer = trainer_of(settings, kind, machine)
            if part:
                trainer.state.load(tmp_path / "state", machine.device)
            metrics = [updates(trainer, 1, seed=trainer.state.update)[0] for _ in range(count)]
            trainer.state.save(tmp_path / "state", machine.device)
        made.append((metrics[-1], tensors_of(trainer)))
    (first, weights), (again, after) = made
    assert again == first
    assert_close(after, weights, rtol=0, atol=0)


@pytest.mark.matrix
@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_with_graphs_it_has_the_same_bits(name: str, kind: str, device: str) -> None:
    """With dropout: a replay draws the random numbers that the same operations would draw."""
    made = []
    for cuda_graph in (False, True):
        trainer = trainer_of(settings_of(name, TINY), kind, machine_of(device, KERNELS, cuda_graph=cuda_graph))
        made.append((updates(trainer, 4), tensors_of(trainer)))
    (metrics, weights), (recorded, after) = made
    assert recorded == metrics
    assert_close(after, weights, rtol=0, atol=0)


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize(
    ("name", "kind"), [("rem", "tokenizer"), ("rem", "controller"), ("drama", "dynamics"), ("muzero", "controller")]
)
def test_frames_in_host_memory_give_the_same_bits(name: str, kind: str, device: str) -> None:
    made = []
    for where in ("device", "host"):
        trainer = trainer_of(settings_of(name, TINY, f"training.replay={where}"), kind, machine_of(device, KERNELS))
        assert trainer.replay.frames_on_host == (where == "host")
        made.append((updates(trainer, 2), tensors_of(trainer)))
    (metrics, weights), (of_host, after) = made
    assert of_host == metrics
    assert_close(after, weights, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [nn.Conv2d(64, 64, 3), nn.ConvTranspose2d(64, 64, 4, 2), nn.Linear(512, 512)])
def test_float32_is_float32(layer: nn.Module, device: str) -> None:
    """TF32 keeps 10 bits of a factor: an error of 1e-4 to 1e-3 of the result's size, forward and backward."""
    machine_of(device)
    torch.manual_seed(0)
    x = torch.randn(8, 512) if isinstance(layer, nn.Linear) else torch.randn(8, 64, 16, 16)
    made = []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        module, given = layer.to(where, dtype), x.to(where, dtype).requires_grad_()
        out = module(given)
        grads = torch.autograd.grad(out.sin().sum(), [given, *module.parameters()])
        made.append([value.detach().double().cpu() for value in (out, *grads)])
    for want, got in zip(*made, strict=True):
        assert (got - want).norm() < 2e-5 * want.norm()
