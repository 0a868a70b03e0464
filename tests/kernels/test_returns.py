"""Lambda-returns: values worked out by hand or by an independent sum, in float64."""

from __future__ import annotations

import pytest
import torch

from wmcli.kernels.lambda_returns import lambda_returns


def random_rollout(batch=3, n=7):
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, batch, n, dtype=torch.float64, generator=generator)
    terminated = torch.rand(batch, n, generator=generator) < 0.2
    assert terminated.any()
    return reward, value, terminated


def test_golden():
    reward = torch.tensor([[1.0, 0, -1, 0, 9]], dtype=torch.float64)
    value = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    terminated = torch.tensor([[False, False, True, False, False]])
    want = torch.tensor([[0.1405102937, -0.930325, -1.0, 0.0995, 0.1]], dtype=torch.float64)
    got = lambda_returns(reward, value, terminated, 0.995, 0.95)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)


def test_lambda_zero_is_one_step():
    reward, value, terminated = random_rollout()
    got = lambda_returns(reward, value, terminated, 0.9, 0.0)
    want = reward[:, :-1] + 0.9 * torch.where(terminated[:, :-1], 0.0, value[:, 1:])
    torch.testing.assert_close(got[:, :-1], want)


def test_lambda_one_is_the_discounted_sum():
    reward, value, _ = random_rollout()
    got = lambda_returns(reward, value, torch.zeros_like(reward, dtype=torch.bool), 0.9, 1.0)
    n = reward.shape[1]
    for t in range(n):
        want = sum(0.9 ** (k - t) * reward[:, k] for k in range(t, n - 1)) + 0.9 ** (n - 1 - t) * value[:, -1]
        torch.testing.assert_close(got[:, t], want)


@pytest.mark.parametrize("trace_decay", [0.3, 1.0])
def test_is_the_mixture_of_n_step_returns(trace_decay):
    reward, value, terminated = random_rollout()
    got = lambda_returns(reward, value, terminated, 0.9, trace_decay)
    rows, n = reward.shape

    def n_step(row, t, k):  # k rewards, then the value unless something ended on the way
        total, alive = 0.0, 1.0
        for j in range(k):
            total += alive * 0.9**j * float(reward[row, t + j])
            alive *= 1.0 - float(terminated[row, t + j])
        return total + alive * 0.9**k * float(value[row, t + k])

    for row in range(rows):
        for t in range(n - 1):
            last = n - 1 - t
            weights = [(1 - trace_decay) * trace_decay ** (k - 1) for k in range(1, last)] + [trace_decay ** (last - 1)]
            want = sum(w * n_step(row, t, k) for k, w in enumerate(weights, start=1))
            assert float(got[row, t]) == pytest.approx(want, abs=1e-12)


def test_nothing_after_a_termination_counts():
    reward, value, terminated = random_rollout()
    terminated[:, 3] = True
    got = lambda_returns(reward, value, terminated, 0.9, 0.7)
    reward[:, 4:] += 100
    value[:, 4:] = torch.nan
    torch.testing.assert_close(lambda_returns(reward, value, terminated, 0.9, 0.7)[:, :4], got[:, :4])
    torch.testing.assert_close(got[:, 3], reward[:, 3])


def test_the_last_reward_may_be_left_out():
    reward, value, terminated = random_rollout()
    want = lambda_returns(reward, value, terminated, 0.9, 0.7)
    torch.testing.assert_close(lambda_returns(reward[:, :-1], value, terminated[:, :-1], 0.9, 0.7), want)
    torch.testing.assert_close(lambda_returns(reward, value[:, :1], terminated, 0.9, 0.7), value[:, :1])


# -- the published forms: what stands in for the value, and whose rewards ---

SHEET = ([[0.0, 1, 0]], [[0.5, 0.6, 0.7, 0.8]], [[False, False, True]])


@pytest.mark.parametrize(
    ("bootstrap", "want"), [("own", (0.988026, 1.029550, 0.0)), ("next", (0.997560, 1.034475, 0.0))]
)
def test_golden_of_both_bootstraps(bootstrap, want):
    reward, value, terminated = (torch.tensor(each) for each in SHEET)
    got = lambda_returns(reward.double(), value.double(), terminated, 0.985, 0.95, bootstrap)
    torch.testing.assert_close(got[0, :3], torch.tensor(want, dtype=torch.float64), atol=5e-7, rtol=0)
    assert float(got[0, 3]) == pytest.approx(0.8)


@pytest.mark.parametrize("bootstrap", ["own", "next"])
def test_the_value_of_constant_reward_is_a_fixed_point(bootstrap):
    value = torch.full((1, 17), 1 / (1 - 0.985), dtype=torch.float64)
    assert float(value[0, 0]) == pytest.approx(66.667, abs=1e-3)
    reward, never = torch.ones(1, 16, dtype=torch.float64), torch.zeros(1, 16, dtype=torch.bool)
    torch.testing.assert_close(lambda_returns(reward, value, never, 0.985, 0.95, bootstrap), value)


def two_state_rollout(steps: int, arrival: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """States 0, 1, 0, 1, ... of which the first gives 3 on arrival, the second -1; rewards as the form reads them."""
    state = torch.arange(steps + 1) % 2
    on_arrival = torch.where(state == 0, 3.0, -1.0).double()
    return state, on_arrival[:-1] if arrival else on_arrival[1:]


@pytest.mark.parametrize("form", ["v3", "drama", "storm"])
def test_each_form_takes_its_own_value_of_a_state(form):
    """Solved by hand for two states in turn: G equals V exactly there, and nowhere else."""
    g, decay = 0.985, 0.95
    state, reward = two_state_rollout(6, arrival=form == "drama")
    r = torch.stack([reward[0], reward[1]])  # of state 0, of state 1
    if form == "v3":  # V(s) = r + g V(s')
        matrix = torch.tensor([[1, -g], [-g, 1]], dtype=torch.float64)
    else:  # V(s) = r + g ((1 - decay) V(s) + decay V(s'))
        keep, look = 1 - g * (1 - decay), g * decay
        matrix = torch.tensor([[keep, -look], [-look, keep]], dtype=torch.float64)
        assert 1 / keep == pytest.approx(1.0518012) and look / keep == pytest.approx(0.9842230)
    value = torch.linalg.solve(matrix, r)[state][None]
    never = torch.zeros(1, 6, dtype=torch.bool)
    bootstrap = "next" if form == "v3" else "own"
    torch.testing.assert_close(lambda_returns(reward[None], value, never, g, decay, bootstrap), value)
    other = lambda_returns(reward[None], value, never, g, decay, "own" if form == "v3" else "next")
    assert not torch.allclose(other, value)


def test_own_bootstrap_row_by_row():
    reward, value, terminated = random_rollout()
    got = lambda_returns(reward, value, terminated, 0.9, 0.7, "own")
    for row in range(len(reward)):
        target = float(value[row, -1])
        for t in reversed(range(value.shape[1] - 1)):
            future = 0.3 * float(value[row, t]) + 0.7 * target
            target = float(reward[row, t]) + (0 if terminated[row, t] else 0.9 * future)
            assert float(got[row, t]) == pytest.approx(target, abs=1e-12)
