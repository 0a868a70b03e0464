"""Sequence models, interchangeable through the contract in `base`. This file knows them all by name."""

from __future__ import annotations

from pydantic import Field, field_validator

from wmcli.backbones.base import Backbone, Size, State, map_state
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
from wmcli.config import Section, did_you_mean

__all__ = ["BACKBONES", "Backbone", "BackboneSettings", "Size", "State", "build", "map_state"]

# Each is made from the section of its own name, with _ for -, and a Size.
BACKBONES = {
    "retnet": RetNet,
    "transformer": Transformer,
    "transformer-xl": TransformerXL,
    "gru": GRU,
    "dreamer-gru": DreamerGRU,
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
}


class BackboneSettings(Section):
    """The sequence model of a world model."""

    name: str = "retnet"
    """Which one: a section of that name below, with _ for -, holds its own settings."""
    width: int = Field(default=256, ge=1)
    """Width of an element, of input and output."""
    layers: int = Field(default=5, ge=1)
    """Number of layers."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Probability, wherever the backbone has dropout."""
    retnet: RetNetSettings = RetNetSettings()
    """Used when name is retnet."""
    transformer: TransformerSettings = TransformerSettings()
    """Used when name is transformer."""
    transformer_xl: TransformerXLSettings = TransformerXLSettings()
    """Used when name is transformer-xl."""
    gru: GRUSettings = GRUSettings()
    """Used when name is gru."""
    dreamer_gru: DreamerGRUSettings = DreamerGRUSettings()
    """Used when name is dreamer-gru."""
    mamba1: Mamba1Settings = Mamba1Settings()
    """Used when name is mamba1."""
    mamba2: Mamba2Settings = Mamba2Settings()
    """Used when name is mamba2."""
    s4: S4Settings = S4Settings()
    """Used when name is s4."""
    s4d: S4DSettings = S4DSettings()
    """Used when name is s4d."""
    s5: S5Settings = S5Settings()
    """Used when name is s5."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKBONES:
            raise ValueError(f"no backbone called '{name}'; {did_you_mean(name, BACKBONES)}")
        return name


def build(settings: BackboneSettings, max_length: int, block: int) -> Backbone:
    """A freshly initialized backbone, drawn from torch's global generator.

    max_length is the longest sequence one state must hold, in elements, the queries of the last fork included; block is
    the number of elements of one time step. Raises UsageError when the settings do not fit together.
    """
    size = Size(settings.width, settings.layers, settings.dropout, max_length, block)
    return BACKBONES[settings.name](getattr(settings, settings.name.replace("-", "_")), size)
