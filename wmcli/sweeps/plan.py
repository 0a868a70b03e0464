"""The file of a sweep, and the runs that follow from it.

    preset = "drama-quick"
    folder = "runs/backbones"

    [settings]                                  # of every run
    training.threads = 1

    [vary]                                      # every combination is a run
    environment.id = ["wm/Catch-v0", "ALE/Pong-v5"]
    backbone.kind = ["mamba2", "transformer"]
    seed = [1, 2, 3]

    [variants.large-batch]                      # named settings, one more thing to vary
    dynamics.batch = 32

    [[where]]                                   # settings of some of the runs
    match = {environment.id = "ALE/Pong-v5"}
    settings = {collect.temperature = 0.5}

    [local]                                     # also [slurm] and [ray]
    slots = 2

    [scales.cpu]                                # `wm sweep FILE:cpu` lays this table over all of the above
    preset = "drama-atari"

    [scales.smoke]
    base = "cpu"                                # over that of another scale
    where = [{match = {}, settings = {dynamics.updates = 2}}]           # of all runs, over all other settings

A run stands in a folder of its values, in the order of the file: `runs/backbones/large-batch/Pong-v5/mamba2/seed-3`.
Suites that come with the package have a name in place of a file: `wm sweep rem-ablations:cpu`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wmcli.config import did_you_mean, flat, format_override, is_file, preset_header
from wmcli.errors import UsageError
from wmcli.sweeps.local import LocalSettings
from wmcli.sweeps.ray_tasks import RaySettings
from wmcli.sweeps.slurm import SlurmSettings
from wmcli.sweeps.suite_file import SuiteFile, Where, read_suite, read_table, scales_of, suite_names

PRESET, VARIANT, ENVIRONMENT, SEED = "preset", "variant", "environment.id", "seed"
MOST_RUNS = 10_000
RECORDS = ".sweep"  # hidden, so that nobody takes it for a run


class PlannedRun(NamedTuple):
    """One run of a sweep: a command of `wm`."""

    name: str
    """Its path below the folder of the sweep, such as `Pong-v5/mamba2/seed-1`."""
    folder: Path
    """Its run directory, absolute."""
    arguments: tuple[str, ...]
    """Behind `wm`: `run PRESET --run FOLDER`, and `--set` before each of the settings."""
    values: tuple[tuple[str, str], ...] = ()
    """What varies, with its value in this run, as in the name."""

    @property
    def stem(self) -> str:
        """The name of its record and its log, without suffix."""
        return self.name.replace("/", "__")

    @property
    def preset(self) -> str:
        """The name or file of its preset."""
        return self.arguments[1]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its settings over those of the preset, each as `section.key=value`."""
        return self.arguments[5::2]

    @property
    def variant(self) -> str:
        """What varies besides environment and seed; "all" if nothing does."""
        return ", ".join(value for key, value in self.values if key not in (ENVIRONMENT, SEED)) or "all"

    @property
    def environment(self) -> str | None:
        """The environment as in its name; None if it does not vary by itself."""
        return dict(self.values).get(ENVIRONMENT)


@dataclass(frozen=True)
class Sweep:
    """A suite of runs."""

    file: Path
    """As the user wrote it: a file, or the name of a suite, perhaps with a scale."""
    folder: Path
    """Absolute."""
    runs: tuple[PlannedRun, ...]
    local: LocalSettings
    slurm: SlurmSettings
    ray: RaySettings

    @property
    def records(self) -> Path:
        """Folder of what is known of each run: records and logs."""
        return self.folder / RECORDS


class _Choice(NamedTuple):
    """One value of what varies."""

    key: str
    value: Any
    """As in the file; a variant's is its name."""
    label: str
    preset: str | None
    settings: dict[str, Any]

    @property
    def keys(self) -> set[str]:
        """What it sets."""
        return {*flat(self.settings), *([PRESET] if self.preset else ())}


def read_sweep(path: Path) -> Sweep:
    """Read the file of a sweep. `check_settings` checks the settings of its runs.

    Args:
        path: A file, or the name of a suite of the package, perhaps with `:SCALE` behind it.

    Raises:
        UsageError: The file is missing or wrong, or two runs would have the same folder or record.
    """
    content, name = read_suite(path)
    folder = Path(content.folder or f"runs/{name}").absolute()
    dimensions = list(_dimensions(content, path))
    size = 1
    for choices in dimensions:
        size *= len(choices)
    if size > MOST_RUNS:
        raise UsageError(f"{path}: {size} runs are more than {MOST_RUNS}; write several files.")
    for number, rule in enumerate(content.where):
        _check_rule(rule, dimensions, f"{path}: where[{number}]")
    runs = [_plan(content, path, folder, choices) for choices in itertools.product(*dimensions)]
    stems: dict[str, str] = {}
    for run in runs:
        if (other := stems.setdefault(run.stem, run.name)) != run.name:
            raise UsageError(
                f"{path}: runs {other} and {run.name} would share the record {run.stem}.json; rename one of them: '/'"
                " is '__' there."
            )
    for preset in dict.fromkeys(run.preset for run in runs):
        preset_header(preset)  # a wrong name is an error now
    return Sweep(path, folder, tuple(runs), content.local, content.slurm, content.ray)


def list_runs() -> list[dict[str, Any]]:
    """Return a row for each suite of the package: what it shows, its paper, and the runs at each of its scales."""
    rows = []
    for name in suite_names():
        table = read_table(name)
        runs = {f"{scale} runs": len(read_sweep(Path(f"{name}:{scale}")).runs) for scale in scales_of(table, name)}
        rows.append({"suite": name, "about": table["about"], "paper": table["paper"], **runs})
    return rows


def check_settings(sweep: Sweep) -> None:
    """Check that the settings of every run resolve.

    Raises:
        UsageError: Those of a run do not; the message names it.
    """
    from wmcli.settings import resolve

    checked: set[tuple[str, ...]] = set()
    for run in sweep.runs:
        seeds = tuple(each for each in run.overrides if each.startswith(f"{SEED}="))
        parts = {(run.preset, *(each for each in run.overrides if each not in seeds)), seeds}
        if parts <= checked:  # runs of other seeds are many
            continue
        try:
            resolve(run.preset, run.overrides)
        except UsageError as error:
            raise UsageError(f"{sweep.file}: {run.name}: {error}") from None
        checked |= parts


def _dimensions(content: SuiteFile, path: Path) -> Iterator[list[_Choice]]:
    """Yield the choices of each thing that varies: variants, then the lists in the order of the file."""
    variants = [_variant(name, values) for name, values in content.variants.items()]
    if variants:
        yield _distinct(path, "variants", variants)
    for key, values in flat(content.vary).items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{path}: vary.{key} = {values!r}: write a list of values, such as {key} = [1, 2].")
        choices = [_choice(key, value) for value in values]
        _check_once(path, variants, choices)
        yield _distinct(path, f"vary.{key}", choices)


def _variant(name: str, values: Mapping[str, Any]) -> _Choice:
    settings = flat(values)
    preset = settings.pop(PRESET, None)
    return _Choice(VARIANT, name, _safe(name), preset, settings)


def _choice(key: str, value: Any) -> _Choice:
    if key == PRESET:
        stem = Path(str(value)).stem if is_file(str(value)) else str(value)
        return _Choice(PRESET, value, _safe(stem), str(value), {})
    return _Choice(key, value, _label(key, value), None, {key: value})


def _label(key: str, value: Any) -> str:
    """Return the folder of a value: its text if that speaks for itself, else `key-value`."""
    if key == ENVIRONMENT:
        return _safe(re.split("[/:]", str(value))[-1])
    if isinstance(value, str):
        return _safe(value)
    text = "-".join(map(str, value)) if isinstance(value, list) else str(value).lower()
    return _safe(f"{key.rpartition('.')[2]}-{text}")


def _safe(text: str) -> str:
    """Return a text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "-", text).strip(".-") or "none"


def _distinct(path: Path, where: str, choices: list[_Choice]) -> list[_Choice]:
    """Return the choices, which have different folders.

    Raises:
        UsageError: Two have the same.
    """
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(
                f"{path}: {where}: two values would have the same folder '{label}'; leave one of them out."
            )
    return choices


def _check_once(path: Path, variants: list[_Choice], choices: list[_Choice]) -> None:
    """Check that no variant sets what varies: only one of the two would count.

    Raises:
        UsageError: One does.
    """
    varied = {key for choice in choices for key in choice.keys}
    for variant in variants:
        if twice := sorted(varied & variant.keys):
            raise UsageError(
                f"{path}: variant '{variant.value}' and vary both set {twice[0]}; leave it out of one of them."
            )


def _check_rule(rule: Where, dimensions: list[list[_Choice]], place: str) -> None:
    """Check that a rule names what varies.

    Raises:
        UsageError: It names something else, or a value that no run has.
    """
    values = {choices[0].key: [choice.value for choice in choices] for choices in dimensions}
    for key, value in flat(rule.match).items():
        if key not in values:
            raise UsageError(f"{place}: {key} does not vary; {did_you_mean(key, values)}")
        if value not in values[key]:
            raise UsageError(
                f"{place}: no run has {key} = {value!r}; {did_you_mean(str(value), map(str, values[key]))}"
            )


def _plan(content: SuiteFile, path: Path, folder: Path, choices: tuple[_Choice, ...]) -> PlannedRun:
    """Return the run of one value of everything that varies. What comes later in the file wins."""
    presets = [content.preset, *(choice.preset for choice in choices if choice.preset)]
    preset = presets[-1]
    if not preset:
        raise UsageError(f'{path}: preset is missing: write for example preset = "drama-quick" in its first line.')
    settings = flat(content.settings)
    for choice in choices:
        settings |= choice.settings
    chosen = {choice.key: choice.value for choice in choices}
    for rule in content.where:
        if flat(rule.match).items() <= chosen.items():
            settings |= flat(rule.settings)
    name = "/".join(choice.label for choice in choices) or "run"
    where = folder / name
    preset = str(Path(preset).absolute()) if is_file(preset) else preset
    sets = [word for key, value in settings.items() for word in ("--set", format_override(key, value))]
    values = tuple((choice.key, choice.label) for choice in choices)
    return PlannedRun(name, where, ("run", preset, "--run", str(where), *sets), values)
