"""The settings of a world model without a tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from wmcli.config import Section
from wmcli.errors import UsageError

NO_TOKENIZER = "tokenizer.kind = 'none': this world model encodes frames itself and has no tokenizer to train"


class NoTokenizerSettings(Section):
    kind: Literal["none"] = "none"
    """No tokenizer: the world model encodes frames itself (MuZero, UniZero)."""

    def build(self, size: int) -> Any:
        """Raise UsageError."""
        raise UsageError(NO_TOKENIZER)
