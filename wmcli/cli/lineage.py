"""`wm lineage`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wmcli.cli.human import SHORT
from wmcli.cli.options import DEFAULT_RUN, OUTPUT_PANEL, Format, Json, RunFolder, complete_reference, refuse_both_forms
from wmcli.cli.output import answer, chosen, emit_json
from wmcli.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from wmcli.artifacts import Artifact, Tree

LINES = 40  # of a tree without --all
LEVEL, LABEL = 4, 40  # columns of a level's guide and of its label
LATEST_FIRST = ("evaluation", "controller", "dynamics", "tokenizer", "experience", "profile")


def lineage(
    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="REF",
            help="kind, kind@7 or a path. Default: the newest evaluation, or else controller, dynamics, ...",
            autocompletion=complete_reference,
        ),
    ] = None,
    run: RunFolder = DEFAULT_RUN,
    everything: Annotated[bool, typer.Option("--all", help="Draw every level.", rich_help_panel=OUTPUT_PANEL)] = False,
    as_json: Json = False,
    form: Format = None,
) -> None:
    """List the inputs of an artifact, and theirs, back to the first experience.

    A terminal shows the first levels of the tree, a pipe every artifact with
    its depth. An artifact that occurs again is marked and followed once.

    Examples:
        wm lineage controller --run runs/catch
    """
    from wmcli.artifacts import lineage as trace

    refuse_both_forms(as_json, form)
    nodes = list(trace(find(run, reference)).rows())
    if chosen(form) == "table" and not as_json:
        draw(nodes, everything)
        return
    rows = [describe(depth, role, tree) for depth, role, tree in nodes]
    if as_json:
        emit_json(rows)
    else:
        answer(rows, ["depth", "role", "name", "state", "digest", "path"], form)


def describe(depth: int, role: str, tree: Tree) -> dict[str, Any]:
    """Return the row of an artifact. Its inputs are the rows below it that are one level deeper.

    Rows are flat, since a long run is hundreds of levels deep.
    """
    return {
        "depth": depth,
        "role": role,
        "name": tree.name,
        "state": _state(tree),
        "problem": tree.problem,
        "digest": tree.digest,
        "path": str(tree.path),
    }


def _state(tree: Tree) -> str:
    if tree.problem:
        return "missing"
    if tree.repeated:
        return "repeated"
    return "pruned" if tree.pruned else "published"


def draw(rows: Sequence[tuple[int, str, Tree]], everything: bool) -> None:
    """Draw the tree on the terminal, up to the last level that fits, or with `everything` whole."""
    from rich.console import Console
    from rich.tree import Tree as Drawing

    console = Console(highlight=False)
    depths = [depth for depth, _, _ in rows]
    last = max(depths) if everything else _last_level(depths, console.width)
    branches: list[Drawing] = []  # the newest one at each depth
    for depth, role, tree in rows:
        if depth <= last:
            label = _label(role, tree, home=rows[0][2])
            branches[depth:] = [branches[depth - 1].add(label) if depth else Drawing(label)]
    # A deep tree is wider than any terminal. The terminal breaks its lines, which loses nothing.
    width = max(console.width, LEVEL * last + LABEL)
    Console(highlight=False, width=width, height=console.height).print(branches[0])
    if rest := sum(depth > last for depth in depths):
        console.print(f"{rest:,} more on {max(depths) - last:,} levels below: --all shows them", style="dim")


def _label(role: str, tree: Tree, home: Tree) -> Text:
    """Return `role: name  digest  state  run`, without the role if it is the kind, state "published", run of `home`."""
    from rich.text import Text

    label = Text("" if role in ("", tree.name.partition("@")[0]) else f"{role}: ")
    label.append(tree.name, style="bold")
    label.append(f"  {tree.digest[:SHORT]}", style="dim")
    if (state := _state(tree)) != "published":
        label.append(f"  {state}", style="red" if tree.problem else "dim")
    run = tree.path.parent.parent
    if run != home.path.parent.parent:
        label.append(f"  {run}", style="dim")
    return label


def _last_level(depths: Sequence[int], width: int) -> int:
    """Return the deepest level with no more than `LINES` lines up to it that is not too wide."""
    last = 0
    while last < min(max(depths), (width - LABEL) // LEVEL) and sum(each <= last + 1 for each in depths) <= LINES:
        last += 1
    return last


def find(folder: Path, reference: str | None) -> Artifact:
    """Return the artifact of a reference, of any kind; without one, the newest of the latest stage with one."""
    from wmcli.artifacts import KINDS, Run, open_artifact
    from wmcli.config import did_you_mean

    if reference is None:
        run = Run.open(folder, create=False)
        newest = next((artifact for kind in LATEST_FIRST if (artifact := run.latest(kind)) is not None), None)
        if newest is None:
            raise ArtifactError(f"run {folder} has no artifacts yet; make one with: wm collect --run {folder}")
        return newest
    kind = reference.partition("@")[0]
    if kind in KINDS:
        return Run.open(folder, create=False).resolve(reference, kind)
    if Path(reference).exists():
        return open_artifact(Path(reference))
    raise UsageError(f"no artifact '{reference}': neither a kind nor a path that exists; {did_you_mean(kind, KINDS)}")
