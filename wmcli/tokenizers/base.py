"""The settings of a world model without a tokenizer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from wmcli.config import Section
from wmcli.errors import UsageError
from wmcli.spaces import ObservationSpace


class NoTokenizerSettings(Section):
    updates: ClassVar[int] = 0

    kind: Literal["none"] = "none"
    """No tokenizer: the world model encodes frames itself (MuZero, UniZero)."""

    def build(self, space: ObservationSpace) -> Any:
        """Raise UsageError."""
        raise UsageError(
            "tokenizer.kind = 'none': this world model encodes frames itself and has no tokenizer to train"
        )
