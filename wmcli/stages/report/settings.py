"""Section 6: the preset, and every setting in which runs differ from it or from each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wmcli.errors import WmError
from wmcli.report.document import Block, Fold, Section, Text
from wmcli.settings import flatten, resolve
from wmcli.stages.report.blocks import table
from wmcli.stages.report.runs import PRESET, ReportedRun
from wmcli.stages.report.study import Study

EXPECTED = ("seed", "environment.id")
"""Settings in which the runs of a variant differ."""


def settings(study: Study) -> Section:
    """Return the settings."""
    blocks = [*_between(study), *_from_presets(study), *_changes(study)]
    firsts = [members[0] for members in study.variants.values()][:1]
    for each in firsts:
        rows = [{"setting": key, "value": value} for key, value in compared(each.flat).items() if key != PRESET]
        blocks.append(Fold(f"All settings of {each.name}", (table("settings-all", rows),)))
    return Section("settings", "Settings", tuple(blocks))


def compared(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those of kinds that were not chosen."""
    return {key: value for key, value in flat.items() if not key.startswith("alternatives.")}


def _between(study: Study) -> Iterator[Block]:
    """Yield the settings in which variants differ, a column for each, and those in which runs of one do."""
    if len(study.variants) > 1:
        of_variants = {
            name: {key: _distinct([each.flat.get(key) for each in members]) for key in _keys(study)}
            for name, members in study.variants.items()
        }
        keys = [key for key in _keys(study) if len({str(values[key]) for values in of_variants.values()}) > 1]
        rows = [
            {"setting": key} | {name: values[key] for name, values in of_variants.items()}
            for key in keys
            if key not in EXPECTED
        ]
        if rows:
            yield table("settings-between-variants", rows, "Settings in which variants differ.")
    rows = []
    for name, members in study.variants.items():
        for key in _keys(study):
            values = [each.flat.get(key) for each in members]
            if key not in EXPECTED and len(set(map(str, values))) > 1:
                rows.append({"variant": name, "setting": key, "values": _distinct(values)})
    if rows:
        title = "Settings in which runs of one variant differ, besides seed and environment"
        yield Fold(title, (table("settings-within-variants", rows),))


def _keys(study: Study) -> list[str]:
    return list(dict.fromkeys(key for each in study.runs for key in compared(each.flat)))


def _distinct(values: list[Any]) -> Any:
    """Return the value if there is one, else all of them as text."""
    texts = list(dict.fromkeys(map(str, values)))
    return values[0] if len(texts) == 1 else ", ".join(texts)


def differing(run: ReportedRun) -> dict[str, tuple[Any, Any]] | None:
    """Return (value, value of the preset) of each setting that differs; None where the preset cannot be read.

    The settings are those that the run is bound to, from its first epoch on.
    """
    try:
        base = compared(flatten(resolve(run.preset)))
        ours = compared(flatten(run.bound))
    except WmError:
        return None
    return {
        key: (ours.get(key), base.get(key)) for key in dict.fromkeys([*ours, *base]) if ours.get(key) != base.get(key)
    }


def _from_presets(study: Study) -> Iterator[Block]:
    for place, (name, members) in enumerate(study.variants.items()):
        found = differing(members[0])
        if found is None:
            yield Text(
                f"{name}: the preset {members[0].preset} cannot be read here, so nothing is compared with it.", "note"
            )
        elif not found:
            yield Text(f"{name}: the preset `{members[0].preset}` as it is.")
        else:
            rows = [{"setting": key, "value": ours, "preset": base} for key, (ours, base) in found.items()]
            title = f"{name}: {len(rows)} settings differ from the preset {members[0].preset}"
            yield Fold(title, (table(f"settings-{place}", rows),))


def _changes(study: Study) -> Iterator[Block]:
    rows = [
        {"run": each.name, "from epoch": change["epoch"], "settings": ", ".join(change["set"])}
        for each in study.runs
        if each.binding is not None
        for change in each.binding.changes
    ]
    if rows:
        yield table("changes", rows, "Settings that changed on the way (`wm run --from-epoch`).")
