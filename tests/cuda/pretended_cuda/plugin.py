"""The pytest plugin `-p pretended_cuda.plugin`: from its import on this process has a pretended CUDA device."""

from __future__ import annotations

import os

from pretended_cuda import library

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
_library = library.load()

from pretended_cuda.runtime import install  # noqa: E402 (torch is imported after the library)

install(_library)
