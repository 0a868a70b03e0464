"""`wm convert-lpips`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wmcli.cli.output import line


def convert_lpips(
    vgg16: Annotated[
        Path,
        typer.Argument(metavar="VGG16", help="torchvision's file: download.pytorch.org/models/vgg16-397923af.pth"),
    ],
    weightings: Annotated[
        Path,
        typer.Argument(
            metavar="LPIPS",
            help="Its channel weightings: lpips/weights/v0.1/vgg.pth of github.com/richzhang/PerceptualSimilarity",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
) -> None:
    """Convert published VGG16 and LPIPS weights for the perceptual loss.

    Set tokenizer.lpips_weights to the written file.

    Examples:
        wm convert-lpips vgg16-397923af.pth vgg.pth lpips.safetensors
    """
    from wmcli.progress import Progress
    from wmcli.stages.lpips_weights import convert_lpips as stage

    line(str(stage(vgg16, weightings, out, Progress())))
