"""wm: train, compare and take apart world models for reinforcement learning.

The public names are those of `wmcli.api`, which is imported when the first of them is used: `import wmcli` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from wmcli.api import (
        ControllerModel,
        DynamicsModel,
        EpisodeScores,
        Experience,
        OpenedRun,
        OpenLoop,
        Player,
        Rows,
        TokenizerModel,
        evaluate,
        load,
        load_settings,
        open_run,
        train_controller,
        train_dynamics,
        train_tokenizer,
    )

__all__ = [
    "ControllerModel",
    "DynamicsModel",
    "EpisodeScores",
    "Experience",
    "OpenLoop",
    "OpenedRun",
    "Player",
    "Rows",
    "TokenizerModel",
    "evaluate",
    "load",
    "load_settings",
    "open_run",
    "train_controller",
    "train_dynamics",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'wmcli' has no attribute {name!r}")
    import wmcli.api

    return getattr(wmcli.api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
