"""Random sequences of real stages, killed anywhere, some at the same time: what is published is whole and stays."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from searching import searching
from test_run_directory import POINTS, contents, wait
from tiny_run import EVERY_STAGE, opened

from wmcli.artifacts import Run, check
from wmcli.artifacts.manifest import KINDS, version_name
from wmcli.errors import ArtifactError, BusyError, UsageError, WmError
from wmcli.stages.collect import collect

STAGES = {"experience": collect, **EVERY_STAGE}
OPTIONS = [{}, {}, {}, {"force": True}, {"more": True}, {"fresh": True}]
COMMAND = st.tuples(
    st.sampled_from(list(STAGES)),
    st.sampled_from(OPTIONS),
    st.none() | st.none() | st.tuples(st.sampled_from(POINTS), st.integers(1, 4)),
)


def start(folder: Path, command: tuple[str, dict[str, bool], tuple[str, int] | None]) -> int:
    """Run a stage in a process of its own."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        kind, options, kill = command
        if kill is not None:
            os.environ["WM_FAILPOINT"] = f"{kill[0]}:{kill[1]}"
        STAGES[kind](opened(folder, "training.checkpoint_seconds=0", **options))
        code = 0
    except WmError as error:
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def published(folder: Path) -> dict[str, dict[str, str]]:
    run = Run.open(folder, create=False)
    names = [f"{kind}/{version_name(number)}" for kind in KINDS for number in run.versions(kind)]
    return {name: contents(folder / name) for name in names}


@pytest.mark.slow
def test_real_stages_in_any_order_leave_whole_versions() -> None:
    @searching(5)
    @given(st.lists(st.lists(COMMAND, min_size=1, max_size=3), min_size=3, max_size=6))
    def holds(rounds: list[list[tuple[str, dict[str, bool], tuple[str, int] | None]]]) -> None:
        home = Path(tempfile.mkdtemp())
        folder = home / "run"
        opened(folder, new=True)
        before: dict[str, dict[str, str]] = {}
        for commands in rounds:
            codes = [wait(child) for child in [start(folder, command) for command in commands]]
            allowed = {0, UsageError.exit_code, ArtifactError.exit_code, BusyError.exit_code}
            for code, (_, _, kill) in zip(codes, commands, strict=True):
                assert code in allowed | ({-signal.SIGKILL} if kill else set()), (codes, commands)
            after = published(folder)
            assert {name: after[name] for name in before} == before, "a published version has changed"
            assert {state for _, state, _ in check(Run.open(folder, create=False))} <= {"ok"}
            before = after
        for kind in STAGES:
            assert wait(start(folder, (kind, {}, None))) == 0
        for kind in STAGES:
            entries = {entry.name for entry in (folder / kind).iterdir()}
            assert not [name for name in entries if name.startswith((".trash", ".draft"))]
        shutil.rmtree(home)

    holds()
