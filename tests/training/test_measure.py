"""What calls cost: seconds, arithmetic, memory, and the ceilings they are held against."""

from __future__ import annotations

import gzip
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn import functional as F

from wmcli.progress import Bar, Progress
from wmcli.training import measure
from wmcli.training.allocator import keep_freed_memory
from wmcli.training.device import Machine
from wmcli.training.measure import Bench, count_operations, peak_memory, profile_operators, ratio, time_jobs

CPU = torch.device("cpu")
QUIET = Progress(quiet=True)
SEVERAL = 1 << 26  # bytes that no other test's garbage comes near


class Clock:
    """A clock that only jobs move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.order: list[str] = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def job(self, name: str, duration: float) -> Callable[[], None]:
        def run() -> None:
            self.order.append(name)
            self.now += duration

        return run


def test_jobs_are_timed_in_turn_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = time_jobs({"a": clock.job("a", 0.25), "b": clock.job("b", 2.0)}, CPU, QUIET, "jobs")
    assert clock.order == ["a", "a", "b"] + ["a", "b"] * measure.REPEATS  # long ones are warmed up once
    assert times == {"a": [0.25] * measure.REPEATS, "b": [2.0] * measure.REPEATS}


def test_short_calls_are_timed_several_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = time_jobs({"a": clock.job("a", 0.003), "b": clock.job("b", 0.0)}, CPU, QUIET, "jobs")
    assert clock.order == ["a"] * 2 + ["b"] * 2 + (["a"] * 4 + ["b"] * measure.MOST_CALLS) * measure.REPEATS
    assert times["a"] == pytest.approx([0.003] * measure.REPEATS)  # of one call


def test_a_bar_is_there_from_the_first_call_on() -> None:
    depth = 0

    class Watched(Progress):
        @contextmanager
        def bar(self, *arguments: Any) -> Iterator[Bar]:
            nonlocal depth
            depth += 1
            with super().bar(*arguments) as bar:
                yield bar
            depth -= 1
            assert bar._done == bar._total

    seen: list[int] = []
    time_jobs({"a": lambda: seen.append(depth)}, CPU, Watched(quiet=True), "jobs")
    assert set(seen) == {1}


def test_products_convolutions_and_attention_are_counted() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 7, requires_grad=True)
    assert count_operations(lambda: a @ b) == 2 * 3 * 5 * 7
    assert count_operations(lambda: (a @ b).sum().backward()) == 2 * (2 * 3 * 5 * 7)  # only b has a gradient
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert count_operations(lambda: F.conv2d(x, weight, padding=1)) == 2 * 2 * 4 * 64 * 3 * 9
    q, k, v = torch.randn(3, 2, 4, 16, 8, requires_grad=True)
    forward = 2 * (2 * 2 * 4 * 16 * 16 * 8)  # scores, and their sums of values
    assert count_operations(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)) == forward
    both = count_operations(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert both == forward * 7 // 2  # the scores again, and a product for each of four gradients
    assert count_operations(lambda: a.exp() + a) == 0


def test_memory_is_the_peak_of_a_call_without_memory_held_before() -> None:
    held = torch.ones(SEVERAL, dtype=torch.uint8)

    def job() -> None:
        torch.ones(SEVERAL, dtype=torch.uint8)

    keep_freed_memory()
    job()  # leaves memory in the allocator, which must not hide what the next call needs
    peak = peak_memory(job, CPU)
    if peak is None:
        pytest.skip("needs Linux and the GNU C library")
    assert SEVERAL * 0.9 < peak < SEVERAL * 1.5
    assert peak_memory(lambda: held.add_(1), CPU) < SEVERAL * 0.5


def test_the_shares_of_the_operators_make_one(tmp_path: Path) -> None:
    a = torch.randn(256, 256)

    def job() -> None:
        for _ in range(20):
            a @ a
        time.sleep(0.05)

    job()
    trace = tmp_path / "traces" / "job.json.gz"
    rows = profile_operators(job, CPU, 1e12, trace)
    assert [row["operator"] for row in rows[-3:]] == [measure.OTHERS, measure.BETWEEN, measure.PRODUCTS]
    assert sum(row["share"] for row in rows[:-1]) == pytest.approx(1, abs=0.01)
    shares = {row["operator"]: row["share"] for row in rows[:-1]}
    assert shares["aten::mm"] == max(share for name, share in shares.items() if name != measure.BETWEEN)
    assert rows[-2]["seconds"] >= 0.05
    assert next(row["calls"] for row in rows if row["operator"] == "aten::mm") == 20
    assert (
        profile_operators(time.monotonic, CPU, 1e12)[-1]["operator"] == measure.BETWEEN
    )  # without a product no line of them
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 20


def test_the_fastest_recording_counts():
    calls = []

    def job() -> None:
        calls.append(None)
        time.sleep(0.001 if len(calls) == 3 else 0.2)  # the first call counts arithmetic, the others are recorded

    rows = profile_operators(job, CPU, 1e12)
    assert len(calls) == 1 + measure.RECORDINGS and sum(row["seconds"] for row in rows) < 0.1


def test_products_stand_with_their_arithmetic_and_all_that_they_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "OPERATORS", 1)
    a, frames, kernel = torch.randn(64, 48), torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3, requires_grad=True)
    q, k, v = torch.randn(3, 1, 2, 16, 8, requires_grad=True)

    def job() -> None:
        for _ in range(3):
            a @ a.mT
        with torch.autocast("cpu", torch.bfloat16):
            torch.mm(a, a.mT)  # converts its operands
        F.conv2d(frames, kernel, padding=1).sum().backward()
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    job()
    rows = {row["operator"]: row for row in profile_operators(job, CPU, 1e9)}
    operations = {name: row["operations"] for name, row in rows.items() if row["operations"] is not None}
    total, attention = operations.pop(measure.PRODUCTS), "aten::_scaled_dot_product_flash_attention_for_cpu"
    convolution = 2 * 2 * 4 * 16 * 16 * 3 * 9
    assert operations == {  # all, however little time they take
        "aten::mm": 4 * 2 * 64 * 64 * 48,
        "aten::convolution": convolution,
        "aten::convolution_backward": convolution,  # the frames have no gradient
        attention: 2 * (2 * 2 * 16 * 16 * 8),
        f"{attention}_backward": 5 * (2 * 2 * 16 * 16 * 8),
    }
    assert rows["aten::mm"]["calls"] == 4
    assert "aten::mkldnn_convolution" not in rows  # is part of aten::convolution
    for row in rows.values():
        if row["operations"] is not None:
            assert row["operations_per_second"] == pytest.approx(row["operations"] / row["seconds"])
            assert row["of_matmul"] == pytest.approx(row["operations_per_second"] / 1e9)
    assert total == sum(operations.values()) == count_operations(job)
    assert rows[measure.PRODUCTS]["seconds"] == pytest.approx(sum(rows[name]["seconds"] for name in operations))
    assert rows[measure.PRODUCTS]["calls"] == sum(rows[name]["calls"] for name in operations)
    assert json.loads(json.dumps(rows)) == rows


def event(name: str, own: float, *children: Any, kernels: tuple[tuple[str, float], ...] = ()) -> Any:
    """An event of the profiler on the host, with the kernels that it launched."""
    made = SimpleNamespace(name=name, cpu_children=children, cpu_parent=None, self_cpu_time_total=own)
    made.device_type, made.is_user_annotation = DeviceType.CPU, name == "annotation"
    made.kernels = [SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels]
    for child in children:
        child.cpu_parent = made
    return made


def with_children(*events: Any) -> list[Any]:
    return [each for parent in events for each in (parent, *with_children(*parent.cpu_children))]


def test_nested_time_is_attributed_once() -> None:
    events = with_children(
        event(
            "annotation",
            1000,
            event("aten::mm", 1, event("aten::copy_", 10), event("aten::mm", 100, event("aten::empty", 5))),
            event("aten::linear", 2, event("aten::copy_", 10), event("aten::linear", 3, event("aten::addmm", 50))),
            event("aten::mm", 100),
        ),
        event("aten::conv2d", 4, event("aten::convolution", 6, event("aten::own_form", 200, event("aten::mm", 40)))),
    )
    spent, calls = measure._own_time(events, {"aten::mm", "aten::addmm", "aten::convolution"}, on_cuda=False)
    expected = {
        "aten::mm": (206, 2),  # the first call once, without what autocast converts
        "aten::copy_": (20, 2),
        "aten::linear": (5, 1),
        "aten::addmm": (50, 1),
        "aten::conv2d": (4, 1),
        "aten::convolution": (246, 1),  # and no product beside it
    }
    assert spent == pytest.approx({name: 1e-6 * own for name, (own, _) in expected.items()})
    assert {name: calls[name] for name in spent} == {name: number for name, (_, number) in expected.items()}


def test_on_cuda_a_product_has_the_time_of_its_kernels_and_no_one_else_has_it() -> None:
    copied = event("aten::copy_", 1, kernels=(("copy", 7),))
    host = with_children(
        event("aten::linear", 5, event("aten::copy_", 1, kernels=(("copy", 11),)), event("aten::addmm", 9)),
        event("aten::mm", 5, copied, event("cudaLaunchKernel", 3, kernels=(("gemm", 99),)), kernels=(("gemm", 100),)),
        event("aten::silu", 5, kernels=(("pointwise", 30),)),
        event("aten::bmm", 5),  # of nothing: launches no kernel
    )
    next(each for each in host if each.name == "aten::addmm").kernels = [SimpleNamespace(name="gemm", duration=50)]
    device = [
        SimpleNamespace(name=name, cpu_children=(), cpu_parent=None, device_type=DeviceType.CUDA, kernels=[],
                        is_user_annotation=name == "annotation", self_device_time_total=duration)
        for name, duration in [("copy", 11), ("gemm", 50), ("copy", 7), ("gemm", 100), ("pointwise", 30),
                               ("by hand", 40), ("annotation", 1000)]
    ]  # fmt: skip
    spent, calls = measure._own_time([*device, *host], {"aten::mm", "aten::addmm", "aten::bmm"}, on_cuda=True)
    expected = {
        "aten::mm": (107, 1),
        "aten::addmm": (50, 1),
        "copy": (11, 1),
        "pointwise": (30, 1),
        "by hand": (40, 1),
    }
    assert spent == pytest.approx({name: 1e-6 * own for name, (own, _) in expected.items()})
    assert {name: calls[name] for name in spent} == {name: number for name, (_, number) in expected.items()}


def test_ceilings_grow_until_a_call_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZES", (32, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 20, 1 << 22))
    monkeypatch.setattr(measure, "CEILING_SECONDS", 1e-9)
    bench = Bench(Machine(CPU, "float32", 1), QUIET)
    by_name = {row["what"]: row for row in bench.ceilings}
    assert by_name["matmul float32"]["shape"] == "32 × 32 × 32"
    assert by_name["matmul float32"]["operations"] == 2 * 32**3
    assert by_name["copy"]["bytes_moved"] == 2 << 20
    monkeypatch.setattr(measure, "CEILING_SECONDS", 1e9)  # never: the largest is taken
    ceiling = measure.measure_copy(CPU, QUIET)
    assert ceiling.shape == "4 MiB" and ceiling.per_call == 2 << 22
    assert ceiling.rate == ceiling.per_call / min(ceiling.times)


def test_ceilings_of_an_earlier_bench_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZES", (64, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    machine = Machine(CPU, "bfloat16", 1)
    first = Bench(machine, QUIET)
    monkeypatch.setattr(measure, "measure_matmul", None)
    again = Bench(machine, QUIET, json.loads(json.dumps(first.ceilings)))
    assert (again.ceilings, again.arithmetic, again.copying) == (first.ceilings, first.arithmetic, first.copying)
    assert again.arithmetic == first.ceilings[1]["operations"] / first.ceilings[1]["seconds_low"]


def test_a_quick_bench_takes_one_sample_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = time_jobs({"a": clock.job("a", 0.003), "b": clock.job("b", 2.0)}, CPU, QUIET, "jobs", quick=True)
    assert clock.order == ["a", "b", "a", "b"]
    assert times == {"a": [pytest.approx(0.003)], "b": [2.0]}


def test_launches_are_timed_by_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZES", (64, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    bench = Bench(Machine(CPU, "float32", 1), QUIET, quick=True)
    clock = Clock(monkeypatch)
    monkeypatch.setattr(
        measure, "launch_jobs", lambda device: {"one": (clock.job("a", 2.0), 1), "ten": (clock.job("b", 5.0), 10)}
    )
    assert {row["what"]: row["seconds"] for row in bench.time_launches()} == {"one": 2.0, "ten": 0.5}


def test_launch_jobs_on_a_cpu_run() -> None:
    jobs = measure.launch_jobs(CPU)
    assert [count for _, count in jobs.values()] == [1, 1]
    for job, _ in jobs.values():
        job()


def test_launches_and_operations_of_the_device_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, kind: Any = DeviceType.CPU, annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotation)

    events = [
        event("cudaLaunchKernel"),
        event("cuLaunchKernelEx"),  # Triton's
        event("cudaGraphLaunch"),
        event("cudaMemcpyAsync"),
        event("cudaStreamSynchronize"),
        *(event(f"kernel {i}", DeviceType.CUDA) for i in range(9)),
        event("an annotation", DeviceType.CUDA, annotation=True),
    ]

    @contextmanager
    def recording(activities: list[Any]) -> Iterator[SimpleNamespace]:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(torch.profiler, "profile", recording)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ran: list[int] = []
    assert measure.count_launches(lambda: ran.append(1), torch.device("cuda")) == (4, 9)
    assert ran == [1]
    assert measure.count_launches(lambda: 1 / 0, CPU) is None


def test_waits_of_the_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def job() -> None:
        for _ in range(3):  # from one line, which Python would tell once
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at here.cpp:1.)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert measure.count_waits(job, torch.device("cuda")) == 3
    assert modes == ["warn", 0]
    assert measure.count_waits(lambda: 1 / 0, CPU) is None


def test_a_row_holds_a_call_against_the_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZES", (32, 32))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    bench = Bench(Machine(CPU, "float32", 1), QUIET)
    bench.arithmetic, bench.copying = 100.0, 50.0
    row = bench.row("x", "1 × 2", [4.0, 2.0, 3.0], count=6, unit="frames", operations=30, moved=15, memory=7, more=1)
    assert (row["seconds"], row["seconds_low"], row["seconds_high"]) == (3, 2, 4)
    assert (row["rate"], row["unit"]) == (2, "frames/s")
    assert (row["operations_per_second"], row["of_matmul"]) == (10, 0.1)
    assert (row["bytes_per_second"], row["of_copy"]) == (5, 0.1)
    assert (row["peak_bytes"], row["more"]) == (7, 1)
    bare = bench.row("x", "1", [1.0])
    assert all(bare[name] is None for name in ("rate", "unit", "operations", "of_matmul", "of_copy", "peak_bytes"))


def test_a_ratio_is_of_pairs() -> None:
    row = ratio("a over b", "", [2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (2, 1, 3)
