"""The `wm` command: its subcommands, and the exit code and message of every exception.

Exit codes: 0 done, 1 a defect of ours (of `wm doctor`: it found a problem), 2 wrong usage or settings, 3 a missing,
damaged or incompatible artifact, 4 another process holds it, 5 training diverged, 6 a limit of the machine, 75 stopped
after a checkpoint (run again to go on), 130 / 143 interrupted at once, 141 the reader of the pipe went away.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from wmcli import __version__, ranks
from wmcli.cli import (
    artifacts,
    bash_words,
    clean,
    collect,
    compare,
    convert_lpips,
    diff,
    doctor,
    envs,
    evaluate,
    export,
    imagine,
    import_,
    lineage,
    loop,
    play,
    presets,
    profile,
    push,
    report,
    runs,
    settings,
    sweep,
    train_dynamics,
    train_tokenizer,
    upgrade,
    verify,
    watch,
)
from wmcli.cli.command import Command, Group
from wmcli.cli.options import refuse_odd_words
from wmcli.cli.output import silence_stdout
from wmcli.errors import MachineError, UsageError, WmError
from wmcli.interrupt import stop_requests
from wmcli.reading import REMEDY, is_out_of_memory

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
    "import": import_.import_,
    "train-tokenizer": train_tokenizer.train_tokenizer,
    "train-dynamics": train_dynamics.train_dynamics,
    "imagine": imagine.imagine,
    "eval": evaluate.evaluate,
    "play": play.play,
    "profile": profile.profile,
    "push": push.push,
    "pull": push.pull,
    "convert-lpips": convert_lpips.convert_lpips,
}
RESUMED = ("run", "collect", "train-tokenizer", "train-dynamics", "imagine")
"""Commands that catch SIGTERM and SIGINT from their start, so that a scheduler always gets exit code 75."""
SHARED = ("run", "train-tokenizer", "train-dynamics", "imagine")
"""Commands that train on several processes under `torchrun`."""
REPORTS: dict[str, Callable[..., None]] = {
    "compare": compare.compare,
    "report": report.report,
    "runs": runs.runs,
    "watch": watch.watch,
    "diff": diff.diff,
    "artifacts": artifacts.artifacts,
    "lineage": lineage.lineage,
    "verify": verify.verify,
    "clean": clean.clean,
    "upgrade": upgrade.upgrade,
    "doctor": doctor.doctor,
    "envs": envs.envs,
    "settings": settings.settings,
}
for panel, commands in {"Work": STAGES, "Reports": REPORTS}.items():
    for name, command in commands.items():
        app.command(name, cls=Command, rich_help_panel=panel)(command)
app.add_typer(sweep.app, name="sweep", rich_help_panel="Work")
app.add_typer(export.app, name="export", rich_help_panel="Work")
app.add_typer(presets.app, name="presets", rich_help_panel="Reports")


def _print_version(version: bool) -> None:
    if version:
        typer.echo(f"wm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def wm(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # A bare `wm` prints help to stdout. It exits with the code of wrong usage: a script may have lost its command.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(UsageError.exit_code)


# -- exceptions to exit codes -----------------------------------------------------------------------------------------

# The base class of all parsing errors. Its module differs between versions of Typer; that of BadParameter does not.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run `wm`; the entry point of the package."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller, as in `wm collect >&-`
            setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115 (open to the end of the process)
    _keep_stdout_for_results()
    _let_stderr_fail()
    if ranks.is_launched():
        sys.exit(_run_as_rank(sys.argv[1:]))
    code = bash_words.answer(lambda: run([])) if bash_words.is_completing() else run(sys.argv[1:])
    with suppress(OSError):  # Python tells of it at the exit
        sys.stdout.flush()
        sys.stdout = sys.stderr  # what an environment prints at the exit is no result
    sys.exit(code)


def _run_as_rank(arguments: Sequence[str]) -> int:
    """Run a command line as one of the processes of `torchrun`."""
    command = next(iter(arguments), "")
    with stop_requests():
        ranks.start()
        try:
            if command not in SHARED:
                return _complain(
                    arguments,
                    f"torchrun shares training out, with wm {', wm '.join(SHARED)}: run this without it.",
                    UsageError.exit_code,
                )
            return run(arguments)
        finally:
            ranks.stop()


def _keep_stdout_for_results() -> None:
    """Send the output of compiled code and child processes on stdout to stderr; only Python writes to stdout."""
    ours = sys.stdout
    results = open(  # noqa: SIM115, PTH123 (a descriptor, open to the end of the process)
        os.dup(ours.fileno()), "w", buffering=1 if ours.isatty() else -1, encoding=ours.encoding, errors=ours.errors
    )
    sys.stdout = sys.__stdout__ = results  # type: ignore[misc]
    os.dup2(sys.stderr.fileno(), ours.fileno())


class _Talk(io.FileIO):
    """Standard error. What cannot be written, as on a full disk, is lost: it ends no work."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)


def _let_stderr_fail() -> None:
    """Let talk for people be lost where it cannot be written, whoever writes it."""
    ours = sys.stderr
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        _Talk(ours.fileno(), "w", closefd=False),
        ours.encoding,
        ours.errors,
        write_through=True,
    )


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    An error is one line on stderr. A defect of ours shows its traceback.
    """
    try:
        refuse_odd_words(arguments)
        with stop_requests() if arguments[:1] and arguments[0] in RESUMED else nullcontext():
            returned = typer.main.get_command(app).main(args=list(arguments), prog_name="wm", standalone_mode=False)
    except SystemExit as error:
        # Typer exits after shell completion, and with code 1 after a broken pipe.
        if isinstance(error.__context__, BrokenPipeError):
            return _reader_gone()
        return error.code if isinstance(error.code, int) else 1
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
    # Typer returns 130 after Ctrl-C, and the code of `raise typer.Exit(code)`.
    if returned == INTERRUPTED:
        return _interrupted(arguments)
    return returned if isinstance(returned, int) else 0


def _from_machine(arguments: Sequence[str], error: Exception) -> int:
    """Report an error of memory, disk or permissions in one line. Any other is a defect and shows its traceback."""
    if is_out_of_memory(error):
        reason = f" ({' '.join(str(error).splitlines()[0].split())[:200]})" if str(error) else ""
        message = (
            f"out of memory: make this stage's batch smaller with --set (see the keys: wm presets show NAME){reason}."
        )
        return _complain(arguments, message, MachineError.exit_code)
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        if error.errno == errno.ENAMETOOLONG:
            return _complain(arguments, f"{os.strerror(error.errno).lower()}{where[:100]}", UsageError.exit_code)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{error.strerror}{where}: free some space and run the same command again."
            silence_stdout()
            return _complain(arguments, message, MachineError.exit_code)
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return _complain(arguments, f"{error.strerror}{where}", UsageError.exit_code)
        if error.errno in REMEDY:
            message = f"{error.strerror}{where}: {REMEDY[error.errno]}, then run the same command again."
            return _complain(arguments, message, MachineError.exit_code)
    traceback.print_exception(error)
    return _complain(arguments, "this is a defect of wm; please report it with the lines above.", 1)


def _command(arguments: Sequence[str]) -> str:
    """Return the command, such as `wm collect`, or `wm` if the arguments name none."""
    names = [*STAGES, *REPORTS, "export", "presets", "sweep"]
    return next((f"wm {word}" for word in arguments[:1] if word in names), "wm")


def _complain(arguments: Sequence[str], message: str, code: int) -> int:
    """Print a message as one line on stderr and return the exit code.

    Several ranks fail alike, and the first one says so; what may be the matter with a single one, each says.
    """
    if ranks.is_first() or code in (1, MachineError.exit_code):
        message = " ".join(message.split()).encode(errors="backslashreplace").decode()
        with suppress(OSError):
            typer.echo(f"{_command(arguments)}: {message}", err=True)
    return code


def _interrupted(arguments: Sequence[str]) -> int:
    return _complain(arguments, "interrupted.", INTERRUPTED)


def _reader_gone() -> int:
    silence_stdout()
    return READER_GONE
