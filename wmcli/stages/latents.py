"""Latents of the whole experience, encoded once per frozen encoder, and batches gathered by index."""

from __future__ import annotations

import torch
from torch import Tensor

from wmcli.experience.memory import Memory
from wmcli.experience.sampler import Windows
from wmcli.experience.targets import SearchTargets
from wmcli.stages.context import Context
from wmcli.world_models.base import Batch, Targets, WorldModel

ENCODE_BATCH = 256  # frames encoded at a time


def latents_of(context: Context, world_model: WorldModel, encoder: str, memory: Memory) -> Tensor:
    """Latents (N, ...) of all frames in `memory`, in its row order. `encoder` names what encodes them: the digest of
    the artifact that holds the encoder, or "rules".

    While that is frozen a frame has one encoding, so it is computed once and kept on the context for the stages that
    follow; frames that came since are added. Always the same batches from row 0 on, so that a resumed job sees the
    same bits.
    """
    known = context.latents.get(encoder)
    start = 0 if known is None else len(known) - len(known) % ENCODE_BATCH
    parts = [] if known is None else [known[:start]]
    frames = memory.frames
    if start < len(memory):
        with (
            context.machine.autocast(),
            torch.no_grad(),
            context.progress.bar("encode", len(memory), "frames", start) as bar,
        ):
            for begin in range(start, len(memory), ENCODE_BATCH):
                chunk = frames[begin : begin + ENCODE_BATCH]
                parts.append(world_model.encode(chunk[None])[0])
                bar.advance(len(chunk))
    latents = torch.cat(parts)
    context.latents = {encoder: latents}
    return latents


def gather(
    memory: Memory,
    latents: Tensor,
    windows: Windows,
    targets: SearchTargets | None = None,
    *,
    across_ends: bool = False,
) -> Batch:
    """The windows' latents (or frames) and experience, as the world model reads them, and what searches found there.
    `first` is False in padding. For a model with `across_ends` the bounds are those of games, not of episodes."""
    rows = torch.from_numpy(windows.rows).to(latents.device)
    valid = torch.from_numpy(windows.valid).to(latents.device)
    return Batch(
        latent=latents[rows],
        action=memory.action[rows],
        reward=memory.reward[rows],
        terminated=memory.terminated[rows],
        truncated=memory.truncated[rows],
        first=(memory.opens_game if across_ends else memory.first)[rows] & valid,
        valid=valid,
        targets=None
        if targets is None
        else Targets(targets.policy[rows], targets.value[rows], targets.found[rows] & valid),
        last=memory.ends_game[rows] & valid if across_ends else None,
    )
