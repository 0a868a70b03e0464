"""The type of an evaluation protocol. Each protocol is in the file that implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wmcli.artifacts import Artifact
from wmcli.errors import UsageError
from wmcli.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = Callable[[Sequence[Artifact]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Protocol:
    """One way to score a run."""

    name: str
    needs: Literal["controller", "dynamics", "experience"]
    """The kind of artifact that it scores."""
    evaluate: Callable[..., Artifact]
    """Takes a context and, by keyword, references to inputs. Publishes an evaluation."""
    unfit: Callable[[Settings], str | None]
    """Takes settings. Returns why such a run cannot be scored, or None if it can."""
    summarize: Callable[[Artifact], str]
    """Takes an evaluation. Returns it in one line."""
    table: Table
    """Takes evaluations. Returns the rows of a table."""
    pools: Callable[[Sequence[Artifact]], list[list[int]]] | None = None
    """Takes evaluations. Returns the places of those in each row of the table; None where each has a row of its own."""
    reads_experience: bool = False
    """Whether `evaluate` takes `experience`."""
    plot_curves: Callable[[Sequence[Artifact]], Figure] | None = None
    """Takes evaluations. Returns a figure."""
    draw_strips: Callable[[Sequence[Artifact], Path], None] | None = None
    """Takes evaluations and a file."""

    def check(self, settings: Settings) -> None:
        """Check that a run with these settings can be scored.

        Raises:
            UsageError: It cannot.
        """
        if reason := self.unfit(settings):
            raise UsageError(f"--protocol {self.name}: {reason}.")
