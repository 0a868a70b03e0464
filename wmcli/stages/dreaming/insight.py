"""Models looked into, as plain values for JSON: policies, latents, uncertainty, search trees.

All of one frame. A actions, K latent variables of C classes, M nodes of a tree.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wmcli.kernels.tree_search import DISCOUNT, PRIOR, REWARD, ROOT, VALUE_SUM, VISITS, Q, SearchTree
from wmcli.nn.categorical import entropy
from wmcli.nn.policies import CategoriesPolicy, DiscretePolicy, Policy

MOST_NUMBERS = 256  # of a latent of real numbers; their means stand for more
MOST_NODES = 120  # of a tree, the most visited ones


def policy_of(distribution: Policy, parameters: Tensor) -> list[float] | None:
    """Return the probabilities of all actions (A), or of each category in turn; None for continuous actions.

    Args:
        distribution: Gives meaning to the parameters.
        parameters: (1, P).
    """
    if isinstance(distribution, DiscretePolicy):
        return _plain(parameters[0].float().softmax(-1))
    if type(distribution) is CategoriesPolicy:
        parts = parameters[0].float().split(distribution.sizes, -1)
        return [share for part in parts for share in _plain(part.softmax(-1))]
    return None


def latent_of(latent: Tensor, feature_shape: tuple[int, ...], codes: int | None) -> dict[str, Any]:
    """Describe the latent of a frame.

    Args:
        latent: (1, ...): tokens (1, K) int64, one-hot vectors or probabilities (1, K, C), or any numbers.
        feature_shape: Of the world model. One of three axes has the tokens' grid in the last two.
        codes: Number of different tokens, None if it is not known.
    """
    values = latent[0].float().cpu() if latent.is_floating_point() else latent[0].cpu()
    if not latent.is_floating_point():
        count = values.numel()
        shape = list(feature_shape[-2:]) if len(feature_shape) == 3 else [1, count]
        if math.prod(shape) != count:
            shape = [1, count]
        return {"kind": "tokens", "shape": shape, "values": values.flatten().tolist(), "codes": codes}
    if values.ndim == 2 and _is_distribution(values):
        return {"kind": "classes", "shape": list(values.shape), "values": values.argmax(-1).tolist()}
    flat = values.flatten()
    if len(flat) > MOST_NUMBERS:
        flat = torch.nn.functional.adaptive_avg_pool1d(flat[None, None], MOST_NUMBERS)[0, 0]
    return {"kind": "numbers", "values": _plain(flat)}


def _is_distribution(values: Tensor) -> bool:
    return bool((values >= -1e-6).all()) and bool(((values.sum(-1) - 1).abs() < 1e-2).all())


def entropy_of(prior: Tensor | None) -> float | None:
    """Return the entropy of the next latent, summed over its variables [nats], from logits (1, K, C)."""
    if prior is None:
        return None
    log_p = prior[0].float().log_softmax(-1).clamp(min=-1e4)  # impossible codes have no probability
    return float(entropy(log_p))


def search_of(tree: SearchTree) -> dict[str, Any]:
    """Describe the only search tree.

    Returns:
        visits (A) and values (A) of the root's actions, `value` of the root, `nodes`: rows of parent, action, visits,
            q and prior, the root first and every parent before its children; and `line`: the places of the nodes on
            the most visited path.
    """
    assert tree.num_trees == 1
    actions, count = tree.num_actions, tree.num_simulations + 1
    nodes = tree.nodes[:, ROOT : ROOT + count].float().cpu()
    edges = tree.edges[:, ROOT : ROOT + count].float().cpu()
    prior = edges[PRIOR]
    if (prior < 0).any():  # a rule may keep log-probabilities
        prior = prior.softmax(-1)
    into = tree.parent_edge[ROOT : ROOT + count].cpu()
    visits, q = nodes[VISITS], nodes[Q]
    parent = into // actions - ROOT
    action = into % actions
    order = visits.argsort(descending=True, stable=True)[:MOST_NODES].sort().values.tolist()  # parents have more visits
    place = {node: index for index, node in enumerate(order)}
    rows = [[-1, -1, int(visits[0]), float(nodes[VALUE_SUM, 0] / visits[0]), 1.0]]
    for node in order[1:]:
        above, taken = int(parent[node]), int(action[node])
        rows.append([place[above], taken, int(visits[node]), float(q[node]), float(prior[above, taken])])
    return {
        "visits": [int(each) for each in edges[VISITS, 0]],
        "values": _plain(edges[Q, 0]),
        "value": rows[0][3],
        "nodes": rows,
        "line": _principal_line(rows),
    }


def searched_of(tree: SearchTree) -> dict[int, tuple[float, bool]]:
    """Return reward and end of each of the root's actions that the only search tree has tried."""
    assert tree.num_trees == 1
    places = slice(ROOT + 1, ROOT + 1 + tree.num_simulations)
    parent, action = tree.parent_edge[places] // tree.num_actions, tree.parent_edge[places] % tree.num_actions
    rows = zip(parent.tolist(), action.tolist(), tree.nodes[:, places].T.tolist(), strict=True)
    return {taken: (node[REWARD], not node[DISCOUNT]) for above, taken, node in rows if above == ROOT}


def _principal_line(rows: list[list[Any]]) -> list[int]:
    """Return the places of the nodes on the most visited path, the root first."""
    line = [0]
    while True:
        below = [index for index, row in enumerate(rows) if row[0] == line[-1]]
        if not below:
            return line
        line.append(max(below, key=lambda index: (rows[index][2], rows[index][3])))


def _plain(values: Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]
