"""The power goes after any system call of a command: readers see the old state or the new, and a repetition works.

The states of the disk are computed from recorded calls (`power_loss`). What had been published or bound is there in all
of them.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from broken_publishing import WAYS
from fault_commands import COMMANDS, Places, damage
from power_loss import Disk, Tree, read_tree, write_tree

from wmcli.artifacts import KINDS, Run
from wmcli.artifacts.store import BINDING

pytestmark = pytest.mark.faults
NAMES = [
    *("collect", "train-tokenizer", "train-dynamics", "imagine", "eval", "run", "rebind", "import", "clean"),
    *("pull", "export controller"),
]
REPEATED = 150
"""States in which a command is repeated."""
HIDDEN = (".work-", ".trash-", ".draft-", ".copy.pull-", ".out")


class State:
    """What may be on the disk, and what was promised before."""

    def __init__(self, tree: Tree, promised: tuple[str, ...], number: int) -> None:
        self.tree, self.promised, self.number = tree, promised, number

    def visible(self) -> Tree:
        """Without what readers pass over."""
        return {
            path: content
            for path, content in self.tree.items()
            if not any(part.startswith(HIDDEN) or part.endswith(".partial") for part in path.split("/"))
            and not path.startswith("run/tensorboard")
        }


def states(places: Places, name: str, broken: str | None = None) -> Iterator[State]:
    """Run a command while its calls are recorded, and yield the states that a loss of power may leave, each once."""
    place = places.begin(name)
    disk = Disk(place)
    control = places.control(recording=True)
    ended = places.call(name, control, broken)
    assert ended.code == 0, ended.said
    promised: list[str] = []
    seen = set[int]()
    for number, call in enumerate(control.calls()):
        disk.apply(call)
        if call.kind == "mark":
            promised.append(call.path)
        for tree in disk.after_power_loss(number):
            key = hash((frozenset(tree.items()), len(promised)))
            if key not in seen:
                seen.add(key)
                yield State(tree, tuple(promised), number)
    assert disk.tree() == read_tree(place), "the record lacks calls"


def broken_promises(state: State, place: Path, runs: Sequence[str], before: Tree) -> Iterator[str]:
    """Yield what readers of a state would find wrong."""
    for name in runs:
        yield from damage(place / name)
        run = Run(place / name)
        versions = {f"{kind}@{number}" for kind in KINDS for number in run.versions(kind)}
        old = before.get(f"{name}/metrics.jsonl")
        new = run.metrics.read_bytes() if run.metrics.exists() else b""
        if isinstance(old, bytes) and not new.startswith(old):
            yield "metrics.jsonl has lost lines that were there before"
        for promise in state.promised:
            what, _, version = promise.partition(" ")
            if what == "published" and version not in versions:
                yield f"{version} was published, and is gone"
            if what == "bound" and not (run.path / BINDING).exists():
                yield "the run was bound, and is not any more"
        gone = {
            f"{kind}@{int(path.name[1:])}"
            for kind in KINDS
            for path in map(Path, before)
            if path.parent == Path(name) / kind and path.name[0] == "v"
        } - versions
        if gone or (f"{name}/{BINDING}" in before and not (run.path / BINDING).exists()):
            yield f"was there before, and is gone: {sorted(gone) or BINDING}"


def read_all(places: Places, name: str, found: Sequence[State]) -> list[str]:
    """What readers find wrong in some states, of which those that look the same to them are read once."""
    wrong, seen = [], set[int]()
    before = read_tree(places.made(COMMANDS[name].before))
    for state in found:
        visible = state.visible()
        key = hash((frozenset(visible.items()), state.promised))
        if key in seen:
            continue
        seen.add(key)
        shutil.rmtree(places.place, ignore_errors=True)
        write_tree(visible, places.place)
        faults = [*broken_promises(state, places.place, COMMANDS[name].runs, before)]
        if faults:
            wrong.append(f"{name}, power lost after call {state.number}: " + "; ".join(faults))
            print(wrong[-1], flush=True)
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_readers_see_the_old_state_or_the_new_one_and_the_same_command_works_again(
    name: str,
    places: Places,
    share: Callable[[Sequence[State]], Sequence[State]],
) -> None:
    places.know(name)
    found = list(states(places, name))
    wrong = read_all(places, name, found)
    chosen = share(random.Random(name).sample(found, min(REPEATED, len(found))))
    for state in chosen:
        shutil.rmtree(places.place)
        write_tree(state.tree, places.place)
        faults = list(places.repeat(name))
        if faults:
            wrong.append(f"{name} again after power was lost after call {state.number}: " + "; ".join(faults))
            print(wrong[-1], flush=True)
    print(f"{name}: {len(found)} states, {len(chosen)} times again", flush=True)
    assert not wrong, f"{len(wrong)} of {len(found)} and {len(chosen)}:\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("way", WAYS)
def test_broken_publishing_is_noticed(way: str, places: Places) -> None:
    name = {"write_in_place": "rebind", "remove_before_replacing": "rebind"}.get(way, "collect")
    assert read_all(places, name, list(states(places, name, way)))
