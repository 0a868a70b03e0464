"""Planning: a tree search in the world model at every frame, with no weights of its own.

Sources: MuZero (Schrittwieser et al. 2020, Nature 588, arXiv 1911.08265) and Gumbel MuZero (Danihelka et al. 2022,
ICLR). The rules by which a search chooses stand in `wmcli.kernels.tree_search`.

E frames searched side by side, A actions, S simulations.

All trees grow in lock step by one node a simulation, so that the model is asked for E nodes at once and every shape is
known beforehand. What is random is drawn before: a search is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from wmcli.controllers.base import Controller, ControllerSettings, Searched, State
from wmcli.kernels.tree_search import ROOT, Rule, backup, decision, plant, root_value, root_visits, select
from wmcli.nn.categorical import uniform
from wmcli.world_models.base import PlanningWorldModel, Prediction, WorldModel

Expand = Callable[[State, Tensor], tuple[Tensor, Tensor, Prediction, State]]
"""(state, action (E,)) -> reward (E,), terminated (E,) bool, prediction and state of what comes of it."""


class MCTSSettings(ControllerSettings):
    """Tree search with the world model's own policy and value."""

    searches: ClassVar[bool] = True

    kind: Literal["mcts"] = "mcts"
    """Monte Carlo tree search (MuZero, UniZero)."""
    simulations: int = Field(50, ge=1)
    """Nodes that a search adds to its tree, each for one step of the world model."""
    rule: Literal["mctx", "lightzero", "gumbel"] = "mctx"
    """How it chooses: MuZero's rule as in google-deepmind/mctx, the same as in opendilab/LightZero, or Gumbel MuZero's,
    which improves the policy with a few simulations already."""
    pb_c_init: float = Field(1.25, ge=0)
    """Weight of the prior against the values (not for gumbel)."""
    pb_c_base: float = Field(19652, gt=0)
    """Visits after which that weight begins to grow (not for gumbel)."""
    dirichlet_alpha: float = Field(0.3, gt=0)
    """Concentration of the noise in the root's prior while exploring (not for gumbel)."""
    dirichlet_fraction: float = Field(0.25, ge=0, le=1)
    """Share of the noise in the root's prior while exploring (not for gumbel)."""
    max_num_considered_actions: int = Field(16, ge=1)
    """Actions that the root looks into (gumbel)."""
    maxvisit_init: float = Field(50.0, ge=0)
    """Added to the visits of the most visited action, by which values are weighted against logits (gumbel)."""
    value_scale: float = Field(0.1, gt=0)
    """Times that sum, the weight of values against logits (gumbel)."""
    batch: int = Field(32, ge=1)
    """Frames searched in an update of reanalysis."""
    updates: int = Field(0, ge=0)
    """Updates of reanalysis each time the stage is called."""

    @property
    def acting_keys(self) -> tuple[str, ...]:
        return tuple(key for key in type(self).model_fields if key not in ("batch", "updates"))

    def build(self, world_model: WorldModel, size: int, repeated: Callable[[Callable], Callable]) -> MCTS:
        return MCTS(self, world_model.actions, repeated=repeated)


class SearchNoise(NamedTuple):
    """All that is random in a search. None leaves a part out."""

    dirichlet: Tensor | None = None
    """(E, A), to be mixed into the root's prior."""
    ties: Tensor | None = None
    """(E, S + 1, A) uniform in [0, 1): which of equal children of a node is taken ("lightzero")."""
    gumbel: Tensor | None = None
    """(E, A) standard Gumbel numbers, added to the root's logits ("gumbel")."""


class Found(NamedTuple):
    """What a search found at the roots."""

    visits: Tensor
    """(E, A) float32: how often each action was looked into; S in all."""
    value: Tensor
    """(E,) float32: mean of what the simulations came to."""
    policy: Tensor
    """(E, A) float32, to learn from: the shares of the visits; for "gumbel" the improved policy."""
    action: Tensor
    """(E,) int64: the most visited; for "gumbel" the one that halving left."""


def draw_noise(
    settings: MCTSSettings, rows: int, actions: int, device: torch.device, generator: torch.Generator
) -> SearchNoise:
    """Random numbers for a search from `rows` frames, the same on every device; `generator` is on the CPU."""
    if settings.rule == "gumbel":
        numbers = uniform((rows, actions), device, generator).clamp_min(torch.finfo(torch.float32).tiny)
        return SearchNoise(gumbel=-(-numbers.log()).log())
    concentration = torch.full((rows, actions), settings.dirichlet_alpha)
    dirichlet = torch._sample_dirichlet(concentration, generator)
    if device.type == "cuda":
        dirichlet = dirichlet.pin_memory().to(device, non_blocking=True)  # a copy from other memory would wait
    if settings.rule == "mctx":
        return SearchNoise(dirichlet)
    return SearchNoise(dirichlet, uniform((rows, settings.simulations + 1, actions), device, generator))


@torch.no_grad()
def search(
    root: Prediction,
    state: State,
    expand: Expand,
    settings: MCTSSettings,
    discount: float,
    noise: SearchNoise | None = None,
) -> Found:
    """Plan from E frames at once, each in a tree of its own.

    Args:
        root: policy and value of the frames.
        state: a tree of tensors (E, ...), the world model's at the frames.
        expand: one step of the world model. It is given states of many nodes, gathered.
        settings: the rules and their constants.
        discount: gamma, in (0, 1].
        noise: from `draw_noise`; None does not explore.
    """
    noise = noise or SearchNoise()
    rule = Rule(
        settings.rule,
        discount,
        settings.pb_c_init,
        settings.pb_c_base,
        settings.max_num_considered_actions,
        settings.maxvisit_init,
        settings.value_scale,
    )
    tree = plant(
        rule,
        settings.simulations,
        root.policy,
        root.value,
        dirichlet=noise.dirichlet,
        dirichlet_weight=settings.dirichlet_fraction,
        ties=noise.ties,
        gumbel=noise.gumbel,
    )
    leaves, structure = tree_flatten(state)
    kept = [leaf.new_empty(len(tree.ids), *leaf.shape) for leaf in leaves]  # the states of all nodes
    for leaf, place in zip(leaves, kept, strict=True):
        place[ROOT] = leaf
    for simulation in range(settings.simulations):
        selection = select(tree, rule, simulation)
        parents = [place.flatten(0, 1).index_select(0, selection.parent) for place in kept]
        reward, terminated, prediction, after = expand(tree_unflatten(parents, structure), selection.action)
        for leaf, place in zip(tree_leaves(after), kept, strict=True):
            place[ROOT + 1 + simulation] = leaf
        backup(tree, rule, simulation, selection, reward, terminated, prediction.policy, prediction.value)
    visits, value = root_visits(tree), root_value(tree)
    if settings.rule == "gumbel":
        return Found(visits, value, *decision(tree, rule))
    return Found(visits, value, visits / settings.simulations, visits.argmax(-1))


class MCTS(Controller):
    """Acts by searching in a `PlanningWorldModel`, whose policy and value learn from what is found.

    `actions` is the number A. It has no parameters; its state is what the last search found. `repeated` makes of a
    function of tensors one that is called many times with the same shapes, such as a recorded graph: a whole search is
    one call of it.
    """

    def __init__(
        self,
        settings: MCTSSettings,
        actions: int,
        repeated: Callable[[Callable[..., Found]], Callable[..., Found]] = lambda search: search,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.actions = actions
        self._repeated = repeated
        self._search: tuple[WorldModel, Callable[..., Found]] | None = None  # the model that it was made for
        self.register_buffer("place", torch.empty(0), persistent=False)  # it says on which device

    def initial_state(self, batch: int) -> Searched:
        """Nothing found: zeros."""
        place: Any = self.place
        return Searched(place.new_zeros(batch, self.actions), place.new_zeros(batch))

    def cleared(self, state: Searched, reset: Tensor) -> Searched:
        """`state` with zeros in the rows where `reset` (B,) is True."""
        return Searched(state.policy.masked_fill(reset[:, None], 0), state.value.masked_fill(reset, 0))

    def decide(
        self, world_model: WorldModel, world_state: State, state: Searched, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Searched]:
        """Search from the current frames.

        The logits (B, A) are the logarithms of the visits, so that temperature T makes them N^(1/T); for "gumbel" all
        but the chosen action have -inf. With a `generator` the search explores. See `Controller.decide`.
        """
        assert isinstance(world_model, PlanningWorldModel), type(world_model)
        assert world_model.draws == 0, "a search is a function of its arguments"
        root = world_model.root(world_state)
        noise = SearchNoise()
        if generator is not None:
            noise = draw_noise(self.settings, len(state.value), self.actions, state.value.device, generator)
        if self._search is None or self._search[0] is not world_model:
            self._search = world_model, self._repeated(partial(self._search_in, world_model))
        found = self._search[1](root, noise)
        logits = found.visits.log()
        if self.settings.rule == "gumbel":
            logits = torch.full_like(logits, -torch.inf).scatter(1, found.action[:, None], 0)
        return logits, Searched(found.policy.clone(), found.value.clone())  # the next search may write over these

    def _search_in(self, world_model: PlanningWorldModel, root: State, noise: SearchNoise) -> Found:
        def expand(node: State, action: Tensor) -> tuple[Tensor, Tensor, Prediction, State]:
            imagined, after = world_model.imagine(node, action)
            return imagined.reward, imagined.terminated, world_model.predict(after), after

        return search(world_model.predict(root), root, expand, self.settings, world_model.discount, noise)

    def found(self, state: Searched) -> Searched:
        """What the last `decide` found."""
        return state

    def follow(self, action: Tensor, state: Searched) -> Searched:
        """Nothing to remember."""
        return state

    def burn_in(self, world_model: WorldModel, world_state: State, action: Tensor, state: Searched) -> Searched:
        """Nothing to remember."""
        return state
