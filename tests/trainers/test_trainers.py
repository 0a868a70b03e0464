"""Training on arrays of one's own: models, data and settings go in, and no folder is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wmcli.assemble import build_controller, build_tokenizer, build_world_model
from wmcli.errors import UsageError
from wmcli.experience import Replay
from wmcli.settings import Settings, resolve
from wmcli.spaces import Spaces
from wmcli.trainers import DynamicsTrainer, ImaginationTrainer, ReanalysisTrainer, TokenizerTrainer
from wmcli.trainers.batches import build_segment_sampler, frames_per_row
from wmcli.training.device import Machine, isolated_randomness
from wmcli.training.loop import Trainer, fit
from wmcli.world_models.base import Batch

CPU = Machine(torch.device("cpu"), "float32", 1)
ACTIONS, SIZE, ROWS, EPISODE = 3, 16, 60, 20

GAME = [f"environment.size={SIZE}", "backbone.width=16", "backbone.layers=1", "dynamics.batch=3"]
PLANNER = ["dynamics.td_steps=2", "dynamics.channels=[6, 8]", "controller.simulations=3", "controller.batch=4"]
SYSTEMS: dict[str, tuple[str, list[str]]] = {
    "rem": (
        "quickstart",
        [
            *GAME,
            *("tokenizer.downsamples=2", "tokenizer.channels=8", "tokenizer.width=16", "tokenizer.fsq_levels=[4, 5]"),
            *("tokenizer.codes=20", "tokenizer.batch=5", "dynamics.sequence_length=6", "backbone.heads=2"),
            *("controller.width=8", "controller.latent_channels=[4]", "controller.burn_in=2", "controller.batch=4"),
            "controller.imagination_horizon=3",
        ],
    ),
    "drama": (
        "drama-quick",
        [
            *GAME,
            *("tokenizer.categoricals=4", "tokenizer.classes=5", "tokenizer.channels=[6, 8]", "tokenizer.batch=5"),
            *("tokenizer.strides=[2, 2]", "dynamics.sequence_length=9", "dynamics.context=3", "dynamics.act_window=4"),
            *("backbone.head_width=8", "controller.imagination_horizon=2", "controller.batch=4"),
        ],
    ),
    "rssm": (
        "rssm-quick",
        [
            *GAME,
            *(
                "tokenizer.categoricals=4",
                "tokenizer.classes=5",
                "tokenizer.channels=[6, 8]",
                "tokenizer.strides=[2, 2]",
            ),
            *("tokenizer.batch=5", "dynamics.rows=streams", "dynamics.across_ends=false", "dynamics.sequence_length=8"),
            *("dynamics.context=4", "training.sampling=windows"),
            *("controller.imagination_horizon=2", "controller.batch=4"),
        ],
    ),
    "unizero": (
        "unizero-quick",
        [*GAME, *PLANNER, "dynamics.sequence_length=4", "dynamics.context=2", "backbone.heads=2"],
    ),
    "muzero": ("muzero-quick", [f"environment.size={SIZE}", "dynamics.batch=3", *PLANNER]),
}
TRAINERS = [
    *[(name, "dynamics") for name in SYSTEMS],
    *[(name, "tokenizer") for name in ("rem", "drama")],
    *[(name, "controller") for name in SYSTEMS],
]


def settings_of(name: str, *overrides: str) -> Settings:
    preset, own = SYSTEMS[name]
    return resolve(preset, [*own, *overrides])


def replay(seed: int = 0, lengths: Sequence[int] = (EPISODE,) * 3) -> Replay:
    """Episodes of random frames, one behind the other."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    first = np.isin(np.arange(rows), np.cumsum([0, *lengths]))
    held = Replay(CPU.device)
    held.extend(
        {
            "observation": rng.integers(0, 256, (rows, SIZE, SIZE, 3), dtype=np.uint8),
            "action": rng.integers(ACTIONS, size=rows).astype(np.int32),
            "reward": rng.normal(size=rows).astype(np.float32),
            "terminated": np.roll(first, -1),
            "truncated": np.zeros(rows, bool),
            "first": first,
            "lives": np.zeros(rows, np.int16),
            "stream": np.zeros(rows, np.int16),
        }
    )
    return held


def trainer_of(
    name: str, kind: str, rng: np.random.Generator, *overrides: str, data: Replay | None = None, **how: Any
) -> Trainer:
    settings, data = settings_of(name, *overrides), data or replay()
    training = settings.training
    spaces = Spaces.of_images(settings.environment.size, ACTIONS)
    tokenizer = build_tokenizer(settings, spaces) if settings.dynamics.tokenizer_kind else None
    if kind == "tokenizer":
        assert tokenizer is not None
        return TokenizerTrainer(tokenizer, data, settings.tokenizer, training, machine=CPU, rng=rng)
    world_model = build_world_model(settings, tokenizer, spaces)
    if kind == "dynamics":
        return DynamicsTrainer(world_model, data, settings.dynamics, training, machine=CPU, rng=rng, **how)
    world_model = CPU.freeze(world_model)
    controller: Any = build_controller(settings, world_model)
    if settings.controller.searches:
        return ReanalysisTrainer(world_model, controller, data, settings.controller, machine=CPU, rng=rng)
    return ImaginationTrainer(world_model, controller, data, settings.controller, training, machine=CPU, rng=rng)


def trained(name: str, kind: str, updates: int, **how: Any) -> tuple[Trainer, dict[str, float], list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    with isolated_randomness(5, CPU.device) as rng:
        trainer = trainer_of(name, kind, rng, **how)
        metrics = fit(trainer, updates, log=lines.append)
    return trainer, metrics, lines


def weights(trainer: Trainer) -> dict[str, Tensor]:
    (module,) = trainer.state.modules.values()
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "kind"), TRAINERS)
def test_it_trains_on_arrays_without_a_folder(name: str, kind: str, empty_folder: Path) -> None:
    fresh, _, _ = trained(name, kind, 0)
    once, metrics, lines = trained(name, kind, 2)
    again, repeated, _ = trained(name, kind, 2)
    assert metrics == repeated and all(np.isfinite(value) for value in metrics.values())
    assert [line["update"] for line in lines] == [2] and metrics.items() <= lines[0].items()
    before, after, same = weights(fresh), weights(once), weights(again)
    assert all(torch.equal(after[key], same[key]) for key in after)
    if once.state.optimizer is not None:
        assert any(not torch.equal(before[key], after[key]) for key in after)
    assert not list(empty_folder.iterdir())


@pytest.mark.parametrize("across_ends", ["true", "false"])
@pytest.mark.parametrize("sampling", ["uniform", "windows", "dfs", "prioritized"])
def test_a_burn_in_precedes_what_is_sampled(sampling: str, across_ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame is learned from, also those without a past. The burn-in reaches back as far as there are frames."""
    keys = ["dynamics.burn_in=3", "dynamics.sequence_length=6", "dynamics.act_window=0", "dynamics.batch=200"]
    with isolated_randomness(5, CPU.device) as rng:
        trainer = trainer_of(
            "drama", "dynamics", rng, *keys, f"dynamics.across_ends={across_ends}", f"training.sampling={sampling}"
        )
    batches: list[Batch] = []
    monkeypatch.setattr(trainer, "_update", lambda batch: batches.append(batch) or {})
    trainer.update()
    (batch,) = batches
    assert batch.valid.shape == (200, 3 + 6)
    begins = {tuple(valid) for valid in batch.valid[:, :4].tolist()}
    assert {sum(valid) for valid in begins} == {1, 2, 3, 4} and all(valid[3] for valid in begins)
    assert batch.is_first[~batch.valid[:, 2], 3].all(), "no real burn-in: the first learned frame opens a run"
    if across_ends == "true":
        assert batch.valid[:, 3:].all()


def test_a_model_with_a_frozen_encoder_encodes_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer encodes frames that nobody encoded before, and gathers latents and not frames."""
    trainer, _, _ = trained("rem", "dynamics", 0)
    assert isinstance(trainer, DynamicsTrainer)
    given = torch.zeros_like(trainer._frames)
    assert trainer._frames.dtype == torch.int64 and len(trainer._frames) == ROWS and trainer._frames.any()
    other, _, _ = trained("rem", "dynamics", 0, latents=given)
    assert isinstance(other, DynamicsTrainer) and other._frames is given


@pytest.mark.parametrize(("validations", "kept"), [([3.0, 1.0, 2.0], 2), ([1.0, 2.0, 3.0], 1), ([3.0, 2.0, 1.0], 3)])
def test_the_weights_of_the_lowest_validation_loss_are_selected(
    monkeypatch: pytest.MonkeyPatch, validations: list[float], kept: int
) -> None:
    losses = iter(validations)
    monkeypatch.setattr("wmcli.trainers.dynamics.validation_loss", lambda *given, **how: lambda: next(losses))
    with isolated_randomness(5, CPU.device) as rng:
        how = ["dynamics.validate_every=1", "dynamics.updates=3"]
        trainer = trainer_of("drama", "dynamics", rng, *how, held_out=replay(1))
        seen: list[dict[str, Tensor]] = []
        _watch(trainer, lambda: seen.append(weights(trainer)))
        fit(trainer, 3)
    last = weights(trainer)
    trainer.select_weights()
    selected = weights(trainer)
    assert all(torch.equal(selected[key], seen[kept - 1][key]) for key in selected)
    assert trainer.status() == {
        "validation_loss": validations[-1],
        "best_validation_loss": min(validations),
        "best_update": kept,
    }
    assert (kept == 3) == all(torch.equal(selected[key], last[key]) for key in selected)


def _watch(trainer: Trainer, after: Callable[[], None]) -> None:
    """Call `after` behind every update."""
    update = trainer.update

    def watched() -> Any:
        metrics = update()
        after()
        return metrics

    trainer.update = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["rem", "drama"])
def test_curiosity_rewards_the_disagreement_of_the_ensemble(name: str) -> None:
    curious = ["dynamics.ensemble=2", "controller.curiosity=0.5"]
    with isolated_randomness(5, CPU.device) as rng:
        trainer = trainer_of(name, "controller", rng, *curious)
        metrics = fit(trainer, 1)
    assert metrics["imagined_bonus"] > 0
    _, plain, _ = trained(name, "controller", 1)
    assert "imagined_bonus" not in plain
    with pytest.raises(UsageError, match=r"these dynamics have none: set dynamics.ensemble = 5"):
        settings_of(name, "controller.curiosity=0.5")
    with isolated_randomness(5, CPU.device) as rng, pytest.raises(UsageError, match="was trained without an ensemble"):
        model = trainer_of(name, "controller", rng).world_model  # type: ignore[attr-defined]
        build_controller(settings_of(name, *curious), model)


@pytest.mark.parametrize(
    ("name", "overrides", "lengths", "line"),
    [
        (
            "drama",
            [],
            [2, 3],
            "dynamics.sequence_length = 9: the longest sequence of the experience has 5 frames, the episodes of one"
            " environment together (dynamics.across_ends = true): collect more with wm collect, or set"
            " dynamics.sequence_length=5",
        ),
        *(
            (
                "drama",
                ["dynamics.across_ends=false", f"dynamics.rows={rows}", "training.sampling=windows"],
                [1, 1, 1],
                f"dynamics.rows = {rows}: the longest episode of the experience has 1 frame, and dynamics learn from 2"
                " in a row: collect longer ones with wm collect, or set dynamics.closing_frames=true, which adds the"
                " frame behind each last action",
            )
            for rows in ("windows", "episodes")
        ),
        (
            "rssm",
            ["dynamics.closing_frames=true"],
            [1] * 20,
            "dynamics.rows = streams: the longest episode of the experience has 1 frame, and dynamics learn from 2 in a"
            " row: collect longer ones with wm collect",
        ),
        (
            "rem",
            [
                "dynamics.context=4",
                "dynamics.min_segment=0",
                "controller.burn_in=2",
                "controller.imagination_horizon=2",
            ],
            [4, 2],
            "dynamics.context = 4: the longest episode of the experience has 4 frames, and dynamics learn from 5 in a"
            " row: collect longer ones with wm collect, or set dynamics.context=3",
        ),
        (
            "rem",
            ["dynamics.min_segment=3"],
            [1, 2],
            "dynamics.min_segment = 3: the longest episode of the experience has 2 frames, and dynamics learn from 3 in"
            " a row: collect longer ones with wm collect, or set dynamics.min_segment=2",
        ),
    ],
)
def test_episodes_too_short_to_learn_from_are_one_line(
    name: str, overrides: list[str], lengths: list[int], line: str
) -> None:
    with isolated_randomness(5, CPU.device) as rng, pytest.raises(UsageError) as caught:
        trainer_of(name, "dynamics", rng, *overrides, data=replay(lengths=lengths))
    assert str(caught.value) == f"{line}."


@pytest.mark.parametrize("name", ["unizero", "muzero"])
def test_planners_learn_from_episodes_of_a_single_frame(name: str) -> None:
    """There are rewards and values to learn, if no latents to predict."""
    _, metrics, _ = trained(name, "dynamics", 2, data=replay(lengths=[1] * 5))
    assert metrics["reward_loss"] > 0 and metrics["value_loss"] > 0 and np.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    ("rows", "history", "across_ends"),
    [
        *(("windows", history, across_ends) for history in (0, 3) for across_ends in (False, True)),
        ("streams", 0, False),
        ("episodes", 0, False),
    ],
)
def test_frames_of_a_row_are_those_of_the_batches(rows: str, history: int, across_ends: bool) -> None:
    """Episodes of several lengths, one of a single frame, counted in a round of batches."""
    lengths = [12, 1, 5, 9, 30, 2]
    data = replay(lengths=lengths)
    segment = history + (40 if rows == "episodes" else 6)
    model: Any = SimpleNamespace(rows=rows, across_ends=across_ends, segment=segment, history=history, min_segment=2)
    training = resolve("quickstart", ["training.sampling=windows"]).training
    sampler = build_segment_sampler(training, data, model, np.random.default_rng(0))
    windows = sampler.batch(getattr(sampler, "windows", 7))
    learned = windows.valid[:, history:].sum(1).mean()
    assert frames_per_row(model, data.runs(across_ends)[0].length) == pytest.approx(learned)
    assert frames_per_row(model, np.array([], np.int64)) == 0
