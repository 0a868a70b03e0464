"""The state of the pretended device: waits, errors, copies under way, random numbers, memory and what is recorded."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

CUDA = torch.device("cuda", 0)
PROJECT = Path(__file__).resolve().parents[3]
WATCHED = tuple(f"{PROJECT / folder}/" for folder in ("wmcli", "kernels"))
ELSEWHERE = "outside of wmcli"  # autograd's own thread, or a test
TOTAL_MEMORY = 80 << 30


class Place(NamedTuple):
    """A line of the project. Its number is no part of its identity in tables, since lines move."""

    file: str
    function: str
    line: int

    @property
    def name(self) -> str:
        """The file in the project and the function in it."""
        return f"{self.file} {self.function}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class Wait(NamedTuple):
    """One kind of wait for the device."""

    reason: str
    place: Place
    during: str
    """What was done then, as named by `during`; empty if nothing was named."""


class Device:
    """The one pretended device of a process."""

    def __init__(self) -> None:
        self.waits: Counter[Wait] = Counter()
        self.errors: list[str] = []
        """What CUDA would refuse. It was raised, and may have been caught since."""
        self.recording: Any = None
        self.recorded = self.replayed = 0
        self.operations: Counter[str] = Counter()
        """Recorded operations by name."""
        self.warns: str = "default"  # as torch.cuda.set_sync_debug_mode
        self.allocated = self.peak = 0
        self.random_state: Tensor = torch.Generator().manual_seed(0).get_state()
        self.library: Any = None
        self._during: list[str] = []
        self._from_host: list[tuple[Tensor, Tensor, Place]] = []
        self._to_host: list[tuple[Tensor, Tensor]] = []

    def begin_recording(self, recording: Any) -> None:
        """Record from here on."""
        self.recording = recording
        self.library.set_recording(True)

    def end_recording(self) -> None:
        """Record no more."""
        self.recording = None
        self.recorded += 1
        self.library.set_recording(False)

    def wait(self, reason: str) -> None:
        """Count a wait. All copies under way end.

        Raises:
            RuntimeError: Something is being recorded, or waits are forbidden.
        """
        place = here()
        if self.recording is not None:
            self.refuse(f"CUDA error: operation not permitted when stream is capturing ({reason})")
        if self.warns == "error":
            self.refuse(f"called a synchronizing CUDA operation ({reason})")
        self.waits[Wait(reason, place, self._during[-1] if self._during else "")] += 1
        self._end_copies()

    def refuse(self, message: str) -> NoReturn:
        """Raise what CUDA would raise, and remember it."""
        self.errors.append(f"{message} at {here()}")
        raise RuntimeError(self.errors[-1])

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Name what is done inside, for `waits`."""
        self._during.append(name)
        try:
            yield
        finally:
            self._during.pop()

    def copy_from_host(self, source: Tensor) -> None:
        """Note a copy out of pinned memory that may be under way until the next wait."""
        self._from_host.append((source, source.clone(), here()))

    def copy_to_host(self, target: Tensor) -> None:
        """Make the target of a copy into pinned memory void until the next wait, which fills it."""
        self._to_host.append((target, target.clone()))
        fill_with_garbage(target)

    def _end_copies(self) -> None:
        for target, values in self._to_host:
            target.copy_(values)
        copies, self._from_host, self._to_host = self._from_host, [], []
        for source, values, place in copies:
            if not torch.equal(_bytes(source), _bytes(values)):
                self.refuse(f"pinned memory was overwritten while it was copied to the device at {place}")

    def allocate(self, size: int) -> None:
        """Count bytes that are allocated, or freed if negative."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    @contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Let torch's global CPU generator stand for the device's."""
        kept = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        try:
            yield
        finally:
            self.random_state = torch.get_rng_state()
            torch.set_rng_state(kept)

    def report(self) -> str:
        """Return waits, errors and recordings as text for people."""
        lines = [
            f"{count:7d} x {wait.reason} at {wait.place} {wait.during}" for wait, count in self.waits.most_common()
        ]
        lines += [f"error: {error}" for error in self.errors]
        return "\n".join([*lines, f"recordings {self.recorded}, replays {self.replayed}"])


def here() -> Place:
    """Return the line of the project that is being executed."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(WATCHED):
            file = code.co_filename.removeprefix(f"{PROJECT}/").replace("wmcli/kernels/", "kernels/")
            return Place(file, code.co_qualname, frame.f_lineno)
        frame = frame.f_back
    return Place(ELSEWHERE, "", 0)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def fill_with_garbage(tensor: Tensor) -> None:
    """Fill with NaN, or with integers that no index survives."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


DEVICE = Device()
