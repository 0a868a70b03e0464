"""Public kernels beside ours: their conventions, with stand-ins for the packages that follow their documentation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from wmcli.kernels import causal_conv, linear_recurrence, selective_scan
from wmcli.progress import Progress
from wmcli.settings import resolve
from wmcli.stages import profile_kernels
from wmcli.stages.profile_kernels import difference, kernel_cases, profile_kernel
from wmcli.stages.profile_public import PUBLIC, why_not
from wmcli.training import measure
from wmcli.training.device import Machine
from wmcli.training.measure import Bench

CPU = Machine(torch.device("cpu"), "float32", 1)
SMALL = ["backbone.width=32", "dynamics.batch=3", "dynamics.sequence_length=12", "controller.batch=5"]
SMALL += ["controller.imagination_horizon=4"]


def simple_gla(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **given: Any) -> tuple[Tensor, Tensor]:
    """Operands (B, T, H, ·), log decays g (B, T, H) or g_gamma (H,), a state (B, H, K, V)."""
    assert set(given) <= {"g", "g_gamma", "initial_state", "output_final_state"} and ("g" in given) != (
        "g_gamma" in given
    )
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3]
    assert all(each.is_contiguous() for each in (q, k, v))
    decay = given["g"].mT if "g" in given else given["g_gamma"]
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    y, state = linear_recurrence.reference(scale * q, k, v, decay, given.get("initial_state"))
    return y.transpose(1, 2), state


def mamba_chunk_scan_combined(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:
    """x (B, T, H, V), dt (B, T, H), A (H,), B and C (B, T, G, K)."""
    assert dt.shape == x.shape[:3] and A.shape == x.shape[2:3] and B.shape == C.shape
    q, k, v = (each.transpose(1, 2) for each in (C, B, dt[..., None] * x))
    return linear_recurrence.reference(q, k, v, (dt * A).mT)[0].transpose(1, 2)


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> Tensor:
    """Write the state (B, C, S) or (B, H, V, S) in place; A has its shape without B."""
    assert A.shape == state.shape[1:] and dt.shape == x.shape == state.shape[:-1] and D.shape == dt_bias.shape
    if state.dim() == 4:
        B, C = B[:, :, None], C[:, :, None]
    else:
        B, C = B[:, None], C[:, None]
    dt = dt + dt_bias
    state.copy_((dt[..., None] * A).exp() * state + (dt * x)[..., None] * B)
    return (state * C).sum(-1) + D * x


def selective_scan_fn(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """u and delta (B, C, T), A (C, S), B and C (B, S, T)."""
    assert u.shape == delta.shape and u.dtype == delta.dtype
    assert all(each.stride(-1) == 1 for each in (u, delta, B, C))
    return selective_scan.reference(u.mT, delta.mT, A, B.mT, C.mT)[0].mT


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (B, C, T)."""
    assert x.shape[1] == len(weight)
    return causal_conv.reference(x.mT, weight, bias)[0].mT


def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (B, C), and a state (B, C, W - 1) that is written in place."""
    assert conv_state.dtype == x.dtype
    y, state = causal_conv.reference(x[:, None], weight, bias, conv_state)
    conv_state.copy_(state)
    return y[:, 0]


PACKAGES: dict[str, list[Callable[..., Any]]] = {
    "mamba_ssm.ops.triton.ssd_combined": [mamba_chunk_scan_combined],
    "mamba_ssm.ops.triton.selective_state_update": [selective_state_update],
    "mamba_ssm.ops.selective_scan_interface": [selective_scan_fn],
    "causal_conv1d": [causal_conv1d_fn, causal_conv1d_update],
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for all packages."""

    def put(name: str) -> ModuleType:
        parent, _, own = name.rpartition(".")
        module = sys.modules.get(name) or ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        if parent:
            setattr(put(parent), own, module)
        return module

    for name, functions in PACKAGES.items():
        module = put(name)
        for function in functions:
            setattr(module, function.__name__, function)
    module = put("fla.ops.simple_gla")
    for name in ("chunk_simple_gla", "fused_recurrent_simple_gla"):
        setattr(module, name, simple_gla)


def cases() -> dict[str, profile_kernels.Case]:
    return {case.name: case for case in kernel_cases(resolve("quickstart", SMALL), CPU, 1)}


def quick_rows(name: str) -> list[dict[str, Any]]:
    return list(profile_kernel(cases()[name], Bench(CPU, Progress(quiet=True), quick=True)))


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATMUL_SIZES", (64, 64))
    monkeypatch.setattr(measure, "COPY_BYTES", (1 << 16, 1 << 16))
    monkeypatch.setattr(measure.gc, "collect", lambda *_: 0)  # slow where so much is loaded


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - {"attention"}))
def test_public_kernels_do_the_job_of_ours(name: str) -> None:
    rows = quick_rows(name)
    case, forms = cases()[name], ["torch", *PUBLIC[name]]
    passes = ["forward", "forward and backward"] if case.backward else ["forward"]
    assert [(row["what"], row["implementation"]) for row in rows] == [
        (f"{name}, {each}", form) for each in passes for form in forms
    ]
    assert all(row["error"] < 1e-5 and row["seconds"] > 0 for row in rows)
    assert {row["shape"] for row in rows} == {case.shape}


@pytest.mark.usefixtures("installed")
def test_a_kernel_of_other_conventions_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        return simple_gla(q, k, v, **{**given, "scale": q.shape[3] ** -0.5})

    monkeypatch.setattr(sys.modules["fla.ops.simple_gla"], "chunk_simple_gla", scaled)
    rows = {row["implementation"]: row for row in quick_rows("linear recurrence of RetNet")}
    assert "differs by" in rows["fla chunk_simple_gla"]["skipped"]
    assert "seconds" not in rows["fla chunk_simple_gla"]
    assert rows["fla fused_recurrent_simple_gla"]["seconds"] > 0


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    first, second, *_ = quick_rows("causal convolution of Mamba-2")
    assert first["implementation"] == "torch" and first["seconds"] > 0
    assert second == {
        "what": "causal convolution of Mamba-2, forward",
        "shape": first["shape"],
        "implementation": "causal_conv1d causal_conv1d_fn",
        "skipped": "not installed",
    }


def test_reasons_take_one_line() -> None:
    assert why_not(ModuleNotFoundError("No module named 'fla'", name="fla")) == "not installed"
    missing = ModuleNotFoundError("No module named 'einops'", name="einops")
    assert why_not(missing) == "ModuleNotFoundError: No module named 'einops'"  # the package is there
    assert why_not(RuntimeError("no kernel\nfor this GPU")) == "RuntimeError: no kernel"
    assert why_not(AssertionError()) == "AssertionError: without a message"


def test_attention_of_torch_does_the_job_of_ours() -> None:
    case, forms = cases()["attention"], PUBLIC["attention"]
    assert difference(case._replace(call=forms["torch scaled_dot_product_attention"]().call)) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_does_the_job_of_ours() -> None:
    case, flex = cases()["attention"], PUBLIC["attention"]["torch flex_attention"]()
    assert difference(case._replace(call=flex.call, backward=False)) < 1e-5
    rows = {row["implementation"]: row for row in quick_rows("attention")}
    assert "backward on CPU" in rows["torch flex_attention"]["skipped"]
