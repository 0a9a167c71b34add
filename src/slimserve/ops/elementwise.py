"""Row operations and attention: each call goes to the kernel that was resolved for its device and dtypes."""

from __future__ import annotations

import torch

from slimserve.ops.registry import find, pick
from slimserve.ops.resolver import Op
from slimserve.ops.weights import LinearWeight
from slimserve.quant.tensor import PackedTensor


def embedding(token_ids: torch.Tensor, packed: PackedTensor | LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """Decode rows token_ids [T] of a [V, H] table (`prepare_table`): [T, H] of `dtype`; ids are clamped."""
    if isinstance(packed, LinearWeight):
        decoder = packed.row_decoder
        if decoder is None:
            raise ValueError(f"embedding: {packed.kernel} cannot decode single rows")
        return decoder.rows(token_ids, dtype)
    choice = pick(Op.EMBEDDING, packed.data.device, dtype)
    result: torch.Tensor = choice.entry.implementation(token_ids, packed, dtype)
    return result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0) -> torch.Tensor:
    """Normalise rows of x [..., H] by their root mean square and scale by weight [H] + weight_offset; x's dtype."""
    result: torch.Tensor = pick(Op.RMS_NORM, x.device, x.dtype).entry.implementation(
        x, weight, eps, weight_offset=weight_offset
    )
    return result


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to residual [..., H], then normalise the sum as `rms_norm` does; returns (normalised, sum)."""
    y, total = pick(Op.ADD_RMS_NORM, x.device, x.dtype).entry.implementation(
        x, residual, weight, eps, weight_offset=weight_offset
    )
    return y, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Centre and normalise rows of x [..., H], then scale by weight [H] and add bias [H], float32 inside; x's dtype."""
    result: torch.Tensor = pick(Op.LAYER_NORM, x.device, x.dtype).entry.implementation(x, weight, bias, eps)
    return result


def silu_mul(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2F], gate first: [T, F]; `limit` clamps gate from above and up on both sides."""
    result: torch.Tensor = pick(Op.SILU_MUL, gate_up.device, gate_up.dtype).entry.implementation(gate_up, limit)
    return result


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up in the tanh form for gate_up [T, 2F], gate first: [T, F]."""
    result: torch.Tensor = pick(Op.GELU_TANH_MUL, gate_up.device, gate_up.dtype).entry.implementation(gate_up)
    return result


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    rotary_dim: int,
    interleaved: bool = False,
    scale: float = 1.0,
) -> None:
    """Rotate the first rotary_dim elements of x [T, heads, D] in place by positions [T] * inv_freq [rotary_dim / 2].

    Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) where `interleaved`. `scale` multiplies cosine and sine.
    x may be a strided view whose last dimension is contiguous.
    """
    pick(Op.ROPE, x.device, x.dtype).entry.implementation(
        x, positions, inv_freq, rotary_dim=rotary_dim, interleaved=interleaved, scale=scale
    )


def write_pages(values: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor) -> None:
    """Store values [T, heads, D] at slots [T] (page * 64 + offset) of storage [pages, heads, 64, D].

    float8_e4m3fn storage clamps to +-448 first. values may be a strided view with a contiguous last dimension.
    """
    pick(Op.WRITE_PAGES, values.device, values.dtype, storage.dtype).entry.implementation(values, storage, slots)


def place_heads(
    heads: torch.Tensor,
    num_heads: int,
    k_storage: torch.Tensor,
    v_storage: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    inv_freq: torch.Tensor | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
    scale: float = 1.0,
) -> torch.Tensor:
    """What stands between the projections and attention: norms of heads, rotation, keys and values into their pages.

    heads [T, Hq + 2 Hkv, D] holds query, key and value heads and may be changed in place; q_norm and k_norm [D] or
    None; inv_freq None = no rotation. Returns the queries [T, Hq, D]. The steps and bits are those of `rms_norm`,
    `rope` and `write_pages`; where a kernel does them in one call, that call serves.
    """
    entry = find(Op.PLACE_HEADS, heads.device, heads.dtype, k_storage.dtype)
    if entry is not None:
        q: torch.Tensor = entry.implementation(
            heads, num_heads, k_storage, v_storage, slots, positions, q_norm=q_norm, k_norm=k_norm, eps=eps,
            inv_freq=inv_freq, rotary_dim=rotary_dim, interleaved=interleaved, scale=scale,
        )  # fmt: skip
        return q
    keys_end = num_heads + k_storage.shape[1]
    q, k, v = heads[:, :num_heads], heads[:, num_heads:keys_end], heads[:, keys_end:]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if inv_freq is not None:
        # q and k are views of heads where no norm copied them: one call turns both
        together = q_norm is None and k_norm is None
        for part in (heads[:, :keys_end],) if together else (q, k):
            rope(part, positions, inv_freq, rotary_dim=rotary_dim, interleaved=interleaved, scale=scale)
    write_pages(k, k_storage, slots)
    write_pages(v, v_storage, slots)
    return q


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    max_q_len: int,
    max_context: int,
) -> torch.Tensor:
    """Causal attention of a step's rows over their pages: [T, Hq, D] of q's dtype.

    q [T, Hq, D]; k, v [pages, Hkv, 64, D]; block_table [R, blocks] int32; row_offsets [R + 1]; start_positions [R].
    The query at absolute position p sees keys max(0, p - window + 1) .. p; scores are scale * q.k, squashed to
    softcap * tanh(s / softcap) where given. max_q_len and max_context bound loops and never change a row's bits.
    """
    choice = pick(Op.PAGED_ATTENTION, q.device, q.dtype, k.dtype)
    result: torch.Tensor = choice.entry.implementation(
        q,
        k,
        v,
        block_table,
        row_offsets,
        start_positions,
        scale=scale,
        window=window,
        softcap=softcap,
        max_q_len=max_q_len,
        max_context=max_context,
    )
    return result
