"""What a training stage reads and what it leaves alone: modes of the models, rows, counts, targets, kept latents."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_systems import STAGES, Make, learn, opened, same, tensors, weights
from tiny_run import copied, latest, sha256
from torch import Tensor, nn

from wmcli.assemble import load_controller, load_tokenizer, load_world_model
from wmcli.stages import profile
from wmcli.stages.collect import collect
from wmcli.stages.context import Context
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.imagine import imagine
from wmcli.trainers.batches import gather
from wmcli.training.checkpoint import TRAINING, read_part
from wmcli.training.device import Machine
from wmcli.world_models.base import Batch
from wmcli.world_models.latent import LatentWorldModel

CPU = Machine(torch.device("cpu"), "float32", 1)
FEW = "controller.updates=2"
NAMES = ["rem", "drama", "unizero", "muzero", "cells"]

# -- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rem", "drama", "unizero", "cells"])
def test_dropout_is_on_in_training(make: Make, name: str) -> None:
    run = make(name)
    dropped, whole = (
        learn(run, "dynamics", f"backbone.dropout={share}", "dynamics.updates=2")[1] for share in (0.5, 0.0)
    )
    assert same(dropped[0].before, whole[0].before) and not same(dropped[1].after, whole[1].after)


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("rem", "tokenizer", ["tokenizer.quantizer=vq-ema"]),
        ("drama", "tokenizer", []),
        ("drama", "dynamics", []),
        ("unizero", "dynamics", []),
        ("muzero", "dynamics", []),
        ("drama", "controller", []),
    ],
)
def test_running_statistics_move_in_every_update(make: Make, name: str, kind: str, change: list[str]) -> None:
    """Batch norm, the codes' averages, the normalizer and the range of the returns: all that is no parameter."""
    _, seen = learn(make(name, trained=kind == "controller"), kind, *change, f"{kind}.updates=2")
    kept = [
        each
        for each, value in seen[0].before.items()
        if value.is_floating_point() and each not in seen[0].gradient and not each.startswith(("target.", "slow_"))
    ]
    assert kept
    for update in seen:
        assert [each for each in kept if torch.equal(update.before[each], update.after[each])] == []


@pytest.mark.parametrize(("name", "kind"), [("rem", "dynamics"), *((name, "controller") for name in NAMES)])
def test_a_frozen_model_stays_as_it_is(make: Make, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """The tokenizer under the dynamics, the dynamics in imagination and reanalysis: in eval mode, no bit changed."""
    run = make(name, trained=kind == "controller")
    loaded: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def watched(load: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any) -> Any:
            model = load(*given)
            models = [model, model.tokenizer] if name == "rem" and kind == "controller" else [model]
            loaded.extend((each, tensors(each)) for each in models)
            return model

        return wrapper

    where = f"wmcli.stages.{'dynamics.load_tokenizer' if kind == 'dynamics' else 'imagine.load_world_model'}"
    module, _, function = where.rpartition(".")
    monkeypatch.setattr(where, watched(getattr(importlib.import_module(module), function)))
    learn(run, kind, f"{kind}.updates=2")
    assert loaded
    for model, before in loaded:
        assert same(before, tensors(model))
        assert not any(each.training for each in model.modules())
        assert not any(each.requires_grad or each.grad is not None for each in model.parameters())


LOSSES = {
    ("rem", "tokenizer"): ["tokenizers.vq.VQTokenizer.loss"],
    ("rem", "dynamics"): ["world_models.token.TokenWorldModel.encode", "world_models.token.TokenWorldModel.loss"],
    ("rem", "controller"): [f"controllers.reinforce.ReinforceController.{each}" for each in ("imagine", "loss")],
    ("drama", "controller"): [f"controllers.actor_critic.ActorCritic.{each}" for each in ("imagine", "loss")],
    ("s4wm", "dynamics"): ["world_models.latent.LatentWorldModel.loss"],  # of training and of validation
    ("muzero", "controller"): ["world_models.muzero.MuZero.observe", "controllers.mcts.MCTS.decide"],
}


@pytest.mark.parametrize(("name", "kind"), LOSSES)
def test_costly_parts_run_in_the_chosen_precision(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    run, lower = make(name, trained=kind == "controller"), dict[str, list[bool]]()

    def watched(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any, **named: Any) -> Any:
            lower.setdefault(place, []).append(torch.is_autocast_enabled("cpu"))
            return function(*given, **named)

        return wrapper

    for place in LOSSES[name, kind]:
        module, owner, method = f"wmcli.{place}".rsplit(".", 2)
        known = getattr(getattr(importlib.import_module(module), owner), method)
        monkeypatch.setattr(f"{module}.{owner}.{method}", watched(place, known))
    change = ["training.precision=bfloat16", f"{kind}.updates=1"]
    change += ["dynamics.validate_every=1"] * (name == "s4wm")
    learn(run, kind, *change)
    assert list(lower) == LOSSES[name, kind] and all(all(each) for each in lower.values())
    assert name != "s4wm" or len(*lower.values()) == 2


def test_a_model_that_is_trained_imagines_in_as_many_calls_as_are_set_now(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same frames to rounding, by an answer that is not `fork`; its dynamics model stays the one of one call."""
    run, forks = make("rem"), []
    made = train_dynamics(opened(run))
    assert train_dynamics(opened(run, "dynamics.pop_calls=2")).path == made.path
    backbone = type(load_world_model(made, opened(run).machine).backbone)
    fork = backbone.fork
    monkeypatch.setattr(backbone, "fork", lambda *given: [forks.append(given), fork(*given)][1])
    updates = ["controller.updates=1"]
    _, (one,) = learn(run, "controller", *updates)
    called = len(forks)
    _, (two,) = learn(run, "controller", *updates, "dynamics.pop_calls=2", force=True)
    assert called and len(forks) == called
    assert two.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-4)


def test_the_tokenizer_is_measured_as_it_will_be_used(make: Make) -> None:
    """With the batch statistics that are published, not those of the frames that it is measured on."""
    run = make("drama")
    published, _ = learn(run, "tokenizer", "tokenizer.updates=2")
    context = opened(run)
    latent = load_tokenizer(published, CPU).encode(context.experience(latest(run, "experience")).observation)
    entropy = torch.special.entr(latent).sum((-2, -1)).mean().item()
    assert published.metrics["posterior_entropy"] == pytest.approx(entropy, rel=1e-4)


# -- validation -------------------------------------------------------------------------------------------------------


def test_looking_at_validation_episodes_does_not_change_training(make: Make) -> None:
    """The updates are those without looks, to the bit. Published is the update that is called the best, here not the
    last one, since the rate is far too high; training further goes on from the last and counts on."""
    run, change = make("s4wm"), ["dynamics.updates=3", "dynamics.learning_rate=5.0"]
    _, without = learn(run, "dynamics", *change)
    published, looked = learn(run, "dynamics", *change, "dynamics.validate_every=1")
    best = published.metrics["best_update"]
    assert same(looked[2].after, without[2].after) and same(weights(published, TRAINING), looked[2].after)
    assert 1 <= best < 3 and same(weights(published), looked[best - 1].after)
    further, again = learn(run, "dynamics", *change, "dynamics.validate_every=1", more=True)
    best = further.metrics["best_update"]
    assert 4 <= best <= 6 and same(again[0].before, looked[2].after)
    assert same(weights(further), again[best - 4].after)


def test_validation_is_without_dropout(make: Make) -> None:
    run, losses = make("s4wm"), []
    for share in (0.0, 0.5):
        change = ["dynamics.updates=1", "dynamics.learning_rate=1e-30", "dynamics.validate_every=1"]
        published, _ = learn(run, "dynamics", *change, f"backbone.dropout={share}")
        losses.append((published.metrics["loss"], published.metrics["validation_loss"]))
    assert losses[0][0] != losses[1][0] and losses[0][1] == losses[1][1]


# -- rows -------------------------------------------------------------------------------------------------------------


def batches(run: Path, patch: pytest.MonkeyPatch, kind: str, *overrides: str) -> list[Batch]:
    """Return the batches that a stage gathers, update by update."""
    found: list[Batch] = []
    for name in ["dynamics"] if kind == "dynamics" else ["imagination", "reanalysis"]:
        place = f"wmcli.trainers.{name}.gather"
        patch.setattr(place, lambda *given, **named: found.append(gather(*given, **named)) or found[-1])
    learn(run, kind, *overrides)
    return found


@pytest.mark.parametrize(
    ("name", "fewest", "frames", "history"),
    [("rem", 2, 6, 0), ("unizero", 1, 6, 0), ("muzero", 1, 7, 2), ("cells", 2, 4, 0)],
)
def test_segments_lie_within_episodes_and_have_as_many_frames_as_imagination_starts_from(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, fewest: int, frames: int, history: int
) -> None:
    """All of them at once: `fewest` are real behind the history, which is as long as the episode has it."""
    change = ["training.sampling=windows", "dynamics.batch=60", "dynamics.updates=1"]
    (batch,) = batches(make(name), monkeypatch, "dynamics", *change)
    assert batch.valid.shape == (60, frames)
    behind = batch.valid[:, history:]
    assert behind[:, 0].all() and behind.sum(1).min() == fewest
    assert (behind.int().diff(dim=1) <= 0).all() and not batch.is_first[:, 1:][batch.valid[:, :-1]].any()
    assert set(batch.valid[:, :history].sum(1).tolist()) == set(range(history + 1))
    ends = (batch.terminated | batch.truncated) & batch.valid
    assert not ends[:, :-1][batch.valid[:, 1:]].any()


@pytest.mark.parametrize("kind", ["dynamics", "controller"])
def test_dramas_segments_run_over_ends(make: Make, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    run = make("drama", trained=kind == "controller")
    (batch,) = batches(run, monkeypatch, kind, f"{kind}.batch=20", f"{kind}.updates=1")
    assert batch.valid.shape == (20, 9 if kind == "dynamics" else 3)
    assert batch.valid.all() and batch.is_first[:, 1:].any()


def test_imagination_starts_behind_at_least_as_many_frames_as_the_model_needs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of context, the last of which is acted in; the controller burns in on two more where there are any."""
    change = ["controller.burn_in=3", "controller.batch=60", "controller.updates=1"]
    (batch,) = batches(make("rem", trained=True), monkeypatch, "controller", *change)
    assert batch.valid.shape == (60, 4) and batch.valid[:, -1].all()
    assert set(batch.valid.sum(1).tolist()) == {2, 3, 4}


def test_rows_are_whole_episodes_where_that_is_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = batches(make("s4wm"), monkeypatch, "dynamics", "dynamics.updates=2")
    for batch in (first, second):
        assert batch.valid.shape == (2, 50) and batch.valid.all()
        assert batch.is_first[:, 0].all() and not batch.is_first[:, 1:].any() and batch.terminated[:, -1].all()
    rows = torch.cat((first.inputs, second.inputs)).flatten(1)
    assert len(rows.unique(dim=0)) == 4, "each of the four comes once before any comes again"


STREAMS = [
    "dynamics.rows=streams",
    "dynamics.sequence_length=17",
    "dynamics.context=3",
]


def test_streams_go_on_with_the_state_of_the_batch_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[list[bool]] = []
    loss = LatentWorldModel.carried_loss

    def watched(model: LatentWorldModel, batch: Batch, carry: Any) -> Any:
        known.append(carry.is_valid.tolist())
        total, log, after = loss(model, batch, carry)
        assert not torch.equal(after.latent, carry.latent)
        return total, log, after

    monkeypatch.setattr(LatentWorldModel, "carried_loss", watched)
    learn(make("s4wm"), "dynamics", *STREAMS, "dynamics.updates=3", "backbone.kind=gru")
    assert known == [[False] * 2, [True] * 2, [True] * 2]


@pytest.mark.parametrize("kind", STAGES)
def test_each_way_of_sampling_draws_its_own_rows(make: Make, kind: str) -> None:
    run, losses = make("rem", trained=kind == "controller"), set()
    for sampling in ("windows", "episodes", "uniform", "dfs", "prioritized"):
        _, (update,) = learn(run, kind, f"training.sampling={sampling}", f"{kind}.updates=1")
        losses.add(update.metrics["loss"])
    assert len(losses) == (5 if kind == "dynamics" else 4)  # imagination takes "prioritized" for "uniform"


@pytest.mark.parametrize("name", ["rem", "drama", "unizero", "muzero"])
def test_prioritized_replay_learns_the_losses_of_what_it_draws(make: Make, name: str) -> None:
    """A row's loss is the gradient of its weight. Training further begins with what is new."""
    run = make(name)
    one = ["training.sampling=prioritized", "training.priority.share=1", "training.priority.temperature=1e-3"]
    one += ["dynamics.batch=1", "dynamics.updates=3", *(["dynamics.free_nats=0"] if name == "drama" else [])]
    kept: list[np.ndarray] = []
    for more in (False, True):
        artifact, updates = learn(run, "dynamics", *one, more=more)
        found = read_part(artifact.file(TRAINING), "sampler")
        kept.append(found["losses"][np.isfinite(found["losses"])])
        assert len(kept[-1]) == (6 if more else 3) <= found["windows"]
        for update in updates:
            assert np.isclose(kept[-1], update.metrics["loss"], rtol=1e-5).any()


# -- frequencies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grown", [False, True])
def test_imagination_uses_trained_rows_up_at_the_rate_of_the_batches(make: Make, grown: bool) -> None:
    """The dynamics model drew each of six windows twice. Imagination draws three times as many of all windows each
    time, so one use of a window counts a third there: for 6 updates nothing is ahead of the six, which are in every
    batch, at any other ratio they are not. The same rows count when the experience has grown behind them."""
    run = make("drama")
    cold = ["training.sampling=dfs", "training.dfs.temperature=1e-3", "training.dfs.imagination_temperature=1e-3"]
    cold += ["training.dfs.beta=0", "dynamics.sequence_length=19", "dynamics.batch=4", "dynamics.updates=3"]
    dynamics, _ = learn(run, "dynamics", *cold)
    trained = read_part(dynamics.file(TRAINING), "sampler")["counts"]
    assert sorted(trained[trained > 0]) == [2] * 6
    if grown:
        collect(opened(run))
    controller, _ = learn(run, "controller", *cold, "controller.batch=12", "controller.updates=6")
    used = read_part(controller.file(TRAINING), "sampler")["counts"]
    assert used.shape == ((120,) if grown else (60,)) and used.sum() == 12 * 6
    assert used[np.flatnonzero(trained)].tolist() == [6] * 6


# -- searches ---------------------------------------------------------------------------------------------------------

ALL_ROWS = ["controller.batch=60", "controller.updates=1"]


@pytest.mark.parametrize("name", ["unizero", "muzero"])
def test_training_learns_from_search_results(make: Make, name: str) -> None:
    """A fresh policy is uniform, and its cross entropy against any shares of three actions ln 3."""
    run = make(name, trained=True)
    _, (without,) = learn(run, "dynamics", "dynamics.updates=1")
    learn(run, "controller", *ALL_ROWS)
    _, (searched,) = learn(run, "dynamics", "dynamics.updates=1")
    assert without.metrics["policy_loss"] == 0
    assert searched.metrics["policy_loss"] == pytest.approx(math.log(3), rel=1e-5)


@pytest.mark.parametrize("name", ["unizero", "muzero"])
def test_a_row_is_searched_again_as_if_it_were_just_played(make: Make, name: str) -> None:
    """Frame after frame of its episode, by who plays: without noise the search finds the same."""
    run = make(name)
    learn(run, "dynamics", "dynamics.updates=8", "dynamics.learning_rate=0.01")
    controller, _ = learn(run, "controller", *ALL_ROWS, "controller.dirichlet_fraction=0")
    found = read_part(controller.file(TRAINING), "targets")
    assert found["rows"].tolist() == list(range(60))
    memory = opened(run).experience(latest(run, "experience"))
    world_model, search = load_controller(controller, CPU, {})
    episodes, order = memory.runs(across_ends=False)
    values = np.zeros(60, np.float32)
    for start, length in zip(episodes.start, episodes.length, strict=True):
        state = None
        for place in range(start, start + length):
            row = slice(order[place], order[place] + 1)
            action = memory.action[order[place - 1], None] if place > start else memory.action[row]
            state = world_model.perceive(state, memory.observation[row], action, torch.tensor([place == start]))
            _, seen = search.decide(world_model, state, search.initial_state(1))
            values[row] = search.summarize_search(seen).value.numpy()
    apart = np.abs(found["value"] - values) / values.std()
    assert (apart < 0.1).mean() > 0.95, "rounding may turn a search, but few"


# -- one process or several -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rem", "drama", "cells"])
def test_caches_of_a_process_make_no_difference(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Experience and latents stay in memory: grown by what was collected, anew when what encodes them has changed."""
    monkeypatch.setattr("wmcli.trainers.batches.ENCODE_BATCH", 20)
    run = make(name, trained=True)
    other = copied(run, tmp_path / "other")
    stages = {kind: stage for kind, stage in STAGES.items() if kind != "tokenizer" or name == "rem"}
    small = [f"{kind}.{each}" for kind in stages for each in ("updates=1", "learning_rate=0.02")]
    kept = opened(run, *small)

    def finished(folder: Path, context: Callable[[bool], Context]) -> list[str]:
        imagine(context(False))
        train_dynamics(context(True))
        collect(context(True), steps=12, controller="random")
        return [sha256(stage(context(True))) for stage in stages.values()]

    def same_process(more: bool) -> Context:
        kept.more = more
        return kept

    assert finished(run, same_process) == finished(other, lambda more: opened(other, *small, more=more))


# -- what is measured -------------------------------------------------------------------------------------------------


def test_the_update_that_is_profiled_is_that_of_the_stage(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed in it stops both."""

    class Reached(Exception):
        pass

    def stop(*_: object) -> None:
        raise Reached

    run = make("drama")
    monkeypatch.setattr("wmcli.nn.attention_prior.project", stop)
    with pytest.raises(Reached):
        learn(run, "dynamics")
    groups = profile._groups(opened(run))
    measured = next(stage for group in groups for stage in group if stage.label == "train-dynamics")
    with pytest.raises(Reached):
        measured.call()
