"""What a profile measures, and that it refuses to time what is wrong."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_systems import Make
from tiny_run import opened

from wmcli.backbones import BACKBONES, SECTIONS
from wmcli.backbones.gru import GRU
from wmcli.backbones.mamba2 import Mamba2, Mamba2Settings
from wmcli.backbones.retnet import RetNet
from wmcli.backbones.transformer import TransformerSettings
from wmcli.errors import ArtifactError, UsageError, WmError
from wmcli.experience import Replay
from wmcli.kernels.dispatch import on_triton, using
from wmcli.progress import Bar, Progress
from wmcli.settings import resolve
from wmcli.stages import profile as profile_module
from wmcli.stages import profile_backbones, profile_cells, profile_experience, profile_kernels
from wmcli.stages.profile import profile
from wmcli.stages.profile_backbones import check_steps, equal_sizes, parameters
from wmcli.stages.profile_comparison import compare as compare_costs
from wmcli.stages.profile_kernels import check, kernel_cases, profile_kernel
from wmcli.tokenizers.vq import VQTokenizer
from wmcli.training import graph, measure
from wmcli.training.device import Machine
from wmcli.training.measure import Bench
from wmcli.world_models.token import TokenWorldModel

CPU = Machine(torch.device("cpu"), "float32", 1)


@pytest.fixture(autouse=True)
def quick(quick_samples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "COLLECT_STEPS", 9)
    monkeypatch.setattr(profile_backbones, "TOKENS", {"cpu": 32})
    monkeypatch.setattr(profile_backbones, "ROWS", {"cpu": 3})
    monkeypatch.setattr(profile_backbones, "CHECKED_LENGTH", 12)


def measured(row: dict[str, Any]) -> bool:
    return 0 < row["seconds_low"] <= row["seconds"] <= row["seconds_high"] and bool(row["shape"])


class Watched(Progress):
    """Knows whether a bar is there."""

    bars = 0

    @contextmanager
    def bar(self, *arguments: Any, **keywords: Any) -> Iterator[Bar]:
        self.bars += 1
        with super().bar(*arguments, **keywords) as bar:
            yield bar
        self.bars -= 1


# -- stages -----------------------------------------------------------------------------------------------------------


def test_a_profile_has_a_row_for_every_stage(run: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    artifact = profile(opened(run), parts=("stages",), trace=True)
    assert torch.equal(torch.get_rng_state(), before)
    *rows, ratio = artifact.metrics["rows"]
    assert [row["what"] for row in rows] == [
        "collect, random policy",
        "train-tokenizer",
        "encode",
        "train-dynamics",
        "imagine (controller update)",
        "imagination, pop",
        "imagination, sequential",
    ]
    assert all(measured(row) and row["rate"] > 0 and row["unit"] for row in rows)
    assert all(row["operations"] > 0 and row["of_matmul"] > 0 for row in rows[1:])
    assert ratio["what"] == "imagination, sequential over pop"
    assert 0 < ratio["ratio_low"] <= ratio["ratio"] <= ratio["ratio_high"]
    assert [row["what"] for row in artifact.metrics["ceilings"]] == ["matmul float32", "matmul bfloat16", "copy"]
    assert artifact.manifest["machine"]["kernels"] == "torch"

    by_name = {row["what"]: row for row in rows}
    # 4 segments of 6 frames, which are 4 x 4 tokens and an action
    assert by_name["train-dynamics"]["rate"] == pytest.approx(4 * 6 * 17 / by_name["train-dynamics"]["seconds"])
    assert by_name["imagine (controller update)"]["rate"] == pytest.approx(
        5 * 3 / by_name["imagine (controller update)"]["seconds"]
    )
    # an epoch: 90 steps of which a call takes 9, then the updates of each model
    epoch = {row["what"]: row["epoch_seconds"] / row["seconds"] for row in rows if "epoch_seconds" in row}
    assert epoch == pytest.approx(
        {
            "collect, random policy": 10,
            "train-tokenizer": 6,
            "train-dynamics": 5,
            "imagine (controller update)": 4,
        }
    )
    assert sum(row.get("epoch_share", 0) for row in rows) == pytest.approx(1)

    learn_or_imagine = [row["what"] for row in rows[1:]]
    where = artifact.metrics["operators"]
    assert list(dict.fromkeys(row["what"] for row in where)) == learn_or_imagine
    assert len(list((artifact.path / "traces").iterdir())) == len(learn_or_imagine)
    trace = artifact.file("traces/imagine-controller-update.json.gz")
    names = Counter(event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    assert names["aten::addmm"] > 0
    artifact.verify()
    # the operators' arithmetic is the stage's
    for what in learn_or_imagine:
        operations = [row["operations"] for row in where if row["what"] == what and row["operations"] is not None]
        assert sum(operations[:-1]) == operations[-1] == by_name[what]["operations"]

    again = profile(opened(run, "run.tokenizer_epochs=0"), parts=("stages",))
    assert again.version == 2  # measured anew each time
    assert not list(again.path.glob("traces"))
    assert "epoch_share" not in next(row for row in again.metrics["rows"] if row["what"] == "train-tokenizer")


@pytest.mark.slow
def test_models_are_frozen_where_a_run_freezes_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autocast would convert at every call is then in its precision already."""
    encode, imagine, loss = VQTokenizer.encode, TokenWorldModel.imagine, TokenWorldModel.loss
    seen: dict[str, set[tuple[bool, bool]]] = {"encode": set(), "imagine": set(), "loss": set()}

    def see(what: str, model: torch.nn.Module) -> None:
        matrices = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear | torch.nn.Conv2d)]
        low = any(matrix.dtype == torch.bfloat16 for matrix in matrices)
        seen[what].add((low, model.training or any(matrix.requires_grad for matrix in matrices)))

    monkeypatch.setattr(VQTokenizer, "encode", lambda self, *rest: (see("encode", self), encode(self, *rest))[1])
    monkeypatch.setattr(TokenWorldModel, "imagine", lambda self, *rest: (see("imagine", self), imagine(self, *rest))[1])
    monkeypatch.setattr(TokenWorldModel, "loss", lambda self, *rest: (see("loss", self.backbone), loss(self, *rest))[1])
    profile(opened(run, "training.precision=bfloat16"), parts=("stages",))
    assert seen == {"encode": {(True, False)}, "imagine": {(True, False)}, "loss": {(False, True)}}


def record_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let functions be recorded without a GPU; a replay does nothing that is seen. Return what was recorded."""
    recorded: list[Any] = []

    def capture(run: Any) -> Any:
        recorded.append(run)
        result = run()
        return lambda: result

    monkeypatch.setattr(graph, "warm_up", lambda run: run())
    monkeypatch.setattr(graph, "capture", capture)
    return recorded


@pytest.mark.slow
def test_arithmetic_in_a_replayed_graph_is_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def operations() -> float:
        rows = profile(context, parts=("stages",)).metrics["rows"]
        return next(row["operations"] for row in rows if row["what"].startswith("imagine"))

    context = opened(run)
    plain = operations()
    record_on_a_cpu(monkeypatch)
    context.machine = replace(context.machine, cuda_graph=True)
    assert operations() == plain
    rows = {row["what"]: row for row in profile(context, parts=("stages",)).metrics["rows"]}
    recorded, eager = (rows[f"imagine (controller update){form}"] for form in ("", ", without the graph"))
    assert recorded["shape"] == eager["shape"] and recorded["operations"] == eager["operations"]
    assert recorded["epoch_seconds"] > 0 and "epoch_seconds" not in eager


def test_graphs_are_recorded_before_they_are_timed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record_on_a_cpu(monkeypatch)
    context = opened(make("unizero", trained=False))
    context.machine = replace(context.machine, cuda_graph=True)
    bench = Bench(context.machine, Progress(quiet=True), quick=True)
    time_jobs, timed = measure.time_jobs, []

    def watched(jobs: Any, *rest: Any, **more: Any) -> Any:
        before = len(recorded)
        times = time_jobs(jobs, *rest, **more)
        timed.append((list(jobs), before, len(recorded)))
        return times

    monkeypatch.setattr(measure, "time_jobs", watched)
    profile_module.profile_stages(context, bench)
    # then an update, and searches from 3 environments, 5 reanalyzed frames and many
    assert [(before, after) for _, before, after in timed] == [(0, 0), (1, 1), (4, 4)]
    assert all(f"{name}, without the graph" in timed[2][0] for name in timed[2][0][::2])


@pytest.mark.parametrize("part", ["stages", "kernels"])
@pytest.mark.slow
def test_a_bar_is_there_whenever_a_job_runs(part: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = opened(run)
    context.progress = progress = Watched(quiet=True)
    seen: list[int] = []
    for module, name in (
        *((profile_module, name) for name in ("count_operations", "peak_memory", "profile_operators")),
        *((profile_kernels, name) for name in ("count_operations", "peak_memory", "check")),
    ):
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *rest, right=right: (seen.append(progress.bars), right(*rest))[1])
    profile(context, parts=(part,))
    assert len(seen) > 10 and min(seen) == 1 and progress.bars == 0


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_every_kernel_is_checked_and_timed_forward_and_backward(run: Path) -> None:
    rows = profile(opened(run), parts=("kernels",)).metrics["rows"]
    timed = [row for row in rows if "skipped" not in row]
    assert all(measured(row) and row["bytes_moved"] > 0 and 0 <= row["error"] < 1e-3 for row in timed)
    rows = [row for row in timed if row["implementation"] == "torch"]
    names = Counter(row["what"].partition(", forward")[0] for row in rows)
    once = {name for name, count in names.items() if count == 1}  # they have no gradient
    assert once == {"nearest code", *(name for name in names if name.endswith(", step"))} and len(once) == 5
    assert {names[name] for name in names.keys() - once} == {2} and {"attention", "lambda-returns"} < names.keys()
    assert {row["part"] for row in rows} == {"kernels"}
    attention = {row["what"]: row for row in rows if row["what"].startswith("attention")}
    forward, both = attention["attention, forward"], attention["attention, forward and backward"]
    size = 4 * (4 * 4 * 102 * 8)  # bytes of B H T K
    assert forward["shape"] == "B 4 H 4 T 102 K 8"
    assert (forward["bytes_moved"], both["bytes_moved"]) == (4 * size, 11 * size)
    assert forward["operations"] == 2 * 2 * 4 * 4 * 102 * 102 * 8


def cases(machine: Machine = CPU) -> dict[str, profile_kernels.Case]:
    small = [
        "backbone.width=32",
        "dynamics.batch=3",
        "dynamics.sequence_length=12",
        "controller.imagination_horizon=10",
    ]
    return {case.name: case for case in kernel_cases(resolve("quickstart", small), machine, 17)}


@pytest.mark.parametrize("name", list(cases()))
def test_a_wrong_result_is_refused(name: str) -> None:
    case = cases()[name]
    assert check(case, "torch") < 1e-3

    def wrong(*operands: torch.Tensor) -> torch.Tensor:
        y = case.call(*operands)
        return (y + 1) % 2 if y.dtype == torch.int64 else 1.05 * y

    with pytest.raises(WmError, match=f"{name} in torch is .* off its reference") as caught:
        check(case._replace(call=wrong), "torch")
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)

    def not_a_number(*operands: torch.Tensor) -> torch.Tensor:
        return case.call(*operands) * float("nan")

    if case.backward:
        with pytest.raises(WmError):
            check(case._replace(call=not_a_number), "torch")


@pytest.mark.parametrize("name", [name for name, case in cases().items() if case.backward])
def test_a_wrong_gradient_of_any_operand_is_refused(name: str) -> None:
    case = cases()[name]
    numbers = [i for i, operand in enumerate(case.operands) if operand.is_floating_point() or operand.is_complex()]
    for index in set(numbers) - set(case.constant):

        def wrong(*operands: torch.Tensor, index: int = index) -> torch.Tensor:
            held = operands[index]
            longer = held * 1.05
            return case.call(*operands[:index], longer + (held - longer).detach(), *operands[index + 1 :])

        with pytest.raises(WmError, match="off its reference"):
            check(case._replace(call=wrong), "torch")


def test_a_gradient_that_is_not_a_number_is_refused() -> None:
    case = cases()["attention"]

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * float("nan")

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return case.call(q, NoGradient.apply(k), v)

    with pytest.raises(WmError, match="is nan off its reference"):
        check(case._replace(call=wrong), "torch")


def test_operands_in_float32_are_held_to_it_in_any_run() -> None:
    of_half = cases(Machine(torch.device("cpu"), "bfloat16", 1))
    check(of_half["attention"], "torch")
    for name in ("state-space convolution of S4", "lambda-returns"):
        case = of_half[name]
        assert check(case, "torch") < 1e-3
        off = 1.015 if case.loose == 1 else 1.05
        with pytest.raises(WmError, match="off its reference"):
            check(case._replace(call=lambda *operands, case=case, off=off: off * case.call(*operands)), "torch")


def test_both_forms_are_checked_and_timed_in_turn() -> None:
    bench = Bench(CPU, Progress(quiet=True))
    case = cases()["lambda-returns"]
    with using("triton"):
        rows = list(profile_kernel(case, bench))
        assert [row.get("implementation", row["what"]) for row in rows] == [
            "torch",
            "triton",
            "lambda-returns, forward, torch over triton",
            "torch",
            "triton",
            "lambda-returns, forward and backward, torch over triton",
        ]

        def wrong_in_triton(*operands: torch.Tensor) -> torch.Tensor:
            return case.call(*operands) * (1.1 if on_triton(*operands) else 1.0)

        with pytest.raises(WmError, match="lambda-returns in triton"):
            list(profile_kernel(case._replace(call=wrong_in_triton), bench))


def test_the_bytes_of_a_step_include_its_new_state() -> None:
    case = cases()["linear recurrence of Mamba-2, step"]
    (row,) = (row for row in profile_kernel(case, Bench(CPU, Progress(quiet=True))) if row["implementation"] == "torch")
    operands = sum(4 * operand.numel() for operand in case.operands)
    assert row["bytes_moved"] == operands + 4 * case.operands[2].numel() + 4 * case.operands[-1].numel()


def test_kernels_of_some_backbones_only() -> None:
    settings = resolve("quickstart")
    names = [case.name for case in kernel_cases(settings, CPU, 17, {"transformer", None})]
    assert names == ["attention", "nearest code", "lambda-returns"]
    assert "linear recurrence of RetNet, fork" not in [case.name for case in kernel_cases(settings, CPU, 1, {"retnet"})]


def test_a_wrong_kernel_is_not_timed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = profile_kernels.selective_scan
    monkeypatch.setattr(profile_kernels, "selective_scan", lambda *operands: (right(*operands)[0] * 1.1, None))
    with pytest.raises(WmError, match="selective scan of Mamba-1"):
        profile(opened(run), parts=("kernels",))
    assert opened(run).run.versions("profile") == []


# -- experience -------------------------------------------------------------------------------------------------------


def test_experience_is_written_loaded_and_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_experience, "PLAYED", 40)  # fewer than a segment has: repeated
    monkeypatch.setattr(profile_experience, "LENGTH", 10)
    artifact = profile(opened(run), parts=("experience",), frames=450)
    written, loaded, drawn = artifact.metrics["rows"]
    assert [row["what"] for row in (written, loaded, drawn)] == [
        "write experience",
        "load experience",
        "draw random windows",
    ]
    assert all(measured(row) and row["rate"] > 0 for row in (written, loaded, drawn))
    assert written["shape"] == "5 segments of 90 frames, 16×16"
    assert written["frames"] == loaded["frames"] == 450
    assert written["bytes_of_frames"] == 450 * 16 * 16 * 3
    assert written["bytes_on_disk"] > 0
    assert written["seconds_in_all"] >= 5 * written["seconds_low"]
    assert drawn["bytes_moved"] == 2 * 64 * 10 * 16 * 16 * 3
    assert [path.name for path in (run / "profile").iterdir() if path.is_dir() and not path.is_symlink()] == ["v0001"]


def test_loading_ends_before_the_clock_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_experience, "PLAYED", 40)
    monkeypatch.setattr(profile_experience, "LENGTH", 10)
    order: list[str] = []
    extend = Replay.extend
    monkeypatch.setattr(Replay, "extend", lambda *arguments: (extend(*arguments), order.append("load")))
    monkeypatch.setattr(measure, "_wait", lambda device: order.append("wait"))
    profile(opened(run), parts=("experience",), frames=180)
    first = order.index("load") - 1
    assert order[first : first + 6] == ["wait", "load", "wait"] * 2


def test_too_few_frames_for_a_window_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_experience, "_played", None)  # before anything is played
    with pytest.raises(UsageError, match=f"--frames {3 * 64 - 1}: .* give {3 * 64} or more"):
        profile(opened(run), parts=("experience",), frames=3 * 64 - 1)


def test_experience_that_cannot_be_read_leaves_nothing_behind(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(folder: Path, **_: bool) -> None:
        assert list(folder.rglob("c/*"))
        raise ArtifactError("damaged")

    monkeypatch.setattr(profile_experience, "LENGTH", 10)
    monkeypatch.setattr(profile_experience, "read_segment", torn)
    with pytest.raises(ArtifactError):
        profile(opened(run), parts=("experience",), frames=90)
    assert not [path for path in (run / "profile").rglob("*") if path.is_dir()]


# -- backbones --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_backbones_are_compared_at_every_length(run: Path) -> None:
    context = opened(run, pictures=True)
    artifact = compare_costs(context, what="backbones", lengths=[16, 8, 8])
    about = {row["backbone"]: row for row in artifact.metrics["backbones"]}
    assert set(about) == set(BACKBONES)
    assert (about["retnet"]["width"], about["retnet"]["layers"]) == (32, 1)  # the preset's
    rows = [row for row in artifact.metrics["rows"] if "backbone" in row]
    assert Counter((row["what"], row["length"]) for row in rows) == {
        (what, length): len(BACKBONES) for what in ("training", "imagination") for length in (8, 16)
    }
    assert all(measured(row) and row["times_as_long"] > 0 for row in rows)
    assert all(row["times_as_long"] == 1 for row in rows if row["backbone"] == "retnet")
    training = {row["length"]: row for row in rows if row["what"] == "training" and row["backbone"] == "gru"}
    assert training[8]["shape"] == "4 × 8 elements" and training[16]["shape"] == "2 × 16 elements"
    state = {row["length"]: row for row in rows if row["what"] == "imagination" and row["backbone"] == "transformer"}
    # keys and values of all elements, and how many they are, in each of 3 rows
    width, layers = about["transformer"]["width"], about["transformer"]["layers"]
    assert state[16]["state_bytes"] == 3 * (layers * 2 * 16 * width * 4 + 8)
    forms = [row for row in artifact.metrics["rows"] if "backbone" not in row]
    assert [(row["length"], "ratio" in row) for row in forms] == [
        (length, is_ratio) for length in (8, 16) for is_ratio in (False, False, True)
    ]
    assert (artifact.path / "backbones.png").stat().st_size > 1000


@pytest.mark.parametrize("preset", ["quickstart", "drama"])
def test_sizes_are_equal_at_the_depth_of_the_preset(preset: str) -> None:
    settings = resolve(preset)
    wanted, sizes = settings.backbone, equal_sizes(settings)
    assert sizes[wanted.kind] == wanted
    for kind, size in sizes.items():
        assert size.kind == kind and size.layers == wanted.layers
        assert parameters(size) == pytest.approx(parameters(wanted), rel=profile_backbones.CLOSE)


def test_positions_are_not_counted() -> None:
    settings = TransformerSettings(width=8, layers=1)
    layer = 4 * 8 + (3 * 8 * 8 + 3 * 8) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
    assert parameters(settings) == layer + 2 * 8 + 8  # the last norm, and one position


def test_steps_that_differ_from_forward_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Mamba2Settings(width=32, layers=1)
    assert check_steps(settings, CPU) < 1e-4
    right = Mamba2.step

    def forgetful(self: Mamba2, x: torch.Tensor, state: Any, reset: Any = None) -> Any:
        return right(self, x, self.initial_state(len(x)), reset)[0], state

    monkeypatch.setattr(Mamba2, "step", forgetful)
    with pytest.raises(WmError, match="steps of mamba2") as caught:
        check_steps(settings, CPU)
    assert caught.value.exit_code == 1


@pytest.fixture
def few_backbones(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {kind: SECTIONS[kind](width=32, layers=1) for kind in ("retnet", "gru", "mamba2")}
    monkeypatch.setattr(profile_backbones, "equal_sizes", lambda _: few)
    monkeypatch.setattr(profile_backbones, "check_steps", lambda *_: 0.0)


@pytest.mark.usefixtures("few_backbones")
def test_steps_are_those_of_frozen_models_and_a_bar_is_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = opened(run, "training.precision=bfloat16")
    context.progress = progress = Watched(quiet=True)
    right, dtypes, bars = RetNet.step, set(), set()

    def step(self: RetNet, *rest: Any) -> Any:
        dtypes.add(self.layers[0].qkvg.weight.dtype)
        bars.add(progress.bars)
        return right(self, *rest)

    monkeypatch.setattr(RetNet, "step", step)
    compare_costs(context, what="backbones", lengths=[8])
    assert dtypes == {torch.bfloat16} and bars == {1}


@pytest.mark.usefixtures("few_backbones")
@pytest.mark.parametrize(("answer", "form"), [(True, "triton"), (False, "torch")])
def test_the_recurrence_is_checked_in_the_form_that_is_timed(
    answer: bool, form: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(profile_backbones, "on_triton", lambda *_: answer)
    monkeypatch.setattr(profile_backbones, "check", lambda _, implementation: checked.append(implementation))
    compare_costs(opened(run), what="backbones", lengths=[8])
    assert checked == [form]


@pytest.mark.usefixtures("few_backbones")
def test_slow_cases_are_reported_and_not_retried(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = profile_cells.time_call
    slow = iter([False, True, True])  # it is asked twice, in case it was only compiled
    monkeypatch.setattr(
        profile_cells, "time_call", lambda job, device: 99.0 if next(slow, False) else patient(job, device)
    )
    rows = compare_costs(opened(run), what="backbones", lengths=[8, 16]).metrics["rows"]
    (skipped,) = [row for row in rows if "skipped" in row]
    assert {name: skipped[name] for name in ("what", "backbone", "length", "skipped")} == {
        "what": "training",
        "backbone": "gru",
        "length": 8,
        "skipped": "slower than 5 s",
    }
    assert not any(row.get("backbone") == "gru" for row in rows if row is not skipped)
    assert Counter(row["backbone"] for row in rows if "backbone" in row) == {"retnet": 4, "mamba2": 4, "gru": 1}


@pytest.mark.usefixtures("few_backbones")
def test_sizes_beyond_memory_are_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: GRU, *_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(GRU, "forward", full)
    artifact = compare_costs(opened(run), what="backbones", lengths=[8])
    (row,) = [row for row in artifact.metrics["rows"] if "skipped" in row]
    assert (row["what"], row["backbone"], row["skipped"]) == ("training", "gru", "out of memory")
