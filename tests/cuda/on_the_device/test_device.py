"""The pretended device itself: results are the CPU's, and its manners are CUDA's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from pretended_cuda.device import DEVICE
from torch import Tensor, nn
from torch.testing import assert_close

from wmcli.training.optim import build_optimizer

# B rows, F features.
B, F = 4, 5


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(F, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 1)).to(device)


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, F, generator=generator) for _ in range(count)]


def update(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Do one update as training does, with dropout and a random number in the loss."""
    optimizer.zero_grad(set_to_none=True)
    scale = torch.rand((), device=x.device)
    loss = scale * module(nn.functional.dropout(x, 0.3)).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1, foreach=True)
    optimizer.step()
    return loss.detach(), norm


def waits() -> dict[str, int]:
    found: dict[str, int] = {}
    for wait, count in DEVICE.waits.items():
        found[wait.reason] = found.get(wait.reason, 0) + count
    return found


# -- results ----------------------------------------------------------------------------------------------------------


def test_an_update_has_the_bits_of_the_cpu() -> None:
    made = []
    for device in ("cpu", "cuda"):
        module = network(device)
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2, fused=True)
        torch.manual_seed(3)
        torch.cuda.set_rng_state(torch.get_rng_state())  # the same random numbers
        for x in batches(3):
            loss, norm = update(module, optimizer, x.to(device))
        assert {loss.device.type, norm.device.type, module[0].weight.device.type} == {device}
        made.append([value.cpu() for value in (loss, norm, *module.state_dict().values())])
    assert_close(*made, rtol=0, atol=0)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells_are_those_of_the_cpu(cell: type[nn.Module]) -> None:
    made = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        x, module = torch.randn(B, F).to(device).requires_grad_(), cell(F, 3).to(device)
        first = module(x)
        second = module(x, first)
        out = second[0] * second[1] if isinstance(second, tuple) else second
        grads = torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])
        made.append([value.cpu() for value in (out, *grads)])
    assert_close(*made)


def test_autocast_is_that_of_cuda() -> None:
    module, x = network("cuda"), batches(1)[0].cuda()
    with torch.autocast("cuda", torch.bfloat16):
        assert module[0](x).dtype == torch.bfloat16 and module(x).exp().dtype == torch.float32


def test_a_module_keeps_its_parameters_when_it_moves() -> None:
    module = nn.Linear(F, F)
    module.weight.mark = "kept"
    parameter, untouched = module.weight, copy.deepcopy(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    module.cuda()
    assert module.weight is parameter and parameter.mark == "kept" and parameter.is_cuda
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    module(batches(1)[0].cuda()).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(module)
    assert twin.weight.mark == "kept" and twin.weight.is_cuda
    module.zero_grad()
    module.weight.data = module.weight.data.to(torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16 and module.weight.is_cuda
    assert_close(module.weight.float().cpu(), twin.weight.cpu(), rtol=0.01, atol=0.01)
    module.cpu()
    assert module.weight is parameter and not parameter.is_cuda and not torch.equal(parameter, untouched)


def test_views_share_memory() -> None:
    x = torch.zeros(3, 4, device="cuda")
    x.t()[1].fill_(2)
    x[0, 2] = 3
    assert x.tolist() == [[0, 2, 3, 0], [0, 2, 0, 0], [0, 2, 0, 0]]
    assert x.unsqueeze_(0).shape == (1, 3, 4) and x.transpose_(1, 2).shape == (1, 4, 3)


def test_other_threads_have_the_device_as_well() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(str(torch.ones(2).to("cuda").device)))
    thread.start()
    thread.join()
    assert found == ["cuda:0"]


def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.zeros(1000, device="cuda")
    view = x[10:]
    y = x + 1
    assert torch.cuda.memory_allocated() - before == 8000
    del x, y
    assert torch.cuda.memory_allocated() - before == 4000 == view.untyped_storage().nbytes()
    assert torch.cuda.max_memory_allocated() - before == 8000


# -- manners ----------------------------------------------------------------------------------------------------------


def test_operands_on_two_devices_are_refused() -> None:
    x, here = torch.zeros(3, device="cuda"), torch.ones(3)
    for join in (lambda: x + here, lambda: torch.stack([here, x]), lambda: torch._foreach_add([x], [here])):
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
            join()
    assert (x + torch.tensor(2.0)).is_cuda  # a number may join
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    assert len(DEVICE.errors) == 4


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: torch.ones(3).to("cuda", non_blocking=True),  # from pageable memory
        lambda x: torch.ones(3).pin_memory().to("cuda"),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
    ],
)
def test_waits_are_counted(ask: Callable[[Tensor], object]) -> None:
    x = torch.arange(3.0, device="cuda")
    assert sum(waits().values()) == 0
    with DEVICE.during("asking"):
        ask(x)
    assert sum(waits().values()) == 1 and {wait.during for wait in DEVICE.waits} == {"asking"}
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            ask(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
        lambda x: torch.rand(3, pin_memory=True).to("cuda", non_blocking=True),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.masked_fill(x > 0, 0),
        lambda x: x.__setitem__(x > 0, 0.0),
        lambda x: x[x.long()] + x.new_full((3,), 2.0) + torch.full((3,), 1.0, device="cuda"),
        lambda x: torch.where(x > 0, x, 0.0).sort(),
    ],
)
def test_nothing_else_waits(ask: Callable[[Tensor], object]) -> None:
    ask(torch.arange(3.0, device="cuda"))
    assert not waits()


def test_copies_that_do_not_wait_end_with_the_next_wait() -> None:
    pinned = torch.zeros(3).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not torch.zeros(3).is_pinned()
    there = pinned.to("cuda", non_blocking=True)
    back = (there + 1).to("cpu", non_blocking=True)
    assert back.isnan().all()
    torch.cuda.synchronize()
    assert back.tolist() == [1, 1, 1]
    pinned.to("cuda", non_blocking=True)
    pinned += 1
    with pytest.raises(RuntimeError, match="pinned memory was overwritten"):
        torch.cuda.synchronize()


# -- graphs -----------------------------------------------------------------------------------------------------------


def recorded(run: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, torch.tensor(0.01).cuda(), fused=True, capturable=True),
    "adamw": lambda p: torch.optim.AdamW(p, torch.tensor(0.01).cuda(), fused=True, capturable=True, weight_decay=0.1),
    "adam of many operations": lambda p: torch.optim.Adam(p, torch.tensor(0.01).cuda(), foreach=True, capturable=True),
    "sgd": lambda p: torch.optim.SGD(p, torch.tensor(0.01).cuda(), momentum=0.9, fused=True),
    "laprop": lambda p: build_optimizer("laprop", p, 0.01, 0.1, warmup=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_recorded_update_has_the_bits_of_one_that_is_not(name: str) -> None:
    """Random numbers as well: a recording takes none, and a replay takes the next ones."""
    given = [x.cuda() for x in batches(6)]
    made = []
    for replayed in (False, True):
        module = network("cuda")
        optimizer = OPTIMIZERS[name](module.parameters())
        torch.manual_seed(3)
        step = partial(update, module, optimizer)
        results = [[value.clone() for value in step(x)] for x in given[:2]]
        if replayed:
            static = given[2].clone()
            before = [parameter.detach().clone() for parameter in module.parameters()]
            result, graph = recorded(lambda step=step, static=static: step(static))
            assert_close(list(module.parameters()), before, rtol=0, atol=0)  # nothing was done
            assert all(value.isnan() for value in result)
        for x in given[2:]:
            if replayed:
                static.copy_(x)
                graph.replay()
            else:
                result = step(x)
            results.append([value.clone() for value in result])
        after = torch.rand(3, device="cuda")
        made.append([value.cpu() for value in (*sum(results, []), *module.state_dict().values(), after)])
    assert_close(*made, rtol=0, atol=0)
    assert DEVICE.replayed == 4 and DEVICE.recorded == 1 and not DEVICE.errors


def test_an_optimizer_whose_counts_are_not_on_the_device_cannot_be_recorded() -> None:
    module = network("cuda")
    step = partial(update, module, torch.optim.Adam(module.parameters(), 0.01, fused=True), batches(1)[0].cuda())
    step()
    with pytest.raises(RuntimeError, match="capturable is False"):
        recorded(step)


def test_numbers_of_the_host_are_frozen() -> None:
    number, x = torch.tensor(1.0), torch.zeros(3, device="cuda")
    (result,), graph = recorded(lambda: (x + number,))
    number += 1
    x += 5
    graph.replay()
    assert result.tolist() == [6, 6, 6]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x + torch.ones(3).pin_memory().to("cuda", non_blocking=True),
        lambda x: torch.tensor(1.0, device="cuda"),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.get_rng_state(),
        lambda x: torch.manual_seed(0),
        lambda x: torch.rand(3, device="cuda", generator=torch.Generator()),
    ],
)
def test_what_cannot_be_recorded_is_refused(ask: Callable[[Tensor], object]) -> None:
    x = torch.arange(3.0, device="cuda")
    with pytest.raises(RuntimeError, match="captur|Expected a 'cuda' device type for generator"):
        recorded(lambda: (ask(x),))
    assert DEVICE.errors


def test_memory_that_a_graph_reads_must_live() -> None:
    x, y = (torch.zeros(3, device="cuda") for _ in range(2))
    memory = {"x": x}
    (result,), graph = recorded(lambda: (memory["x"][1:] + y[1:],))
    graph.replay()
    assert result.tolist() == [0, 0]
    kept = x[:1]  # the same memory
    del x, memory["x"]
    graph.replay()
    del kept
    with pytest.raises(RuntimeError, match="12 bytes that were freed"):
        graph.replay()


def test_other_threads_are_not_recorded() -> None:
    x = torch.zeros(3, device="cuda")

    def run() -> tuple[Tensor]:
        thread = threading.Thread(target=lambda: x.add_(1))
        thread.start()
        thread.join()
        return (x * 2,)

    (result,), graph = recorded(run)
    graph.replay()
    assert DEVICE.operations["add_"] == 0 and result.shape == (3,)
