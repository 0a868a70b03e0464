"""S4's own numbers: HiPPO-LegS, initialization, sizes, the kernel length, and when systems are prepared anew.

The last, and how near the forms of a stack are to each other, for S4D and S5 as well.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.testing import assert_close

from wmcli.backbones import SECTIONS, BackboneSize, build, map_state, s4
from wmcli.backbones.s4 import S4, S4Settings, StateSpace, StateSpaceStack, build_system, hippo_legs, legs_input
from wmcli.errors import UsageError
from wmcli.kernels import s4 as kernels
from wmcli.training.optim import build_optimizer
from wmcli.world_models.base import parameter_groups

LENGTH = 30  # of the kernels
SYSTEM = {"log_dt", "log_decay", "frequency", "p", "b"}


def small(length: int = LENGTH, **settings) -> S4:
    torch.manual_seed(0)
    return S4(S4Settings(**{"state_size": 8, "ffn": 1, **settings}), BackboneSize(6, 2, 0.0, length, 1)).eval()


KINDS = {
    "s4": {"state_size": 8, "ffn": 1},
    "s4d": {"state_size": 8, "ffn": 1},
    "s5": {"state_size": 16, "blocks": 2, "ffn": 1},
}


def stack(kind: str, width: int = 6, length: int = LENGTH, **settings) -> StateSpaceStack:
    torch.manual_seed(0)
    values = {"width": width, "layers": 2, "dropout": 0.0, **KINDS[kind], **settings}
    return build(SECTIONS[kind].model_validate(values), length, 1).eval()


def inputs(*shape: int, dtype=torch.float32) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(*shape, dtype=dtype)


def steps(model: StateSpaceStack, x: torch.Tensor) -> torch.Tensor:
    state, outputs = model.initial_state(len(x)), []
    for t in range(x.shape[1]):
        y, state = model.step(x[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1)


def truncated_output(system: StateSpace, length: int) -> tuple[kernels.System, torch.Tensor]:
    """The system of a layer, and its C (D, N / 2) by solving for it."""
    made, c_tilde = build_system(*system.tensors())
    stored = kernels.output_numbers(c_tilde)[..., None]
    c = torch.linalg.solve(kernels.truncation(kernels.discretize(made), length), stored)[..., 0]
    return made, torch.complex(c[:, ::2], -c[:, 1::2]) / 2


# -- HiPPO-LegS --------------------------------------------------------------------------------------------------------


def legs_matrix(state: int) -> torch.Tensor:
    """A, entry by entry as the paper writes it."""
    a = torch.zeros(state, state, dtype=torch.float64)
    for n in range(state):
        a[n, n] = -(n + 1)
        for k in range(n):
            a[n, k] = -math.sqrt((2 * n + 1) * (2 * k + 1))
    return a


@pytest.mark.parametrize("state", [2, 4, 8, 16, 64])
def test_legs_is_diagonal_minus_rank_one(state):
    poles, p, vectors = hippo_legs(state)
    poles, p, vectors = (torch.cat((part, part.conj()), -1) for part in (poles, p, vectors))
    assert_close(vectors.mH @ vectors, torch.eye(state, dtype=vectors.dtype), rtol=0, atol=1e-12)
    back = vectors @ (torch.diag(poles) - p[:, None] * p.conj()) @ vectors.mH
    assert_close(back, legs_matrix(state).to(back.dtype), rtol=0, atol=1e-11)
    number = torch.arange(state, dtype=torch.float64)
    assert_close((vectors @ p).real, (number + 0.5).sqrt(), rtol=0, atol=1e-11)
    assert_close((vectors @ (math.sqrt(2) * p)).real, (2 * number + 1).sqrt(), rtol=0, atol=1e-11)  # LegS's own B
    assert (vectors[0].real > 0).all() and vectors[0].imag.abs().max() < 1e-15
    assert p.abs().square().sum().item() == pytest.approx(state**2 / 2)


def test_golden_legs():
    a = [[-1, 0, 0, 0], [-1.73205081, -2, 0, 0], [-2.23606798, -3.87298335, -3, 0]]
    a = torch.tensor([*a, [-2.64575131, -4.58257569, -5.91607978, -4]], dtype=torch.float64)
    assert_close(legs_matrix(4), a, rtol=0, atol=5e-9)
    assert sorted(torch.linalg.eigvals(legs_matrix(8)).real.tolist()) == pytest.approx(list(range(-8, 0)))
    golden = {
        4: [4.603293007, 0.556501115],
        16: [80.96608093, 25.62922644, 13.83434182, 8.36210453, 5.09002363, 2.89966822, 1.37198878, 0.35201792],
    }
    for state, want in golden.items():
        poles, _, _ = hippo_legs(state)
        assert poles.imag.neg().tolist() == pytest.approx(want, abs=1e-8)
        assert poles.real.tolist() == [-0.5] * (state // 2)
    eight, many = (hippo_legs(state)[0].imag.abs() for state in (8, 64))
    assert (eight.max().item(), eight.min().item()) == pytest.approx((19.857410371, 0.427488712), abs=1e-9)
    assert many.max().item() == pytest.approx(1303.27, abs=5e-3)
    assert many.min().item() == pytest.approx(0.263857, abs=5e-7)
    b = 2 * hippo_legs(4)[1].abs().square()
    assert b.tolist() == pytest.approx([7.065044113, 0.934955887], abs=1e-9)


def test_golden_inputs_of_legs():
    """B as state-spaces/s4 makes it (commit e757cef), the imaginary parts cut at +-2."""
    assert torch.view_as_real(legs_input(hippo_legs(4)[1])).tolist() == [
        pytest.approx([0.28701985, 2.0], abs=1e-7),
        pytest.approx([0.64623487, 0.71926093], abs=1e-7),
    ]
    b = legs_input(hippo_legs(64)[1])
    assert b.abs().square().sum().item() == pytest.approx(74.8735, abs=1e-4)  # uncut 2048
    assert (b.imag == 2).sum() == 11


# -- initialization and sizes ------------------------------------------------------------------------------------------


def test_parameter_counts():
    width, state = 256, 64
    model = build(S4Settings(width=width, layers=2), 100, 1)
    norm, system = 2 * width, width + 2 * (state // 2) + 2 * state  # log_dt, the poles, P and B
    layer = norm + system + width * state + width + (width + 1) * 2 * width
    mlp = norm + (width + 1) * 4 * width + (4 * width + 1) * width
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in model.blocks[0].named_children()}
    assert count == {"layers": 2 * layer, "norm": norm, "up": 257 * 1024, "down": 1025 * 256}
    assert sum(p.numel() for p in model.parameters()) == 2 * (2 * layer + mlp) + norm == 1_649_408
    assert sum(leaf.numel() for leaf in model.initial_state(1).layers) == 4 * width * state


def test_parameter_counts_of_the_variants():
    def count(**settings) -> int:
        return sum(p.numel() for p in small(**settings).parameters())

    base = count()
    assert base - count(ffn=0) == 2 * (12 + 7 * 6 + 7 * 6)
    assert base - count(glu=False) == 4 * 7 * 6
    assert count(tied=False) - base == 4 * 5 * 3 * 8  # five more channels with poles, P and B


def test_initialization():
    torch.manual_seed(0)
    length = 200
    model = S4(S4Settings(), BackboneSize(512, 1, 0.0, length, 1))
    layer = model.blocks[0].layers[0]
    system = layer.system
    log_dt = system.log_dt.detach()
    assert math.log(1e-3) <= log_dt.min() < math.log(1.1e-3) and math.log(0.9e-1) < log_dt.max() <= math.log(1e-1)
    assert log_dt.mean().item() == pytest.approx(math.log(1e-2), abs=0.2)
    assert_close(system.log_decay.exp(), torch.full((1, 32), 0.5))
    assert_close(system.b[..., 0], math.sqrt(2) * system.p[..., 0])
    assert_close(system.b[..., 1], (math.sqrt(2) * system.p[..., 1]).clamp(-2, 2))
    # C is what has unit variance; what is stored is C~.
    c = torch.view_as_real(truncated_output(system, length)[1])
    assert c.square().sum(-1).mean().item() == pytest.approx(1, rel=0.03)
    assert c.square().mean((0, 1)).tolist() == pytest.approx([0.5, 0.5], rel=0.05)
    assert layer.skip.std().item() == pytest.approx(1, rel=0.1)
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        assert linear.weight.std().item() == pytest.approx((2 / sum(linear.weight.shape)) ** 0.5, rel=0.03)
        assert not linear.bias.any()


def test_the_kernel_length_changes_no_initial_model():
    x = inputs(2, 20, 6)
    want = small(20)(x, None)[0]
    for length in (21, 64, 200):
        assert_close(small(length)(x, None)[0], want, rtol=0, atol=2e-5)


def test_wrong_settings_are_usage_errors():
    with pytest.raises(UsageError, match=r"backbone.dt_min = 0.1: must not be above backbone.dt_max = 0.01"):
        small(dt_min=0.1, dt_max=0.01)
    with pytest.raises(ValueError, match="multiple of 2"):
        S4Settings(state_size=7)


@pytest.mark.parametrize("kind", KINDS)
def test_systems_learn_slowly_and_do_not_decay(kind):
    model = stack(kind)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in build_optimizer("adamw", parameter_groups(model, 0.1), 0.01, 0.1).param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            leaf = name.split(".")[-1]
            assert group["lr"] == (1e-3 if leaf in SYSTEM else 0.01), name
            decays = leaf in ("weight", "c", "c_tilde") and "norm" not in name
            assert group["weight_decay"] == (0.1 if decays else 0), name


# -- the stack ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"ffn": 0}, {"glu": False}, {"tied": False}], ids=str)
def test_the_stack_as_the_paper_draws_it(settings):
    """Figure 1, with the definition of the kernel in place of the Cauchy form and of the convolution."""
    model = small(**settings).double()
    x = y = inputs(2, 7, 6, dtype=torch.float64)
    for block in model.blocks:
        for layer in block.layers:
            u = layer.norm(y)
            kernel = kernels.reference(*truncated_output(layer.system, LENGTH), 7)
            filtered = [sum(kernel[:, lag] * u[:, t - lag] for lag in range(t + 1)) for t in range(7)]
            mixed = layer.out(nn.functional.gelu(torch.stack(filtered, 1) + layer.skip * u))
            if settings.get("glu", True):
                mixed = mixed[..., :6] * mixed[..., 6:].sigmoid()
            y = y + mixed
        if settings.get("ffn", 1):
            y = y + block.down(nn.functional.gelu(block.up(block.norm(y))))
    assert_close(model(x, None)[0], model.norm(y), rtol=0, atol=1e-10)


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 9, 33])
def test_sequences_of_any_length(length):
    """Shorter than the kernel, as long, and longer: convolution or recurrence, the outputs are the same."""
    model = small(length).double()
    x = inputs(2, 33, 6, dtype=torch.float64)
    want = steps(model, x)
    assert_close(model(x, None)[0], want, rtol=0, atol=1e-10)
    assert_close(model(x[:, :length], None)[0], want[:, :length], rtol=0, atol=1e-10)


@pytest.mark.parametrize("longest", [512, 100], ids=["convolution", "chunks"])
def test_long_sequences_with_resets(monkeypatch, longest):
    monkeypatch.setattr(s4, "LONGEST_WITH_RESETS", longest)
    model = small(150).double()
    x, reset = inputs(3, 150, 6, dtype=torch.float64), torch.zeros(3, 150, dtype=torch.bool)
    reset[1, [0, 60, 61, 149]] = reset[2, 100] = True
    y, _ = model(x, None, reset)
    assert_close(y[0], model(x, None)[0][0], rtol=0, atol=1e-10)
    for row, borders in ((1, [0, 60, 61, 149, 150]), (2, [0, 100, 150])):
        for start, stop in zip(borders, borders[1:], strict=False):
            assert_close(y[row, start:stop], model(x[row : row + 1, start:stop], None)[0][0], rtol=0, atol=1e-10)


def test_the_kernel_length_is_saved_with_the_weights():
    model, other = small(), small()
    tensors = load(save(model.state_dict()))
    assert {value.dtype for name, value in tensors.items() if name != "_extra_state"} == {torch.float32}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    other.load_state_dict(tensors)
    x = inputs(2, 9, 6)
    assert torch.equal(other(x, None)[0], model(x, None)[0])
    with pytest.raises(UsageError, match="up to 30 elements, this model is built for 31"):
        small(31).load_state_dict(tensors)


# -- when systems are prepared -----------------------------------------------------------------------------------------


def load_others(model: StateSpaceStack) -> StateSpaceStack:
    other = copy.deepcopy(model)
    write_in_place(other)
    model.load_state_dict(other.state_dict())
    return model


def write_in_place(model: StateSpaceStack) -> StateSpaceStack:
    with torch.no_grad():
        for system in systems(model):
            system.log_dt.add_(0.3)
    return model


def replace_parameters(model: StateSpaceStack) -> StateSpaceStack:
    for system in systems(model):
        system.b = nn.Parameter(1.1 * system.b.detach())
    return model


def replace_data(model: StateSpaceStack) -> StateSpaceStack:
    for system in systems(model):
        c = system.tensors()[-1]
        c.data = 1.1 * c.data
    return model


def systems(model: StateSpaceStack) -> list[Any]:
    return [layer.system for block in model.blocks for layer in block.layers]


CHANGES = {
    "load_state_dict": load_others,
    "in place": write_in_place,
    "parameters replaced": replace_parameters,
    "data replaced": replace_data,
    "copied": lambda model: write_in_place(copy.deepcopy(model)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_new_state_has_the_systems_of_the_weights_as_they_are(change, kind):
    model, x = stack(kind), inputs(2, 9, 6)
    with torch.no_grad():
        before = steps(model, x)
    model = CHANGES[change](model)
    with torch.no_grad():
        after, want = steps(model, x), model(x, None)[0]
    assert_close(after, want, rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_systems_follow_the_dtype(kind):
    model, x = stack(kind), inputs(2, 9, 6)
    with torch.no_grad():
        steps(model, x)
        model.double()
        assert_close(steps(model, x.double()), model(x.double(), None)[0], rtol=0, atol=1e-10)


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """How often systems have been prepared for a recurrence, in a list of one."""
    count, original = [0], kernels.discretize

    def counting(*arguments):
        count[0] += 1
        return original(*arguments)

    monkeypatch.setattr(kernels, "discretize", counting)
    return count


def rollout(model: S4, x: torch.Tensor) -> list[torch.Tensor]:
    """Four steps, nine elements at once, and a fork."""
    state, outputs = model.initial_state(2), []
    for t in range(4):
        y, state = model.step(x[:, t], state)
        outputs.append(y)
    y, state = model(x, state, torch.zeros(2, 9, dtype=torch.bool))
    *answers, _ = model.fork(x[:, None], x[0, :2], state)
    return [*outputs, y, *answers]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_rollout_prepares_once(made, mode):
    model, x = small(), inputs(2, 9, 6)
    made[0] = 0
    with mode():
        rollout(model, x)
    assert made == [2]  # for one element, and for nine: all layers together


def test_a_frozen_stack_prepares_once_for_all_rollouts(made):
    model, x = small().requires_grad_(False), inputs(2, 9, 6)
    with torch.no_grad():
        want = rollout(model, x)
    names, made[0] = set(model.state_dict()), 0
    model.freeze()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert all(map(torch.equal, rollout(model, x), want))
            assert model.step(x[:, 0], model.initial_state(2))[1].systems is None  # a tree of tensors alone
    assert made == [2]
    assert set(model.state_dict()) == names


def test_a_gradient_needs_systems_of_its_own(made):
    """A state that came without a graph brings none for the systems."""
    model, x = small(), inputs(2, 9, 6)
    with torch.no_grad():
        _, state = model(x, model.initial_state(2))
    y, after = model(x, state)
    y.square().sum().backward()
    assert all(each.grad is not None for space in systems(model) for each in space.parameters())
    assert after.systems is not state.systems


def segment(model: S4, x: torch.Tensor, share: bool) -> torch.Tensor:
    """What a token world model makes of a segment, from blocks x (B, 4, L, D)."""
    state = model.initial_state(len(x))
    parts = []
    for call in (
        lambda state: model(x[:, 0], state),
        lambda state: model.fork(x[:, 1:3], x[0, 0, :2], state),
        lambda state: model(x[:, 3], state),
    ):
        *results, state = call(state if share else state._replace(systems=None))
        parts += results
    return torch.cat([part.flatten() for part in parts])


def test_a_loss_prepares_once(made):
    """Three calls with gradient, and the gradients are those of calls that share nothing."""
    model, x = small().double(), inputs(2, 4, 5, 6, dtype=torch.float64)
    gradients, counts = [], []
    for share in (True, False):
        made[0] = 0
        y = segment(model, x, share)
        gradients.append(torch.autograd.grad(y.square().sum(), list(model.parameters())))
        counts.append(made[0])
    assert counts == [2, 6]  # forward and backward
    for got, want in zip(*gradients, strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_several_losses_may_share(made):
    """One backward pass after the other, through the same preparation."""
    model, x = small().double(), inputs(2, 9, 6, dtype=torch.float64)
    parameters = [each for space in systems(model) for each in space.parameters()]
    y, state = model(x, model.initial_state(2))
    state = map_state(torch.Tensor.detach, state)
    z, _ = model(x, state)
    separate = [torch.autograd.grad(each.square().sum(), parameters) for each in (y, z)]
    y, _ = model(x, model.initial_state(2))
    z, _ = model(x, state._replace(systems=None))
    together = torch.autograd.grad(y.square().sum() + z.square().sum(), parameters)
    for first, second, both in zip(*separate, together, strict=True):
        assert_close(first + second, both, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_forward_pass(made):
    """A change of the parameters before the backward pass does not reach it."""
    found = []
    for change in (False, True):
        model = small()
        y, _ = model.step(inputs(2, 6), model.initial_state(2))
        if change:
            write_in_place(model)
        leaves = [each for space in systems(model) for each in space.parameters()]
        found.append(torch.autograd.grad(y.sum(), leaves))
    assert_close(*found, rtol=0, atol=0)


def test_a_frozen_model_passes_gradients_on(made):
    """What inference mode prepared serves a graph as well."""
    model, x = small().requires_grad_(False), inputs(2, 9, 6)
    model.freeze()
    made[0] = 0
    with torch.inference_mode():
        model(x, model.initial_state(2))
        model.step(x[:, 0], model.initial_state(2))
    x.requires_grad_()
    y, state = model(x, model.initial_state(2))
    z, _ = model.step(x[:, 3], state)
    (y.sum() + z.square().sum()).backward()
    assert made == [2]
    assert (x.grad.abs().amax(-1) > 0).all()


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 2e-5), (torch.float64, 1e-10)], ids=str)
def test_steps_equal_the_convolution_after_training(kind, dtype, share):
    """With as many numbers as by default, and at the full length of the kernel."""
    model = stack(kind, 5, 257, state_size=64, ffn=2).to(dtype)
    x = inputs(3, 257, 5, dtype=dtype)
    optimizer = build_optimizer("adamw", parameter_groups(model, 0.01), 1e-3, 0.01)
    for updates in (2, 0):
        with torch.no_grad():
            want = model(x, None)[0]
            scale = want.abs().max()
            assert (steps(model, x) - want).abs().max() < share * scale
            assert (model(x, model.initial_state(3))[0] - want).abs().max() < share * scale
        for _ in range(updates):
            optimizer.zero_grad()
            (model(x[:, :60], None)[0] - x[:, :60].roll(5, 1)).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_model_keeps_float32_systems(kind):
    model = stack(kind).bfloat16()
    x = inputs(2, 9, 6).bfloat16()
    want, _ = model(x, None)
    y, state = model(x, model.initial_state(2))
    assert y.dtype == want.dtype == torch.bfloat16
    assert (y - want).abs().max() < 0.1
    dtypes = set()
    map_state(lambda leaf: dtypes.add(leaf.dtype), state)
    assert dtypes == {torch.float32}


def test_complex_parameters_are_pairs():
    system = StateSpace(S4Settings(state_size=8), BackboneSize(6, 1, 0.0, LENGTH, 1))
    assert all(parameter.is_floating_point() for parameter in system.parameters())
    assert system.c_tilde.shape == (6, 4, 2)
    with torch.no_grad():
        system.c_tilde.copy_(torch.arange(48.0).view(6, 4, 2))
    assert build_system(*system.tensors())[1][2, 3] == 22 + 23j
