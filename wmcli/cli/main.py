"""The `wm` command: which commands there are, and how an exception becomes one line and an exit code.

Exit codes: 0 done, 1 a defect of ours, 2 wrong usage or settings, 3 a missing, damaged or incompatible artifact,
4 another process holds it, 5 training diverged, 6 a limit of the machine, 75 stopped after a checkpoint (run again to
go on), 130 / 143 interrupted at once, 141 the reader of the pipe went away.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from wmcli import __version__
from wmcli.cli import (
    artifacts,
    bash_words,
    clean,
    collect,
    compare,
    convert_lpips,
    diff,
    envs,
    evaluate,
    imagine,
    lineage,
    loop,
    play,
    presets,
    profile,
    runs,
    settings,
    train_dynamics,
    train_tokenizer,
    verify,
)
from wmcli.cli.command import Command, Group
from wmcli.errors import MachineError, UsageError, WmError
from wmcli.interrupt import stop_requests

INTERRUPTED = 130
READER_GONE = 141

app = typer.Typer(
    name="wm",
    help="Train, compare and take apart world models for reinforcement learning.",
    epilog="Start with: wm run quickstart",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
)

STAGES: dict[str, Callable[..., None]] = {
    "run": loop.run,
    "collect": collect.collect,
    "train-tokenizer": train_tokenizer.train_tokenizer,
    "train-dynamics": train_dynamics.train_dynamics,
    "imagine": imagine.imagine,
    "eval": evaluate.evaluate,
    "play": play.play,
    "profile": profile.profile,
    "convert-lpips": convert_lpips.convert_lpips,
}
RESUMED = ("run", "collect", "train-tokenizer", "train-dynamics", "imagine")
"""Commands that are asked to stop from their first moment on, so that a scheduler never sees another code than 75."""
ANSWERS: dict[str, Callable[..., None]] = {
    "compare": compare.compare,
    "runs": runs.runs,
    "diff": diff.diff,
    "artifacts": artifacts.artifacts,
    "lineage": lineage.lineage,
    "verify": verify.verify,
    "clean": clean.clean,
    "envs": envs.envs,
    "settings": settings.settings,
}
for panel, commands in {"Work": STAGES, "Answers": ANSWERS}.items():
    for name, command in commands.items():
        app.command(name, cls=Command, rich_help_panel=panel)(command)
app.add_typer(presets.app, name="presets", rich_help_panel="Answers")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"wm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def wm(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # A bare `wm` is a question from a person, so help goes to stdout; but a script whose command word came out empty
    # must not go on as if something had been done, hence the exit code of wrong usage.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(UsageError.exit_code)


# -- exceptions to exit codes -----------------------------------------------------------------------------------------

# The base of all errors of parsing. Typer has moved it between modules; its subclass BadParameter stays where it is.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """The entry point of `wm`."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller, as in `wm collect >&-`
            setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115 (open to the end of the process)
    _keep_stdout_for_results()
    sys.exit(bash_words.answer(lambda: run([])) if bash_words.asked() else run(sys.argv[1:]))


def _keep_stdout_for_results() -> None:
    """Let Python alone write to stdout: what compiled code and child processes print there goes to stderr."""
    ours = sys.stdout
    results = open(  # noqa: SIM115, PTH123 (a descriptor, open to the end of the process)
        os.dup(ours.fileno()), "w", buffering=1 if ours.isatty() else -1, encoding=ours.encoding, errors=ours.errors
    )
    sys.stdout = sys.__stdout__ = results  # type: ignore[misc]
    os.dup2(sys.stderr.fileno(), ours.fileno())


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors are one line on stderr; a defect shows its traceback."""
    try:
        with stop_requests() if arguments[:1] and arguments[0] in RESUMED else nullcontext():
            returned = typer.main.get_command(app).main(args=list(arguments), prog_name="wm", standalone_mode=False)
    except SystemExit as left:
        # Typer ends the process itself after shell completion, and with code 1 when a pipe breaks under it.
        if isinstance(left.__context__, BrokenPipeError):
            return _reader_gone()
        return left.code if isinstance(left.code, int) else 1
    except BrokenPipeError:
        return _reader_gone()
    except KeyboardInterrupt:
        return _interrupted(arguments)
    except CommandLineError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        message += "" if message.endswith((".", "?")) else "."
        return _complain(arguments, f"{message} See: {_command(arguments)} --help", UsageError.exit_code)
    except WmError as error:
        return _complain(arguments, str(error), error.exit_code)
    except Exception as error:
        return _from_machine(arguments, error)
    # Typer turns Ctrl-C into the return value 130, as it does with `raise typer.Exit(code)`.
    if returned == INTERRUPTED:
        return _interrupted(arguments)
    return returned if isinstance(returned, int) else 0


def _from_machine(arguments: Sequence[str], error: Exception) -> int:
    """Errors of memory, disk and permissions in one line; all others are defects and show where they happened."""
    if _out_of_memory(error):
        message = "out of memory: make this stage's batch smaller with --set (see the keys: wm presets show NAME)."
        return _complain(arguments, message, MachineError.exit_code)
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{error.strerror}{where}: free some space and run the same command again."
            _silence_stdout()
            return _complain(arguments, message, MachineError.exit_code)
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return _complain(arguments, f"{error.strerror}{where}", UsageError.exit_code)
    traceback.print_exception(error)
    return _complain(arguments, "this is a defect of wm; please report it with the lines above.", 1)


def _out_of_memory(error: Exception) -> bool:
    """Python's own, CUDA's (known only if torch was imported), and the untyped error of torch's CPU allocator."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _command(arguments: Sequence[str]) -> str:
    """`wm collect`, or `wm` where no command was named."""
    known = [*STAGES, *ANSWERS, "presets"]
    return next((f"wm {word}" for word in arguments[:1] if word in known), "wm")


def _complain(arguments: Sequence[str], message: str, code: int) -> int:
    """One line on stderr, whatever the message holds."""
    typer.echo(f"{_command(arguments)}: {' '.join(message.split())}", err=True)
    return code


def _interrupted(arguments: Sequence[str]) -> int:
    return _complain(arguments, "interrupted.", INTERRUPTED)


def _reader_gone() -> int:
    _silence_stdout()
    return READER_GONE


def _silence_stdout() -> None:
    """Send what is left in stdout's buffer nowhere, or Python would fail on it once more while it shuts down."""
    if sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
