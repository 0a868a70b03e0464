"""Lambda-returns: values worked out by hand or by an independent sum, in float64."""

from __future__ import annotations

import pytest
import torch

from wmcli.nn.returns import lambda_returns


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
