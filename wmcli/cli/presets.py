"""`wm presets`: list published systems and their variants, and show every setting of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import typer

from wmcli.cli.command import Command, Group
from wmcli.cli.options import Format, Json, Set, complete_preset, refuse_both_forms
from wmcli.cli.output import Row, answer, chosen, emit_json
from wmcli.errors import UsageError

app = typer.Typer(cls=Group)

SYSTEMS = ("REM", "IRIS", "Drama", "STORM", "Dreamer", "UniZero", "MuZero", "S4WM", "RSSM", "TSSM", "study")
"""Systems in the order of the list. A study compares parts of other systems."""
WIDE = 120  # columns of a terminal with room for papers
NOTE = (
    "Minutes are those of wm run on two CPU cores, see docs/results.md."
    " All settings of one preset: wm presets show NAME"
)


def complete_system() -> list[str]:
    return [system.lower() for system in SYSTEMS]


System = Annotated[
    str | None,
    typer.Option("--system", metavar="NAME", help=f"Only {', '.join(SYSTEMS)}.", autocompletion=complete_system),
]
Quick = Annotated[bool, typer.Option("--quick", help="Only presets that take minutes on a CPU.")]


@app.callback(invoke_without_command=True)
def presets(
    context: typer.Context, system: System = None, quick: Quick = False, as_json: Json = False, form: Format = None
) -> None:
    """List the presets, or show every setting of one.

    Examples:
        wm presets
        wm presets --system drama
        wm presets --quick
        wm presets show drama-quick --changed
    """
    if context.invoked_subcommand is None:
        list_presets(system, quick, as_json, form)
    elif system or quick or as_json or form:
        raise UsageError(f"give the options behind the command: wm presets {context.invoked_subcommand} ...")


@app.command("list", cls=Command)
def list_presets(system: System = None, quick: Quick = False, as_json: Json = False, form: Format = None) -> None:
    """List the presets by system: description, duration and paper.

    Examples:
        wm presets list
    """
    from wmcli.config import did_you_mean, preset_header, preset_names

    refuse_both_forms(as_json, form)
    if system is not None and system.lower() not in complete_system():
        raise UsageError(f"--system {system}: no such system; {did_you_mean(system.lower(), complete_system())}")
    every = [{"name": name} | preset_header(name) for name in preset_names()]
    every.sort(key=lambda row: (SYSTEMS.index(row["system"]), is_quick(row), row["name"]))
    rows = [row for row in every if system is None or row["system"].lower() == system.lower()]
    rows = [row for row in rows if not quick or is_quick(row)]
    if as_json:
        emit_json(rows)
    elif chosen(form) == "table":
        draw(rows, papers={row["system"]: row["paper"] for row in reversed(every)})
    else:
        answer(rows, ["name", "about", "paper", "system", "cost", "base"], form)


def is_quick(row: Row) -> bool:
    """Return whether a preset takes minutes on a CPU."""
    return " min" in row["cost"]


def draw(rows: Sequence[Row], papers: Mapping[str, str]) -> None:
    """Draw the presets of each system below its paper."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for system, mine in groupby(rows, key=itemgetter("system")):
        console.print(system if system == "study" else f"{system}: {papers[system]}", style="bold")
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=True)
        table.add_column(width=max(len(row["name"]) for row in rows))
        table.add_column(width=14)
        for _ in ("about", "paper"):
            table.add_column(ratio=1)
        for row in mine:
            table.add_row(row["name"], row["cost"], row["about"], *([row["paper"]] if console.width >= WIDE else []))
        console.print(Padding(table, (0, 0, 0, 2)))
        console.print()
    console.print(NOTE, style="dim")


@app.command("show", cls=Command)
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The preset.", autocompletion=complete_preset)],
    settings: Set = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only settings that differ from its base, or else from the defaults.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Add the unit and description of each setting.")] = False,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Add the number of parameters of each model and part.")
    ] = False,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """Show every resolved setting of a preset, and optionally the sizes of its models.

    Examples:
        wm presets show quickstart --set backbone.layers=2 --parameters
        wm presets show drama-quick --changed
        wm presets show rem --explain
    """
    from wmcli.config import preset_header
    from wmcli.settings import Settings, flatten, resolve
    from wmcli.settings.describe import explained

    refuse_both_forms(as_json, form)
    resolved = resolve(name, settings or [])
    header = preset_header(name)
    values = flatten(resolved)
    base = flatten(resolve(header["base"]) if header["base"] else Settings())
    differing = [
        {"setting": key, "value": values.get(key), "base": base.get(key)}
        for key in dict.fromkeys([*values, *base])
        if values.get(key) != base.get(key)
    ]
    if parameters:
        counts = count_parameters(resolved)
    rows: list[dict[str, Any]] = (
        differing if changed else [{"setting": key, "value": each} for key, each in values.items()]
    )
    columns = ["setting", "value", "base"] if changed else ["setting", "value"]
    if explain:
        about = explained(resolved)
        rows = [row | about.get(row["setting"], {}) for row in rows]
        columns += ["unit", "description"]
    if as_json:
        shown = {"changed": rows} if changed else {"settings": values} | ({"explained": rows} if explain else {})
        emit_json({"name": name, **header} | shown | ({"parameters": counts} if parameters else {}))
        return
    if parameters:
        rows += [{"setting": f"parameters.{part}", "value": number} for part, number in counts.items()]
    answer(rows, columns, form)


def count_parameters(settings: Any) -> dict[str, int]:
    """Count the parameters of each model and part, with the actions of the environment."""
    from wmcli.assemble import parameter_counts
    from wmcli.envs import protocol
    from wmcli.spaces import Spaces

    return parameter_counts(settings, Spaces.of(protocol(settings.environment)))
