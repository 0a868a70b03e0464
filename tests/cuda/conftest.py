"""Where the pretended device is; tests on it are collected only where it pretends."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
collect_ignore = [] if "pretended_cuda.plugin" in sys.modules else [str(HERE / "on_the_device")]
