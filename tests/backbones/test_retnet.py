"""RetNet's own numbers: golden values of an independent NumPy implementation, decays, sizes, positions."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from wmcli.backbones import BackboneSize, build, map_state
from wmcli.backbones.retnet import RetNet, RetNetSettings, Rotations, head_decays
from wmcli.errors import UsageError

K, BLOCKS = 3, 3  # observation elements of a block, blocks


def golden_stack() -> tuple[RetNet, torch.Tensor, torch.Tensor]:
    """Two layers of width 16 with formula weights; inputs X (1, blocks, K + 1, 16), queries u (K, 16)."""
    model = RetNet(RetNetSettings(heads=2, ffn=2), BackboneSize(16, 2, 0.0, 100, K + 1)).double().eval()

    def weight(inside: int, outside: int, seed: float) -> torch.Tensor:
        index = torch.arange(inside * outside, dtype=torch.float64).view(inside, outside)
        return (torch.sin(0.37 * index + seed) / inside**0.5).T

    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            s = 10 * number
            layer.qkvg.weight.copy_(torch.cat([weight(16, 16, s + i) for i in (1, 2, 3, 4)]))
            layer.out.weight.copy_(weight(16, 16, s + 5))
            layer.up.weight.copy_(weight(16, 32, s + 6))
            layer.down.weight.copy_(weight(32, 16, s + 7))
    x = torch.sin(0.13 * torch.arange(12 * 16, dtype=torch.float64) + 0.5).view(1, BLOCKS, K + 1, 16)
    u = torch.cos(0.29 * torch.arange(3 * 16, dtype=torch.float64) + 0.7).view(K, 16)
    return model, x, u


def turned(state, count: int):
    """The state as seen from `count` positions further on."""
    rotations = Rotations(state[0].shape[2], 2000, state[0].device, state[0].dtype)
    return map_state(lambda layer: rotations.turn_back(layer, count), state)


def test_golden_parallel_observation_prediction():
    model, x, u = golden_stack()
    first, _ = model(u[None], model.initial_state(1))
    y, answers, state = model.fork(x, u, model.initial_state(1))
    # What a block's rows 0 ... K - 1 predict is that block, from the state before it: the answers after the last one.
    predicted = torch.cat((first[:, None], answers[:, :-1]), 1)
    rows = torch.cat((predicted, y[:, :, None]), 2)[0]  # (blocks, K + 1, 16)
    assert rows.sum().item() == pytest.approx(7.1749643225, abs=1e-9)
    assert rows.square().sum().item() == pytest.approx(2009.3709959023, abs=1e-9)
    assert rows[0, 0, :3].tolist() == pytest.approx([0.1251801680, 1.2576326454, 2.2483107185], abs=1e-9)
    assert rows[2, 1, :3].tolist() == pytest.approx([-0.2604278569, 1.6067563629, 3.2976369778], abs=1e-9)
    assert rows[2, 3, :3].tolist() == pytest.approx([-0.0776721993, -1.7681356486, -3.3375995336], abs=1e-9)
    absolute = turned(state, -BLOCKS * (K + 1))[-1]  # ours is relative to the next element
    assert absolute.sum().item() == pytest.approx(548.8518012031, abs=1e-8)
    assert absolute.square().sum().item() == pytest.approx(20877.0793568, abs=1e-6)


def test_golden_negative_controls():
    """The three mistakes a parallel prediction invites, with the error each makes: a 2e-2 tolerance would hide them."""
    model, x, u = golden_stack()
    ends = [model.initial_state(1)]
    for n in range(BLOCKS):
        ends.append(model(x[:, n], ends[-1])[1])
    right = [model(u[None], state)[0] for state in ends[:-1]]
    size = K + 1
    wrong = {
        "queries at positions 0": [model(u[None], turned(ends[n], -n * size))[0] for n in range(BLOCKS)],
        "queries one block late": [model(u[None], turned(ends[n], size))[0] for n in range(BLOCKS)],
        "states not shifted": [model(u[None], turned(ends[n + 1], -size))[0] for n in range(BLOCKS)],
    }
    # The stored errors are those of the last block.
    errors = {name: (outputs[-1] - right[-1]).abs().max().item() for name, outputs in wrong.items()}
    want = {"queries at positions 0": 0.06910, "queries one block late": 0.09273, "states not shifted": 0.05901}
    assert errors == pytest.approx(want, abs=1e-5)


def test_decays():
    log = head_decays(RetNetSettings(), 65)
    assert log == pytest.approx([0.96875, 0.9875984293, 0.9950784334, 0.998046875], abs=1e-10)
    assert [d**65 for d in log] == pytest.approx([0.1269876565, 0.4443502052, 0.7256469838, 0.8806656259], abs=1e-9)
    assert [d**195 for d in log] == pytest.approx([0.0020477858, 0.0877356616, 0.3820992483, 0.6830195521], abs=1e-9)
    paper = head_decays(RetNetSettings(decay="paper"), 65)
    assert paper == (0.96875, 0.984375, 0.9921875, 0.99609375)
    blocks = head_decays(RetNetSettings(decay_range_blocks=[0.5, 4]), 10)
    assert [blocks[0] ** 5, blocks[1] ** 10, blocks[2] ** 20, blocks[3] ** 40] == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("bounds", [[1.0], [4.0, 2.0], [0.0, 2.0], [1.0, 2.0, 3.0]])
def test_a_wrong_range_is_a_usage_error(bounds):
    with pytest.raises(UsageError, match="decay_range_blocks"):
        build(RetNetSettings(decay_range_blocks=bounds), 650, 65)


def test_heads_must_divide_the_width():
    with pytest.raises(UsageError, match="backbone.heads = 3"):
        build(RetNetSettings(heads=3), 650, 65)


def test_parameter_counts_and_initialization():
    model = build(RetNetSettings(), max_length=650, block=65)
    assert sum(p.numel() for p in model.layers[0].parameters()) == 855_552
    assert sum(p.numel() for p in model.parameters()) == 4_277_760
    layer = model.layers[0]
    for weight in (*layer.qkvg.weight.chunk(4), layer.out.weight, layer.up.weight):
        assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.03)  # xavier normal
    for linear in (layer.qkvg, layer.out, layer.up, layer.down):
        assert not linear.bias.any()
    assert sum(leaf.numel() for leaf in model.initial_state(1)) == 81_920


@pytest.mark.parametrize("copied", [False, True])
def test_layers_are_drawn_one_by_one_or_begin_as_copies_of_the_first(copied):
    torch.manual_seed(0)
    settings = RetNetSettings(width=16, copied_layers=copied)
    model = build(settings, max_length=650, block=65)
    first, *others = (dict(layer.named_parameters()) for layer in model.layers)
    assert len(others) == 4
    for other in others:
        for name in ("qkvg.weight", "out.weight", "up.weight", "down.weight"):
            assert torch.equal(other[name], first[name]) == copied
            assert other[name] is not first[name]


def test_state_relative_to_the_next_element_equals_absolute_positions():
    """Retention written out with absolute positions, far from zero, against the module that knows none."""
    model, x, _ = golden_stack()
    layer, sequence = model.layers[0], x.flatten(1, 2)
    q, k, v, g = layer.qkvg(layer.retention_norm(sequence)).chunk(4, -1)
    for first in (0, 1000):
        table = Rotations(8, 2000, q.device, q.dtype).between(first, first + 12)  # (2, 1, 1, T, K / 2)
        q_, k_ = (
            torch.view_as_real(
                torch.view_as_complex(part.unflatten(-1, (2, 4, 2)).transpose(1, 2).contiguous()) * table[i]
            ).flatten(-2)
            for i, part in enumerate((q, k))
        )  # (B, H, T, K)
        power = torch.arange(12, dtype=torch.float64)
        decay = torch.tensor(model.decays, dtype=torch.float64)[:, None, None] ** (power[:, None] - power)
        y = ((q_ @ k_.mT) * decay.tril()) @ v.unflatten(-1, (2, 8)).transpose(1, 2)
        want = layer.finish(sequence, y, g)
        state, outputs = model.initial_state(1), []
        model.layers = torch.nn.ModuleList([layer])
        state = state[:1]
        for part in sequence.split((1, 5, 2, 4), 1):
            out, state = model(part, state)
            outputs.append(out)
        assert_close(torch.cat(outputs, 1), want, rtol=0, atol=1e-12)


def test_chunk_changes_no_result():
    torch.manual_seed(0)
    x = torch.randn(2, 130, 8)
    outputs = []
    for chunk in (1, 7, 64, 130, 500):
        torch.manual_seed(1)
        model = RetNet(RetNetSettings(heads=2, chunk_size=chunk), BackboneSize(8, 2, 0.0, 200, 5)).eval()
        outputs.append(model(x, None)[0])
    for other in outputs[1:]:
        assert_close(other, outputs[0], rtol=1e-5, atol=1e-5)


def test_positions_stay_exact_under_autocast():
    """650 positions are not representable in bfloat16; the error must not grow along the sequence."""
    torch.manual_seed(0)
    model = build(RetNetSettings(width=32, layers=2), 700, 65).eval()
    x = torch.randn(1, 650, 32)
    want = model(x, None)[0]
    with torch.autocast("cpu", torch.bfloat16):
        error = (model(x, None)[0] - want).abs().amax(-1)[0]
    assert error.max() < 2e-2 * want.abs().max()
    assert error[-100:].mean() < 2 * error[:100].mean()
