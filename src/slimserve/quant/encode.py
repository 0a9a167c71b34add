"""Encoding weights: the reference quantizers of the block formats."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slimserve.errors import RefusalError
from slimserve.quant import encode_blocks, encode_grid, encode_k
from slimserve.quant.fit import Weights
from slimserve.quant.formats import PLAIN_DTYPES
from slimserve.quant.tensor import BlockFormat, PackedTensor

BlockEncoder = Callable[[torch.Tensor, Weights], torch.Tensor]
"""x float32 [n, block_size], importances alike or None -> uint8 [n, block_bytes]."""

_CHUNK_ELEMENTS = 1 << 17
"""Elements encoded at a time: the intermediates then stay in the second-level cache."""

_CHUNK_OF = {"IQ2_XXS": 1 << 15}
"""Formats whose intermediates are larger: IQ2_XXS scores 256 table rows per 8 elements."""

ENCODERS: dict[str, BlockEncoder] = {
    "Q4_0": encode_blocks.encode_q4_0,
    "Q4_1": encode_blocks.encode_q4_1,
    "Q5_0": encode_blocks.encode_q5_0,
    "Q5_1": encode_blocks.encode_q5_1,
    "Q8_0": encode_blocks.encode_q8_0,
    "Q2_K": encode_k.encode_q2_k,
    "Q3_K": encode_k.encode_q3_k,
    "Q4_K": encode_k.encode_q4_k,
    "Q5_K": encode_k.encode_q5_k,
    "Q6_K": encode_k.encode_q6_k,
    "IQ2_XXS": encode_grid.encode_iq2_xxs,
    "IQ4_NL": encode_grid.encode_iq4_nl,
    "IQ4_XS": encode_grid.encode_iq4_xs,
    "TQ2_0": encode_grid.encode_tq2_0,
    "MXFP4": encode_grid.encode_mxfp4,
    "NVFP4": encode_grid.encode_nvfp4,
}
"""Block formats that can be written."""


def encodable() -> tuple[str, ...]:
    """Names of all formats that `encode` writes."""
    return ("F32", "F16", "BF16", *ENCODERS)


def encode(
    values: torch.Tensor, fmt: BlockFormat, *, importance: torch.Tensor | None = None, name: str = ""
) -> PackedTensor:
    """Quantize `values` [..., K] to `fmt`, minimising the squared error, weighted by `importance` where given.

    importance: non-negative float32 [K], or [E, K] for values [E, N, K]; the mean square of each input channel. A
    channel that is never active counts a little, so that it stays defined. Raises RefusalError for a format without
    encoder, a K that is no whole number of blocks, or values that are not finite.
    """
    if not bool(torch.isfinite(values).all()):
        raise RefusalError(f"tensor {name!r} holds values that are not finite and cannot be quantized")
    if fmt.name in ("F32", "F16", "BF16"):
        return PackedTensor(fmt, tuple(values.shape), values.to(PLAIN_DTYPES[fmt.name]), name)
    encoder = ENCODERS.get(fmt.name)
    if encoder is None:
        raise RefusalError(f"format {fmt.name} cannot be written; possible are {', '.join(encodable())}")
    if values.shape[-1] % fmt.block_size:
        raise RefusalError(f"tensor {name!r}: rows of {values.shape[-1]} are no whole {fmt.name} blocks")
    weights = None if importance is None else _spread(importance, values, name)
    blocks = values.reshape(-1, fmt.block_size)
    out = torch.empty((blocks.shape[0], fmt.block_bytes), dtype=torch.uint8)
    blocks_per_row = values.shape[-1] // fmt.block_size
    step = max(1, _CHUNK_OF.get(fmt.name, _CHUNK_ELEMENTS) // fmt.block_size)
    for start in range(0, blocks.shape[0], step):
        piece = blocks[start : start + step].to(torch.float32)
        w = None
        if weights is not None:
            index = torch.arange(start, start + piece.shape[0])
            rows_per_set = blocks.shape[0] // weights.shape[0]
            columns = weights.view(weights.shape[0], blocks_per_row, fmt.block_size)
            w = columns[index // rows_per_set, index % blocks_per_row]
        out[start : start + step] = encoder(piece, w)
    shape = (*values.shape[:-1], fmt.row_bytes(values.shape[-1]))
    return PackedTensor(fmt, tuple(values.shape), out.reshape(shape), name)


def _spread(importance: torch.Tensor, values: torch.Tensor, name: str) -> torch.Tensor:
    """Importances as float32 [sets, K], mean one, never zero."""
    sets = importance.to(torch.float32).reshape(-1, importance.shape[-1])
    if sets.shape[1] != values.shape[-1] or (sets.shape[0] != 1 and sets.shape[0] != values.shape[0]):
        raise RefusalError(f"tensor {name!r} {list(values.shape)} cannot use importances {list(importance.shape)}")
    if not bool((sets >= 0).all()) or not bool(torch.isfinite(sets).all()):
        raise RefusalError(f"tensor {name!r}: importances must be finite and not negative")
    mean = sets.mean(dim=1, keepdim=True)
    return torch.where(mean > 0, sets / mean, 1.0).clamp(min=1e-4)
