"""`wm train-tokenizer`: fit a tokenizer to the frames of the experience."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.artifacts.environment import check_same_environment
from wmcli.assemble import build_tokenizer
from wmcli.errors import UsageError
from wmcli.report.images import grid, write_png
from wmcli.report.observations import draw_observations
from wmcli.spaces import images_of, map_parts
from wmcli.stages.context import Context
from wmcli.stages.train import newest_fitted_alone, parent_of, train
from wmcli.tokenizers.base import NoTokenizerSettings
from wmcli.trainers import TokenizerTrainer
from wmcli.transfer import take_rows

PICTURED_FRAMES = 8


def train_tokenizer(context: Context, *, experience: str | None = None, parent: str | None = None) -> Artifact:
    """Train the run's tokenizer for `tokenizer.updates` updates and publish it.

    Args:
        context: The run.
        experience: Reference; None is the newest.
        parent: Reference to the version to train further; None trains anew, with `--more` the newest.

    Raises:
        ArtifactError: There is no experience, or it is of another environment.
        UsageError: The dynamics use no tokenizer, or train the version to train further themselves.
        DivergedError: A loss or weight is not finite.
        Stopped: A signal arrived; the same command resumes.
    """
    dynamics = context.settings.dynamics
    if not (dynamics.takes_tokenizer or dynamics.trains_tokenizer):
        raise UsageError(
            f"dynamics.kind = '{dynamics.kind}' encodes frames itself and has no tokenizer;"
            " go on with: wm train-dynamics"
        )
    settings = context.settings.tokenizer
    assert not isinstance(settings, NoTokenizerSettings)
    frames = context.run.resolve(experience or "experience", "experience")
    check_same_environment(context.environment, frames)
    inputs = {"experience": frames} | _parent(context, parent)
    if settings.lacks_lpips and images_of(context.spaces.observation):
        context.progress.warn(
            "training without the perceptual loss, since tokenizer.lpips_weights names no file: published scores used"
            " LPIPS, so ours are not comparable with them. Make the file with: wm convert-lpips"
        )

    def build(rng: np.random.Generator) -> TokenizerTrainer:
        replay, machine = context.experience(frames), context.machine
        tokenizer = build_tokenizer(context.settings, context.spaces).to(machine.device)
        return TokenizerTrainer(tokenizer, replay, settings, context.settings.training, machine=machine, rng=rng)

    return train(
        context,
        "train-tokenizer",
        "tokenizer",
        sections=("environment", "tokenizer"),
        inputs=inputs,
        references={"experience": experience},
        updates=settings.updates,
        build=build,
        draw=_draw_reconstructions,
    )


def _draw_reconstructions(payload: Path, trainer: TokenizerTrainer) -> None:
    """Write `reconstructions.png`: frames of the experience above their reconstructions."""
    frames, machine = trainer.replay.observation, trainer.machine
    space = trainer.tokenizer.observation_space
    # Drawn, not spread evenly: that falls into step with the lengths of episodes.
    chosen = np.random.default_rng(0).choice(
        len(trainer.replay), min(PICTURED_FRAMES, len(trainer.replay)), replace=False
    )
    real = take_rows(frames, np.sort(chosen), machine.device)
    with machine.autocast():
        decoded = trainer.tokenizer.decode(trainer.tokenizer.encode(real))
    pictures = [draw_observations(space, map_parts(lambda part: part.cpu().numpy(), each)) for each in (real, decoded)]
    write_png(payload / "reconstructions.png", grid(*pictures))


def _parent(context: Context, reference: str | None) -> dict[str, Artifact]:
    """Return the version to train further, one that no dynamics model trains itself."""
    if reference is None and context.more and (fitted := newest_fitted_alone(context)) is not None:
        reference = str(fitted.path)
    inputs = parent_of(context, "tokenizer", reference)
    if "parent" in inputs and "dynamics" in inputs["parent"].inputs:
        raise UsageError(
            f"{inputs['parent'].name} came out of {inputs['parent'].inputs['dynamics'].name}, which trains it further:"
            " wm train-dynamics --more"
        )
    return inputs
