"""The file of a sweep: which runs follow from it, where they stand, and what is refused before any of them starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from wmcli.errors import UsageError
from wmcli.sweeps.plan import Sweep, check_settings, read_sweep

FILE = """
preset = "rem-quick"
folder = "out"
[settings]
training.threads = 1
tokenizer = {fsq_levels = [4, 5], channels = 8}
[vary]
environment.id = ["wm/Catch-v0", "ALE/Pong-v5"]
"dynamics.learning_rate" = [0.001, 1e-4]
seed = [1, 2]
[local]
slots = 3
"""


def sweep_of(folder: Path, text: str) -> Sweep:
    file = folder / "sweep.toml"
    file.write_text(text)
    return read_sweep(file)


def test_every_combination_is_a_run_in_a_folder_of_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = sweep_of(tmp_path, FILE)
    assert sweep.folder == tmp_path / "out" and sweep.records == tmp_path / "out" / ".sweep" and sweep.local.slots == 3
    assert [run.name for run in sweep.runs] == [
        f"{game}/learning_rate-{rate}/seed-{seed}"
        for game in ("Catch-v0", "Pong-v5")
        for rate in ("0.001", "0.0001")
        for seed in (1, 2)
    ]
    last = sweep.runs[-1]
    assert last.folder == sweep.folder / last.name and last.variant == "learning_rate-0.0001"
    assert shlex.join(last.arguments) == (
        f"run rem-quick --run {last.folder} --set training.threads=1 --set 'tokenizer.fsq_levels=[4, 5]' --set"
        " tokenizer.channels=8 --set environment.id=ALE/Pong-v5 --set dynamics.learning_rate=0.0001 --set seed=2"
    )


def test_variants_are_a_dimension_and_what_comes_later_wins(tmp_path: Path) -> None:
    text = """
    preset = "rem-quick"
    [settings]
    seed = 5
    [vary]
    seed = [1]
    [variants.plain]
    [variants."big batch"]
    preset = "drama-quick"
    dynamics.batch = 32
    """
    plain, big = sweep_of(tmp_path, text).runs
    assert (plain.name, big.name) == ("plain/seed-1", "big-batch/seed-1")
    assert plain.arguments[1] == "rem-quick" and plain.arguments[4:] == ("--set", "seed=1")
    assert big.arguments[1] == "drama-quick" and big.arguments[4:] == ("--set", "seed=1", "--set", "dynamics.batch=32")
    assert (plain.variant, big.variant) == ("plain", "big-batch")


def test_a_text_that_looks_like_a_number_stays_a_text(tmp_path: Path) -> None:
    text = 'preset = "rem-quick"\n[settings]\nenvironment.kwargs = {map_name = "8", slippery = true}\n'
    (run,) = sweep_of(tmp_path, text).runs
    assert run.name == "run" and 'environment.kwargs.map_name="8"' in run.arguments
    assert "environment.kwargs.slippery=true" in run.arguments


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('presett = "rem"', "unknown key 'presett'; did you mean 'preset'?"),
        ("[vary]\nseed = [1]", "preset is missing"),
        ('preset = "rem-quik"', "no preset called 'rem-quik'; did you mean 'rem-quick'?"),
        ('preset = "rem"\n[vary]\nseed = 1', r"vary.seed = 1: write a list of values"),
        ('preset = "rem"\n[vary]\nseed = []', r"vary.seed = \[\]: write a list"),
        ('preset = "rem"\n[vary]\nseed = [1, 1]', "two values would have the same folder 'seed-1'"),
        ('preset = "rem"\n[vary]\nenvironment.id = ["a/Pong", "b/Pong"]', "the same folder 'Pong'"),
        ('preset = "rem"\n[local]\nslots = -1', "local.slots = -1"),
        ('preset = "rem"\n[local]\nmemory = "8"', "local.memory = '8'"),
        ('preset = "rem"\n[slurm]\npartitions = "a"', "did you mean 'partition'"),
        (f'preset = "rem"\n[vary]\nseed = {list(range(101))}\nrun.epochs = {list(range(100))}', "more than 10000"),
        ("preset = ", "not valid TOML"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        sweep_of(tmp_path, text)
    assert "sweep.toml" in str(error.value) or "no preset" in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_of_every_run_are_checked_before_one_starts(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, 'preset = "rem-quick"\n[vary]\nseed = [1]\nbackbone.kind = ["retnet", "retnett"]\n')
    with pytest.raises(UsageError, match=r"sweep.toml: seed-1/retnett: .*did you mean 'retnet'"):
        check_settings(sweep)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_sweep(tmp_path / "none.toml")
