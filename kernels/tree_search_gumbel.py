"""Gumbel MuZero's search rule.

The score of a child is its prior logit + (maxvisit_init + largest N_a) value_scale q'. q' is q less its minimum among
siblings, divided by its range among them, or by `least_range` where that is larger. Children without a visit get a mix
of the model's value and the visited siblings' q by their priors. The root searches among the best of a few actions,
drawn without replacement, by sequential halving. At other nodes visits follow the improved policy, the softmax of the
scores. It is also the target for learning.

Source: Danihelka et al. 2022, ICLR; sequential halving: Karnin et al. 2013. Axes as in `tree_search`.
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
    PolicyOutput,
    SearchRule,
    SearchTree,
    log_softmax,
    sum_over_actions,
)

TINY = torch.finfo(torch.float32).tiny


class GumbelExtra(NamedTuple):
    """Tensors and constants of the rule."""

    gumbel: Tensor
    """(E, A) float32: standard Gumbel noise of the root's logits."""
    considered_visits: tuple[int, ...]
    """At each simulation, the visits of the root's actions to choose from."""
    explores: bool
    """Whether there is noise."""


def gumbel_rule(
    max_num_considered_actions: int = 16,
    maxvisit_init: float = 50.0,
    value_scale: float = 0.1,
    least_range: float = 1e-8,
) -> SearchRule:
    """Build the rule.

    Args:
        max_num_considered_actions: Actions that the root searches among.
        maxvisit_init: Summand of the weight of q against logits, besides the visits of the most visited action.
        value_scale: Factor of that weight.
        least_range: Smallest range among siblings that q is divided by, positive.
    """

    def init_extra(tree: SearchTree, noise: Tensor | None) -> GumbelExtra:
        if noise is None:
            gumbel = tree.nodes.new_zeros(tree.num_trees, tree.num_actions)
        else:
            gumbel = -(-noise.clamp_min(TINY).log()).log()
        considered = min(tree.num_actions, max_num_considered_actions)
        return GumbelExtra(gumbel, considered_visits(considered, tree.num_simulations), noise is not None)

    def arguments(tree: SearchTree, simulation: int) -> tuple[Tensor, int, float, float, float, float]:
        gumbel, visits, _ = tree.extra
        return gumbel, visits[simulation], maxvisit_init, value_scale, least_range, TINY

    qtransform = partial(_qtransform_by_mixed_value, least_range=least_range)
    score = partial(_score, maxvisit_init=maxvisit_init, value_scale=value_scale)
    return SearchRule(
        score=score,
        qtransform=qtransform,
        interior_action_selection_fn=_follow_policy,
        root_action_selection_fn=_halve,
        prior=_log_prior,
        draw_noise=_draw_uniforms,
        init_extra=init_extra,
        output=partial(_output, qtransform=qtransform, score=score),
    ).fuse(FusedRule(log_softmax, _choose_fused, arguments=arguments))


def considered_visits(num_considered_actions: int, num_simulations: int) -> tuple[int, ...]:
    """Return the visits that an action must have at each simulation to be chosen by sequential halving.

    All actions get the same number of visits, then the better half of them, and so on.
    """
    if num_considered_actions == 1:
        return tuple(range(num_simulations))
    rounds = math.ceil(math.log2(num_considered_actions))
    visits, remaining = [0] * num_considered_actions, num_considered_actions
    sequence: list[int] = []
    while len(sequence) < num_simulations:
        for _ in range(max(1, num_simulations // (rounds * remaining))):
            sequence += visits[:remaining]
            visits[:remaining] = [count + 1 for count in visits[:remaining]]
        remaining = max(2, remaining // 2)
    return tuple(sequence[:num_simulations])


def _draw_uniforms(num_trees: int, num_actions: int, num_simulations: int, generator: torch.Generator) -> Tensor:
    """Draw the uniforms (E, A) of the Gumbel noise."""
    return torch.rand(num_trees, num_actions, generator=generator)


def _log_prior(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def _qtransform_by_mixed_value(nodes: Nodes, least_range: float) -> Tensor:
    """Complete q by the mixed value, and divide it by its range among siblings, at least `least_range`."""
    visited = nodes.children_visits.clamp_max(1)
    weights = nodes.children_prior.exp().clamp_min_(TINY).mul_(visited)
    mean = sum_over_actions(weights * nodes.children_q).div_(sum_over_actions(weights).clamp_min_(TINY))
    mixed = torch.addcmul(nodes.raw_value, nodes.visits - 1, mean).div_(nodes.visits)
    completed = torch.lerp(mixed, nodes.children_q, visited)
    low, high = completed.amin(0), completed.amax(0)
    return completed.sub_(low).div_(high.sub_(low).clamp_min_(least_range))


def _score(nodes: Nodes, q: Tensor, maxvisit_init: float, value_scale: float) -> Tensor:
    """Return the logits of the improved policy."""
    weight = nodes.children_visits.amax(0).add_(maxvisit_init).mul_(value_scale)
    return torch.addcmul(nodes.children_prior, q, weight)


def _follow_policy(nodes: Nodes, scores: Tensor) -> Tensor:
    """Choose the action whose share of the visits is furthest behind the improved policy."""
    policy = (scores - scores.amax(0)).exp_()
    policy.div_(sum_over_actions(policy)).sub_(nodes.children_visits / nodes.visits)
    return policy.max(0).indices


def _halve(roots: Nodes, scores: Tensor) -> Tensor:
    """Choose the best action among those of the current round.

    With fewer possible actions than a round has, it goes on with those whose visits are nearest to the round's.
    """
    gumbel, visits, _ = roots.tree.extra
    away = (roots.children_visits - visits[roots.simulation]).abs_()
    away.masked_fill_(roots.children_prior == -math.inf, math.inf)
    others = away != away.amin(0)
    return (gumbel.t() + scores).masked_fill_(others, -math.inf).max(0).indices


def _output(roots: Nodes, qtransform: partial[Tensor], score: partial[Tensor]) -> PolicyOutput:
    """Return the improved policy, and what to act by.

    With noise that is the best of the most visited actions at any temperature, for it is a sample of the improved
    policy. Without noise it is the improved policy itself, in which that action is raised to the likeliest.
    """
    scores = score(roots, qtransform(roots))
    most_visited = roots.children_visits == roots.children_visits.amax(0)
    action = (roots.tree.extra.gumbel.t() + scores).masked_fill(~most_visited, -math.inf).argmax(0)
    visits = roots.children_visits.t()
    others = torch.full_like(visits, -torch.inf) if roots.tree.extra.explores else scores.t()
    best = scores.amax(0)
    logits = others.scatter(1, action[:, None], torch.nextafter(best, best + 1)[:, None])
    return PolicyOutput(visits, roots.value, scores.t().softmax(-1), logits)


@jit
def _choose_fused(
    arguments, offsets, inside, at_root, visits, value, raw_value, children_visits, children_q, children_prior
):
    """Choose the action at a node."""
    gumbel, considered, maxvisit_init, value_scale, least_range, tiny = arguments
    unvisited = children_visits == 0
    weights = tl.where(unvisited, 0.0, tl.maximum(tl.exp(children_prior), tiny))
    mean = tl.sum(weights * children_q, 0) / tl.maximum(tl.sum(weights, 0), tiny)
    completed = tl.where(unvisited, (raw_value + (visits - 1) * mean) / visits, children_q)
    low = tl.min(tl.where(inside, completed, float("inf")), 0)
    high = tl.max(tl.where(inside, completed, float("-inf")), 0)
    scale = (tl.max(children_visits, 0) + maxvisit_init) * value_scale
    score = children_prior + (completed - low) / tl.maximum(high - low, least_range) * scale
    score = tl.where(inside, score, float("-inf"))
    policy = tl.exp(score - tl.max(score, 0))
    preference = policy / tl.sum(policy, 0) - children_visits / visits
    noise = tl.load(gumbel + offsets, mask=inside, other=0.0)
    away = tl.where(inside & (children_prior > float("-inf")), tl.abs(children_visits - considered), float("inf"))
    at_considered = tl.where(away == tl.min(away, 0), score + noise, float("-inf"))
    preference = tl.where(at_root, at_considered, preference)
    return tl.argmax(tl.where(inside, preference, float("-inf")), 0).to(tl.int64)
