"""How a stage trains, whatever it trains: device, precision, threads, checkpoints, logging."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wmcli.config import Section


class TrainingSettings(Section):
    device: str = "auto"
    """Where tensors live: auto (a CUDA device if there is one), cpu, cuda, cuda:1, ..."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of matrix products and convolutions: auto takes bfloat16 where the hardware has it; weights stay
    float32."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0 keeps torch's choice. Results are bit-exact only for one thread count."""
    checkpoint_seconds: float = Field(30.0, ge=0)
    """Seconds between checkpoints: the most work a kill can cost. 0 writes one after every update."""
    log_every: int = Field(50, ge=1)
    """Updates between lines in metrics.jsonl."""
    sampling: Literal["windows", "episodes"] = "windows"
    """How training windows are drawn: every window equally often (REM), or first an episode, then a start in it
    (IRIS)."""
