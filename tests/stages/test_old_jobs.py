"""The jobs of every preset of wm 0.1.0 keep the digests that it gave them.

`tests/old_runs/0.1.0-jobs.json.xz` holds, for each preset, its settings resolved by 0.1.0 with
`training.precision=float32`, and the digest of the first job of each kind. Inputs have their kind as a digest.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from wmcli.artifacts import Job, Run
from wmcli.config import Identity, upgrade, validate
from wmcli.settings import Settings, resolve
from wmcli.stages import collect, dynamics, imagine, tokenizer

OLD = Path(__file__).parents[1] / "old_runs" / "0.1.0-jobs.json.xz"
PRESETS: dict[str, dict[str, Any]] = json.loads(lzma.decompress(OLD.read_bytes()))
STAGES: dict[str, Callable[..., object]] = {
    "experience": collect.collect,
    "tokenizer": tokenizer.train_tokenizer,
    "dynamics": dynamics.train_dynamics,
    "controller": imagine.imagine,
}
NOW = ["training.device=cpu", "training.precision=float32"]

CHANGED = {
    *("drama-quick", "muzero-quick", "unizero-quick", "quickstart"),
    *("rssm-quick", "rssm-tbtt-2d", "rssm-tbtt-3d", "storm", "dreamer-xs"),
}
"""Presets whose values were changed since."""

FEWER = ["collect.episodes=3000", "collect.validation=200", "collect.test=200"]
AS_BEFORE: dict[str, list[str]] = dict.fromkeys(
    ("s4wm-3d", "s4wm-full-posterior", "s4wm-no-mlp", "s5wm", "tssm-xl-3d", "tssm-xl-3d-256", "tssm-xl-3d-512"), FEWER
)
STEADY = "environment.protocol=unizero"
AS_BEFORE |= dict.fromkeys(("unizero", "unizero-gaussian"), [STEADY])
AS_BEFORE |= dict.fromkeys(("unizero-span", "unizero-combined"), [STEADY, "backbone.prior.span_limit=0"])
"""Settings that give a preset the values that it had."""


class Reached(Exception):  # noqa: N818 (it ends a stage, as wanted)
    """A stage has asked for its job."""


def first_job(kind: str, settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return the job that a stage asks for first, with inputs whose digests are their kinds."""

    def artifact(_: object, kind: str) -> Any:
        made = {"name": kind, "kind": kind, "digest": kind, "inputs": {}, "settings": settings.plain()}
        return SimpleNamespace(**made, input=lambda role: artifact(None, role), metrics={"updates": 0})

    def job(kind: str, identity: Identity, inputs: dict[str, Any]) -> Job:
        raise Reached(Job(run, kind, identity, inputs))

    run = Run.open(folder, create=True)
    for name, replacement in {"resolve": artifact, "latest": lambda _: None, "job": job}.items():
        monkeypatch.setattr(run, name, replacement, raising=True)
    for module in (collect, dynamics, imagine, tokenizer):
        monkeypatch.setattr(module, "check_same_environment", lambda *_: None)
    context = MagicMock(run=run, settings=settings, more=False, force=False, environment={"id": "x", "actions": 3})
    context.machine.precision = "float32"
    with pytest.raises(Reached) as reached:
        STAGES[kind](context)
    return reached.value.args[0]


def has_digest(job: Job, digest: str) -> bool:
    """Return whether an artifact of wm 0.1.0 is of this job."""
    return job.made(SimpleNamespace(manifest={"job": digest}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_jobs_of_a_run_keep_their_digests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = validate(Settings, upgrade(PRESETS[name]["settings"], 1), name)
    for kind, digest in PRESETS[name]["jobs"].items():
        job = first_job(kind, settings, tmp_path / kind, monkeypatch)
        assert has_digest(job, digest) and not has_digest(job, digest[::-1]), kind


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - CHANGED))
def test_presets_of_today_have_the_same_jobs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolve(name, [*NOW, *AS_BEFORE.get(name, ())])
    digests = dict(PRESETS[name]["jobs"])
    if not settings.controller.acts:
        del digests["controller"]
    for kind, digest in digests.items():
        assert has_digest(first_job(kind, settings, tmp_path / kind, monkeypatch), digest), kind
