"""Train tiny models as one of several ranks, or alone: `python as_rank.py CASES.json RESULT.pt`.

A case is `[system, kind, updates, dtype, overrides]`. The result is a list with losses and weights of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from test_trainers import CPU, trainer_of, weights
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from wmcli import ranks
from wmcli.trainers import batches
from wmcli.trainers.batches import encode_frames
from wmcli.training.device import isolated_randomness
from wmcli.training.loop import fit


def widen(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the inputs of a module with weights to float64: frames arrive in float32."""
    if next(module.parameters(), None) is None:
        return inputs
    return tree_map_only(Tensor, lambda each: each.double() if each.dtype == torch.float32 else each, inputs)


def has_codes(trainer: Any) -> bool:
    """Whether its frames are encoded by a frozen encoder."""
    return hasattr(trainer, "world_model") and trainer.world_model.frozen_encoder


def train(name: str, kind: str, updates: int, dtype: str, overrides: list[str]) -> dict[str, Any]:
    """Train one model. Returns the metrics of each update, its weights and the parts of its state."""
    torch.set_default_dtype(getattr(torch, dtype))
    wide = register_module_forward_pre_hook(widen) if dtype == "float64" else None
    lines: list[dict[str, Any]] = []
    with isolated_randomness(5, CPU.device) as rng:
        trainer = trainer_of(name, kind, rng, *overrides)
        each = trainer.update
        trainer.update = lambda: lines.append(each()) or lines[-1]  # type: ignore[method-assign]
        metrics = fit(trainer, updates)
        after = torch.rand(3)
        encoded = encode_frames(trainer.world_model, trainer.replay.observation, CPU) if has_codes(trainer) else None
    losses = torch.stack([torch.stack([value.double() for value in line.values()]) for line in lines])
    if ranks.size() > 1:
        torch.distributed.all_reduce(losses)
        losses /= ranks.size()
    parts = {part: state.state() for part, state in trainer.state.parts.items()}
    torch.set_default_dtype(torch.float32)
    if wide is not None:
        wide.remove()
    return {
        "names": list(lines[0]),
        "losses": losses,
        "metrics": metrics,
        "weights": weights(trainer),
        "parts": parts,
        "random": after,
        "encoded": encoded,
    }


batches.ENCODE_BATCH = 7  # the last batch of 60 frames is short, and the number of batches odd


def main(cases: Path, result: Path) -> None:
    torch.set_num_threads(1)
    if ranks.is_launched():
        ranks.start()
    found = [train(*case) for case in json.loads(cases.read_text())]
    torch.save(found, result.with_suffix(f".{ranks.rank()}.pt"))
    ranks.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
