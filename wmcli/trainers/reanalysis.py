"""Reanalysis: new searches at frames of the experience, for a planner without weights of its own.

Source: MuZero Reanalyse (Schrittwieser et al. 2021, arXiv 2104.06294).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wmcli import ranks
from wmcli.backbones.base import map_state
from wmcli.controllers.base import Controller, episode_starts
from wmcli.experience import Replay, SearchTargets
from wmcli.experience.sampler import WindowTable
from wmcli.trainers.batches import gather
from wmcli.training.checkpoint import TrainState
from wmcli.training.device import Machine
from wmcli.training.loop import Trainer
from wmcli.world_models.base import WorldModel, masked_mean


class ReanalysisTrainer(Trainer):
    """Searches at the frames with the fewest searches, the oldest of them first, as if they had just been played.

    Args:
        world_model: A planning one, frozen, in eval mode (`Machine.freeze`).
        controller: The search.
        replay: The experience.
        settings: The section of the controller.
        machine: Device and precision.
        rng: Saved with the state; nothing draws from it.
    """

    def __init__(
        self,
        world_model: WorldModel,
        controller: Controller,
        replay: Replay,
        settings: Any,
        *,
        machine: Machine,
        rng: np.random.Generator,
    ) -> None:
        self.world_model = world_model
        self.controller = controller
        self.replay = replay
        self.settings = settings
        self.machine = machine
        self.targets = SearchTargets(replay, world_model.action_space)
        runs, order = replay.runs(across_ends=False)
        self._windows = WindowTable(runs, order, length=world_model.context, minimum=1, pad="left")
        self._window_of_row = np.argsort(order)  # index of the window that ends with each row
        self.state = TrainState({"controller": controller}, None, rng, {"targets": self.targets})

    @torch.no_grad()
    def update(self) -> Mapping[str, Tensor]:
        """Search at a batch of frames and store the results. Random numbers come from torch's global generator."""
        due = self.targets.due(self.settings.batch)
        with ranks.sharing_rows():
            return self._search(due)

    def _search(self, due: np.ndarray) -> Mapping[str, Tensor]:
        """Search at the rows `due` (R,), each rank at its own."""
        equal = ranks.all_rows(-(-len(due) // ranks.all_rows(1)))  # as many on each rank: some rows twice
        rows = ranks.own_rows(np.resize(due, equal))
        batch = gather(
            self.replay, self.replay.observation, self._windows.windows(self._window_of_row[rows]), self.targets
        )
        with self.machine.autocast():
            latent = self.world_model.encode(batch.inputs)
            _, world_state = self.world_model.observe(latent, batch.action, episode_starts(batch))
            state = self.controller.initial_state(len(rows))
            _, state = self.controller.decide(self.world_model, world_state, state, torch.default_generator)
        summary = self.controller.summarize_search(state)
        assert summary is not None and batch.targets is not None
        every = map_state(lambda each: ranks.gather_rows(each)[: len(due)], summary)
        self.targets.update(due, *every)
        before = map_state(lambda each: each[:, -1], batch.targets)
        metrics = {
            "search_value": summary.value.mean(),
            "search_entropy": -torch.xlogy(summary.policy, summary.policy).sum(-1).mean(),
        }
        if summary.sampled is None:  # else the two policies are over different actions
            change = (summary.policy - before.policy).abs().sum(-1) / 2
            metrics["policy_change"] = masked_mean(change, before.is_searched)
        return metrics | {"value_change": masked_mean((summary.value - before.value).abs(), before.is_searched)}
