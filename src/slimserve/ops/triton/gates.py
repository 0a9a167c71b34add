"""Gates of linear and gated attention in Triton, and the store of latents: one launch each, float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.launch import NO_FUSION, cdiv, next_power
from slimserve.ops.triton.rows import write_pages


@triton.jit
def _gate_kernel(
    x_ptr, gate_ptr, out_ptr, width, heads, x_token, x_head, gate_token, gate_head,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < width
    token, head = row // heads, row % heads
    x = tl.load(x_ptr + token * x_token + head * x_head + col, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_token + head * gate_head + col, mask=live, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gate))
    if SILU:
        factor = gate * factor
    tl.store(out_ptr + row * width + col, (x * factor).to(out_ptr.dtype.element_ty), mask=live)


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] of a 2- or 3-dimensional tensor whose last dimension is contiguous."""
    if x.dim() == 2:
        x = x[:, None]
    return x if x.dim() == 3 and x.stride(2) == 1 else x.contiguous().view(x.shape[0], -1, x.shape[-1])


def gate_multiply(x: torch.Tensor, gate: torch.Tensor, *, silu: bool) -> torch.Tensor:
    """See `slimserve.ops.gate_multiply`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, gates = _as_heads(x), _as_heads(gate)
    tokens, heads, width = rows.shape
    block = min(1024, next_power(width))
    _gate_kernel[(tokens * heads, cdiv(width, block))](
        rows, gates, out, width, heads, rows.stride(0), rows.stride(1), gates.stride(0), gates.stride(1),
        SILU=silu, BLOCK=block, num_warps=1 if block <= 256 else 4, **NO_FUSION,
    )  # fmt: skip
    return out


@triton.jit
def _decay_kernel(
    u_ptr, bias_ptr, rate_ptr, out_ptr, width, per_head, stride, bound,
    BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < width
    u = tl.load(u_ptr + token * stride + col, mask=live, other=0.0).to(tl.float32)
    shifted = u + tl.load(bias_ptr + col, mask=live, other=0.0)
    rate = tl.load(rate_ptr + col // per_head, mask=live, other=0.0)
    if BOUNDED:
        result = bound * (1.0 / (1.0 + tl.exp(rate * shifted)))
    else:
        # softplus = max(x, 0) + log1p(e), e = exp(-|x|); log1p by Kahan's correction of the rounded sum.
        small = tl.exp(-tl.abs(shifted))
        whole = 1.0 + small
        rest = whole - 1.0
        log1p = tl.where(rest == 0.0, small, tl.log(whole) * (small / tl.where(rest == 0.0, 1.0, rest)))
        result = rate * (tl.maximum(shifted, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)
    tl.store(out_ptr + token * width + col, result, mask=live)


def log_decay(u: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """See `slimserve.ops.log_decay`."""
    out = torch.empty(u.shape, dtype=torch.float32, device=u.device)
    if out.numel() == 0:
        return out
    if u.stride(-1) != 1 or (u.dim() == 3 and u.stride(1) != u.shape[2]):
        u = u.contiguous()
    tokens = u.shape[0]
    width = u.numel() // tokens
    block = min(1024, next_power(width))
    _decay_kernel[(tokens, cdiv(width, block))](
        u, bias.contiguous(), rate, out, width, width // rate.shape[0], u.stride(0),
        0.0 if lower_bound is None else lower_bound, BOUNDED=lower_bound is not None, BLOCK=block,
        num_warps=1 if block <= 256 else 4, **NO_FUSION,
    )  # fmt: skip
    return out


def write_latents(values: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor) -> None:
    """See `slimserve.ops.write_latents`: a page of one head."""
    write_pages(values[:, None], storage[:, None], slots)
