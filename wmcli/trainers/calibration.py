"""Calibration of imagination: imagined returns beside the real ones, from the same frames.

A controller may gain rewards that exist in the world model alone. So the controller that played the newest experience
plays on in imagination from frames of it. Returns are sums of rewards over as many steps as a rollout has. An imagined
return far above the real one is an error of the world model, and a reason to train it more.

Axes: N rows of the experience, W windows, B rollouts of a batch, s steps.
"""

from __future__ import annotations

import numpy as np
import torch

from wmcli.experience import Replay
from wmcli.experience.sampler import WindowTable
from wmcli.trainers.batches import gather
from wmcli.trainers.imagination import ImaginationTrainer
from wmcli.training.device import isolated_randomness

ROLLOUTS = 512  # at least one batch


@torch.no_grad()
def calibrate(trainer: ImaginationTrainer, fresh: int, seed: int) -> dict[str, float]:
    """Return the means of imagined and of real returns from frames of the newest experience.

    Rewards are those that the world model learns (signs in a token world model), up to the episode's end. Imagined
    actions are sampled at temperature 1 and none at random, so the real returns are those of slightly other play.

    Args:
        trainer: Of the controller that played the newest rows.
        fresh: Number of newest rows.
        seed: Of the choice of frames and of imagination. The random numbers of training are left alone.

    Returns:
        `fresh_real_return` and `fresh_imagined_return`. Empty if no fresh frame is followed by so many steps.
    """
    world_model, controller, replay, settings = (
        trainer.world_model,
        trainer.controller,
        trainer.replay,
        trainer.settings,
    )
    across_ends, window = world_model.across_ends, controller.window
    runs, order = replay.runs(across_ends)
    minimum = window if across_ends else min(world_model.min_context, window)
    table = WindowTable(runs, order, length=window, minimum=minimum, pad="left")
    real, known = returns_ahead(replay, world_model.learned_reward(replay.reward), settings.imagined_frames)
    last = table.last_rows(np.arange(len(table)))
    usable = np.flatnonzero((last >= len(replay) - fresh) & known[last])
    if not len(usable):
        return {}
    imagined = []
    with isolated_randomness(seed, trainer.machine.device) as rng, trainer.machine.autocast():
        chosen = rng.permutation(usable)[: max(ROLLOUTS, settings.batch)]
        for start in range(0, len(chosen), settings.batch):
            windows = table.windows(chosen[start : start + settings.batch])
            batch = gather(replay, trainer.latents, windows, across_ends=across_ends)
            rollout = controller.imagine(world_model, batch, controller.draw_uniforms(world_model, batch))
            ends_before = rollout.terminated.cumsum(1) - rollout.terminated.long()
            imagined.append((rollout.reward * (ends_before == 0)).sum(1))
    return {
        "fresh_real_return": float(real[last[chosen]].mean()),
        "fresh_imagined_return": float(torch.cat(imagined).mean()),
    }


def returns_ahead(replay: Replay, reward: torch.Tensor, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of rewards over the next steps of each row's episode, the row's own included.

    Args:
        replay: The experience.
        reward: (N,), of each row.
        steps: s, at least 1. The episode's end may come before.

    Returns:
        The sums, float64 (N,), and where they are known, bool (N,): not where the episode was cut off, or goes on
        beyond the experience, before so many steps.
    """
    episodes, order = replay.episodes, replay.order
    end = np.repeat(episodes.start + episodes.length, episodes.length)  # of the episode at each position
    until = np.minimum(np.arange(len(order)) + steps, end)
    total = np.concatenate(([0.0], np.cumsum(reward.cpu().numpy()[order], dtype=np.float64)))
    terminated = replay.terminated.cpu().numpy()[order]
    sums, known = np.empty(len(order)), np.empty(len(order), bool)
    sums[order] = total[until] - total[:-1]
    known[order] = (until - np.arange(len(order)) == steps) | terminated[end - 1]
    return sums, known
