"""Cost of calls: seconds, arithmetic and memory, compared with the limits of the machine.

Seconds are wall-clock seconds of one call: the median, the fastest and the slowest of `REPEATS` samples after a
warm-up. Calls to be compared are timed in turn, so that disturbances of the machine affect all of them.

Arithmetic is counted in matrix products, convolutions and attention, a product and its sum as two operations. Not
counted are element-wise operations, reductions, Fourier transforms, cuDNN's recurrent networks and kernels outside
torch: count those in their torch form. Attention under a causal mask counts as the whole square. A product of complex
numbers counts as one of real numbers, a quarter of its cost.

Memory is a call's peak above the use between two calls: weights, gradients, optimizer state and data. On CUDA it is the
most bytes that torch had allocated. On a CPU it is the peak of the resident set, libraries and allocators included.
Only Linux with the GNU C library reports the latter.

Launches are calls of the host that start work on a CUDA device, device operations what the device then runs: a replayed
graph is one launch of many. A wait is a call during which the host waits for the device.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from wmcli.kernels.dispatch import on_triton
from wmcli.kernels.lambda_returns import lambda_returns
from wmcli.memory import PROC, peak_resident, resident
from wmcli.progress import Progress
from wmcli.training.device import Machine
from wmcli.training.graph import WARM_UPS, capture

REPEATS = 5
SAMPLE_SECONDS = 0.01  # calls shorter than this are timed several in a row
MOST_CALLS = 1000  # of a job in a row
CEILING_SECONDS = 0.05  # of a call with operands that exceed any cache
MATMUL_SIZES = (1024, 16384)  # of a square matrix: the first and the largest
COPY_BYTES = (1 << 26, 1 << 31)  # of the array that is copied, likewise
RECORDED_OPERATIONS = 1000  # of the graph whose replay is timed
RECORDINGS = 3  # the fastest counts: some calls wait for pages that the profiler allocates
OPERATORS = 6  # rows of the table of operators, beside those of matrix products
OTHERS, BETWEEN, PRODUCTS = "(other operators)", "(between operators)", "(all matrix products)"

Job = Callable[[], object]


# -- time -------------------------------------------------------------------------------------------------------------


def time_call(job: Job, device: torch.device, calls: int = 1) -> float:
    """Return the seconds of one call, the mean of `calls` in a row, until the device has finished."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        job()
    _wait(device)
    return (time.perf_counter() - started) / calls


def time_jobs(
    jobs: Mapping[str, Job], device: torch.device, progress: Progress, name: str, *, quick: bool = False
) -> dict[str, list[float]]:
    """Time each job: return the seconds of a call, `REPEATS` samples, taken in turn after a warm-up.

    Args:
        jobs: The jobs by name.
        device: Their device.
        progress: Display of progress.
        name: Of all of them, for the display.
        quick: Take one sample of one call, to try jobs out.
    """
    calls, repeats = {}, 1 if quick else REPEATS
    times: dict[str, list[float]] = {name: [] for name in jobs}
    with progress.bar(f"profile {name}", 1 + repeats, "rounds") as bar:
        for key, job in jobs.items():
            once = time_call(job, device)
            if once < 1 and not quick:  # a second call measures short jobs better
                once = time_call(job, device)
            calls[key] = 1 if quick else min(math.ceil(SAMPLE_SECONDS / max(once, 1e-9)), MOST_CALLS)
        bar.advance()
        for _ in range(repeats):
            for key, job in jobs.items():
                times[key].append(time_call(job, device, calls[key]))
            bar.advance()
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- ceilings ---------------------------------------------------------------------------------------------------------


class Ceiling(NamedTuple):
    """The largest measured rate of one kind of work."""

    name: str
    shape: str
    times: list[float]
    per_call: float
    """Operations or bytes of a call."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Ceiling:
        """Return the ceiling that a row of `Bench.ceilings` describes."""
        return cls(row["what"], row["shape"], [row["seconds_low"]], row["operations"] or row["bytes_moved"])

    @property
    def rate(self) -> float:
        """Operations or bytes per second, in the fastest sample."""
        return self.per_call / min(self.times)


def measure_matmul(precision: str, device: torch.device, progress: Progress, *, quick: bool = False) -> Ceiling:
    """Time a product of two square matrices, large enough to be limited by arithmetic.

    Args:
        precision: float32 or bfloat16.
        device: Of the matrices.
        progress: Display of progress.
        quick: Take small ones.
    """
    dtype = getattr(torch, precision)

    def product(size: int) -> Job:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    size, job = _large(product, MATMUL_SIZES, device, quick)
    name = f"matmul {precision}"
    times = time_jobs({name: job}, device, progress, name, quick=quick)[name]
    return Ceiling(name, f"{size} × {size} × {size}", times, 2.0 * size**3)


def measure_copy(device: torch.device, progress: Progress, *, quick: bool = False) -> Ceiling:
    """Time a copy from memory to memory, counted as one read and one write."""

    def copy(size: int) -> Job:
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: target.copy_(source)

    size, job = _large(copy, COPY_BYTES, device, quick)
    times = time_jobs({"copy": job}, device, progress, "copy", quick=quick)["copy"]
    return Ceiling("copy", f"{size >> 20} MiB", times, 2.0 * size)


def _large(make: Callable[[int], Job], sizes: tuple[int, int], device: torch.device, quick: bool) -> tuple[int, Job]:
    """Return the job of the first size, doubled until a call takes `CEILING_SECONDS` or the size is the largest.

    If `quick` the first size is the largest.
    """
    size, largest = sizes[0], sizes[0 if quick else 1]
    while True:
        job = make(size)
        job()
        if size >= largest or time_call(job, device) >= CEILING_SECONDS:
            return size, job
        size *= 2


def launch_jobs(device: torch.device) -> dict[str, tuple[Job, int]]:
    """Return operations on one number, so small that launching them is what they cost.

    They are launched in a row, each waited for, and on CUDA in Triton and in replayed graphs.

    Returns:
        By what a call does: the call, and the number of operations in it.
    """
    number = torch.zeros(1, device=device)
    reward, value = torch.zeros(2, 1, 2, device=device)
    terminated = torch.zeros(1, 2, dtype=torch.bool, device=device)

    def add(count: int) -> Job:
        def run() -> None:
            for _ in range(count):
                number.add_(1)

        return run

    jobs: dict[str, tuple[Job, int]] = {
        "launch of an operation": (add(1), 1),
        "operation and a wait for its result": (lambda: number.add_(1).item(), 1),
    }
    if on_triton(reward):
        jobs["launch of a Triton kernel"] = lambda: lambda_returns(reward, value, terminated, 0.99, 0.95), 1
    if device.type == "cuda":
        jobs["replay of a graph of one operation"] = capture(add(1)), 1
        jobs["operation in a replayed graph"] = capture(add(RECORDED_OPERATIONS)), RECORDED_OPERATIONS
    return jobs


# -- arithmetic and memory --------------------------------------------------------------------------------------------


def count_operations(job: Job) -> int:
    """Count the arithmetic operations of one call; the module's docstring defines them."""
    return sum(_count_by_operator(job).values())


def _count_by_operator(job: Job) -> dict[str, int]:
    """Count as `count_operations`, by operator, under the profiler's names."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU) as counter:
        job()
    counts = counter.get_flop_counts().get("Global", {})  # absent if nothing was counted
    return {str(operator).replace(".", "::"): count for operator, count in counts.items()}


def _attention(*shapes: Any, **_: Any) -> int:
    return sdpa_flop_count(*shapes[:3])  # queries, keys, values


def _attention_backward(*shapes: Any, **_: Any) -> int:
    return sdpa_backward_flop_count(*shapes[:4])  # the gradient before them


_ATTENTION_ON_CPU = {  # not counted by torch itself
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def peak_memory(job: Job, device: torch.device) -> int | None:
    """Return the peak bytes of a call above those in use before it; None if that cannot be measured."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        job()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    try:
        # Reuse of freed memory would not be measured. Only the GNU C library can return it to the system.
        ctypes.CDLL(None).malloc_trim(0)
        (PROC / "self" / "clear_refs").write_text("5")  # resets the peak
        before = resident()
    except (OSError, AttributeError, TypeError):
        return None
    job()
    return max(peak_resident() - before, 0)


# -- launches and waits -----------------------------------------------------------------------------------------------


def count_launches(job: Job, device: torch.device) -> tuple[int, int] | None:
    """Count the launches of one call, and the operations of the device; None on a CPU, where nothing is launched."""
    if device.type != "cuda":
        return None
    _hush_profiler()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recording:
        time_call(job, device)
    events = recording.events() or []
    on_device = sum(each.device_type == DeviceType.CUDA and not each.is_user_annotation for each in events)
    return sum(any(name in each.name for name in _LAUNCHES) for each in events), on_device


def _hush_profiler() -> None:
    """Keep the profiler's messages from stderr."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


_LAUNCHES = ("LaunchKernel", "GraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")  # calls into CUDA


def count_waits(job: Job, device: torch.device) -> int | None:
    """Count how often the host waits for the device in one call; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            job()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(each.message) for each in caught)


# -- time by operator -------------------------------------------------------------------------------------------------


def profile_operators(
    job: Job, device: torch.device, ceiling: float, trace: Path | None = None
) -> list[dict[str, Any]]:
    """Profile one call by operator, the fastest of `RECORDINGS`.

    The rows are the `OPERATORS` operators with the most time, and every matrix product, convolution and attention. All
    others follow as `OTHERS`. `BETWEEN` is the rest of the wall clock: Python, and on CUDA an idle device. The shares
    up to here sum to 1. `PRODUCTS` comes last, if there are any: all rows with arithmetic together.

    Time is an operator's own, without the operators that it calls. Only operators with counted arithmetic include all
    that they call, but not autocast's conversion before them. On CUDA rows are the kernels on the device, except those
    launched by an operator with counted arithmetic: their time is the operator's. Arithmetic is that of the form that
    runs. It is unknown for kernels outside torch and in a replayed graph. Recording takes time, so shares are more
    reliable than seconds, and rates of short calls are too low.

    Args:
        job: The call.
        device: Its device.
        ceiling: Operations per second in the run's precision, the reference of `of_matmul` whatever an operator's
            precision.
        trace: File (.json.gz) for a trace that Perfetto or chrome://tracing displays.
    """
    _hush_profiler()
    counted = _count_by_operator(job)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    total, recorded = math.inf, None
    for _ in range(RECORDINGS):
        with torch.profiler.profile(activities=activities) as recording:
            elapsed = time_call(job, device)
        if elapsed < total:
            total, recorded = elapsed, recording
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
    """Return seconds and calls of each operator (on CUDA: kernel) by name.

    Arithmetic is counted below autograd and autocast, at the outermost event of a counted name. An event with another
    of its own name directly inside is autocast.

    Args:
        events: `FunctionEvent` of torch's profiler.
        counted: Names of operators that include all they call.
        on_cuda: Attribute time to kernels.
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
            # Kernels record the operator that launched them; ids of calls into CUDA may belong to other operators.
            for kernel in event.kernels if event.name.startswith("aten::") else ():
                spent[kernel.name] -= kernel.duration
                calls[kernel.name] -= 1
                spent[product] += kernel.duration
    return {name: 1e-6 * spent[name] for name in spent if calls[name]}, calls


# -- rows -------------------------------------------------------------------------------------------------------------


class Bench:
    """Times calls on one machine, and makes a row of each result.

    Args:
        machine: The machine.
        progress: Display of progress.
        ceilings: The rows `ceilings` of an earlier bench on this machine; None measures the ceilings first.
        quick: Take one sample of everything, to try it out.
    """

    def __init__(
        self,
        machine: Machine,
        progress: Progress,
        ceilings: Sequence[dict[str, Any]] | None = None,
        *,
        quick: bool = False,
    ) -> None:
        self.device, self.progress, self.quick = machine.device, progress, quick
        self._first_calls = WARM_UPS + 1 if machine.cuda_graph else 0  # of a function until its graph is recorded
        if ceilings is None:
            products = [measure_matmul(name, self.device, progress, quick=quick) for name in ("float32", "bfloat16")]
            copy = measure_copy(self.device, progress, quick=quick)
        else:
            *products, copy = map(Ceiling.of_row, ceilings)
        self.arithmetic = next(each.rate for each in products if each.name.endswith(machine.precision))
        self.copying = copy.rate
        self.ceilings = list(ceilings or ()) or [
            *(self.row(each.name, each.shape, each.times, operations=each.per_call) for each in products),
            self.row(copy.name, copy.shape, copy.times, moved=copy.per_call),
        ]

    def time_jobs(self, name: str, jobs: Mapping[str, Job]) -> dict[str, list[float]]:
        """Call `time_jobs` of this module on the machine's device, with all graphs recorded before."""
        if self._first_calls:
            with self.progress.bar(f"profile {name}, recording", len(jobs), "jobs") as bar:
                for job in jobs.values():
                    for _ in range(self._first_calls):
                        job()
                    bar.advance()
        return time_jobs(jobs, self.device, self.progress, name, quick=self.quick)

    def time_launches(self) -> list[dict[str, Any]]:
        """Time `launch_jobs` and return a row of each, in seconds of an operation."""
        jobs = launch_jobs(self.device)
        times = self.time_jobs("launches", {name: job for name, (job, _) in jobs.items()})
        return [
            self.row(name, f"{count} in a call", [seconds / count for seconds in times[name]])
            for name, (_, count) in jobs.items()
        ]

    def row(
        self,
        name: str,
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
        """Return the row of a call that took `times` seconds. None stands for values that do not apply.

        Args:
            name: Of the call.
            shape: Of its arguments.
            times: Seconds, one per sample.
            count: Number of `unit` that a call processes.
            unit: Such as frames.
            operations: Arithmetic operations of a call.
            moved: Bytes that a call moves.
            memory: Peak bytes of a call.
            more: Further columns.

        Returns:
            The row. `of_matmul` is the share of the ceiling in the run's precision.
        """
        median = statistics.median(times)
        return {
            "what": name,
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


def ratio(name: str, shape: str, slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """Return the row of the ratio of `slow` to `fast`, pair by pair as they were timed in turn."""
    each = [long / short for long, short in zip(slow, fast, strict=True)]
    return {
        "what": name,
        "shape": shape,
        "ratio": statistics.median(each),
        "ratio_low": min(each),
        "ratio_high": max(each),
    }
