"""`wm profile --suite`: every part is measured once, into a file that the same command completes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TINY

from wmcli.errors import MachineError, Stopped, UsageError, WmError
from wmcli.progress import Progress
from wmcli.settings import resolve
from wmcli.stages import profile_suite as suite
from wmcli.stages.profile_suite import PRESETS, profile_suite
from wmcli.training import measure

PARTS = ["machine", "kernels of quickstart", "stages of quickstart", "run of quickstart"]
QUIET = Progress(quiet=True)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZES", (64, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    monkeypatch.setattr(measure.gc, "collect", lambda *_: 0)  # slow where so much is loaded


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts that were measured, in order; only the machine really is."""
    measured: list[str] = []
    row = {"what": "a stage", "shape": "1", "seconds": 1.0, "seconds_low": 1.0, "seconds_high": 1.0}
    row |= {"rate": 2.0, "unit": "frames/s", "operations": None, "peak_bytes": None}
    results: dict[str, dict[str, Any]] = {
        "kernels": {"rows": []},
        "stages": {"rows": [row], "operators": []},
        "run": {
            "rows": [
                row | {"count": 3, "unit": "updates", "total_seconds": 3.0, "share": 1.0, "seconds_per_step": 1.0}
            ],
            "seconds": 3.0,
            "steps": 3,
            "seconds_per_step": 1.0,
            "evaluation_episodes": 5,
        },
    }
    right = suite._measure

    def measure_part(part: suite.Part, *rest: Any) -> dict[str, Any]:
        measured.append(part.name)
        return right(part, *rest) if part.name == "machine" else results[part.name.partition(" ")[0]]

    monkeypatch.setattr(suite, "_measure", measure_part)
    return measured


def run(file: Path, *overrides: str, **how: Any) -> dict[str, Any]:
    return profile_suite(file, presets=["quickstart"], overrides=[*TINY, *overrides], quick=True, progress=QUIET, **how)


def fail(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Let one part fail from here on."""
    right = suite._measure

    def measure_part(part: suite.Part, *rest: Any) -> dict[str, Any]:
        if part.name == name:
            raise error
        return right(part, *rest)

    monkeypatch.setattr(suite, "_measure", measure_part)


@pytest.mark.slow
def test_the_whole_suite_of_a_small_preset(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    document = run(tmp_path / "here.json")
    assert torch.equal(torch.get_rng_state(), before)
    assert json.loads((tmp_path / "here.json").read_text()) == document
    assert list(document["parts"]) == PARTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.json", "here.md"]
    machine, kernels, stages, whole = document["parts"].values()
    assert [row["what"] for row in machine["rows"]] == ["matmul float32", "matmul bfloat16", "copy"]
    assert machine["about"]["device"] == "cpu" and machine["about"]["commit"] != ""
    assert all(row["seconds"] > 0 for row in machine["launches"])
    assert {row["what"].partition(",")[0] for row in kernels["rows"]} == {
        "linear recurrence of RetNet",
        "nearest code",
        "lambda-returns",
    }
    assert [row["what"] for row in stages["rows"]][:3] == ["collect, random policy", "train-tokenizer", "encode"]
    assert {"train-dynamics", "imagine", "encode", "imagine, start and publish"} < {
        row["what"] for row in whole["rows"]
    }
    assert whole["seconds"] == pytest.approx(sum(row["total_seconds"] for row in whole["rows"]))
    page = (tmp_path / "here.md").read_text()
    for title in ("# Profile", "## Machine", "## Kernels", "## Stages", "## Runs"):
        assert f"{title}\n" in page
    assert "no measurements" in page and "## Not measured" not in page
    assert "linear recurrence of RetNet, fork" in page and "not installed" in page
    assert "nan" not in page and "None" not in page


def test_only_what_is_missing_or_changed_is_measured(
    tmp_path: Path, faked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "here.json"
    run(file)
    assert faked == PARTS
    (tmp_path / "here.md").unlink()
    run(file)
    assert faked == PARTS and "## Runs" in (tmp_path / "here.md").read_text()

    document = json.loads(file.read_text())
    del document["parts"]["kernels of quickstart"]
    file.write_text(json.dumps(document))
    run(file)
    assert faked[4:] == ["kernels of quickstart"]
    assert list(json.loads(file.read_text())["parts"]) == PARTS  # in their order again

    run(file, "dynamics.batch=3")
    assert faked[5:] == PARTS[1:]  # the machine has no settings
    monkeypatch.setattr(suite, "_code", lambda: "other code")
    run(file, "dynamics.batch=3")
    assert faked[8:] == PARTS
    run(file, "dynamics.batch=3", force=True)
    assert faked[12:] == PARTS


def test_a_failed_part_is_recorded_and_tried_again(
    tmp_path: Path, faked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "here.json"
    with monkeypatch.context() as patch:
        fail(patch, "kernels of quickstart", RuntimeError("no kernel\nfor this machine"))
        with pytest.raises(WmError, match=r"1 of 4 parts failed: kernels of quickstart; .*here\.json") as caught:
            run(file)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    failed = json.loads(file.read_text())["parts"]["kernels of quickstart"]
    assert failed["error"] == "RuntimeError: no kernel"
    assert faked == [PARTS[0], *PARTS[2:]]
    page = (tmp_path / "here.md").read_text()
    assert "## Not measured" in page and "RuntimeError: no kernel" in page
    run(file)
    assert faked[3:] == ["kernels of quickstart"]
    assert "## Not measured" not in (tmp_path / "here.md").read_text()


def test_a_part_that_failed_comes_after_those_never_tried(
    tmp_path: Path, faked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have taken the device down, and would again."""
    file = tmp_path / "here.json"
    with monkeypatch.context() as patch:
        fail(patch, "kernels of quickstart", RuntimeError("an illegal memory access"))
        patch.setattr(suite, "_check_device", lambda part, error: (_ for _ in ()).throw(MachineError("unusable")))
        with pytest.raises(MachineError):
            run(file)
    assert faked == ["machine"]
    run(file)
    assert faked[1:] == ["stages of quickstart", "run of quickstart", "kernels of quickstart"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped("stopped")])
def test_an_interrupted_suite_goes_on(
    error: BaseException, tmp_path: Path, faked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "here.json"
    with monkeypatch.context() as patch:
        fail(patch, "stages of quickstart", error)
        with pytest.raises(type(error)):
            run(file)
    assert list(json.loads(file.read_text())["parts"]) == PARTS[:2]
    run(file)
    assert faked == PARTS


def test_nothing_is_measured_without_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_profile_machine", lambda *_: 1 / 0)
    with pytest.raises(WmError, match="4 of 4 parts failed"):
        run(tmp_path / "here.json")
    parts = json.loads((tmp_path / "here.json").read_text())["parts"]
    assert parts["machine"]["error"] == "ZeroDivisionError: division by zero"
    assert "ceilings" in parts["stages of quickstart"]["error"] and "division" in parts["run of quickstart"]["error"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("here.txt", None, "name a file that ends in .json"),
        ("there/here.json", None, "there is no folder"),
        ("here.json", "{", "cannot be read"),
        ("here.json", "[]", "holds no measurements"),
        ("here.json", '{"format": 99}', "holds no measurements"),
    ],
)
def test_files_of_other_content_are_refused(
    name: str, content: str | None, message: str, tmp_path: Path, faked: list[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        run(tmp_path / name)
    assert faked == []


@pytest.mark.parametrize("preset", [*PRESETS, *suite.OTHER_BACKBONES])
def test_quick_settings_of_every_preset(preset: str) -> None:
    """They are smaller and still valid, and the models have the same widths."""
    quick, whole = suite._resolve(preset, ["training.device=cpu"], True), resolve(preset)
    assert quick.dynamics.batch <= 2 < whole.dynamics.batch
    assert quick.backbone == whole.backbone


def test_the_parts_of_the_papers_presets() -> None:
    names = [part.name for part in suite._parts(None, ["training.device=cpu"], False)]
    assert names == [
        "machine",
        *(f"kernels of {preset}" for preset in (*PRESETS, "drama-mamba1", "s5wm")),
        *(f"stages of {preset}" for preset in PRESETS),
        *(f"run of {preset}" for preset in PRESETS if preset != "s4wm-3d"),  # it has no controller
    ]
