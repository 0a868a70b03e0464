"""From experience to batches: samplers of windows, batches gathered by index, and frames encoded once.

N rows of experience, B windows, T frames of a window.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wmcli import ranks
from wmcli.errors import UsageError
from wmcli.experience.frequency import FrequencySampler
from wmcli.experience.priority import PrioritySampler
from wmcli.experience.replay import Replay
from wmcli.experience.sampler import StreamSampler, Windows, WindowSampler, WindowTable
from wmcli.experience.targets import SearchTargets
from wmcli.progress import Progress
from wmcli.spaces import first_part, map_parts
from wmcli.training.device import Machine
from wmcli.training.settings import TrainingSettings
from wmcli.transfer import take_rows, to_device
from wmcli.world_models.base import Batch, Targets, WorldModel

Sampler = WindowSampler | FrequencySampler
SegmentSampler = Sampler | PrioritySampler | StreamSampler

ENCODE_BATCH = 256  # frames encoded at a time


def build_sampler(
    training: TrainingSettings,
    replay: Replay,
    rng: np.random.Generator,
    *,
    length: int,
    minimum: int,
    pad: Literal["left", "right"],
    history: int = 0,
    across_ends: bool = False,
    counts: np.ndarray | None = None,
    ratio: float = 1.0,
) -> Sampler:
    """Build the sampler of windows that `training.sampling` names; "prioritized" is uniform here.

    Args:
        training: Names the sampling and has the settings of dynamic frequency sampling.
        replay: The experience.
        rng: Belongs to the sampler from here on.
        length: Frames of a window.
        minimum: Smallest number of real frames of a window. With `across_ends` all are real but the `history`.
        pad: Side on which a shorter window is padded.
        history: Frames of a window before the sampled one.
        across_ends: Windows may span several episodes; else each lies within one.
        counts: For imagination under dynamic frequency sampling: number of training windows of the dynamics model that
            start at each row (N,). None samples for the dynamics model.
        ratio: For imagination: the dynamics model's batch size divided by imagination's.

    Raises:
        UsageError: There is no window.
    """
    runs, order = replay.runs(across_ends)
    if across_ends:
        minimum = length - history
    if training.sampling != "dfs":
        sampling = "uniform" if training.sampling == "prioritized" else training.sampling
        return WindowSampler(
            runs, order, length=length, minimum=minimum, pad=pad, history=history, sampling=sampling, rng=rng
        )
    return FrequencySampler(
        runs,
        order,
        length=length,
        minimum=minimum,
        pad=pad,
        history=history,
        kind="dynamics" if counts is None else "imagination",
        settings=training.dfs,
        ratio=ratio,
        trained=counts,
        rng=rng,
    )


def build_segment_sampler(
    training: TrainingSettings,
    replay: Replay,
    world_model: WorldModel,
    rng: np.random.Generator,
) -> SegmentSampler:
    """Build the sampler of segments that a world model learns from.

    Args:
        training: See `build_sampler`.
        replay: The experience.
        world_model: Determines the rows and their length.
        rng: Belongs to the sampler from here on.

    Raises:
        UsageError: There is nothing to sample, or an episode is longer than its row.
    """
    _check_long_enough(world_model, replay)
    if world_model.rows == "windows" and training.sampling == "prioritized":
        runs, order = replay.runs(world_model.across_ends)
        table = WindowTable(
            runs,
            order,
            length=world_model.segment,
            minimum=(world_model.segment - world_model.history) if world_model.across_ends else world_model.min_segment,
            pad="right",
            history=world_model.history,
        )
        return PrioritySampler(table, share=training.priority.share, temperature=training.priority.temperature, rng=rng)
    if world_model.rows == "windows":
        return build_sampler(
            training,
            replay,
            rng,
            length=world_model.segment,
            minimum=world_model.min_segment,
            pad="right",
            history=world_model.history,
            across_ends=world_model.across_ends,
        )
    runs, order = replay.runs(across_ends=False)
    if world_model.rows == "streams":
        return StreamSampler(runs, order, length=world_model.segment, rng=rng)
    longest = int(runs.length.max(initial=0))
    check_episode_fits(longest, world_model.segment)
    return WindowSampler(
        runs,
        order,
        length=longest,
        minimum=world_model.min_segment,
        pad="right",
        whole=True,
        sampling="windows",
        rng=rng,
    )


def _check_long_enough(world_model: WorldModel, replay: Replay) -> None:
    """Check that an episode, or a stream where segments run over the ends of episodes, holds what is learned from.

    Raises:
        UsageError: None does.
    """
    longest = int(replay.runs(world_model.across_ends)[0].length.max(initial=0))
    frames = f"{longest} frame{'s' * (longest != 1)}"
    if world_model.across_ends:
        own = world_model.segment - world_model.history
        if longest < own:
            shorter = f", or set dynamics.sequence_length={longest}" if longest > 1 else ""
            raise UsageError(
                f"dynamics.sequence_length = {own}: the longest sequence of the experience has {frames}, the episodes"
                f" of one environment together (dynamics.across_ends = true): collect more with wm collect{shorter}."
            )
        return
    needed = world_model.min_segment
    if longest >= needed:
        return
    settings = world_model.settings
    if getattr(settings, "min_segment", 0):
        key, remedy = f"min_segment = {needed}", f"dynamics.min_segment={longest}" if longest else ""
    elif needed == world_model.min_context:
        key, remedy = f"context = {settings.context}", f"dynamics.context={longest - 1}" if longest > 1 else ""
    else:
        key, remedy = f"rows = {world_model.rows}", ""
        if not settings.reads_closing and bool((replay.terminated | replay.truncated).any()):
            remedy = "dynamics.closing_frames=true, which adds the frame behind each last action"
    raise UsageError(
        f"dynamics.{key}: the longest episode of the experience has {frames}, and dynamics learn from {needed} in a"
        f" row: collect longer ones with wm collect{f', or set {remedy}' if remedy else ''}."
    )


def frames_per_row(world_model: WorldModel, lengths: np.ndarray) -> float:
    """Return the mean number of frames that a row of a batch learns from, where windows are sampled uniformly.

    Args:
        world_model: Determines the rows.
        lengths: Frames of each run that rows are taken from, see `Replay.runs`. (E,)

    Returns:
        Frames without padding and `history`; 0 where every run is too short for a row.
    """
    own = world_model.segment - world_model.history
    if world_model.rows == "streams":
        return own if len(lengths) else 0.0
    if world_model.rows == "episodes":
        whole = lengths[lengths >= world_model.min_segment]
        return float(whole.mean()) if len(whole) else 0.0
    minimum = own if world_model.across_ends else world_model.min_segment
    lengths = lengths[lengths >= minimum]
    full = np.maximum(lengths - own + 1, 0)  # windows without padding; the others have `minimum` to `longest` frames
    longest = np.minimum(lengths, own - 1)
    padded = (longest + minimum) * (longest - minimum + 1) // 2  # frames of these
    return float((full * own + padded).sum() / (lengths - minimum + 1).sum()) if len(lengths) else 0.0


def check_episode_fits(longest: int, length: int) -> None:
    """Check that a row of `length` frames holds the `longest` episode.

    Raises:
        UsageError: It does not.
    """
    if longest > length:
        raise UsageError(
            f"dynamics.sequence_length = {length}: an episode of {longest} frames does not fit into a row"
            f" (dynamics.rows = episodes); set dynamics.sequence_length={longest}, or rows to windows or streams."
        )


def gather(
    replay: Replay,
    latents: Any,
    windows: Windows,
    targets: SearchTargets | None = None,
    *,
    across_ends: bool = False,
) -> Batch:
    """Gather the rows of windows into a batch. `is_first` is False in padding.

    Args:
        replay: The experience.
        latents: Latents or observations (N, ...) of all rows, on the replay's device or on the host.
        windows: Rows (B, T).
        targets: Search results, for a model that learns from them.
        across_ends: `is_first` and `is_last` mark games instead of episodes.
    """
    device = replay.device
    rows, valid = to_device(windows.rows, device), to_device(windows.valid, device)
    return Batch(
        inputs=take_rows(latents, windows.rows, device),
        action=replay.action[rows],
        reward=replay.reward[rows],
        terminated=replay.terminated[rows],
        truncated=replay.truncated[rows],
        is_first=(replay.opens_game if across_ends else replay.first)[rows] & valid,
        valid=valid,
        targets=None
        if targets is None
        else Targets(
            targets.policy[rows],
            targets.value[rows],
            targets.is_searched[rows] & valid,
            None if targets.sampled is None else targets.sampled[rows],
        ),
        is_last=replay.ends_game[rows] & valid if across_ends else None,
        is_closing=None if replay.is_closing is None else replay.is_closing[rows] & valid,
    )


@torch.no_grad()
def encode_frames(
    world_model: WorldModel,
    observation: Any,
    machine: Machine,
    *,
    encoded: Tensor | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Encode all frames that `encoded` lacks.

    Batches always begin at the same rows, so a resumed job computes the same bits. Each of several ranks encodes some.

    Args:
        world_model: Its encoder is frozen.
        observation: Tree of (N, ...), on the machine's device or on the host.
        machine: Device and precision.
        encoded: Latents of the first rows, from an earlier call.
        progress: Display of progress; None is quiet.

    Returns:
        Latents (N, ...).
    """
    total = len(first_part(observation))
    start = 0 if encoded is None else len(encoded) - len(encoded) % ENCODE_BATCH
    parts: list[Any] = [] if encoded is None else [encoded[:start]]
    if start < total:
        progress = progress or Progress(quiet=True)
        with machine.autocast(), ranks.sharing_rows(), progress.bar("encode", total, "frames", start) as bar:
            begins = np.arange(start, total, ENCODE_BATCH)
            equal = -(-len(begins) // ranks.all_rows(1))  # batches of each rank, the first ones again behind the last
            own: list[Tensor] = []
            for begin in ranks.own_rows(np.resize(begins, ranks.all_rows(equal))):
                some = slice(begin, min(begin + ENCODE_BATCH, total))
                chunk = map_parts(lambda part, at=some: to_device(part[at], machine.device)[None], observation)
                own.append(world_model.encode(chunk)[0])
                bar.advance(ranks.all_rows(len(own[-1])))
            if ranks.is_sharing():
                own.append(own[0].new_zeros(equal * ENCODE_BATCH - sum(map(len, own)), *own[0].shape[1:]))
                own = [ranks.gather_rows(torch.cat(own))[: total - start]]
            parts += own
    return torch.cat(parts)
