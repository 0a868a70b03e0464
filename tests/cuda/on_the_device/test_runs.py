"""`wm run --device cuda` of every system: every stage ends, waits for nothing in an update, and can be recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pretended_cuda.device import DEVICE, Wait
from systems import SYSTEMS
from test_stage_loop import content
from tiny_run import Killed, settings

from wmcli.artifacts import Run
from wmcli.cli.main import run as wm
from wmcli.controllers.agent import Agent
from wmcli.trainers import DynamicsTrainer, ImaginationTrainer, ReanalysisTrainer, TokenizerTrainer

UPDATE, ACT = "update", "act"

ALLOWED = (
    # Validation compares losses, once in `dynamics.validate_every` updates.
    "wmcli/trainers/best_weights.py validation_loss.<locals>.measure",
)

WITHOUT_CONTROLLER = ("cells", "memory")

Ran = tuple[Path, Counter[Wait], list[str]]
"""The folder of a run, its waits, and what CUDA would have refused."""

# Two stand for the rest by default: a controller that learns, and a search.
CASES = [name if name in ("drama", "unizero") else pytest.param(name, marks=pytest.mark.slow) for name in SYSTEMS]


@pytest.fixture(autouse=True, scope="module")
def named() -> Iterator[None]:
    """Name what waits for the device: updates, and choosing actions."""

    def during(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*arguments: Any, **named: Any) -> Any:
            with DEVICE.during(name):
                return call(*arguments, **named)

        return within

    with pytest.MonkeyPatch.context() as patch:
        for trainer in (DynamicsTrainer, ImaginationTrainer, ReanalysisTrainer, TokenizerTrainer):
            patch.setattr(trainer, "update", during(UPDATE, trainer.update))
        for method in ("act", "summarize_search"):
            patch.setattr(Agent, method, during(ACT, getattr(Agent, method)))
        yield


def run(name: str, folder: Path, *overrides: str) -> None:
    preset, tiny = SYSTEMS[name]
    line = ["run", preset, "--device", "cuda", "--run", str(folder), "--quiet", *settings(*tiny, *overrides)]
    assert wm(line) == 0, DEVICE.report()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """`whole(name)`: a run of the system, undisturbed and without graphs."""
    made: dict[str, Ran] = {}

    def ran(name: str) -> Ran:
        if name not in made:
            folder = tmp_path_factory.mktemp("whole") / name
            run(name, folder)
            made[name] = folder, Counter(DEVICE.waits), list(DEVICE.errors)
        return made[name]

    return ran


def kill_at(patch: pytest.MonkeyPatch, count: int) -> None:
    """Die at that checkpoint of a training stage, counted from here on."""
    left = iter(range(count - 1))

    def die(_: str) -> None:
        if next(left, None) is None:
            raise Killed

    patch.setattr("wmcli.training.loop.failpoint", die)


def contents(folder: Path) -> dict[str, dict[str, str]]:
    """Return sha256 of experience and weights, by artifact."""
    made = Run.open(folder, create=False)
    kinds = ("experience", "tokenizer", "dynamics", "controller")
    return {f"{kind}@{version}": content(folder, kind, version) for kind in kinds for version in made.versions(kind)}


def places(waits: Counter[Wait], during: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for wait, count in waits.items():
        if wait.during == during:
            found[f"{wait.reason} at {wait.place.name}"] += count
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_stage_runs(whole: Callable[[str], Ran], name: str) -> None:
    folder, _, errors = whole(name)
    made = Run.open(folder, create=False)
    planned = [] if name in WITHOUT_CONTROLLER else ["controller", "evaluation"]
    for kind in ("experience", "dynamics", *planned):
        artifact = made.latest(kind)
        assert artifact is not None and artifact.manifest["machine"]["device"] == "cuda"
        artifact.verify()
    assert errors == []


@pytest.mark.parametrize("name", CASES)
def test_no_update_waits_for_the_device(whole: Callable[[str], Ran], name: str) -> None:
    waits = places(whole(name)[1], UPDATE)
    assert {wait for wait in waits if not wait.endswith(ALLOWED)} == set()


@pytest.mark.parametrize("name", CASES)
def test_acting_waits_for_what_the_host_needs(whole: Callable[[str], Ran], name: str) -> None:
    """Logits; to collect with a search, its policy and value as well, in one copy."""
    if name in WITHOUT_CONTROLLER:
        return  # a script acts
    waits = places(whole(name)[1], ACT)
    decisions = waits.pop("copy to the host at wmcli/controllers/base.py Controller.choose")
    searches = waits.pop("copy to the host at wmcli/controllers/agent.py Agent.summarize_search", 0)
    assert decisions > 0 and not waits
    assert (0 < searches <= decisions) if name in ("unizero", "muzero") else searches == 0


@pytest.mark.parametrize("name", CASES)
def test_recorded_and_killed_it_has_the_same_bits(whole: Callable[[str], Ran], tmp_path: Path, name: str) -> None:
    """With graphs, killed at every fifth checkpoint of training, most of them within a stage."""
    often = 3 if name in WITHOUT_CONTROLLER else 5
    overrides = ["training.cuda_graph=true", "training.checkpoint_seconds=0"]
    deaths, ended = 0, False
    while not ended:
        try:
            with pytest.MonkeyPatch.context() as patch:
                kill_at(patch, often)
                run(name, tmp_path / "run", *overrides)
            ended = True
        except Killed:
            deaths += 1
            assert deaths < 20, "does not move on"
    assert deaths > 0
    assert 0 < DEVICE.recorded <= DEVICE.replayed
    assert contents(tmp_path / "run") == contents(whole(name)[0])
    assert DEVICE.errors == []
