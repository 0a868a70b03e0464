"""Nearest code of a codebook, the search of vector quantization.

`reference` is the definition. The other forms minimize |e|^2 - 2 h e over the codes e. |h|^2 is equal for all codes and
omitted, because its rounding would hide small differences between codes. Neither form stores all (M, N) distances. The
PyTorch form compares a few vectors at a time with all codes, while their distances are in the cache. A Triton program
stores only its best code so far.

All arithmetic is float32, also under autocast: in bfloat16 the distances to two codes are often equal.

Axes: M vectors, N codes, C channels.

Source: VQ-VAE (van den Oord et al. 2017, arXiv 1711.00937).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wmcli.kernels.dispatch import jit, on_triton, tl

CACHED = 2**17  # distances at a time on a CPU: half a megabyte, for a core's cache
ROWS, COLUMNS, CHANNELS = 64, 64, 32  # of a Triton program's tile of distances
PROGRAMS = 128  # enough to occupy a GPU


def reference(h: Tensor, codebook: Tensor) -> Tensor:
    """Compute `nearest` by its definition."""
    return (h.float()[:, None] - codebook.float()).square().sum(2).argmin(1)


@torch.no_grad()
def nearest(h: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the code at the smallest Euclidean distance, the first among equals.

    Args:
        h: Vectors (M, C).
        codebook: Codes (N, C).

    Returns:
        (M,) int64.
    """
    if on_triton(h, codebook):
        return _nearest_triton(h, codebook)
    with torch.autocast(h.device.type, enabled=False):
        h, codebook = h.float(), codebook.float()
        norms, codes = codebook.square().sum(1), codebook.T
        rows = max(1, CACHED // len(codebook)) if h.device.type == "cpu" else max(1, len(h))
        return torch.cat([torch.addmm(norms, part, codes, alpha=-2).argmin(1) for part in h.split(rows)])


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _search(
    h,
    codebook,
    distances,
    codes,
    vectors,
    size,
    width,
    share,
    h_row,
    h_channel,
    codebook_row,
    codebook_channel,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Find the best of `share` codes for a tile of vectors: its distance and its index, both (parts, M).

    `vectors` is M, `size` N, `width` C; h_row and the like are strides.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    channels = tl.arange(0, CHANNELS)
    best = tl.full((ROWS,), float("inf"), tl.float32)
    index = tl.zeros((ROWS,), tl.int32) + part * share
    for start in range(part * share, min(size, (part + 1) * share), COLUMNS):
        code = start + tl.arange(0, COLUMNS)
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        norm = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, width, CHANNELS):
            channel = first + channels
            inside = channel[None, :] < width
            x = tl.load(
                h + row[:, None] * h_row + channel[None, :].to(tl.int64) * h_channel,
                mask=(row[:, None] < vectors) & inside,
                other=0.0,
            ).to(tl.float32)
            e = tl.load(
                codebook + code[:, None].to(tl.int64) * codebook_row + channel[None, :].to(tl.int64) * codebook_channel,
                mask=(code[:, None] < size) & inside,
                other=0.0,
            ).to(tl.float32)
            product = tl.dot(x, tl.trans(e), product, input_precision="tf32x3")
            norm += tl.sum(e * e, 1)
        distance = tl.where(code[None, :] < size, norm[None, :] - 2 * product, float("inf"))
        lowest = tl.min(distance, 1)
        at = tl.argmin(distance, 1)  # the first among equals
        index = tl.where(lowest < best, start + at, index)
        best = tl.minimum(lowest, best)
    place = part.to(tl.int64) * vectors + row
    tl.store(distances + place, best, mask=row < vectors)
    tl.store(codes + place, index, mask=row < vectors)


def _nearest_triton(h: Tensor, codebook: Tensor) -> Tensor:
    vectors, size = len(h), len(codebook)
    tiles = -(-vectors // ROWS)
    parts = min(-(-size // COLUMNS), max(1, PROGRAMS // max(1, tiles)))  # few vectors: several programs share the codes
    share = -(-size // (parts * COLUMNS)) * COLUMNS
    parts = -(-size // share)
    distances = torch.empty(parts, vectors, device=h.device)
    codes = torch.empty(parts, vectors, device=h.device, dtype=torch.int64)
    _search[(tiles, parts)](
        h,
        codebook,
        distances,
        codes,
        vectors,
        size,
        h.shape[1],
        share,
        *h.stride(),
        *codebook.stride(),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        CHANNELS=CHANNELS,
        num_warps=4,
    )
    return codes[0] if parts == 1 else codes.gather(0, distances.argmin(0, keepdim=True))[0]
