from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / each) for each in ("stages", "exchange")]  # for the tiny run, and recordings
