"""Gated delta rule in Triton: blocks of 16 tokens at absolute multiples of 16, one form for prefill and decode.

With S the state before a block, c the cumulative log decay inside it, and k, q normalised:

    P_il = sum_ch k_i k_l exp(c_i - c_l),  Q_il = sum_ch q_i k_l exp(c_i - c_l)          (a launch of its own)
    d_i  = beta_i (v_i - (k_i exp c_i)^T S - sum_{l<i} P_il d_l)
    o_i  = (q_i exp c_i)^T S + sum_{l<=i} Q_il d_l
    S'   = diag(exp c_15) S + sum_l (k_l exp(c_15 - c_l)) d_l^T

The state at a multiple of 64 is stored; a launch that begins inside a chunk repeats the steps S' of the blocks before
it from their kept rows. A block is computed as [16, .] tiles whether one of its rows is new or all of them, in the same
machine code: rows of a tile do not meet, a kept row passes through as it was read, so no cut of a prompt and no mix of
prefill, decode and verification changes a bit. Products are sums of tf32 products: a float32 operand is split in two
numbers of 11 bits (the product of the two small ones, below 2^-22, is dropped), bfloat16 and float16 keys and queries
are one such number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.launch import NO_FUSION, cdiv, next_power
from slimserve.ops.triton.open_rows import keep_rows, kept_or_new

CHUNK = 64
BLOCK = 16
"""Tokens of a block: the rows of one product instruction, and few enough that a decoded token pads little."""
VALUE_SLICE = 32
"""Values that a program owns: its warps own eight each, so that sums over a block's rows stay inside a warp."""
WARPS = 4

# One compiled form for every step: a number that is 1 when decoding and 9 when not would otherwise make two.
_INDEX_POINTERS = ["state_in_ptr", "state_out_ptr", "open_index_ptr", "row_offsets_ptr", "start_ptr"]


@triton.jit
def _halves(x):
    """float32 as two numbers that tf32 holds: rounded to 11 bits, and the rest. NaN stays in the rest."""
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _product(a, b, A_EXACT: tl.constexpr, B_EXACT: tl.constexpr):
    """a [M, K] times b [K, N] float32; an operand that is exact holds tf32 numbers already."""
    if A_EXACT and B_EXACT:
        result = tl.dot(a, b, input_precision="tf32")
    elif A_EXACT:
        b_high, b_low = _halves(b)
        result = tl.dot(a, b_low, input_precision="tf32") + tl.dot(a, b_high, input_precision="tf32")
    elif B_EXACT:
        a_high, a_low = _halves(a)
        result = tl.dot(a_low, b, input_precision="tf32") + tl.dot(a_high, b, input_precision="tf32")
    else:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        result = tl.dot(a_low, b_high, input_precision="tf32") + tl.dot(a_high, b_low, input_precision="tf32")
        result += tl.dot(a_high, b_high, input_precision="tf32")
    return result


@triton.jit
def _inverse_norm(x):
    """1 / |row| of x [N, K]."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1) + 1e-6)


@triton.jit
def _block_decays(
    open_g_ptr, g_ptr, ring_rows, flat, old, new, heads, head, cols_k, live_k, key_dim, PER_CHANNEL: tl.constexpr
):
    """Log decays of a block's tokens, [16] or [16, K]; rows that are neither old nor new have none."""
    if PER_CHANNEL:
        decay = kept_or_new(
            open_g_ptr, g_ptr, ring_rows, flat, old, new, heads * key_dim, head * key_dim + cols_k, live_k
        )
    else:
        decay = tl.load(open_g_ptr + ring_rows * heads + head, mask=old, other=0.0)
        decay += tl.load(g_ptr + flat * heads + head, mask=new, other=0.0)
    return decay


@triton.jit(do_not_specialize=["ring"], do_not_specialize_on_alignment=_INDEX_POINTERS)
def _pairs_kernel(
    q_ptr, k_ptr, g_ptr, pairs_ptr, open_k_ptr, open_g_ptr, open_index_ptr, row_offsets_ptr, start_ptr, ring,
    heads: tl.constexpr, repeat: tl.constexpr, key_dim: tl.constexpr,
    PER_CHANNEL: tl.constexpr, TILED: tl.constexpr, EXACT: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """P and Q of one head's new rows in one chunk: pairs [T, H, 2, 16], zero where a row does not see the other."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    key_heads: tl.constexpr = heads // repeat
    key_head = head % key_heads if TILED else head // repeat
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    final = start + end - begin
    base = start - start % C + tl.program_id(0).to(tl.int64) * C
    if base >= final:
        return
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    stop = tl.minimum(base + C, final)
    rows = tl.arange(0, B)
    cols_k = tl.arange(0, BK)
    live_k = cols_k < key_dim
    scale = 1.0 / tl.sqrt(key_dim * 1.0)
    block = tl.maximum(base, start - start % B)
    while block < stop:
        places = block + rows
        old = places < start
        new = (places >= start) & (places < stop)
        flat = begin + places - start
        ring_rows = open_row * ring + places % ring
        keys = kept_or_new(
            open_k_ptr, k_ptr, ring_rows, flat, old, new, key_heads * key_dim, key_head * key_dim + cols_k, live_k
        )
        inverse_k = _inverse_norm(keys)
        decay = _block_decays(
            open_g_ptr, g_ptr, ring_rows, flat, old, new, heads, head, cols_k, live_k, key_dim, PER_CHANNEL
        )
        total = tl.cumsum(decay, axis=0)
        if PER_CHANNEL:
            place = tl.maximum(block, start)
            while place < tl.minimum(block + B, stop):
                index = place - block
                source = begin + place - start
                at = (source * key_heads + key_head) * key_dim + cols_k
                key = tl.load(k_ptr + at, mask=live_k, other=0.0).to(open_k_ptr.dtype.element_ty).to(tl.float32)
                query = tl.load(q_ptr + at, mask=live_k, other=0.0).to(tl.float32)
                own_k = 1.0 / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6)
                own_q = scale / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6)
                # Differences are formed before exp: no factor overflows, whatever the decay.
                now = tl.sum(tl.where((rows == index)[:, None], total, 0.0), axis=0)
                factors = keys * tl.exp(tl.minimum(now[None, :] - total, 0.0))
                of_key = tl.sum(factors * key[None, :], axis=1) * (inverse_k * own_k)
                of_query = tl.sum(factors * query[None, :], axis=1) * (inverse_k * own_q)
                target = pairs_ptr + (source * heads + head) * (2 * B) + rows
                tl.store(target, tl.where(rows < index, of_key, 0.0))
                tl.store(target + B, tl.where(rows <= index, of_query, 0.0))
                place += 1
        else:
            queries = tl.load(
                q_ptr + (flat[:, None] * key_heads + key_head) * key_dim + cols_k[None, :],
                mask=new[:, None] & live_k[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            inverse_q = _inverse_norm(queries) * scale
            fall = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * inverse_k[None, :]
            of_key = _product(keys, tl.trans(keys), EXACT, EXACT) * (fall * inverse_k[:, None])
            of_query = _product(queries, tl.trans(keys), EXACT, EXACT) * (fall * inverse_q[:, None])
            target = pairs_ptr + (flat[:, None] * heads + head) * (2 * B) + rows[None, :]
            tl.store(target, tl.where(rows[None, :] < rows[:, None], of_key, 0.0), mask=new[:, None])
            tl.store(target + B, tl.where(rows[None, :] <= rows[:, None], of_query, 0.0), mask=new[:, None])
        block += B


@triton.jit
def _row_value(index, pairs_row_ptr, live, target, written, rows):
    """target_i - sum_l P_il d_l over the rows written so far (others are zero): [V]."""
    pairs = tl.load(pairs_row_ptr + rows, mask=tl.where(live, rows < index, False), other=0.0)
    return tl.sum(tl.where((rows == index)[:, None], target, -(pairs[:, None] * written)), axis=0)


@triton.jit
def _solve_block(
    target, block, begin, start, final, pairs_ptr, beta_ptr, rows, heads: tl.constexpr, head, B: tl.constexpr
):
    """Written values [16, V] of a block: d_i = beta_i (target_i - sum_{l<i} P_il d_l); a row that is kept is target_i.

    Rows go in fours: the sums over earlier fours are four independent reductions, the rest is arithmetic on vectors.
    """
    written = tl.zeros_like(target)
    step: tl.constexpr = heads * 2 * B
    for group in tl.static_range(B // 4):
        i = group * 4
        source = begin + block + i - start
        at = pairs_ptr + (source * heads + head) * (2 * B)
        # Kept rows and rows after the last have no pairs; kept ones have beta 1, those after the last a zero target.
        live0 = (block + i >= start) & (block + i < final)
        live1 = (block + i + 1 >= start) & (block + i + 1 < final)
        live2 = (block + i + 2 >= start) & (block + i + 2 < final)
        live3 = (block + i + 3 >= start) & (block + i + 3 < final)
        beta0 = tl.load(beta_ptr + source * heads + head, mask=live0, other=1.0)
        beta1 = tl.load(beta_ptr + (source + 1) * heads + head, mask=live1, other=1.0)
        beta2 = tl.load(beta_ptr + (source + 2) * heads + head, mask=live2, other=1.0)
        beta3 = tl.load(beta_ptr + (source + 3) * heads + head, mask=live3, other=1.0)
        x0 = _row_value(i, at, live0, target, written, rows)
        x1 = _row_value(i + 1, at + step, live1, target, written, rows)
        x2 = _row_value(i + 2, at + 2 * step, live2, target, written, rows)
        x3 = _row_value(i + 3, at + 3 * step, live3, target, written, rows)
        p10 = tl.load(at + step + i, mask=live1, other=0.0)
        p20 = tl.load(at + 2 * step + i, mask=live2, other=0.0)
        p21 = tl.load(at + 2 * step + i + 1, mask=live2, other=0.0)
        p30 = tl.load(at + 3 * step + i, mask=live3, other=0.0)
        p31 = tl.load(at + 3 * step + i + 1, mask=live3, other=0.0)
        p32 = tl.load(at + 3 * step + i + 2, mask=live3, other=0.0)
        d0 = beta0 * x0
        d1 = beta1 * (x1 - p10 * d0)
        d2 = beta2 * ((x2 - p20 * d0) - p21 * d1)
        d3 = beta3 * (((x3 - p30 * d0) - p31 * d1) - p32 * d2)
        written = tl.where((rows == i)[:, None], d0[None, :], written)
        written = tl.where((rows == i + 1)[:, None], d1[None, :], written)
        written = tl.where((rows == i + 2)[:, None], d2[None, :], written)
        written = tl.where((rows == i + 3)[:, None], d3[None, :], written)
    return written


@triton.jit(do_not_specialize=["num_crossings", "ring"], do_not_specialize_on_alignment=_INDEX_POINTERS)
def _delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, pairs_ptr, out_ptr,
    state_ptr, open_k_ptr, open_g_ptr, open_d_ptr,
    state_in_ptr, state_out_ptr, open_index_ptr, row_offsets_ptr, start_ptr,
    num_crossings, ring,
    heads: tl.constexpr, repeat: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    PER_CHANNEL: tl.constexpr, TILED: tl.constexpr, EXACT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One row, one value head, BV values: every block from the chunk of the row's first new token to its last."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    key_heads: tl.constexpr = heads // repeat
    key_head = head % key_heads if TILED else head // repeat
    begin = tl.load(row_offsets_ptr + row).to(tl.int64)
    end = tl.load(row_offsets_ptr + row + 1).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    slot = tl.load(state_in_ptr + row).to(tl.int64)
    open_row = tl.load(open_index_ptr + row).to(tl.int64)
    final = start + end - begin
    rows = tl.arange(0, B)
    cols_k = tl.arange(0, BK)
    cols_v = tl.program_id(0) * BV + tl.arange(0, BV)
    live_k = cols_k < key_dim
    live_v = cols_v < value_dim
    state_size: tl.constexpr = key_dim * value_dim
    state_offsets = cols_k[None, :] * value_dim + cols_v[:, None]
    state_mask = live_k[None, :] & live_v[:, None]
    scale = 1.0 / tl.sqrt(key_dim * 1.0)
    current = tl.load(
        state_ptr + (slot * heads + head) * state_size + state_offsets,
        mask=tl.where(slot > 0, state_mask, False),
        other=0.0,
    ).to(tl.float32)  # [V, K]
    crossing = 0
    block = start - start % C
    while block < final:
        places = block + rows
        old = places < start
        new = (places >= start) & (places < final)
        flat = begin + places - start
        ring_rows = open_row * ring + places % ring
        keys = kept_or_new(
            open_k_ptr, k_ptr, ring_rows, flat, old, new, key_heads * key_dim, key_head * key_dim + cols_k, live_k
        )
        inverse_k = _inverse_norm(keys)
        decay = _block_decays(
            open_g_ptr, g_ptr, ring_rows, flat, old, new, heads, head, cols_k, live_k, key_dim, PER_CHANNEL
        )
        total = tl.cumsum(decay, axis=0)
        value_offsets = head * value_dim + cols_v[None, :]
        written = tl.load(
            open_d_ptr + ring_rows[:, None] * (heads * value_dim) + value_offsets,
            mask=old[:, None] & live_v[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if block + B > start:
            new_values = new[:, None] & live_v[None, :]
            queries = tl.load(
                q_ptr + (flat[:, None] * key_heads + key_head) * key_dim + cols_k[None, :],
                mask=new[:, None] & live_k[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            value = tl.load(v_ptr + flat[:, None] * (heads * value_dim) + value_offsets, mask=new_values, other=0.0)
            inverse_q = _inverse_norm(queries) * scale
            grow = tl.exp(total)
            before = tl.trans(current)  # [K, V]
            if PER_CHANNEL:
                seen = _product(keys * inverse_k[:, None] * grow, before, False, False)
                result = _product(queries * inverse_q[:, None] * grow, before, False, False)
            else:
                seen = _product(keys, before, EXACT, False) * (inverse_k * grow)[:, None]
                result = _product(queries, before, EXACT, False) * (inverse_q * grow)[:, None]
            target = tl.where(old[:, None], written, value.to(tl.float32) - seen)
            written = _solve_block(target, block, begin, start, final, pairs_ptr, beta_ptr, rows, heads, head, B)
            pairs_q = tl.load(
                pairs_ptr + (flat[:, None] * heads + head) * (2 * B) + B + rows[None, :],
                mask=tl.broadcast_to(new[:, None], (B, B)), other=0.0,
            )  # fmt: skip
            result += _product(pairs_q, written, False, False)
            tl.store(out_ptr + flat[:, None] * (heads * value_dim) + value_offsets, result, mask=new_values)
            tl.store(
                open_d_ptr + ring_rows[:, None] * (heads * value_dim) + value_offsets,
                written, mask=new_values & (places >= final - ring)[:, None],
            )  # fmt: skip
        block += B
        boundary = (block % C == 0) & (block <= final)
        if (block < final) | boundary:
            if PER_CHANNEL:
                last = tl.sum(tl.where((rows == B - 1)[:, None], total, 0.0), axis=0)
                kept = keys * inverse_k[:, None] * tl.exp(last[None, :] - total)
                current = current * tl.exp(last)[None, :] + _product(tl.trans(written), kept, False, False)
            else:
                last = tl.sum(tl.where(rows == B - 1, total, 0.0), axis=0)
                scaled = written * (inverse_k * tl.exp(last - total))[:, None]
                current = current * tl.exp(last) + _product(tl.trans(scaled), keys, False, EXACT)
            if boundary:
                slot = tl.load(state_out_ptr + row * num_crossings + crossing).to(tl.int64)
                rounded = current.to(state_ptr.dtype.element_ty)
                tl.store(
                    state_ptr + (slot * heads + head) * state_size + state_offsets,
                    rounded, mask=tl.where(slot > 0, state_mask, False),
                )  # fmt: skip
                current = rounded.to(tl.float32)
                crossing += 1


def _holds_tf32(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    open_k: torch.Tensor,
    open_g: torch.Tensor,
    open_d: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    tiled: bool = False,
) -> torch.Tensor:
    """Same contract as ops.reference.linear_attention.gated_delta_rule; storage contiguous on one CUDA device."""
    num_tokens, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1], q.shape[2]
    out = torch.empty(num_tokens, heads, value_dim, dtype=torch.float32, device=v.device)
    if num_tokens == 0:
        return out
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    pairs = torch.empty(num_tokens, heads, 2, BLOCK, dtype=torch.float32, device=v.device)
    num_rows, crossings, ring = row_offsets.numel() - 1, state_out.shape[1], open_k.shape[1]
    block_v = min(VALUE_SLICE, max(16, next_power(value_dim)))
    shared = {
        "heads": heads, "repeat": heads // key_heads, "key_dim": key_dim, "PER_CHANNEL": g.dim() == 3, "TILED": tiled,
        "EXACT": _holds_tf32(q, k), "BK": max(16, next_power(key_dim)), "C": CHUNK, "B": BLOCK,
        "num_warps": WARPS, **NO_FUSION,
    }  # fmt: skip
    # A row that crosses n boundaries has new tokens in at most n + 1 chunks.
    _pairs_kernel[(crossings + 1, heads, num_rows)](
        q, k, g, pairs, open_k, open_g, open_index, row_offsets, start_positions, ring, **shared
    )
    _delta_rule_kernel[(cdiv(value_dim, block_v), heads, num_rows)](
        q, k, v, g, beta, pairs, out, state, open_k, open_g, open_d,
        state_in, state_out, open_index, row_offsets, start_positions, crossings, ring,
        value_dim=value_dim, BV=block_v, **shared,
    )  # fmt: skip
    keep_rows((k, open_k), open_index, row_offsets, start_positions, (g, open_g))
    return out
