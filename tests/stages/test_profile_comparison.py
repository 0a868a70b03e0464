"""Whole models and epochs of several presets side by side: what is measured, and what is refused before."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stage_profile import measured
from tiny_run import TINY, TINY_S4WM

from wmcli.errors import UsageError
from wmcli.settings import resolve
from wmcli.stages import profile_cells, profile_models, profile_presets
from wmcli.stages.context import Context
from wmcli.stages.opening import open_context
from wmcli.stages.profile_comparison import compare
from wmcli.stages.profile_cycle import count_work, epoch_seconds
from wmcli.stages.profile_models import episodes, imagine_frames, model_for, training_job
from wmcli.training.measure import Bench
from wmcli.world_models.latent import LatentWorldModel

VARIANTS = {
    "s4": "",
    "rssm": 'dynamics = {posterior = "recurrent", rows = "streams", sequence_length = 4, context = 2}\n'
    'backbone = {kind = "dreamer-gru", layers = 1}\n',
    "tssm": 'backbone = {kind = "transformer-xl", heads = 2, memory_length = 3, segment_length = 3}\n',
}
S4WM = [text for text in TINY_S4WM if not text.startswith("backbone.")] + ["backbone.width=16"]


@pytest.fixture(autouse=True)
def quick(quick_samples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_presets, "COLLECTED", 9)
    monkeypatch.setattr(profile_models, "ROWS", {"cpu": 3})


def preset(folder: Path, name: str, base: str, text: str) -> str:
    """A preset of one's own, in a file."""
    file = folder / f"{name}.toml"
    about = 'about = "a variant of a test"\npaper = "none: a test"\n'
    file.write_text(f'{about}base = "{base}"\n{text}')
    return str(file)


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    return [preset(tmp_path, name, "memory-small", text) for name, text in VARIANTS.items()]


def opened(folder: Path, name: str, overrides: list[str]) -> Context:
    return open_context(folder / "run", name, overrides, create=True, quiet=True)


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_are_compared_at_every_length(models: list[str], tmp_path: Path) -> None:
    artifact = compare(opened(tmp_path, models[0], S4WM), what="models", presets=models, lengths=[12, 6, 6])
    about = {row["preset"]: row for row in artifact.metrics["models"]}
    assert {name: (row["backbone"], row["cache"]) for name, row in about.items()} == {
        "s4": ("s4", None),
        "rssm": ("dreamer-gru", None),
        "tssm": ("transformer-xl", 3),
    }
    rows = artifact.metrics["rows"]
    assert Counter((row["what"], row["length"], row["preset"]) for row in rows) == {
        (what, length, name): 1 for what in ("training", "imagination") for length in (6, 12) for name in VARIANTS
    }
    for row in rows:
        assert measured(row) and row["seconds_low"] <= row["seconds_25"] <= row["seconds_75"] <= row["seconds_high"]
        assert 0 < row["times_as_long_25"] <= row["times_as_long"] <= row["times_as_long_75"]
        assert row["preset"] != "s4" or row["times_as_long"] == 1
        # 2 episodes are trained on, and the second halves of 3 are imagined
        frames = 2 * row["length"] if row["what"] == "training" else 3 * row["length"] // 2
        assert row["rate"] * row["seconds"] == pytest.approx(frames)
        if row["what"] == "training":
            assert row["episodes_per_second"] == pytest.approx(2 / row["seconds"])
    assert (artifact.path / "models.png").stat().st_size > 1000


@pytest.mark.parametrize("name", VARIANTS)
def test_imagination_in_a_profile_is_the_world_models_own(name: str, models: list[str], tmp_path: Path) -> None:
    context = opened(tmp_path, models[list(VARIANTS).index(name)], S4WM)
    model: Any = context.machine.freeze(model_for(context, 10))
    batch = episodes(model, context.spaces, 3, 10)
    torch.manual_seed(3)
    images = imagine_frames(model, batch.inputs, batch.action, context.machine)
    torch.manual_seed(3)
    with torch.no_grad():
        _, state = model.observe(model.encode(batch.inputs[:, :5]), batch.action[:, :5], batch.is_first[:, :5])
        frames = []
        for action in batch.action[:, 4:9].unbind(1):
            _, state = model.imagine(state, action)
            frames.append(model.frame(state))
    assert images.shape == (15, 3, *batch.inputs.shape[2:4])
    decoded = images.view(3, 5, *images.shape[1:]).permute(0, 1, 3, 4, 2)
    difference = (255 * decoded).clamp(0, 255) - torch.stack(frames, 1).float()
    assert difference.abs().max() <= 1  # rounding to whole numbers
    assert torch.stack(frames, 1).float().std() > 1


@pytest.mark.parametrize(("name", "passes"), [("s4", [11]), ("tssm", [11]), ("rssm", [4, 3, 4])])
def test_training_reads_every_frame_once(
    name: str, passes: list[int], models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that learns from streams goes through an episode in segments, from the state at the end of the last."""
    context = opened(tmp_path, models[list(VARIANTS).index(name)], S4WM)
    model = model_for(context, 11).train()
    batch = episodes(model, context.spaces, 2, 11)
    right, read, carries = LatentWorldModel.carried_loss, [], []

    def carried_loss(self: Any, part: Any, carry: Any) -> Any:
        read.append(part.inputs)
        result = right(self, part, carry)
        carries.append((carry, result[2]))
        return result

    monkeypatch.setattr(LatentWorldModel, "carried_loss", carried_loss)
    training_job(model, batch, context.machine)()
    assert [part.shape[1] for part in read] == passes
    assert torch.equal(torch.cat(read, 1), batch.inputs)
    assert all(before is after for (_, after), (before, _) in zip(carries[:-1], carries[1:], strict=True))


@pytest.mark.slow
def test_a_model_that_is_too_slow_is_left_out_at_longer_lengths(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient, slow = profile_cells.time_call, iter([False, True, True])
    monkeypatch.setattr(
        profile_cells, "time_call", lambda job, device: 99.0 if next(slow, False) else patient(job, device)
    )
    context = opened(tmp_path, models[0], S4WM)
    rows = compare(context, what="models", presets=models, lengths=[6, 8]).metrics["rows"]
    (skipped,) = [row for row in rows if "skipped" in row]
    assert (skipped["what"], skipped["preset"], skipped["skipped"]) == ("training", "rssm", "slower than 60 s")
    assert {(row["preset"], row["length"]) for row in rows if row["preset"] == "rssm"} == {("rssm", 6)}


@pytest.mark.parametrize(
    ("presets", "overrides", "message"),
    [
        (["memory-small", "rem-quick"], [], "measures models over latents, and preset rem-quick has"),
        (["memory-small", "rooms-small"], [], "presets memory-small and rooms-small have others"),
        (["memory-small", "memory-small"], [], "two presets have the name memory-small"),
        (["memory-small", "rssm-tbtt-2d"], ["backbone.kind=transformer"], "carries a state without end"),
    ],
)
def test_models_that_cannot_be_compared_are_refused_before_any_work(
    presets: list[str], overrides: list[str], message: str, tmp_path: Path
) -> None:
    context = opened(tmp_path, presets[0], overrides)
    with pytest.raises(UsageError, match=message) as caught:
        compare(context, what="models", presets=presets, lengths=[8])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# -- presets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def token_models(tmp_path: Path) -> list[str]:
    pixels = 'controller = {input = "pixels", action_inputs = false, pixel_channels = [4, 6]}\n'
    return ["quickstart", preset(tmp_path, "sequential", "quickstart", f'dynamics.prediction = "sequential"\n{pixels}')]


@pytest.mark.slow
def test_epochs_of_presets_are_projected_side_by_side(token_models: list[str], tmp_path: Path) -> None:
    artifact = compare(opened(tmp_path, "quickstart", TINY), what="presets", presets=token_models)
    rows = {(row["preset"], row["stage"]): row for row in artifact.metrics["rows"]}
    stages = ["collect", "train-tokenizer", "train-dynamics", "imagine"]
    assert list(rows) == [
        (name, stage)
        for name in ("quickstart", "sequential")
        for stage in (*stages, "train-dynamics and imagine", "epoch")
    ]
    for (name, stage), row in rows.items():
        assert row["rounds"] == 2 and row["seconds_25"] <= row["seconds"] <= row["seconds_75"]
        assert row["times_as_long"] == 1 if name == "quickstart" else row["times_as_long"] > 0
        if stage == "epoch":  # of two rounds the median is the mean, so sums agree
            assert row["seconds"] == pytest.approx(sum(rows[name, each]["seconds"] for each in stages))
    assert (artifact.path / "presets.png").stat().st_size > 1000


def test_rounds_are_those_of_all_presets_in_turn(
    token_models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of work takes a second a unit of the first preset, and of the other two, then three."""
    context, calls = opened(tmp_path, "quickstart", TINY), []

    def time_jobs(self: Bench, name: str, jobs: Any) -> dict[str, list[float]]:
        calls.append((name, list(jobs)))
        for job in jobs.values():
            job()  # none is frozen that learns
        units = {"collect, random policy": 9, "collect, acting": 9, "encode": 90}.get(name, 1)
        return {
            label: [units * each for each in ((1.0, 1.0) if label == "quickstart" else (2.0, 3.0))] for label in jobs
        }

    monkeypatch.setattr(Bench, "time_jobs", time_jobs)
    monkeypatch.setattr(Bench, "__init__", lambda self, machine, progress: vars(self).update(quick=False, ceilings=[]))
    rows = compare(context, what="presets", presets=token_models).metrics["rows"]
    assert calls == [
        (name, ["quickstart", "sequential"])
        for name in (
            "collect, random policy",
            "collect, acting",
            "train-tokenizer",
            "train-dynamics",
            "encode",
            "imagine",
        )
    ]
    work = count_work(context.settings)
    by = {(row["preset"], row["stage"]): row for row in rows}
    # every epoch has all stages: collect 90 steps, 6 + 5 + 4 updates, and the frames that are encoded on average
    encoded = work["encode"] / context.settings.run.epochs
    assert by["quickstart", "collect"]["seconds"] == 90 and by["quickstart", "imagine"]["seconds"] == 4
    assert by["quickstart", "train-dynamics"]["seconds"] == pytest.approx(5 + encoded)
    assert by["sequential", "imagine"]["seconds"] == 10
    assert all(row["times_as_long"] == pytest.approx(2.5) for row in rows if row["preset"] == "sequential")
    assert by["sequential", "epoch"]["times_as_long_75"] == pytest.approx(2.75)


@pytest.mark.parametrize(
    ("presets", "message"),
    [
        (["rem-quick"], "needs two presets or more"),
        (["rem-quick", "memory-small"], "counts acting and imagination, and preset memory-small has not both"),
        (["rem-quick", "rem-quikc"], "did you mean 'rem-quick'?"),
    ],
)
def test_epochs_that_cannot_be_compared_are_refused_before_any_work(
    presets: list[str], message: str, tmp_path: Path
) -> None:
    context = opened(tmp_path, presets[0], [])
    with pytest.raises(UsageError) as caught:
        compare(context, what="presets", presets=presets)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_epoch_has_each_stage_as_often_as_it_is_due() -> None:
    plan = ["run.epochs=6", "run.collect_epochs=4", "run.dynamics_after=2", "run.controller_after=3"]
    plan += ["run.tokenizer_after=1", "run.tokenizer_epochs=4", "run.evaluate_every=3", "collect.steps=10"]
    plan += ["environment.count=3", "tokenizer.updates=6", "dynamics.updates=5", "controller.updates=4"]
    seconds = {"collect, random policy": 0.5, "train-tokenizer": 2.0, "train-dynamics": 0.25, "encode": 0.125}
    # 12 steps in each of 4 epochs; dynamics in 4 epochs, of which 2 encode 36 and 48 frames
    projected = epoch_seconds(resolve("rem", plan), seconds)
    assert projected == {"collect": 6, "train-tokenizer": 12, "train-dynamics": 5 * 0.25 + (36 + 48) * 0.125 / 4}
    assert epoch_seconds(resolve("rem", plan), seconds | {"imagine": 3.0, "eval": 9.0})["imagine"] == 12
