"""A command is killed at its n-th system call, and the same again at some other one: the third has the same results.

A process that is killed while it writes leaves half of the data.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence

import fault_shim
import pytest
from fault_commands import COMMANDS, PROCESSES, Places

pytestmark = pytest.mark.faults
KILLS = 200
"""Of each command that starts processes."""
Case = tuple[int, int]
Share = Callable[[Sequence[Case]], Sequence[Case]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_twice_is_finished_by_the_third(name: str, places: Places, share: Share) -> None:
    places.know(name)
    total = places.calls(name)["total"]
    rng = random.Random(name)
    cases = [(at, rng.randint(1, total)) for at in range(1, total + 1)]
    rng.shuffle(cases)
    wrong, kills = [], 0
    for both in share(cases):
        places.begin(name)
        faults: list[str] = []
        for at in both:
            control = places.control(at=at, action=fault_shim.KILL)
            ended = places.call(name, control)
            if ended.code == 0:  # the rest was shorter
                break
            if ended.code != -signal.SIGKILL:
                faults.append(f"exit code {ended.code}: {ended.said[-400:]}")
            kills += 1
            faults += places.faults(name)
            if places.has_added(name):
                break  # the next command adds another
        else:
            ended = None
        if ended is None or ended.code or places.left_over(name):
            faults += places.repeat(name)
        else:
            faults += places.differences(name)
        if faults:
            wrong.append(f"{name} killed at {both} of {total} calls: " + "; ".join(faults))
            print(wrong[-1], flush=True)
    print(f"{name}: {kills} kills", flush=True)
    assert not wrong, f"{len(wrong)} of {kills}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_of_several_that_is_killed_is_made_up_for_by_the_same_command(
    name: str,
    places: Places,
    share: Callable[[Sequence[int]], Sequence[int]],
) -> None:
    places.know(name)
    total = places.calls(name)["total"]
    wrong, kills = [], 0
    for at in share(random.Random(name).sample(range(1, total + 1), min(KILLS, total))):
        places.begin(name)
        control = places.control(at=at, action=fault_shim.KILL)
        ended = places.call(name, control)
        kills += control.hit is not None
        faults = list(places.faults(name))
        if ended.code is None or (name != "ranks" and "Traceback" in ended.said):  # torchrun shows its own
            faults.append(f"exit code {ended.code}: {ended.said[-400:]}")
        faults += places.repeat(name)
        if faults:
            wrong.append(f"{name} killed at {at} of {total} calls: " + "; ".join(faults))
            print(wrong[-1], flush=True)
    print(f"{name}: {kills} kills", flush=True)
    assert not wrong, f"{len(wrong)} of {kills}:\n" + "\n".join(wrong)
