"""Every backbone at width 16, for world models that are to work on all of them."""

from __future__ import annotations

from wmcli.backbones import BACKBONES, SECTIONS, Backbone, build

NAMES = sorted(BACKBONES)
SMALL = {
    "retnet": {"heads": 2},
    "transformer": {"heads": 2},
    "transformer-xl": {"heads": 2, "memory_length": 64},
    "mamba2": {"head_width": 8},
    "s4": {"state_size": 8},
    "s5": {"state_size": 16, "blocks": 2},
}


def small(
    name: str, *, max_length: int, block: int, width: int = 16, dropout: float = 0.0, layers: int = 2
) -> Backbone:
    values = {"width": width, "layers": layers, "dropout": dropout} | SMALL.get(name, {})
    return build(SECTIONS[name].model_validate(values), max_length=max_length, block=block)
