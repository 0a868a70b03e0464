"""Copies from the host to a device: the values that arrive, and that none of them waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from wmcli import transfer
from wmcli.transfer import take_rows, to_device

CPU = torch.device("cpu")
ROWS = np.array([[3, 0, 3], [1, 4, 2]])


@pytest.fixture
def source() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8))


def test_on_the_cpu_only_what_begins_elsewhere_than_torchs_memory_is_copied() -> None:
    """A product of a matrix that begins elsewhere is rounded otherwise on some processors."""
    own = torch.arange(100.0)
    assert to_device(own, CPU) is own and to_device(own[16:32], CPU).data_ptr() == own[16:].data_ptr()
    for offset in (1, 2, 8, 15):
        moved = to_device(own[offset:].numpy(), CPU)
        assert moved.data_ptr() % 64 == 0 and torch.equal(moved, own[offset:])


def test_rows_gathered_on_the_host_are_those_of_the_device(source: torch.Tensor) -> None:
    expected = source[torch.from_numpy(ROWS)]
    assert torch.equal(take_rows(source, ROWS, CPU), expected)
    assert torch.equal(transfer._gather(source, ROWS, pinned=False), expected)
    part = source[1:]  # a view, as the replay's columns are
    assert torch.equal(transfer._gather(part, ROWS[0], pinned=False), part[torch.from_numpy(ROWS[0])])


def test_rows_of_the_host_go_where_the_others_are(source: torch.Tensor) -> None:
    taken = take_rows(source, ROWS, torch.device("meta"))
    assert taken.device.type == "meta" and taken.shape == (2, 3, 4, 4, 3) and taken.dtype == torch.uint8


def test_every_copy_to_cuda_is_out_of_pinned_memory_and_does_not_wait(source: torch.Tensor, monkeypatch) -> None:
    pinned: list[Any] = []
    copies: list[tuple[bool, bool]] = []
    empty, to = torch.empty, torch.Tensor.to

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    def allocate(*shape: int, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        return pin(empty(*shape, **how)) if pin_memory else empty(*shape, **how)

    def copy(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        copies.append((any(tensor.data_ptr() == each.data_ptr() for each in pinned), non_blocking))
        return to(tensor, CPU)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch, "empty", allocate)
    cuda = torch.device("cuda")
    to_device(ROWS, cuda)
    assert torch.equal(take_rows(source, ROWS, cuda), source[torch.from_numpy(ROWS)])
    assert copies == [(True, True), (True, True)]
