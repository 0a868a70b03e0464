"""Grow search trees over tensors: E trees in lock step, one new leaf each per simulation.

`plant` makes the roots. `select` walks down every tree to the edge of its next leaf. `backup` adds the leaf and carries
its value up. A `SearchRule` defines all differences between algorithms. Rules of this package: `tree_search_mctx`,
`tree_search_lightzero`, `tree_search_gumbel`.

Every node stores its best action, so `select` takes one lookup per level. A backup scores all nodes that it changed in
one batch. The form in torch is the definition. The Triton form runs one program per tree in each direction.

Rewards and values after a termination are 0. An action with a logit of minus infinity has no prior, and the rules of
this package do not choose it.

Axes: E trees, A actions, S simulations, R nodes in a batch, M = S + 2 blocks of E nodes. Node m E + e is tree e's.
Block 0 is NOWHERE, the child of every edge without a node. Block 1 holds the roots. Simulation s adds block s + 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wmcli.kernels.dispatch import jit, on_triton, tl

NOWHERE, ROOT = 0, 1
VISITS, Q, VALUE_SUM, REWARD, DISCOUNT, RAW_VALUE = range(6)  # rows of `SearchTree.nodes`
PRIOR = 2  # row of `SearchTree.edges`, after VISITS and Q

SearchNoise = Any
"""A tree of tensors that begin with E."""


class SearchTree(NamedTuple):
    """The state of E searches, written in place."""

    nodes: Tensor
    """(6, M E) float32: visits; q = r + gamma V of the edge into the node; sum of the values backed up through it;
    reward and discount of that edge, the latter 0 from a termination on; the model's value."""
    edges: Tensor
    """(3, M E, A) float32: visits and q of the children, 0 without a visit; the prior."""
    children: Tensor
    """(M E A) int64: the node behind each edge."""
    parent_edge: Tensor
    """(M E) int64: the edge into each node; for a root an edge out of nowhere."""
    best_action: Tensor
    """(M E) int64: the action to take next."""
    best_child: Tensor
    """(M E) int64: the node behind it."""
    ids: Tensor
    """(M, E) int64: all nodes."""
    extra: Any = None
    """Tensors of the rule's own, from `SearchRule.init_extra`."""

    @property
    def num_trees(self) -> int:
        """E."""
        return self.ids.shape[1]

    @property
    def num_actions(self) -> int:
        """A."""
        return self.edges.shape[2]

    @property
    def num_simulations(self) -> int:
        """S."""
        return self.ids.shape[0] - 2


class Nodes(NamedTuple):
    """R nodes with their children, for a rule to read. The first E are the roots.

    Actions come first: on a CPU, reducing a few long rows is much faster than reducing within many short ones.
    """

    tree: SearchTree
    simulation: int
    """The simulation to choose for, from 0."""
    ids: Tensor
    """(R,) int64"""
    visits: Tensor
    """(R,) float32: N, the visit that made the node included."""
    value_sum: Tensor
    """(R,) float32: sum of the values backed up through the node."""
    raw_value: Tensor
    """(R,) float32: the model's value."""
    children_visits: Tensor
    """(A, R) float32: N_a."""
    children_q: Tensor
    """(A, R) float32: r + gamma V of the children, 0 without a visit."""
    children_prior: Tensor
    """(A, R) float32: as `SearchRule.prior` gave it."""

    @property
    def value(self) -> Tensor:
        """(R,) float32: V, the mean of the values backed up."""
        return self.value_sum / self.visits


class PolicyOutput(NamedTuple):
    """The result of E searches."""

    visits: Tensor
    """(E, A) float32: visits of the root's children; S in all."""
    value: Tensor
    """(E,) float32: the root's value by the search."""
    policy: Tensor
    """(E, A) float32: the target for policy learning; sums to 1."""
    logits: Tensor
    """(E, A) float32: to act by, at any temperature."""

    @property
    def action(self) -> Tensor:
        """(E,) int64: the action to take without exploration."""
        return self.logits.argmax(-1)


class Selection(NamedTuple):
    """The edges at which the trees grow."""

    parent: Tensor
    """(E,) int64: the node that gets a child."""
    action: Tensor
    """(E,) int64: the action of the new edge."""
    path: Tensor
    """(d, E) int64: from the root to the parent, then nowhere. In Triton only the parent."""


# -- rules -------------------------------------------------------------------------------------------------------------


def _softmax(logits: Tensor) -> Tensor:
    """Return prior probabilities."""
    return logits.float().softmax(-1)


def _keep_q(nodes: Nodes) -> Tensor:
    """Return q unscaled, 0 without a visit."""
    return nodes.children_q


def _take_highest(nodes: Nodes, scores: Tensor) -> Tensor:
    """Return the action with the highest score, the first of equals."""
    return scores.max(0).indices


def _draw_nothing(num_trees: int, num_actions: int, num_simulations: int, generator: torch.Generator) -> SearchNoise:
    """Return no noise."""


def _keep_nothing(tree: SearchTree, noise: SearchNoise) -> Any:
    """Return no tensors."""


def _output_visits(roots: Nodes) -> PolicyOutput:
    """Return the shares of the visits as policy, and the mean of the values backed up."""
    visits = roots.children_visits.t()
    return PolicyOutput(visits, roots.value, visits / roots.tree.num_simulations, visits.log())


@dataclass(frozen=True)
class SearchRule:
    """The functions by which a search chooses.

    Only `score` is required. All functions work on batches of nodes in plain torch. They must not write to their
    arguments and must not wait for the device (no `.item()`, no `if` on a tensor). UCB1, for instance:

        def ucb1(nodes: Nodes, q: Tensor) -> Tensor:
            bonus = (2 * nodes.visits.log() / nodes.children_visits).sqrt()
            return torch.where(nodes.children_visits > 0, q + bonus, torch.inf)

        controller = MCTS(settings, actions, rule=SearchRule(score=ucb1))

    `dataclasses.replace` changes single functions of a shipped rule.
    """

    score: Callable[[Nodes, Tensor], Tensor]
    """(nodes, transformed q (A, R)) -> scores of the children (A, R)."""
    qtransform: Callable[[Nodes], Tensor] = _keep_q
    """nodes -> q (A, R), scaled and completed for children without a visit."""
    interior_action_selection_fn: Callable[[Nodes, Tensor], Tensor] = _take_highest
    """(nodes, scores (A, R)) -> actions (R,) int64. Breaks ties."""
    root_action_selection_fn: Callable[[Nodes, Tensor], Tensor] | None = None
    """The same for the E roots. None: as at interior nodes."""
    prior: Callable[[Tensor], Tensor] = _softmax
    """Policy logits (E, A) -> the prior of a node (E, A), float32."""
    root_prior: Callable[[Tensor, SearchNoise], Tensor] | None = None
    """(policy logits (E, A), noise) -> the prior of the roots. None: `prior`."""
    draw_noise: Callable[[int, int, int, torch.Generator], SearchNoise] = _draw_nothing
    """(E, A, S, generator) -> noise on the generator's device, for searches that explore; others get None."""
    init_extra: Callable[[SearchTree, SearchNoise], Any] = _keep_nothing
    """(tree of roots, noise) -> the rule's own tensors, stored as `SearchTree.extra`."""
    update_extra: Callable[[SearchTree, Tensor, Tensor], None] | None = None
    """(tree, nodes (R,) on the paths just backed up, their q (R,)) -> None; writes `SearchTree.extra` in place. Leaves
    come last. Nodes below E pad shorter paths."""
    count_root_value: bool = True
    """Include the model's value of the root in the root's value."""
    rescore_all: bool = False
    """Choose again at every node after a backup. False: only on the path, sufficient if scores depend on a node's own
    row and its children."""
    output: Callable[[Nodes], PolicyOutput] = _output_visits
    """roots (E nodes) -> the result of the search."""
    fused: FusedRule | None = field(default=None, init=False)
    """The same rule in Triton. None runs it in torch on every device. A modified copy has none."""

    def fuse(self, fused: FusedRule) -> SearchRule:
        """Return the rule with a Triton form."""
        rule = replace(self)
        object.__setattr__(rule, "fused", fused)
        return rule


# -- growing -----------------------------------------------------------------------------------------------------------


def plant(
    rule: SearchRule, num_simulations: int, discount: float, logits: Tensor, value: Tensor, noise: SearchNoise = None
) -> SearchTree:
    """Build trees of roots.

    Args:
        rule: Rule of the searches.
        num_simulations: S, the calls of `select` and `backup` to make room for.
        discount: Gamma, in (0, 1].
        logits: (E, A), the model's policy at the roots.
        value: (E,), its value.
        noise: From `rule.draw_noise`, on the same device. None does not explore.

    Returns:
        The trees.
    """
    assert 0 < discount <= 1, discount
    (trees, actions), blocks = logits.shape, num_simulations + 2
    count = trees * blocks
    ids = torch.arange(count, device=logits.device).view(blocks, trees)
    nodes = value.new_zeros(6, blocks, trees, dtype=torch.float32)
    nodes[DISCOUNT, NOWHERE].fill_(1)  # values pass through nowhere unchanged on their way up
    nodes[DISCOUNT, ROOT].fill_(discount)
    nodes[VISITS, ROOT].fill_(1)
    nodes[RAW_VALUE, ROOT] = value
    if rule.count_root_value:
        nodes[VALUE_SUM, ROOT] = value
    edges = nodes.new_zeros(3, blocks, trees, actions)
    edges[PRIOR, ROOT] = rule.prior(logits) if rule.root_prior is None else rule.root_prior(logits, noise)
    tree = SearchTree(
        nodes=nodes.view(6, count),
        edges=edges.view(3, count, actions),
        children=ids[NOWHERE].repeat(blocks).repeat_interleave(actions),
        parent_edge=ids[NOWHERE].repeat(blocks) * actions,
        best_action=ids.new_zeros(count),
        best_child=ids[NOWHERE].repeat(blocks),
        ids=ids,
    )
    tree = tree._replace(extra=rule.init_extra(tree, noise))
    _choose(tree, rule, 0, ids[ROOT], nodes[:, ROOT])
    return tree


def select(tree: SearchTree, rule: SearchRule, simulation: int) -> Selection:
    """Walk down from every root to the first edge without a node. `simulation` counts from 0."""
    if rule.fused is not None and on_triton(tree.nodes):
        return rule.fused.select(tree)
    node, nowhere = tree.ids[ROOT], tree.ids[NOWHERE]
    stop_early = node.device.type == "cpu"  # on a GPU the comparison would wait for the device
    path = [node]
    for _ in range(simulation):  # the largest depth of a tree
        node = tree.best_child.index_select(0, node)
        if stop_early and torch.equal(node, nowhere):
            break
        path.append(node)
    walked = torch.stack(path)
    parent = walked.amax(0)  # children have larger numbers than their parents, and nowhere the smallest
    return Selection(parent, tree.best_action.index_select(0, parent), walked)


def backup(
    tree: SearchTree,
    rule: SearchRule,
    simulation: int,
    selection: Selection,
    reward: Tensor,
    terminated: Tensor,
    logits: Tensor,
    value: Tensor,
) -> None:
    """Add the leaves and back their values up.

    Args:
        tree: Written in place.
        rule: As given to `plant`.
        simulation: As given to `select`.
        selection: The edges of the leaves.
        reward: (E,), of these edges.
        terminated: (E,) bool, whether the episode ends on them.
        logits: (E, A), the model's policy at the leaves.
        value: (E,), its value.
    """
    if rule.fused is not None and on_triton(tree.nodes):
        _backup_triton(tree, rule.fused, simulation, selection, reward, terminated, logits, value)
        return
    parent, action, path = selection
    trees, actions = logits.shape
    block = simulation + ROOT + 1
    leaf, inside = tree.ids[block], slice(block * trees, (block + 1) * trees)
    edge = torch.add(action, parent, alpha=actions)
    tree.children.index_copy_(0, edge, leaf)
    tree.parent_edge[inside] = edge
    tree.edges[PRIOR, inside] = rule.prior(logits)
    before = tree.nodes[DISCOUNT].index_select(0, parent)
    reward = reward.float().masked_fill(before.logical_not(), 0)
    discount = before.masked_fill(terminated, 0)
    value = value.float()
    tree.nodes[REWARD:, inside] = torch.stack([reward, discount, value])

    nodes = torch.cat([path.flatten(), leaf])  # from the root down
    rows = tree.nodes.index_select(1, nodes)
    visits, q, value_sum, rewards, discounts, _ = rows.unbind(0)
    returns = [value]  # of each node on the path, from the leaf up
    levels = (table.view(-1, trees).unbind(0)[:0:-1] for table in (rewards, discounts))
    for reward, discount in zip(*levels, strict=True):
        returns.append(torch.addcmul(reward, discount, returns[-1]))
    visits += 1
    value_sum += torch.cat(returns[::-1])
    torch.addcmul(rewards, discounts, value_sum / visits, out=q)
    tree.nodes.index_copy_(1, nodes, rows)
    tree.edges[:PRIOR].view(PRIOR, -1).index_copy_(1, tree.parent_edge.index_select(0, nodes), rows[:PRIOR])
    if rule.update_extra is not None:
        rule.update_extra(tree, nodes, q)
    if rule.rescore_all:
        nodes, rows = tree.ids.view(-1)[trees : inside.stop], tree.nodes[:, trees : inside.stop]
    if simulation + 1 < tree.num_simulations:
        _choose(tree, rule, simulation + 1, nodes, rows)


def _choose(tree: SearchTree, rule: SearchRule, simulation: int, ids: Tensor, rows: Tensor) -> None:
    """Choose an action at the nodes `ids` (R,), the E roots first, with their `rows` (6, R) of `SearchTree.nodes`."""
    edges = tree.edges.index_select(1, ids).transpose(1, 2).contiguous()
    nodes = _nodes(tree, simulation, ids, rows, edges)
    scores = rule.score(nodes, rule.qtransform(nodes))
    if scores.shape != nodes.children_q.shape:
        shape, expected = tuple(scores.shape), tuple(nodes.children_q.shape)
        raise ValueError(f"the search rule's scores have shape {shape}, not {expected}: actions first, then nodes")
    action = rule.interior_action_selection_fn(nodes, scores)
    if rule.root_action_selection_fn is not None:
        trees = tree.num_trees
        roots = _nodes(tree, simulation, ids[:trees], rows[:, :trees], edges[:, :, :trees])
        action[:trees] = rule.root_action_selection_fn(roots, scores[:, :trees])
    tree.best_action.index_copy_(0, ids, action)
    edge = torch.add(action, ids, alpha=tree.num_actions)
    tree.best_child.index_copy_(0, ids, tree.children.index_select(0, edge))


def _nodes(tree: SearchTree, simulation: int, ids: Tensor, rows: Tensor, edges: Tensor) -> Nodes:
    """Return the nodes `ids` (R,) with their `rows` (6, R) of `tree.nodes` and `edges` (3, A, R) of `tree.edges`."""
    visits, _, value_sum, _, _, raw_value = rows.unbind(0)
    return Nodes(tree, simulation, ids, visits, value_sum, raw_value, *edges.unbind(0))


def summarize(tree: SearchTree, rule: SearchRule) -> PolicyOutput:
    """Return the result of the searches so far."""
    roots = slice(tree.num_trees, 2 * tree.num_trees)
    edges = tree.edges[:, roots].transpose(1, 2)
    return rule.output(_nodes(tree, tree.num_simulations, tree.ids[ROOT], tree.nodes[:, roots], edges))


def sum_over_actions(x: Tensor) -> Tensor:
    """Sum (A, R) to (R,), with the same bits for any R."""
    return x.t().contiguous().sum(1)


# -- Triton ------------------------------------------------------------------------------------------------------------
# One program per tree. It never reads its own writes again, because they may not be visible to its other threads yet.


@jit
def _walk_down(best_action, best_child, parent, action, trees):
    """`select` for one tree."""
    tree = tl.program_id(0).to(tl.int64)
    node = tree + trees
    next_node = tl.load(best_child + node)
    while next_node >= trees:
        node = next_node
        next_node = tl.load(best_child + node)
    tl.store(action + tree, tl.load(best_action + node))
    tl.store(parent + tree, node)


@jit
def _walk_up(
    nodes,
    edges,
    children,
    parent_edge,
    best_action,
    best_child,
    parent,
    action,
    rewards,
    ends,
    logits,
    values,
    arguments,
    trees,
    actions,
    count,
    block,
    logits_row,
    logits_action,
    PRIOR: tl.constexpr,
    CHOOSE: tl.constexpr,
    TRACK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`backup` for one tree.

    PRIOR, CHOOSE, TRACK and `arguments` come from a `FusedRule`. `count` is the number of all nodes. WIDTH is
    `padded` actions.
    """
    tree = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < actions
    count = tl.cast(count, tl.int64)
    own = tl.load(parent + tree)
    taken = tl.load(action + tree)
    leaf = block * trees + tree
    tl.store(children + own * actions + taken, leaf)
    tl.store(parent_edge + leaf, own * actions + taken)

    before = tl.load(nodes + 4 * count + own)
    reward = tl.where(before == 0, 0.0, tl.load(rewards + tree).to(tl.float32))
    discount = tl.where(tl.load(ends + tree) != 0, 0.0, before)
    value = tl.load(values + tree).to(tl.float32)
    returned = reward + discount * value
    tl.store(nodes + leaf, 1.0)
    tl.store(nodes + count + leaf, returned)
    tl.store(nodes + 2 * count + leaf, value)
    tl.store(nodes + 3 * count + leaf, reward)
    tl.store(nodes + 4 * count + leaf, discount)
    tl.store(nodes + 5 * count + leaf, value)

    policy = tl.load(logits + tree * logits_row + column * logits_action, mask=inside, other=float("-inf"))
    prior = PRIOR(policy.to(tl.float32))
    tl.store(edges + 2 * count * actions + leaf * actions + column, prior, mask=inside)
    offsets = tree * actions + column
    if CHOOSE is not None:
        none = tl.zeros((WIDTH,), tl.float32)
        first = (tree * 0 + 1).to(tl.float32)
        best = CHOOSE(arguments, offsets, inside, False, first, value, value, none, none, prior)
        tl.store(best_action + leaf, best)

    q = returned  # of the edge into the node below
    below = leaf
    below_visits = 1.0
    least = q
    largest = q
    node = own
    while node >= trees:
        visits = tl.load(nodes + node) + 1
        value_sum = tl.load(nodes + 2 * count + node) + returned
        reward = tl.load(nodes + 3 * count + node)
        discount = tl.load(nodes + 4 * count + node)
        row = edges + node * actions
        tl.store(row + taken, below_visits)
        tl.store(row + count * actions + taken, q)
        if CHOOSE is not None:
            here = column == taken
            children_visits = tl.where(here, below_visits, tl.load(row + column, mask=inside, other=0.0))
            children_q = tl.where(here, q, tl.load(row + count * actions + column, mask=inside, other=0.0))
            prior = tl.load(row + 2 * count * actions + column, mask=inside, other=0.0)
            best = CHOOSE(
                arguments,
                offsets,
                inside,
                node < 2 * trees,
                visits,
                value_sum / visits,
                tl.load(nodes + 5 * count + node),
                children_visits,
                children_q,
                prior,
            )
            tl.store(best_action + node, best)
            next_node = tl.load(children + node * actions + best)
            tl.store(best_child + node, tl.where(best == taken, below, next_node))
        q = reward + discount * (value_sum / visits)
        tl.store(nodes + node, visits)
        tl.store(nodes + count + node, q)
        tl.store(nodes + 2 * count + node, value_sum)
        least = tl.minimum(least, q)
        largest = tl.maximum(largest, q)
        returned = reward + discount * returned
        edge = tl.load(parent_edge + node)
        taken = edge % actions
        below = node
        below_visits = visits
        node = edge // actions
    if TRACK is not None:
        TRACK(arguments, tree, trees, least, largest)


@jit
def softmax(policy):
    """Return probabilities of logits, -inf outside."""
    policy -= tl.max(policy, 0)
    return tl.exp(policy) / tl.sum(tl.exp(policy), 0)


@jit
def log_softmax(policy):
    """Return log probabilities of logits, -inf outside."""
    policy -= tl.max(policy, 0)
    return policy - tl.log(tl.sum(tl.exp(policy), 0))


def _select_triton(tree: SearchTree) -> Selection:
    """Follow the stored actions."""
    parent, action = torch.empty_like(tree.ids[:2])
    grid = (tree.num_trees,)
    _walk_down[grid](tree.best_action, tree.best_child, parent, action, tree.num_trees, num_warps=1)
    return Selection(parent, action, parent[None])


class FusedRule(NamedTuple):
    """A rule in Triton, for one tree per program. `prior`, `choose` and `track` are jit functions.

    Vectors are over actions, padded to a power of two.
    """

    prior: Any
    """Logits -> the prior of a node."""
    choose: Any = None
    """(arguments, offsets of the tree's row in tables (E, A), inside, at_root, visits, value, raw_value,
    children_visits, children_q, children_prior) -> action int64. None: `select` does not follow stored actions."""
    track: Any = None
    """(arguments, tree, E, least q, largest q on the path). None tracks nothing."""
    arguments: Callable[[SearchTree, int], tuple[Any, ...]] = lambda tree, simulation: ()
    """(tree, the simulation to choose for) -> tensors and numbers for `choose` and `track`."""
    select: Callable[[SearchTree], Selection] = _select_triton
    """The way down."""


def padded(actions: int) -> int:
    """Round up to a power of two."""
    return 1 << (actions - 1).bit_length()


def _backup_triton(
    tree: SearchTree,
    fused: FusedRule,
    simulation: int,
    selection: Selection,
    reward: Tensor,
    terminated: Tensor,
    logits: Tensor,
    value: Tensor,
) -> None:
    _walk_up[(tree.num_trees,)](
        tree.nodes,
        tree.edges,
        tree.children,
        tree.parent_edge,
        tree.best_action,
        tree.best_child,
        selection.parent,
        selection.action,
        reward.contiguous(),
        terminated.contiguous(),
        logits,
        value.contiguous(),
        fused.arguments(tree, min(simulation + 1, tree.num_simulations - 1)),  # nothing follows the last simulation
        tree.num_trees,
        tree.num_actions,
        tree.ids.numel(),
        simulation + ROOT + 1,
        *logits.stride(),
        PRIOR=fused.prior,
        CHOOSE=fused.choose,
        TRACK=fused.track,
        WIDTH=padded(tree.num_actions),
        num_warps=1,
    )
