"""Row operations and attention of the C++ library, with the signatures of `slimserve.ops`."""

from __future__ import annotations

import torch

from slimserve.ops.cpu.library import DTYPES, load
from slimserve.ops.cpu.weights import format_code
from slimserve.quant.tensor import PackedTensor


def _weight(weight: torch.Tensor, size: int) -> torch.Tensor:
    if weight.numel() != size:
        raise ValueError(f"norm weight has {weight.numel()} elements, rows have {size}")
    return weight if weight.dtype is torch.float32 and weight.is_contiguous() else weight.float().contiguous()


def embedding(token_ids: torch.Tensor, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
    """See `slimserve.ops.embedding`; formats with side scales are gathered by the torch reference."""
    code = None if packed.scales else format_code(packed)
    if code is None or not packed.data.is_contiguous():
        from slimserve.ops.reference.linear import embedding as reference

        return reference(token_ids, packed, dtype)
    num_rows, columns = packed.shape
    ids = token_ids.to(torch.int64).contiguous()
    out = torch.empty((ids.shape[0], columns), dtype=dtype)
    row_bytes = packed.data.element_size() * packed.data.stride(0)
    load().slim_file_rows(
        code, packed.data.data_ptr(), row_bytes, num_rows, columns, ids.data_ptr(), ids.shape[0], out.data_ptr(),
        DTYPES[dtype],
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0) -> torch.Tensor:
    """See `slimserve.ops.rms_norm`."""
    x = x.contiguous()
    size = x.shape[-1]
    weight = _weight(weight, size)
    out = torch.empty_like(x)
    load().slim_rms_norm(
        x.data_ptr(), None, DTYPES[x.dtype], weight.data_ptr(), weight_offset, eps, x.numel() // max(size, 1), size,
        None, out.data_ptr(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `slimserve.ops.add_rms_norm`."""
    x = x.contiguous()
    if residual.shape != x.shape or residual.dtype is not x.dtype:
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not fit {tuple(x.shape)} {x.dtype}")
    residual = residual.contiguous()
    size = x.shape[-1]
    weight = _weight(weight, size)
    out, total = torch.empty_like(x), torch.empty_like(x)
    load().slim_rms_norm(
        x.data_ptr(), residual.data_ptr(), DTYPES[x.dtype], weight.data_ptr(), weight_offset, eps,
        x.numel() // max(size, 1), size, total.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out, total


def silu_mul(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """See `slimserve.ops.silu_mul`."""
    gate_up = gate_up.contiguous()
    half = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], half)
    load().slim_silu_mul(
        gate_up.data_ptr(), DTYPES[gate_up.dtype], out.numel() // max(half, 1), half, int(limit is not None),
        limit or 0.0, out.data_ptr(),
    )  # fmt: skip
    return out


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `slimserve.ops.gelu_tanh_mul`."""
    gate_up = gate_up.contiguous()
    half = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], half)
    load().slim_gelu_tanh_mul(
        gate_up.data_ptr(), DTYPES[gate_up.dtype], out.numel() // max(half, 1), half, out.data_ptr()
    )
    return out


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    rotary_dim: int,
    interleaved: bool = False,
    scale: float = 1.0,
) -> None:
    """See `slimserve.ops.rope`."""
    tokens, heads, dim = x.shape
    if x.stride(2) != 1 or rotary_dim > dim or rotary_dim % 2 or inv_freq.numel() != rotary_dim // 2:
        raise ValueError(
            f"rope: x {tuple(x.shape)}, rotary_dim {rotary_dim}, {inv_freq.numel()} frequencies do not fit"
        )
    if positions.dtype is not torch.int64 or not positions.is_contiguous():
        positions = positions.to(torch.int64).contiguous()
    if inv_freq.dtype is not torch.float32 or not inv_freq.is_contiguous():
        inv_freq = inv_freq.float().contiguous()
    load().slim_rope(
        x.data_ptr(), DTYPES[x.dtype], positions.data_ptr(), inv_freq.data_ptr(), tokens, heads, x.stride(0),
        x.stride(1), rotary_dim, int(interleaved), scale,
    )  # fmt: skip


def write_pages(values: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor) -> None:
    """See `slimserve.ops.write_pages`."""
    tokens, heads, dim = values.shape
    pages, page_heads, page_tokens, page_dim = storage.shape
    if (heads, 64, dim) != (page_heads, page_tokens, page_dim) or not storage.is_contiguous() or values.stride(2) != 1:
        raise ValueError(f"write_pages: values {tuple(values.shape)} do not fit storage {tuple(storage.shape)}")
    if slots.dtype is not torch.int64 or not slots.is_contiguous():
        slots = slots.to(torch.int64).contiguous()
    load().slim_write_pages(
        values.data_ptr(), DTYPES[values.dtype], tokens, heads, dim, values.stride(0), values.stride(1),
        storage.data_ptr(), DTYPES[storage.dtype], pages, slots.data_ptr(),
    )  # fmt: skip


def place_heads(
    heads: torch.Tensor,
    num_heads: int,
    k_storage: torch.Tensor,
    v_storage: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    inv_freq: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    scale: float,
) -> torch.Tensor:
    """See `slimserve.ops.place_heads`; float32 heads, changed in place."""
    tokens, total, dim = heads.shape
    pages, kv_heads, page_tokens, page_dim = k_storage.shape
    fits = total == num_heads + 2 * kv_heads and page_tokens == 64 and page_dim == dim and rotary_dim <= dim
    dense = heads.is_contiguous() and k_storage.is_contiguous() and v_storage.is_contiguous()
    if not fits or not dense or v_storage.shape != k_storage.shape or v_storage.dtype is not k_storage.dtype:
        raise ValueError(f"place_heads: heads {tuple(heads.shape)} do not fit pages {tuple(k_storage.shape)}")
    if slots.dtype is not torch.int64 or positions.dtype is not torch.int64:
        slots, positions = slots.to(torch.int64), positions.to(torch.int64)
    q_weight = None if q_norm is None else _weight(q_norm, dim)
    k_weight = None if k_norm is None else _weight(k_norm, dim)
    load().slim_place_heads(
        heads.data_ptr(), tokens, num_heads, kv_heads, dim, None if q_weight is None else q_weight.data_ptr(),
        None if k_weight is None else k_weight.data_ptr(), eps, positions.data_ptr(),
        None if inv_freq is None else inv_freq.data_ptr(), rotary_dim, int(interleaved), scale, k_storage.data_ptr(),
        v_storage.data_ptr(), DTYPES[k_storage.dtype], pages, slots.data_ptr(),
    )  # fmt: skip
    return heads[:, :num_heads]


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
    """See `slimserve.ops.paged_attention`."""
    del max_q_len, max_context  # row_offsets and start_positions lie in host memory
    tokens, q_heads, dim = q.shape
    pages, kv_heads, page_tokens, key_dim = k.shape
    fits = page_tokens == 64 and key_dim == dim and q_heads % kv_heads == 0 and v.shape[:3] == k.shape[:3]
    dense = q.stride(2) == 1 and k.is_contiguous() and v.is_contiguous() and block_table.stride(-1) == 1
    if not fits or not dense or v.dtype is not k.dtype:
        raise ValueError(f"paged_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    if block_table.dtype is not torch.int32 or row_offsets.dtype is not torch.int32:
        block_table, row_offsets = block_table.to(torch.int32), row_offsets.to(torch.int32)
    if start_positions.dtype is not torch.int32:
        start_positions = start_positions.to(torch.int32)
    out = q.new_empty(tokens, q_heads, v.shape[3])
    load().slim_paged_attention(
        q.data_ptr(), DTYPES[q.dtype], q.stride(0), q.stride(1), k.data_ptr(), v.data_ptr(), DTYPES[k.dtype], pages,
        block_table.data_ptr(), block_table.stride(0), row_offsets.data_ptr(), start_positions.data_ptr(),
        row_offsets.shape[0] - 1, q_heads, kv_heads, dim, v.shape[3], scale, softcap or 0.0, window or 0,
        out.data_ptr(),
    )  # fmt: skip
    return out
