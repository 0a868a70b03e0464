"""Sequence models, interchangeable through the contract in `base`, and their registry."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Tag

from wmcli.backbones.base import Backbone, BackboneSettings, BackboneSize, State, map_state
from wmcli.backbones.block_gru import BlockGRU, BlockGRUSettings
from wmcli.backbones.dreamer_gru import DreamerGRU, DreamerGRUSettings
from wmcli.backbones.gru import GRU, GRUSettings
from wmcli.backbones.mamba1 import Mamba1, Mamba1Settings
from wmcli.backbones.mamba2 import Mamba2, Mamba2Settings
from wmcli.backbones.retnet import RetNet, RetNetSettings
from wmcli.backbones.s4 import S4, S4Settings
from wmcli.backbones.s4d import S4D, S4DSettings
from wmcli.backbones.s5 import S5, S5Settings
from wmcli.backbones.transformer import Transformer, TransformerSettings
from wmcli.backbones.transformer_xl import TransformerXL, TransformerXLSettings
from wmcli.config import chosen_by_kind

__all__ = [
    "BACKBONES",
    "SECTIONS",
    "AnyBackbone",
    "Backbone",
    "BackboneSettings",
    "BackboneSize",
    "State",
    "build",
    "map_state",
]

# Each constructor takes its own section and a BackboneSize.
BACKBONES: dict[str, Any] = {
    "retnet": RetNet,
    "transformer": Transformer,
    "transformer-xl": TransformerXL,
    "gru": GRU,
    "dreamer-gru": DreamerGRU,
    "block-gru": BlockGRU,
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
}


AnyBackbone = Annotated[
    Annotated[RetNetSettings, Tag("retnet")]
    | Annotated[TransformerSettings, Tag("transformer")]
    | Annotated[TransformerXLSettings, Tag("transformer-xl")]
    | Annotated[GRUSettings, Tag("gru")]
    | Annotated[DreamerGRUSettings, Tag("dreamer-gru")]
    | Annotated[BlockGRUSettings, Tag("block-gru")]
    | Annotated[Mamba1Settings, Tag("mamba1")]
    | Annotated[Mamba2Settings, Tag("mamba2")]
    | Annotated[S4Settings, Tag("s4")]
    | Annotated[S4DSettings, Tag("s4d")]
    | Annotated[S5Settings, Tag("s5")],
    chosen_by_kind("backbone"),
]
"""The settings of one backbone."""

SECTIONS: dict[str, type[BackboneSettings]] = dict(
    zip(BACKBONES, (get_args(member)[0] for member in get_args(get_args(AnyBackbone)[0])), strict=True)
)
"""The settings class of each kind."""


def build(settings: BackboneSettings, max_length: int, block: int) -> Backbone:
    """Build a backbone with weights drawn from torch's global generator.

    Args:
        settings: The section of one of `BACKBONES`.
        max_length: Longest sequence of one state, the queries of the last fork included. [elements]
        block: Elements of a time step.

    Raises:
        UsageError: The settings do not fit together.
    """
    size = BackboneSize(settings.width, settings.layers, settings.dropout, max_length, block)
    backbone: Backbone = BACKBONES[settings.kind](settings, size)
    return backbone
