"""`wm compare --attention`: in every kind of world model the weights are those of its own reading of stored windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_systems import Make
from tiny_run import copied, latest

from wmcli.assemble import load_world_model
from wmcli.backbones.attention_weights import watching, weights_of
from wmcli.backbones.transformer import TransformerSettings
from wmcli.cli.main import run as command
from wmcli.errors import UsageError
from wmcli.experience.load import find_held_out
from wmcli.report import attention as report
from wmcli.report.attention import AttentionMatrices, attention_figure
from wmcli.stages import attention as stage
from wmcli.stages.dynamics import train_dynamics
from wmcli.stages.evaluate import evaluate
from wmcli.stages.imagine import imagine
from wmcli.stages.opening import open_context
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.transfer import take_rows

XL = ("backbone.kind=transformer-xl", "backbone.heads=2", "backbone.memory_length=4")
PLAIN = ("backbone.kind=transformer", "backbone.heads=2")
PRIOR = ("backbone.prior.kind=gaussian", "backbone.prior.mean=2")
CASES = {
    "rem, transformer": ("rem", (*PLAIN, *PRIOR)),
    "rem, transformer-xl": ("rem", XL),
    "rem, sequential": ("rem", (*PLAIN, "dynamics.prediction=sequential")),
    "drama, transformer": ("drama", (*PLAIN, *PRIOR, "backbone.prior.form=scale")),
    "s4wm, transformer-xl": ("s4wm", (*XL, "backbone.segment_length=3")),
    "s4wm, full posterior": ("s4wm", (*XL, "dynamics.posterior=full")),
    "unizero": ("unizero", PRIOR),
    "cells": ("cells", (*PLAIN, *PRIOR)),
}


def trained(folder: Path, *overrides: str) -> Path:
    overrides = (*overrides, "dynamics.updates=2")
    context = open_context(folder, None, overrides, create=False, quiet=True)
    context.pictures = False
    train_dynamics(context)
    return folder


def opened(folder: Path) -> Any:
    return open_context(folder, None, ["training.precision=float32"], create=False, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_the_models_own_loss(case: str, make: Make) -> None:
    """Watched while the model computes its loss on one of the windows."""
    system, settings = CASES[case]
    folder = trained(make(system), *settings)
    context, model = opened(folder), latest(folder, "dynamics")
    paid = stage.measure(context, model)
    frames = paid.weights.shape[-1] // paid.elements
    torch.testing.assert_close(paid.weights.sum(-1), torch.ones(paid.weights.shape[:-1], dtype=torch.float64))

    world_model = load_world_model(model, context.machine)
    held_out = find_held_out(model.input("experience"), "test")
    assert (held_out is not None) == (system == "s4wm")
    source = context.held_out(held_out, "test") if held_out else context.experience(model.input("experience"))
    rows = stage.windows(source, frames)[:2]
    assert frames == min(world_model.settings.sequence_length, int(np.median(source.episodes.length)))
    seed = derived_seed(0, "a test")
    with isolated_randomness(seed, torch.device("cpu")):
        wanted = stage.mean_attention(world_model, source, rows)
    observation, action = (take_rows(column, rows, source.device) for column in (source.observation, source.action))
    with torch.no_grad(), isolated_randomness(seed, torch.device("cpu")):
        latent = world_model.encode(observation)
        read = world_model.elements_of(latent, action)
    seen: list[torch.Tensor] = []
    with torch.no_grad(), watching(world_model.backbone, lambda _, *call: seen.append(weights_of(*call).mean(0))):
        if system == "rem":
            with isolated_randomness(seed, torch.device("cpu")):
                world_model.predict(latent, action)
        elif system == "unizero":
            world_model._read_pairs(latent, action, world_model.action_embedding, world_model.backbone)
        elif system == "cells":
            world_model.predict(latent, action)
        else:
            reset = torch.zeros(action.shape[:2], dtype=torch.bool)
            reset[:, 0] = True
            with isolated_randomness(seed, torch.device("cpu")):
                world_model.observe(latent, action, reset)
    layers = len(world_model.backbone.layers)
    assert seen and read.read.shape[1] == wanted.shape[-1]
    if read.queries is not None:  # `fork`: see tests/backbones/test_attention_weights.py
        return
    for layer, mine in enumerate(seen[:layers]):  # all but the elements that the model leaves out at the end
        keys = mine.shape[-2]
        torch.testing.assert_close(mine[..., -keys:], wanted[layer, :, :keys, :keys].float(), rtol=1e-4, atol=1e-5)
        assert not mine[..., :-keys].any()


def test_windows_are_as_long_as_half_of_the_episodes_allow() -> None:
    class Stored:
        order = np.arange(100)[::-1].copy()
        episodes = (np.array([0, 10, 13, 20]), np.array([10, 3, 7, 6]))

    found = stage.windows(Stored(), 50)  # type: ignore[arg-type]
    assert found.shape == (8, 6)
    starts = 99 - found[:, 0]
    assert starts.tolist() == [0, 1, 2, 3, 4, 13, 14, 20]
    assert (np.diff(-found, axis=1) == 1).all()
    assert stage.windows(Stored(), 4).shape == (7 + 4 + 3, 4)  # type: ignore[arg-type]
    Stored.episodes = (np.array([0]), np.array([100]))  # type: ignore[assignment]
    many = stage.windows(Stored(), 3)  # type: ignore[arg-type]
    assert many.shape == (stage.WINDOWS, 3) and many[0, 0] == 99 and many[-1, -1] == 0


def test_elements_have_names() -> None:
    assert stage.element_names(2, 1) == ["oa0", "oa1"]
    assert stage.element_names(2, 2) == ["o0", "a0", "o1", "a1"]
    assert stage.element_names(2, 4) == ["o0", "", "", "a0", "o1", "", "", "a1"]


def test_a_group_is_the_mean_of_its_runs_and_they_must_match() -> None:
    backbone = TransformerSettings()
    prior = torch.zeros(1, 2, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), torch.nan)
    one, other = (torch.rand(1, 2, 4, 4, dtype=torch.float64) for _ in range(2))
    row = stage._row("a", backbone, [stage.Paid(prior, one, 2), stage.Paid(prior + 1, other, 2)])
    visible = np.tril(np.ones((4, 4), bool))
    np.testing.assert_allclose(row.weights[..., visible], ((one + other) / 2).numpy()[..., visible])
    assert np.isnan(row.weights[..., ~visible]).all() and row.elements == ["o0", "a0", "o1", "a1"]
    np.testing.assert_allclose(row.factor[..., visible], (1 + np.e) / 2)
    short = stage.Paid(prior[..., :2, :2], one[..., :2, :2], 2)
    with pytest.raises(UsageError, match="windows have 2 to 4 elements: omit --by"):
        stage._row("a", backbone, [stage.Paid(prior, one, 2), short])


def matrices(layers: int = 2, heads: int = 3, size: int = 6) -> AttentionMatrices:
    masked = np.triu(np.ones((size, size), bool), 1)
    values = np.random.default_rng(1).random((2, layers, heads, size, size))
    values[:, :, :, masked] = np.nan
    return AttentionMatrices("a run", values[0], "a prior", values[1], stage.element_names(size // 2, 2))


def test_the_picture_shows_each_matrix_in_its_place() -> None:
    one, other = matrices(), matrices(layers=1, heads=2)._replace(label="other")
    figure = attention_figure([one, other])
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert titles == ["a run, layer 1", "a run, layer 2", "other, layer 1"]
    for part, (row, layer) in zip(figure.subfigs, [(one, 0), (one, 1), (other, 0)], strict=True):
        shown = [axes.get_images()[0].get_array() for axes in part.axes if axes.get_images()]
        heads = row.factor.shape[1]
        for head in range(heads):
            np.testing.assert_array_equal(np.ma.filled(shown[head], np.nan), row.factor[layer, head])
            np.testing.assert_array_equal(np.ma.filled(shown[heads + head], np.nan), row.weights[layer, head])
        ticks = [text.get_text() for text in part.axes[0].get_yticklabels()]
        assert ticks == ["o0", "a0", "o1", "a1", "o2", "a2"]
    scales = {
        tuple(axes.get_images()[0].get_clim()) for part in figure.subfigs for axes in part.axes if axes.get_images()
    }
    assert len(scales) == 2 and (0.0, 1.0) in scales
    with pytest.raises(UsageError, match="of which a picture holds 400: give fewer runs"):
        attention_figure([matrices(layers=9, heads=12)] * 2)


def test_a_long_name_keeps_its_layer_in_a_narrow_picture() -> None:
    label = "dynamics.prediction=sequential, backbone.prior.kind=gaussian_span, seed=1"
    figure = attention_figure([matrices(layers=2, heads=1)._replace(label=label)])
    figure.canvas.draw()
    for layer, part in enumerate(figure.subfigs, 1):
        assert part.get_suptitle().endswith(f"seed=1, layer {layer}")
        assert part._suptitle.get_window_extent().x1 <= figure.bbox.x1


@pytest.fixture
def evaluated(make: Make, tmp_path: Path) -> dict[str, Path]:
    """UniZero with a prior, without one, and on a backbone that does not attend."""
    begun, changes = make("unizero"), {"gaussian": PRIOR, "none": (), "gru": ("backbone.kind=gru",)}
    runs = {name: trained(copied(begun, tmp_path / name), *change) for name, change in changes.items()}
    for name, folder in runs.items():
        overrides = [*changes[name], "evaluation.episodes=1"]
        context = open_context(folder, None, overrides, create=False, quiet=True)
        context.pictures = False
        imagine(context)
        evaluate(context)
    return runs


@pytest.mark.slow
def test_the_command_draws_variants_in_one_picture(
    evaluated: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[AttentionMatrices] = []
    figure = report.attention_figure
    monkeypatch.setattr(stage, "attention_figure", lambda rows: drawn.extend(rows) or figure(rows))
    runs = [str(evaluated[name]) for name in ("none", "gaussian")]
    file = tmp_path / "a.png"
    assert command(["compare", *runs, "--attention", str(file), "--quiet"]) == 0
    with Image.open(file) as picture:
        assert picture.width > 400 and picture.height > 400
    none, gaussian = drawn
    assert [row.label for row in drawn] == runs
    visible = np.tril(np.ones(none.factor.shape[-2:], bool))
    assert (none.factor[..., visible] == 1).all() and np.isnan(none.factor[..., ~visible]).all()
    model = load_world_model(latest(evaluated["gaussian"], "dynamics"), opened(evaluated["gaussian"]).machine)
    table = model.backbone.prior().exp().detach().numpy()  # by offset
    size = gaussian.factor.shape[-1]
    for query in range(size):
        np.testing.assert_allclose(gaussian.factor[0, :, query, : query + 1], table[0, :, query::-1], rtol=1e-6)
    assert not np.allclose(none.weights[..., visible], gaussian.weights[..., visible])

    drawn.clear()
    assert command(["compare", *runs, "--by", "backbone.prior.kind", "--attention", str(file), "--quiet"]) == 0
    assert [row.label for row in drawn] == ["backbone.prior.kind=none", "backbone.prior.kind=gaussian"]
    np.testing.assert_array_equal(drawn[0].weights, none.weights)

    capsys.readouterr()
    monkeypatch.setattr(stage, "measure", lambda *_: pytest.fail("computed before the refusal"))
    for option in ("--attention", "--priors"):
        assert command(["compare", *runs, "--by", "seed", option, str(tmp_path / "b.png"), "-q"]) == 2
        assert capsys.readouterr().err == (
            "wm compare: seed=1: the runs have different attention priors, whose mean says nothing: add --by"
            " backbone.prior.kind.\n"
        )
    assert command(["compare", *runs, str(evaluated["gru"]), "--attention", str(tmp_path / "b.png"), "-q"]) == 2
    error = capsys.readouterr().err
    assert error == f"wm compare: {evaluated['gru']}: --attention is of transformers, and backbone.kind = gru.\n"
    assert command(["compare", *runs, "--attention", str(tmp_path / "b.txt"), "-q"]) == 2
    assert not list(tmp_path.glob("b.*"))
