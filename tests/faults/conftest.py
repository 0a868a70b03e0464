"""One warm process and one folder of tiny runs for all tests of faults, in memory where the machine has such a disk."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "stages")]

import fault_shim  # noqa: E402
from fault_commands import Places  # noqa: E402
from warm import Warm  # noqa: E402

T = TypeVar("T")
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    if reason := fault_shim.missing():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="wm-faults-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def places(folder: Path) -> Iterator[Places]:
    warm = Warm(folder / "warm")
    yield Places(warm, folder)
    warm.close()


@pytest.fixture
def share(request: pytest.FixtureRequest) -> Callable[[Sequence[T]], Sequence[T]]:
    """The share of `--part` of some cases."""
    first, step = map(int, request.config.getoption("part").split("/"))
    return lambda cases: cases[first::step]
