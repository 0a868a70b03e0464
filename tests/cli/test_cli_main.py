"""Parsing, help, start-up and exit codes of `wm`, with stages that do nothing."""

from __future__ import annotations

import errno
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from wmcli import __version__
from wmcli.cli import main, presets
from wmcli.config import preset_names
from wmcli.errors import ArtifactError, BusyError, DivergedError, MachineError, Stopped, UsageError

pytestmark = pytest.mark.matrix

EVERY = [[name] for name in [*main.STAGES, *main.REPORTS]] + [["presets"], ["presets", "list"], ["presets", "show"]]
FULL = Path("/dev/full")  # where every write fails for lack of space
HEAVY = ("torch", "zarr", "matplotlib", "gymnasium", "numpy")


def command(words):
    """The command that `wm WORDS` runs."""
    found = typer.main.get_command(main.app)
    for word in words:
        found = found.commands[word]
    return found


def examples(words):
    """The lines of a command's block of examples."""
    return re.findall(r"^wm .*", command(words).help.partition("Examples:")[2], re.MULTILINE)


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=60
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["collect", "--help"], ["eval", "-h"], ["colect"]])
def test_no_heavy_import_before_work_starts(arguments):
    # Typer itself needs pydantic to parse a command's options, but not for help and version.
    heavy = HEAVY + (("pydantic",) if arguments[0].startswith("--") else ())
    code = f"""
import sys
from wmcli.cli.main import run
run({arguments!r})
print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""
    done = fresh(code)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_listing_presets_needs_no_torch():
    done = fresh("import sys; from wmcli.cli.main import run; run(['presets']); sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_help_is_quick(tmp_path):
    """Less than twice the processor time of an app of one command, from compiled modules as installed."""
    small = tmp_path / "small.py"
    small.write_text("import typer\napp = typer.Typer()\napp.command()(lambda: None)\napp()\n")
    compiled = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    compiled["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def processor_seconds(*program):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *program, "--help"], capture_output=True, check=True, env=compiled)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(processor_seconds("-m", "wmcli"), processor_seconds(small)) for _ in range(6)][1:]  # the first compiles
    wm, app = (min(seconds) for seconds in zip(*pairs, strict=True))
    assert wm < 2 * app, pairs


def test_version(capsys):
    assert main.run(["--version"]) == 0
    assert capsys.readouterr() == (f"wm {__version__}\n", "")


def test_bare_wm_shows_help_and_is_wrong_usage(capsys):
    assert main.run([]) == 2
    out, err = capsys.readouterr()
    assert "train-dynamics" in out
    assert err == ""


@pytest.mark.parametrize("name", [*main.STAGES, *main.REPORTS, "presets"])
def test_every_command_has_a_sentence_and_an_example(name, capsys):
    assert main.run([name, "--help"]) == 0
    out, _ = capsys.readouterr()
    assert f"wm {name}" in out.split("Example", 1)[1]


@pytest.mark.parametrize("name", EVERY)
def test_help_fits_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run([*name, "--help"]) == 0
    out, _ = capsys.readouterr()
    assert not re.search(r"<\w+>|\[\[", out)  # Python's types, and brackets around brackets
    lines = [line.strip() for line in out.splitlines()]
    for example in examples(name):
        assert example in lines  # whole, on a line of its own
    for parameter in command(name).params:
        kind = getattr(parameter, "type_descriptor", None) or parameter.type  # Typer has changed where it keeps them
        for choice in getattr(kind, "choices", None) or ():
            assert re.search(rf"\b{choice}\b", out), f"{choice} is not in the help, or not whole"


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        (["eval"], "wm eval [OPTIONS]"),  # without its hidden argument
        ([], "wm [OPTIONS] COMMAND [ARGS]..."),
        (["presets"], "wm presets [OPTIONS] COMMAND [ARGS]..."),
    ],
)
def test_usage_names_commands_and_no_hidden_arguments(line, usage, capsys):
    assert main.run([*line, "--help"]) == 0
    assert f"Usage: {usage}" in [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", ["compare", "envs"])
def test_help_names_the_formats_of_each_picture(name):
    from wmcli.cli.compare import OF_FRAMES
    from wmcli.report.plots import SUFFIXES

    drawn = [each for each in command([name]).params if each.metavar == "FILE" and "raw" in each.help]
    assert len(drawn) == {"compare": 9, "envs": 1}[name]
    for option in drawn:
        formats = ".png" if option.name in OF_FRAMES else ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
        assert f"({formats})" in option.help, option.name


@pytest.mark.parametrize("name", EVERY)
def test_examples_name_options_that_exist(name):
    assert examples(name)
    for example in examples(name):
        words = shlex.split(example)[1:]
        found = [*name] if words[: len(name)] == name else words[:1]
        command(found).make_context("wm", words[len(found) :])  # parses, runs nothing


def test_examples_name_presets_that_exist():
    texts = [command.__doc__ for command in (*main.STAGES.values(), *main.REPORTS.values())]
    texts += [main.app.info.epilog, presets.presets.__doc__, presets.show.__doc__]
    named = set(re.findall(r"(?:wm run|--preset|presets show) (\w[\w-]*)", " ".join(texts)))
    assert named and named <= set(preset_names())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["colect"], "wm: No such command 'colect'. Did you mean 'collect'? See: wm --help"),
        (["collect", "--stepz", "3"], "wm collect: No such option: --stepz (Possible options: --seed, --set, --steps)"),
        (["collect", "--steps", "many"], "wm collect: Invalid value for '--steps'"),
        (["collect", "--steps", "0"], "wm collect: Invalid value for '--steps'"),
        (["collect", "--steps"], "wm collect: Option '--steps' requires an argument"),
        (["play"], "wm play: name a film with --out FILE, or play in a browser with --browser"),
        (["imagine", "extra"], "wm imagine: Got unexpected extra argument"),
        (["imagine", "--more", "--force"], "wm imagine: --more continues the newest version"),
        (["eval", "--protocol", "speed"], "wm eval: Invalid value for '--protocol'"),
        (
            ["eval", "runs/a", "runs/b"],
            "wm eval: it scores one run: wm eval --run runs/a; to compare",
        ),
        (["eval", "--against", "runs/a"], "wm eval: No such option: --against"),
        (["compare"], "wm compare: no runs: name some"),
        (["compare", "runs/a", "--protocol", "speed"], "wm compare: Invalid value for '--protocol'"),
        (
            ["compare", "runs/a", "--by", "seed", "--against", "runs/b"],
            "wm compare: --against compares two sets",
        ),
        (["compare", "runs/a", "--curves", "x.png", "--against", "runs/b"], "wm compare: --against compares two sets"),
        (
            ["compare", "runs/a", "--protocol", "doors", "--curves", "x.png"],
            "wm compare: --protocol doors has no",
        ),
        (
            ["compare", "runs/a", "--protocol", "probe", "--strips", "x.png"],
            "wm compare: --protocol probe has no strips: add --protocol generation",
        ),
        *(
            (
                ["compare", "runs/a", "runs/b", "--published", "REM", f"--{name}", file],
                f"wm compare: --{name}: cannot write {file}: {problem}",
            )
            for name in ("curves", "profiles", "intervals", "improvement", "priors", "attention", "losses")
            for file, problem in (
                ("x.txt", "its name must end in .png or .svg or .pdf, not '.txt'."),
                ("none/x.png", "there is no folder none; create it first."),
            )
        ),
        *(
            (
                ["compare", "runs/a", "--protocol", "generation", "--strips", f"x{suffix}"],
                f"wm compare: --strips: cannot write x{suffix}: its name must end in .png, not '{suffix}'.",
            )
            for suffix in (".svg", ".pdf", ".jpg")
        ),
        (["compare", "runs/a", "--cost", "x.jpg"], "wm compare: --cost: cannot write x.jpg: its name must end in"),
        (
            ["compare", "runs/a", "--curves", "x.png", "--by", "seed", "--intervals", "./tests/../x.png"],
            "wm compare: --curves and --intervals name one file, x.png: name two.",
        ),
        (["compare", "runs/a", "--over", "minutes"], "wm compare: --over minutes is for curves of returns: add"),
        (
            ["compare", "runs/a", "--protocol", "gridworld", "--profiles", "p.png"],
            "wm compare: --protocol gridworld",
        ),
        (["compare", "runs/a", "--protocol", "gridworld", "--by", "seed"], "wm compare: --protocol gridworld"),
        (["report"], "wm report: no runs: name some, or the file of a sweep with --sweep."),
        (["report", "runs/a", "--sweep", "x.toml"], "wm report: --sweep names the runs itself: omit RUN."),
        (["eval", "--protocol", "doors", "--controller", "controller@1"], "wm eval: --protocol doors scores dynamics"),
        (["eval", "--experience", "experience@1"], "wm eval: --experience is for held-out episodes"),
        (["eval", "--dynamics", "dynamics@1"], "wm eval: --dynamics is for protocols that score dynamics"),
        (["run", "one", "--preset", "two"], "wm run: two presets"),
        (["presets", "--quick", "show", "rem"], "wm presets: give the options behind the command: wm presets show"),
        (["presets", "show"], "wm presets: Missing argument 'NAME'"),
        (["artifacts", "dynamic"], "wm artifacts: no artifacts of kind 'dynamic'; did you mean 'dynamics'?"),
        (["presets", "show", "no-such-preset"], "wm presets: no preset called 'no-such-preset'"),
        (["collect", "--run", ""], "wm collect: --run is empty: give a value, or leave it out."),
        (["collect", "--run="], "wm collect: --run is empty"),
        (["train-dynamics", "--tokenizer", " "], "wm train-dynamics: --tokenizer is empty"),
        (["run", ""], "wm run: an argument is empty"),
        (["report", "runs/a\0b"], "wm report: an argument: 'runs/a\\x00b' has the control character '\\x00'"),
        (["collect", "--run", "a\nb"], "wm collect: --run: 'a\\nb' has the control character"),
        (["collect", "--run", "\udcff"], "wm collect: --run: '\\udcff' has bytes that are no UTF-8"),
        (["collect", "--run", "x" * 256], "wm collect: file name too long: "),
        (["collect", "--env", ".x:Id"], "wm collect: "),
        (
            ["run", "--set", "collect.steps=9223372036854775808"],
            "wm run: --set collect.steps=9223372036854775808: collect.steps: a number of more digits",
        ),
        (["run", "--set", "training.threads=99999999999"], "wm run: --set training.threads=99999999999: "),
        (["import", "/dev/null", "--quiet"], "wm import: /dev/null: none of npz"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, line, capsys):
    assert main.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_an_empty_variable_is_not_the_default(monkeypatch, capsys):
    monkeypatch.setenv("WM_RUN", "")
    assert main.run(["collect"]) == 2
    assert capsys.readouterr().err == "wm collect: WM_RUN is empty: give it a folder, or unset it.\n"


def test_more_steps_than_memory_are_refused_before_they_are_played(tmp_path, capsys):
    """Not as a batch that is too large."""
    assert main.run(["collect", "--run", str(tmp_path / "run"), "--steps", str(10**13), "--quiet"]) == 6
    err = capsys.readouterr().err
    assert err.startswith(
        "wm collect: 10000000000000 steps at a time take 30,720,000 GB of memory, and this machine has"
    )
    assert err.count("\n") == 1 and not (tmp_path / "run").exists()


# -- exceptions to exit codes -----------------------------------------------------------------------------------------


def raising(monkeypatch, error):
    """Replace the command line by one whose `collect` raises."""
    app = typer.Typer()

    @app.callback()
    def top() -> None: ...

    @app.command()
    def collect() -> None:
        raise error

    monkeypatch.setattr(main, "app", app)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("wrong\n key"), 2, "wm collect: wrong key\n"),
        (ArtifactError("gone"), 3, "wm collect: gone\n"),
        (BusyError("held"), 4, "wm collect: held\n"),
        (DivergedError("nan"), 5, "wm collect: nan\n"),
        (MachineError("full"), 6, "wm collect: full\n"),
        (Stopped("again"), 75, "wm collect: again\n"),
        (MemoryError(), 6, "wm collect: out of memory: "),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 6, "wm collect: out of memory: "),
        (OSError(errno.ENOSPC, "No space left on device", "v1"), 6, "wm collect: No space left on device: v1: free"),
        (PermissionError(errno.EACCES, "Permission denied", "run"), 2, "wm collect: Permission denied: run\n"),
        (KeyboardInterrupt(), 130, "wm collect: interrupted.\n"),
    ],
)
def test_an_error_is_one_line_and_its_code(error, code, line, monkeypatch, capsys):
    raising(monkeypatch, error)
    assert main.run(["collect"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [KeyError("missing"), OSError(errno.ENOTDIR, "Not a directory"), RuntimeError("x")])
def test_a_defect_shows_where(error, monkeypatch, capsys):
    raising(monkeypatch, error)
    assert main.run(["collect"]) == 1
    _, err = capsys.readouterr()
    assert "Traceback" in err
    assert "raise error" in err
    assert err.splitlines()[-1].startswith("wm collect: this is a defect of wm")


def test_cuda_out_of_memory_is_a_limit_of_the_machine(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    raising(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    assert main.run(["collect"]) == 6


def test_reader_of_the_pipe_goes_away():
    """Under the printing of Typer itself and under that of a command."""
    for arguments in (["--help"], ["presets", "list", "--json"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([sys.executable, "-m", "wmcli", *arguments], stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        assert done.returncode == 141
        assert done.stderr == b""


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_no_defect(closed):
    """As in `wm presets list >&-`."""
    done = subprocess.run(
        [sys.executable, "-m", "wmcli", "presets", "list"],
        capture_output=True,
        preexec_fn=lambda: os.close(closed),
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert bool(done.stdout) == (closed == 2)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_stdout_on_a_full_disk_is_a_limit_of_the_machine():
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "wmcli", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 6
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [("wm train-", "train-tokenizer"), ("wm artifacts dyn", "dynamics"), ("wm imagine --dynamics d", "dynamics")],
)
def test_completion(words, expected):
    environment = {"_WM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = fresh("from wmcli.cli.main import main; main()", **environment)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout.split()
