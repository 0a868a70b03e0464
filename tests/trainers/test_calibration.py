"""Imagined returns beside real ones: from which frames, over how many steps, and by which rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_trainers import CPU, trainer_of
from torch import Tensor

from wmcli.experience import Replay
from wmcli.trainers import ImaginationTrainer
from wmcli.trainers.calibration import calibrate, returns_ahead
from wmcli.training.device import isolated_randomness

HORIZON = {"rem": 3, "drama": 2}


def imagination_of(name: str) -> ImaginationTrainer:
    with isolated_randomness(5, CPU.device) as rng:
        trainer = trainer_of(name, "controller", rng)
    assert isinstance(trainer, ImaginationTrainer)
    return trainer


def test_returns_end_with_the_episode_and_are_known_only_where_it_was_seen() -> None:
    rng, rows, streams = np.random.default_rng(0), 40, 2
    held = Replay(CPU.device)
    terminated = np.zeros(rows, bool)
    truncated = np.zeros(rows, bool)
    terminated[[10, 23]] = True
    truncated[[17, 30]] = True
    stream = np.arange(rows) % streams
    first = np.zeros(rows, bool)
    for one in range(streams):
        own = np.flatnonzero(stream == one)
        first[own] = np.concatenate(([True], (terminated | truncated)[own[:-1]]))
    reward = rng.integers(-2, 3, rows).astype(np.float32)
    held.extend(
        {
            "observation": np.zeros((rows, 4, 4, 3), np.uint8),
            "action": np.zeros(rows, np.int32),
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "first": first,
            "lives": np.zeros(rows, np.int16),
            "stream": stream.astype(np.int16),
        }
    )
    sums, known = returns_ahead(held, held.reward, 4)
    for row in range(rows):
        total, steps, at = 0.0, 0, row
        while at < rows and steps < 4:
            total, steps = total + reward[at], steps + 1
            if terminated[at] or truncated[at]:
                break
            at += streams
        whole = steps == 4 or (at < rows and bool(terminated[at]))
        assert known[row] == whole, row
        assert not whole or sums[row] == pytest.approx(total), row
    assert 0 < known.sum() < rows


@pytest.mark.parametrize("name", HORIZON)
def test_both_returns_are_of_the_same_fresh_frames(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one of these frames; the imagined one up to an imagined end."""
    trainer, steps, fresh = imagination_of(name), HORIZON[name], 25
    started: list[Tensor] = []
    imagine = trainer.controller.imagine

    def imagined(world_model: Any, batch: Any, uniforms: Any) -> Any:
        rollout = imagine(world_model, batch, uniforms)
        rows = (batch.reward[:, -1, None] == trainer.replay.reward).int().argmax(1)  # rewards are all different
        started.append(rows)
        # 100 for each step up to an end, which comes first in every other row
        terminated = torch.zeros_like(rollout.terminated)
        terminated[::2, -steps] = True
        reward = torch.zeros_like(rollout.reward)
        reward[:, -steps:] = 100.0
        return rollout._replace(reward=reward, terminated=terminated)

    monkeypatch.setattr(trainer.controller, "imagine", imagined)
    before = torch.get_rng_state()
    found = calibrate(trainer, fresh, seed=3)
    assert torch.equal(torch.get_rng_state(), before)

    rows = torch.cat(started).numpy()
    sums, known = returns_ahead(trainer.replay, trainer.world_model.learned_reward(trainer.replay.reward), steps)
    assert len(set(rows)) == len(rows) and rows.min() >= len(trainer.replay) - fresh and known[rows].all()
    assert found["fresh_real_return"] == pytest.approx(sums[rows].mean(), rel=1e-6)
    ended = sum((len(each) + 1) // 2 for each in started)
    assert found["fresh_imagined_return"] == pytest.approx(100 * (ended + steps * (len(rows) - ended)) / len(rows))
    monkeypatch.undo()
    again, other = (calibrate(trainer, fresh, seed=seed) for seed in (3, 4))
    assert again == calibrate(trainer, fresh, seed=3) and again != other


def test_a_token_model_compares_signs() -> None:
    trainer = imagination_of("rem")
    signs = trainer.world_model.learned_reward(trainer.replay.reward)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert torch.equal(imagination_of("drama").world_model.learned_reward(trainer.replay.reward), trainer.replay.reward)


def test_without_fresh_frames_there_is_nothing_to_compare() -> None:
    assert calibrate(imagination_of("rem"), 0, seed=3) == {}
