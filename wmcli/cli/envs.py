"""`wm envs`."""

from __future__ import annotations

from wmcli.cli.options import Format, Json, refuse_both_forms
from wmcli.cli.output import answer, emit_json


def envs(as_json: Json = False, form: Format = None) -> None:
    """List the installed environments.

    Examples:
        wm envs --json
    """
    from wmcli.envs import list_environments

    refuse_both_forms(as_json, form)
    rows = list_environments()
    if as_json:
        emit_json(rows)
    else:
        answer(rows, list(dict.fromkeys(column for row in rows for column in row)), form)
