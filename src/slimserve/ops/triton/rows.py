"""Norms, gated activations, rotary embedding and page writes: one program per row, float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.launch import NO_FUSION, cdiv, next_power

PAGE_TOKENS = 64
FP8_MAX = 448.0


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, width, eps, weight_offset,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / width
    scale = 1.0 / tl.sqrt(mean + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + weight_offset
    tl.store(y_ptr + row * width + cols, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    y = torch.empty_like(rows)
    total = torch.empty_like(rows) if residual is not None else y
    beside = residual.reshape(-1, width).contiguous() if residual is not None else rows
    block = next_power(width)
    if rows.shape[0]:
        _rms_norm_kernel[(rows.shape[0],)](
            rows, beside, weight, y, total, width, eps, weight_offset,
            ADD=residual is not None, BLOCK=block, num_warps=min(8, max(1, block // 512)), **NO_FUSION,
        )  # fmt: skip
    return y.view(x.shape), total.view(x.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0) -> torch.Tensor:
    """See `slimserve.ops.rms_norm`."""
    return _norm(x, None, weight, eps, weight_offset)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `slimserve.ops.add_rms_norm`."""
    return _norm(x, residual, weight, eps, weight_offset)


@triton.jit
def _gated_kernel(x_ptr, y_ptr, width, limit, CLAMP: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x_ptr + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    if CLAMP:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit, tl.PropagateNan.ALL)
    if GELU:
        # tanh(u) = 1 - 2 / (exp(2u) + 1), total for every u.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + row * width + cols, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


def gated(gate_up: torch.Tensor, limit: float | None, gelu: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The gated activation in `dtype` (default gate_up's): silu with optional clamps, or gelu."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width).contiguous()
    y = torch.empty((rows.shape[0], width), dtype=dtype or gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        _gated_kernel[(rows.shape[0], cdiv(width, 1024))](
            rows, y, width, 0.0 if limit is None else limit,
            CLAMP=limit is not None, GELU=gelu, BLOCK=1024, num_warps=4, **NO_FUSION,
        )  # fmt: skip
    return y.view(*gate_up.shape[:-1], width)


def silu_mul(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """See `slimserve.ops.silu_mul`."""
    return gated(gate_up, limit, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `slimserve.ops.gelu_tanh_mul`."""
    return gated(gate_up, None, gelu=True)


@triton.jit
def _rope_kernel(
    x_ptr, positions_ptr, inv_freq_ptr, heads, half, stride_token, stride_head, scale,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK)
    live = (head < heads) & (pair < half)[None, :]
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)
    cos = (tl.cos(angle) * scale)[None, :]
    sin = (tl.sin(angle) * scale)[None, :]
    base = x_ptr + token * stride_token + head * stride_head
    if INTERLEAVED:
        first_ptr = base + 2 * pair[None, :]
        second_ptr = first_ptr + 1
    else:
        first_ptr = base + pair[None, :]
        second_ptr = first_ptr + half
    a = tl.load(first_ptr, mask=live, other=0.0).to(tl.float32)
    b = tl.load(second_ptr, mask=live, other=0.0).to(tl.float32)
    tl.store(first_ptr, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=live)
    tl.store(second_ptr, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=live)


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
    tokens, heads, _ = x.shape
    if x.stride(2) != 1:
        raise ValueError("rope: the last dimension of x must be contiguous")
    block_heads = 4
    if tokens:
        _rope_kernel[(tokens, cdiv(heads, block_heads))](
            x, positions, inv_freq, heads, rotary_dim // 2, x.stride(0), x.stride(1), scale,
            INTERLEAVED=interleaved, BLOCK_H=block_heads, BLOCK=next_power(rotary_dim // 2), num_warps=2, **NO_FUSION,
        )  # fmt: skip


@triton.jit
def _write_pages_kernel(
    values_ptr, storage_ptr, slots_ptr, heads, dim, stride_token, stride_head,
    CLAMP: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    live = (head < heads) & (col < dim)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    value = tl.load(values_ptr + token * stride_token + head * stride_head + col, mask=live, other=0.0)
    if CLAMP:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -448.0), 448.0)
    place = ((slot // PAGE) * heads + head) * PAGE + slot % PAGE
    tl.store(storage_ptr + place * dim + col, value.to(storage_ptr.dtype.element_ty), mask=live)


def write_pages(values: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor) -> None:
    """See `slimserve.ops.write_pages`."""
    tokens, heads, dim = values.shape
    if values.stride(2) != 1 or not storage.is_contiguous():
        raise ValueError("write_pages: values need a contiguous last dimension, storage must be contiguous")
    block_heads = 4
    if tokens:
        _write_pages_kernel[(tokens, cdiv(heads, block_heads))](
            values, storage, slots, heads, dim, values.stride(0), values.stride(1),
            CLAMP=storage.dtype == torch.float8_e4m3fn, PAGE=PAGE_TOKENS,
            BLOCK_H=block_heads, BLOCK_D=next_power(dim), num_warps=2, **NO_FUSION,
        )  # fmt: skip
