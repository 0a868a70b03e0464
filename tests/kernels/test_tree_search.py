"""The tree search in Triton against its form in torch. What that is worth: tests/controllers/test_mcts.py.

E trees, A actions, S simulations.
"""

from __future__ import annotations

import pytest
import torch
from gpus import DEVICE, compile_for_gpus
from torch.testing import assert_close

from wmcli.kernels import tree_search as module
from wmcli.kernels.dispatch import using
from wmcli.kernels.tree_search import Rule, backup, considered_visits, decision, plant, root_value, root_visits, select

RULES = ["mctx", "lightzero", "gumbel"]


def grown(kind: str, trees: int, actions: int, simulations: int, dtype=torch.float32, strided: bool = False):
    """A tree after all simulations, of a model that says random things; where it grew each time."""
    generator = torch.Generator().manual_seed(actions)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    rule = Rule(kind, 0.9, considered=6)
    ties = torch.rand(trees, simulations + 1, actions, generator=generator).to(DEVICE)
    noise = {"gumbel": normal(trees, actions)} if kind == "gumbel" else {"ties": ties}
    tree = plant(rule, simulations, normal(trees, actions), normal(trees), **noise)
    places = []
    for simulation in range(simulations):
        selection = select(tree, rule, simulation)
        places.append(torch.stack([selection.parent, selection.action]))
        reward, terminated = normal(trees), (torch.rand(trees, generator=generator) < 0.2).to(DEVICE)
        logits, value = normal(trees, actions), 5 * normal(trees)
        if strided:
            logits, value = logits.T.contiguous().T, value.repeat_interleave(2)[::2]
            reward, terminated = reward.repeat_interleave(2)[::2], terminated.repeat_interleave(2)[::2]
        backup(tree, rule, simulation, selection, reward, terminated, logits, value)
    return tree, rule, torch.stack(places)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(
    ("trees", "actions", "simulations"), [(3, 5, 12), (1, 9, 12), (2, 1, 4), (2, 17, 7), (3, 2, 17)]
)
def test_triton_equals_the_form_in_torch(kind, trees, actions, simulations):
    """Where the trees grow, and all that they know then."""
    results = []
    for implementation in ("torch", "triton"):
        with using(implementation):
            results.append(grown(kind, trees, actions, simulations))
    (want, rule, places), (got, _, other_places) = results
    assert torch.equal(other_places, places)
    assert torch.equal(got.child, want.child)
    real = slice(trees, None)
    assert torch.equal(got.slot[real], want.slot[real])
    assert_close(got.nodes[module.VISITS :: module.TOTAL][:, real], want.nodes[module.VISITS :: module.TOTAL][:, real])
    assert_close(got.nodes[module.TOTAL :, real], want.nodes[module.TOTAL :, real])
    assert_close(got.edges[:, real], want.edges[:, real])
    assert_close(got.bounds, want.bounds)
    assert torch.equal(root_visits(got), root_visits(want))
    assert int(root_visits(got).sum()) == trees * simulations
    assert_close(root_value(got), root_value(want))
    if kind == "gumbel":
        for a, b in zip(decision(got, rule), decision(want, rule), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_operands_as_they_come(implementation):
    """bfloat16, and strides."""
    with using(implementation):
        _, _, want = grown("mctx", 2, 5, 8)
        _, _, strided = grown("mctx", 2, 5, 8, strided=True)
        assert torch.equal(strided, want)
        low, _, _ = grown("mctx", 2, 5, 8, torch.bfloat16, strided=True)
    assert low.nodes.dtype == low.edges.dtype == torch.float32
    assert torch.equal(low.nodes[module.VALUE], low.nodes[module.VALUE].bfloat16().float())
    assert not torch.equal(low.nodes[module.TOTAL], low.nodes[module.TOTAL].bfloat16().float())


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_lightzero_takes_scores_a_millionth_apart_for_equal(implementation):
    """A bandit whose second and third action pay nearly the same."""
    rule, zero, flat = Rule("lightzero", 0.997), torch.zeros(1, device=DEVICE), torch.zeros(1, 3, device=DEVICE)

    def visits(third: float) -> list[float]:
        pays = torch.tensor([0.1, 0.5, third], device=DEVICE)
        tree = plant(rule, 8, flat, zero)
        for simulation in range(8):
            selection = select(tree, rule, simulation)
            reward = pays[selection.action].masked_fill(selection.parent > 1, 0)  # the root's number is 1
            backup(tree, rule, simulation, selection, reward, zero.bool(), flat, zero)
        return root_visits(tree)[0].tolist()

    with using(implementation):
        assert visits(0.5 + 2e-7) == visits(0.5) == [1, 4, 3]
        assert visits(0.5 + 2e-6) == [1, 3, 4]


def test_sequential_halving():
    """Worked out by hand: in each round as many simulations for every action that is left, then half of them."""
    assert considered_visits(1, 3) == (0, 1, 2)
    assert considered_visits(4, 16) == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert considered_visits(4, 8) == (0, 0, 0, 0, 1, 1, 2, 2)
    assert considered_visits(8, 5) == (0,) * 5
    assert considered_visits(3, 7) == (0, 0, 0, 1, 1, 2, 2)


def test_the_decision_is_among_the_most_visited():
    rule = Rule("gumbel", 0.9)
    tree = plant(rule, 5, torch.zeros(1, 3), torch.zeros(1), gumbel=torch.tensor([[0.0, 0.0, 1.0]]))
    tree.edges[: module.PRIOR, module.ROOT] = torch.tensor([[2.0, 2.0, 1.0], [0.0, 1.0, 5.0]])
    policy, action = decision(tree, rule)
    assert action.tolist() == [1]
    # all q are known: the logits are 0, and (50 + 2) / 10 times q scaled to [0, 1]
    assert_close(policy, torch.tensor([[0.0, 1.04, 5.2]]).softmax(1))


def compile_cases():
    types = dict.fromkeys(("nodes", "edges", "bounds", "gumbel", "explore"), "*fp32")
    types |= dict.fromkeys(("child", "slot", "choice", "following", "parent", "action"), "*i64")
    types |= dict.fromkeys(("trees", "actions", "count", "block", "considered", "logits_row", "logits_action"), "i32")
    types |= dict.fromkeys(("tie", "narrowest", "visit_constant", "value_scale", "smallest", "tiny"), "fp32")
    types |= {"ends": "*i1"}
    for kind, element in zip(RULES, ("*fp32", "*bf16", "*fp32"), strict=True):
        types |= dict.fromkeys(("rewards", "logits", "values"), element)
        constants = {"LIGHTZERO": kind == "lightzero", "GUMBEL": kind == "gumbel", "WIDTH": 16}
        for kernel in (module._walk_down, module._walk_up):
            used, fixed = (
                {name: v for name, v in each.items() if name in kernel.arg_names} for each in (types, constants)
            )
            yield kernel, used, fixed


def test_the_kernels_compile():
    compile_for_gpus(__file__)
