"""The token world model: parallel prediction, imagination and losses against plain runs of the backbone.

Axes: B batch, T blocks, K tokens of a frame, L = K + 1, N codes, D width, A actions. All sizes differ.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_backbones import NAMES, small
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from wmcli.backbones import build
from wmcli.backbones.retnet import RetNetSettings
from wmcli.backbones.transformer import TransformerSettings
from wmcli.config import validate
from wmcli.errors import UsageError
from wmcli.experience import Episodes, WindowTable
from wmcli.nn import two_hot
from wmcli.spaces import Image
from wmcli.world_models.base import Batch
from wmcli.world_models.token import TokenState, TokenWorldModel, TokenWorldModelSettings

pytestmark = pytest.mark.matrix

B, T, GRID, N, D, A = 3, 5, (2, 3), 7, 16, 4
K = GRID[0] * GRID[1]
L = K + 1
PREDICTIONS = ["pop", "sequential"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class FakeTokenizer(nn.Module):
    """A frame is 2h x 2w pixels, each 2x2 square of one gray value: that value is the token."""

    def __init__(self, grid=GRID, codes=N, width=D):
        super().__init__()
        self.observation_space = Image(2 * grid[0], 2 * grid[1])
        self.grid, self.tokens, self.codes, self.width = grid, grid[0] * grid[1], codes, width
        self.image_codes, self.ranges, self.feature_shape = codes, ((0, codes),) * self.tokens, (width, *grid)
        self.table = nn.Parameter(torch.randn(codes, width))

    def encode(self, observation):
        return observation[..., ::2, ::2, 0].flatten(-2).long()

    def embed(self, tokens):
        return self.table[tokens]

    @torch.no_grad()
    def features(self, tokens):
        return self.embed(tokens).float().transpose(-1, -2).unflatten(-1, self.grid)

    def decode(self, tokens):
        frame = tokens.unflatten(-1, self.grid).repeat_interleave(2, -2).repeat_interleave(2, -1)
        return frame[..., None].expand(*frame.shape, 3).to(torch.uint8)


def make(backbone="retnet", tokenizer=None, *, width=D, layers=2, dropout=0.1, actions=A, spare=0, **settings):
    torch.manual_seed(0)
    tokenizer = tokenizer or FakeTokenizer(width=width)
    settings = TokenWorldModelSettings(**{"sequence_length": T, **settings})
    block = tokenizer.tokens + 1
    length = settings.sequence_length * block + spare
    network = small(backbone, max_length=length, block=block, width=width, layers=layers, dropout=dropout)
    return TokenWorldModel(settings, network, tokenizer, actions).eval()


def segment(time=T, seed=1):
    """Tokens (B, time, K) and actions (B, time)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(N, (B, time, K), generator=generator)
    return tokens, torch.randint(A, (B, time), generator=generator)


def experience(time=T):
    tokens, action = segment(time)
    generator = torch.Generator().manual_seed(2)
    reward = torch.randint(-2, 3, (B, time), generator=generator) * 0.7
    ends = torch.rand(B, time, generator=generator)
    valid = torch.arange(time) < torch.tensor([[time], [time - 1], [time - 2]])
    first = torch.zeros(B, time, dtype=torch.bool)
    return Batch(tokens, action, reward, ends < 0.3, ends > 0.8, first, valid)


def elements(model, tokens, action):
    """The sequence of a segment, (B, T * L, D), put together by hand."""
    table = model.tokenizer.table if model.token_embedding is None else model.token_embedding.weight
    pairs = [(table[tokens[:, t]], model.action_embedding.weight[action[:, t]]) for t in range(tokens.shape[1])]
    return torch.cat([torch.cat([frame, act[:, None]], 1) for frame, act in pairs], 1)


# -- prediction in training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burn_in", [0, 1, 2, 3])
@pytest.mark.parametrize("backbone", NAMES)
def test_pop_predicts_as_if_each_prefix_were_run_by_itself(backbone, burn_in):
    model = make(backbone, observation_burn_in=burn_in)
    tokens, action = segment()
    x = elements(model, tokens, action)
    got = model.predict(tokens, action)
    start = max(1, burn_in)
    assert got.observation.shape == (B, T - start, K, N)
    queries = model.queries.weight.expand(B, K, D)
    for t in range(start, T):
        y, _ = model.backbone(torch.cat([x[:, : t * L], queries], 1), None)
        assert_close(got.observation[:, t - start], model.observation_head(y[:, -K:]), rtol=1e-4, atol=1e-5)
    y, _ = model.backbone(x, None)
    assert_close(got.reward, model.reward_head(y[:, K::L]), rtol=1e-4, atol=1e-5)
    assert_close(got.termination, model.termination_head(y[:, K::L]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("backbone", NAMES)
def test_sequential_predicts_each_token_from_the_one_before(backbone, burn_in):
    model = make(backbone, prediction="sequential", observation_burn_in=burn_in)
    tokens, action = segment()
    y, _ = model.backbone(elements(model, tokens, action), None)
    logits = model.observation_head(y)
    got = model.predict(tokens, action)
    assert got.observation.shape == (B, T - burn_in, K, N)
    for t in range(max(1, burn_in), T):
        for k in range(K):
            assert_close(got.observation[:, t - burn_in, k], logits[:, t * L + k - 1])
    assert_close(got.reward, model.reward_head(y[:, K::L]))


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_the_present_changes_only_later_steps(backbone, prediction):
    model = make(backbone, prediction=prediction, observation_burn_in=1)
    tokens, action = segment()
    before = model.predict(tokens, action)
    t, k = 2, 3
    other_tokens, other_action = tokens.clone(), action.clone()
    other_tokens[:, t, k] = (tokens[:, t, k] + 1) % N
    other_action[:, t] = (action[:, t] + 1) % A

    def changed(one, other):
        return (one - other).abs().flatten(2).amax((0, 2)) > 1e-6  # by block

    after = model.predict(other_tokens, action)
    assert changed(before.reward, after.reward).tolist() == [False, False, True, True, True]
    own = changed(before.observation[:, t - 1], after.observation[:, t - 1])  # by token of block t itself
    assert own.tolist() == ([False] * K if prediction == "pop" else [False] * (k + 1) + [True] * (K - k - 1))
    rest = changed(before.observation, after.observation)
    assert rest[: t - 1].tolist() == [False] and rest[t:].all()

    after = model.predict(tokens, other_action)
    assert changed(before.reward, after.reward).tolist() == [False, False, True, True, True]
    assert changed(before.observation, after.observation).tolist() == [False, False, True, True]


# -- imagination ------------------------------------------------------------------------------------------------------


def follow(model, state, tokens, action):
    """Imagine with the next frames dictated: logits of reward, termination and observation by step."""
    steps = []
    for t in range(action.shape[1]):
        dictated, seen = tokens[:, t], []

        def choose(logits, first, dictated=dictated, seen=seen):
            seen.append(logits)
            return dictated[:, first : first + logits.shape[1]]

        reward, termination, _, state = model.advance(state, action[:, t], choose)
        assert_close(state.latent, tokens[:, t])
        steps.append((reward, termination, torch.cat(seen, 1)))
    return [torch.stack(part, 1) for part in zip(*steps, strict=True)]


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_imagination_has_the_distribution_of_training(backbone, prediction, context):
    model = make(backbone, prediction=prediction, context=context, observation_burn_in=0)
    extra = 2  # frames before the context leave no trace
    tokens, action = segment(T + extra)
    seen = extra + context
    features, state = model.observe(tokens[:, :seen], action[:, :seen], torch.zeros(B, seen, dtype=torch.bool))
    assert features.shape == (B, seen, D, *GRID)
    assert_close(features[:, -1], model.features(state))
    got = follow(model, state, tokens[:, seen:], action[:, seen - 1 : -1])
    tokens, action = tokens[:, extra:], action[:, extra:]
    want = model.predict(tokens, action)
    assert_close(got[0], want.reward[:, context - 1 : -1], rtol=1e-4, atol=1e-5)
    assert_close(got[1], want.termination[:, context - 1 : -1], rtol=1e-4, atol=1e-5)
    assert_close(got[2], want.observation[:, -(T - context) :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_rows_before_a_reset_leave_no_trace(backbone, prediction):
    """Row b of the batch has b frames of padding on the left, up to all but its last frame."""
    model = make(backbone, prediction=prediction, context=3)
    tokens, action = segment(5)
    reset = torch.arange(3) == torch.arange(B)[:, None]
    _, state = model.observe(tokens[:, :3], action[:, :3], reset)
    got = follow(model, state, tokens[:, 3:], action[:, 2:4])
    for b in range(B):
        row = slice(b, b + 1)
        real = slice(b, 3)
        _, state = model.observe(tokens[row, real], action[row, real], torch.zeros(1, 3 - b, dtype=torch.bool))
        want = follow(model, state, tokens[row, 3:], action[row, 2:4])
        for one, other in zip(got, want, strict=True):
            assert_close(one[row], other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("prediction", "spare", "fit"),
    # A step needs room for what it asks as well: with "pop" the queries, with "sequential" all tokens but the last.
    [("pop", 0, 3), ("pop", K - 1, 3), ("pop", K, 4), ("sequential", 0, 3), ("sequential", L - 3, 3)]
    + [("sequential", L - 2, 4)],
)
def test_imagination_starts_again_from_the_last_frame_when_positions_run_out(prediction, spare, fit):
    """`fit` frames fit after a context of 2: 3 in the positions of 5 blocks, 4 if there are `spare` ones."""
    model = make("transformer", prediction=prediction, context=2, spare=spare)
    tokens, action = segment(9)

    def likeliest(logits, first):
        return logits.argmax(-1)

    _, state = model.observe(tokens[:, :2], action[:, :2], torch.zeros(B, 2, dtype=torch.bool))
    got, lengths = [], []
    for t in range(7):
        fresh = model.advance(TokenState(None, state.latent, 0, 0), action[:, t], likeliest)
        reward, _, _, state = model.advance(state, action[:, t], likeliest)
        got.append(torch.allclose(reward, fresh[0], atol=1e-6))
        lengths.append(state.length)
    assert got == [t == fit for t in range(7)]
    assert max(lengths) <= model.backbone.max_length
    assert lengths[fit] < lengths[fit - 1]


@pytest.mark.parametrize("backbone", NAMES)
def test_two_calls_for_a_frame_are_as_good_as_one(backbone):
    """REM's default mode and its alternative (table 6), over more frames than a cache of positions holds."""
    one, two = make(backbone), make(backbone, pop_calls=2)
    tokens, action = segment(9)
    states = [each.observe(tokens[:, :2], action[:, :2], torch.zeros(B, 2, dtype=torch.bool))[1] for each in (one, two)]
    want, got = (follow(*pair, tokens[:, 2:], action[:, 1:-1]) for pair in zip((one, two), states, strict=True))
    assert_close(got, want, rtol=1e-4, atol=1e-5)
    for t in range(7):
        uniforms = torch.rand(B, one.uniforms_per_step)
        pairs = zip((one, two), states, strict=True)
        drawn, alike = (each.imagine(state, action[:, t], uniforms) for each, state in pairs)
        assert_close(alike[0]._replace(prior=None), drawn[0]._replace(prior=None))
        states = [drawn[1], alike[1]]


@pytest.mark.parametrize(("calls", "elements"), [(1, [L + K]), (2, [L, K])])
def test_calls_and_elements_of_both_modes_are_those_of_the_paper(monkeypatch, calls, elements):
    """Table 6, with the action's token: 2 K + 1 elements in one call, or K + 1 and K in two."""
    model, read = make(pop_calls=calls), []
    fork, forward = model.backbone.fork, model.backbone.forward
    _, state = model.observe(*segment(2), torch.zeros(B, 2, dtype=torch.bool))

    def counted_fork(x, queries, state):
        read.append(x.shape[2] + len(queries))
        return fork(x, queries, state)

    def counted_forward(x, *given):
        read.append(x.shape[1])
        return forward(x, *given)

    monkeypatch.setattr(model.backbone, "fork", counted_fork)
    monkeypatch.setattr(model.backbone, "forward", counted_forward)
    for _ in range(3):
        _, state = model.imagine(state, torch.zeros(B, dtype=torch.long))
    assert read[calls:] == elements * 2  # the first block is longer


def test_a_backbone_without_positions_never_starts_again():
    model = make("retnet")
    _, state = model.observe(*segment(2), torch.zeros(B, 2, dtype=torch.bool))
    for _ in range(2 * T):
        _, state = model.imagine(state, torch.zeros(B, dtype=torch.long))
    assert state.length == (2 * T + 1) * L


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_imagined_steps_have_the_promised_form(backbone, prediction):
    model = make(backbone, prediction=prediction)
    _, state = model.observe(*segment(2), torch.zeros(B, 2, dtype=torch.bool))
    action = torch.zeros(B, dtype=torch.long)
    torch.manual_seed(5)
    imagined, after = model.imagine(state, action)
    assert imagined.latent.shape == (B, K) and imagined.latent.dtype == torch.int64
    assert imagined.reward.shape == (B,) and imagined.reward.dtype == torch.float32
    assert set(imagined.reward.tolist()) <= {-1.0, 0.0, 1.0}
    assert imagined.terminated.shape == (B,) and imagined.terminated.dtype == torch.bool
    assert_close(model.latent(after), imagined.latent)
    torch.manual_seed(5)  # the state given in is not used up
    again, _ = model.imagine(state, action)
    assert_close(again, imagined)


# -- what goes in and out ---------------------------------------------------------------------------------------------


def test_frames_features_and_acting():
    model = make()
    frames = torch.randint(N, (B, T, *GRID, 1), dtype=torch.uint8)
    frames = frames.repeat_interleave(2, 2).repeat_interleave(2, 3).expand(-1, -1, -1, -1, 3)
    tokens = model.encode(frames)
    assert tokens.shape == (B, T, K)
    assert_close(model.decode(tokens), frames)
    state = model.perceive(None, frames[:, 0], torch.zeros(B, dtype=torch.long), torch.ones(B, dtype=torch.bool))
    assert_close(model.latent(state), tokens[:, 0])
    seen = model.features(state)
    assert seen.shape == (B, *model.feature_shape) and not seen.requires_grad
    for i in range(GRID[0]):
        for j in range(GRID[1]):  # raster order
            assert_close(seen[:, :, i, j], model.tokenizer.table[tokens[:, 0, i * GRID[1] + j]].detach())
    imagined, _ = model.imagine(state, torch.zeros(B, dtype=torch.long))
    assert imagined.latent.shape == (B, K)


def test_the_tokenizer_stays_outside_the_module():
    model = make()
    assert not any("table" in name for name in model.state_dict())
    assert all(parameter is not model.tokenizer.table for parameter in model.parameters())
    assert not any(isinstance(module, FakeTokenizer) for module in model.modules())


def test_separate_embeddings_need_no_common_width():
    model = make(tokenizer=FakeTokenizer(width=5), shared_embeddings=False)
    total, _ = model.loss(experience())
    total.backward()
    assert model.token_embedding.weight.shape == (N, D)
    assert model.token_embedding.weight.grad.abs().sum() > 0
    assert model.feature_shape == (5, *GRID)


def test_shared_embeddings_of_another_width_are_refused():
    with pytest.raises(UsageError, match=r"tokenizer\.width = 5 and backbone\.width = 16.*shared_embeddings=false"):
        make(tokenizer=FakeTokenizer(width=5))


@pytest.mark.parametrize("key", ["context", "min_segment", "observation_burn_in", "reward_burn_in"])
def test_settings_that_leave_nothing_of_the_horizon_are_refused(key):
    with pytest.raises(UsageError, match=f"dynamics: {key} = 4 must be less than sequence_length = 4"):
        validate(TokenWorldModelSettings, {"sequence_length": 4, key: 4}, "dynamics")


def test_segments_shorter_than_the_context_are_refused():
    with pytest.raises(UsageError, match="min_segment = 2 must be at least context = 3.*set min_segment = 3"):
        validate(TokenWorldModelSettings, {"context": 3, "min_segment": 2}, "dynamics")


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("learned", [True, False])
def test_segments_may_end_where_imagination_starts(context, learned):
    """Else the first imagined reward is unknown at an episode's last frame."""
    model = make(context=context, reward_burn_in=0, min_segment=context if learned else 0)
    table = WindowTable(
        Episodes(np.array([0]), np.array([7])),
        np.arange(7),
        length=model.segment,
        minimum=model.min_segment,
        pad="right",
    )
    rows, valid = table.windows(np.arange(len(table)))
    assert ((rows == 6) & valid)[:, context - 1].any() == learned


@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("earlier", [True, False])
def test_dreams_begin_where_segments_are_long_enough(context, earlier):
    """With `min_segment` = `context`, from the first frame on that has a whole context; else one frame later."""
    model = make(context=context, reward_burn_in=0, min_segment=context if earlier else 0)
    window = 5
    table = WindowTable(
        Episodes(np.array([0]), np.array([7])),
        np.arange(7),
        length=window,
        minimum=min(model.min_context, window),
        pad="left",
    )
    assert table.last_rows(np.arange(len(table))).min() == (context - 1 if earlier else context)


@pytest.mark.parametrize("actions", [4, 18])
def test_parameter_counts_of_rem_and_iris(actions):
    with torch.device("meta"):
        rem = TokenWorldModel(
            TokenWorldModelSettings(),
            build(RetNetSettings(width=256, layers=5), max_length=650, block=65),
            FakeTokenizer((8, 8), 512, 256),
            actions,
        )
        iris = TokenWorldModel(
            TokenWorldModelSettings(prediction="sequential", shared_embeddings=False, sequence_length=20, context=1),
            build(TransformerSettings(width=256, layers=10), max_length=340, block=17),
            FakeTokenizer((4, 4), 512, 512),
            actions,
        )
    assert sum(parameter.numel() for parameter in rem.parameters()) == 4_624_389 + 256 * actions
    assert sum(parameter.numel() for parameter in iris.parameters()) == 8_446_469 + 256 * actions


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", ["retnet", "transformer"])
def test_weight_decay_falls_on_the_weights_of_linear_layers_only(backbone, prediction):
    model = make(backbone, prediction=prediction, shared_embeddings=False, weight_decay=0.3)
    decayed, plain = model.parameter_groups()
    assert decayed["weight_decay"] == 0.3 and plain["weight_decay"] == 0
    everything = [id(parameter) for group in (decayed, plain) for parameter in group["params"]]
    assert sorted(everything) == sorted(id(parameter) for parameter in model.parameters())
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    assert {id(parameter) for parameter in decayed["params"]} == linear


def test_initialization_like_gpt_reaches_tables_and_heads():
    model = make(initialization="gpt", shared_embeddings=False)
    weights = [model.token_embedding, model.queries, model.action_embedding, model.reward_head[0]]
    assert all(0.01 < module.weight.std() < 0.03 for module in weights)
    assert (model.reward_head[2].bias == 0).all()
    assert make().action_embedding.weight.std() > 0.5


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncation", [False, True])
@pytest.mark.parametrize(("observation_burn_in", "reward_burn_in"), [(0, 0), (2, 1), (1, 3)])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_loss_is_the_mean_over_scored_elements(prediction, observation_burn_in, reward_burn_in, truncation):
    """Against a loop over rows, blocks and tokens."""
    model = make(
        prediction=prediction,
        observation_burn_in=observation_burn_in,
        reward_burn_in=reward_burn_in,
        end_on_truncation=truncation,
    )
    batch = experience()
    logits = model.predict(batch.inputs, batch.action)
    start = T - logits.observation.shape[1]
    observation, reward, termination = [], [], []
    for b in range(B):
        for t in range(T):
            if not batch.valid[b, t]:
                continue
            for k in range(K):
                known = t > 0 or (prediction == "sequential" and k > 0)
                if t >= observation_burn_in and known:
                    observation.append(-logits.observation[b, t - start, k].log_softmax(-1)[batch.inputs[b, t, k]])
            if t >= reward_burn_in:
                sign = (batch.reward[b, t] > 0).int() - (batch.reward[b, t] < 0).int()
                reward.append(-logits.reward[b, t].log_softmax(-1)[sign + 1])
                ends = batch.terminated[b, t] or (truncation and batch.truncated[b, t])
                termination.append(-logits.termination[b, t].log_softmax(-1)[int(ends)])
    total, log = model.loss(batch)
    parts = [torch.stack(losses).mean() for losses in (observation, reward, termination)]
    for name, part in zip(("observation", "reward", "termination"), parts, strict=True):
        assert_close(log[f"{name}_loss"], part.detach())
    assert_close(total, sum(parts))


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_padding_does_not_matter(prediction):
    model = make(prediction=prediction)
    batch = experience()
    garbage = ~batch.valid
    other = batch._replace(
        inputs=torch.where(garbage[..., None], 0, batch.inputs),
        action=torch.where(garbage, 0, batch.action),
        reward=torch.where(garbage, 9.0, batch.reward),
        terminated=batch.terminated | garbage,
    )
    assert_close(model.loss(other), model.loss(batch))


def test_logged_accuracies_by_hand():
    model = make(reward_burn_in=0, observation_burn_in=1)
    batch = experience()._replace(valid=torch.ones(B, T, dtype=torch.bool))
    logits = model.predict(batch.inputs, batch.action)
    _, log = model.loss(batch)
    right = (logits.reward.argmax(-1) - 1) == batch.reward.sign()
    nonzero = batch.reward != 0
    assert_close(log["observation_accuracy"], (logits.observation.argmax(-1) == batch.inputs[:, 1:]).float().mean())
    assert_close(log["nonzero_rewards"], nonzero.float().mean())
    assert_close(log["nonzero_rewards_hit"], (right & nonzero).float().mean())
    assert not any(value.requires_grad for value in log.values())


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_rewards_by_value(prediction):
    """The distribution over bins is learned from the reward as it is, and its mean is imagined, whatever is drawn."""
    batch = experience()
    signs, values = make(prediction=prediction), make(prediction=prediction, reward="two-hot")
    assert torch.equal(signs.learned_reward(batch.reward), batch.reward.sign())
    assert torch.equal(values.learned_reward(batch.reward), batch.reward)
    logits, valid = values.predict(batch.inputs, batch.action).reward[:, 1:], batch.valid[:, 1:]
    total, log = values.loss(batch)
    assert_close(log["reward_loss"], two_hot.loss(logits, batch.reward[:, 1:])[valid].mean())
    assert_close(total, log["observation_loss"] + log["reward_loss"] + log["termination_loss"])

    optimizer = torch.optim.Adam(values.reward_head.parameters(), 1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        total, log = values.loss(batch)
        total.backward()
        optimizer.step()
    assert log["nonzero_rewards_hit"] > 0.9 * log["nonzero_rewards"] > 0

    _, state = values.observe(batch.inputs[:, :2], batch.action[:, :2], torch.zeros(B, 2, dtype=torch.bool))
    drawn = [values.imagine(state, batch.action[:, 1])[0].reward for _ in range(2)]
    assert torch.equal(*drawn) and drawn[0].dtype == torch.float32
    want = two_hot.decode(values.predict(batch.inputs, batch.action).reward[:, 1])
    assert_close(drawn[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("initialization", ["torch", "gpt"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_losses_start_near_those_of_a_guess(backbone, prediction, initialization):
    tokenizer = FakeTokenizer(codes=512, width=64)
    with torch.no_grad():
        tokenizer.table.mul_(0.001)  # code vectors start small
    model = make(backbone, tokenizer, width=64, actions=18, prediction=prediction, initialization=initialization)
    margin = 0.1 if initialization == "gpt" else 0.4
    batch = experience()
    batch = batch._replace(inputs=torch.randint(512, (B, T, K)), action=torch.randint(18, (B, T)))
    _, log = model.loss(batch)
    assert abs(log["observation_loss"] - math.log(512)) < margin
    assert abs(log["reward_loss"] - math.log(3)) < margin
    assert abs(log["termination_loss"] - math.log(2)) < margin


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_gradients_reach_everything_but_the_tokenizer(backbone, prediction):
    model = make(backbone, prediction=prediction)
    batch = experience()._replace(valid=torch.ones(B, T, dtype=torch.bool))
    total, _ = model.loss(batch)
    total.backward()
    assert model.tokenizer.table.grad is None
    unreached = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert unreached == []


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_the_last_block_teaches_the_reading_of_the_first(backbone, prediction):
    model = make(backbone, prediction=prediction, shared_embeddings=False)
    tokens, action = segment()
    tokens = tokens.clamp(max=N - 2)
    tokens[:, 0], action[:, 0] = N - 1, A - 1  # in block 0 and nowhere else
    action[:, 1:] = action[:, 1:].clamp(max=A - 2)
    logits = model.predict(tokens, action)
    for last in (logits.observation[:, -1], logits.reward[:, -1]):
        grads = torch.autograd.grad(
            last.square().sum(), [model.token_embedding.weight, model.action_embedding.weight], retain_graph=True
        )
        assert grads[0][N - 1].abs().sum() > 0
        assert grads[1][A - 1].abs().sum() > 0


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("backbone", NAMES)
def test_half_precision_stays_near(backbone, prediction):
    model = make(backbone, prediction=prediction)
    batch = experience()
    want, _ = model.loss(batch)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = model.loss(batch)
        features, state = model.observe(*segment(2), torch.zeros(B, 2, dtype=torch.bool))
        imagined, _ = model.imagine(state, torch.zeros(B, dtype=torch.long))
    assert got.dtype == features.dtype == imagined.reward.dtype == torch.float32
    assert_close(got, want, rtol=0.03, atol=0)


# -- learning ---------------------------------------------------------------------------------------------------------


def dots(generator, batch, *, time=4, places=3, shuffled=False):
    """A dot on a ring of places; the action moves it by -1, 0, 1. Reward 1 for arriving at place 0, end at place 1."""
    action = torch.randint(3, (batch, time), generator=generator)
    place = torch.randint(places, (batch, 1), generator=generator)
    place = (place + F.pad((action - 1).cumsum(1), (1, 0))) % places
    arrived = place[:, 1:]
    if shuffled:
        action = action[:, torch.randperm(time, generator=generator)]
    none, every = torch.zeros(batch, time, dtype=torch.bool), torch.ones(batch, time, dtype=torch.bool)
    return Batch(F.one_hot(place[:, :-1], places), action, (arrived == 0).float(), arrived == 1, none, none, every)


def train(prediction, *, shuffled, updates=200):
    """A small model after `updates` on dots, and what it logs on new ones."""
    tokenizer = FakeTokenizer((1, 3), codes=2, width=32)
    settings = {"sequence_length": 4, "observation_burn_in": 1, "prediction": prediction}
    model = make(tokenizer=tokenizer, width=32, dropout=0.0, actions=3, **settings).train()
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    generator = torch.Generator().manual_seed(3)
    for _ in range(updates):
        total, _ = model.loss(dots(generator, 32, shuffled=shuffled))
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    _, log = model.eval().loss(dots(generator, 256, shuffled=shuffled))
    return model, log


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.slow
def test_a_moving_dot_is_learned_and_imagined(prediction):
    model, log = train(prediction, shuffled=False)
    assert log["observation_loss"] < 0.02 and log["reward_loss"] < 0.02 and log["termination_loss"] < 0.02
    assert log["nonzero_rewards_hit"] > 0.98 * log["nonzero_rewards"]
    real = dots(torch.Generator().manual_seed(4), 64)
    _, state = model.observe(real.inputs[:, :2], real.action[:, :2], torch.zeros(64, 2, dtype=torch.bool))
    for t in (1, 2):
        imagined, state = model.imagine(state, real.action[:, t])
        assert (imagined.latent == real.inputs[:, t + 1]).all(-1).float().mean() > 0.95
        assert (imagined.reward == real.reward[:, t]).float().mean() > 0.95
        assert (imagined.terminated == real.terminated[:, t]).float().mean() > 0.95


def test_a_dot_moved_by_hidden_actions_cannot_be_learned():
    """The same frames with the actions in another order: even a perfect model of them is left with doubt."""
    _, log = train("pop", shuffled=True, updates=100)
    assert log["observation_loss"] > 0.3


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_an_ensemble_reads_what_predicts_the_tokens(prediction):
    model = make(prediction=prediction, ensemble=3, dropout=0.0)
    batch = experience()
    rest = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("ensemble.")}
    total, log = model.loss(batch)
    gradients = torch.autograd.grad(total, rest.values())
    logits = model.predict(batch.inputs, batch.action)
    assert_close(model.observation_head(logits.at_tokens), logits.observation)

    _, state = model.observe(batch.inputs, batch.action, batch.is_first)
    seen = []

    def choose(of_tokens, start):
        seen.append(of_tokens)
        return of_tokens.argmax(-1)

    _, _, at_tokens, _ = model.advance(state, batch.action[:, -1], choose)
    assert_close(model.observation_head(at_tokens), torch.cat(seen, 1))
    _, state = model.observe(batch.inputs, batch.action, batch.is_first)
    step, _ = model.imagine(state, batch.action[:, -1], torch.full((B, model.uniforms_per_step), 0.5))
    assert step.disagreement.shape == (B,) and (step.disagreement > 0).all()

    ensemble, model.ensemble = model.ensemble, None
    without, others = model.loss(batch)
    assert_close(total, without + log.pop("ensemble_loss")) and log == others
    assert all(torch.equal(a, b) for a, b in zip(gradients, torch.autograd.grad(without, rest.values()), strict=True))
    assert model.has_ensemble and ensemble is not None
