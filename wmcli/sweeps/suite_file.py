"""The file of a suite of runs: its content, its scales, and the suites that come with the package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from wmcli.config import MAX_TOML_BYTES, Section, did_you_mean, is_file, merge, read_toml, validate
from wmcli.errors import ArtifactError, UsageError
from wmcli.reading import read_file
from wmcli.sweeps.local import LocalSettings
from wmcli.sweeps.ray_tasks import RaySettings
from wmcli.sweeps.slurm import SlurmSettings

SCALES = "scales"


class Where(Section):
    """Settings of the runs that have certain values of what varies."""

    match: dict[str, Any]
    """Values of what varies; `variant` is the name of one."""
    settings: dict[str, Any]
    """Settings of these runs, over all others."""


class SuiteFile(Section):
    """Content of the file, at one scale."""

    about: str = ""
    """What the suite shows, in one line."""
    paper: str = ""
    """Publication, and its table or figure."""
    preset: str = ""
    """Preset of every run that names no other."""
    folder: str = ""
    """Folder of the runs; by default runs/NAME for NAME.toml, and runs/NAME-SCALE for NAME:SCALE."""
    settings: dict[str, Any] = {}
    """Settings of every run."""
    vary: dict[str, Any] = {}
    """Lists of values of settings, or of `preset`. Every combination is a run."""
    variants: dict[str, dict[str, Any]] = Field(default={})
    """Settings, and perhaps a `preset`, under names."""
    where: list[Where] = []
    """Settings of some of the runs."""
    local: LocalSettings = LocalSettings()
    slurm: SlurmSettings = SlurmSettings()
    ray: RaySettings = RaySettings()


def suite_names() -> list[str]:
    """Return the names of the suites in the package, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _suites().iterdir() if entry.name.endswith(".toml"))


def read_suite(path: Path) -> tuple[SuiteFile, str]:
    """Read a suite at one scale.

    Args:
        path: A file, or the name of a suite of the package, perhaps with `:SCALE` behind it.

    Returns:
        The suite, and the name of its folder.

    Raises:
        UsageError: There is no such suite or scale, or the file is wrong.
    """
    name, scale = _split(path)
    table = read_table(name)
    scales = scales_of(table, name)
    content = {key: value for key, value in table.items() if key != SCALES}
    if scale:
        content = merge(content, _lay_over(scales, scale, name))
    elif scales:
        raise UsageError(f"{name} has several scales; choose one: {', '.join(f'{name}:{each}' for each in scales)}")
    stem = Path(name).stem if is_file(name) else name
    return validate(SuiteFile, content, str(path)), f"{stem}-{scale}" if scale else stem


def read_table(name: str) -> dict[str, Any]:
    """Return what stands in a file, or in a suite of the package."""
    if is_file(name):
        if not Path(name).is_file():
            raise UsageError(f"{name}: no such file; docs/scale.md shows the file of a sweep.")
        try:
            text = read_file(Path(name), MAX_TOML_BYTES, links=True).decode()
        except (ArtifactError, OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}: cannot be read as text: {error}") from None
    else:
        if name not in (names := suite_names()):
            raise UsageError(f"no suite called '{name}'; {did_you_mean(name, names)} A file of your own ends in .toml.")
        text = _suites().joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return read_toml(text, name)


def scales_of(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the scales of a suite: what is laid over the rest of the file, by name.

    Raises:
        UsageError: `scales` is no table of tables.
    """
    scales = table.get(SCALES, {})
    if not isinstance(scales, dict) or not all(isinstance(each, dict) for each in scales.values()):
        raise UsageError(f"{name}: scales: write a table for each scale, such as [scales.cpu].")
    return scales


def _lay_over(scales: Mapping[str, Any], scale: str, name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the table of a scale, laid over that of its `base` if it names one."""
    if scale not in scales:
        raise UsageError(f"{name} has no scale '{scale}'; {did_you_mean(scale, scales)}")
    if scale in above:
        raise UsageError(f"{name}: base leads in a circle: {' -> '.join((*above, scale))}")
    table = dict(scales[scale])
    base = table.pop("base", None)
    return table if base is None else merge(_lay_over(scales, str(base), name, (*above, scale)), table)


def _split(path: Path) -> tuple[str, str]:
    """Return the file or name, and the scale behind it or an empty text."""
    name, colon, scale = str(path).rpartition(":")
    return (name, scale) if colon and not is_file(str(path)) else (str(path), "")


def _suites() -> Any:
    return resources.files("wmcli.presets").joinpath("suites")
