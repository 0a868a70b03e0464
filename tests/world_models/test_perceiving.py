"""The contract between acting and learning: frames perceived one by one are the same frames observed at once.

Axes: B batch, T frames. Where latents are drawn, posteriors are certain, so that both ways draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_cells
import test_latent
import test_memory_models
import test_muzero
import test_token
import test_unizero
import torch
from small_backbones import NAMES
from torch import Tensor
from torch.testing import assert_close

from wmcli.world_models.base import State, WorldModel

pytestmark = pytest.mark.matrix

T = 6
STEPS = 2  # imagined
LATENT = {"unimix": 0.0, "act_on": "posterior"}

Case = tuple[Callable[[], WorldModel], Callable[[], Tensor]]
"""Makes a model, and frames (B, T, H, W, 3) for it."""


def _token(backbone: str, **settings: object) -> WorldModel:
    """A token model whose draws depend on its past."""
    model = test_token.make(backbone, sequence_length=8, **settings)
    with torch.no_grad():
        for head in (model.observation_head, model.reward_head, model.termination_head):
            head[0].weight.mul_(30)
            head[-1].weight.mul_(30)
    return model


def _token_frames() -> Tensor:
    grid = torch.randint(test_token.N, (test_token.B, T, *test_token.GRID, 1), dtype=torch.uint8)
    return grid.repeat_interleave(2, 2).repeat_interleave(2, 3).expand(-1, -1, -1, -1, 3)


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in NAMES:
        for prediction in test_token.PREDICTIONS:
            make = partial(_token, name, prediction=prediction, context=3)
            cases[f"token, {prediction}, {name}"] = make, _token_frames
        for window in (0, T - 1):  # it holds the frames before the current one
            make = partial(test_latent.make, name, act_window=window, **LATENT)
            cases[f"latent, window {window}, {name}"] = partial(_certain, make), _latent_frames
        cases[f"unizero, {name}"] = partial(test_unizero.make, name), partial(test_unizero.frames, test_unizero.B, T)
    for context in (1, 2, T):
        cases[f"token, context {context}"] = partial(_token, "retnet", context=context), _token_frames
    for posterior in test_memory_models.POSTERIORS:
        for name in ("s4", "mamba2", "dreamer-gru", "transformer-xl"):
            make = partial(test_memory_models.make, name, posterior=posterior, certain=True)
            cases[f"latent, {posterior} posterior, {name}"] = make, _latent_frames
    for name in ("retnet", "transformer", "mamba1"):
        cases[f"cells, {name}"] = (
            partial(test_cells.make, name, sequence_length=8, context=3),
            lambda: test_cells.played(T)[0],
        )
    cases["muzero"] = test_muzero.make, partial(test_muzero.frames, test_muzero.B, T)
    return cases


def _certain(make: Callable[[], WorldModel]) -> WorldModel:
    return test_latent.certain(make())


def _latent_frames() -> Tensor:
    return test_latent.frames(test_latent.B, T)


CASES = _cases()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_frames_perceived_one_by_one_are_the_frames_observed_at_once(case: str) -> None:
    torch.manual_seed(7)
    make, draw = CASES[case]
    frames = draw()
    rows = len(frames)
    model = make().eval()
    action = torch.randint(model.action_space.count, (rows, T))
    reset = torch.zeros(rows, T, dtype=torch.bool)
    reset[:, 0] = reset[1, 1] = reset[2, 4] = True  # new episodes in two of the rows
    latent = model.encode(frames)
    state = None
    for t in range(T):
        state = model.perceive(state, frames[:, t], action[:, t - 1], reset[:, t], torch.Generator().manual_seed(t))
        features, observed = model.observe(latent[:, : t + 1], action[:, : t + 1], reset[:, : t + 1])
        _same(model.features(state), features[:, -1])
        _same(model.latent(state), model.latent(observed))
        if t in (0, 1, 3, T - 1):
            assert _dream(model, state) == pytest.approx(_dream(model, observed), rel=2e-3, abs=2e-3), f"frame {t}"


def _same(got: Tensor, want: Tensor) -> None:
    assert_close(got, want, rtol=1e-4, atol=2e-4)


def _dream(model: WorldModel, state: State) -> list[float]:
    """Everything that is imagined from a state, by the same draws each time, as numbers."""
    generator = torch.Generator().manual_seed(11)
    found: list[Tensor] = []
    if hasattr(model, "root"):
        state = model.root(state)
    for _ in range(STEPS):
        rows = len(model.features(state))
        action = torch.randint(model.action_space.count, (rows,), generator=generator)
        numbers = torch.rand(rows, model.uniforms_per_step, generator=generator)
        imagined, state = model.imagine(state, action, numbers)
        found += [imagined.latent, imagined.reward, imagined.terminated, model.features(state)]
    return torch.cat([each.flatten().double() for each in found]).tolist()
