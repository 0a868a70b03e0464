"""Three quantizers of feature vectors with the same interface.

A quantizer has `inputs` (C), `vectors()` (N, D), `tokens(h)` (M, C) -> (M,), and forward(h) -> Quantized. All
arithmetic is float32, also under autocast: in bf16 the distances to two codes are often equal. In the forward pass
`Quantized.vectors` is exactly the code's row. In the backward pass its gradient passes straight through to `h`.

Axes: M vectors, C channels of a vector before quantization, N codes, D width of a code's vector.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wmcli import ranks
from wmcli.kernels.nearest import nearest
from wmcli.nn.categorical import one_hot


class Quantized(NamedTuple):
    """Quantized features (M, C)."""

    vectors: Tensor  # (M, D)
    tokens: Tensor  # (M,) int64
    losses: dict[str, Tensor]  # scalar summands of the training loss, already weighted


def straight_through(value: Tensor, gradient_to: Tensor) -> Tensor:
    """Return `value` exactly, with its gradient passed unchanged to `gradient_to` of the same shape."""
    return value.detach() + (gradient_to - gradient_to.detach())


class VectorQuantizer(nn.Module):
    """A codebook trained by gradient, as in REM and IRIS.

    It has no moving average, no restarts and no normalization. The codebook is initialized from U(-1/N, 1/N).

    Losses: `codebook` = mean |sg(h) - e|^2, `commitment` = commitment * mean |h - sg(e)|^2 (means over elements).

    Source: van den Oord et al. 2017, arXiv 1711.00937.
    """

    def __init__(self, codes: int, width: int, commitment: float) -> None:
        super().__init__()
        self.inputs = width
        self.commitment = commitment
        self.codebook = nn.Parameter(torch.empty(codes, width).uniform_(-1 / codes, 1 / codes))

    def vectors(self) -> Tensor:
        return self.codebook

    def tokens(self, h: Tensor) -> Tensor:
        return nearest(h, self.codebook)

    def forward(self, h: Tensor) -> Quantized:
        h = h.float()
        tokens = self.tokens(h)
        vectors = self.codebook[tokens]
        losses = {
            "codebook": F.mse_loss(vectors, h.detach()),
            "commitment": self.commitment * F.mse_loss(h, vectors.detach()),
        }
        return Quantized(straight_through(vectors, h), tokens, losses)


class AverageVectorQuantizer(nn.Module):
    """A codebook of moving averages whose dead codes restart at vectors with a large quantization error.

    A code is dead when its average number of uses in a batch is below `restart_below` times M / N. All codes start
    dead, so that the first batch places the whole codebook. `forward` updates the codebook in training mode. Codebook
    and averages are buffers, and randomness comes from torch's global generator: a checkpoint of both resumes exactly.

    There are two changes to the source. A restart draws vectors in proportion to their squared distance from their
    code, as in k-means++: most vectors of a game frame are the same background. A restarted code counts as used M / N
    times, so that its average has time to grow before the next test.

    Loss: `commitment` = commitment * mean |h - sg(e)|^2.

    Sources: averages: van den Oord et al. 2017, arXiv 1711.00937, appendix A.1; restarts: Dhariwal et al. 2020, arXiv
    2005.00341, section 3.2.
    """

    codebook: Tensor
    uses: Tensor
    sums: Tensor

    def __init__(self, codes: int, width: int, commitment: float, decay: float, restart_below: float) -> None:
        super().__init__()
        self.inputs = width
        self.commitment = commitment
        self.decay = decay
        self.restart_below = restart_below
        self.register_buffer("codebook", torch.empty(codes, width).uniform_(-1 / codes, 1 / codes))
        self.register_buffer("uses", torch.zeros(codes))  # average number of uses in a batch
        self.register_buffer("sums", torch.zeros(codes, width))  # average sum of the vectors that used the code

    def vectors(self) -> Tensor:
        return self.codebook

    def tokens(self, h: Tensor) -> Tensor:
        return nearest(h, self.codebook)

    def forward(self, h: Tensor) -> Quantized:
        h = h.float()
        tokens = self.tokens(h)
        vectors = self.codebook[tokens]
        losses = {"commitment": self.commitment * F.mse_loss(h, vectors)}
        if self.training:
            self.update(h.detach(), tokens, vectors)
        return Quantized(straight_through(vectors, h), tokens, losses)

    @torch.no_grad()
    def update(self, h: Tensor, tokens: Tensor, vectors: Tensor) -> None:
        """Update the averages and the codebook by a batch.

        Args:
            h: Features, (M, D).
            tokens: Their codes, (M,).
            vectors: The codes' vectors, (M, D).
        """
        codes = len(self.codebook)
        average_use = ranks.all_rows(len(h)) / codes
        with torch.autocast(h.device.type, enabled=False):
            member = one_hot(tokens, codes, torch.float32)  # (M, N); a product, because scattered additions are not
            # Deterministic on CUDA.
            uses = self.decay * self.uses + (1 - self.decay) * ranks.total(member.sum(0))
            sums = self.decay * self.sums + (1 - self.decay) * ranks.total(member.T @ h)
            error = ranks.gather_rows((h - vectors).square().sum(1) + 1e-12)  # multinomial rejects all zeros
        # (N, D). Drawn also without dead codes, so that nothing waits for the device.
        places = ranks.take_rows(h, torch.multinomial(error, codes, replacement=True))
        dead = (uses < self.restart_below * average_use)[:, None]
        self.codebook.copy_(torch.where(dead, places, sums / uses.clamp_min(1e-6)[:, None]))
        self.sums.copy_(torch.where(dead, places * average_use, sums))
        self.uses.copy_(torch.where(dead[:, 0], average_use, uses))


class ScalarQuantizer(nn.Module):
    """Finite scalar quantization: a code is one combination of levels of a few channels.

    Each channel, bounded by tanh, is rounded to the nearest of L evenly spaced levels in [-1, 1]. The boundaries
    between levels are the paper's. Its shift of even L and its scale of codes are affine maps that the layers before
    and after can learn. `project` maps codes to the width of an embedding.
    Token = sum_i level_i * (L_1 * ... * L_(i-1)), the first channel varying fastest.

    Loss, when `spread` > 0: `spread` = spread * mean over channels of (mean_M h)^2 + (1 - std_M h)^2. It is not in the
    paper. With nearly all patches the same background, all features would drift into the flat part of tanh before the
    decoder learns the few that differ. The loss spreads them over all levels.

    Source: Mentzer et al. 2023, arXiv 2309.15505.
    """

    in_float32 = True
    steps: Tensor
    strides: Tensor

    def __init__(self, levels: tuple[int, ...], width: int, spread: float = 0.0) -> None:
        super().__init__()
        self.inputs = len(levels)
        self.spread = spread
        self.codes = math.prod(levels)
        self.project = nn.Linear(len(levels), width)
        strides = [math.prod(levels[:channel]) for channel in range(len(levels))]
        self.register_buffer("steps", torch.tensor([level - 1.0 for level in levels]), persistent=False)
        self.register_buffer("strides", torch.tensor(strides), persistent=False)

    def round(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the level 0 .. L - 1 of each channel of h (M, C), before and after rounding."""
        place = (torch.tanh(h.float()) + 1) / 2 * self.steps
        return place, place.round()

    def combinations(self) -> Tensor:
        """Return the codes (N, C), in [-1, 1], in the order of their tokens."""
        token = torch.arange(self.codes, device=self.strides.device)[:, None]
        level = token // self.strides % (self.steps.long() + 1)
        return level / self.steps * 2 - 1

    def vectors(self) -> Tensor:
        with torch.autocast(self.strides.device.type, enabled=False):
            return self.project(self.combinations())

    def tokens(self, h: Tensor) -> Tensor:
        return (self.round(h)[1].long() * self.strides).sum(1)

    def forward(self, h: Tensor) -> Quantized:
        place, rounded = self.round(h)
        code = straight_through(rounded, place) / self.steps * 2 - 1
        with torch.autocast(h.device.type, enabled=False):
            vectors = self.project(code)
        losses = {}
        if self.spread > 0:
            mean, deviation = _moments(h.float())
            off = mean.square() + (1 - deviation).square()
            losses["spread"] = self.spread * off.mean()
        return Quantized(vectors, (rounded.long() * self.strides).sum(1), losses)


def _moments(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (C,) of vectors (M, C) of all ranks."""
    if not ranks.is_sharing():
        return h.mean(0), h.std(0, correction=0)
    mean = ranks.mean(h.mean(0))
    return mean, ranks.mean((h - mean).square().mean(0)).sqrt()


Quantizer = VectorQuantizer | AverageVectorQuantizer | ScalarQuantizer
