"""Tree search over tensors: E trees in lock step, each with one new leaf a simulation.

`select` walks every tree down to a leaf that is to be made, `backup` puts it in and takes its value up again. The form
in torch says what they mean and is what a CPU runs: a node remembers which child is best to look into (`Tree.next`), so
that the way down is one lookup a level, and what a backup changed is scored in one go. The Triton form walks a tree in
one program each way.

Three rules choose a child, by a node's visits N and mean value V, its children's visits N_a, prior P and
q = r + gamma V:

- "mctx": MuZero (Schrittwieser et al. 2020, arXiv 1911.08265) as google-deepmind/mctx has it. The score is
  q' + P f(N) sqrt(N) / (1 + N_a), with f(n) = pb_c_init + ln((n + pb_c_base + 1) / pb_c_base); q' is q scaled to [0, 1]
  between the least and the largest of V and the visited children's q, the least for children without a visit. Equal
  scores go to the larger prior, then to the first.
- "lightzero": as opendilab/LightZero has it. The score is q' + P f(N - 1) sqrt(N - 1) / (1 + N_a); q' is q scaled to
  [0, 1] between the least and the largest r + gamma V that any backup of the tree has met, at least 0.01 apart; for
  children without a visit it comes of the mean of the visited children's q, one level up counted in. Equal scores, to
  1e-6, go to the larger of given numbers. The root's own value does not count.
- "gumbel": Gumbel MuZero (Danihelka et al. 2022, ICLR). The root looks into the best of a few actions by sequential
  halving; below, visits follow an improved policy.

Nothing is earned behind a termination: rewards and values are 0 there.

Axes: E trees, A actions, S simulations, M = S + 2 blocks of E nodes: node m E + e is tree e's, 0 E + e is nowhere, the
child of every edge that leads to no node yet; block 1 holds the roots; block s + 2 is what simulation s adds.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wmcli.kernels.dispatch import jit, on_triton, tl

NOWHERE, ROOT = 0, 1
VISITS, Q, TOTAL, REWARD, DISCOUNT, VALUE = range(6)  # of `Tree.nodes`
PRIOR, TIES = 2, 3  # of `Tree.edges`, after VISITS and Q
TINY = torch.finfo(torch.float32).tiny
TIE = 1e-6  # scores closer than this are equal to "lightzero"
NARROWEST = 0.01  # the narrowest range of values that "lightzero" stretches to [0, 1]
SMALLEST = 1e-8  # what the other rules divide by at least
FAR = 1e30  # more than any preference, times the smallest difference of scores


class Rule(NamedTuple):
    """How a search chooses. A function of the settings and of the world model's discount."""

    kind: Literal["mctx", "lightzero", "gumbel"]
    discount: float
    """Gamma, in (0, 1]."""
    pb_c_init: float = 1.25
    pb_c_base: float = 19652
    considered: int = 16
    """gumbel: actions that the root looks into."""
    visit_constant: float = 50.0
    """gumbel: q counts (visit_constant + largest N_a) * value_scale against the logits."""
    value_scale: float = 0.1


class Tree(NamedTuple):
    """Everything that a search knows, written in place."""

    nodes: Tensor
    """(6, M E) float32: visits; q of the edge into the node; sum of the values that came up to it; reward and discount
    of the edge into it, the latter 0 from a termination on; the model's value of it."""
    edges: Tensor
    """(3, M E, A) float32: visits and q of the children, 0 without a visit; prior probabilities, their logarithms for
    "gumbel". For "lightzero" one more: of children with equal scores, the one with the largest is taken."""
    child: Tensor
    """(M E A) int64: the nodes that edges lead to."""
    slot: Tensor
    """(M E) int64: the edge that leads to a node; for a root one that goes out of nowhere."""
    choice: Tensor
    """(M E) int64: the action to look into."""
    next: Tensor
    """(M E) int64: the node that this leads to."""
    bounds: Tensor
    """(2, E) float32: least and largest value that backups have met ("lightzero")."""
    gumbel: Tensor
    """(E, A) float32, added to the root's logits ("gumbel")."""
    explore: Tensor
    """(S + 2,) float32: f(N) sqrt(N) of the rule, at N visits."""
    schedule: tuple[int, ...]
    """What `considered_visits` gave ("gumbel")."""
    ids: Tensor
    """(M, E) int64: all nodes."""


class Selection(NamedTuple):
    """Where each tree grows."""

    parent: Tensor
    """(E,) int64: the node that gets a child."""
    action: Tensor
    """(E,) int64: by this action."""
    path: Tensor
    """(d, E) int64: from the root to the parent, nowhere behind it; in Triton, which walks up by itself, the parent."""


def considered_visits(actions: int, simulations: int) -> tuple[int, ...]:
    """Sequential halving (Karnin et al. 2013) of so many actions: the visits that a root action must have before each
    simulation for it to be looked into then. All get the same number of visits, then the better half of them."""
    if actions == 1:
        return tuple(range(simulations))
    rounds = math.ceil(math.log2(actions))
    visits, remaining = [0] * actions, actions
    sequence: list[int] = []
    while len(sequence) < simulations:
        for _ in range(max(1, simulations // (rounds * remaining))):
            sequence += visits[:remaining]
            visits[:remaining] = [count + 1 for count in visits[:remaining]]
        remaining = max(2, remaining // 2)
    return tuple(sequence[:simulations])


def plant(
    rule: Rule,
    simulations: int,
    logits: Tensor,
    value: Tensor,
    *,
    dirichlet: Tensor | None = None,
    dirichlet_weight: float = 0.0,
    ties: Tensor | None = None,
    gumbel: Tensor | None = None,
) -> Tree:
    """Trees of nothing but roots, of policy logits (E, A) and values (E,).

    Args:
        rule: how they will grow.
        simulations: S, how often `select` and `backup` can be called.
        logits: the policy at the roots.
        value: the value of the roots.
        dirichlet: (E, A), mixed into the root's prior with weight `dirichlet_weight`; not for "gumbel".
        dirichlet_weight: in [0, 1].
        ties: (E, S + 1, A), for "lightzero": which of equal children is taken at the node of each index, the root
            first; None takes the first.
        gumbel: (E, A), for "gumbel"; None: zeros.
    """
    assert 0 < rule.discount <= 1, rule.discount
    (trees, actions), blocks = logits.shape, simulations + 2
    count = trees * blocks
    ids = torch.arange(count, device=logits.device).view(blocks, trees)
    nodes = value.new_zeros(6, blocks, trees, dtype=torch.float32)
    nodes[DISCOUNT, NOWHERE] = 1  # the way up goes through nowhere unchanged
    nodes[DISCOUNT, ROOT] = rule.discount
    nodes[VISITS, ROOT] = 1
    nodes[VALUE, ROOT] = value
    if rule.kind != "lightzero":
        nodes[TOTAL, ROOT] = value
    edges = nodes.new_zeros(4 if rule.kind == "lightzero" else 3, blocks, trees, actions)
    prior = edges[PRIOR, ROOT]
    prior.copy_(_prior(rule, logits))
    if dirichlet is not None:
        assert rule.kind != "gumbel"
        prior.lerp_(dirichlet, dirichlet_weight)
    if rule.kind == "lightzero":
        if ties is None:
            edges[TIES] = -torch.arange(actions, device=logits.device)
        else:
            edges[TIES, ROOT:] = ties.transpose(0, 1)
    bounds = nodes.new_full((2, trees), math.inf)
    bounds[1].neg_()
    tree = Tree(
        nodes=nodes.view(6, count),
        edges=edges.view(-1, count, actions),
        child=ids[NOWHERE].repeat(blocks).repeat_interleave(actions),
        slot=ids[NOWHERE].repeat(blocks) * actions,
        choice=ids.new_zeros(count),
        next=ids[NOWHERE].repeat(blocks),
        bounds=bounds,
        gumbel=nodes.new_zeros(trees, actions) if gumbel is None else gumbel.float(),
        explore=_explore(rule, blocks, logits.device),
        schedule=considered_visits(min(actions, rule.considered), simulations),
        ids=ids,
    )
    _rechoose(tree, rule, 0, ids[ROOT], nodes[:, ROOT])
    return tree


def _prior(rule: Rule, logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1) if rule.kind == "gumbel" else logits.float().softmax(-1)


def _explore(rule: Rule, most: int, device: torch.device) -> Tensor:
    visits = torch.arange(most, device=device, dtype=torch.float64)
    if rule.kind == "lightzero":
        visits = (visits - 1).clamp_min(0)
    return ((rule.pb_c_init + torch.log((visits + rule.pb_c_base + 1) / rule.pb_c_base)) * visits.sqrt()).float()


def select(tree: Tree, rule: Rule, simulation: int) -> Selection:
    """Walk down from every root to the first edge that leads nowhere yet. `simulation` counts from 0."""
    if on_triton(tree.nodes):
        return _select_triton(tree, rule)
    node, nowhere = tree.ids[ROOT], tree.ids[NOWHERE]
    ask = node.device.type == "cpu"  # on a GPU it would mean to wait
    path = [node]
    for _ in range(simulation):  # a tree cannot be deeper
        node = tree.next.index_select(0, node)
        if ask and torch.equal(node, nowhere):
            break
        path.append(node)
    walked = torch.stack(path)
    parent = walked.amax(0)  # children have larger numbers than their parents, and nowhere the smallest
    return Selection(parent, tree.choice.index_select(0, parent), walked)


def backup(
    tree: Tree,
    rule: Rule,
    simulation: int,
    selection: Selection,
    reward: Tensor,
    terminated: Tensor,
    logits: Tensor,
    value: Tensor,
) -> None:
    """Put the leaf in, and count its value in all nodes above.

    `reward` (E,) and `terminated` (E,) bool came of the action; policy `logits` (E, A) and `value` (E,) are the model's
    for what it led to.
    """
    if on_triton(tree.nodes):
        _backup_triton(tree, rule, simulation, selection, reward, terminated, logits, value)
        return
    parent, action, path = selection
    trees, actions = logits.shape
    block = simulation + ROOT + 1
    leaf, inside = tree.ids[block], slice(block * trees, (block + 1) * trees)
    edge = torch.add(action, parent, alpha=actions)
    tree.child.index_copy_(0, edge, leaf)
    tree.slot[inside] = edge
    tree.edges[PRIOR, inside] = _prior(rule, logits)
    before = tree.nodes[DISCOUNT].index_select(0, parent)
    reward = reward.float().masked_fill(before.logical_not(), 0)
    discount = before.masked_fill(terminated, 0)
    value = value.float()
    nothing = torch.zeros_like(value)

    above = path.flatten()
    new = torch.stack([nothing, nothing, nothing, reward, discount, value])
    nodes = torch.cat([above, leaf])  # from the root down
    rows = torch.cat([tree.nodes.index_select(1, above), new], 1)
    visits, q, total, rewards, discounts, _ = rows.unbind(0)
    came = [value]  # what comes up to each node, from the leaf up
    levels = (table.view(-1, trees).unbind(0)[:0:-1] for table in (rewards, discounts))
    for reward, discount in zip(*levels, strict=True):
        came.append(torch.addcmul(reward, discount, came[-1]))
    visits += 1
    total += torch.cat(came[::-1])
    torch.addcmul(rewards, discounts, total / visits, out=q)
    tree.nodes.index_copy_(1, nodes, rows)
    tree.edges[:PRIOR].view(PRIOR, -1).index_copy_(1, tree.slot.index_select(0, nodes), rows[:PRIOR])
    if rule.kind == "lightzero":
        _widen(tree, nodes, q)
        nodes, rows = tree.ids.view(-1)[trees : inside.stop], tree.nodes[:, trees : inside.stop]
    if block + 1 < len(tree.ids):
        _rechoose(tree, rule, simulation + 1, nodes, rows)


def _widen(tree: Tree, nodes: Tensor, q: Tensor) -> None:
    """Let the bounds hold q (R,) of `nodes` (R,), the leaves last."""
    trees = tree.ids.shape[1]
    nodes, q = nodes.view(-1, trees), q.view(-1, trees)
    least, largest = torch.where(nodes < trees, q[-1], q).aminmax(dim=0)  # nowhere has no value of its own
    low, high = tree.bounds
    torch.minimum(low, least, out=low)
    torch.maximum(high, largest, out=high)


# -- choosing ----------------------------------------------------------------------------------------------------------
# Actions come first here, (A, R): on a CPU, comparing a few long rows is much faster than comparing within short ones.


def _rechoose(tree: Tree, rule: Rule, simulation: int, nodes: Tensor, rows: Tensor) -> None:
    """Choose anew at `nodes` (R,), whose first E are the roots, for that simulation; `rows` are theirs of the table."""
    trees, actions = tree.gumbel.shape
    visits, _, total, _, _, value = rows.unbind(0)
    edges = tree.edges.index_select(1, nodes).transpose(1, 2).contiguous().unbind(0)
    child_visits, child_q, prior = edges[:TIES]
    if rule.kind == "gumbel":
        score = _gumbel_score(rule, visits, value, child_visits, child_q, prior)
        likely = (score - score.amax(0)).exp_()
        likely.div_(_sum(likely)).sub_(child_visits / visits)
        looked_into = child_visits[:, :trees] == tree.schedule[simulation]
        likely[:, :trees] = (tree.gumbel.t() + score[:, :trees]).masked_fill_(~looked_into, -math.inf)
        action = likely.max(0).indices
    else:
        if rule.kind == "mctx":
            score = _scaled_among_siblings(total / visits, child_visits, child_q)
        else:
            score = _scaled_in_tree(tree, nodes, child_visits, child_q)
        weight = tree.explore.index_select(0, visits.long())
        score.addcdiv_(prior * weight, child_visits + 1)
        behind = score.sub_(score.amax(0))  # 0 for the best, negative for others
        if rule.kind == "lightzero":
            behind.add_(TIE).clamp_max_(0)
        action = torch.add(edges[-1], behind, alpha=FAR).max(0).indices  # the first of equals
    tree.choice.index_copy_(0, nodes, action)
    tree.next.index_copy_(0, nodes, tree.child.index_select(0, torch.add(action, nodes, alpha=actions)))


def _sum(x: Tensor) -> Tensor:
    """Over actions, (A, R) to (R,). The sums over short rows are the same bits however many rows there are."""
    return x.t().contiguous().sum(1)


def _scaled_among_siblings(value: Tensor, child_visits: Tensor, child_q: Tensor) -> Tensor:
    """q (A, R) as "mctx" scales it; `value` (R,) is the nodes' own."""
    untried = 1 - child_visits.clamp_max(1)
    known = torch.addcmul(child_q, untried, value)
    low, high = torch.minimum(known.amin(0), value), torch.maximum(known.amax(0), value)
    return torch.addcmul(child_q, untried, low).sub_(low).div_(high.sub_(low).clamp_min_(SMALLEST))


def _scaled_in_tree(tree: Tree, nodes: Tensor, child_visits: Tensor, child_q: Tensor) -> Tensor:
    """q (A, R) as "lightzero" scales it; `nodes` (R,) are all nodes in order."""
    trees, actions = tree.gumbel.shape
    visited = child_visits.clamp_max(1)
    total, count = _sum(child_q), visited.sum(0)
    count[trees:] += 1  # the mean one level up
    count.clamp_min_(1)
    above = tree.slot.index_select(0, nodes).div_(actions, rounding_mode="floor")
    means = total.new_zeros(trees + len(nodes))  # with those of nowhere, which stay 0
    mean, ask = means[trees:], nodes.device.type == "cpu"
    for _ in range(len(nodes) // trees):  # a level a time
        better = means.index_select(0, above).add_(total).div_(count)
        if ask and torch.equal(better, mean):
            break
        mean.copy_(better)
    low, high = tree.bounds
    known = low < high
    low, span = torch.where(known, low, 0), torch.where(known, (high - low).clamp_min_(NARROWEST), 1)
    score = torch.addcmul(child_q, 1 - visited, mean).view(actions, -1, trees)
    return score.sub_(low).div_(span).clamp_(0, 1).view(actions, -1)


def _gumbel_score(
    rule: Rule, visits: Tensor, value: Tensor, child_visits: Tensor, child_q: Tensor, prior: Tensor
) -> Tensor:
    """Logits + sigma(completed q), (A, R), for log probabilities `prior` and the model's `value` (R,)."""
    visited = child_visits.clamp_max(1)
    weights = prior.exp().clamp_min_(TINY).mul_(visited)
    mean = _sum(weights * child_q).div_(_sum(weights).clamp_min_(TINY))
    mixed = torch.addcmul(value, visits - 1, mean).div_(visits)
    completed = torch.addcmul(child_q, 1 - visited, mixed)
    low, high = completed.amin(0), completed.amax(0)
    scaled = completed.sub_(low).div_(high.sub_(low).clamp_min_(SMALLEST))
    weight = child_visits.amax(0).add_(rule.visit_constant).mul_(rule.value_scale)
    return torch.addcmul(prior, scaled, weight)


# -- what was found ---


def root_visits(tree: Tree) -> Tensor:
    """(E, A) float32: how often each action was looked into first."""
    return tree.edges[VISITS].view(*tree.ids.shape, -1)[ROOT]


def root_value(tree: Tree) -> Tensor:
    """(E,) float32: the mean of what came up to the roots; for "lightzero" their own values count as 0."""
    return (tree.nodes[TOTAL] / tree.nodes[VISITS]).view(tree.ids.shape)[ROOT]


def decision(tree: Tree, rule: Rule) -> tuple[Tensor, Tensor]:
    """For "gumbel": the improved policy (E, A) at the roots, and the action (E,), the best of those visited most."""
    trees = tree.ids.shape[1]
    roots = slice(trees, 2 * trees)
    visits, q, prior = tree.edges[:3, roots].transpose(1, 2)
    score = _gumbel_score(rule, tree.nodes[VISITS, roots], tree.nodes[VALUE, roots], visits, q, prior)
    left = visits == visits.amax(0)
    action = (tree.gumbel.t() + score).masked_fill(~left, -math.inf).argmax(0)
    return score.t().softmax(-1), action


# -- Triton ------------------------------------------------------------------------------------------------------------
# One program a tree. What it writes it does not read again: other threads of it might not see it yet.


@jit
def _walk_down(
    nodes,
    edges,
    child,
    choice,
    following,
    bounds,
    explore,
    parent,
    action,
    trees,
    actions,
    count,
    tie,
    narrowest,
    LIGHTZERO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`select` for one tree. `count` nodes in all; `following` is `Tree.next`. WIDTH: actions, up to a power of two."""
    tree = tl.program_id(0).to(tl.int64)
    node = tree + trees
    if LIGHTZERO:
        column = tl.arange(0, WIDTH)
        inside = column < actions
        low = tl.load(bounds + tree)
        high = tl.load(bounds + trees + tree)
        span = tl.where(low < high, tl.maximum(high - low, narrowest), 1.0)
        low = tl.where(low < high, low, 0.0)
        mean = 0.0
        taken = tree * 0
        next_node = node
        while next_node >= trees:
            node = next_node
            row = edges + node * actions + column
            child_visits = tl.load(row, mask=inside, other=0.0)
            child_q = tl.load(row + count * actions, mask=inside, other=0.0)
            prior = tl.load(row + 2 * count * actions, mask=inside, other=0.0)
            preference = tl.load(row + 3 * count * actions, mask=inside, other=0.0)
            weight = tl.load(explore + tl.load(nodes + node).to(tl.int64))
            visited = tl.minimum(child_visits, 1.0)
            means = tl.sum(visited, 0) + tl.where(node < 2 * trees, 0.0, 1.0)  # the mean one level up
            mean = (mean + tl.sum(child_q, 0)) / tl.maximum(means, 1.0)
            score = (child_q + (1 - visited) * mean - low) / span
            score = tl.minimum(tl.maximum(score, 0.0), 1.0) + prior * weight / (child_visits + 1)
            score = tl.where(inside, score, float("-inf"))
            tied = score - tl.max(score, 0) + tie >= 0
            taken = tl.argmax(tl.where(tied, preference, float("-inf")), 0).to(tl.int64)
            next_node = tl.load(child + node * actions + taken)
        tl.store(action + tree, taken)
    else:
        next_node = tl.load(following + node)
        while next_node >= trees:
            node = next_node
            next_node = tl.load(following + node)
        tl.store(action + tree, tl.load(choice + node))
    tl.store(parent + tree, node)


@jit
def _best(
    visits,
    mean,
    value,
    child_visits,
    child_q,
    prior,
    weight,
    gumbel,
    inside,
    at_root,
    considered,
    visit_constant,
    value_scale,
    smallest,
    tiny,
    GUMBEL: tl.constexpr,
):
    """The action to look into at a node, as `_rechoose` has it."""
    untried = child_visits == 0
    if GUMBEL:
        weights = tl.where(untried, 0.0, tl.maximum(tl.exp(prior), tiny))
        weighted = tl.sum(weights * child_q, 0) / tl.maximum(tl.sum(weights, 0), tiny)
        guess = (value + (visits - 1) * weighted) / visits  # of children without a visit
    else:
        guess = mean
    known = tl.where(untried, guess, child_q)
    low = tl.min(tl.where(inside, known, float("inf")), 0)
    high = tl.max(tl.where(inside, known, float("-inf")), 0)
    if GUMBEL:
        scale = (tl.max(child_visits, 0) + visit_constant) * value_scale
        score = prior + (known - low) / tl.maximum(high - low, smallest) * scale
        score = tl.where(inside, score, float("-inf"))
        likely = tl.exp(score - tl.max(score, 0))
        key = likely / tl.sum(likely, 0) - child_visits / visits
        looked_into = tl.where(child_visits == considered, score + gumbel, float("-inf"))
        key = tl.where(at_root, looked_into, key)
    else:
        low = tl.minimum(low, mean)
        high = tl.maximum(high, mean)
        score = (tl.where(untried, low, child_q) - low) / tl.maximum(high - low, smallest)
        score += prior * weight / (child_visits + 1)
        score = tl.where(inside, score, float("-inf"))
        key = tl.where(score == tl.max(score, 0), prior, float("-inf"))
    return tl.argmax(tl.where(inside, key, float("-inf")), 0).to(tl.int64)


@jit
def _walk_up(
    nodes,
    edges,
    child,
    slot,
    choice,
    following,
    bounds,
    gumbel,
    explore,
    parent,
    action,
    rewards,
    ends,
    logits,
    values,
    trees,
    actions,
    count,
    block,
    considered,
    logits_row,
    logits_action,
    visit_constant,
    value_scale,
    smallest,
    tiny,
    LIGHTZERO: tl.constexpr,
    GUMBEL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`backup` for one tree, names as in `_walk_down`. `block` of the leaf; `considered`: what `Tree.schedule` says."""
    tree = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < actions
    own = tl.load(parent + tree)
    taken = tl.load(action + tree)
    leaf = block * trees + tree
    tl.store(child + own * actions + taken, leaf)
    tl.store(slot + leaf, own * actions + taken)

    before = tl.load(nodes + 4 * count + own)
    reward = tl.where(before == 0, 0.0, tl.load(rewards + tree).to(tl.float32))
    discount = tl.where(tl.load(ends + tree) != 0, 0.0, before)
    value = tl.load(values + tree).to(tl.float32)
    came = reward + discount * value
    tl.store(nodes + leaf, 1.0)
    tl.store(nodes + count + leaf, came)
    tl.store(nodes + 2 * count + leaf, value)
    tl.store(nodes + 3 * count + leaf, reward)
    tl.store(nodes + 4 * count + leaf, discount)
    tl.store(nodes + 5 * count + leaf, value)

    policy = tl.load(logits + tree * logits_row + column * logits_action, mask=inside, other=float("-inf"))
    policy = policy.to(tl.float32)
    policy -= tl.max(policy, 0)
    if GUMBEL:
        prior = policy - tl.log(tl.sum(tl.exp(policy), 0))
    else:
        prior = tl.exp(policy) / tl.sum(tl.exp(policy), 0)
    tl.store(edges + 2 * count * actions + leaf * actions + column, prior, mask=inside)
    wanted = tl.load(gumbel + tree * actions + column, mask=inside, other=0.0)
    if not LIGHTZERO:
        none = tl.zeros((WIDTH,), tl.float32)
        best = _best(
            1.0,
            value,
            value,
            none,
            none,
            prior,
            tl.load(explore + 1),
            wanted,
            inside,
            False,
            considered,
            visit_constant,
            value_scale,
            smallest,
            tiny,
            GUMBEL,
        )
        tl.store(choice + leaf, best)

    q = came  # of the edge into the node below, which is
    below = leaf
    below_visits = 1.0
    least = q
    largest = q
    node = own
    while node >= trees:
        visits = tl.load(nodes + node) + 1
        total = tl.load(nodes + 2 * count + node) + came
        reward = tl.load(nodes + 3 * count + node)
        discount = tl.load(nodes + 4 * count + node)
        row = edges + node * actions
        tl.store(row + taken, below_visits)
        tl.store(row + count * actions + taken, q)
        if not LIGHTZERO:
            here = column == taken
            child_visits = tl.where(here, below_visits, tl.load(row + column, mask=inside, other=0.0))
            child_q = tl.where(here, q, tl.load(row + count * actions + column, mask=inside, other=0.0))
            prior = tl.load(row + 2 * count * actions + column, mask=inside, other=0.0)
            best = _best(
                visits,
                total / visits,
                tl.load(nodes + 5 * count + node),
                child_visits,
                child_q,
                prior,
                tl.load(explore + visits.to(tl.int64)),
                wanted,
                inside,
                node < 2 * trees,
                considered,
                visit_constant,
                value_scale,
                smallest,
                tiny,
                GUMBEL,
            )
            tl.store(choice + node, best)
            next_node = tl.load(child + node * actions + best)
            tl.store(following + node, tl.where(best == taken, below, next_node))
        q = reward + discount * (total / visits)
        tl.store(nodes + node, visits)
        tl.store(nodes + count + node, q)
        tl.store(nodes + 2 * count + node, total)
        least = tl.minimum(least, q)
        largest = tl.maximum(largest, q)
        came = reward + discount * came
        edge = tl.load(slot + node)
        taken = edge % actions
        below = node
        below_visits = visits
        node = edge // actions
    if LIGHTZERO:
        tl.store(bounds + tree, tl.minimum(least, tl.load(bounds + tree)))
        tl.store(bounds + trees + tree, tl.maximum(largest, tl.load(bounds + trees + tree)))


def _width(actions: int) -> int:
    return 1 << (actions - 1).bit_length()


def _select_triton(tree: Tree, rule: Rule) -> Selection:
    trees, actions = tree.gumbel.shape
    parent, action = torch.empty_like(tree.ids[:2])
    _walk_down[(trees,)](
        tree.nodes,
        tree.edges,
        tree.child,
        tree.choice,
        tree.next,
        tree.bounds,
        tree.explore,
        parent,
        action,
        trees,
        actions,
        tree.ids.numel(),
        TIE,
        NARROWEST,
        LIGHTZERO=rule.kind == "lightzero",
        WIDTH=_width(actions),
        num_warps=1,
    )
    return Selection(parent, action, parent[None])


def _backup_triton(
    tree: Tree,
    rule: Rule,
    simulation: int,
    selection: Selection,
    reward: Tensor,
    terminated: Tensor,
    logits: Tensor,
    value: Tensor,
) -> None:
    trees, actions = tree.gumbel.shape
    following = min(simulation + 1, len(tree.schedule) - 1)  # after the last one nothing is chosen any more
    _walk_up[(trees,)](
        tree.nodes,
        tree.edges,
        tree.child,
        tree.slot,
        tree.choice,
        tree.next,
        tree.bounds,
        tree.gumbel,
        tree.explore,
        selection.parent,
        selection.action,
        reward.contiguous(),
        terminated.contiguous(),
        logits,
        value.contiguous(),
        trees,
        actions,
        tree.ids.numel(),
        simulation + ROOT + 1,
        tree.schedule[following],
        *logits.stride(),
        rule.visit_constant,
        rule.value_scale,
        SMALLEST,
        TINY,
        LIGHTZERO=rule.kind == "lightzero",
        GUMBEL=rule.kind == "gumbel",
        WIDTH=_width(actions),
        num_warps=1,
    )
