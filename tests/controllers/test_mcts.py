"""Test the tree search against a plain tree, against published counts, and as a controller.

E trees, A actions, S simulations.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map
from watching import Replayable, record_without_a_graph

from wmcli.controllers import mcts
from wmcli.controllers.mcts import MCTS, MCTSSettings, build_rule, draw_candidates
from wmcli.kernels.dispatch import using
from wmcli.kernels.tree_search import Nodes, PolicyOutput, SearchNoise, SearchRule, summarize
from wmcli.kernels.tree_search_gumbel import gumbel_rule
from wmcli.kernels.tree_search_lightzero import lightzero_rule
from wmcli.kernels.tree_search_mctx import mctx_rule, mix_dirichlet
from wmcli.nn.policies import DiscretePolicy, Policy, build_policy
from wmcli.spaces import ActionSpace, Categories, Continuous
from wmcli.training.graph import RecordedFunction
from wmcli.world_models.base import ImaginedStep, PlanningWorldModel, Prediction


def search(root, state, expand, rule, *options) -> PolicyOutput:
    """The results of the trees that `mcts.search` grows."""
    return summarize(mcts.search(root, state, expand, rule, *options), rule)


RULES = ["mctx", "lightzero", "gumbel"]


# -- a world of tables ---


class Tables(NamedTuple):
    """A random world of n places."""

    next: Tensor
    """(n, A) int64"""
    reward: Tensor
    """(n, A)"""
    terminated: Tensor
    """(n, A) bool"""
    logits: Tensor
    """(n, A)"""
    value: Tensor
    """(n,)"""

    def predict(self, place: Tensor) -> Prediction:
        return Prediction(self.logits[place], self.value[place])

    def expand(self, state: tuple[Tensor], action: Tensor):
        (place,) = state
        after = self.next[place, action]
        return self.reward[place, action], self.terminated[place, action], self.predict(after), (after,)

    def search(self, place: Tensor, settings: MCTSSettings, noise: SearchNoise = None) -> PolicyOutput:
        return self.search_by(build_rule(settings), settings.simulations, place, noise)

    def search_by(self, rule: SearchRule, simulations: int, place: Tensor, noise: SearchNoise = None) -> PolicyOutput:
        return search(self.predict(place), (place,), self.expand, rule, simulations, 0.97, noise)


def draw_noise(settings: MCTSSettings, trees: int, actions: int, seed: int) -> SearchNoise:
    return build_rule(settings).draw_noise(trees, actions, settings.simulations, torch.Generator().manual_seed(seed))


def tables(
    seed: int, actions: int, places: int = 60, ends: float = 0.15, peaked: float = 1, values: float = 1
) -> Tables:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    onward = torch.randint(places, (places, actions), generator=generator)
    terminated = torch.rand(places, actions, generator=generator) < ends
    reward, logits = normal(places, actions), peaked * normal(places, actions)
    return Tables(onward, reward, terminated, logits, values * normal(places))


# -- the same search, one tree of Python objects and float64 ---


@dataclass
class Node:
    place: int
    index: int
    prior: list[float]
    """Probabilities."""
    guess: float
    """The model's value."""
    reward: float = 0.0
    over: bool = False
    """The episode ended on the way to this node."""
    visits: int = 0
    total: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return self.total / self.visits


@dataclass
class PlainTree:
    world: Tables
    settings: MCTSSettings
    discount: float
    noise: dict[str, list[Any]]
    """Of each kind (dirichlet, ties, gumbel) that the search was given."""
    low: float = math.inf
    high: float = -math.inf

    def node(self, place: int, index: int, reward: float = 0.0, over: bool = False, behind: bool = False) -> Node:
        prior = self.world.logits[place].double().softmax(0).tolist()
        guess = 0.0 if over or behind else float(self.world.value[place])
        return Node(place, index, prior, guess, 0.0 if behind else reward, over or behind)

    def q(self, node: Node) -> float:
        return node.reward + self.discount * node.value

    def run(self, place: int) -> Node:
        root = self.node(place, 0)
        root.visits, root.total = 1, 0.0 if self.settings.rule == "lightzero" else root.guess
        if "dirichlet" in self.noise:
            weight = self.settings.dirichlet_fraction
            mixed = zip(root.prior, self.noise["dirichlet"], strict=True)
            root.prior = [(1 - weight) * p + weight * noise for p, noise in mixed]
        for simulation in range(self.settings.simulations):
            path, above = [root], 0.0
            while True:
                node = path[-1]
                action, above = self.choose(node, above, root, simulation)
                if action not in node.children:
                    break
                path.append(node.children[action])
            after = int(self.world.next[node.place, action])
            reward, over = float(self.world.reward[node.place, action]), bool(self.world.terminated[node.place, action])
            leaf = node.children[action] = self.node(after, simulation + 1, reward, over, behind=node.over)
            gain = leaf.guess
            for node in [leaf, *reversed(path)]:
                node.visits += 1
                node.total += gain
                self.low, self.high = min(self.low, self.q(node)), max(self.high, self.q(node))
                gain = node.reward + self.discount * gain
        return root

    def choose(self, node: Node, above: float, root: Node, simulation: int) -> tuple[int, float]:
        actions = range(len(node.prior))
        counts = [node.children[a].visits if a in node.children else 0 for a in actions]
        known = {a: self.q(child) for a, child in node.children.items()}
        if self.settings.rule == "gumbel":
            score = self.improved_logits(node)
            if node is root:
                wanted = self.halving()[simulation]
                return max((a for a in actions if counts[a] == wanted), key=lambda a: score[a] + self.gumbel(a)), 0.0
            policy = softmax(score)
            return max(actions, key=lambda a: policy[a] - counts[a] / (1 + sum(counts))), 0.0

        if self.settings.rule == "mctx":
            n = node.visits
            low, high = min([node.value, *known.values()]), max([node.value, *known.values()])
            scaled = [(known.get(a, low) - low) / max(high - low, 1e-8) for a in actions]
        else:
            n = node.visits - 1
            if node is root:
                above = sum(known.values()) / max(len(known), 1)
            else:
                above = (above + sum(known.values())) / (len(known) + 1)
            scaled = [known.get(a, above) for a in actions]
            if self.high > self.low:
                scaled = [(q - self.low) / max(self.high - self.low, 0.01) for q in scaled]
            scaled = [min(max(q, 0.0), 1.0) for q in scaled]
        base = self.settings.pb_c_base
        weight = (self.settings.pb_c_init + math.log((n + base + 1) / base)) * math.sqrt(n)
        score = [scaled[a] + node.prior[a] * weight / (1 + counts[a]) for a in actions]
        if self.settings.rule == "mctx":
            return max(actions, key=lambda a: (score[a], node.prior[a])), 0.0
        tied = [a for a in actions if score[a] >= max(score) - 1e-6]
        ties = self.noise.get("ties")
        return (tied[0] if ties is None else max(tied, key=lambda a: ties[node.index][a])), above

    def gumbel(self, action: int) -> float:
        return self.noise["gumbel"][action] if "gumbel" in self.noise else 0.0

    def improved_logits(self, node: Node) -> list[float]:
        actions = range(len(node.prior))
        known = {a: self.q(child) for a, child in node.children.items()}
        visits = sum(child.visits for child in node.children.values())
        weighted = sum(node.prior[a] * q for a, q in known.items()) / max(sum(node.prior[a] for a in known), 1e-300)
        mixed = (node.guess + visits * weighted) / (1 + visits)
        completed = [known.get(a, mixed) for a in actions]
        low, high = min(completed), max(completed)
        divisor = max(high - low, self.settings.least_range)
        most = max([child.visits for child in node.children.values()], default=0)
        weight = (self.settings.maxvisit_init + most) * self.settings.value_scale
        return [math.log(node.prior[a]) + weight * (completed[a] - low) / divisor for a in actions]

    def halving(self) -> list[int]:
        """For every simulation, the visits of the actions that it may choose from."""
        left = min(len(self.world.logits[0]), self.settings.max_num_considered_actions)
        simulations, phases, done, rounds = self.settings.simulations, math.ceil(math.log2(left)), 0, []
        while len(rounds) < simulations:
            each = max(1, simulations // (phases * left))
            rounds += [done + i for i in range(each) for _ in range(left)]
            done, left = done + each, max(2, left // 2)
        return rounds[:simulations]

    def decide(self, root: Node) -> tuple[list[float], int]:
        score = self.improved_logits(root)
        most = max(child.visits for child in root.children.values())
        last = [a for a, child in root.children.items() if child.visits == most]
        return softmax(score), max(last, key=lambda a: score[a] + self.gumbel(a))


def softmax(logits: list[float]) -> list[float]:
    return torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize(
    ("seed", "actions", "simulations", "peaked", "values", "least_range"),
    [(0, 3, 40, 1, 1, 1e-8), (1, 9, 50, 0.3, 1, 1.5), (2, 18, 30, 3, 1, 1e-8), (3, 2, 40, 1, 10, 1e-8)],
)
def test_equals_a_plain_tree(rules, explore, seed, actions, simulations, peaked, values, least_range):
    world, trees = tables(seed, actions, peaked=peaked, values=values), 6
    settings = MCTSSettings(
        rule=rules,
        simulations=simulations,
        pb_c_init=1.3,
        pb_c_base=300,
        dirichlet_fraction=0.4,
        max_num_considered_actions=7,
        maxvisit_init=40,
        value_scale=0.12,
        least_range=least_range,
    )
    place = torch.arange(trees)
    noise = draw_noise(settings, trees, actions, seed) if explore else None
    output = world.search(place, settings, noise)
    parts = named_noise(rules, noise)
    depths = set()
    for row in range(trees):
        mine = {name: part[row].tolist() for name, part in parts.items()}
        tree = PlainTree(world, settings, 0.97, mine)
        root = tree.run(int(place[row]))
        counts = [root.children[a].visits if a in root.children else 0 for a in range(actions)]
        assert output.visits[row].tolist() == counts
        assert float(output.value[row]) == pytest.approx(root.value, abs=1e-5)
        policy, action = [count / simulations for count in counts], counts.index(max(counts))
        if rules == "gumbel":
            policy, action = tree.decide(root)
        assert output.policy[row].tolist() == pytest.approx(policy, abs=1e-5)
        assert int(output.action[row]) == action
        depths.add(depth(root))
    assert max(depths) > 3, "deep enough to be worth it"


def named_noise(rules: str, noise: SearchNoise) -> dict[str, Tensor]:
    """Return the noise of a rule by name, the Gumbel noise made of its uniforms."""
    if noise is None:
        return {}
    if rules == "lightzero":
        return noise._asdict()
    return {"dirichlet": noise} if rules == "mctx" else {"gumbel": -(-noise.log()).log()}


def depth(node: Node) -> int:
    return 1 + max(map(depth, node.children.values()), default=0)


# -- published counts ---


def history_world(reward, value=lambda history: 0.0, root_logits=(0.0, 0.0, 0.0)):
    """Arguments for `search` where reward and value are functions of all actions so far; 3 actions, uniform priors.

    The state is the history as the digits of a number in base 4, each one more than the action.
    """

    def digits(code: int) -> tuple[int, ...]:
        return (*digits(code // 4), code % 4 - 1) if code else ()

    def expand(state, action):
        after = state[0] * 4 + action + 1
        histories = [digits(int(code)) for code in after]
        rewards, values = ([float(f(each)) for each in histories] for f in (reward, value))
        never = torch.zeros(len(after), dtype=torch.bool)
        prediction = Prediction(torch.zeros(len(after), 3), torch.tensor(values))
        return torch.tensor(rewards), never, prediction, (after,)

    return Prediction(torch.tensor([root_logits]), torch.tensor([float(value(()))])), (torch.tensor([0]),), expand


def bandit(history):  # T1
    return (0.1, 0.5, 0.2)[history[0]] if len(history) == 1 else 0.0


def two_steps(history):  # T2
    return history == (2, 1)


def distracted(history):  # T3
    return 0.1 if history == (0,) else two_steps(history)


def optimal(history):
    return {(): 0.997, (2,): 1.0}.get(history, 0.0)


@pytest.mark.parametrize(
    ("world", "simulations", "lightzero", "mctx"),
    [
        ((bandit,), 8, ([1, 6, 1], 0.366667), ([7, 1, 0], 0.133333)),
        ((bandit,), 50, ([3, 43, 4], 0.443137), ([7, 40, 3], 0.417647)),
        ((two_steps,), 16, ([3, 3, 10], 0.410529), ([3, 3, 10], 0.410529)),
        ((two_steps,), 50, ([3, 3, 44], 0.762412), ([3, 3, 44], 0.762412)),
        ((distracted,), 50, ([46, 2, 2], 0.090196), ([46, 2, 2], 0.090196)),
        ((distracted,), 100, ([54, 4, 42], None), ([53, 3, 44], None)),
        ((distracted, optimal), 50, ([3, 3, 44], 0.787843), ([3, 2, 45], 0.826941)),
        ((distracted, lambda history: 1.0), 50, ([5, 4, 41], None), None),
        ((bandit, lambda history: 0.0, (2.0, 0.0, -2.0)), 50, ([9, 41, 0], None), None),
    ],
)
def test_published_counts(world, simulations, lightzero, mctx):
    """Counts worked out with the public code of each rule; discount 0.997, the first of equals."""
    for rules, want in (("lightzero", lightzero), ("mctx", mctx)):
        if want is None:
            continue
        output = search(*history_world(*world), build_rule(MCTSSettings(rule=rules)), simulations, 0.997)
        visits, value = want
        assert output.visits[0].tolist() == visits, rules
        assert int(output.visits.sum()) == simulations
        assert value is None or float(output.value) == pytest.approx(value, abs=1e-6)


# -- many trees ---


@pytest.mark.parametrize("rules", RULES)
def test_many_trees_are_as_many_searches(rules):
    """Rows of very different depth and length of life, each with noise of its own."""
    world, trees = tables(5, 5, ends=0.3), 13
    world = world._replace(logits=world.logits * torch.linspace(0, 4, len(world.logits))[:, None])
    settings = MCTSSettings(rule=rules, simulations=40)
    noise = draw_noise(settings, trees, 5, seed=1)
    place = torch.arange(trees) * 4
    together = world.search(place, settings, noise)
    assert torch.equal(together.visits.sum(1), torch.full((trees,), 40.0))
    for row in range(trees):
        mine = tree_map(lambda part, row=row: part[row : row + 1], noise)
        alone = world.search(place[row : row + 1], settings, mine)
        assert torch.equal(alone.visits[0], together.visits[row]), row
        assert_close(alone.value[0], together.value[row])
        assert torch.equal(alone.action[0], together.action[row])


@pytest.mark.parametrize("rules", RULES)
def test_the_same_bits_twice_and_no_hidden_randomness(rules):
    world = tables(6, 9)
    settings = MCTSSettings(rule=rules, simulations=20)
    before = torch.get_rng_state()
    noise = [draw_noise(settings, 8, 9, seed=3) for _ in range(2)]
    first, second = (world.search(torch.arange(8), settings, each) for each in noise)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first.policy, world.search(torch.arange(8), settings).policy)


@pytest.mark.parametrize("rules", RULES)
def test_nothing_counts_behind_an_end(rules):
    """What a model says after a termination means nothing, however large it is."""
    world = tables(7, 4, places=30, ends=0.0)
    grave = torch.arange(30) >= 20  # every way into these ends the episode, and none leads back
    world = world._replace(
        next=torch.where(grave[:, None], 20 + world.next % 10, world.next), terminated=grave[world.next]
    )
    settings = MCTSSettings(rule=rules, simulations=60)
    calm = world.search(torch.arange(8), settings)
    shouted = world._replace(
        reward=world.reward + 1e6 * grave[:, None], value=world.value + 1e6 * grave, logits=world.logits
    )
    loud = shouted.search(torch.arange(8), settings)
    assert torch.equal(loud.visits, calm.visits)
    assert_close(loud.value, calm.value)
    assert_close(loud.policy, calm.policy)


@pytest.mark.parametrize("rules", RULES)
def test_statistics_are_float32(rules):
    """Predictions in bfloat16, and autocast, change nothing but the predictions."""
    low = tables(8, 6)
    low = low._replace(logits=low.logits.bfloat16(), value=low.value.bfloat16(), reward=low.reward.bfloat16())
    whole = low._replace(logits=low.logits.float(), value=low.value.float(), reward=low.reward.float())
    settings = MCTSSettings(rule=rules, simulations=30)
    want = whole.search(torch.arange(5), settings)
    with torch.autocast("cpu", torch.bfloat16):
        got = low.search(torch.arange(5), settings)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert {got.visits.dtype, got.value.dtype, got.policy.dtype} == {torch.float32}


@pytest.mark.parametrize("rules", RULES)
def test_nothing_depends_on_values_but_on_a_cpu(rules):
    """On tensors without data, as a GPU's are to the host, a search runs as well."""
    place = torch.zeros(4, dtype=torch.int64, device="meta")
    world = Tables(*(part.to("meta") for part in tables(0, 5)))

    def expand(state, action):
        assert {state[0].device.type, action.device.type} == {"meta"}
        size = len(action)
        prediction = Prediction(torch.empty(size, 5, device="meta"), torch.empty(size, device="meta"))
        return torch.empty(size, device="meta"), torch.empty(size, dtype=torch.bool, device="meta"), prediction, state

    prediction = Prediction(torch.empty(4, 5, device="meta"), torch.empty(4, device="meta"))
    output = search(prediction, (place,), expand, build_rule(MCTSSettings(rule=rules)), 5, 0.97)
    assert output.visits.shape == (4, 5) and world.value.is_meta


# -- what a search is for ---


@pytest.mark.parametrize(
    ("rules", "simulations", "foresight"), [("mctx", 1000, 0.0), ("lightzero", 200, 0.0), ("gumbel", 50, 1.0)]
)
def test_finds_the_best_first_action(rules, simulations, foresight):
    """Two steps with three actions, uniform priors: the best of nine ways, by search alone.

    "gumbel" improves a policy rather than looks for the best way: it is told what the second steps are worth.
    """
    trees, discount = 40, 0.95
    first, second = torch.rand(12, trees, generator=torch.Generator().manual_seed(0)).T.split([3, 9], 1)
    worth = second.reshape(trees, 3, 3).amax(2)
    best = first + discount * worth

    def expand(state, action):
        row, way = state
        reward = torch.where(way < 0, first[row, action], second[row, (3 * way + action).clamp(min=0)])
        value = foresight * worth[row, action]
        return reward, way >= 0, Prediction(torch.zeros(trees, 3), value), (row, torch.where(way < 0, action, way))

    rows, start = torch.arange(trees), torch.full((trees,), -1)
    root = Prediction(torch.zeros(trees, 3), foresight * best.amax(1))
    output = search(root, (rows, start), expand, build_rule(MCTSSettings(rule=rules)), simulations, discount)
    clear = best.topk(2).values.diff().squeeze(1).neg() > 0.1
    assert clear.sum() > 20
    assert torch.equal(output.action[clear], best.argmax(1)[clear])


def bandits(rows: int, actions: int):
    """Arguments for `search` with a random prior, exact values and one step; the actions' values (E, A)."""
    generator = torch.Generator().manual_seed(2)
    q, logits = torch.randn(2, rows, actions, generator=generator).unbind(0)
    prior_value = (q * logits.softmax(1)).sum(1)

    def expand(state, action):
        reward = state[0].gather(1, action[:, None]).squeeze(1)
        over = torch.ones(len(reward), dtype=torch.bool)
        return reward, over, Prediction(logits, torch.zeros(len(reward))), state

    return (Prediction(logits, prior_value), (q,), expand), q, prior_value


def test_gumbel_improves_the_policy_with_eight_simulations():
    """With all q known the new policy is never worse than the prior (Danihelka et al. 2022, section 4)."""
    world, q, prior_value = bandits(200, 8)
    output = search(*world, gumbel_rule(), 8, 1.0)
    assert torch.equal(output.visits, torch.ones_like(q))
    gain = (output.policy * q).sum(1) - prior_value
    assert float(gain.min()) >= -1e-5 and float(gain.mean()) > 0.5
    assert_close(output.policy.sum(1), torch.ones(200))


def test_gumbel_acts_better_than_the_prior_with_fewer_simulations_than_actions():
    world, q, prior_value = bandits(400, 20)
    rule = gumbel_rule(max_num_considered_actions=4)
    noise = rule.draw_noise(400, 20, 8, torch.Generator().manual_seed(0))
    output = search(*world, rule, 8, 1.0, noise)
    assert int((output.visits > 0).sum(1).max()) == 4
    # the action is the best of four drawn from the prior without replacement
    drawn = (named_noise("gumbel", noise)["gumbel"] + world[0].policy).topk(4).indices
    gain = q.gather(1, output.action[:, None]).squeeze(1) - prior_value
    assert bool((drawn == output.action[:, None]).any(1).all())
    assert float(gain.mean()) > 0.5


@pytest.mark.parametrize("rules", ["mctx", "lightzero"])
def test_the_concentration_of_the_noise_is_the_settings_own(rules):
    """With concentration alpha in A places the mean of the sum of squares is (alpha + 1) / (A alpha + 1)."""
    settings = MCTSSettings(rule=rules, simulations=1, dirichlet_alpha=2.0)
    noise = named_noise(rules, draw_noise(settings, 4000, 5, seed=0))["dirichlet"]
    assert float(noise.square().sum(1).mean()) == pytest.approx(3 / 11, rel=0.02)


def test_noise_at_the_root():
    """The first simulation follows the mixed prior; ties are broken uniformly, and anew in every row."""
    rule, generator = mctx_rule(dirichlet_fraction=0.5), torch.Generator().manual_seed(0)
    world, _, _ = bandits(50, 6)
    noise = rule.draw_noise(50, 6, 1, generator)
    assert_close(noise.sum(1), torch.ones(50))
    mixed = 0.5 * world[0].policy.softmax(1) + 0.5 * noise
    assert torch.equal(search(*world, rule, 1, 1.0, noise).action, mixed.argmax(1))

    rule = lightzero_rule()
    world, _, _ = bandits(3000, 3)
    noise = rule.draw_noise(3000, 3, 1, generator)
    shares = search(*world, rule, 1, 1.0, noise).visits.mean(0)
    assert_close(shares, torch.full((3,), 1 / 3), atol=0.03, rtol=0)


# -- impossible actions ---


@pytest.mark.parametrize("rules", RULES)
def test_impossible_actions_are_as_if_they_were_not_there(rules):
    """Those with a logit of minus infinity, in between the others and different at every place."""
    few, places = tables(5, 4), 60
    at = torch.rand(places, 6, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :4].sort(1).values

    def spread(part: Tensor, rest: float) -> Tensor:
        return torch.full((places, 6), rest, dtype=part.dtype).scatter(1, at, part)

    rows = [spread(part, rest) for part, rest in zip(few[:4], (0, 9.0, False, -math.inf), strict=True)]
    many = Tables(*rows, few.value)
    settings = MCTSSettings(rule=rules, simulations=30, max_num_considered_actions=4)
    place = torch.arange(20)
    want, got = few.search(place, settings), many.search(place, settings)
    assert torch.equal(got.visits.gather(1, at[:20]), want.visits)
    assert_close(got.value, want.value)
    assert_close(got.policy.gather(1, at[:20]), want.policy)
    assert (got.policy > 0).sum() == (got.policy.gather(1, at[:20]) > 0).sum()
    noise = draw_noise(settings, 20, 6, seed=1)
    exploring = many.search(place, settings, noise)
    assert not torch.equal(exploring.visits, got.visits)
    assert torch.equal(exploring.visits.gather(1, at[:20]).sum(1), torch.full((20,), 30.0))
    assert torch.isfinite(exploring.logits.gather(1, exploring.action[:, None])).all()


def test_noise_at_the_root_goes_to_possible_actions_alone():
    logits = torch.tensor([[0.0, -math.inf, 0.0], [1.0, 2.0, 3.0]])
    noise = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]])
    got = mix_dirichlet(logits, noise, 0.4)
    assert_close(got[0], 0.6 * torch.tensor([0.5, 0, 0.5]) + 0.4 * torch.tensor([0.25, 0, 0.75]))
    assert torch.equal(got[1], logits[1].softmax(0).lerp(noise[1], 0.4))


def test_gumbel_among_fewer_actions_than_a_round_has():
    """Three of twenty: visited by turns, and the best one is taken."""
    (root, state, expand), q, _ = bandits(100, 20)
    possible = torch.arange(20) < 3
    root = root._replace(policy=torch.zeros(100, 20).masked_fill(~possible, -math.inf))
    output = search(root, state, expand, gumbel_rule(), 50, 1.0)
    assert set(output.visits[:, :3].flatten().tolist()) == {16.0, 17.0} and not output.visits[:, 3:].any()
    clear = q[:, :3].topk(2).values.diff().squeeze(1).neg() > 0.1
    assert torch.equal(output.action[clear], q[clear, :3].argmax(1))


# -- rules of a user's own ---


def documented_example(documented: type) -> dict[str, Any]:
    """Run the example in a docstring; return its names."""
    indented = [line for line in inspect.getdoc(documented).splitlines() if line.startswith("    ") or not line]
    names = {"settings": MCTSSettings(), "actions": 5, "MCTS": MCTS}
    exec(
        textwrap.dedent("from __future__ import annotations\n") + textwrap.dedent("\n".join(indented)), globals(), names
    )
    return names


UCB1 = documented_example(SearchRule)["controller"].rule
PUCT = documented_example(MCTS)["controller"].rule


@pytest.mark.parametrize("rule", [UCB1, PUCT])
def test_a_users_rule_finds_the_best_arm(rule):
    (root, *world), q, _ = bandits(200, 5)
    root = root._replace(policy=0.1 * root.policy)
    output = search(root, *world, rule, 300, 1.0)
    assert torch.equal(output.visits.sum(1), torch.full((200,), 300.0))
    assert torch.equal(output.policy, output.visits / 300)
    clear = q.topk(2).values.diff().squeeze(1).neg() > 0.5
    assert clear.sum() > 50
    assert torch.equal(output.action[clear], q.argmax(1)[clear])
    assert not torch.equal(search(root, *world, mctx_rule(), 300, 1.0).visits, output.visits)


def test_the_first_of_equals_is_taken_unless_the_rule_says_otherwise():
    output = tables(1, 4).search_by(SearchRule(score=lambda nodes, q: 0 * q), 6, torch.arange(3))
    assert torch.equal(output.visits, torch.tensor([[6.0, 0, 0, 0]]).expand(3, -1))


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"scores have shape \(3, 4\), not \(4, 3\)"):
        tables(1, 4).search_by(SearchRule(score=lambda nodes, q: q.t()), 6, torch.arange(3))


def spelled_qtransform(nodes: Nodes) -> Tensor:
    """mctx's q between 0 and 1, in one line after the other."""
    visited = nodes.children_visits > 0
    known = torch.where(visited, nodes.children_q, nodes.value)
    low = torch.minimum(known.amin(0), nodes.value)
    high = torch.maximum(known.amax(0), nodes.value)
    return (torch.where(visited, nodes.children_q, low) - low) / (high - low).clamp_min(1e-8)


def spelled_choice(nodes: Nodes, scores: Tensor) -> Tensor:
    return torch.where(scores == scores.amax(0), nodes.children_prior, -1).max(0).indices


@pytest.mark.parametrize(("init", "base", "ties"), [(1.25, 19652, False), (0.0, 1e30, True)])
def test_a_users_rule_with_mctxs_formulas_gives_mctxs_search(init, base, ties):
    """The same bits. Without a bonus all children but the best visited one are equal."""

    def spelled_score(nodes: Nodes, q: Tensor) -> Tensor:
        n = nodes.visits.double()
        weight = (init + ((n + base + 1) / base).log()) * n.sqrt()
        return q + nodes.children_prior * weight.float() / (1 + nodes.children_visits)

    world, place = tables(4, 7), torch.arange(20)
    rule = SearchRule(spelled_score, spelled_qtransform, spelled_choice)
    want, got = (world.search_by(each, 50, place) for each in (mctx_rule(init, base), rule))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    first_of_equals = world.search_by(SearchRule(spelled_score, spelled_qtransform), 50, place)
    assert torch.equal(first_of_equals.visits, want.visits) is not ties


def test_the_roots_may_choose_by_a_function_of_their_own():
    """Round robin at the roots, and only there."""

    def round_robin(roots: Nodes, scores: Tensor) -> Tensor:
        assert scores.shape == roots.children_visits.shape == (4, 6)
        return torch.full_like(roots.ids, roots.simulation % 4)

    rule = replace(mctx_rule(), root_action_selection_fn=round_robin)
    output = tables(9, 4).search_by(rule, 22, torch.arange(6))
    assert torch.equal(output.visits, torch.tensor([[6.0, 6.0, 5.0, 5.0]]).expand(6, -1))
    below = replace(mctx_rule(), interior_action_selection_fn=lambda nodes, scores: scores.max(0).indices * 0)
    below = replace(below, root_action_selection_fn=round_robin)
    assert not torch.equal(tables(9, 4).search_by(below, 22, torch.arange(6)).value, output.value)


def test_a_rule_may_keep_tensors_of_its_own():
    """The number of backups, written by `update_extra`; noise for the prior of the roots."""
    seen = []

    def count(tree, nodes, q):
        assert nodes.shape == q.shape
        tree.extra.add_(1)
        seen.append(nodes[-len(tree.extra) :].tolist())

    rule = SearchRule(
        score=lambda nodes, q: nodes.children_prior - nodes.children_visits,
        root_prior=lambda logits, noise: logits.softmax(-1) if noise is None else noise,
        draw_noise=lambda trees, actions, simulations, generator: torch.rand(trees, actions, generator=generator),
        init_extra=lambda tree, noise: tree.nodes.new_zeros(tree.num_trees),
        update_extra=count,
        output=lambda roots: PolicyOutput(
            roots.children_visits.t(), roots.tree.extra, roots.children_prior.t(), roots.children_prior.t()
        ),
    )
    noise = rule.draw_noise(3, 4, 5, torch.Generator().manual_seed(0))
    output = tables(2, 4).search_by(rule, 5, torch.arange(3), noise)
    assert output.value.tolist() == [5.0] * 3
    assert torch.equal(output.policy, noise)
    assert seen == [[6 + 3 * s, 7 + 3 * s, 8 + 3 * s] for s in range(5)], "the leaves come last"


@pytest.mark.parametrize("rule", [mctx_rule(), gumbel_rule(), lightzero_rule(), UCB1, PUCT])
def test_a_search_never_waits_for_the_device(rule, monkeypatch):
    """Without the shortcuts of a CPU no operation needs its result on the host, and a graph can hold all of them."""
    world = tables(0, 5)
    place = torch.arange(4)
    want = world.search_by(rule, 12, place)
    monkeypatch.setattr(torch, "equal", lambda *_: False)  # the only question that a search asks, on a CPU alone
    with Replayable(), using("torch"):
        got = world.search_by(rule, 12, place)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# -- the controller ---


class Memory(PlanningWorldModel):
    """A recurrent model whose state is a nested tuple; every part of it is a function of all actions since the root."""

    frozen_encoder = True
    across_ends = False
    feature_shape = (3,)
    uniforms_per_step = 0
    actions = 4
    discount = 0.9

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("turn", torch.randn(4, 3, 3, generator=generator))
        self.register_buffer("look", torch.randn(3, 5, generator=generator))
        self.steps = 0
        self.eval()

    def root(self, state):
        return state

    def step(self, hidden: Tensor, action: Tensor) -> Tensor:
        return torch.tanh((self.turn[action] @ hidden[..., None]).squeeze(-1) + 0.1)

    def imagine(self, state, action, uniforms=None):
        history, (hidden, (table, age)) = state
        again = table[:, 0, :3]  # the state holds what it began with, and all actions: nothing got mixed up
        for k in range(int(age.max())):
            again = torch.where((k < age)[:, None], self.step(again, history[:, k]), again)
        assert_close(again, hidden)
        self.steps += 1
        history = history.scatter(1, age[:, None], action[:, None])
        hidden = self.step(hidden, action)
        reward = hidden[:, 0]
        return ImaginedStep(hidden, reward, hidden[:, 1] > 0.95), (history, (hidden, (table, age + 1)))

    def predict(self, state) -> Prediction:
        seen = state[1][0] @ self.look
        return Prediction(seen[:, :4], seen[:, 4])

    def start(self, rows: int):
        hidden = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
        age = torch.zeros(rows, dtype=torch.int64)
        history = torch.zeros(rows, 64, dtype=torch.int64)
        return history, (hidden, (hidden[:, None].expand(-1, 2, -1).clone(), age))

    def encode(self, observation):
        raise NotImplementedError

    loss = parameter_groups = observe = features = perceive = latent = encode


@pytest.mark.parametrize("rules", RULES)
def test_acts_on_an_opaque_state(rules):
    world, controller = Memory(), MCTS(MCTSSettings(rule=rules, simulations=12), 4)
    state = controller.initial_state(6)
    logits, after = controller.decide(world, world.start(6), state)
    assert world.steps == 12
    assert logits.shape == (6, 4) and logits.dtype == torch.float32
    summary, before = controller.summarize_search(after), controller.summarize_search(state)
    assert [part.shape for part in summary[:2]] == [part.shape for part in before[:2]] == [(6, 4), (6,)]
    assert summary.sampled is before.sampled is None
    assert_close(summary.policy.sum(1), torch.ones(6))
    assert_close(logits.softmax(1), summary.policy)
    again, _ = controller.decide(world, world.start(6), after)
    assert torch.equal(again, logits), "nothing is drawn without a generator"
    exploring, _ = controller.decide(world, world.start(6), after, torch.Generator().manual_seed(0))
    assert not torch.equal(exploring, logits)


def test_acts_by_a_users_rule():
    world, settings = Memory(), MCTSSettings(simulations=12)
    by_settings, by_user = MCTS(settings, 4), MCTS(settings, 4, rule=PUCT)
    same = MCTS(settings, 4, rule=mctx_rule())
    logits = [each.decide(world, world.start(6), each.initial_state(6))[0] for each in (by_settings, by_user, same)]
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits[1].exp().sum(1).round(), torch.full((6,), 12.0))


@pytest.mark.parametrize("rule", [mctx_rule(), lightzero_rule(), gumbel_rule(), UCB1])
def test_a_search_can_be_recorded_and_replayed(rule, monkeypatch):
    """It is a function of tensors alone, and never overwrites the output of an earlier search."""
    record_without_a_graph(monkeypatch)
    world, settings = Memory(), MCTSSettings(simulations=9)
    plain, recorded = MCTS(settings, 4, rule), MCTS(settings, 4, rule, wrap_repeated=RecordedFunction)
    earlier = []
    for seed in range(5):
        history, (hidden, (table, age)) = world.start(5)
        start = history, (hidden * (1 + seed), (table * (1 + seed), age))
        decisions = [
            player.decide(world, start, player.initial_state(5), torch.Generator().manual_seed(seed))
            for player in (plain, recorded)
        ]
        assert_close(decisions[1], decisions[0], rtol=0, atol=0)
        earlier.append(decisions)
    for of_plain, of_recorded in earlier:
        assert_close(of_recorded, of_plain, rtol=0, atol=0)
    other = Memory()
    other.look.mul_(-1)
    want, _ = plain.decide(other, other.start(5), plain.initial_state(5))
    got, _ = MCTS(settings, 4, rule, wrap_repeated=RecordedFunction).decide(
        other, other.start(5), plain.initial_state(5)
    )
    assert torch.equal(got, want)
    assert not torch.equal(want, plain.decide(world, world.start(5), plain.initial_state(5))[0]), "another model"


def test_logits_are_visits_or_the_improved_policy():
    """The agent's temperature is a power of the visits. Gumbel MuZero leaves one action while it explores."""
    world, q, _ = bandits(1, 3)
    output = search(*world, mctx_rule(), 50, 1.0)
    powers = output.visits**4
    assert_close((output.logits / 0.25).softmax(1), powers / powers.sum())
    assert_close(output.logits.softmax(1), output.policy)
    rule = gumbel_rule()
    output = search(*world, rule, 50, 1.0)
    assert_close(output.logits.softmax(1), output.policy)
    assert output.logits.argmax(1) == q.argmax(1)
    noise = rule.draw_noise(1, 3, 50, torch.Generator().manual_seed(1))
    output = search(*world, rule, 50, 1.0, noise)
    assert output.logits.softmax(1).sort().values.tolist() == [[0, 0, 1]]


def test_the_most_visited_action_is_gumbels_choice_without_noise():
    """An action without a visit may have the best score, by a high value of the root. It is not taken greedily."""
    (root, state, expand), _, _ = bandits(1, 9)
    output = search(root._replace(value=torch.full((1,), 99.0)), state, expand, gumbel_rule(2), 4, 1.0)
    visited = output.visits[0].nonzero()[:, 0]
    assert len(visited) == 2 and output.policy.argmax(1) not in visited
    assert output.action in visited


def test_its_state_is_policy_and_value_of_the_search():
    controller = MCTS(MCTSSettings(simulations=3), 4)
    assert not list(controller.parameters()) and not controller.state_dict()
    world = Memory()
    _, state = controller.decide(world, world.start(3), controller.initial_state(3))
    assert controller.follow(torch.zeros(3, dtype=torch.int64), state) is state
    assert controller.burn_in(world, world.start(3), torch.zeros(3, dtype=torch.int64), state) is state
    cleared = controller.clear_rows(state, torch.tensor([True, False, True]))
    assert torch.equal(cleared.policy[1], state.policy[1]) and not cleared.policy[::2].any()
    assert torch.equal(cleared.value != 0, torch.tensor([False, True, False]))
    fresh = controller.initial_state(3)
    assert all(torch.equal(a[::2], b[::2]) for a, b in zip(cleared[:2], fresh[:2], strict=True))


# -- candidates ---


def test_candidates_are_samples_and_their_priors_shares_of_the_samples():
    generator = torch.Generator().manual_seed(0)
    logits, value = torch.randn(7, 5, generator=generator), torch.randn(7, generator=generator)
    uniforms = torch.rand(7, 12, 1, generator=generator)
    prediction, candidates = draw_candidates(Prediction(logits, value), DiscretePolicy(5), uniforms)
    assert torch.equal(prediction.value, value) and prediction.policy.shape == candidates.shape == (7, 12)
    for row in range(7):
        shares = prediction.policy[row].softmax(0)
        drawn = candidates[row].tolist()
        for k, action in enumerate(drawn):
            want = drawn.count(action) / 12 if drawn.index(action) == k else 0.0
            assert float(shares[k]) == pytest.approx(want, abs=1e-6)
    whole, _ = draw_candidates(Prediction(logits, value), DiscretePolicy(5), torch.rand(7, 4000, 1))
    frequent, drawn = draw_candidates(Prediction(logits[:1], value[:1]), DiscretePolicy(5), torch.rand(1, 4000, 1))
    assert whole.policy.exp().sum() == pytest.approx(7 * 4000)
    for action, share in enumerate(logits[0].softmax(0).tolist()):
        assert float(frequent.policy.softmax(1)[drawn == action].sum()) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(("sizes", "same"), [((2, 3), True), ((40, 50), False)])
def test_actions_of_several_numbers_are_equal_if_all_numbers_are(sizes, same):
    policy = build_policy(Categories(sizes))
    prediction = Prediction(torch.zeros(3, policy.outputs), torch.zeros(3))
    uniforms = torch.rand(3, 20, 2, generator=torch.Generator().manual_seed(0))
    prediction, candidates = draw_candidates(prediction, policy, uniforms)
    for row in range(3):
        distinct = {tuple(each) for each in candidates[row].tolist()}
        assert int((prediction.policy[row] > -math.inf).sum()) == len(distinct)
        assert (len(distinct) <= 6) == same


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("count", [5, 9])
def test_a_sampled_search_is_a_plain_one_with_the_shares_for_policy(rules, count):
    """With five candidates all actions once, in any order; with nine some more often, and some not at all."""
    world, places, place = tables(4, 5), 60, torch.arange(12)
    settings = MCTSSettings(rule=rules, simulations=30, max_num_considered_actions=2)
    generator = torch.Generator().manual_seed(count)
    uniforms = torch.rand(places, count, 1, generator=generator)
    if count == 5:  # the middle of each action's interval, in any order
        cumulative = world.logits.softmax(1).cumsum(1)
        middle = cumulative - world.logits.softmax(1) / 2
        uniforms = middle.gather(1, torch.rand(places, 5, generator=generator).argsort(1))[..., None]

    def predict(place: Tensor) -> tuple[Prediction, Tensor]:
        return draw_candidates(world.predict(place), DiscretePolicy(5), uniforms[place])

    def expand(state, index):
        place, candidates = state
        action = candidates[torch.arange(len(index)), index]
        after = world.next[place, action]
        prediction, candidates = predict(after)
        return world.reward[place, action], world.terminated[place, action], prediction, (after, candidates)

    prediction, candidates = predict(place)
    got = search(prediction, (place, candidates), expand, build_rule(settings), 30, 0.97)

    # The same actions in the order in which they were drawn, since the first of equals is taken; then the absent ones.
    drawn = predict(torch.arange(places))[1].tolist()
    order = torch.tensor([[*dict.fromkeys(row), *(set(range(5)) - set(row))] for row in drawn])
    shares = torch.tensor([[row.count(action) for action in range(5)] for row in drawn]).gather(1, order)
    assert (shares == 1).all() == (count == 5) and (shares == 0).any() == (count > 5)
    named = (part.gather(1, order) for part in world[:3])
    want = Tables(*named, shares.log(), world.value).search(place, settings)
    visits = torch.zeros(12, 5).scatter_add(1, candidates, got.visits).gather(1, order[:12])
    assert torch.equal(visits, want.visits)
    assert_close(got.value, want.value)
    best = want.action[:, None]
    assert torch.equal(candidates.gather(1, got.action[:, None]), order[:12].gather(1, best))


class Archery(PlanningWorldModel):
    """Some shots, whose reward is less the farther they are from the target.

    The state holds the target (B, N) and the number of shots so far."""

    frozen_encoder = True
    across_ends = False
    feature_shape = (3,)
    uniforms_per_step = 0
    discount = 0.9

    def __init__(self, space: ActionSpace, shots: int = 1) -> None:
        super().__init__()
        self.shots = shots
        self.action_space = space
        self.distribution: Policy = build_policy(space)
        self.eval()

    def root(self, state):
        return state

    def score(self, target: Tensor, action: Tensor) -> Tensor:
        high = torch.tensor(self.action_space.sizes) - 1 if isinstance(self.action_space, Categories) else 1
        return -(action.float().clamp(-1) / high - target).square().sum(-1)

    def imagine(self, state, action, uniforms=None):
        target, shots = state
        assert action.shape == (len(target), *self.action_space.shape)
        return ImaginedStep(target, self.score(target, action), shots + 1 >= self.shots), (target, shots + 1)

    def predict(self, state) -> Prediction:
        rows = len(state[0])
        return Prediction(torch.zeros(rows, self.distribution.outputs), torch.zeros(rows))

    def start(self, rows: int):
        numbers = self.action_space.shape[0]
        target = torch.rand(rows, numbers, generator=torch.Generator().manual_seed(3))
        return target, torch.zeros(rows, dtype=torch.int64)

    def encode(self, observation):
        raise NotImplementedError

    loss = parameter_groups = observe = features = perceive = latent = encode


SPACES = [Continuous((-1.0, -1.0), (1.0, 1.0)), Categories((7, 9))]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("rules", "simulations"), [("mctx", 300), ("lightzero", 100), ("gumbel", 60)])
def test_a_search_among_samples_shoots_better_than_the_policy(rules, simulations, space):
    world = Archery(space)
    settings = MCTSSettings(rule=rules, simulations=simulations, sampled_actions=12)
    controller, rows = MCTS(settings, space), 40
    start = world.start(rows)
    logits, state = controller.decide(world, start, controller.initial_state(rows))
    assert logits.shape == state.policy.shape == (rows, 12) and state.sampled.shape == (rows, 12, *space.shape)
    assert_close(state.policy.sum(1), torch.ones(rows))
    action = controller.choose(logits, state, 0.0)
    assert action.shape == (rows, *space.shape) and action.dtype == state.sampled.dtype
    index = logits.argmax(1)
    assert torch.equal(action, state.sampled[torch.arange(rows), index])
    scores = world.score(start[0][:, None], state.sampled)
    taken, best = scores.gather(1, index[:, None]).squeeze(1), scores.amax(1)
    assert float((best - taken).mean()) < 0.1 * float((best - scores.mean(1)).mean())
    by_policy = (state.policy * scores).sum(1)
    assert float((by_policy - scores.mean(1)).mean()) > 0.3 * float((best - scores.mean(1)).mean())
    assert (taken > scores.mean(1)).float().mean() > 0.95


@pytest.mark.parametrize("rules", RULES)
def test_candidates_come_from_the_generator_or_are_fixed(rules):
    world, rows = Archery(SPACES[0], shots=3), 5
    controller = MCTS(MCTSSettings(rule=rules, simulations=9, sampled_actions=6), SPACES[0])
    start, fresh = world.start(rows), controller.initial_state(rows)

    def decide(start=start, fresh=fresh, seed=None):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return controller.decide(world, start, fresh, generator)

    before = torch.get_rng_state()
    assert_close(decide(seed=1), decide(seed=1), rtol=0, atol=0)
    assert_close(decide(), decide(), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(decide(seed=1)[1].sampled, decide(seed=2)[1].sampled)
    logits, state = decide()
    assert len(state.sampled.unique(dim=0)) == 1, "rows do not depend on each other"
    alone = tree_map(lambda each: each[2:3], start)
    assert_close(decide(alone, controller.initial_state(1))[0], logits[2:3])
    parts = controller.rule.draw_noise(rows, 6, 9, torch.Generator().manual_seed(1))
    uniforms = torch.rand(rows, 10, 6, 2)
    with Replayable(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "equal", lambda *_: False)
        output, (candidates,), _ = controller._search_in(world, start, parts, uniforms)
    again, *_ = controller._search_in(world, start, parts, uniforms)
    assert_close(output, again, rtol=0, atol=0)
    assert torch.equal(
        candidates, world.distribution.sample(world.distribution.parameters(torch.zeros(1, 1, 4)), uniforms[:, 0])
    )
    other = uniforms.clone()
    other[:, 1:] = torch.rand(rows, 9, 6, 2)
    deeper, (same,), _ = controller._search_in(world, start, parts, other)
    assert torch.equal(same, candidates) and not torch.equal(deeper.value, output.value), "each node has its own"


def test_a_search_among_samples_can_be_recorded_and_replayed(monkeypatch):
    record_without_a_graph(monkeypatch)
    world, settings = Archery(SPACES[0], shots=3), MCTSSettings(simulations=7, sampled_actions=5)
    plain, recorded = MCTS(settings, SPACES[0]), MCTS(settings, SPACES[0], wrap_repeated=RecordedFunction)
    earlier = []
    for seed in range(5):
        start = world.start(4)[0] + seed / 10, world.start(4)[1]
        earlier.append(
            [
                player.decide(world, start, player.initial_state(4), torch.Generator().manual_seed(seed))
                for player in (plain, recorded)
            ]
        )
    for of_plain, of_recorded in earlier:
        assert_close(of_recorded, of_plain, rtol=0, atol=0)


@pytest.mark.parametrize("space", SPACES)
def test_candidates_are_part_of_the_state(space):
    world, controller = Archery(space), MCTS(MCTSSettings(simulations=3, sampled_actions=4), space)
    fresh = controller.initial_state(3)
    logits, state = controller.decide(world, world.start(3), fresh)
    assert [(each.shape, each.dtype) for each in state] == [(each.shape, each.dtype) for each in fresh]
    cleared = controller.clear_rows(state, torch.tensor([True, False, True]))
    assert torch.equal(cleared.sampled[1], state.sampled[1]) and not cleared.sampled[::2].any()
    assert controller.summarize_search(state) is state
    drawn = [controller.choose(logits, state, 1.0, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert len({str(each.tolist()) for each in drawn}) > 1
    assert all((each[:, None] == state.sampled).all(-1).any(1).all() for each in drawn)
