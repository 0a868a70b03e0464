"""The state of artifacts: their own files, and those of the inputs that they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wmcli.artifacts.manifest import KINDS, Artifact
from wmcli.artifacts.store import Run
from wmcli.errors import ArtifactError, MachineError

State = tuple[str, str]
"""State and its reason in one line.

States are "ok", "pruned" (only manifest and pictures remain), "damaged" (files differ from the manifest), "damaged
pictures" (still usable), "unusable" (an input that it needs is not usable) and "unreadable" (the disk, the permissions
or the like are at fault, and nothing is known about its files)."""


def needs(artifact: Artifact) -> list[str]:
    """Return the roles of the inputs whose files are read when an artifact is used.

    A controller needs its dynamics, token dynamics their tokenizer, and experience the experience that it extends.
    """
    if artifact.kind == "dynamics" and artifact.settings.get("dynamics", {}).get("kind", "token") != "token":
        return []  # such dynamics contain their encoder; a tokenizer among the inputs gave its initial weights
    needed_role = {"controller": "dynamics", "dynamics": "tokenizer", "experience": "previous"}.get(artifact.kind)
    return [role for role in artifact.inputs if role == needed_role]


def needed(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """Yield artifacts and the existing inputs that they need, recursively.

    Raises:
        MachineError: One cannot be read. So it is unknown what it needs.
    """
    pending, visited = list(artifacts), set()
    while pending:
        artifact = pending.pop()
        if artifact.digest in visited:
            continue
        visited.add(artifact.digest)
        yield artifact
        for role in needs(artifact):
            try:
                pending.append(artifact.input(role))
            except ArtifactError:
                continue  # `examine` reports it


def needed_elsewhere(run: Run) -> Iterator[Artifact]:
    """Yield the artifacts of a run that other runs need.

    These have recorded their use (`Run.note_use`), and have unfinished work or artifacts made from them, or are not
    there: on a disk that is not mounted, or moved.
    """
    uses = run.uses()
    ours = {artifact.digest: artifact for kind in KINDS if uses for artifact in run.artifacts(kind)}
    for digest, user in uses:
        theirs = [artifact for kind in KINDS for artifact in user.artifacts(kind)]
        unknown = not user.path.is_dir() or user.unfinished()
        if digest in ours and (unknown or any(each.digest == digest for each in needed(theirs))):
            yield ours[digest]


def check(run: Run) -> list[tuple[str, str, str]]:
    """Read all files of a run again. Return `(name, state, reason)` of every version (see `State`)."""
    states: dict[str, State] = {}
    rows = []
    for kind in KINDS:
        for version in run.versions(kind):
            try:
                state = examine(run.get(kind, version), states)
            except ArtifactError as error:
                state = ("damaged", str(error))
            except MachineError as error:
                state = ("unreadable", str(error))
            rows.append((f"{kind}@{version}", *state))
    return rows


def examine(artifact: Artifact, states: dict[str, State] | None = None) -> State:
    """Read the files of an artifact and of the inputs that it needs again.

    Args:
        artifact: Artifact to examine.
        states: States by digest. New ones are added, so that shared inputs are read once.

    Returns:
        Its state. The reason of "ok" names missing inputs that it does not need, because lineage ends there.
    """
    states = {} if states is None else states
    stack = [artifact]
    while stack:
        current = stack[-1]
        inputs = _needed_inputs(current)
        unknown = [each for each in inputs if isinstance(each, Artifact) and each.digest not in states]
        if current.digest in states or not unknown:
            states.setdefault(current.digest, _state(current, inputs, states))
            stack.pop()
        else:
            stack += unknown
    return states[artifact.digest]


def _needed_inputs(artifact: Artifact) -> list[Artifact | str]:
    """Return the inputs that an artifact needs, or the reason why one cannot be opened."""
    inputs: list[Artifact | str] = []
    for role in needs(artifact):
        try:
            inputs.append(artifact.input(role))
        except (ArtifactError, MachineError) as error:
            inputs.append(str(error))
    return inputs


def _state(artifact: Artifact, inputs: list[Artifact | str], states: dict[str, State]) -> State:
    try:
        if artifact.pruned:
            return "pruned", "only manifest and pictures remain"
        artifact.verify_again()
        picture = artifact.damaged_picture()
    except ArtifactError as error:
        return "damaged", str(error)
    except MachineError as error:
        return "unreadable", str(error)
    for each in inputs:
        if isinstance(each, str):
            return "unusable", each
        state, detail = states[each.digest]
        if state not in ("ok", "damaged pictures"):
            return "unusable", f"it needs {each}, which is {state}: {detail}"
    if picture:
        return "damaged pictures", f"{picture} It can be used all the same."
    return "ok", "; ".join(_gone(artifact))


def _gone(artifact: Artifact) -> Iterator[str]:
    """Yield a message for each missing input."""
    for role, reference in artifact.inputs.items():
        try:
            artifact.input(role)
        except ArtifactError:
            yield f"its input {reference.name} is missing"
        except MachineError as error:
            yield str(error)
