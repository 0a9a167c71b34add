"""Triton kernels of the pooled indexer, hyper-connections and the expert router.

A program owns one token, or one pool, and its loop bounds are functions of that token's absolute position, so bits
do not depend on the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimserve.ops.triton.latent import latent_attention
from slimserve.ops.triton.launch import INTERPRETED, NO_FUSION, cdiv, next_power
from slimserve.ops.triton.open_rows import keep_rows, row_of

__all__ = [
    "hyper_post",
    "hyper_pre",
    "latent_attention",
    "layer_norm",
    "route",
    "select_pools",
    "update_pools",
]

PAGE_TOKENS = 64
SCORE_BLOCK = 64
RANK_BLOCK = 2048
SCORE_WORKSPACE_BYTES = 256 << 20
"""Scores are ranked for as many tokens at once as fit here; the rest follow."""


@triton.jit
def _pool_kernel(
    keys_ptr, gates_ptr, ape_ptr, pages_ptr, raw_ptr, table_ptr, open_ptr, offsets_ptr, starts_ptr,
    table_stride, ring,
    POOL: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    begin = tl.load(offsets_ptr + row).to(tl.int64)
    count = tl.load(offsets_ptr + row + 1).to(tl.int64) - begin
    start = tl.load(starts_ptr + row).to(tl.int64)
    pool = start // POOL + tl.program_id(0)
    if pool >= (start + count) // POOL:
        return
    open_row = tl.load(open_ptr + row).to(tl.int64)
    col = tl.arange(0, BLOCK_D)
    live = col < DIM
    best = tl.full((BLOCK_D,), -float("inf"), tl.float32)
    for member in tl.static_range(POOL):
        place = pool * POOL + member
        fresh = place >= start
        old = raw_ptr + (open_row * ring + place % ring) * (2 * DIM) + DIM
        gate = tl.load(old + col, mask=tl.where(fresh, False, live), other=0.0)
        gate += tl.load(gates_ptr + (begin + place - start) * DIM + col, mask=tl.where(fresh, live, False), other=0.0)
        best = tl.maximum(best, gate + tl.load(ape_ptr + member * DIM + col, mask=live, other=0.0))
    total = tl.zeros((BLOCK_D,), tl.float32)
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for member in tl.static_range(POOL):
        place = pool * POOL + member
        fresh = place >= start
        old = raw_ptr + (open_row * ring + place % ring) * (2 * DIM)
        source = (begin + place - start) * DIM
        stale, now = tl.where(fresh, False, live), tl.where(fresh, live, False)
        gate = tl.load(old + DIM + col, mask=stale, other=0.0) + tl.load(gates_ptr + source + col, mask=now, other=0.0)
        key = tl.load(old + col, mask=stale, other=0.0) + tl.load(keys_ptr + source + col, mask=now, other=0.0)
        weight = tl.exp(gate + tl.load(ape_ptr + member * DIM + col, mask=live, other=0.0) - best)
        total += weight
        mixed = tl.fma(weight, key, mixed)
    per_page: tl.constexpr = PAGE // POOL
    page = tl.load(table_ptr + row * table_stride + pool // per_page).to(tl.int64)
    tl.store(pages_ptr + (page * per_page + pool % per_page) * DIM + col, mixed / total, mask=live)


def update_pools(
    keys: torch.Tensor,
    gates: torch.Tensor,
    ape: torch.Tensor,
    pages: torch.Tensor,
    raw: torch.Tensor,
    block_table: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> None:
    """See ops.hybrid.update_pools. The open rows are written by a second launch, after every read of the ring."""
    pool, dim = ape.shape
    keys, gates = keys.float().contiguous(), gates.float().contiguous()
    # Pools along x: y and z end at 65,535, which a prompt of 262,140 tokens in one step would pass.
    grid = (keys.shape[0] // pool + 1, row_offsets.numel() - 1)
    _pool_kernel[grid](
        keys, gates, ape.float().contiguous(), pages, raw, block_table, open_index, row_offsets, start_positions,
        block_table.stride(0), raw.shape[1], POOL=pool, DIM=dim, BLOCK_D=next_power(dim), PAGE=PAGE_TOKENS,
        num_warps=1, **NO_FUSION,
    )  # fmt: skip
    keep_rows((torch.cat([keys, gates], dim=1), raw), open_index, row_offsets, start_positions)


@triton.jit
def _ordered(score):
    """float32 as int32 that sort alike; NaN is below every number."""
    bits = score.to(tl.int32, bitcast=True)
    # Negative floats count down as their magnitude grows.
    return tl.where(score == score, tl.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits), -2147483648)


@triton.jit
def _rank(score, index):
    """A total order as int64 >= 0: a higher score first, among equals the lower index, NaN last; index < 2^31."""
    return (_ordered(score).to(tl.int64) + 2147483648) * 2147483648 + (2147483647 - index.to(tl.int64))


@triton.jit(do_not_specialize=["num_rows", "first_token", "order_stride"])
def _score_kernel(
    q_ptr, weight_ptr, pages_ptr, table_ptr, offsets_ptr, starts_ptr, order_ptr,
    heads, table_stride, order_stride, num_rows, first_token, scale,
    POOL: tl.constexpr, IEEE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores of a token's visible pools as int32 that sort like them, NaN below all; others are not written."""
    flat = first_token + tl.program_id(0).to(tl.int64)
    pool = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = row_of(flat, offsets_ptr, num_rows)
    position = tl.load(starts_ptr + row).to(tl.int64) + flat - tl.load(offsets_ptr + row).to(tl.int64)
    count = (position + 1) // POOL
    if tl.program_id(1) * BLOCK >= count:
        return
    visible = pool < count
    per_page: tl.constexpr = PAGE // POOL
    col = tl.arange(0, BLOCK_D)
    head = tl.arange(0, BLOCK_H)
    live_col = col < DIM
    page = tl.load(table_ptr + row * table_stride + pool // per_page, mask=visible, other=0).to(tl.int64)
    place = (page * per_page + pool % per_page) * DIM
    keys = tl.load(pages_ptr + place[:, None] + col[None, :], mask=visible[:, None] & live_col[None, :], other=0.0)
    q = tl.load(
        q_ptr + (flat * heads + head)[None, :] * DIM + col[:, None],
        mask=(head < heads)[None, :] & live_col[:, None], other=0.0,
    )  # fmt: skip
    if IEEE:
        dots = tl.dot(keys.to(tl.float32), q.to(tl.float32), input_precision="ieee")
    else:
        dots = tl.dot(keys.to(q.dtype), q)
    weight = tl.load(weight_ptr + flat * heads + head, mask=head < heads, other=0.0)
    dots = dots * scale
    # A maximum would turn NaN into zero on some devices; NaN must rank last instead.
    dots = tl.where(dots < 0.0, 0.0, dots)
    score = tl.sum(dots * weight[None, :], axis=1)
    # Minus zero is zero: negative weights make it, and ties go to the lower index.
    order = _ordered(tl.where(score == 0.0, 0.0, score))
    tl.store(order_ptr + tl.program_id(0).to(tl.int64) * order_stride + pool, order, mask=visible)


@triton.jit(do_not_specialize=["num_rows", "first_token", "order_stride"])
def _select_kernel(
    order_ptr, chosen_ptr, offsets_ptr, starts_ptr, order_stride, num_rows, first_token, top,
    POOL: tl.constexpr, RANKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    """The `top` best of a token's visible pools in ascending order: a radix search for the last place, then a sweep.

    Four sweeps count the digits (eight bits each) of scores that share the digits found so far; the fifth writes what
    lies above the score found, and the first pools of those that equal it until the places are taken.
    """
    flat = first_token + tl.program_id(0).to(tl.int64)
    row = row_of(flat, offsets_ptr, num_rows)
    position = tl.load(starts_ptr + row).to(tl.int64) + flat - tl.load(offsets_ptr + row).to(tl.int64)
    visible = ((position + 1) // POOL).to(tl.int32)
    chosen_ptr += flat * top
    order_ptr += tl.program_id(0).to(tl.int64) * order_stride
    if (not RANKED) or (visible <= top):
        slot = tl.arange(0, BLOCK_TOP)
        tl.store(chosen_ptr + slot, tl.where(slot < visible, slot, -1), mask=slot < top)
    else:
        lane = tl.arange(0, BLOCK)
        digits = tl.arange(0, 256)
        # Digits count from zero, as if the scores were shifted by 2^31.
        places = top
        found = tl.zeros((), tl.int32)
        for step in tl.static_range(4):
            shift = 24 - 8 * step
            counts = tl.zeros((256,), tl.int32)
            first = 0
            while first < visible:
                index = first + lane
                order = tl.load(order_ptr + index, mask=index < visible, other=0) ^ -2147483648
                wanted = index < visible
                if step > 0:
                    wanted = wanted & ((order ^ found) >> (shift + 8) == 0)
                counts += tl.histogram(tl.where(wanted, (order >> shift) & 255, 0), 256, mask=wanted)
                first += BLOCK
            above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
            digit = tl.sum((above + counts >= places).to(tl.int32), axis=0) - 1
            places -= tl.sum(tl.where(digits == digit, above, 0), axis=0)
            found = found | (digit << shift)
        last = found ^ -2147483648
        written = 0
        equals = 0
        first = 0
        while first < visible:
            index = first + lane
            order = tl.load(order_ptr + index, mask=index < visible, other=0)
            equal = ((order == last) & (index < visible)).to(tl.int32)
            better = ((order > last) & (index < visible)).to(tl.int32)
            take = better + equal * ((equals + tl.cumsum(equal, axis=0)) <= places).to(tl.int32)
            target = written + tl.cumsum(take, axis=0) - 1
            tl.store(chosen_ptr + target, index, mask=(take > 0) & (target < top))
            written += tl.sum(take, axis=0)
            equals += tl.sum(equal, axis=0)
            first += BLOCK


def select_pools(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    top_pools: int,
    scale: float,
    max_context: int,
) -> torch.Tensor:
    """See ops.hybrid.select_pools."""
    num_tokens, heads, dim = queries.shape
    pool = PAGE_TOKENS // pages.shape[1]
    num_rows = row_offsets.numel() - 1
    most = max(1, max_context // pool)
    chosen = torch.empty((num_tokens, top_pools), dtype=torch.int32, device=queries.device)
    if num_tokens == 0:
        return chosen
    ranked = most > top_pools  # else every visible pool is chosen and there is nothing to rank
    chunk = max(1, min(num_tokens, SCORE_WORKSPACE_BYTES // (4 * most))) if ranked else num_tokens
    order = torch.empty((chunk, most), dtype=torch.int32, device=queries.device) if ranked else chosen
    queries, head_weights = queries.contiguous(), head_weights.float().contiguous()
    ieee = queries.dtype == torch.float32 or INTERPRETED
    for first in range(0, num_tokens, chunk):
        count = min(chunk, num_tokens - first)
        if ranked:
            _score_kernel[(count, cdiv(most, SCORE_BLOCK))](
                queries, head_weights, pages, block_table, row_offsets, start_positions, order,
                heads, block_table.stride(0), most, num_rows, first, scale,
                POOL=pool, IEEE=ieee, PAGE=PAGE_TOKENS, BLOCK=SCORE_BLOCK, BLOCK_H=max(16, next_power(heads)), DIM=dim,
                BLOCK_D=max(16, next_power(dim)), num_warps=4, **NO_FUSION,
            )  # fmt: skip
        _select_kernel[(count,)](
            order, chosen, row_offsets, start_positions, most, num_rows, first, top_pools,
            POOL=pool, RANKED=ranked, BLOCK=RANK_BLOCK, BLOCK_TOP=next_power(top_pools), num_warps=8,
        )  # fmt: skip
    return chosen


@triton.jit
def _hyper_pre_kernel(
    x_ptr, mixes_ptr, base_ptr, scale_ptr, collapsed_ptr, post_ptr, comb_ptr,
    size, hidden, norm_eps, eps, iterations, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * size
    mixes_ptr += token * (2 + S) * S
    col = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        x = tl.load(x_ptr + first + col, mask=first + col < size, other=0.0).to(tl.float32)
        squares = tl.fma(x, x, squares)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + norm_eps)
    i = tl.arange(0, S)
    mix = tl.load(mixes_ptr + S + i) * inverse * tl.load(scale_ptr + 1) + tl.load(base_ptr + S + i)
    tl.store(post_ptr + token * S + i, 2.0 / (1.0 + tl.exp(-mix)))
    square = 2 * S + i[:, None] * S + i[None, :]
    logits = tl.load(mixes_ptr + square) * inverse * tl.load(scale_ptr + 2) + tl.load(base_ptr + square)
    comb = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    comb = comb / tl.sum(comb, axis=1)[:, None] + eps
    comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    for _ in range(1, iterations):
        comb = comb / (tl.sum(comb, axis=1)[:, None] + eps)
        comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    tl.store(comb_ptr + token * S * S + i[:, None] * S + i[None, :], comb)
    for first in range(0, hidden, BLOCK):
        live = first + col < hidden
        total = tl.zeros((BLOCK,), tl.float32)
        for stream in tl.static_range(S):
            pre = tl.load(mixes_ptr + stream) * inverse * tl.load(scale_ptr) + tl.load(base_ptr + stream)
            x = tl.load(x_ptr + stream * hidden + first + col, mask=live, other=0.0).to(tl.float32)
            total = tl.fma(x, tl.zeros_like(x) + (1.0 / (1.0 + tl.exp(-pre)) + eps), total)
        tl.store(collapsed_ptr + token * hidden + first + col, total, mask=live)


def hyper_pre(
    streams: torch.Tensor,
    mixes: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ops.hybrid.hyper_pre; the number of streams is a power of two."""
    num_tokens, count, hidden = streams.shape
    if next_power(count) != count:
        raise ValueError(f"hyper_pre: {count} streams; the Triton kernel takes powers of two")
    device = streams.device
    collapsed = torch.empty(num_tokens, hidden, dtype=streams.dtype, device=device)
    post = torch.empty(num_tokens, count, device=device)
    comb = torch.empty(num_tokens, count, count, device=device)
    if num_tokens:
        _hyper_pre_kernel[(num_tokens,)](
            streams.contiguous(), mixes.float().contiguous(), base, scale, collapsed, post, comb,
            count * hidden, hidden, norm_eps, eps, iterations, S=count, BLOCK=min(2048, next_power(hidden)),
            num_warps=4, **NO_FUSION,
        )  # fmt: skip
    return collapsed, post, comb


@triton.jit
def _hyper_post_kernel(x_ptr, y_ptr, post_ptr, comb_ptr, out_ptr, hidden, S: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < hidden
    y = tl.load(y_ptr + token * hidden + col, mask=live, other=0.0).to(tl.float32)
    for target in tl.static_range(S):
        total = y * tl.load(post_ptr + token * S + target)
        for stream in tl.static_range(S):
            x = tl.load(x_ptr + (token * S + stream) * hidden + col, mask=live, other=0.0).to(tl.float32)
            total = tl.fma(x, tl.zeros_like(x) + tl.load(comb_ptr + (token * S + stream) * S + target), total)
        tl.store(out_ptr + (token * S + target) * hidden + col, total, mask=live)


def hyper_post(streams: torch.Tensor, block_out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """See ops.hybrid.hyper_post."""
    num_tokens, count, hidden = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    block = min(1024, next_power(hidden))
    if num_tokens:
        _hyper_post_kernel[(num_tokens, cdiv(hidden, block))](
            streams.contiguous(), block_out.contiguous(), post, comb, out, hidden, S=count, BLOCK=block,
            num_warps=4, **NO_FUSION,
        )  # fmt: skip
    return out


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, experts, scaling,
    K: tl.constexpr, BLOCK: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    live = expert < experts
    logits = tl.load(logits_ptr + token * experts + expert, mask=live, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = scores + tl.load(bias_ptr + expert, mask=live, other=0.0)
    rank = tl.where(live, _rank(ranked, expert), -1)
    total = tl.zeros((), tl.float32)
    for slot in tl.static_range(K):
        here = rank == tl.max(rank, axis=0)
        chosen = tl.sum(tl.where(here, expert, 0), axis=0)
        weight = tl.sum(tl.where(here, scores, 0.0), axis=0)
        rank = tl.where(here, -1, rank)
        total += weight
        tl.store(ids_ptr + token * K + slot, chosen)
        tl.store(weights_ptr + token * K + slot, weight)
    divisor = total + 1e-20 if NORMALISE else 1.0
    for slot in tl.static_range(K):
        weight = tl.load(weights_ptr + token * K + slot)
        tl.store(weights_ptr + token * K + slot, weight / divisor * scaling)


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, normalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.hybrid.route."""
    num_tokens, experts = logits.shape
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits.float().contiguous(), bias, ids, weights, experts, scaling,
            K=top_k, BLOCK=next_power(experts), NORMALISE=normalise, num_warps=1, **NO_FUSION,
        )  # fmt: skip
    return ids, weights


@triton.jit
def _layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    live = col < size
    x = tl.load(x_ptr + row * size + col, mask=live, other=0.0).to(tl.float32)
    centred = tl.where(live, x - tl.sum(x, axis=0) / size, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / size + eps)
    weight = tl.load(weight_ptr + col, mask=live, other=0.0)
    bias = tl.load(bias_ptr + col, mask=live, other=0.0)
    tl.store(out_ptr + row * size + col, tl.fma(centred * inverse, weight, bias), mask=live)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.elementwise.layer_norm."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    if x.numel():
        _layer_norm_kernel[(x.numel() // size,)](
            x.contiguous(), weight, bias, out, size, eps, BLOCK=next_power(size), num_warps=1, **NO_FUSION
        )  # fmt: skip
    return out
