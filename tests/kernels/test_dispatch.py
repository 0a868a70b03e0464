"""Every operation works where Triton is not installed, as on macOS."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
import wmcli.kernels
from wmcli.kernels import dispatch
from wmcli.kernels.lambda_returns import lambda_returns

for module in pkgutil.iter_modules(wmcli.kernels.__path__):
    importlib.import_module(f"wmcli.kernels.{module.name}")
importlib.import_module("wmcli.assemble")
zeros = torch.zeros(2, 3)
assert lambda_returns(zeros, zeros, zeros.bool(), 0.9, 0.9).shape == (2, 3)
print(dispatch.unavailable(zeros.device))
"""


def test_kernels_work_without_triton() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "triton is not installed\n"
