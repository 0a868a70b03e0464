"""Test workers side by side share the cores: one thread each (set before torch is imported), or they wait in turn.

Without a GPU, Triton's kernels run in its interpreter (set before the kernels are imported).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="wm-tests-")  # the notes of trusted runs, not the user's own

SAMPLE = 6
"""Cases of a test marked `matrix` that are not slow. The sample of a test is always the same."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        default="0/1",
        metavar="K/N",
        help="every Nth of the slow tests and of those of papers, K from 0 to N - 1",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but a sample of each large matrix as slow, and leave out the slow tests that are not in `--part`.

    A test marked `takes_part` runs in every part, and divides itself.
    """
    part = config.getoption("part")
    first, step = map(int, part.split("/")) if re.fullmatch(r"\d+/\d+", part) else (0, 0)
    if first >= step:
        raise pytest.UsageError(f"--part {part}: K/N is needed, K from 0 to N - 1, such as --part 0/3.")
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for name, matrix in cases.items():
        rest = random.Random(name).sample(matrix, max(0, len(matrix) - SAMPLE))
        for item in rest:
            item.add_marker(pytest.mark.slow)
        left_out |= set(rest) - set(rest[first::step])
    slow = [item for item in items if any(map(item.get_closest_marker, ("slow", "papers")))]
    others = [item for item in slow if not any(map(item.get_closest_marker, ("matrix", "takes_part")))]
    left_out |= set(others) - set(others[first::step])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The Chromium of this machine, driven by Playwright. Tests that need it are slow, and skipped without one."""
    api = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
