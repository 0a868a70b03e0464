"""The classes of all commands, for plain help.

A command's docstring has one sentence, optional paragraphs, and a block of examples of one line each. Typer keeps line
breaks after the first paragraph; lines of up to 76 columns fit a terminal of 80:

    Examples:
        wm run quickstart --run runs/catch
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _Plain:
    """Help without types where a metavar says enough, and with examples at the margin."""

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


class Command(_Plain, TyperCommand):
    """A command."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # Typer shows hidden arguments here.
        parts = [param.get_usage_pieces(ctx) for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        return [self.options_metavar or "", *(piece for part in parts for piece in part)]


class Group(_Plain, TyperGroup):
    """A command with subcommands."""
