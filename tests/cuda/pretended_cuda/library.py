"""The library behind the pretended device: compiled once, and loaded before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILER = os.environ.get("CXX", "g++")


def missing() -> str | None:
    """Return why there can be no pretended device here, or None if there can."""
    if sys.platform != "linux":
        return "the pretended device is for Linux"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built for CUDA, and the pretended device needs one for the CPU"
    if shutil.which(COMPILER) is None:
        return f"no C++ compiler ({COMPILER}) for the pretended device"
    return None


def built() -> Path:
    """Return the library for the installed torch, from the user's cache if it is there.

    Raises:
        RuntimeError: It cannot be compiled; the message is the compiler's.
    """
    key = hashlib.sha256(f"{version('torch')} {COMPILER} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wm-tests"
    path = cache / f"pretended-cuda-{version('torch')}-{key}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        torch = _torch()
        with tempfile.TemporaryDirectory(dir=cache) as place:
            made = Path(place) / path.name
            command = [COMPILER, "-O1", "-std=c++20", "-fPIC", "-shared", str(SOURCE), f"-I{torch / 'include'}"]
            command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{SOURCE.name} does not compile against torch {version('torch')}:\n{done.stderr}")
            made.rename(path)
    return path


def load() -> ctypes.CDLL:
    """Load the library. Torch reads its registers when it is imported."""
    assert "torch" not in sys.modules, "torch was imported before the pretended device"
    torch = _torch()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
