"""Other commands on the pretended device, on a run that is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pretended_cuda.device import DEVICE
from systems import SYSTEMS
from tiny_run import settings

from wmcli.artifacts import Run
from wmcli.cli.main import run as wm
from wmcli.stages import profile as profile_module
from wmcli.training import measure

COMMANDS = {
    "eval": ["eval", "--episodes", "1"],
    "play": ["play", "--out", "real.gif"],
    "play in imagination": ["play", "--imagination", "--out", "imagined.gif"],
    "profile": ["profile", "--part", "stages"],
    "profile of graphs": ["profile", "--part", "stages", "--set", "training.cuda_graph=true"],
}
CASES = [("rem", name) for name in ("eval", "play in imagination")]
MORE = [("rem", name) for name in ("play", "profile", "profile of graphs")]
MORE += [("drama", name) for name in COMMANDS] + [("muzero", name) for name in ("eval", "play", "profile")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
CASES += [pytest.param("muzero", "profile of graphs", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(measure, "RECORDINGS", 1)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "MATMUL_SIZES", (64, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    monkeypatch.setattr(profile_module, "COLLECT_STEPS", 9)
    monkeypatch.setattr(profile_module, "MANY_ROOTS", 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`trained(name)`: a run of one epoch."""
    made: dict[str, Path] = {}

    def ran(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("trained") / name
            preset, tiny = SYSTEMS[name]
            line = ["run", preset, "--device", "cuda", "--run", str(made[name]), "--quiet"]
            assert wm([*line, *settings(*tiny, "run.epochs=1", "run.collect_epochs=1")]) == 0
        return made[name]

    return ran


def test_tiles_are_timed_in_every_stage(
    trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where kernels are Triton's: nothing is launched here."""
    calls = []

    def tune(call: Callable[[], object]) -> dict[str, dict[str, int]]:
        calls.append(call)
        return {f"A GPU scan {len(calls)}": {"ROWS": 16}} if len(calls) < 3 else {}

    monkeypatch.setattr("wmcli.kernels.tiles.tune", tune)
    line = ["profile", "--tune", "--run", str(trained("rem")), "--device", "cuda"]
    assert wm([*line, "--set", "training.kernels=torch"]) == 2 and not calls
    assert "not kernels in torch on cuda" in capsys.readouterr().err
    assert wm([*line, "--set", "training.kernels=triton", "--json"]) == 0 and DEVICE.errors == []
    found = json.loads(capsys.readouterr().out)
    assert [row["kernel"] for row in found["chosen"]] == ["A GPU scan 1", "A GPU scan 2"]
    assert [row["stage"] for row in found["chosen"]] == ["train-tokenizer", "encode"]
    assert found["file"].endswith("wm-tiles.json") and len(calls) == 6
    assert Run.open(trained("rem"), create=False).latest("profile") is None


@pytest.mark.parametrize(("system", "name"), CASES)
def test_it_ends(trained: Callable[[str], Path], tmp_path: Path, system: str, name: str) -> None:
    folder, command = trained(system), COMMANDS[name]
    DEVICE.errors.clear()
    assert wm([*command, "--run", str(folder), "--device", "cuda"]) == 0 and DEVICE.errors == []
    if "--out" in command:
        assert (tmp_path / command[-1]).stat().st_size > 0
    else:
        artifact = Run.open(folder, create=False).latest("evaluation" if name == "eval" else "profile")
        assert artifact is not None and artifact.manifest["machine"]["device"] == "cuda"
