"""`wm compare --attention`: the priors of trained dynamics as matrices, and the attention that they pay to episodes.

Windows are of test episodes that were held out, or else of the experience that the model learned from.

Axes: B windows, T frames, E elements, D width of the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wmcli.artifacts import Artifact
from wmcli.assemble import load_world_model, settings_of
from wmcli.backbones.attention_weights import AttentionBackbone, attention_weights, query_weights
from wmcli.backbones.transformer import TransformerSettings
from wmcli.backbones.transformer_xl import TransformerXLSettings
from wmcli.errors import UsageError
from wmcli.experience import Replay
from wmcli.experience.load import find_held_out
from wmcli.progress import Progress
from wmcli.report.attention import AttentionMatrices, attention_figure
from wmcli.report.plots import write_figure
from wmcli.settings import Settings
from wmcli.stages.context import Context
from wmcli.stages.opening import open_context
from wmcli.stages.pictures import check_same_priors
from wmcli.stages.scores import Score
from wmcli.training.device import derived_seed, isolated_randomness
from wmcli.transfer import take_rows
from wmcli.world_models.base import WorldModel
from wmcli.world_models.latent import LatentWorldModelSettings

WINDOWS = 64
NUMBERS = 1 << 24  # weights of a layer at a time


Attending = TransformerSettings | TransformerXLSettings
"""Settings of backbones that attend."""


class Opened(NamedTuple):
    """A run to draw."""

    context: Context
    dynamics: Artifact
    settings: Settings
    """Those that the dynamics were trained with."""
    backbone: Attending


class Paid(NamedTuple):
    """Attention in one world model."""

    prior: Tensor
    """(layers, heads, E, E): what is applied to scores, as `AttentionBackbone.prior_matrix` returns it."""
    weights: Tensor
    """(layers, heads, E, E) float64: means over windows."""
    elements: int
    """Of the backbone in a time step."""


def draw_attention(groups: Mapping[str, Sequence[Score]], out: Path, progress: Progress) -> None:
    """Draw the priors and the attention of the newest dynamics of each run, or means over the runs of a group.

    Args:
        groups: Scores, one per run, by the name of their row.
        out: A .png, .svg or .pdf.
        progress: Of the command.

    Raises:
        ArtifactError: Dynamics or their experience are missing.
        UsageError: A backbone does not attend, or runs of a group differ in its size or its prior.
    """
    opened = {label: [_open(score.run) for score in members] for label, members in groups.items()}
    check_same_priors({label: [each.settings for each in members] for label, members in opened.items()})
    for label, members in opened.items():
        sizes = {(each.backbone.layers, each.backbone.heads) for each in members}
        if len(sizes) > 1:
            raise UsageError(f"--attention: the runs of {label} differ in layers or heads: group them with --by, too.")
    rows = []
    with progress.bar("attention", sum(map(len, opened.values())), "runs") as bar:
        for label, members in opened.items():
            paid = []
            for each in members:
                paid.append(measure(each.context, each.dynamics))
                bar.advance()
            rows.append(_row(label, members[0].backbone, paid))
    write_figure(out, attention_figure(rows))


def _open(folder: Path) -> Opened:
    """Open a run and find its newest dynamics.

    Raises:
        UsageError: Their backbone does not attend.
    """
    # In bfloat16 a weight has three digits, and those of a row do not sum to 1.
    context = open_context(folder, None, ["training.precision=float32"], create=False, quiet=True)
    model = context.run.resolve("dynamics", "dynamics")
    trained = settings_of(model)
    backbone, dynamics = trained.backbone, trained.dynamics
    if not dynamics.uses_backbone:
        raise UsageError(f"{folder}: --attention is of transformers, and dynamics.kind = {dynamics.kind} has none.")
    if not isinstance(backbone, Attending):
        raise UsageError(f"{folder}: --attention is of transformers, and backbone.kind = {backbone.kind}.")
    if isinstance(dynamics, LatentWorldModelSettings) and dynamics.opening == "learned":
        raise UsageError(f"{folder}: --attention does not draw the element that dynamics.opening = learned adds.")
    return Opened(context, model, trained, backbone)


def measure(context: Context, model: Artifact) -> Paid:
    """Read windows of stored episodes with a dynamics model, and return its prior and its mean attention."""
    world_model = load_world_model(model, context.machine)
    source = model.input("experience")
    held_out = find_held_out(source, "test")
    replay = context.experience(source) if held_out is None else context.held_out(held_out, "test")
    rows = windows(replay, world_model.settings.sequence_length)
    with isolated_randomness(derived_seed(context.settings.seed, "attention"), context.machine.device):
        weights = mean_attention(world_model, replay, rows)
    backbone = world_model.backbone
    assert isinstance(backbone, AttentionBackbone)
    with torch.no_grad():
        return Paid(backbone.prior_matrix(weights.shape[-1]).cpu(), weights.cpu(), world_model.elements)


def windows(replay: Replay, longest: int) -> np.ndarray:
    """Choose up to `WINDOWS` windows, evenly over the episodes.

    They are as long as the sequences of training, or as the median episode if that is shorter.

    Returns:
        Rows of the replay, int64 (B, T).
    """
    starts, lengths = replay.episodes
    length = min(longest, int(np.median(lengths)))
    fitting = np.flatnonzero(lengths >= length)
    room = lengths[fitting] - length + 1  # windows that an episode has
    chosen = np.unique(np.linspace(0, room.sum() - 1, min(WINDOWS, room.sum())).round().astype(int))
    ends = room.cumsum()
    episode = np.searchsorted(ends, chosen, side="right")
    begins = starts[fitting][episode] + chosen - (ends - room)[episode]
    return replay.order[begins[:, None] + np.arange(length)]


@torch.no_grad()
def mean_attention(world_model: WorldModel, replay: Replay, rows: np.ndarray) -> Tensor:
    """Return attention weights, means over the windows `rows` (B, T): (layers, heads, E, E) float64."""
    backbone = world_model.backbone
    assert isinstance(backbone, AttentionBackbone)
    elements = rows.shape[1] * world_model.elements
    together = max(1, NUMBERS // (backbone.heads * elements**2))
    total: Tensor | None = None
    for begin in range(0, len(rows), together):
        part = rows[begin : begin + together]
        frames, action = (take_rows(column, part, replay.device) for column in (replay.observation, replay.action))
        latent = world_model.encode(frames)
        read, queries = world_model.elements_of(latent, action)
        if queries is None:
            weights = attention_weights(backbone, read)
        else:
            weights = query_weights(backbone, read.unflatten(1, (rows.shape[1], -1)), queries)
        summed = weights.double().sum(1)
        total = summed if total is None else total + summed
    assert total is not None
    return total / len(rows)


def element_names(frames: int, elements: int) -> list[str]:
    """Return the names of the elements of so many frames: o of an observation, a of the action taken in it.

    Of several elements of an observation the first has a name. An element of both is named oa.
    """
    if elements == 1:
        return [f"oa{frame}" for frame in range(frames)]
    inner = [""] * (elements - 2)
    return [name for frame in range(frames) for name in (f"o{frame}", *inner, f"a{frame}")]


def _row(label: str, backbone: Attending, paid: Sequence[Paid]) -> AttentionMatrices:
    """Average over runs, with the prior as factors.

    Raises:
        UsageError: The runs have windows of different length.
    """
    sizes = sorted({each.weights.shape[-1] for each in paid})
    if len(sizes) > 1:
        raise UsageError(
            f"--attention: episodes of the runs of {label} are shorter than dynamics.sequence_length, so that their"
            f" windows have {sizes[0]} to {sizes[-1]} elements: omit --by."
        )
    prior = backbone.prior
    masked = paid[0].prior.isnan()
    applied = torch.stack([each.prior.double() for each in paid])
    factor = (applied if prior.multiplies else applied.exp()).mean(0)
    weights = torch.stack([each.weights for each in paid]).mean(0).masked_fill(masked, float("nan"))
    about = "no prior: the mask"
    if prior.kind != "none":
        about = f"{prior.kind} prior, times the " + ("score" if prior.multiplies else "weight")
    names = element_names(sizes[0] // paid[0].elements, paid[0].elements)
    return AttentionMatrices(label, factor.numpy(), about, weights.numpy(), names)
