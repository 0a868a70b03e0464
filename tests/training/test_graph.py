"""A recorded function gives what the function gives, with new values and new weights; without a GPU, by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from watching import DEVICES, capture_without_a_graph

from wmcli.errors import UsageError
from wmcli.training import graph
from wmcli.training.device import Machine
from wmcli.training.graph import RecordedFunction
from wmcli.training.settings import TrainingSettings


class Pair(NamedTuple):
    x: Tensor
    steps: Tensor


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(graph, "capture", capture_without_a_graph)
    return request.param


def model(device: str) -> tuple[nn.Module, Callable[[Pair, Tensor], dict[str, Tensor]]]:
    torch.manual_seed(0)
    linear = nn.Linear(5, 5).to(device)

    def run(pair: Pair, start: Tensor) -> dict[str, Tensor]:
        x, steps = pair.x + start, []
        with torch.autocast(device, torch.bfloat16):
            for t in range(3):
                x = linear(x).sin().masked_fill(pair.steps[:, None] == t, 0)
                steps.append(x)
        return {"steps": torch.stack(steps), "last": x.float()}

    return linear, run


def arguments(device: str, seed: int) -> tuple[Pair, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pair = Pair(torch.randn(4, 5, generator=generator), torch.randint(5, (4,), generator=generator))
    return Pair(*(part.to(device) for part in pair)), torch.randn(5, generator=generator).to(device)


def test_it_equals_the_function(device: str) -> None:
    linear, run = model(device)
    recorded = RecordedFunction(run)
    all_given = [arguments(device, seed) for seed in range(4)]
    kept = [tensor.clone() for tensor in tree_leaves(all_given)]
    for seed, given in enumerate(all_given):
        want = run(*given)
        got = recorded(*given)
        assert_close(got, want, rtol=0, atol=0)
        assert not any(tensor.requires_grad for tensor in got.values())
        with torch.no_grad():  # as an optimizer does
            linear.weight.mul_(-1.5)
            linear.bias.add_(seed)
    assert_close(tree_leaves(all_given), kept, rtol=0, atol=0)


def test_the_next_call_overwrites_the_last_output(device: str) -> None:
    _, run = model(device)
    recorded = RecordedFunction(run)
    first = recorded(*arguments(device, 0))
    kept = first["last"].clone()
    second = recorded(*arguments(device, 1))
    assert second["last"].data_ptr() == first["last"].data_ptr() and not torch.equal(kept, second["last"])


def test_a_place_may_be_empty(device: str) -> None:
    recorded = RecordedFunction(lambda pair: pair.x * 2 if pair.steps is None else pair.x)
    for seed in range(3):
        x = arguments(device, seed)[0].x
        assert torch.equal(recorded(Pair(x, None)), 2 * x)
    with pytest.raises(AssertionError, match="another tree"):
        recorded(Pair(None, x))


def test_other_shapes_are_refused(device: str) -> None:
    _, run = model(device)
    recorded = RecordedFunction(run)
    pair, start = arguments(device, 0)
    recorded(pair, start)
    with pytest.raises(AssertionError, match="other tensors"):
        recorded(Pair(pair.x[:2], pair.steps[:2]), start)
    with pytest.raises(AssertionError, match="other tensors"):
        recorded(pair, start.double())
    with pytest.raises(AssertionError, match="another tree"):
        recorded((pair.x, pair.steps), start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_replay_waits_for_nothing() -> None:
    _, run = model("cuda")
    recorded = RecordedFunction(run)
    given = arguments("cuda", 0)
    recorded(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorded(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_machine_records_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "capture", capture_without_a_graph)
    cpu = torch.device("cpu")
    for machine, recorded in (
        (Machine(cpu, "bfloat16", 1), False),
        (Machine(cpu, "bfloat16", 1, cuda_graph=True), True),
    ):
        calls = []

        def run(x: Tensor, calls=calls) -> Tensor:
            calls.append((x @ x).dtype)
            return x + 1

        function = machine.wrap_repeated(run)
        assert isinstance(function, RecordedFunction) == recorded
        x = torch.zeros(2, 2)
        assert function(x).sum() == 4 and function(x + 1).sum() == 8
        assert set(calls) == {torch.bfloat16}
        assert ("as a CUDA graph" in str(machine)) == machine.describe()["cuda_graph"] == recorded


def test_there_are_no_graphs_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="training.cuda_graph = true: no CUDA graphs on 'cpu'"):
        Machine.choose(TrainingSettings(device="cpu", cuda_graph=True))


def test_kernels_run_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    machine = Machine.choose(TrainingSettings(device="cuda:1", precision="float32", kernels="torch", cuda_graph=True))
    assert machine.device == torch.device("cuda:1") and chosen == [machine.device] and machine.cuda_graph
