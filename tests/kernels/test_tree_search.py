"""Test the tree search in Triton against its form in torch. tests/controllers/test_mcts.py tests its meaning.

E trees, A actions, S simulations.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpus import DEVICE
from torch.testing import assert_close

from wmcli.kernels.dispatch import using
from wmcli.kernels.tree_search import (
    PRIOR,
    RAW_VALUE,
    ROOT,
    VALUE_SUM,
    SearchRule,
    SearchTree,
    backup,
    plant,
    select,
    summarize,
)
from wmcli.kernels.tree_search_gumbel import considered_visits, gumbel_rule
from wmcli.kernels.tree_search_lightzero import LightZeroNoise, lightzero_rule
from wmcli.kernels.tree_search_mctx import mctx_rule

pytestmark = pytest.mark.matrix

RULES = {
    "mctx": mctx_rule(),
    "lightzero": lightzero_rule(),
    "gumbel": gumbel_rule(max_num_considered_actions=6, least_range=0.5),
}
SHAPES = [(3, 5, 12), (1, 9, 12), (2, 1, 4), (2, 17, 7), (3, 2, 17)]


def grow(
    rule: SearchRule,
    trees: int,
    actions: int,
    simulations: int,
    dtype=torch.float32,
    strided: bool = False,
    impossible: bool = False,
) -> tuple[SearchTree, torch.Tensor]:
    """Return a tree after all simulations of a random model, and the edges (S, 2, E) where it grew.

    With `impossible` every third action has no prior.
    """
    generator = torch.Generator().manual_seed(actions)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    def policy() -> torch.Tensor:
        return normal(trees, actions).masked_fill(lost, -torch.inf)

    lost = (
        torch.arange(actions, device=DEVICE) % 3 == 1 if impossible else torch.zeros(1, dtype=torch.bool, device=DEVICE)
    )
    noise = rule.draw_noise(trees, actions, simulations, generator)
    if isinstance(noise, LightZeroNoise):
        noise = LightZeroNoise(*(part.to(DEVICE) for part in noise))
    elif noise is not None:
        noise = noise.to(DEVICE)
    tree = plant(rule, simulations, 0.9, policy(), normal(trees), noise)
    places = []
    for simulation in range(simulations):
        selection = select(tree, rule, simulation)
        places.append(torch.stack([selection.parent, selection.action]))
        reward, terminated = normal(trees), (torch.rand(trees, generator=generator) < 0.2).to(DEVICE)
        logits, value = policy(), 5 * normal(trees)
        if strided:
            logits, value = logits.T.contiguous().T, value.repeat_interleave(2)[::2]
            reward, terminated = reward.repeat_interleave(2)[::2], terminated.repeat_interleave(2)[::2]
        backup(tree, rule, simulation, selection, reward, terminated, logits, value)
    return tree, torch.stack(places)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize(("trees", "actions", "simulations"), SHAPES)
@pytest.mark.slow
def test_triton_equals_the_form_in_torch(name, trees, actions, simulations, impossible):
    """The same growth, and the same numbers in the end."""
    rule = RULES[name]
    assert rule.fused is not None
    results = []
    for implementation in ("torch", "triton"):
        with using(implementation):
            results.append(grow(rule, trees, actions, simulations, impossible=impossible))
    (want, places), (got, other_places) = results
    assert torch.equal(other_places, places)
    assert not impossible or not (places[:, 1] % 3 == 1).any()
    assert torch.equal(got.children, want.children)
    real = slice(trees, None)
    assert torch.equal(got.parent_edge[real], want.parent_edge[real])
    assert_close(got.nodes[:, real], want.nodes[:, real])
    assert_close(got.edges[:, real], want.edges[:, real])
    assert_close(got.extra, want.extra)
    mine, other = summarize(got, rule), summarize(want, rule)
    assert torch.equal(mine.visits, other.visits)
    assert int(mine.visits.sum()) == trees * simulations
    assert torch.equal(mine.action, other.action)
    assert_close(mine, other)


@pytest.mark.parametrize("name", RULES)
def test_a_changed_rule_has_no_triton_form(name):
    """It runs in torch, also where Triton was asked for: the old Triton form does something else."""
    rule = replace(RULES[name], score=lambda nodes, q: q - nodes.children_visits)
    assert rule.fused is None
    results = []
    for implementation in ("torch", "triton"):
        with using(implementation):
            results.append(grow(rule, 3, 5, 12))
    (want, places), (got, other_places) = results
    assert torch.equal(other_places, places)
    assert torch.equal(got.nodes, want.nodes)
    assert not torch.equal(places, grow(RULES[name], 3, 5, 12)[1])


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_operands_as_they_come(implementation):
    """bfloat16, and strides."""
    rule = RULES["mctx"]
    with using(implementation):
        _, want = grow(rule, 2, 5, 8)
        _, strided = grow(rule, 2, 5, 8, strided=True)
        assert torch.equal(strided, want)
        low, _ = grow(rule, 2, 5, 8, torch.bfloat16, strided=True)
    assert low.nodes.dtype == low.edges.dtype == torch.float32
    assert torch.equal(low.nodes[RAW_VALUE], low.nodes[RAW_VALUE].bfloat16().float())
    assert not torch.equal(low.nodes[VALUE_SUM], low.nodes[VALUE_SUM].bfloat16().float())


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_lightzero_takes_scores_a_millionth_apart_for_equal(implementation):
    """A bandit whose second and third action pay nearly the same."""
    rule, zero, flat = lightzero_rule(), torch.zeros(1, device=DEVICE), torch.zeros(1, 3, device=DEVICE)

    def visits(third: float) -> list[float]:
        pays = torch.tensor([0.1, 0.5, third], device=DEVICE)
        tree = plant(rule, 8, 0.997, flat, zero)
        for simulation in range(8):
            selection = select(tree, rule, simulation)
            reward = pays[selection.action].masked_fill(selection.parent > 1, 0)  # the root's number is 1
            backup(tree, rule, simulation, selection, reward, zero.bool(), flat, zero)
        return summarize(tree, rule).visits[0].tolist()

    with using(implementation):
        assert visits(0.5 + 2e-7) == visits(0.5) == [1, 4, 3]
        assert visits(0.5 + 2e-6) == [1, 3, 4]


def test_sequential_halving():
    """Worked out by hand: each round, the same number of simulations for every remaining action, then half of them."""
    assert considered_visits(1, 3) == (0, 1, 2)
    assert considered_visits(4, 16) == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert considered_visits(4, 8) == (0, 0, 0, 0, 1, 1, 2, 2)
    assert considered_visits(8, 5) == (0,) * 5
    assert considered_visits(3, 7) == (0, 0, 0, 1, 1, 2, 2)


def test_gumbel_takes_the_best_of_the_most_visited():
    rule = gumbel_rule()
    uniforms = (-(-torch.tensor([[0.0, 0.0, 1.0]])).exp()).exp()  # Gumbel noise of 0, 0 and 1
    tree = plant(rule, 5, 0.9, torch.zeros(1, 3), torch.zeros(1), uniforms)
    assert_close(tree.extra.gumbel, torch.tensor([[0.0, 0.0, 1.0]]))
    tree.edges[:PRIOR, ROOT] = torch.tensor([[2.0, 2.0, 1.0], [0.0, 1.0, 5.0]])
    output = summarize(tree, rule)
    assert output.action.tolist() == [1]
    # all q are known: the logits are 0, and (50 + 2) / 10 times q scaled to [0, 1]
    assert_close(output.policy, torch.tensor([[0.0, 1.04, 5.2]]).softmax(1))
