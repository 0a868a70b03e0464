"""What calls cost: seconds, arithmetic, memory, and the ceilings they are held against."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from wmcli.progress import Progress
from wmcli.training import measure
from wmcli.training.device import Machine
from wmcli.training.measure import Bench, count_operations, operators, peak_memory, ratio, timed
from wmcli.training.memory import keep_freed_memory

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
    times = timed({"a": clock.job("a", 0.25), "b": clock.job("b", 2.0)}, CPU, QUIET, "jobs")
    assert clock.order == ["a", "a", "b"] + ["a", "b"] * measure.REPEATS  # long ones are warmed up once
    assert times == {"a": [0.25] * measure.REPEATS, "b": [2.0] * measure.REPEATS}


def test_short_calls_are_timed_several_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = timed({"a": clock.job("a", 0.003), "b": clock.job("b", 0.0)}, CPU, QUIET, "jobs")
    assert clock.order == ["a"] * 2 + ["b"] * 2 + (["a"] * 4 + ["b"] * measure.MOST_CALLS) * measure.REPEATS
    assert times["a"] == pytest.approx([0.003] * measure.REPEATS)  # of one call


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


def test_memory_is_what_a_call_needs_at_its_peak_and_not_what_is_held() -> None:
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
    rows = operators(job, CPU, trace)
    assert [row["operator"] for row in rows[-2:]] == [measure.OTHERS, measure.BETWEEN]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=0.01)
    shares = {row["operator"]: row["share"] for row in rows}
    assert shares["aten::mm"] == max(share for name, share in shares.items() if name != measure.BETWEEN)
    assert rows[-1]["seconds"] >= 0.05
    assert next(row["calls"] for row in rows if row["operator"] == "aten::mm") == 20
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 20


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
    ceiling = measure.copy_ceiling(CPU, QUIET)
    assert ceiling.shape == "4 MiB" and ceiling.per_call == 2 << 22
    assert ceiling.rate == ceiling.per_call / min(ceiling.times)


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
