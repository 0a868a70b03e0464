"""Section 7: what the results were made from, by what, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wmcli.artifacts import Artifact, lineage
from wmcli.progress import size, some
from wmcli.report.document import Block, Drawing, Facts, Fold, Section, Text
from wmcli.report.lineage_drawing import Node, draw_lineage
from wmcli.stages.report.blocks import count, table
from wmcli.stages.report.runs import ReportedRun
from wmcli.stages.report.study import Study
from wmcli.stages.variants import COST, variants_table

SOFTWARE = ("wm", "torch", "numpy", "python")
MACHINE = ("platform", "device", "device_name", "precision", "threads", "kernels", "ranks")
SHORT = 12  # digits of a digest
MOST_DRAWN = 6


def provenance(study: Study) -> Section:
    """Return versions, machines, costs, lineages and the state of files."""
    blocks = [*_versions(study), *_cost(study), *_files(study), *_lineages(study), *_artifacts(study)]
    return Section("provenance", "Provenance", tuple(blocks))


# -- versions and machines --------------------------------------------------------------------------------------------


def _versions(study: Study) -> Iterator[Block]:
    """Yield what made the newest artifacts: of each fact one value, or all of them."""
    found: dict[str, dict[str, None]] = {}
    packages: dict[str, dict[str, None]] = {}
    for artifact in (artifact for each in study.runs for artifact in each.newest.values()):
        machine, block = artifact.manifest["machine"], artifact.manifest["environment"] or {}
        for key in (*SOFTWARE, *MACHINE):
            if (value := machine.get(key)) is not None:
                found.setdefault(key, {})[str(value)] = None
        for package, version in (block.get("versions") or {}).items():
            packages.setdefault(package, {})[str(version)] = None
    software = {key: found[key] for key in SOFTWARE if key in found} | packages
    machine = {key: found[key] for key in MACHINE if key in found}
    facts = [(title, _listed(values)) for title, values in (("Software", software), ("Machine", machine)) if values]
    if facts:
        yield Facts(tuple(facts))
    if different := [key for key, values in (software | machine).items() if len(values) > 1]:
        yield Text(f"Not the same for all artifacts: {some([key.replace('_', ' ') for key in different], 6)}.", "note")


def _listed(values: Mapping[str, Mapping[str, None]]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {' or '.join(map(str, each))}" for key, each in values.items())


# -- cost -------------------------------------------------------------------------------------------------------------


def _cost(study: Study) -> Iterator[Block]:
    rows = [row for row in study.rows if row["table"] == COST]
    if rows:
        yield table(
            "cost", variants_table(rows, COST), "Cost of a run: means over runs, the largest memory.", exact=rows
        )
    of_runs: list[dict[str, Any]] = [
        {"run": each.name, "variant": variant if len(study.variants) > 1 else None} | _cost_of(study, each)
        for variant, members in study.variants.items()
        for each in members
    ]
    readable = [
        row | {"bytes": size(row["bytes"]), "peak bytes": row["peak bytes"] and size(row["peak bytes"])}
        for row in of_runs
    ]
    caption = (
        "Hours are those of work, without pauses. Each process after the first of `wm run` resumed an interrupted one."
        " Updates per second are the median of each stage."
    )
    yield Fold(f"Cost of {count(len(of_runs), 'run')}", (table("cost-by-run", readable, caption, exact=of_runs),))


def _cost_of(study: Study, run: ReportedRun) -> dict[str, Any]:
    log, record, seconds = study.log(run), study.record(run), study.seconds(run)
    steps = run.about["steps"]
    return {
        "hours": seconds / 3600,
        "processes": log.processes or None,
        "attempts": record.get("attempts"),
        "peak bytes": record.get("peak_bytes") or None,
        "bytes": run.about["bytes"],
        "steps per second": steps / seconds if steps and seconds else None,
        **{f"{stage} updates/s": rate for stage, rate in log.rates.items()},
    }


# -- files ------------------------------------------------------------------------------------------------------------


def _files(study: Study) -> Iterator[Block]:
    """Yield whether the files of the newest artifacts are there, with the right sizes."""
    problems = [
        f"{each.name}: {problem}"
        for each in study.runs
        for artifact in each.newest.values()
        for problem in _missing(artifact)
    ]
    total = sum(len(each.newest) for each in study.runs)
    if problems:
        yield Text("\n\n".join(["Files that are missing or of another size:", *problems[:20]]), "warning")
    else:
        yield Text(
            f"All manifests match their digests, and all files of the {count(total, 'newest artifact')} have the sizes"
            " that these state. The contents were not read: `wm verify --run RUN` does."
        )


def _missing(artifact: Artifact) -> Iterator[str]:
    if artifact.pruned:
        return
    for entry in artifact.manifest["files"]:
        path = artifact.path / entry["path"]
        try:
            found = path.stat().st_size
        except OSError:
            yield f"{artifact.name}: {entry['path']} is missing"
            continue
        if found != entry["size"]:
            yield f"{artifact.name}: {entry['path']} has {found} bytes, not {entry['size']}"


# -- lineage ----------------------------------------------------------------------------------------------------------


def _lineages(study: Study) -> Iterator[Block]:
    drawn = [members[0] for members in study.variants.values()][:MOST_DRAWN]
    drawings = []
    for each in drawn:
        nodes, edges = _graph(each.last)
        alt = f"The {len(nodes)} artifacts that {each.last.name} of {each.name} was made from."
        drawings.append(Drawing(draw_lineage(nodes, edges), alt, f"{each.name}: what {each.last.name} was made from"))
    if drawings:
        yield drawings[0]
    if len(drawings) > 1:
        yield Fold(f"Lineage of {count(len(drawings) - 1, 'other variant')}", tuple(drawings[1:]))


def _graph(artifact: Artifact) -> tuple[list[Node], list[tuple[str, str]]]:
    """Return the lineage of an artifact as nodes and edges."""
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, str], None] = {}
    for _, _, tree in lineage(artifact).rows():
        kind, _, version = tree.name.partition("@")
        nodes.setdefault(
            tree.digest, Node(tree.digest, tree.name, kind, int(version), tree.pruned or bool(tree.problem))
        )
        edges |= {(parent.digest, tree.digest): None for parent in tree.inputs.values()}
    return list(nodes.values()), list(edges)


def _artifacts(study: Study) -> Iterator[Block]:
    rows, exact = [], []
    for each in study.runs:
        for artifact in each.newest.values():
            about = {"run": each.name, "artifact": artifact.name, "created": artifact.manifest["created"]}
            rows.append(about | {"digest": artifact.digest[:SHORT], "wm": artifact.manifest["machine"].get("wm")})
            exact.append(about | {key: artifact.manifest[key] for key in ("digest", "job")})
    yield Fold("Newest artifacts and their digests", (table("artifacts", rows, exact=exact),))
