"""Measurements for people: rows of a profile, and the page of tables of `wm profile --suite`.

A row is one of `wmcli.training.measure.Bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wmcli.report.tables import Row, markdown

PRODUCTS = "(all matrix products)"  # row of the operators


# -- numbers ----------------------------------------------------------------------------------------------------------


def arithmetic(row: Row) -> str:
    """Return the rate, and its share of the machine's limit in the run's precision."""
    return f"{short_number(row['operations_per_second'] / 1e9)} GFLOP/s, {100 * row['of_matmul']:.3g} %"


def duration(median: float, low: float, high: float) -> str:
    """Return median and range, as in `12.3 ms (11.9 to 14)`."""
    unit, scale = next(
        each for each in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if median * each[1] >= 1 or each[0] == "µs"
    )
    return f"{short_number(median * scale)} {unit} ({short_number(low * scale)} to {short_number(high * scale)})"


def short_number(value: float) -> str:
    """Return a number in three digits, with thousands separators."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def megabytes(value: float) -> str:
    """Return bytes in megabytes."""
    return f"{short_number(value / 1e6)} MB"


# -- rows for people --------------------------------------------------------------------------------------------------


def readable(row: Row) -> Row:
    """Return a row in fewer columns, with units."""
    shown: dict[str, Any] = {"what": row["what"], "shape": row["shape"], "in": row.get("implementation")}
    if "skipped" in row:
        return shown | {"time": f"skipped: {row['skipped']}"}
    if "ratio" in row:
        return shown | {"time": f"{row['ratio']:.3g} times ({row['ratio_low']:.3g} to {row['ratio_high']:.3g})"}
    shown["time"] = duration(row["seconds"], row["seconds_low"], row["seconds_high"])
    if row["rate"] is not None:
        shown["rate"] = f"{short_number(row['rate'])} {row['unit']}"
    if row["operations_per_second"]:  # 0 where nothing was counted
        shown["arithmetic"] = arithmetic(row)
    if row["bytes_per_second"] is not None:
        shown["traffic"] = f"{short_number(row['bytes_per_second'] / 1e9)} GB/s, {100 * row['of_copy']:.3g} %"
    if row["peak_bytes"] is not None:
        shown["peak"] = megabytes(row["peak_bytes"])
    if "seconds_in_all" in row:
        shown["in all"] = f"{short_number(row['seconds_in_all'])} s, {megabytes(row['bytes_on_disk'])} on disk"
    if "epoch_share" in row:
        shown["epoch"] = f"{short_number(row['epoch_seconds'])} s, {100 * row['epoch_share']:.3g} %"
    if row.get("launches") is not None:
        shown["launches"] = f"{row['launches']:,}, {row['waits']} waits"
    if row.get("error") is not None:
        shown["error"] = f"{row['error']:.1g}"
    return shown


def by_length(rows: Sequence[Row], column: str) -> list[Row]:
    """Return a row for each length and backbone or preset (`column`), training and imagination side by side."""
    shown: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        if column not in row:
            continue
        cell = shown.setdefault((row["length"], row[column]), {"length": row["length"], column: row[column]})
        if "skipped" in row:
            cell[row["what"]] = f"skipped: {row['skipped']}"
            continue
        times = "" if row["times_as_long"] is None else f", {row['times_as_long']:.3g} times"
        if times and row["times_as_long_25"] != row["times_as_long_75"]:
            times += f" ({row['times_as_long_25']:.3g} to {row['times_as_long_75']:.3g})"
        cell[row["what"]] = f"{short_number(row['rate'])}/s{times}"
        if "state_bytes" in row:
            cell["state"] = megabytes(row["state_bytes"])
        elif row["peak_bytes"] is not None:
            cell[f"{row['what']} peak"] = megabytes(row["peak_bytes"])
    return list(shown.values())


def operator_share(row: Row) -> Row:
    """Return the row of an operator in fewer columns, with units."""
    shown = {
        "what": row["what"],
        "operator": row["operator"],
        "share": f"{100 * row['share']:.1f} %",
        "calls": row["calls"],
    }
    if row["operations_per_second"]:
        shown["GFLOP"] = short_number(row["operations"] / 1e9)
        shown["arithmetic"] = arithmetic(row)
    return shown


# -- the page ---------------------------------------------------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


def _time(row: Row) -> str:
    if row["seconds_low"] == row["seconds_high"]:
        return duration(row["seconds"], row["seconds_low"], row["seconds_high"]).partition(" (")[0]
    return duration(row["seconds"], row["seconds_low"], row["seconds_high"])


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.1f} min"


def suite_page(document: Mapping[str, Any], goals: Mapping[str, float]) -> str:
    """Write the page of tables of a suite's file.

    Args:
        document: Content of the file.
        goals: Minutes that a run of a preset should take.
    """
    parts: Mapping[str, Any] = document["parts"]
    done = {name: part for name, part in parts.items() if "error" not in part}
    blocks = ["# Profile", *_machine(done.get("machine"))]
    blocks += _kernels(_of(done, "kernels of "))
    blocks += _stages(_of(done, "stages of "))
    blocks += _runs(_of(done, "run of "), goals)
    blocks += _rest(parts)
    return "\n\n".join(blocks) + "\n"


def _of(parts: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the parts of one kind by preset."""
    return {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}


def _table(rows: Sequence[Row]) -> str:
    """Return a table of all columns that any row has. In the first column a name is not repeated."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))
    first, shown, above = columns[0], [], None
    for row in rows:
        shown.append(row if row[first] != above else {**row, first: ""})
        above = row[first]
    return markdown(shown, columns)


def _machine(part: Mapping[str, Any] | None) -> Iterator[str]:
    if part is None:
        return
    about = part["about"]
    facts = [
        f"{about['device_name']}" + (f" with {about['memory'] / 1e9:.0f} GB" if "memory" in about else ""),
        f"driver {about['driver']}" if about.get("driver") else "",
        about["processor"],
        f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}",
        f"torch {about['torch']}",
        f"triton {about['triton']}" if about["triton"] else "",
        *(f"{name} {version}" for name, version in part["key"]["packages"].items()),
        f"wm {about['wm']}" + (f" at {about['commit']}" if about["commit"] else f", source {part['key']['code']}"),
        f"{about['precision']}",
        f"kernels in {about['kernels']}",
        "updates and searches as CUDA graphs" if about["cuda_graph"] else "",
        part["finished"][:10],
    ]
    yield ", ".join(filter(None, facts)) + "."
    if part["key"]["quick"]:
        yield "**A trial with small batches and one sample. Its numbers are no measurements.**"
    yield (
        "Times are medians of five samples after a warm-up, with the fastest and the slowest. Shares are of the"
        " ceilings below. Memory is a call's peak above what is held between calls."
    )
    yield "## Machine"
    yield _table(
        [{"what": row["what"], "shape": row["shape"], "time": _time(row), "rate": _rate(row)} for row in part["rows"]]
    )
    yield _table([{"what": row["what"], "time of one": _time(row)} for row in part["launches"]])


def _rate(row: Row) -> str:
    if row["operations_per_second"]:
        return f"{short_number(row['operations_per_second'] / 1e12)} TFLOP/s"
    return f"{short_number(row['bytes_per_second'] / 1e9)} GB/s"


def _kernels(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table with a row for each kernel and implementation, forward and both passes side by side."""
    rows: list[Row] = []
    for preset, part in parts.items():
        cells: dict[tuple[str, str], dict[str, Any]] = {}
        ours = {  # the last is the form that a run takes
            row["what"]: row["seconds"] for row in part["rows"] if row.get("implementation") in ("torch", "triton")
        }
        for row in part["rows"]:
            if "implementation" not in row:
                continue
            name, _, passes = row["what"].rpartition(", ")
            cell = cells.setdefault(
                (name, row["implementation"]),
                {
                    "kernel": name,
                    "preset": preset,
                    "shape": row["shape"],
                    "implementation": row["implementation"],
                },
            )
            both = passes == "forward and backward"
            column, against = ("both passes", "× ours, both") if both else ("forward", "× ours")
            if "skipped" in row:
                cell.setdefault("forward", row["skipped"])
                continue
            cell[column] = _time(row)
            cell[against] = f"{row['seconds'] / ours[row['what']]:.3g}"
            traffic = "traffic, both" if both else "traffic"
            cell[traffic] = _percent(row["of_copy"])
            cell["difference"] = f"{row['error']:.1g}"
        rows += cells.values()
    if not rows:
        return
    yield "## Kernels"
    yield (
        "At the shapes of an update of each preset, or of an imagined step. Ours is the form that a run takes: Triton's"
        " on a GPU, else that in torch. Traffic is the share of the copy's rate if every operand is read and every"
        " result is written once. The difference is from the definition in float64, gradients included, as a share of"
        " its largest number."
    )
    order = [
        *("kernel", "shape", "preset", "implementation", "forward", "× ours", "traffic"),
        *("both passes", "× ours, both", "traffic, both", "difference"),
    ]
    yield _table([{name: row.get(name) for name in order} for row in rows])


def _stages(parts: Mapping[str, Any]) -> Iterator[str]:
    if not parts:
        return
    yield "## Stages"
    yield (
        "Models are fresh and frames random. Launches are the host's calls that start work, operations what the device"
        " runs for them, waits how often the host waits. The last two columns are matrix products, convolutions and"
        " attention: their share of the time, and of the ceiling."
    )
    rows = []
    for preset, part in parts.items():
        products = {row["what"]: row for row in part["operators"] if row["operator"] == PRODUCTS}
        for row in part["rows"]:
            if "ratio" in row:
                continue
            own = products.get(row["what"])
            rows.append(
                {
                    "preset": preset,
                    "stage": row["what"],
                    "shape": row["shape"],
                    "time": _time(row),
                    "rate": f"{short_number(row['rate'])} {row['unit']}",
                    "of the ceiling": _percent(row["of_matmul"]) if row["operations"] else None,
                    "memory": None if row["peak_bytes"] is None else megabytes(row["peak_bytes"]),
                    "launches": row.get("launches"),
                    "operations": row.get("device_operations"),
                    "waits": row.get("waits"),
                    "products: of the time": own and _percent(own["share"]),
                    "of their ceiling": own and own["of_matmul"] and _percent(own["of_matmul"]),
                }
            )
    yield _table(rows)


def _runs(parts: Mapping[str, Any], goals: Mapping[str, float]) -> Iterator[str]:
    if not parts:
        return
    yield "## Runs"
    yield (
        "The time of a whole run on this machine by its plan of epochs, from the kinds of its work below. Evaluation is"
        " not in it, since it takes as long as its episodes are."
    )
    yield _table(
        [
            {
                "preset": preset,
                "steps": f"{part['steps']:,}",
                "a step": _time(_exact(part["seconds_per_step"])),
                "run": _minutes(part["seconds"]),
                "goal": f"{goals[preset]:.3g} min" if preset in goals and not part["key"]["quick"] else None,
                "evaluated besides": f"{part['evaluation_episodes']:,} episodes",
            }
            for preset, part in parts.items()
        ]
    )
    yield (
        "Updates include the drawing of their batches, from random experience of half the run's size. To start and"
        " publish is all else that a stage does: it loads and builds models, records graphs, saves and publishes."
    )
    yield _table(
        [
            {
                "preset": preset,
                "work": row["what"],
                "shape": row["shape"],
                "time of one": _time(row),
                "number": f"{row['count']:,} {row['unit']}",
                "in the run": _minutes(row["total_seconds"]),
                "share": _percent(row["share"]),
                "a step": _time(_exact(row["seconds_per_step"])),
            }
            for preset, part in parts.items()
            for row in part["rows"]
        ]
    )


def _exact(seconds: float) -> Row:
    return {"seconds": seconds, "seconds_low": seconds, "seconds_high": seconds}


def _rest(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts that failed, and those of another machine or of other code than the first."""
    failed = [{"part": name, "error": part["error"]} for name, part in parts.items() if "error" in part]
    if failed:
        yield "## Not measured"
        yield _table(failed)
    keys = {name: (part["key"]["machine"]["device_name"], part["key"]["code"]) for name, part in parts.items()}
    other = [name for name, key in keys.items() if key != keys.get("machine", key)]
    if other:
        yield f"Of other code or another machine than the first part: {', '.join(other)}."
