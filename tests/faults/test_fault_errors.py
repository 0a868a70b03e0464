"""Every system call of every command fails once: the command ends with one line, or goes on, and a repetition mends it.

The same command again must lead to the results of an undisturbed one, with nothing left over.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from fault_commands import COMMANDS, Places
from warm import Ended

from wmcli.errors import ArtifactError, MachineError, UsageError

pytestmark = pytest.mark.faults
FAILS = {
    "open": (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EINTR),
    "write": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "rename": (errno.EIO, errno.ENOSPC),
    "mkdir": (errno.EIO, errno.ENOSPC),
    "unlink": (errno.EIO,),
    "rmdir": (errno.EIO,),
    "symlink": (errno.EIO, errno.ENOSPC),
    "link": (errno.EIO, errno.ENOSPC),
    "mmap": (errno.ENOMEM,),
    "truncate": (errno.EIO, errno.ENOSPC),
    "flock": (errno.EIO, errno.ENOLCK, errno.EINTR),
    "read": (errno.EIO, errno.EMFILE, errno.EINTR),
}
Case = tuple[str, int, int]
Share = Callable[[Sequence[Case]], Sequence[Case]]


READING = (MachineError, ArtifactError, UsageError)
"""What a file that cannot be opened for reading may raise: it is of an artifact, or settings or data of the user."""


def said_wrongly(ended: Ended, kind: str, place: str) -> Iterator[str]:
    """Yield what is wrong with the end of a command one of whose calls failed."""
    errors = READING if kind == "read" else (MachineError,)
    if ended.code not in {0, *(each.exit_code for each in errors)}:
        yield f"exit code {ended.code}: {ended.said[-400:]}"
    elif "Traceback" in ended.said:
        yield f"a traceback: {ended.said[-400:]}"
    elif ended.code:
        lines = ended.said.splitlines()
        about = [line for line in lines if line.startswith("wm ")]
        named = (place, "run/", "run:", "copy", "out", "store", "data")
        if len(about) != 1 or lines[-1] != about[0] or not any(each in about[0] for each in named):
            yield f"not one line that names the place: {ended.said[-400:]}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_call_that_fails_is_told_in_one_line_and_mended_by_the_same_command(
    name: str, places: Places, share: Share
) -> None:
    places.know(name)
    counts = places.calls(name)
    cases = [(kind, at, error) for kind in FAILS for at in range(1, counts[kind] + 1) for error in FAILS[kind]]
    random.Random(name).shuffle(cases)
    wrong, tally = [], Counter[str]()
    for kind, at, error in share(cases):
        place = places.begin(name)
        control = places.control(kind=kind, at=at, action=error)
        ended = places.call(name, control)
        if control.hit is None:  # threads make other numbers of calls now and then
            tally[f"{kind} not reached"] += 1
            continue
        faults = [*said_wrongly(ended, kind, str(place)), *places.faults(name)]
        if ended.code == 0:
            faults += places.differences(name)
        if ended.code or places.left_over(name):
            faults += places.repeat(name)
        tally[f"{kind} {'went on' if ended.code == 0 else 'ended'}"] += 1
        if faults:
            tally[f"{kind} wrong"] += 1
            where = control.hit.removeprefix(f"{place}/")
            wrong.append(f"{name}: {kind} {at} of {where}: {os.strerror(error)}: " + "; ".join(faults))
            print(wrong[-1], flush=True)
    print(f"{name}: {dict(sorted(tally.items()))}", flush=True)
    assert not wrong, f"{len(wrong)} of {sum(tally.values())}:\n" + "\n".join(wrong)
