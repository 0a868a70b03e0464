"""The file of a sweep: which runs follow from it, where they stand, and what is refused before any of them starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from wmcli.assemble import parameter_counts
from wmcli.envs.tasks import TASKS
from wmcli.errors import UsageError
from wmcli.settings import Settings, flatten, resolve
from wmcli.spaces import Spaces
from wmcli.stages.checks import check_rows
from wmcli.stages.measures import check_measures
from wmcli.sweeps.plan import Sweep, check_settings, list_runs, read_sweep
from wmcli.sweeps.suite_file import suite_names

SCALES = ("smoke", "cpu", "paper")
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
    assert plain.preset == "rem-quick" and plain.overrides == ("seed=1",)
    assert big.preset == "drama-quick" and big.overrides == ("seed=1", "dynamics.batch=32")
    assert (plain.variant, big.variant) == ("plain", "big-batch")


def test_a_text_that_looks_like_a_number_stays_a_text(tmp_path: Path) -> None:
    text = 'preset = "rem-quick"\n[settings]\nenvironment.kwargs = {map_name = "8", slippery = true}\n'
    (run,) = sweep_of(tmp_path, text).runs
    assert run.name == "run" and 'environment.kwargs.map_name="8"' in run.overrides
    assert "environment.kwargs.slippery=true" in run.overrides


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
        (
            'preset = "rem"\n[vary]\nseed = [1, 2]\n[variants.a]\nseed = 5',
            "variant 'a' and vary both set seed; leave it out of one of them",
        ),
        (
            '[vary]\npreset = ["rem", "iris"]\n[variants.a]\n[variants."b c"]\npreset = "drama"',
            "variant 'b c' and vary both set preset;",
        ),
        (
            'preset = "rem"\n[vary]\nenvironment.id = ["wm/Catch-v0"]\n[variants.a]\nenvironment = {id = "Pong"}',
            "variant 'a' and vary both set environment.id;",
        ),
        (
            'preset = "rem"\n[vary]\nenvironment.kwargs = [{a = 1}, {a = 2}]\n[variants.a]\nenvironment.kwargs.a = 3',
            "variant 'a' and vary both set environment.kwargs.a;",
        ),
        (
            'preset = "rem"\n[vary]\nbackbone.kind = ["c", "b__c"]\n[variants.a]\n[variants.a__b]',
            "runs a/b__c and a__b/c would share the record a__b__c.json; rename one of them",
        ),
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


# -- rules, scales, and the suites of the package ----------------------------------------------------------------------

SUITE = """
preset = "rem-quick"
[variants.plain]
[variants.wide]
controller.width = 64
[[where]]
match = {variant = "wide", environment.id = "ALE/Freeway-v5"}
settings = {collect.temperature = 0.01, controller.width = 32}
[scales.paper]
vary.environment.id = ["ALE/Pong-v5", "ALE/Freeway-v5"]
vary.seed = [1, 2]
[scales.cpu]
preset = "drama-quick"
where = []
vary.environment.id = ["wm/Catch-v0"]
local.slots = 3
[scales.smoke]
base = "cpu"
where = [{match = {}, settings = {controller.width = 8}}]
[scales.circle]
base = "circle"
"""


def scale_of(folder: Path, text: str, scale: str) -> Sweep:
    file = folder / "suite.toml"
    file.write_text(text)
    return read_sweep(Path(f"{file}:{scale}"))


def test_a_rule_sets_settings_of_the_runs_that_it_matches_and_of_no_other(tmp_path: Path) -> None:
    runs = {run.name: run.overrides for run in scale_of(tmp_path, SUITE, "paper").runs}
    assert len(runs) == 8
    matched = {name for name, overrides in runs.items() if "collect.temperature=0.01" in overrides}
    assert matched == {"wide/Freeway-v5/seed-1", "wide/Freeway-v5/seed-2"}
    assert "controller.width=32" in runs["wide/Freeway-v5/seed-1"]  # it comes last, so it wins over the variant's
    assert "controller.width=64" in runs["wide/Pong-v5/seed-1"]


def test_a_scale_is_laid_over_the_file_and_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cpu = scale_of(tmp_path, SUITE, "cpu")
    assert cpu.folder == tmp_path / "runs" / "suite-cpu" and cpu.local.slots == 3
    assert [(run.name, run.preset) for run in cpu.runs] == [
        ("plain/Catch-v0", "drama-quick"),
        ("wide/Catch-v0", "drama-quick"),
    ]
    assert scale_of(tmp_path, SUITE, "paper").folder == tmp_path / "runs" / "suite-paper"


def test_a_scale_may_be_laid_over_another_and_a_rule_without_values_matches_every_run(tmp_path: Path) -> None:
    smoke = scale_of(tmp_path, SUITE, "smoke")
    assert [run.name for run in smoke.runs] == ["plain/Catch-v0", "wide/Catch-v0"] and smoke.local.slots == 3
    assert all("controller.width=8" in run.overrides and run.preset == "drama-quick" for run in smoke.runs)


def test_a_rule_may_set_what_varies_and_what_a_variant_sets(tmp_path: Path) -> None:
    text = 'preset = "rem-quick"\n[vary]\nseed = [1, 2]\n[variants.a]\nrun.epochs = 3\n'
    rule = '[[where]]\nmatch = {variant = "a", seed = 2}\nsettings = {seed = 7, run.epochs = 4}\n'
    assert [run.overrides for run in sweep_of(tmp_path, text + rule).runs] == [
        ("run.epochs=3", "seed=1"),
        ("run.epochs=4", "seed=7"),
    ]


@pytest.mark.parametrize(
    ("scale", "text", "said"),
    [
        ("", SUITE, r"has several scales; choose one: .*suite.toml:paper, .*suite.toml:cpu"),
        (":cup", SUITE, "has no scale 'cup'; did you mean 'cpu'?"),
        (":circle", SUITE, "base leads in a circle: circle -> circle"),
        ("", 'preset = "rem"\nscales = 3', "write a table for each scale"),
        ("", 'preset = "rem"\n[[where]]\nmatch = {seed = 1}\nsettings = {}', r"where\[0\]: seed does not vary"),
        (
            *("", 'preset = "rem"\n[vary]\nseed = [1]\n[[where]]\nmatch = {seed = 2}\nsettings = {}'),
            r"where\[0\]: no run has seed = 2; did you mean|known: 1",
        ),
        ("", 'preset = "rem"\n[[where]]\nmatch = {seed = 1}', "settings"),
    ],
)
def test_what_is_refused_of_scales_and_rules(tmp_path: Path, scale: str, text: str, said: str) -> None:
    file = tmp_path / "suite.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        read_sweep(Path(f"{file}{scale}"))
    assert "\n" not in str(error.value)


def test_a_wrong_suite_is_named() -> None:
    with pytest.raises(UsageError, match=r"no suite called 'priorss'; did you mean 'priors'\? A file of your own"):
        read_sweep(Path("priorss:cpu"))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("suite", suite_names())
def test_the_settings_of_every_suite_resolve(suite: str, scale: str) -> None:
    check_settings(read_sweep(Path(f"{suite}:{scale}")))


def test_every_suite_has_all_scales_and_says_what_it_shows() -> None:
    rows = list_runs()
    assert [row["suite"] for row in rows] == suite_names()
    for row in rows:
        assert {*row} == {"suite", "about", "paper", *(f"{scale} runs" for scale in SCALES)}, row
        assert all(row.values()), row


def test_seeds_alone_are_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(tmp_path, 'preset = "rem-quick"\n[vary]\nseed = [1, 2, 3]\ndynamics.batch = [2, 4]\n')
    resolved = []
    monkeypatch.setattr("wmcli.settings.resolve", lambda preset, sets: resolved.append(sets))
    check_settings(sweep)
    pairs = [("1", "2"), ("1", "4"), ("2", "2"), ("3", "2")]  # each seed and each batch once
    assert resolved == [(f"seed={seed}", f"dynamics.batch={batch}") for seed, batch in pairs]


def distinct_settings(suite: str) -> list[Settings]:
    """Return the settings of the runs of a suite, of those that differ in their seeds the first."""
    runs = {
        tuple(word for word in run.arguments[4:] if not word.startswith("seed=")): run
        for run in read_sweep(Path(suite)).runs
    }
    return [resolve(run.arguments[1], list(run.arguments[5::2])) for run in runs.values()]


def settings_by_variant(suite: str) -> dict[str, Settings]:
    sweep = read_sweep(Path(suite))
    return {run.variant: resolve(run.preset, run.overrides) for run in sweep.runs}


PRESETS = {
    **{("rem-ablations", name): f"rem-{name}" for name in ("no-pop", "separate-embeddings", "no-action-inputs")},
    ("rem-ablations", "coarse-tokens"): "rem-4x4",
    ("rem-ablations", "c-iris"): "rem-pixel-controller",
    ("drama-sampling", "uniform"): "drama-uniform",
    ("drama-backbones", "mamba1"): "drama-mamba1",
    ("drama-sizes", "s"): "drama-s",
    **{("s4wm-variants", name): f"s4wm-{name}" for name in ("full-posterior", "no-mlp")},
    ("priors-initialization", "span-6"): "unizero-span",
    ("priors-initialization", "mean-6"): "unizero-gaussian",
    ("priors-regularization", "l1"): "unizero-span",
}
"""Variants of suites at paper scale that are presets, too."""
MODEL_SECTIONS = ("tokenizer", "dynamics", "backbone", "controller", "training.sampling")


@pytest.mark.parametrize(("suite", "variant"), PRESETS)
def test_a_variant_is_the_preset_of_its_name(suite: str, variant: str) -> None:
    settings = settings_by_variant(f"{suite}:paper")[variant]
    preset = resolve(PRESETS[suite, variant], [f"environment.id={settings.environment.id}"])
    ours, theirs = (
        {key: value for key, value in flatten(each).items() if key.startswith(MODEL_SECTIONS)}
        for each in (settings, preset)
    )
    assert ours == theirs


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("suite", suite_names())
def test_memory_tasks_have_frames_of_their_own_size_and_rows_that_hold_their_episodes(suite: str, scale: str) -> None:
    """A game is scaled to any size; a memory task is drawn at one."""
    for settings in distinct_settings(f"{suite}:{scale}"):
        if task := TASKS.get(settings.environment.id):
            assert settings.environment.size == task.side
        check_rows(settings)
        check_measures(settings)


# -- the suites of memory ----------------------------------------------------------------------------------------------

MEMORY = {
    **dict.fromkeys(("s4wm-distracting-memory", "s4wm-doors", "s4wm-rooms", "s4wm-recall"), 3),
    "s4wm-mazes": 4,
    "memory-backbones": 10,
}


@pytest.mark.parametrize("suite", MEMORY)
def test_memory_is_compared_at_equal_size_over_as_many_frames(suite: str) -> None:
    """Models are equal within a tenth, and a run of each learns from as many frames as the others."""
    models = settings_by_variant(f"{suite}:cpu")
    assert len(models) == MEMORY[suite]
    sizes, frames = [], set()
    for settings in models.values():
        counted = parameter_counts(settings, Spaces.of_images(settings.environment.size, 5))
        sizes.append(counted["dynamics"])
        frames.add(settings.dynamics.updates * settings.dynamics.batch * settings.dynamics.sequence_length)
        check_rows(settings)
        check_measures(settings)
    assert max(sizes) < 1.1 * min(sizes)
    assert max(frames) <= 1.05 * min(frames)
