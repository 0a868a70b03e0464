"""What every backbone promises. A new backbone joins `TINY` and is tested on all of it.

Axes: B batch, T time (elements), D width, N blocks, L elements of a block, Q queries.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from watching import NoWaiting

from wmcli.backbones import BACKBONES, SECTIONS, build, map_state, transformer_xl
from wmcli.backbones.transformer import Transformer
from wmcli.backbones.transformer_xl import TransformerXL

pytestmark = pytest.mark.matrix

B, T, D, N, L, Q = 3, 11, 12, 4, 3, 2

# Settings that make each backbone small: heads of width 6. What follows a comma tells variants of a backbone apart.
TINY: dict[str, dict] = {
    "block-gru": {"blocks": 4, "hidden_size": 5},
    "dreamer-gru": {},
    "gru": {"hidden_size": 18},
    "mamba1": {"state_size": 3, "conv_kernel": 5, "dt_rank": 2},
    "mamba2": {"state_size": 3, "conv_kernel": 5, "head_width": 8, "chunk_size": 4},
    "retnet": {"heads": 2, "ffn": 2, "chunk_size": 4},
    "s4": {"state_size": 6, "ffn": 2},
    "s4, untied": {"state_size": 4, "tied": False, "ffn": 0, "glu": False},
    "s4d": {"state_size": 6, "ffn": 2},
    "s4d, untied": {
        "state_size": 4,
        "tied": False,
        "discretization": "bilinear",
        "initialization": "legs",
        "ffn": 0,
        "glu": False,
    },
    "s5": {"state_size": 8, "blocks": 2, "ffn": 2},
    "s5, plain": {"state_size": 6, "blocks": 1, "ffn": 0, "glu": False},
    "transformer": {"heads": 2, "ffn": 2},
    "transformer, post-norm": {
        "heads": 2,
        "ffn": 2,
        "norm": "post",
        "activation": "relu",
        "attention_bias": False,
        "embedding_norm": True,
        "initialization": "torch",
    },
    "transformer, rotary": {"heads": 2, "ffn": 2, "positions": "rotary"},
    "transformer, rotary, a prior": {
        "heads": 2,
        "ffn": 2,
        "positions": "rotary",
        "prior": {"kind": "gaussian", "mean": 2.0, "deviation": 2.0},
    },
    "transformer, a prior by token": {
        "heads": 2,
        "ffn": 2,
        "prior": {"kind": "gaussian_span", "mean": 4.0, "deviation": 3.0, "mean_bound": "clamp"},
    },
    "transformer, a prior by step": {
        "heads": 2,
        "ffn": 2,
        "prior": {"kind": "gaussian_span", "form": "scale", "span_mask": "triangle", "unit": "step", "mean": 2.0},
    },
    "transformer-xl": {"heads": 2, "memory_length": 5},
    "transformer-xl, segments": {"heads": 2, "memory_length": 6, "segment_length": 5},
    "transformer-xl, a prior": {
        "heads": 2,
        "memory_length": 5,
        "prior": {"kind": "gaussian", "mean": 2.0, "deviation": 2.0},
    },
}


def tiny(name: str, dtype=torch.float64, width: int = D, dropout: float = 0.0):
    torch.manual_seed(1)
    backbone = name.split(",")[0]
    values = {"width": width, "layers": 2, "dropout": dropout, **TINY[name]}
    model = build(SECTIONS[backbone].model_validate(values), max_length=48, block=L).to(dtype)
    with torch.no_grad():  # so that biases and small initial weights cannot hide a mistake
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval() if dropout == 0 else model


def inputs(*shape: int) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(*shape, dtype=torch.float64)


def close(got, want) -> None:
    assert_close(got, want, rtol=0, atol=1e-10)


def steps(model, x, state, reset=None):
    outputs = []
    for t in range(x.shape[1]):
        y, state = model.step(x[:, t], state, None if reset is None else reset[:, t])
        outputs.append(y)
    return torch.stack(outputs, 1), state


def same_state(model, got, want) -> None:
    """States are compared by what follows from them: caches may differ where nothing is stored."""
    probe = inputs(B, 4, D) + 0.5
    close(model(probe, map_state(torch.clone, got))[0], model(probe, map_state(torch.clone, want))[0])


@pytest.fixture(params=sorted(TINY))
def model(request):
    return tiny(request.param)


@pytest.fixture(params=[True, False], ids=["grad", "no_grad"])
def grad(request):
    with torch.set_grad_enabled(request.param):
        yield


def test_the_table_is_complete():
    """What docs/adding-a-backbone.md asks for."""
    assert {name.split(",")[0] for name in TINY} == BACKBONES.keys()
    assert BACKBONES.keys() == SECTIONS.keys()
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert not [name for name in BACKBONES if f"`{name}`" not in readme]


def test_to_read_is_to_go_forward_to_the_last_element(model, grad):
    x, before = inputs(B, T, D), inputs(B, 3, D) - 1
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[1, 4] = reset[2, T - 1] = True
    for mask in (None, reset):
        _, state = model(before, model.initial_state(B))
        for begin in (None, state):
            want, want_state = model(x, map_state(torch.clone, begin), mask)
            got, after = model.read(x, begin, mask)
            close(got, want[:, -1])
        same_state(model, after, want_state)


def test_steps_equal_forward(model, grad):
    x = inputs(B, T, D)
    want, want_state = model(x, model.initial_state(B))
    got, state = steps(model, x, model.initial_state(B))
    close(got, want)
    same_state(model, state, want_state)
    close(model(x, None)[0], want)
    close(model.step(x[:, 0], None)[0], want[:, 0])


@pytest.mark.parametrize("sizes", [(1, 10), (10, 1), (4, 7), (3, 1, 5, 2), (5, 6)])
def test_chunks_with_carried_state_equal_forward(model, grad, sizes):
    x = inputs(B, T, D)
    want, want_state = model(x, model.initial_state(B))
    state, outputs = model.initial_state(B), []
    for part in x.split(sizes, 1):
        y, state = model(part, state)
        outputs.append(y)
    close(torch.cat(outputs, 1), want)
    same_state(model, state, want_state)


@pytest.mark.parametrize("how", ["forward", "steps", "chunks"])
@pytest.mark.parametrize("carried", [True, False])
def test_reset_starts_anew(model, grad, how, carried):
    x, past = inputs(B, T, D), inputs(B, 5, D) - 0.3
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, [0, 4]] = True
    reset[1, [3, 8, 9]] = True  # row 2 goes on without a reset

    def begin():
        return model(past, model.initial_state(B))[1] if carried else model.initial_state(B)

    if how == "forward":
        got, state = model(x, begin(), reset)
        if not carried:
            close(model(x, None, reset)[0], got)
    elif how == "steps":
        got, state = steps(model, x, begin(), reset)
    else:
        first, state = model(x[:, :6], begin(), reset[:, :6])
        middle, state = model(x[:, 6:8], state)
        last, state = model(x[:, 8:], state, reset[:, 8:])
        got = torch.cat((first, middle, last), 1)

    probe = inputs(B, 4, D) + 0.5
    blocks, queries = inputs(B, 2, L, D) + 0.1, inputs(Q, D)
    fork_y, fork_answers, _ = model.fork(blocks, queries, map_state(torch.clone, state))
    after = model(probe, map_state(torch.clone, state))[0]
    starts = ([0, 4], [3, 8, 9], [])
    for row in range(B):
        old = model(past[row : row + 1], model.initial_state(1))[1] if carried else model.initial_state(1)
        borders = sorted({0, *starts[row], T})
        for start, stop in zip(borders, borders[1:], strict=False):
            fresh = model.initial_state(1) if start in starts[row] else old
            want, old = model(x[row : row + 1, start:stop], fresh)
            close(got[row : row + 1, start:stop], want)
        want_y, want_answers, _ = model.fork(blocks[row : row + 1], queries, map_state(torch.clone, old))
        close(fork_y[row : row + 1], want_y)
        close(fork_answers[row : row + 1], want_answers)
        close(after[row : row + 1], model(probe[row : row + 1], old)[0])


@pytest.mark.parametrize("count", [1, N])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_fork_answers_queries_behind_each_block(model, grad, count, carried, shared):
    x, past = inputs(B, count, L, D), inputs(B, 5, D) - 0.3
    queries = inputs(Q, D) + 0.2 if shared else inputs(B, count, Q, D) + 0.2
    start = model.initial_state(B)
    if carried:
        _, start = model(past, start)
    y, answers, after = model.fork(x, queries, start)
    again = model.fork(x, queries, start)  # the incoming state is still good
    close(again[:2], (y, answers))
    want, want_after = model(x.flatten(1, 2), map_state(torch.clone, start))
    close(y, want[:, L - 1 :: L])
    for n in range(count):
        prefix = torch.cat((*([past] if carried else []), x[:, : n + 1].flatten(1, 2)), 1)
        asked = queries.expand(B, Q, D) if shared else queries[:, n]
        by_hand = model(torch.cat((prefix, asked), 1), None)[0][:, prefix.shape[1] :]
        close(answers[:, n], by_hand)
    same_state(model, after, want_after)
    if not carried:
        close(model.fork(x, queries, None)[:2], (y, answers))


def test_rows_are_independent(model):
    x, blocks, queries = inputs(B, T, D), inputs(B, N, L, D), inputs(B, N, Q, D)
    changed = [value.clone() for value in (x, blocks, queries)]
    for value in changed:
        value[1] += torch.linspace(-1, 1, D)
    y, z = model(x, None)[0], model(changed[0], None)[0]
    close(z[[0, 2]], y[[0, 2]])
    assert ((z - y)[1].abs().amax(-1) > 1e-3).all()
    for got, want in zip(model.fork(*changed[1:], None)[:2], model.fork(blocks, queries, None)[:2], strict=True):
        close(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("t", [0, 5, T - 1])
def test_forward_is_causal(model, t):
    x = inputs(B, T, D)
    changed = x.clone()
    changed[:, t] = 3 * inputs(B, D).flip(-1)  # no multiple of what it was: a LayerNorm would not see that
    y, z = model(x, None)[0], model(changed, None)[0]
    close(z[:, :t], y[:, :t])
    assert ((z - y)[:, t:].abs().amax(-1) > 1e-6).all()


def test_fork_is_causal(model):
    x, queries = inputs(B, N, L, D), inputs(B, N, Q, D)
    y, answers, state = model.fork(x, queries, model.initial_state(B))
    other = x.clone()
    other[:, 2, 1] += torch.linspace(-2, 2, D)
    got_y, got_answers, _ = model.fork(other, queries, None)
    close((got_y[:, :2], got_answers[:, :2]), (y[:, :2], answers[:, :2]))
    assert ((got_answers - answers)[:, 2:].abs().amax(-1) > 1e-6).all()
    other = queries.clone()
    other[:, 1, 1] += torch.linspace(-2, 2, D)
    got_y, got_answers, got_state = model.fork(x, other, model.initial_state(B))
    changed = (got_answers - answers).abs().amax((0, 3)) > 1e-10  # (N, Q)
    assert changed.nonzero().tolist() == [[1, 1]]
    close(got_y, y)
    same_state(model, got_state, state)


def test_gradients_equal_finite_differences(model, monkeypatch):
    """Through forward, a reset, a step and a fork, with respect to all inputs and parameters."""
    monkeypatch.setattr(transformer_xl, "constant", lambda x: x)  # differences see through a stopped gradient
    torch.manual_seed(3)
    x = inputs(2, 7, D)
    reset = torch.zeros(2, 5, dtype=torch.bool)
    reset[1, 2] = True
    names, values = zip(*model.named_parameters(), strict=True)

    def run(x, queries, *parameters):
        for name, parameter in zip(names, parameters, strict=True):
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters.pop(leaf, None)
            setattr(module, leaf, parameter)
        y, state = model(x[:, :4], model.initial_state(2), None)
        z, state = model.step(x[:, 4], state)
        u, state = model(x[:, :5], state, reset)
        v, w, _ = model.fork(x[:, 3:].unflatten(1, (2, 2)), queries, state)
        return torch.cat([part.flatten() for part in (y, z, u, v, w)])

    arguments = (x, inputs(Q, D), *values)
    assert torch.autograd.gradcheck(run, [a.detach().clone().requires_grad_() for a in arguments], fast_mode=True)


def test_every_parameter_gets_a_gradient(model):
    x = inputs(B, N, L, D)
    y, answers, _ = model.fork(x, inputs(Q, D), None)
    (y.square().mean() + answers.square().mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_gradient_flows_through_the_carried_state(model):
    x = inputs(B, 4, D).requires_grad_()
    _, state = model(x, model.initial_state(B))
    y, _ = model.step(inputs(B, D), state)
    y.square().sum().backward()
    assert (x.grad.abs().amax(-1) > 0).all()


@pytest.mark.parametrize("name", sorted(TINY))
def test_autocast_is_close(name):
    model = tiny(name, torch.float32, width=32)
    x, queries = inputs(B, 8, 5, 32).float(), inputs(2, 32).float()

    def run():
        y, state = model(x.flatten(1, 2)[:, :21], model.initial_state(B))
        z, state = model.step(x[:, 7, 4], state)
        u, v, state = model.fork(x[:, 3:7], queries, state)
        return torch.cat([part.float().flatten() for part in (y, z, u, v)]), state

    want, _ = run()
    with torch.autocast("cpu", torch.bfloat16):
        got, state = run()
    assert (got - want).abs().max() < 3e-2 * want.abs().max()
    assert (got - want).abs().max() > 0
    dtypes = set()
    map_state(lambda leaf: dtypes.add(leaf.dtype), state)
    if isinstance(model, Transformer | TransformerXL):  # they keep keys and values, and add nothing to them
        assert torch.bfloat16 in dtypes
    else:
        assert torch.float32 in dtypes and torch.bfloat16 not in dtypes


def test_without_state_none_comes_back(model):
    x = inputs(B, N, L, D)
    assert model(x[:, 0], None)[1] is None
    assert model(x[:, 0], None, torch.zeros(B, L, dtype=torch.bool))[1] is None
    assert model.step(x[:, 0, 0], None)[1] is None
    assert model.fork(x, inputs(Q, D), None)[2] is None


def test_states_keep_their_shape(model):
    state = model.initial_state(B)
    shapes = []
    map_state(lambda leaf: shapes.append(leaf.shape), state)
    for after in (model(inputs(B, T, D), state)[1], model.step(inputs(B, D), state)[1]):
        got = []
        map_state(lambda leaf, got=got: got.append(leaf.shape), after)
        assert got == shapes and all(shape[0] == B for shape in shapes)


def test_nothing_waits_for_the_device(model, grad):
    x, reset = inputs(B, 4, D), torch.zeros(B, 4, dtype=torch.bool)
    with NoWaiting():
        _, state = model(x, model.initial_state(B), reset)
        _, state = model.step(x[:, 0], state, reset[:, 0])
        _, state = model(x, state)
        model.fork(x[:, None], inputs(Q, D), state)


@pytest.mark.parametrize("name", sorted(TINY))
def test_dropout_only_in_training(name):
    model, x = tiny(name, dropout=0.5), inputs(B, T, D)
    assert not torch.equal(model(x, None)[0], model(x, None)[0])
    model.eval()
    assert torch.equal(model(x, None)[0], model(x, None)[0])


@pytest.mark.parametrize("name", sorted(TINY))
def test_states_survive_inference_mode(name):
    model, x = tiny(name), inputs(B, T, D)
    want = model(x, None)[0]
    with torch.inference_mode():
        first, state = model(x[:, :4], model.initial_state(B))
        second, state = model.step(x[:, 4], state)
    with torch.no_grad():
        third, state = model(x[:, 5:7], state)
    fourth, _ = model(x[:, 7:], state)
    close(torch.cat((first, second[:, None], third, fourth), 1), want)
