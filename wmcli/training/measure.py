"""What calls cost: seconds, arithmetic, memory, and how near they come to what the machine can do at best.

Seconds are of the wall clock, of one call: `REPEATS` samples after a warm-up, of which the median, the fastest and the
slowest are given. Calls to be compared are timed in turn, so that what slows the machine down slows them all.

Arithmetic is counted in matrix products, convolutions and attention, a product and its sum as two operations. Counted
as nothing are element-wise operations, reductions, Fourier transforms, cuDNN's recurrent networks and kernels that
torch does not know: count those in their torch form. Attention under a causal mask counts as the whole square, a
product of complex numbers as one of real ones, a quarter of what it takes.

Memory is what a call needs above what is held between two calls, which is weights, gradients, optimizer state and data:
on CUDA the most bytes that torch had allocated, on a CPU the peak of the resident set, libraries and allocators
included, which only Linux with the GNU C library tells.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from wmcli.progress import Progress
from wmcli.training.device import Machine

REPEATS = 5
SAMPLE_SECONDS = 0.01  # calls shorter than this are timed several in a row
MOST_CALLS = 1000  # in a row
CEILING_SECONDS = 0.05  # operands of the ceilings are doubled until a call takes so long: larger than any cache
MATMUL_SIZES = (1024, 16384)  # of a square matrix: the first and the largest
COPY_BYTES = (1 << 26, 1 << 31)
RECORDINGS = 3  # of which the fastest counts: what the profiler allocates makes some calls wait for new pages
OPERATORS = 6  # named in the table of where the time goes, beside all matrix products
OTHERS, BETWEEN, PRODUCTS = "(other operators)", "(between operators)", "(all matrix products)"

Job = Callable[[], object]

_PROC = Path("/proc/self")


# -- time -------------------------------------------------------------------------------------------------------------


def seconds(job: Job, device: torch.device, calls: int = 1) -> float:
    """Of one call, as the mean of `calls` in a row, until the device has done them all."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        job()
    _wait(device)
    return (time.perf_counter() - started) / calls


def timed(jobs: Mapping[str, Job], device: torch.device, progress: Progress, what: str) -> dict[str, list[float]]:
    """Seconds of a call of each job, `REPEATS` samples, taken in turn after a warm-up."""
    calls = {}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    with progress.bar(f"profile {what}", 1 + REPEATS, "rounds") as bar:
        for name, job in jobs.items():
            once = seconds(job, device)
            if once < 1:  # short ones are worth another call to know how short
                once = seconds(job, device)
            calls[name] = min(math.ceil(SAMPLE_SECONDS / max(once, 1e-9)), MOST_CALLS)
        bar.advance()
        for _ in range(REPEATS):
            for name, job in jobs.items():
                times[name].append(seconds(job, device, calls[name]))
            bar.advance()
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- ceilings ---------------------------------------------------------------------------------------------------------


class Ceiling(NamedTuple):
    """How fast one kind of work can be at best."""

    what: str
    shape: str
    times: list[float]
    per_call: float
    """Operations or bytes."""

    @property
    def rate(self) -> float:
        """Operations or bytes a second, in the fastest sample."""
        return self.per_call / min(self.times)


def matmul_ceiling(precision: str, device: torch.device, progress: Progress) -> Ceiling:
    """A product of two square matrices, large enough to be limited by arithmetic. precision: float32 or bfloat16."""
    dtype = getattr(torch, precision)

    def product(size: int) -> Job:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    size, job = _large(product, MATMUL_SIZES, device)
    what = f"matmul {precision}"
    return Ceiling(what, f"{size} × {size} × {size}", timed({what: job}, device, progress, what)[what], 2.0 * size**3)


def copy_ceiling(device: torch.device, progress: Progress) -> Ceiling:
    """A copy from memory to memory, counted as one reading and one writing."""

    def copy(size: int) -> Job:
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: target.copy_(source)

    size, job = _large(copy, COPY_BYTES, device)
    times = timed({"copy": job}, device, progress, "copy")["copy"]
    return Ceiling("copy", f"{size >> 20} MiB", times, 2.0 * size)


def _large(make: Callable[[int], Job], sizes: tuple[int, int], device: torch.device) -> tuple[int, Job]:
    """The job of the first size, doubled until a call takes `CEILING_SECONDS` or the size is the largest."""
    size, largest = sizes
    while True:
        job = make(size)
        job()
        if size >= largest or seconds(job, device) >= CEILING_SECONDS:
            return size, job
        size *= 2


# -- arithmetic and memory --------------------------------------------------------------------------------------------


def count_operations(job: Job) -> int:
    """Arithmetic operations of one call, as far as they are counted: see the module."""
    return sum(_count_by_operator(job).values())


def _count_by_operator(job: Job) -> dict[str, int]:
    """As `count_operations`, of each operator that is counted, by the name that the profiler gives it."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU) as counter:
        job()
    counts = counter.get_flop_counts().get("Global", {})  # absent when nothing was counted
    return {str(operator).replace(".", "::"): count for operator, count in counts.items()}


def _attention(*shapes: Any, **_: Any) -> int:
    return sdpa_flop_count(*shapes[:3])  # queries, keys, values


def _attention_backward(*shapes: Any, **_: Any) -> int:
    return sdpa_backward_flop_count(*shapes[:4])  # the gradient before them


_ATTENTION_ON_CPU = {  # which torch does not count by itself
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def peak_memory(job: Job, device: torch.device) -> int | None:
    """Bytes that a call needs at its peak above those in use before it; None where that cannot be measured."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        job()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    try:
        # What was freed would be taken again without being seen. Only the GNU C library can be asked to return it.
        ctypes.CDLL(None).malloc_trim(0)
        (_PROC / "clear_refs").write_text("5")  # the peak begins anew
        before = _resident("VmRSS")
    except (OSError, AttributeError, TypeError):
        return None
    job()
    return max(_resident("VmHWM") - before, 0)


def _resident(kind: str) -> int:
    line = next(line for line in (_PROC / "status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


# -- where the time goes ----------------------------------------------------------------------------------------------


def operators(job: Job, device: torch.device, ceiling: float, trace: Path | None = None) -> list[dict[str, Any]]:
    """The `OPERATORS` operators in which one call, the fastest of `RECORDINGS`, spends most time, and every matrix
    product, convolution and attention with what it achieves.

    Time is an operator's own: what it calls counts for itself. Only those whose arithmetic is counted stand with all
    that they call: a convolution with oneDNN's, a product with the copy of an operand, but not what autocast converts
    before it. On CUDA rows are the kernels on the device, but for those that such an operator launched: they are its
    time. Arithmetic is that of the form that runs: none is seen in a kernel that torch does not know, nor in a replayed
    graph. `of_matmul` holds it against `ceiling`, operations a second in the run's precision, whatever its own is.

    All others follow as `OTHERS`, and as `BETWEEN` what is left of the wall clock: Python, and on CUDA a device without
    work. So far the shares make one. `PRODUCTS` comes last, where there are any: the rows with arithmetic together.
    Recording takes time, so shares mean more than seconds, and rates of short calls are too low.

    `trace` (.json.gz) is written for Perfetto or chrome://tracing.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would talk on stderr
    counted = _count_by_operator(job)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    total, recorded = math.inf, None
    for _ in range(RECORDINGS):
        with torch.profiler.profile(activities=activities) as recording:
            took = seconds(job, device)
        if took < total:
            total, recorded = took, recording
    assert recorded is not None
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(trace))
    spent, calls = _own_time(recorded.events() or [], counted, device.type == "cuda")

    def row(operator: str, names: Sequence[str], operations: int | None = None) -> dict[str, Any]:
        own = sum(spent[name] for name in names)
        rate = operations / own if operations is not None and own > 0 else None
        return {
            "operator": operator if len(operator) <= 60 else f"{operator[:57]}...",
            "seconds": own,
            "share": own / total,
            "calls": sum(calls[name] for name in names) or None,
            "operations": operations,
            "operations_per_second": rate,
            "of_matmul": None if rate is None else rate / ceiling,
        }

    names = sorted(spent, key=lambda name: spent[name], reverse=True)
    products = [name for name in names if name in counted]
    named = [name for place, name in enumerate(names) if place < OPERATORS or name in counted]
    rows = [row(name, [name], counted.get(name)) for name in named]
    rows.append(row(OTHERS, [name for name in names if name not in named]))
    between = max(total - sum(spent.values()), 0.0)
    rows.append(row(BETWEEN, []) | {"seconds": between, "share": between / total})
    if products:
        rows.append(row(PRODUCTS, products, sum(counted[name] for name in products)))
    return rows


def _own_time(
    events: Iterable[Any], counted: Collection[str], on_cuda: bool
) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and calls of each operator (on CUDA: kernel) by name, the operators in `counted` with all they call.

    events: of torch's profiler, FunctionEvent. What is counted is counted below autograd and autocast and not looked
    into: these are the outermost events of these names, where one with another of its name directly inside is only
    autocast on its way there.
    """
    spent: dict[str, float] = defaultdict(float)  # microseconds
    calls: Counter[str] = Counter()
    todo: list[tuple[Any, str | None]] = [(event, None) for event in events if event.cpu_parent is None]
    while todo:
        event, product = todo.pop()
        is_call = product is None and all(child.name != event.name for child in event.cpu_children)
        if is_call and event.name in counted:
            product = event.name
        todo += [(child, product) for child in event.cpu_children]
        if event.is_user_annotation:
            continue
        if not on_cuda:
            spent[product or event.name] += event.self_cpu_time_total
            calls[product or event.name] += is_call
        elif event.device_type == DeviceType.CUDA:
            spent[event.name] += event.self_device_time_total
            calls[event.name] += 1
        elif product is not None:
            calls[product] += is_call
            # Kernels know the operator that launched them; numbers of calls into CUDA may be those of other operators.
            for kernel in event.kernels if event.name.startswith("aten::") else ():
                spent[kernel.name] -= kernel.duration
                calls[kernel.name] -= 1
                spent[product] += kernel.duration
    return {name: 1e-6 * spent[name] for name in spent if calls[name]}, calls


# -- rows -------------------------------------------------------------------------------------------------------------


class Bench:
    """Times calls on one machine, whose ceilings it measures first, and makes a row of each result."""

    def __init__(self, machine: Machine, progress: Progress) -> None:
        self.device, self.progress = machine.device, progress
        matmul = {name: matmul_ceiling(name, self.device, progress) for name in ("float32", "bfloat16")}
        copy = copy_ceiling(self.device, progress)
        self.arithmetic, self.copying = matmul[machine.precision].rate, copy.rate
        self.ceilings = [
            *(self.row(each.what, each.shape, each.times, operations=each.per_call) for each in matmul.values()),
            self.row(copy.what, copy.shape, copy.times, moved=copy.per_call),
        ]

    def timed(self, what: str, jobs: Mapping[str, Job]) -> dict[str, list[float]]:
        """As `timed` of this module."""
        return timed(jobs, self.device, self.progress, what)

    def row(
        self,
        what: str,
        shape: str,
        times: Sequence[float],
        *,
        count: float | None = None,
        unit: str | None = None,
        operations: float | None = None,
        moved: float | None = None,
        memory: int | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """A call that took `times` seconds and did `count` of `unit`, that many operations and bytes moved.

        `of_matmul` is the share of the ceiling in the run's precision. None stands for what does not apply.
        """
        median = statistics.median(times)
        return {
            "what": what,
            "shape": shape,
            "seconds": median,
            "seconds_low": min(times),
            "seconds_high": max(times),
            "rate": None if count is None else count / median,
            "unit": None if unit is None else f"{unit}/s",
            "operations": operations,
            "operations_per_second": None if operations is None else operations / median,
            "of_matmul": None if operations is None else operations / median / self.arithmetic,
            "bytes_moved": moved,
            "bytes_per_second": None if moved is None else moved / median,
            "of_copy": None if moved is None else moved / median / self.copying,
            "peak_bytes": memory,
            **more,
        }


def ratio(what: str, shape: str, slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """How many times as long `slow` took as `fast`, pair by pair as they were timed in turn."""
    each = [long / short for long, short in zip(slow, fast, strict=True)]
    return {
        "what": what,
        "shape": shape,
        "ratio": statistics.median(each),
        "ratio_low": min(each),
        "ratio_high": max(each),
    }
