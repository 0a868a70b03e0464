"""Which artifacts can be used: their own files, and those of the inputs that using them reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wmcli.artifacts.manifest import KINDS, Artifact
from wmcli.artifacts.store import Run
from wmcli.errors import ArtifactError

State = tuple[str, str]
"""One of "ok", "pruned" (only the manifest was kept), "damaged" (files differ from the manifest), "damaged pictures"
(only those: it can be used), "unusable" (whole, but what it needs is not); and what is wrong, in one line."""


def needs(artifact: Artifact) -> list[str]:
    """Name the inputs whose files are read when an artifact is used: a controller acts in its dynamics, dynamics over
    tokens see by their tokenizer, experience goes on from the experience before."""
    if artifact.kind == "dynamics" and artifact.settings.get("dynamics", {}).get("kind", "token") != "token":
        return []  # such dynamics hold their encoder; a tokenizer among the inputs is what it was started from
    wanted = {"controller": "dynamics", "dynamics": "tokenizer", "experience": "previous"}.get(artifact.kind)
    return [role for role in artifact.inputs if role == wanted]


def needed(artifacts: Iterable[Artifact]) -> Iterator[Artifact]:
    """Yield some artifacts and all that using them reads, as far as it is there."""
    pending, seen = list(artifacts), set()
    while pending:
        artifact = pending.pop()
        if artifact.digest in seen:
            continue
        seen.add(artifact.digest)
        yield artifact
        for role in needs(artifact):
            try:
                pending.append(artifact.input(role))
            except ArtifactError:
                continue  # `examine` reports it


def needed_elsewhere(run: Run) -> Iterator[Artifact]:
    """Yield the artifacts of a run that other runs need: they noted it (`Run.note_use`), and still hold what they made
    of it, or are at it."""
    ours = {artifact.digest: artifact for kind in KINDS for artifact in run.artifacts(kind)}
    for digest, user in run.uses():
        theirs = [artifact for kind in KINDS for artifact in user.artifacts(kind)]
        if digest in ours and (user.unfinished() or any(each.digest == digest for each in needed(theirs))):
            yield ours[digest]


def check(run: Run) -> list[tuple[str, str, str]]:
    """Read all files of a run again and return `(name, state, what is wrong)` of every version (see `State`)."""
    known: dict[str, State] = {}
    rows = []
    for kind in KINDS:
        for version in run.versions(kind):
            try:
                state = examine(run.get(kind, version), known)
            except ArtifactError as error:
                state = ("damaged", str(error))
            rows.append((f"{kind}@{version}", *state))
    return rows


def examine(artifact: Artifact, known: dict[str, State] | None = None) -> State:
    """Read an artifact's files again, and those of what it needs.

    Args:
        artifact: What to examine.
        known: States by digest, to be used and added to, so that shared inputs are read once.

    Returns:
        Its state. An input that is gone but not needed is named beside "ok", since lineage ends there.
    """
    known = {} if known is None else known
    line = [artifact]  # what is to be examined before what stands left of it
    while line:
        current = line[-1]
        inputs = _needed_inputs(current)
        unknown = [each for each in inputs if isinstance(each, Artifact) and each.digest not in known]
        if current.digest in known or not unknown:
            known.setdefault(current.digest, _state(current, inputs, known))
            line.pop()
        else:
            line += unknown
    return known[artifact.digest]


def _needed_inputs(artifact: Artifact) -> list[Artifact | str]:
    """What an artifact needs; why it cannot be opened, where it cannot."""
    found: list[Artifact | str] = []
    for role in needs(artifact):
        try:
            found.append(artifact.input(role))
        except ArtifactError as error:
            found.append(str(error))
    return found


def _state(artifact: Artifact, inputs: list[Artifact | str], known: dict[str, State]) -> State:
    if artifact.pruned:
        return "pruned", "only its manifest was kept"
    try:
        artifact.verify_again()
    except ArtifactError as error:
        return "damaged", str(error)
    for each in inputs:
        if isinstance(each, str):
            return "unusable", each
        state, detail = known[each.digest]
        if state not in ("ok", "damaged pictures"):
            return "unusable", f"it needs {each}, which is {state}: {detail}"
    if picture := artifact.damaged_picture():
        return "damaged pictures", f"{picture} It can be used all the same."
    return "ok", "; ".join(_gone(artifact))


def _gone(artifact: Artifact) -> Iterator[str]:
    """What an artifact was made from and does not need, where it is not there any more."""
    for role, reference in artifact.inputs.items():
        try:
            artifact.input(role)
        except ArtifactError:
            yield f"the {reference.name} that it was made from is gone"
