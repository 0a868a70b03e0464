"""Every stage on a pretended CUDA device, in processes of their own: it has to be there before torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_cuda.library import missing

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MARKED_GPU = ["tests/training/test_graph.py", "tests/nn/test_categorical.py"]


def run(*arguments: str) -> None:
    """Run pytest where there is a pretended device; all of its tests pass, and there are some.

    Where there can be none it is skipped. In CI, where the environment variable CI is set, a compiler must be there.
    """
    if (reason := missing()) is not None:
        assert not (os.environ.get("CI") and "compiler" in reason), f"CI needs it: {reason}"
        pytest.skip(reason)
    path = os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    own |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "pretended_cuda.plugin", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(line, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* passed", done.stdout) and " skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("file", sorted(each.name for each in (HERE / "on_the_device").glob("test_*.py")))
def test_on_the_device(file: str) -> None:
    run(str(HERE / "on_the_device" / file))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["test_runs.py", "test_commands.py"])
def test_more_on_the_device(file: str) -> None:
    run(str(HERE / "on_the_device" / file), "-m", "slow")


@pytest.mark.slow
def test_what_needs_a_gpu() -> None:
    """Tests marked `gpu`, of which those of this folder run as many cases as there is time for."""
    run("-m", "gpu and not slow", *MARKED_GPU, str(HERE / "test_stages_on_gpu.py"))


@pytest.mark.slow
@pytest.mark.takes_part
def test_all_that_needs_a_gpu(request: pytest.FixtureRequest) -> None:
    """Or the part of it that `--part` names."""
    part = request.config.getoption("part")
    run("-m", "gpu and slow", "--part", part, str(HERE / "test_stages_on_gpu.py"))
