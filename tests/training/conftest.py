"""What a machine chooses for the whole process is taken back after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from wmcli.kernels import dispatch
from wmcli.training.device import choose_determinism


@pytest.fixture(autouse=True)
def same_choices() -> Iterator[None]:
    kinds = torch.backends.cudnn, torch.backends.cuda.matmul
    threads, tf32 = torch.get_num_threads(), [each.allow_tf32 for each in kinds]
    yield
    torch.set_num_threads(threads)
    for each, allowed in zip(kinds, tf32, strict=True):
        each.allow_tf32 = allowed
    choose_determinism(False)
    dispatch.use("auto")
