"""MuZero's search rule as in opendilab/LightZero.

The score of a child is q' + P f(N - 1) sqrt(N - 1) / (1 + N_a), with f as in `tree_search_mctx`. q' is q scaled to
[0, 1] by the range of r + gamma V over all backups of the tree, at least 0.01 wide. Children without a visit get a mean
of their visited siblings' q and of the same mean one level up. Ties, to 1e-6, go to the largest of given uniforms. The
root's value excludes the model's value of it.

The range is that of the whole tree, so every node is scored again after a backup. Axes as in `tree_search`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from wmcli.kernels.dispatch import jit, tl
from wmcli.kernels.tree_search import (
    FusedRule,
    Nodes,
    SearchRule,
    SearchTree,
    Selection,
    padded,
    softmax,
    sum_over_actions,
)
from wmcli.kernels.tree_search_mctx import (
    draw_dirichlet,
    exploration_weight,
    mix_dirichlet,
    score_puct,
    take_highest,
)

TIE = 1e-6
"""Scores closer than this are equal."""
NARROWEST = 0.01
"""Smallest range of values that is scaled to [0, 1]."""


class LightZeroNoise(NamedTuple):
    """Noise of a search that explores."""

    dirichlet: Tensor
    """(E, A), mixed into the root's prior."""
    ties: Tensor | None = None
    """(E, S + 1, A), uniform in [0, 1): of equal children the largest is chosen. None chooses the first."""


class LightZeroExtra(NamedTuple):
    """Tensors of the rule."""

    exploration: Tensor
    """(S + 2,) float32: f(N - 1) sqrt(N - 1) at N visits."""
    ties: Tensor
    """(M E, A) float32: of equal children the one with the largest is chosen."""
    bounds: Tensor
    """(2, E) float32: least and largest q of all backups."""


def lightzero_rule(
    pb_c_init: float = 1.25, pb_c_base: float = 19652, dirichlet_alpha: float = 0.3, dirichlet_fraction: float = 0.25
) -> SearchRule:
    """Build the rule. Arguments as in `mctx_rule`."""

    def init_extra(tree: SearchTree, noise: LightZeroNoise | None) -> LightZeroExtra:
        visits = (torch.arange(tree.num_simulations + 2, device=tree.ids.device) - 1).clamp_min(0)
        ties = tree.nodes.new_zeros(*tree.ids.shape, tree.num_actions)
        if noise is None or noise.ties is None:
            ties.sub_(torch.arange(tree.num_actions, device=ties.device))
        else:
            ties[1:] = noise.ties.transpose(0, 1)
        bounds = tree.nodes.new_full((2, tree.num_trees), math.inf)
        bounds[1].neg_()
        return LightZeroExtra(exploration_weight(visits, pb_c_init, pb_c_base), ties.flatten(0, 1), bounds)

    return SearchRule(
        score=score_puct,
        qtransform=_qtransform_by_tree,
        interior_action_selection_fn=_take_highest,
        root_prior=partial(_mix_noise, fraction=dirichlet_fraction),
        draw_noise=partial(_draw_noise, alpha=dirichlet_alpha),
        init_extra=init_extra,
        update_extra=_widen_bounds,
        count_root_value=False,
        rescore_all=True,
    ).fuse(
        FusedRule(
            softmax, track=_widen_fused, arguments=lambda tree, simulation: (tree.extra.bounds,), select=_select_fused
        )
    )


def _draw_noise(
    num_trees: int, num_actions: int, num_simulations: int, generator: torch.Generator, alpha: float
) -> LightZeroNoise:
    dirichlet = draw_dirichlet(num_trees, num_actions, alpha, generator)
    return LightZeroNoise(dirichlet, torch.rand(num_trees, num_simulations + 1, num_actions, generator=generator))


def _mix_noise(logits: Tensor, noise: LightZeroNoise | None, fraction: float) -> Tensor:
    return mix_dirichlet(logits, None if noise is None else noise.dirichlet, fraction)


def _widen_bounds(tree: SearchTree, nodes: Tensor, q: Tensor) -> None:
    """Extend the bounds to include q (R,) of `nodes` (R,), the leaves last."""
    trees = tree.num_trees
    nodes, q = nodes.view(-1, trees), q.view(-1, trees)
    least, largest = torch.where(nodes < trees, q[-1], q).aminmax(dim=0)  # padding has no q of its own
    low, high = tree.extra.bounds
    torch.minimum(low, least, out=low)
    torch.maximum(high, largest, out=high)


def _qtransform_by_tree(nodes: Nodes) -> Tensor:
    """Scale q to [0, 1] within the bounds of the tree; `nodes` are all nodes in order."""
    tree, trees, actions = nodes.tree, nodes.tree.num_trees, nodes.tree.num_actions
    visited = nodes.children_visits.clamp_max(1)
    total, count = sum_over_actions(nodes.children_q), visited.sum(0)
    count[trees:] += 1  # the mean one level up
    count.clamp_min_(1)
    above = tree.parent_edge.index_select(0, nodes.ids).div_(actions, rounding_mode="floor")
    means = total.new_zeros(trees + len(total))  # with those of nowhere, which stay 0
    mean, stop_early = means[trees:], total.device.type == "cpu"  # on a GPU the comparison would wait for the device
    for _ in range(len(total) // trees):  # one level at a time
        next_mean = means.index_select(0, above).add_(total).div_(count)
        if stop_early and torch.equal(next_mean, mean):
            break
        mean.copy_(next_mean)
    low, high = tree.extra.bounds
    bounded = low < high
    low, span = torch.where(bounded, low, 0), torch.where(bounded, (high - low).clamp_min_(NARROWEST), 1)
    completed = torch.lerp(mean, nodes.children_q, visited).view(actions, -1, trees)
    return completed.sub_(low).div_(span).clamp_(0, 1).view(actions, -1)


def _take_highest(nodes: Nodes, scores: Tensor) -> Tensor:
    trees = nodes.tree.num_trees
    scores = scores.masked_fill(nodes.children_prior == 0, -math.inf)
    return take_highest(scores, nodes.tree.extra.ties[trees : trees + len(nodes.ids)].t(), TIE)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _widen_fused(arguments, tree, trees, least, largest):
    """Extend the bounds to include the path's q."""
    (bounds,) = arguments
    tl.store(bounds + tree, tl.minimum(least, tl.load(bounds + tree)))
    tl.store(bounds + trees + tree, tl.maximum(largest, tl.load(bounds + trees + tree)))


@jit
def _walk_down_fused(
    nodes,
    edges,
    children,
    ties,
    bounds,
    exploration,
    parent,
    action,
    trees,
    actions,
    count,
    tie,
    narrowest,
    WIDTH: tl.constexpr,
):
    """`select` for one tree: score on the way down. `count` is the number of all nodes. WIDTH: `padded` actions."""
    tree = tl.program_id(0).to(tl.int64)
    count = tl.cast(count, tl.int64)
    node = tree * 0  # no second name of next_node's value: test_two_names_of_one_value says why
    column = tl.arange(0, WIDTH)
    inside = column < actions
    low = tl.load(bounds + tree)
    high = tl.load(bounds + trees + tree)
    span = tl.where(low < high, tl.maximum(high - low, narrowest), 1.0)
    low = tl.where(low < high, low, 0.0)
    mean = 0.0
    taken = tree * 0
    next_node = tree + trees
    while next_node >= trees:
        node = next_node
        row = edges + node * actions + column
        children_visits = tl.load(row, mask=inside, other=0.0)
        children_q = tl.load(row + count * actions, mask=inside, other=0.0)
        prior = tl.load(row + 2 * count * actions, mask=inside, other=0.0)
        preference = tl.load(ties + node * actions + column, mask=inside, other=0.0)
        weight = tl.load(exploration + tl.load(nodes + node).to(tl.int64))
        visited = tl.minimum(children_visits, 1.0)
        means = tl.sum(visited, 0) + tl.where(node < 2 * trees, 0.0, 1.0)  # the mean one level up
        mean = (mean + tl.sum(children_q, 0)) / tl.maximum(means, 1.0)
        score = (children_q + (1 - visited) * mean - low) / span
        score = tl.minimum(tl.maximum(score, 0.0), 1.0) + prior * weight / (children_visits + 1)
        score = tl.where(inside & (prior > 0), score, float("-inf"))
        tied = score - tl.max(score, 0) + tie >= 0
        taken = tl.argmax(tl.where(tied, preference, float("-inf")), 0).to(tl.int64)
        next_node = tl.load(children + node * actions + taken)
    tl.store(action + tree, taken)
    tl.store(parent + tree, node)


def _select_fused(tree: SearchTree) -> Selection:
    parent, action = torch.empty_like(tree.ids[:2])
    _walk_down_fused[(tree.num_trees,)](
        tree.nodes,
        tree.edges,
        tree.children,
        tree.extra.ties,
        tree.extra.bounds,
        tree.extra.exploration,
        parent,
        action,
        tree.num_trees,
        tree.num_actions,
        tree.ids.numel(),
        TIE,
        NARROWEST,
        WIDTH=padded(tree.num_actions),
        num_warps=1,
    )
    return Selection(parent, action, parent[None])
