"""Search targets: policies and values by search, for models that learn a policy and a value.

Axes: N rows of the replay, A actions, R reanalyzed rows, B batch. A row starts with the result of the search that
played it. Reanalysis searches it again with a newer model and replaces the result.

Source: MuZero Reanalyze (Schrittwieser et al. 2021, arXiv 2104.06294).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wmcli.experience.replay import Replay
from wmcli.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor


class SearchTargets:
    """Policy (N, A), value (N,) float32 and `is_searched` (N,) bool of every row of a replay, on its device.

    A checkpoint has the results of reanalysis only; the others are in the experience.
    """

    def __init__(self, replay: Replay, actions: int) -> None:
        import torch

        rows, device = len(replay), replay.device
        if replay.searched is None:
            self.policy = torch.zeros(rows, actions, device=device)
            self.value = torch.zeros(rows, device=device)
            self.is_searched = torch.zeros(rows, dtype=torch.bool, device=device)
        else:
            self.policy, self.value, self.is_searched = (column.clone() for column in replay.searched)
        self._again = np.zeros(rows, np.int64)  # reanalyses of each row
        self._searches = self.is_searched.cpu().numpy().astype(np.int64)  # searches of each row, the first included

    def due(self, count: int) -> np.ndarray:
        """Return the `count` rows with the fewest searches, int64, the oldest first, or all rows if there are fewer."""
        return np.argsort(self._searches, kind="stable")[:count]

    def update(self, rows: np.ndarray, policy: Tensor, value: Tensor) -> None:
        """Replace the results at rows (B,) by policy (B, A) and value (B,)."""
        where = to_device(rows, self.policy.device)
        self.policy[where], self.value[where], self.is_searched[where] = policy, value, True
        self._again[rows] += 1
        self._searches[rows] += 1

    def state(self) -> dict[str, Any]:
        """Return the reanalyzed rows (R,), their counts and their newest results."""
        rows = np.flatnonzero(self._again)
        where = to_device(rows, self.policy.device)
        return {
            "rows": rows,
            "again": self._again[rows],
            "policy": self.policy[where].cpu().numpy(),
            "value": self.value[where].cpu().numpy(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the results of reanalysis. The replay may have grown since: its rows keep their numbers."""
        rows = state["rows"]
        where = to_device(rows, self.policy.device)
        self.policy[where] = to_device(state["policy"], self.policy.device)
        self.value[where] = to_device(state["value"], self.value.device)
        self.is_searched[where] = True
        self._searches[rows] += state["again"] - self._again[rows]
        self._again[rows] = state["again"]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Keep the results of reanalysis."""
        self.load(state)
