"""An environment that tells where it is played: `witness:wm-test/Witness-v0`.

It appends a line to the file of the variable: the number of the process and the node of a Ray cluster. Then its steps
take SECONDS each, so that there is time to disturb it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from wmcli.envs.catch import Catch

WITNESS = "witness:wm-test/Witness-v0"
FILE = "WM_TEST_WITNESS"
SECONDS = 0.05


class Witness(Catch):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        if FILE in os.environ and not hasattr(self, "told"):
            self.told = True
            node = sys.modules["ray"].get_runtime_context().get_node_id() if "ray" in sys.modules else "here"
            with Path(os.environ[FILE]).open("a") as file:
                file.write(f"{os.getpid()} {node}\n")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if FILE in os.environ:
            time.sleep(SECONDS)
        return super().step(action)


gymnasium.register("wm-test/Witness-v0", entry_point=Witness)
