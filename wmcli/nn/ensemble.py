"""An ensemble of heads that predict the same discrete latents, and their disagreement.

Where data is plenty the heads agree, right or wrong; what was seldom seen they predict differently, since each was
initialized differently. So their disagreement measures how new a situation is.

Axes: E heads, D features, V variables of a latent, C classes of a variable.

Source: Sekar et al. (2020, ICML, arXiv 2005.05960), with the divergence of distributions in place of a variance;
Simulus (Cohen et al. 2025, arXiv 2502.11537).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wmcli.nn.categorical import IMPOSSIBLE


class Ensemble(nn.Module):
    """Independent networks of one hidden layer, (..., D) -> (E, ..., V, C). No gradient flows to their input.

    Args:
        heads: Number of networks E, at least 2.
        width: Features D of the input, and of the hidden layers.
        variables: V.
        classes: C.
    """

    def __init__(self, heads: int, width: int, variables: int, classes: int) -> None:
        super().__init__()
        self.shape = (variables, classes)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, variables * classes))
            for _ in range(heads)
        )

    def forward(self, x: Tensor, possible: Tensor | None = None) -> Tensor:
        """Return log-probabilities (E, ..., V, C) float32.

        Args:
            x: Features (..., D).
            possible: (..., V, C) bool, classes that can occur, one at least of each variable; None for all.
        """
        x = x.detach()
        logits = torch.stack([head(x) for head in self.heads]).float().unflatten(-1, self.shape)
        if possible is not None:
            logits = logits.masked_fill(~possible, IMPOSSIBLE)
        return logits.log_softmax(-1)

    def loss(self, x: Tensor, target: Tensor, possible: Tensor | None = None) -> Tensor:
        """Return the mean cross entropy of the heads, summed over variables, (...) nats.

        Args:
            x: (..., D).
            target: Probabilities (..., V, C), or classes (..., V) int64.
            possible: As in `forward`.
        """
        log_p = self(x, possible)
        if target.dtype == torch.int64:
            index = target[None, ..., None].expand(len(log_p), *target.shape, 1)
            return -log_p.gather(-1, index).squeeze(-1).sum(-1).mean(0)
        return -(target.detach() * log_p).sum((-2, -1)).mean(0)

    @torch.no_grad()
    def disagreement(self, x: Tensor, possible: Tensor | None = None) -> Tensor:
        """Return the Jensen-Shannon divergence of the heads, (...) float32: the mean over variables, in nats.

        From 0, where all agree, to the logarithm of the number of heads. Arguments as in `forward`.
        """
        log_p = self(x, possible)
        mean = log_p.logsumexp(0) - math.log(len(log_p))
        of_mean, of_each = -(mean.exp() * mean).sum(-1), -(log_p.exp() * log_p).sum(-1).mean(0)
        return (of_mean - of_each).mean(-1)
