"""Section 5: learned attention priors, and statistics of tree search."""

from __future__ import annotations

from collections.abc import Iterator

from wmcli.assemble import settings_of
from wmcli.errors import UsageError
from wmcli.report.document import Block, Section, Text
from wmcli.report.plots import compared_curves
from wmcli.stages.pictures import plot_priors
from wmcli.stages.report.blocks import count, drawing, table
from wmcli.stages.report.study import Study

SEARCHED = (
    *("search_value", "search_entropy", "policy_change", "value_change"),
    *("policy_entropy", "policy_loss", "value_mean", "value_loss"),
)
"""Metrics of planners: of the searches, and of the policy and value that learn from them."""


def priors(study: Study) -> Section | None:
    """Return the attention priors that the runs of each variant learned, or None."""
    blocks: list[Block] = []
    for place, (name, members) in enumerate(study.variants.items()):
        models = {each.name: each.newest["dynamics"] for each in members if "dynamics" in each.newest}
        learned = [each for each in members if each.name in models and models[each.name].metrics.get("priors")]
        if not learned:
            continue
        try:
            settings = settings_of(models[learned[0].name])
            figure = plot_priors([study.log(each).priors for each in learned], settings)
        except UsageError as error:
            blocks.append(Text(f"{name}: no picture of the priors: {error}", "warning"))
            continue
        caption = f"{name}, {count(len(learned), 'run')}: parameters by layer and head; dashed, their initial values."
        blocks.append(drawing(figure, f"priors-{place}", f"Attention priors of {name} over updates.", caption))
    return Section("priors", "Attention priors", tuple(blocks)) if blocks else None


def search(study: Study) -> Section | None:
    """Return what planners logged of their searches, or None without a planner."""
    blocks = [*_curves(study), *_newest(study)]
    return Section("search", "Tree search", tuple(blocks)) if blocks else None


def _curves(study: Study) -> Iterator[Block]:
    lines = {}
    for each in study.detailed:
        logged = {name: line for metrics in study.log(each).curves.values() for name, line in metrics.items()}
        if each.settings.controller.kind == "mcts" and (
            found := {key: logged[key] for key in SEARCHED if key in logged}
        ):
            lines[study.label(each)] = found
    if lines:
        alt = "Search and policy metrics over updates" + (", a line for each run." if len(lines) > 1 else ".")
        yield drawing(compared_curves(lines), "search", alt, "Searches and what learns from them; entropies in nats.")


def _newest(study: Study) -> Iterator[Block]:
    rows = []
    for name, members in study.variants.items():
        for each in members:
            if each.settings.controller.kind != "mcts":
                continue
            settings = each.settings.controller
            metrics = {
                key: artifact.metrics[key]
                for kind in ("dynamics", "controller")
                if (artifact := each.newest.get(kind)) is not None
                for key in SEARCHED
                if key in artifact.metrics
            }
            rows.append(
                {"variant": name, "run": each.name, "rule": settings.rule, "simulations": settings.simulations}
                | metrics
            )
    if rows:
        yield table("search", rows, "Newest models of each run.")
