"""A training update recorded as one graph is the update; it waits for nothing and brings nothing from the host.

Without a GPU a stand-in replays. It runs the update again, so it cannot show what changes on the host between replays:
the tests in `tests/cuda` do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_trainers import CPU, trainer_of
from torch.testing import assert_close
from watching import NoWaiting, record_without_a_graph

from wmcli.training.device import isolated_randomness
from wmcli.training.graph import WARM_UPS
from wmcli.training.loop import fit

CASES: dict[str, tuple[str, str, list[str]]] = {
    "rem, tokenizer": ("rem", "tokenizer", []),
    "rem": ("rem", "dynamics", []),
    "rem, controller": ("rem", "controller", []),
    "prioritized": ("rem", "dynamics", ["training.sampling=prioritized"]),
    "transformer with dropout and a prior": (
        "rem",
        "dynamics",
        ["backbone.kind=transformer", "backbone.dropout=0.3", "backbone.prior.kind=gaussian"],
    ),
    "drama": ("drama", "dynamics", []),
    "drama, controller": ("drama", "controller", []),
    "frequencies": ("drama", "dynamics", ["training.sampling=dfs"]),
    "laprop": ("drama", "dynamics", ["dynamics.optimizer=laprop", "dynamics.warmup=3"]),
    "guarded": ("rem", "dynamics", ["dynamics.skip_gradients_above=9"]),
    "guarded laprop": ("drama", "dynamics", ["dynamics.optimizer=laprop", "dynamics.skip_gradients_above=9"]),
    "guarded tokenizer": ("rem", "tokenizer", ["tokenizer.skip_gradients_above=9"]),
    "guarded controller": ("rem", "controller", ["controller.skip_gradients_above=9"]),
    "streams": ("rssm", "dynamics", []),
    "streams of s4": (
        "rssm",
        "dynamics",
        ["backbone.kind=s4", "backbone.state_size=4", "dynamics.posterior=factorized"],
    ),
    "unizero": ("unizero", "dynamics", []),
    "muzero": ("muzero", "dynamics", ["dynamics.target_every=4", "dynamics.optimizer=sgd", "dynamics.momentum=0.9"]),
    "guarded sgd": ("muzero", "dynamics", ["dynamics.optimizer=sgd", "dynamics.skip_gradients_above=9"]),
}


class WithoutTheHost(NoWaiting):
    """Refuses tensors made of the host's data as well."""

    forbidden = NoWaiting.forbidden | {"lift_fresh"}


def fitted(case: str, monkeypatch: pytest.MonkeyPatch, *, cuda_graph: bool) -> tuple[dict[str, Any], list[Any]]:
    """The weights after some updates, and the metrics of each."""
    name, kind, overrides = CASES[case]
    monkeypatch.setattr("test_trainers.CPU", replace(CPU, cuda_graph=cuda_graph))
    with isolated_randomness(5, CPU.device) as rng:
        trainer = trainer_of(name, kind, rng, *overrides)
        metrics = [trainer.update() for _ in range(WARM_UPS + 1)]
        fit(trainer, WARM_UPS + 2)
    (module,) = trainer.state.modules.values()
    return dict(module.named_parameters()) | dict(module.named_buffers()), metrics


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_update_is_the_update(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fitted(case, monkeypatch, cuda_graph=False)
    record_without_a_graph(monkeypatch)
    recorded = fitted(case, monkeypatch, cuda_graph=True)
    assert_close(recorded, plain, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_an_update_needs_nothing_of_the_host(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that is recorded, after a first update, which may fill tables and allocate moments."""
    watched = 0
    calls = 0

    def wrap(machine: Any, update: Any) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal calls, watched
            calls += 1
            if calls == 1:
                return update(*arguments)
            with WithoutTheHost():
                watched += 1
                return update(*arguments)

        return run

    monkeypatch.setattr("wmcli.training.device.Machine.wrap_update", wrap)
    fitted(case, monkeypatch, cuda_graph=False)
    assert watched == 2 * WARM_UPS + 2
