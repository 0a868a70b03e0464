"""Settings of training, whatever is trained: device, precision, threads, checkpoints, logging, sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wmcli.config import Section


class FrequencySettings(Section):
    """Dynamic frequency-based sampling.

    A window counts where it begins. v is the number of times that the dynamics model was trained on it. b is the number
    of times that imagination started from it, scaled by the ratio of the two batches.

    Source: Drama (Wang et al. 2024), section 2.4; temperatures, alpha and beta from its public code.
    """

    temperature: float = Field(10.0, gt=0)
    """Training draws a window with probability proportional to exp(-v / temperature)."""
    imagination_temperature: float = Field(10.0, gt=0)
    """Imagination draws it by exp((v - alpha * b - beta * max(0, v - b)) / imagination_temperature)."""
    alpha: float = Field(1.0, ge=0)
    """Weight of a window's use in imagination."""
    beta: float = Field(1.0, ge=0)
    """Share of v beyond b that is ignored. With alpha 1 and beta 1, more training than imagination is no advantage."""


class PrioritySettings(Section):
    """Prioritized replay for the dynamics model: windows that it predicts badly, and new ones, more often.

    Source: Simulus (Cohen et al. 2025); the share is that of its public code.
    """

    share: float = Field(0.3, gt=0, le=1)
    """Share of a batch that is sampled by priority. The rest is uniform."""
    temperature: float = Field(1.0, gt=0)
    """Probabilities are proportional to exp(z / temperature), where z is a window's last loss in standard deviations
    from the mean, and 10 for a new window."""


class TrainingSettings(Section):
    device: str = "auto"
    """Device of all tensors: auto (a CUDA device if there is one), cpu, cuda, cuda:1, ..."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of matrix products and convolutions; auto takes bfloat16 where the hardware has it. Weights stay
    float32, and float32 is never TF32."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of wmcli.kernels: triton (on a GPU), torch, or auto, triton where it can run."""
    cuda_graph: bool = False
    """Record each training update, rollouts included, and each search as one CUDA graph and replay it. Results are the
    same, without the cost of launching single kernels."""
    deterministic: bool = True
    """Take only operations on a GPU that give the same bits in every run, so that a resumed run equals an uninterrupted
    one. Those that have no such form warn. A CPU is always deterministic."""
    replay: Literal["auto", "device", "host", "disk"] = "auto"
    """Where the frames of the experience are kept: on the device; in host memory, from where each batch is copied; on
    disk, from where its images are read; or auto, the device unless they would take more than half of its free memory.
    Results are the same."""
    frames_at_once: int = Field(0, ge=0)
    """Frames that a latent world model encodes and decodes at a time while it learns; 0 takes all of a batch. The
    backward pass computes each part again, which needs less memory and about a third more arithmetic. Results differ by
    rounding only. [frames]"""
    threads: int = Field(0, ge=0, le=4096)
    """CPU threads; 0 keeps torch's choice. Results are bit-exact for one number of threads only. [threads]"""
    checkpoint_seconds: float = Field(30.0, ge=0)
    """Interval of checkpoints, and the most work that an interruption loses. 0 writes one after every update.
    [seconds]"""
    log_every: int = Field(50, ge=1)
    """Interval of lines in metrics.jsonl. [updates]"""
    held_out_every: int = Field(0, ge=0)
    """Interval of the dynamics model's losses on held-out test episodes, as `held_out_` metrics in the next line of
    metrics.jsonl; 0 measures none. Training is the same. Played experience has such episodes by `collect.test_games`.
    [updates]"""
    log_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(("tensorboard",), strict=False)
    """Programs that get the lines of metrics.jsonl as curves: TensorBoard's event files in the run; Weights & Biases
    (extra wandb), offline where there is no account; Trackio (extra trackio), on this machine."""
    sampling: Literal["windows", "episodes", "uniform", "dfs", "prioritized"] = "windows"
    """Order of training windows: each equally often (REM); an episode, then a start in it (IRIS); uniform in every
    batch; the less used ones first, dfs (Drama); or, for the dynamics model, those with a high loss first, prioritized
    (Simulus), and uniform for the rest. Only for dynamics with rows of windows."""
    dfs: FrequencySettings = FrequencySettings()
    priority: PrioritySettings = PrioritySettings()
