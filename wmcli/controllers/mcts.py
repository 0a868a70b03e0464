"""Tree search in the world model, at every frame. The search has no weights of its own.

All trees grow in lockstep by one node per simulation. The model steps E nodes at once, and all shapes are fixed. Random
numbers are drawn beforehand: a search is a function of its arguments.

Where actions are not `Discrete`, each node draws K of them from the policy. These are its candidates, among which the
search chooses by their numbers. They lie beside the state of the node, so the trees do not know them.

Axes: E frames searched in parallel, A actions or candidates, K candidates, U uniforms of an action, S simulations.

Source: MuZero (Schrittwieser et al. 2020, Nature 588, arXiv 1911.08265), Gumbel MuZero (Danihelka et al. 2022, ICLR),
Sampled MuZero (Hubert et al. 2021, arXiv 2104.06303).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from wmcli import ranks
from wmcli.controllers.base import Controller, ControllerSettings, SearchSummary, State
from wmcli.kernels.tree_search import (
    ROOT,
    PolicyOutput,
    SearchNoise,
    SearchRule,
    SearchTree,
    backup,
    plant,
    select,
    summarize,
)
from wmcli.kernels.tree_search_gumbel import gumbel_rule
from wmcli.kernels.tree_search_lightzero import lightzero_rule
from wmcli.kernels.tree_search_mctx import mctx_rule
from wmcli.nn.actions import no_action
from wmcli.nn.categorical import uniform
from wmcli.nn.policies import DiscretePolicy, Policy
from wmcli.spaces import ActionSpace, Discrete, to_action_space
from wmcli.transfer import to_device
from wmcli.world_models.base import PlanningWorldModel, Prediction, WorldModel

Expand = Callable[[State, Tensor], tuple[Tensor, Tensor, Prediction, State]]
"""(state, action (E,)) -> reward (E,), terminated (E,) bool, and the next state's prediction and the state itself."""


class MCTSSettings(ControllerSettings):
    """Tree search with the world model's own policy and value."""

    searches: ClassVar[bool] = True

    kind: Literal["mcts"] = "mcts"
    """Monte Carlo tree search (MuZero, UniZero)."""
    simulations: int = Field(50, ge=1)
    """Nodes that a search adds to its tree, one world-model step each. [simulations]"""
    sampled_actions: int = Field(20, ge=1)
    """Actions that each node draws from the policy and chooses among, where they are not discrete. [actions]"""
    rule: Literal["mctx", "lightzero", "gumbel"] = "mctx"
    """Selection rule: MuZero's as in google-deepmind/mctx or as in opendilab/LightZero, or Gumbel MuZero's, which
    improves the policy with few simulations."""
    pb_c_init: float = Field(1.25, ge=0)
    """Weight of the prior against the values (not for gumbel)."""
    pb_c_base: float = Field(19652, gt=0)
    """Visits after which the prior's weight begins to grow (not for gumbel). [simulations]"""
    dirichlet_alpha: float = Field(0.3, gt=0)
    """Concentration of the noise in the root's prior while exploring (not for gumbel)."""
    dirichlet_fraction: float = Field(0.25, ge=0, le=1)
    """Share of the noise in the root's prior while exploring (not for gumbel)."""
    max_num_considered_actions: int = Field(16, ge=1)
    """Largest number of actions searched at the root (gumbel). [actions]"""
    maxvisit_init: float = Field(50.0, ge=0)
    """Constant added to the most visited action's visits in the weight of values against logits (gumbel)."""
    value_scale: float = Field(0.1, gt=0)
    """Factor of the weight of values against logits (gumbel)."""
    least_range: float = Field(1e-8, gt=0)
    """Smallest range that the values of a node's actions are divided by (gumbel). With a tiny one, errors of the values
    count as much where all actions are worth the same as rewards do elsewhere. [rewards]"""
    batch: int = Field(32, ge=1)
    """Frames searched in an update of reanalysis. [frames]"""
    updates: int = Field(0, ge=0)
    """Updates of reanalysis in one call of the stage. [updates]"""

    @property
    def acting_keys(self) -> tuple[str, ...]:
        return tuple(key for key in type(self).model_fields if key not in ("batch", "updates"))

    def build(self, world_model: WorldModel, wrap_repeated: Callable[[Callable], Callable]) -> MCTS:
        return MCTS(self, world_model.action_space, wrap_repeated=wrap_repeated)


def build_rule(settings: MCTSSettings) -> SearchRule:
    """Build the rule that the settings name."""
    return RULES[settings.rule](settings)


RULES: dict[str, Callable[[MCTSSettings], SearchRule]] = {
    "mctx": lambda s: mctx_rule(s.pb_c_init, s.pb_c_base, s.dirichlet_alpha, s.dirichlet_fraction),
    "lightzero": lambda s: lightzero_rule(s.pb_c_init, s.pb_c_base, s.dirichlet_alpha, s.dirichlet_fraction),
    "gumbel": lambda s: gumbel_rule(s.max_num_considered_actions, s.maxvisit_init, s.value_scale, s.least_range),
}


@torch.no_grad()
def search(
    root: Prediction,
    state: State,
    expand: Expand,
    rule: SearchRule,
    num_simulations: int,
    discount: float,
    noise: SearchNoise = None,
) -> SearchTree:
    """Plan from E frames at once, each in a tree of its own.

    Args:
        root: Policy and value of the frames.
        state: The world model's state at the frames, a tree of tensors (E, ...).
        expand: One step of the world model, from the states of many nodes.
        rule: Selection rule.
        num_simulations: S.
        discount: Gamma, in (0, 1].
        noise: From `rule.draw_noise`, on the device of the state. None does not explore.

    Returns:
        The trees of the frames; `summarize` has policies, values and visits.
    """
    tree = plant(rule, num_simulations, discount, root.policy, root.value, noise)
    leaves, structure = tree_flatten(state)
    states = [leaf.new_empty(len(tree.ids), *leaf.shape) for leaf in leaves]  # of all nodes
    for leaf, place in zip(leaves, states, strict=True):
        place[ROOT] = leaf
    by_node = [place.flatten(0, 1) for place in states]
    for simulation in range(num_simulations):
        selection = select(tree, rule, simulation)
        parents = [place.index_select(0, selection.parent) for place in by_node]
        reward, terminated, prediction, after = expand(tree_unflatten(parents, structure), selection.action)
        for leaf, place in zip(tree_leaves(after), states, strict=True):
            place[ROOT + 1 + simulation] = leaf
        backup(tree, rule, simulation, selection, reward, terminated, prediction.policy, prediction.value)
    return tree


def draw_candidates(prediction: Prediction, policy: Policy, uniforms: Tensor) -> tuple[Prediction, Tensor]:
    """Draw candidates from the policies of nodes.

    The prior of a candidate is its share of the samples, as section 5 of Sampled MuZero has it for samples of the
    policy itself. Of equal samples the first one has their whole share, and the others have no prior.

    Args:
        prediction: Of E nodes.
        policy: Gives meaning to its policy.
        uniforms: (E, K, U).

    Returns:
        The prediction with logits (E, K) of the candidates, and the candidates (E, K, ...).
    """
    parameters = policy.parameters(prediction.policy)
    candidates = policy.sample(parameters[:, None].expand(-1, uniforms.shape[1], -1), uniforms)
    flat = candidates.reshape(*uniforms.shape[:2], -1)
    same = (flat[:, :, None] == flat[:, None]).all(-1)
    repeats = same.tril(-1).any(-1)
    return Prediction(same.sum(-1).log().masked_fill(repeats, -torch.inf), prediction.value), candidates


class MCTS(Controller):
    """Acts by searching in a `PlanningWorldModel`, whose policy and value learn from the searches.

    It has no parameters. Its state is the policy and value of the last search, and the candidates where it has drawn
    any. It draws those with fixed numbers where it does not explore.

    A custom rule is a `SearchRule`, one function or more on batches of nodes:

        def puct(nodes: Nodes, q: Tensor) -> Tensor:
            return q + 2 * nodes.children_prior * nodes.visits.sqrt() / (1 + nodes.children_visits)

        controller = MCTS(settings, actions, rule=SearchRule(score=puct))
    """

    def __init__(
        self,
        settings: MCTSSettings,
        actions: ActionSpace | int,
        rule: SearchRule | None = None,
        wrap_repeated: Callable[[Callable], Callable] = lambda search: search,
    ) -> None:
        """Build the controller.

        Args:
            settings: Number of simulations, and the name and constants of a built-in rule.
            actions: The actions, or the number of discrete ones.
            rule: Selection rule. None takes the rule that the settings name.
            wrap_repeated: Wraps a function of tensors for many calls with the same shapes, such as a recorded graph. A
                whole search is one call of it.
        """
        super().__init__()
        self.settings = settings
        self.action_space = space = to_action_space(actions)
        self.candidates = None if isinstance(space, Discrete) else settings.sampled_actions
        """K; None where the search chooses among all actions."""
        self.distribution = DiscretePolicy(space.count if isinstance(space, Discrete) else settings.sampled_actions)
        self.rule = build_rule(settings) if rule is None else rule
        self._wrap_repeated = wrap_repeated
        self.keep_tree = False
        """Keep the trees of a search in `tree`, for a look at them."""
        self.tree: SearchTree | None = None
        """Of the last search, with `keep_tree`; its next search overwrites it."""
        self._search: tuple[WorldModel, Callable] | None = None  # with the model of the function
        self.register_buffer("place", torch.empty(0), persistent=False)  # on the controller's device

    def initial_state(self, batch: int) -> SearchSummary:
        """Return zeros."""
        place: Any = self.place
        shape = batch, self.distribution.outputs
        sampled = None if self.candidates is None else no_action(self.action_space, shape, place.device)
        return SearchSummary(place.new_zeros(shape), place.new_zeros(batch), sampled)

    def clear_rows(self, state: SearchSummary, reset: Tensor) -> SearchSummary:
        """Return `state` with zeros in the rows where `reset` (B,) is True."""
        return tree_map_only(Tensor, lambda part: part.masked_fill(reset.view(-1, *[1] * (part.ndim - 1)), 0), state)

    def decide(
        self,
        world_model: WorldModel,
        world_state: State,
        state: SearchSummary,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, SearchSummary]:
        """Search from the current frames. See `Controller.decide`.

        Args:
            world_model: To search in.
            world_state: Its state at the frames.
            state: Of the controller.
            generator: On the CPU. With it the search explores.

        Returns:
            Logits (B, A) of the next action, or of the candidates, as the rule defines them, and the new state. For the
                visits N as policy, softmax at temperature T gives N^(1/T).
        """
        assert isinstance(world_model, PlanningWorldModel), type(world_model)
        assert world_model.uniforms_per_step == 0, "a search is a function of its arguments"
        root = world_model.root(world_state)
        device, trees, simulations = state.value.device, len(state.value), self.settings.simulations
        noise = uniforms = None
        if generator is not None:
            noise = self.rule.draw_noise(ranks.all_rows(trees), self.distribution.outputs, simulations, generator)
            noise = tree_map_only(Tensor, lambda part: to_device(ranks.own_rows(part), device), noise)
        if self.candidates is not None:
            each = simulations + 1, self.candidates, world_model.distribution.uniforms
            if generator is None:
                uniforms = uniform(each, device, torch.Generator().manual_seed(0)).expand(trees, *each)
            else:
                uniforms = uniform((trees, *each), device, generator)
        if self._search is None or self._search[0] is not world_model:
            self._search = world_model, self._wrap_repeated(partial(self._search_in, world_model))
        output, candidates, self.tree = self._search[1](root, noise, uniforms)
        # The next search may overwrite its output.
        summary = SearchSummary(output.policy.clone(), output.value.clone(), *(each.clone() for each in candidates))
        return output.logits.clone(), summary

    def _search_in(
        self, world_model: PlanningWorldModel, root: State, noise: SearchNoise, uniforms: Tensor | None
    ) -> tuple[PolicyOutput, tuple[Tensor, ...], SearchTree | None]:
        """Return the result of a search, its candidates (E, K, ...), if any, and with `keep_tree` its trees.

        Args:
            world_model: To search in.
            root: Its state at the frames.
            noise: Of the rule.
            uniforms: (E, S + 1, K, U) to draw the candidates of each node with; None without candidates.
        """
        of_nodes = iter(() if uniforms is None else uniforms.unbind(1))

        def predict(state: State) -> tuple[Prediction, tuple[Tensor, ...]]:
            prediction = world_model.predict(state)
            if uniforms is None:
                return prediction, ()
            prediction, candidates = draw_candidates(prediction, world_model.distribution, next(of_nodes))
            return prediction, (candidates,)

        def expand(node: State, action: Tensor) -> tuple[Tensor, Tensor, Prediction, State]:
            state, candidates = node
            imagined, after = world_model.imagine(state, _take(candidates[0], action) if candidates else action)
            prediction, candidates = predict(after)
            return imagined.reward, imagined.terminated, prediction, (after, candidates)

        prediction, candidates = predict(root)
        simulations, discount = self.settings.simulations, world_model.discount
        tree = search(prediction, (root, candidates), expand, self.rule, simulations, discount, noise)
        return summarize(tree, self.rule), candidates, tree if self.keep_tree else None

    def choose(
        self, parameters: Tensor, state: SearchSummary, temperature: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw actions, or candidates, by the logits of the search. See `Controller.choose`."""
        action = super().choose(parameters, state, temperature, generator)
        return action if state.sampled is None else _take(state.sampled.cpu(), action)

    def value(self, world_model: WorldModel, world_state: State, state: SearchSummary) -> Tensor:
        """Return the model's value (B,) of the last perceived frame, without a search."""
        assert isinstance(world_model, PlanningWorldModel), type(world_model)
        return world_model.predict(world_model.root(world_state)).value

    def summarize_search(self, state: SearchSummary) -> SearchSummary:
        """Return the results of the last search, which are the state."""
        return state


def _take(candidates: Tensor, index: Tensor) -> Tensor:
    """Return the candidates (E, ...) of (E, K, ...) that `index` (E,) names."""
    return candidates[torch.arange(len(index), device=index.device), index]
