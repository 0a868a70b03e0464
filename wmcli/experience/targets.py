"""What searches found at the frames of the experience: the targets of a model that learns a policy and a value.

N rows of the memory, A actions, R rows searched anew. A row has what the search found that played it; a reanalysis
(Schrittwieser et al. 2021, arXiv 2104.06294) searches again with a newer model and puts its findings in that place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wmcli.experience.replay import Replay

if TYPE_CHECKING:
    from torch import Tensor


class SearchTargets:
    """Policy (N, A) and value (N,) float32 and `found` (N,) bool for every row of a memory, on its device.

    What `update` puts in is its state, which a checkpoint keeps; what was collected is in the experience itself.
    """

    def __init__(self, replay: Replay, actions: int) -> None:
        import torch

        rows, device = len(replay), replay.device
        if replay.searched is None:
            self.policy = torch.zeros(rows, actions, device=device)
            self.value = torch.zeros(rows, device=device)
            self.found = torch.zeros(rows, dtype=torch.bool, device=device)
        else:
            self.policy, self.value, self.found = (column.clone() for column in replay.searched)
        self._again = np.zeros(rows, np.int64)  # how often each row was searched anew
        self._searches = self.found.cpu().numpy().astype(np.int64)  # how often each was searched at all

    def due(self, count: int) -> np.ndarray:
        """The `count` rows, int64, that were searched least, the oldest of those first; fewer if there are fewer."""
        return np.argsort(self._searches, kind="stable")[:count]

    def update(self, rows: np.ndarray, policy: Tensor, value: Tensor) -> None:
        """Put in what a search found at these rows (B,): policy (B, A), value (B,)."""
        import torch

        where = torch.from_numpy(rows).to(self.policy.device)
        self.policy[where], self.value[where], self.found[where] = policy, value, True
        self._again[rows] += 1
        self._searches[rows] += 1

    def state(self) -> dict[str, Any]:
        """The rows searched anew (R,), how often, and what was found there last."""
        import torch

        rows = np.flatnonzero(self._again)
        where = torch.from_numpy(rows).to(self.policy.device)
        return {
            "rows": rows,
            "again": self._again[rows],
            "policy": self.policy[where].cpu().numpy(),
            "value": self.value[where].cpu().numpy(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what the one that gave `state` found. The memory may have grown since: its rows keep numbers."""
        import torch

        rows = state["rows"]
        where = torch.from_numpy(rows).to(self.policy.device)
        self.policy[where] = torch.from_numpy(state["policy"]).to(self.policy.device)
        self.value[where] = torch.from_numpy(state["value"]).to(self.value.device)
        self.found[where] = True
        self._searches[rows] += state["again"] - self._again[rows]
        self._again[rows] = state["again"]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """The same: what was found stays found."""
        self.load(state)
