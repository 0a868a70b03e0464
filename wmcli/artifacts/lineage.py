"""What an artifact was made from, back to the first experience."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wmcli.artifacts.manifest import Artifact
from wmcli.errors import ArtifactError


@dataclass(frozen=True)
class Tree:
    """An artifact and what it was made from. It can be hundreds of levels deep: go through it with `rows`."""

    name: str
    digest: str
    path: Path
    """Where it is, or was."""
    problem: str = ""
    """Why it cannot be read; then its inputs are unknown."""
    pruned: bool = False
    repeated: bool = False
    """It stands in the tree elsewhere, no deeper than here; its inputs are shown only there."""
    inputs: dict[str, Tree] = field(default_factory=dict)
    """By role."""

    def rows(self) -> Iterator[tuple[int, str, Tree]]:
        """`(depth, role, tree)` from the top down, each followed by its inputs; the role of the first is empty."""
        pending = [(0, "", self)]
        while pending:
            depth, role, tree = pending.pop()
            yield depth, role, tree
            pending += [(depth + 1, name, each) for name, each in reversed(tree.inputs.items())]


def lineage(artifact: Artifact) -> Tree:
    """The tree of inputs; what is missing or was changed is in it with its problem.

    Each artifact's inputs are followed once, from the place nearest to the top: without that the tree of a run of
    hundreds of epochs, where each version was made from many, would have millions of entries.
    """
    root = _tree(artifact)
    seen = {artifact.digest}
    pending = deque([(artifact, root)])
    while pending:
        child, tree = pending.popleft()
        for role, reference in child.inputs.items():
            try:
                parent = child.input(role)
            except ArtifactError as error:
                place = child.run / reference.path
                tree.inputs[role] = Tree(reference.name, reference.digest, place, str(error))
                continue
            tree.inputs[role] = _tree(parent, repeated=parent.digest in seen)
            if parent.digest not in seen:
                seen.add(parent.digest)
                pending.append((parent, tree.inputs[role]))
    return root


def _tree(artifact: Artifact, *, repeated: bool = False) -> Tree:
    return Tree(artifact.name, artifact.digest, artifact.path, pruned=artifact.pruned, repeated=repeated)
