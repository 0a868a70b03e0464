"""Planners with continuous actions: results of searches among samples, from the experience and from reanalysis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wmcli.assemble import build_controller, build_world_model
from wmcli.experience import Replay, SearchTargets
from wmcli.settings import Settings, resolve
from wmcli.spaces import Categories, Continuous, Discrete, Spaces, Vector
from wmcli.trainers import DynamicsTrainer, ReanalysisTrainer
from wmcli.training.device import Machine, isolated_randomness
from wmcli.training.loop import fit

CPU = Machine(torch.device("cpu"), "float32", 1)
SPACES = Spaces(Vector(3), Continuous((-1.0, -1.0), (1.0, 1.0)))
ROWS, EPISODE, K = 40, 10, 4
SYSTEMS = {
    "unizero-quick": ["backbone.width=16", "backbone.layers=1", "backbone.heads=2", "dynamics.sequence_length=4"],
    "muzero-quick": [],
}
SMALL = ["dynamics.td_steps=2", "dynamics.batch=6", "controller.simulations=3", "controller.batch=8"]


def settings_of(preset: str) -> Settings:
    context = ["dynamics.context=2"] if preset == "unizero-quick" else []
    return resolve(preset, [*SYSTEMS[preset], *context, *SMALL, f"controller.sampled_actions={K}"])


def replay(searched: bool = False) -> Replay:
    """Four episodes of random numbers, perhaps played by a search among two samples."""
    rng, first = np.random.default_rng(0), np.arange(ROWS) % EPISODE == 0
    columns: dict[str, Any] = {
        "observation": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "action": rng.uniform(-1, 1, (ROWS, 2)).astype(np.float32),
        "reward": rng.normal(size=ROWS).astype(np.float32),
        "terminated": np.roll(first, -1),
        "truncated": np.zeros(ROWS, bool),
        "first": first,
        "lives": np.zeros(ROWS, np.int16),
        "stream": np.zeros(ROWS, np.int16),
    }
    if searched:
        columns["policy"] = rng.dirichlet([1.0, 1.0], ROWS).astype(np.float32)
        columns["value"] = rng.normal(size=ROWS).astype(np.float32)
        columns["sampled"] = rng.uniform(-1, 1, (ROWS, 2, 2)).astype(np.float32)
    held = Replay(CPU.device)
    held.extend(columns)
    return held


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("preset", SYSTEMS)
def test_reanalysis_draws_samples_and_the_model_learns_from_them(preset: str, searched: bool) -> None:
    settings, data = settings_of(preset), replay(searched)
    with isolated_randomness(5, CPU.device) as rng:
        model = build_world_model(settings, None, SPACES)
        learner = DynamicsTrainer(model, data, settings.dynamics, settings.training, machine=CPU, rng=rng)
        assert (fit(learner, 1)["policy_loss"] != 0) == searched
        controller = build_controller(settings, model.eval())
        trainer = ReanalysisTrainer(model, controller, data, settings.controller, machine=CPU, rng=rng)
        metrics = fit(trainer, 3)
    assert metrics.keys() == {"search_value", "search_entropy", "value_change"}
    targets, rows = trainer.targets, np.arange(24)
    sampled = targets.sampled
    assert sampled is not None and sampled.shape == (ROWS, K, 2) and targets.policy.shape == (ROWS, K)
    assert targets.is_searched.tolist() == [searched or row < 24 for row in range(ROWS)]
    assert len(sampled[:24].flatten(0, 1).unique(dim=0)) == 24 * K, "drawn anew at every row"
    torch.testing.assert_close(targets.policy[:24].sum(1), torch.ones(24))
    if searched:  # the others keep their two samples
        assert data.searched is not None and torch.equal(sampled[24:, :2], data.searched[3][24:])
        assert not targets.policy[24:, 2:].any() and not sampled[24:, 2:].any()
    again = SearchTargets(data, SPACES.action)
    again.load(trainer.state.parts["targets"].state())
    assert (again.due(ROWS) == targets.due(ROWS)).all() and again.due(3).tolist() == ([24, 25, 26])
    for name in ("policy", "value", "is_searched", "sampled"):
        assert torch.equal(getattr(again, name)[rows], getattr(targets, name)[rows]), name
    with isolated_randomness(6, CPU.device) as rng:
        model.train()
        how: dict[str, Any] = {"machine": CPU, "rng": rng, "targets": targets}
        assert fit(DynamicsTrainer(model, data, settings.dynamics, settings.training, **how), 1)["policy_loss"] != 0


def test_targets_of_an_action_space() -> None:
    """Rows without a search have no samples, whatever the number of those that come later."""
    nobody: Any = type(
        "Nobody", (), {"__len__": lambda self: 3, "device": torch.device("cpu"), "searched": None, "is_closing": None}
    )()
    assert SearchTargets(nobody, Discrete(4)).sampled is None
    targets = SearchTargets(nobody, Categories((3, 4)))
    policy, value, sampled = torch.full((2, 5), 0.2), torch.ones(2), torch.ones(2, 5, 2, dtype=torch.int64)
    targets.update(np.array([2, 0]), policy, value, sampled)
    found: Tensor | None = targets.sampled
    assert found is not None and found.dtype == torch.int64
    assert torch.equal(found[[0, 2]], sampled) and not found[1].any() and not targets.policy[1].any()
    targets.update(np.array([1]), policy[:1, :3], value[:1], 2 * sampled[:1, :3])
    assert targets.sampled is not None and targets.sampled[1, :, 0].tolist() == [2, 2, 2, 0, 0]
    assert targets.policy[1].tolist() == pytest.approx([0.2, 0.2, 0.2, 0, 0])
