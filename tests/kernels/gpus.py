"""Compile Triton kernels for GPUs on a machine that may have none.

A test file of kernels has a function `compile_cases` and one test that calls `compile_for_gpus(__file__)`. The kernels
that this process has imported may be interpreted ones, so the compiler runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where tests run Triton's kernels: on a CPU they are interpreted."""

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32)]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program can have

Case = tuple[Any, dict[str, str], dict[str, Any]]
"""A jit function, the type of each argument ("*bf16", "*fp32", "i32", "fp32"), and the values of the constexpr ones."""


def compile_for_gpus(file: str) -> None:
    """Compile the cases of that test file for every target; fails with the compiler's message."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run([sys.executable, __file__, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled" in done.stdout


def _cases(file: str) -> Iterator[Case]:
    spec = importlib.util.spec_from_file_location("cases", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compile_cases()


def main(file: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sys.path.insert(0, str(Path(__file__).parent))
    count = 0
    for kernel, types, constants in _cases(file):
        signature = types | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants)
        for target in TARGETS:
            compiled = triton.compile(source, target=GPUTarget(*target))
            shared = compiled.metadata.shared
            assert shared <= SHARED_MEMORY[target[1]], f"{kernel.__name__} needs {shared} bytes on {target}"
            count += 1
    print(f"compiled {count}")


if __name__ == "__main__":
    main(sys.argv[1])
