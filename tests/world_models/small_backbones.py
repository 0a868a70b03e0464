"""Every backbone at width 16, for world models that are to work on all of them."""

from __future__ import annotations

from wmcli.backbones import BACKBONES, Backbone, BackboneSettings, build

NAMES = sorted(BACKBONES)
SECTIONS = {
    "retnet": {"heads": 2},
    "transformer": {"heads": 2},
    "transformer_xl": {"heads": 2, "memory": 64},
    "mamba2": {"head_width": 8},
    "s4": {"state": 8},
    "s5": {"state": 16, "blocks": 2},
}


def small(
    name: str, *, max_length: int, block: int, width: int = 16, dropout: float = 0.0, layers: int = 2
) -> Backbone:
    values = {"name": name, "width": width, "layers": layers, "dropout": dropout, **SECTIONS}
    return build(BackboneSettings.model_validate(values), max_length=max_length, block=block)
