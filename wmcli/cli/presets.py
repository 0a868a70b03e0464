"""`wm presets`: what published systems and variants there are, and every setting of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wmcli.cli.command import Command, Group
from wmcli.cli.options import Json, Set, complete_preset
from wmcli.cli.output import answer, emit_json

app = typer.Typer(cls=Group)


@app.callback(invoke_without_command=True)
def presets(context: typer.Context, as_json: Json = False) -> None:
    """List the presets, or show every setting of one.

    Examples:
        wm presets
        wm presets show quickstart --parameters
    """
    if context.invoked_subcommand is None:
        list_presets(as_json)


@app.command("list", cls=Command)
def list_presets(as_json: Json = False) -> None:
    """List every preset with what it is and the paper it comes from.

    Examples:
        wm presets list
    """
    from wmcli.config import preset_names

    rows = [
        {"name": name, "about": inherited(name, "about"), "paper": inherited(name, "paper")} for name in preset_names()
    ]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["name", "about", "paper"])


@app.command("show", cls=Command)
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The preset.", autocompletion=complete_preset)],
    settings: Set = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="And count the parameters of each model and part.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show every resolved setting of a preset, and the sizes of its models if asked.

    Examples:
        wm presets show quickstart --set backbone.layers=2 --parameters
    """
    from wmcli.settings import flatten, resolve

    resolved = resolve(name, settings or [])
    values = flatten(resolved)
    if parameters:
        counts = count_parameters(resolved)
    if as_json:
        about = {key: inherited(name, key) for key in ("about", "paper")}
        emit_json({"name": name, **about, "settings": values} | ({"parameters": counts} if parameters else {}))
        return
    answer([{"setting": key, "value": value} for key, value in values.items()], ["setting", "value"])
    if parameters:
        answer([{"part": f"parameters.{part}", "parameters": n} for part, n in counts.items()], ["part", "parameters"])


def inherited(name: str, key: str) -> str | None:
    """A preset's `about` or `paper`, or that of the preset it is based on."""
    from wmcli.config import read_preset

    table = read_preset(name)
    if key in table or "base" not in table:
        return table.get(key)
    return inherited(table["base"], key)


def count_parameters(settings: Any) -> dict[str, int]:
    """Parameters of each model and part; the environment says how many actions there are."""
    from wmcli.assemble import parameter_counts
    from wmcli.envs import protocol

    return parameter_counts(settings, protocol(settings.environment)["actions"])
