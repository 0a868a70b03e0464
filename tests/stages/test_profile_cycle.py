"""The projected time of a run: its work counted over all epochs, against counts by hand and against `wm run` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_systems import SYSTEMS

from wmcli.settings import Settings, resolve
from wmcli.stages import train
from wmcli.stages.loop import run_loop
from wmcli.stages.opening import open_context
from wmcli.stages.profile_cycle import count_work, project

PLAN = [
    "run.epochs=6",
    "run.collect_epochs=4",
    "run.dynamics_after=2",
    "run.controller_after=3",
    "run.evaluate_every=3",
    "run.evaluate_episodes=7",
    "evaluation.episodes=10",
    "collect.steps=10",
    "environment.count=3",  # so 12 steps each
    "dynamics.updates=5",
    "controller.updates=4",
]


def rem() -> Settings:
    return resolve("rem", [*PLAN, "run.tokenizer_after=1", "run.tokenizer_epochs=4", "tokenizer.updates=6"])


def test_the_work_of_a_token_model_is_counted_by_epoch() -> None:
    # epoch    1    2    3    4    5    6
    # rows    12   24   36   48   48   48
    # tokenizer     x    x    x              3 epochs
    # dynamics           x    x    x    x    4 epochs, encoding 36, 48, then nothing new
    # controller              x    x    x    3 epochs, with the codes of the dynamics' stage
    assert count_work(rem()) == {
        "collect, random policy": 48,  # the first controller comes after the last collect
        "collect, start and publish": 4,
        "train-tokenizer": 18,
        "train-tokenizer, start and publish": 3,
        "train-dynamics": 20,
        "train-dynamics, start and publish": 4,
        "encode": 36 + 48,
        "imagine": 12,
        "imagine, start and publish": 3,
        "eval": 10,  # epoch 3 has no controller
    }


def test_a_trained_controller_collects_and_is_evaluated_on_the_way() -> None:
    work = count_work(resolve("rem", [*PLAN, "run.collect_epochs=6", "run.tokenizer_epochs=0", "run.evaluate_every=5"]))
    assert (work["collect, random policy"], work["collect, acting"]) == (48, 24)
    assert work["eval"] == 7 + 10
    assert work["encode"] == 36 + 12 + 12 + 12  # a tokenizer that stands still encodes the new frames only


def test_latents_of_a_joint_model_are_encoded_for_each_new_version() -> None:
    work = count_work(resolve("drama", PLAN))
    assert work["encode"] == 48 + 48 + 48  # for the controller alone, in epochs 4 to 6
    assert "train-tokenizer" not in work


def test_planners_encode_within_their_updates() -> None:
    assert "encode" not in count_work(resolve("unizero", PLAN))


def test_the_projection_is_the_sum_by_hand() -> None:
    seconds = {
        "collect, random policy": 0.5,
        "collect, start and publish": 1.0,
        "train-tokenizer": 2.0,
        "train-tokenizer, start and publish": 3.0,
        "train-dynamics": 0.25,
        "train-dynamics, start and publish": 4.0,
        "encode": 0.125,
        "imagine": 1.5,
        "imagine, start and publish": 5.0,
        "collect, acting": 1e9,  # not a part of this run
    }
    projected = project(rem(), {what: {"what": what, "seconds": each} for what, each in seconds.items()})
    by_hand = 48 * 0.5 + 4 * 1 + 18 * 2 + 3 * 3 + 20 * 0.25 + 4 * 4 + 84 * 0.125 + 12 * 1.5 + 3 * 5
    assert projected["seconds"] == by_hand == 137.5
    assert (projected["steps"], projected["evaluation_episodes"]) == (48, 10)
    assert projected["seconds_per_step"] == by_hand / 48
    rows = {row["what"]: row for row in projected["rows"]}
    assert set(rows) == seconds.keys() - {"collect, acting"}
    assert rows["train-tokenizer"]["total_seconds"] == 36
    assert rows["train-tokenizer"]["share"] == 36 / 137.5
    assert rows["train-tokenizer"]["seconds_per_step"] == 36 / 48
    assert (rows["encode"]["count"], rows["encode"]["unit"]) == (84, "frames")
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rem", "drama"])
def test_the_counts_are_those_of_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `wm run` encodes, collects and trains is what is counted."""
    preset, small = SYSTEMS[name]
    plan = ["run.epochs=4", "run.collect_epochs=3", "run.dynamics_after=1", "run.controller_after=1"]
    plan += ["run.evaluate_every=0", "evaluation.episodes=1", "evaluation.environments=1"]
    plan += ["tokenizer.updates=1", "dynamics.updates=2", "controller.updates=1"]
    plan += ["run.tokenizer_after=0", "run.tokenizer_epochs=3"] if name == "rem" else []
    context = open_context(tmp_path / "run", preset, [*small, *plan], create=True, quiet=True)
    frames: list[int] = []
    fitted: list[str] = []
    encode, fit = train.encode_frames, train.fit

    def counted_encoding(model: Any, all_frames: Any, *rest: Any, encoded: Any = None, **more: Any) -> Any:
        frames.append(len(all_frames) - (0 if encoded is None else len(encoded)))
        return encode(model, all_frames, *rest, encoded=encoded, **more)

    def counted_fit(trainer: Any, count: int, **more: Any) -> Any:
        fitted.append(more["stage"])
        assert count == (2 if more["stage"] == "train-dynamics" else 1)
        return fit(trainer, count, **more)

    monkeypatch.setattr(train, "encode_frames", counted_encoding)
    monkeypatch.setattr(train, "fit", counted_fit)
    run_loop(context)
    work = count_work(context.settings)
    assert sum(frames) == work["encode"]
    for stage in ("train-tokenizer", "train-dynamics", "imagine"):
        assert fitted.count(stage) == work[f"{stage}, start and publish"]
        assert fitted.count(stage) * (2 if stage == "train-dynamics" else 1) == work[stage]
    experience = context.run.artifacts("experience")
    played = [each for each in experience if "controller" in each.inputs]
    steps = experience[-1].metrics["total_steps"]
    assert len(experience) == work["collect, start and publish"]
    assert steps == work["collect, random policy"] + work["collect, acting"]
    assert len(played) * steps == work["collect, acting"] * len(experience)
