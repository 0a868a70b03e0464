"""The classes of all commands, which make their help plain.

A command's docstring has one sentence that says what it does, perhaps other paragraphs, and last a block of examples,
each on one line. Typer keeps line breaks after the first paragraph; lines of up to 76 columns fit a terminal of 80:

    Examples:
        wm run quickstart --run runs/catch
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _Plain:
    """Show no type where the name of a value says it, and examples at the margin, whatever stands before them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = (options.get("help") or "").replace("\n    wm ", "\nwm ")

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for each in params:
            if each.param_type_name == "argument":
                each.display_type_rich = lambda ctx: None
            elif each.is_flag:
                each.metavar = ""
        return params

    def collect_usage_pieces(self, context: Any) -> list[str]:
        # Typer shows hidden arguments here.
        parts = [param.get_usage_pieces(context) for param in self.get_params(context) if not param.hidden]
        return [self.options_metavar, *(piece for part in parts for piece in part)]  # type: ignore[attr-defined]


class Command(_Plain, TyperCommand):
    """A command."""


class Group(_Plain, TyperGroup):
    """A command with others below it."""
