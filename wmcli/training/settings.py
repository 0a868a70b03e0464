"""How a stage trains, whatever it trains: device, precision, threads, checkpoints, logging."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wmcli.config import Section


class FrequencySettings(Section):
    """Dynamic frequency-based sampling (Drama). A window is counted where it begins, separately for training the
    dynamics model and for imagination; the counts of the former are called v, of the latter, scaled by the ratio of
    the two batches, b."""

    temperature: float = Field(10.0, gt=0)
    """Training draws each window with a chance proportional to exp(-v / temperature)."""
    imagination_temperature: float = Field(10.0, gt=0)
    """Imagination draws it by exp((v - alpha * b - beta * max(0, v - b)) / imagination_temperature)."""
    alpha: float = Field(1.0, ge=0)
    """How much a window's use in imagination counts against it."""
    beta: float = Field(1.0, ge=0)
    """How much of v beyond b is ignored: at 1, with alpha 1, training more than imagination used is no advantage."""


class TrainingSettings(Section):
    device: str = "auto"
    """Where tensors live: auto (a CUDA device if there is one), cpu, cuda, cuda:1, ..."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of matrix products and convolutions: auto takes bfloat16 where the hardware has it; weights stay
    float32. float32 is never TF32."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """What computes the operations of wmcli.kernels: triton (on a GPU), torch, or auto, triton where it can run."""
    cuda_graph: bool = False
    """Record a rollout in imagination as one CUDA graph and replay it at every update: the same results, without the
    cost of launching kernel after kernel. On a CUDA device only."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0 keeps torch's choice. Results are bit-exact only for one thread count."""
    checkpoint_seconds: float = Field(30.0, ge=0)
    """Seconds between checkpoints: the most work a kill can cost. 0 writes one after every update."""
    log_every: int = Field(50, ge=1)
    """Updates between lines in metrics.jsonl."""
    sampling: Literal["windows", "episodes", "uniform", "dfs"] = "windows"
    """How training windows are drawn: windows, every one equally often (REM); episodes, first an episode, then a start
    in it (IRIS); uniform, each batch anew from all of them; dfs, those drawn less often rather (Drama). Not for
    dynamics whose rows are whole episodes or streams (dynamics.rows): these have an order of their own."""
    dfs: FrequencySettings = FrequencySettings()
