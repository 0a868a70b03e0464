"""MuZero's search rule as in google-deepmind/mctx.

The score of a child is q' + P f(N) sqrt(N) / (1 + N_a), with f(n) = pb_c_init + ln((n + pb_c_base + 1) / pb_c_base).
q' is q scaled to [0, 1] between the least and the largest of V and the q of visited children. Other children get the
least. Equal scores go to the larger prior, then to the first.

Source: Schrittwieser et al. 2020, Nature 588, arXiv 1911.08265, appendix B. Axes as in `tree_search`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from wmcli.kernels.dispatch import jit, tl
from wmcli.kernels.tree_search import FusedRule, Nodes, SearchRule, SearchTree, softmax

SMALLEST = 1e-8
"""Smallest range of values in a division."""
TINY = torch.finfo(torch.float32).tiny
FAR = 1e30
"""More than any difference of preferences, times the smallest difference of scores."""


class MctxExtra(NamedTuple):
    """Tensors of the rule."""

    exploration: Tensor
    """(S + 2,) float32: f(N) sqrt(N) at N visits."""


def mctx_rule(
    pb_c_init: float = 1.25, pb_c_base: float = 19652, dirichlet_alpha: float = 0.3, dirichlet_fraction: float = 0.25
) -> SearchRule:
    """Build the rule.

    Args:
        pb_c_init: Weight of the prior against the values.
        pb_c_base: Visits after which that weight begins to grow.
        dirichlet_alpha: Concentration of the noise in the root's prior.
        dirichlet_fraction: Share of the noise in the root's prior, in [0, 1].
    """

    def init_extra(tree: SearchTree, noise: Tensor | None) -> MctxExtra:
        visits = torch.arange(tree.num_simulations + 2, device=tree.ids.device)
        return MctxExtra(exploration_weight(visits, pb_c_init, pb_c_base))

    return SearchRule(
        score=score_puct,
        qtransform=qtransform_by_siblings,
        interior_action_selection_fn=_prefer_prior,
        root_prior=partial(mix_dirichlet, fraction=dirichlet_fraction),
        draw_noise=partial(_draw_noise, alpha=dirichlet_alpha),
        init_extra=init_extra,
    ).fuse(FusedRule(softmax, _choose_fused, arguments=lambda tree, simulation: (tree.extra.exploration, SMALLEST)))


def exploration_weight(visits: Tensor, pb_c_init: float, pb_c_base: float) -> Tensor:
    """Return f(N) sqrt(N), float32, at `visits` N."""
    visits = visits.double()
    return ((pb_c_init + torch.log((visits + pb_c_base + 1) / pb_c_base)) * visits.sqrt()).float()


def draw_dirichlet(num_trees: int, num_actions: int, alpha: float, generator: torch.Generator) -> Tensor:
    """Draw from a symmetric Dirichlet distribution, (E, A)."""
    return torch._sample_dirichlet(torch.full((num_trees, num_actions), alpha), generator)


def _draw_noise(
    num_trees: int, num_actions: int, num_simulations: int, generator: torch.Generator, alpha: float
) -> Tensor:
    return draw_dirichlet(num_trees, num_actions, alpha, generator)


def mix_dirichlet(logits: Tensor, noise: Tensor | None, fraction: float) -> Tensor:
    """Return the probabilities of `logits` (E, A) with a share of `noise` (E, A). Impossible actions get none of it."""
    prior = logits.float().softmax(-1)
    if noise is None:
        return prior
    possible = logits > -math.inf
    rest = noise * possible
    rest /= rest.sum(-1, keepdim=True).clamp_min_(TINY)
    return prior.lerp_(torch.where(possible.all(-1, keepdim=True), noise, rest), fraction)


def qtransform_by_siblings(nodes: Nodes) -> Tensor:
    """Scale q to [0, 1] among siblings and their parent's value."""
    value, q, visited = nodes.value, nodes.children_q, nodes.children_visits.clamp_max(1)
    completed = torch.lerp(value, q, visited)
    low, high = torch.minimum(completed.amin(0), value), torch.maximum(completed.amax(0), value)
    return torch.lerp(low, q, visited).sub_(low).div_(high.sub_(low).clamp_min_(SMALLEST))


def score_puct(nodes: Nodes, q: Tensor) -> Tensor:
    """Add the bonus for exploration, from `SearchTree.extra.exploration`."""
    weight = nodes.tree.extra.exploration.index_select(0, nodes.visits.long())
    return torch.addcdiv(q, nodes.children_prior * weight, nodes.children_visits + 1)


def take_highest(scores: Tensor, preference: Tensor, tolerance: float = 0.0) -> Tensor:
    """Return the action (R,) with the highest score (A, R).

    Scores less than `tolerance` apart are ties. They go to the largest `preference` (A, R), then to the first.
    """
    behind = scores - scores.amax(0)  # 0 for the highest, negative for others
    if tolerance:
        behind.add_(tolerance).clamp_max_(0)
    return torch.add(preference, behind, alpha=FAR, out=behind).max(0).indices


def _prefer_prior(nodes: Nodes, scores: Tensor) -> Tensor:
    return take_highest(scores, nodes.children_prior)


@jit
def _choose_fused(
    arguments, offsets, inside, at_root, visits, value, raw_value, children_visits, children_q, children_prior
):
    """Choose the action at a node."""
    exploration, smallest = arguments
    unvisited = children_visits == 0
    completed = tl.where(unvisited, value, children_q)
    low = tl.minimum(tl.min(tl.where(inside, completed, float("inf")), 0), value)
    high = tl.maximum(tl.max(tl.where(inside, completed, float("-inf")), 0), value)
    score = (tl.where(unvisited, low, children_q) - low) / tl.maximum(high - low, smallest)
    score += children_prior * tl.load(exploration + visits.to(tl.int64)) / (children_visits + 1)
    score = tl.where(inside, score, float("-inf"))
    preference = tl.where(score == tl.max(score, 0), children_prior, float("-inf"))
    return tl.argmax(tl.where(inside, preference, float("-inf")), 0).to(tl.int64)
