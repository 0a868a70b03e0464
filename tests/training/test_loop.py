"""The loop: resumed at any update it ends in the same bits; its lines, checkpoints and refusals."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_trainer import CPU, Killed, Process, SmallTrainer

from wmcli.errors import ArtifactError, DivergedError, Stopped
from wmcli.training import checkpoint as checkpoint_module
from wmcli.training import loop
from wmcli.training.checkpoint import CHECKPOINT, TrainState, load_tensors, read_part
from wmcli.training.optim import build_optimizer
from wmcli.training.optim import update as plain_update


def die_at(update: int) -> Callable[[int], None]:
    def before(done: int) -> None:
        if done == update:
            raise Killed

    return before


def ask_to_stop_in(update: int, number: signal.Signals = signal.SIGTERM) -> Callable[[int], None]:
    """A signal while that update (counted from 1) is computed."""

    def before(done: int) -> None:
        if done == update - 1:
            os.kill(os.getpid(), number)

    return before


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def whole(tmp_path: Path, updates: int, **how: str) -> Process:
    """The same process without any interruption."""
    (tmp_path / "whole").mkdir()
    process = Process(tmp_path / "whole", **how)
    process.run(updates)
    return process


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "laprop"])
@pytest.mark.parametrize("sampling", ["windows", "episodes", "uniform", "dfs", "prioritized"])
def test_killed_after_any_update_it_ends_in_the_same_bits(
    tmp_path: Path, folder: Path, sampling: str, optimizer: str
) -> None:
    """Weights, buffers, moments, both generators, the sampler and the losses reported; every update dies once, so
    checkpoints are of resumed processes as well. A round of the sampler has 20 windows, so rounds end on the way."""
    updates = 7
    for update in range(1, updates):
        with pytest.raises(Killed):
            Process(folder, sampling, optimizer, before=die_at(update)).run(updates)
    resumed = Process(folder, sampling, optimizer)
    resumed.run(updates)
    undisturbed = whole(tmp_path, updates, sampling=sampling, optimizer=optimizer)
    assert resumed.learned() == undisturbed.learned()
    assert resumed.state.metrics == undisturbed.state.metrics


@pytest.mark.parametrize("died", [4, 5])
def test_a_logged_line_is_of_all_its_updates_also_across_a_kill(tmp_path: Path, folder: Path, died: int) -> None:
    """Lines come every 3 updates: the second is of updates 4 to 6, one or two of them before the kill."""
    with pytest.raises(Killed):
        Process(folder, before=die_at(died)).run(6)
    resumed = Process(folder)
    resumed.run(6)
    undisturbed = whole(tmp_path, 6)
    del resumed.log[0]["updates_per_second"], undisturbed.log[1]["updates_per_second"]
    assert resumed.log == undisturbed.log[1:]


def test_dropout_and_sampler_matter_here(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a checkpoint that forgets torch's generator, or the sampler, gives other bits."""
    undisturbed = whole(tmp_path, 5)
    for forgotten in ("load_random", "load_generator"):
        with pytest.raises(Killed):
            Process(folder, before=die_at(2)).run(5)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_module, forgotten, lambda *_: None)
            if forgotten == "load_generator":  # nothing else would restore what the sampler shares with the stage
                patch.setattr("wmcli.experience.WindowSampler.load", lambda *_: None)
            resumed = Process(folder)
            resumed.run(5)
        assert resumed.learned() != undisturbed.learned()
        shutil.rmtree(folder)
        folder.mkdir()


def test_a_finished_process_is_not_taken_again(folder: Path) -> None:
    first = Process(folder)
    metrics = first.run(4)
    again = Process(folder, before=die_at(4))
    assert again.run(4) == metrics
    assert again.learned() == first.learned()
    assert again.log == []


def test_further_training_continues_weights_and_counters(tmp_path: Path, folder: Path) -> None:
    first = Process(folder)
    first.run(4)
    (tmp_path / "more").mkdir()
    second = Process(tmp_path / "more", seed=6)
    second.run(2, parent=folder / CHECKPOINT)
    assert (second.state.trained, second.state.update) == (4, 2)
    assert second.state.modules["net"].get_buffer("calls") == 6
    assert second.learned()["optimizer/0/step"] == 6
    assert [record["update"] for record in second.log] == [6]
    (tmp_path / "most").mkdir()
    third = Process(tmp_path / "most")
    third.run(1, parent=tmp_path / "more" / CHECKPOINT)
    assert (third.state.trained, third.state.update) == (6, 1)


def test_training_further_goes_on_counting_the_windows(tmp_path: Path, folder: Path) -> None:
    Process(folder, "dfs").run(4)
    counted = read_part(folder / CHECKPOINT, "sampler")["counts"]
    assert counted.dtype == np.int64 and counted.shape == (23,) and counted.sum() == 4 * 7
    (tmp_path / "more").mkdir()
    second = Process(tmp_path / "more", "dfs", seed=6)
    second.run(2, parent=folder / CHECKPOINT)
    now = np.array(second.learned()["sampler"]["counts"])
    assert now.sum() == 6 * 7 and (now >= counted).all()


@pytest.mark.parametrize("samplings", [("windows", "dfs"), ("dfs", "windows")])
def test_training_further_may_draw_otherwise(tmp_path: Path, folder: Path, samplings: tuple[str, str]) -> None:
    before, after = samplings
    Process(folder, before).run(2)
    (tmp_path / "more").mkdir()
    second = Process(tmp_path / "more", after)
    second.run(2, parent=folder / CHECKPOINT)
    state = second.learned()["sampler"]
    assert sum(state["counts"]) == 2 * 7 if after == "dfs" else state["drawn"] == 2 * 7


class Noted:
    """A part that keeps what it is given."""

    def __init__(self, **state: Any) -> None:
        self.given = state

    def state(self) -> dict[str, Any]:
        return self.given

    def load(self, state: dict[str, Any]) -> None:
        self.given = state

    def continue_from(self, state: dict[str, Any]) -> None:
        self.given = {"further": state}


def train_state(**parts: Noted) -> TrainState:
    weight = torch.nn.Linear(1, 1)
    return TrainState({"net": weight}, build_optimizer("adam", weight.parameters(), 0.1, 0.0), rng(), dict(parts))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_parts_get_their_arrays_and_plain_values_back(folder: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.int32).reshape(2, 3), "a": np.array([0.5]), "none": np.zeros((0, 2), bool)}
    plain = {"n": 3, "names": ["x"], "nested": {"deep": 1 << 90}}
    path = folder / CHECKPOINT
    saved = train_state(first=Noted(**arrays, **plain), second=Noted(b=np.ones(2)), third=Noted())
    saved.save(path, CPU.device)
    loaded = train_state(first=Noted(), second=Noted(), third=Noted(n=1))
    loaded.load(path, CPU.device)
    further = train_state(first=Noted(), fourth=Noted(n=1))  # one more and one less than there are in the file
    further.continue_from(path)
    assert further.parts["fourth"].given == {"n": 1}
    for got in (loaded.parts["first"].given, further.parts["first"].given["further"], read_part(path, "first")):
        assert {key: value for key, value in got.items() if key not in arrays} == plain
        assert got.keys() == arrays.keys() | plain.keys()
        for key, want in arrays.items():
            assert isinstance(got[key], np.ndarray) and got[key].dtype == want.dtype
            assert np.array_equal(got[key], want)
    assert loaded.parts["second"].given["b"].tolist() == [1.0, 1.0] and loaded.parts["third"].given == {}
    with pytest.raises(ArtifactError, match=r"no state of 'fourth' \(it has: first, second, third\)\.$"):
        read_part(path, "fourth")


def test_one_part_is_read_without_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_state(sampler=Noted(a=np.ones(2)), sampler2=Noted(a=np.ones(2))).save(folder / CHECKPOINT, CPU.device)
    read = []
    monkeypatch.setattr(checkpoint_module, "load_tensors", lambda *given: read.append(load_tensors(*given)) or read[-1])
    read_part(folder / CHECKPOINT, "sampler")
    assert list(read[0][0]) == ["parts/sampler/a"]


def test_no_updates_at_all(folder: Path) -> None:
    assert Process(folder, before=die_at(0)).run(0) == {}


# -- checkpoints and lines --------------------------------------------------------------------------------------------


def test_a_checkpoint_every_so_many_seconds_and_one_at_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    saved = []

    def tick(done: int) -> None:
        nonlocal now
        now += 10

    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    monkeypatch.setattr(TrainState, "save", lambda self, path, device: saved.append(self.update))
    Process(folder, before=tick).run(8, checkpoint_seconds=25.0)
    assert saved == [3, 6, 8]
    saved.clear()
    Process(folder, before=tick).run(3, checkpoint_seconds=0.0)
    assert saved == [1, 2, 3]


def test_a_line_has_the_means_since_the_line_before(folder: Path) -> None:
    process = Process(folder, metrics=lambda done: {"number": float(done)})
    metrics = process.run(8, log_every=3)
    assert [(record["stage"], record["update"]) for record in process.log] == [("learn", 3), ("learn", 6), ("learn", 8)]
    assert [record["number"] for record in process.log] == [1.0, 4.0, 6.5]
    assert all(record["updates_per_second"] > 0 for record in process.log)
    assert metrics["number"] == 6.5 and set(metrics) == {"loss", "gradient_norm", "number", "loss_spikes"}
    assert process.log[-1]["loss"] == metrics["loss"]


def test_the_device_is_not_waited_for_between_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    metrics = loop._metrics
    monkeypatch.setattr(loop, "_metrics", lambda *given: waits.append(given[2]) or metrics(*given))
    Process(folder).run(10, log_every=4, checkpoint_seconds=3600.0)
    assert waits == [4, 8, 10]


# -- divergence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("log_every", "seconds", "kept"), [(50, 0.0, 4), (2, 3600.0, None), (50, 3600.0, None)])
def test_a_number_that_is_not_finite_stops_before_it_is_saved(
    folder: Path, bad: float, log_every: int, seconds: float, kept: int | None
) -> None:
    process = Process(folder, metrics=lambda done: {"fine": 1.0, "broken": bad if done >= 4 else 0.0})
    with pytest.raises(DivergedError) as caught:
        process.run(9, log_every=log_every, checkpoint_seconds=seconds)
    assert str(caught.value).startswith("learn diverged: broken not finite at update 5;")
    assert "\n" not in str(caught.value)
    checkpoint = folder / CHECKPOINT
    assert checkpoint.exists() == (kept is not None)
    if kept is not None:
        assert load_tensors(checkpoint)[1]["update"] == kept


def test_weights_that_blow_up_are_noticed_by_the_gradient(folder: Path) -> None:
    process = Process(folder)

    def spoil(done: int) -> None:
        if done == 2:
            torch.nn.init.constant_(process.state.modules["net"].layers[0].weight, float("nan"))

    process.before = spoil
    with pytest.raises(DivergedError, match="loss, gradient_norm not finite at update 3"):
        process.run(9)
    assert load_tensors(folder / CHECKPOINT)[1]["update"] == 2


def test_weights_that_the_last_update_spoilt_are_not_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its loss nor its gradient shows them."""

    def spoil(optimizer: torch.optim.Optimizer, *given: Any) -> torch.Tensor:
        norm = plain_update(optimizer, *given)
        if process.state.update == 2:
            torch.nn.init.constant_(process.state.modules["net"].layers[0].weight, float("nan"))
        return norm

    monkeypatch.setattr("small_trainer.update", spoil)
    process = Process(folder)
    with pytest.raises(DivergedError, match=r"layers.0.weight of the net is not finite, .* after update 3; lower"):
        process.run(9)
    assert load_tensors(folder / CHECKPOINT)[1]["update"] == 2


def test_a_loss_that_explodes_is_caught_while_it_is_finite(folder: Path) -> None:
    process = Process(folder, metrics=lambda done: {"fine": 1e18, "large": -1e20 if done >= 4 else -1e18})
    with pytest.raises(DivergedError, match="^learn diverged: large too large at update 5; lower the learning rate"):
        process.run(9)


def test_spikes_of_the_loss_are_counted_wherever_it_was_stopped(folder: Path) -> None:
    def scale(done: int) -> float:
        return {2: 1e4, 30: 1e3, 41: 1e3}.get(done, 1.0)  # the first is too early to tell

    def counts(process: Process) -> list[tuple[int, int]]:
        return [(record["update"], record["loss_spikes"]) for record in process.log]

    undisturbed = Process(None, scale=scale)
    assert undisturbed.run(60, log_every=10)["loss_spikes"] == 2
    assert counts(undisturbed) == [(10, 0), (20, 0), (30, 0), (40, 1), (50, 2), (60, 2)]
    with pytest.raises(Stopped):
        Process(folder, scale=scale, before=ask_to_stop_in(43)).run(60, log_every=10, checkpoint_seconds=3600.0)
    resumed = Process(folder, scale=scale)
    resumed.run(60, log_every=10, checkpoint_seconds=3600.0)
    assert counts(resumed) == counts(undisturbed)[4:]


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "laprop", "sgd"])
def test_a_guard_goes_on_where_it_was_stopped(folder: Path, optimizer: str) -> None:
    how: dict[str, Any] = {
        "optimizer": optimizer,
        "scale": lambda done: 1e4 if done in (60, 62) else 1.0,
        "skip_above": 20.0,
    }
    undisturbed = Process(None, **how)
    assert undisturbed.run(70)["skipped_updates"] == 2
    assert [(record["update"], record["skipped_updates"]) for record in undisturbed.log][19:22] == [
        (60, 0),
        (63, 2),
        (66, 2),
    ]
    for stop in (40, 62):
        with pytest.raises(Stopped):
            Process(folder, before=ask_to_stop_in(stop), **how).run(70, checkpoint_seconds=3600.0)
    resumed = Process(folder, **how)
    assert resumed.run(70, checkpoint_seconds=3600.0)["skipped_updates"] == 2
    assert resumed.learned() == undisturbed.learned()
    further = Process(None, **how)
    further.run(1, parent=folder / CHECKPOINT)
    assert further.learned()["guard"]["skipped"] == 0  # those of its own
    assert further.learned()["guard"]["norms"][:-1] == resumed.learned()["guard"]["norms"][1:]


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("update", [1, 3, 5])
def test_asked_to_stop_it_leaves_a_checkpoint_and_goes_on_from_there(
    tmp_path: Path, folder: Path, update: int, number: signal.Signals
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=f"stopped after update {update} of 5; the same command resumes it"):
        Process(folder, before=ask_to_stop_in(update, number)).run(5, checkpoint_seconds=3600.0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert load_tensors(folder / CHECKPOINT)[1]["update"] == update
    resumed = Process(folder)
    resumed.run(5, checkpoint_seconds=3600.0)
    assert resumed.learned() == whole(tmp_path, 5).learned()


def test_a_diverged_update_is_not_saved_even_when_asked_to_stop(folder: Path) -> None:
    process = Process(folder, before=ask_to_stop_in(2), metrics=lambda done: {"broken": float("nan") if done else 0.0})
    with pytest.raises(DivergedError):
        process.run(5, checkpoint_seconds=3600.0)
    assert not (folder / CHECKPOINT).exists()


def test_resuming_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Killed):
        Process(folder, before=die_at(2)).run(4)
    with pytest.raises(Killed):
        Process(folder, before=die_at(3)).run(4)
    assert capsys.readouterr().err == ""  # quiet unless asked
    trainer = SmallTrainer("windows", "adamw", rng())
    loop.fit(trainer, 4, stage="learn", folder=folder, progress=loop.Progress())
    assert capsys.readouterr().err == "learn: resuming at update 3 of 4\n"


# -- without a folder -------------------------------------------------------------------------------------------------


def test_without_a_folder_nothing_is_written_and_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainState, "save", None)  # it is not called
    monkeypatch.setattr(loop, "stop_requests", None)  # signals stay the caller's
    process = Process(None)
    metrics = process.run(5)
    monkeypatch.undo()
    undisturbed = whole(tmp_path, 5)
    assert process.learned() == undisturbed.learned()
    assert metrics == undisturbed.state.metrics | {"loss_spikes": 0}
    assert [record["update"] for record in process.log] == [3, 5]
