"""Lineage: the inputs of an artifact, back to the first experience."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wmcli.artifacts.manifest import Artifact
from wmcli.errors import ArtifactError, MachineError


@dataclass(frozen=True)
class Tree:
    """An artifact and its inputs. A tree can be hundreds of levels deep: iterate over `rows`."""

    name: str
    digest: str
    path: Path
    """Present or last known path."""
    problem: str = ""
    """Reason why it cannot be read. Its inputs are unknown then."""
    pruned: bool = False
    repeated: bool = False
    """Whether it occurs elsewhere in the tree, no deeper than here, with its inputs."""
    inputs: dict[str, Tree] = field(default_factory=dict)
    """By role."""

    def rows(self) -> Iterator[tuple[int, str, Tree]]:
        """Yield `(depth, role, tree)` from the top down, each before its inputs. The role of the root is empty."""
        pending = [(0, "", self)]
        while pending:
            depth, role, tree = pending.pop()
            yield depth, role, tree
            pending += [(depth + 1, name, each) for name, each in reversed(tree.inputs.items())]


def lineage(artifact: Artifact) -> Tree:
    """Return the tree of inputs. Missing and changed ones are in it with their problem.

    Each artifact's inputs are followed once, at the occurrence nearest to the root. Otherwise the tree of a run of
    hundreds of epochs would have millions of entries.
    """
    root = _tree(artifact)
    visited = {artifact.digest}
    pending = deque([(artifact, root)])
    while pending:
        child, tree = pending.popleft()
        for role, reference in child.inputs.items():
            try:
                parent = child.input(role)
            except (ArtifactError, MachineError) as error:
                place = child.run / reference.path
                tree.inputs[role] = Tree(reference.name, reference.digest, place, str(error))
                continue
            tree.inputs[role] = _tree(parent, repeated=parent.digest in visited)
            if parent.digest not in visited:
                visited.add(parent.digest)
                pending.append((parent, tree.inputs[role]))
    return root


def _tree(artifact: Artifact, *, repeated: bool = False) -> Tree:
    return Tree(artifact.name, artifact.digest, artifact.path, pruned=artifact.pruned, repeated=repeated)
