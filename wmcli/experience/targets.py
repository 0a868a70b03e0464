"""Search targets: policies and values by search, for models that learn a policy and a value.

Axes: N rows of the replay, A actions, or sampled ones, R reanalyzed rows, B batch. A row starts with the result of the
search that played it. Reanalysis searches it again with a newer model and replaces the result.

Source: MuZero Reanalyze (Schrittwieser et al. 2021, arXiv 2104.06294).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wmcli.experience.replay import Replay
from wmcli.spaces import ActionSpace, Continuous, Discrete, to_action_space
from wmcli.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor


NEVER = np.iinfo(np.int32).max  # searches of a row that needs none


class SearchTargets:
    """Policy (N, A), value (N,) float32 and `is_searched` (N,) bool of every row of a replay, on its device.

    Where actions are not `Discrete`, `sampled` (N, A, ...) holds the actions that the policy belongs to; else it is
    None. A is then the largest number of samples of a search. A search with fewer has shares of 0 behind its own.

    A checkpoint has the results of reanalysis only; the others are in the experience.
    """

    def __init__(self, replay: Replay, actions: ActionSpace | int) -> None:
        """Start with the results of the searches that played the rows.

        Args:
            replay: The experience.
            actions: The actions, or the number of discrete ones.
        """
        import torch

        rows, device, space = len(replay), replay.device, to_action_space(actions)
        width = space.count if isinstance(space, Discrete) else 0
        self.sampled: Tensor | None = None
        if not isinstance(space, Discrete):
            dtype = torch.float32 if isinstance(space, Continuous) else torch.int64
            self.sampled = torch.zeros(rows, width, *space.shape, dtype=dtype, device=device)
        self.policy = torch.zeros(rows, width, device=device)
        self.value = torch.zeros(rows, device=device)
        self.is_searched = torch.zeros(rows, dtype=torch.bool, device=device)
        if replay.searched is not None:
            policy, value, found, sampled = replay.searched
            self._put(slice(None), policy, value, sampled)
            self.is_searched.copy_(found)
        self._again = np.zeros(rows, np.int64)  # reanalyses of each row
        self._searches = self.is_searched.cpu().numpy().astype(np.int64)  # searches of each row, the first included
        if replay.is_closing is not None:  # no action is taken there
            self._searches[replay.is_closing.cpu().numpy()] = NEVER

    def due(self, count: int) -> np.ndarray:
        """Return the `count` rows with the fewest searches, int64, the oldest first, or all rows if there are fewer.

        Observations that close episodes are not among them.
        """
        rows = np.argsort(self._searches, kind="stable")[:count]
        return rows[self._searches[rows] < NEVER]

    def update(self, rows: np.ndarray, policy: Tensor, value: Tensor, sampled: Tensor | None = None) -> None:
        """Replace the results at rows (B,) by policy (B, A), value (B,) and the sampled actions (B, A, ...)."""
        self._put(to_device(rows, self.policy.device), policy, value, sampled)
        self._again[rows] += 1
        self._searches[rows] += 1

    def _put(self, where: Any, policy: Tensor, value: Tensor, sampled: Tensor | None = None) -> None:
        count = policy.shape[1]
        self.policy = _widened(self.policy, count)
        self.policy[where] = _widened(policy, self.policy.shape[1])
        self.value[where], self.is_searched[where] = value, True
        if self.sampled is not None and sampled is not None:
            self.sampled = _widened(self.sampled, count)
            self.sampled[where] = _widened(sampled, self.sampled.shape[1])

    def state(self) -> dict[str, Any]:
        """Return the reanalyzed rows (R,), their counts and their newest results."""
        rows = np.flatnonzero(self._again)
        where = to_device(rows, self.policy.device)
        results = {"policy": self.policy, "value": self.value, "sampled": self.sampled}
        newest = {name: each[where].cpu().numpy() for name, each in results.items() if each is not None}
        return {"rows": rows, "again": self._again[rows], **newest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the results of reanalysis. The replay may have grown since: its rows keep their numbers."""
        rows = state["rows"]
        device = self.policy.device
        results = {name: to_device(state[name], device) for name in ("policy", "value", "sampled") if name in state}
        self._put(to_device(rows, device), **results)
        self._searches[rows] += state["again"] - self._again[rows]
        self._again[rows] = state["again"]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Keep the results of reanalysis."""
        self.load(state)


def _widened(column: Tensor, count: int) -> Tensor:
    """Return a column (R, A, ...) with zeros behind its A entries up to `count` of them, if it has fewer."""
    from torch.nn.functional import pad

    missing = count - column.shape[1]
    return column if missing <= 0 else pad(column, [0, 0] * (column.ndim - 2) + [0, missing])
