"""A recorded function gives what the function gives, with new values and new weights; without a GPU, by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from watching import DEVICES, record_without_a_graph

from wmcli.errors import UsageError
from wmcli.training.checkpoint import optimizer_tensors
from wmcli.training.device import Machine
from wmcli.training.graph import WARM_UPS, RecordedFunction
from wmcli.training.optim import GradientGuard, Schedule, build_optimizer, update
from wmcli.training.settings import TrainingSettings


class Pair(NamedTuple):
    x: Tensor
    steps: Tensor


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        record_without_a_graph(monkeypatch)
    return request.param


def model(device: str) -> tuple[nn.Module, Callable[[Pair, Tensor], dict[str, Tensor]]]:
    torch.manual_seed(0)
    linear = nn.Linear(5, 5).to(device)

    @torch.no_grad()
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
    all_given = [arguments(device, seed) for seed in range(WARM_UPS + 3)]
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
    for seed in range(WARM_UPS):
        recorded(*arguments(device, seed))
    first = recorded(*arguments(device, 0))
    kept = first["last"].clone()
    second = recorded(*arguments(device, 1))
    assert second["last"].data_ptr() == first["last"].data_ptr() and not torch.equal(kept, second["last"])


def test_a_place_may_be_empty(device: str) -> None:
    recorded = RecordedFunction(lambda pair: pair.x * 2 if pair.steps is None else pair.x)
    for seed in range(WARM_UPS + 2):
        pair, _ = arguments(device, seed)
        assert torch.equal(recorded(Pair(pair.x, None)), 2 * pair.x)
        assert torch.equal(recorded(pair), pair.x)


def test_other_shapes_have_a_recording_of_their_own(device: str) -> None:
    """As a search from 8 frames while playing, and from 32 in reanalysis."""
    _, run = model(device)
    recorded = RecordedFunction(run)
    for seed in range(2 * WARM_UPS + 4):
        pair, start = arguments(device, seed)
        given = (pair, start) if seed % 2 else (Pair(pair.x[:2], pair.steps[:2]), start)
        assert_close(recorded(*given), run(*given), rtol=0, atol=0)


def trained(name: Any, device: str, cuda_graph: bool) -> list[Tensor]:
    """Metrics and weights of some updates on changing batches, with dropout, a schedule, and a part without gradient
    in the first updates."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5)).to(device)
    late = nn.Parameter(torch.zeros(5, device=device))
    optimizer = build_optimizer(
        name, [*net.parameters(), late], 0.01, 0.1, warmup=4 if name == "laprop" else 0, momentum=0.9
    )
    joins = -1 if name == "sgd" else WARM_UPS + 1  # torch's fused SGD takes no parameter that joins later
    schedule = Schedule(warmup=3, decay_after=(5,))
    machine = Machine(torch.device(device), "bfloat16", 1, cuda_graph=cuda_graph)

    def learn(x: Tensor, scale: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        with machine.autocast():
            y = net(x)
        if scale is not None:
            y = y + scale * late
        loss = (y.float() - x).square().mean()
        norm = update(optimizer, loss, clip=0.5)
        return {"loss": loss, "norm": norm}, y.detach()

    step, seen = machine.wrap_update(learn), []
    for number in range(2 * WARM_UPS + 5):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(number)).to(device)
        schedule.apply(optimizer, number, trained=0)
        metrics, y = step(x, torch.full((), 0.1 * number, device=device) if number > joins else None)
        seen.append(y.clone())
        seen += metrics.values()  # not copied: they stay
    return [*seen, *net.state_dict().values(), late]


@pytest.mark.parametrize("name", ["adamw", "adam", "laprop", "sgd"])
def test_a_recorded_update_is_the_update(name: str, device: str) -> None:
    plain, recorded = trained(name, device, False), trained(name, device, True)
    assert_close(recorded, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "adam", "laprop", "sgd"])
def test_a_guard_skips_updates_whether_recorded_or_not(name: Any, device: str) -> None:
    ends = []
    for cuda_graph in (False, True):
        torch.manual_seed(3)
        net, guard = nn.Linear(5, 3).to(device), GradientGuard(10.0, torch.device(device))
        optimizer = build_optimizer(name, net.parameters(), 0.01, 0.1, momentum=0.9)

        def learn(
            x: Tensor, net: nn.Module = net, optimizer: Any = optimizer, guard: GradientGuard = guard
        ) -> tuple[dict[str, Tensor], None]:
            return {"norm": update(optimizer, net(x).square().mean(), 1e9, guard)}, None

        step = Machine(torch.device(device), "float32", 1, cuda_graph=cuda_graph).wrap_update(learn)
        for number in range(60):
            x = torch.ones(2, 5, device=device) * (1e3 if number in (55, 57) else 1.0 + number % 3)
            before = [each.clone() for each in (*net.parameters(), *optimizer_tensors(optimizer).values())]
            step(x)
            after = [*net.parameters(), *optimizer_tensors(optimizer).values()]
            if number:  # the first one makes the moments
                same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
                assert all(same) if number in (55, 57) else not all(same)
        assert guard.skipped == 2
        ends.append([each.clone() for each in after])
    assert_close(*ends, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_replay_waits_for_nothing() -> None:
    _, run = model("cuda")
    recorded = RecordedFunction(run)
    given = arguments("cuda", 0)
    for _ in range(WARM_UPS + 1):
        recorded(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorded(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_machine_records_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    record_without_a_graph(monkeypatch)
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
        assert ("as CUDA graphs" in str(machine)) == machine.describe()["cuda_graph"] == recorded


def test_there_are_no_graphs_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="training.cuda_graph = true: no CUDA graphs on 'cpu'"):
        Machine.choose(TrainingSettings(device="cpu", cuda_graph=True))


def test_kernels_run_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    machine = Machine.choose(TrainingSettings(device="cuda:1", precision="float32", kernels="torch", cuda_graph=True))
    assert machine.device == torch.device("cuda:1") and chosen == [machine.device] and machine.cuda_graph
