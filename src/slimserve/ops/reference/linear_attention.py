"""Gated delta rule and its short convolution over open chunks: the torch reference.

State is kept as in layers.contract.RecurrentStorage: the state at the last multiple of 64 and the rows of the
open chunk. With S the chunk's opening state, G the cumulative log decay inside the chunk (per head, or per head
and key channel), and k, q normalised:

    d_j = beta_j * (v_j - (k_j exp G_j)^T S - sum_{l<j} [sum_c k_jc k_lc exp(G_jc - G_lc)] d_l)
    o_j = (q_j exp G_j)^T S + sum_{l<=j} [sum_c q_jc k_lc exp(G_jc - G_lc)] d_l
    S'  = diag(exp G_63) S + sum_l (k_l exp(G_63 - G_l)) d_l^T        (at a boundary only)

which is the chunked form of the delta rule with its triangular solve written row by row (Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule"; per-channel decay as in Kimi Linear, 2025). Differences
of G are formed before exp, so no factor overflows. Python loops run over rows and chunks, never over tokens.
"""

from __future__ import annotations

import torch

CHUNK = 64
NORM_EPS = 1e-6


def gate_multiply(x: torch.Tensor, gate: torch.Tensor, *, silu: bool) -> torch.Tensor:
    """x * sigmoid(gate), or x * silu(gate), in x's dtype."""
    factor = torch.sigmoid(gate.float())
    return (x.float() * (gate.float() * factor if silu else factor)).to(x.dtype)


def log_decay(u: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """lower_bound * sigmoid(-rate (u + bias)), or rate * softplus(u + bias): u [T, H(, K)], rate [H] <= 0."""
    shifted = u.float() + bias.view(u.shape[1:])
    per_head = rate.view(-1, *(1,) * (u.dim() - 2))
    if lower_bound is None:
        return per_head * torch.nn.functional.softplus(shifted)
    return lower_bound * torch.sigmoid(-per_head * shifted)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    open_conv: torch.Tensor,
    conv_tail: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> torch.Tensor:
    """Depthwise causal convolution of width W with SiLU, history from the open chunk.

    x [T, C] convolution inputs; weight [C, W] float32; open_conv [num_open, ring, C] and conv_tail
    [slots, W-1, C] (oldest first) are updated; the index tensors are those of GroupInput and StepInput.
    Returns [T, C] in x's dtype.
    """
    width = weight.shape[1]
    ring = open_conv.shape[1]
    out = torch.empty_like(x)
    offsets = row_offsets.tolist()
    for row, start in enumerate(start_positions.tolist()):
        begin, end = offsets[row], offsets[row + 1]
        num_new = end - begin
        open_row = int(open_index[row])
        base = start - start % CHUNK
        kept = torch.arange(max(base, start - (width - 1)), start, device=x.device)
        slot = int(state_in[row])
        tail = conv_tail[slot] if slot else torch.zeros_like(conv_tail[0])
        # positions start-(W-1) .. start+num_new-1, [W-1 + new, C]
        history = torch.cat([tail[kept.numel() :], open_conv[open_row, kept % ring], x[begin:end]]).float()
        windows = history.unfold(0, width, 1)  # [new, C, W]
        accumulated = torch.zeros(num_new, x.shape[1], device=x.device)
        for tap in range(width):
            accumulated += windows[:, :, tap] * weight[:, tap]
        out[begin:end] = (accumulated * torch.sigmoid(accumulated)).to(x.dtype)
        recent = torch.arange(max(start, start + num_new - ring), start + num_new, device=x.device)
        open_conv[open_row, recent % ring] = x[begin + recent - start]
        for index, boundary in enumerate(range(base + CHUNK, start + num_new + 1, CHUNK)):
            target = int(state_out[row, index])
            if target:
                stop = boundary - start + width - 1
                conv_tail[target] = history[stop - (width - 1) : stop].to(conv_tail.dtype)
    return out


def _normalise(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _spread(x: torch.Tensor, repeat: int, tiled: bool) -> torch.Tensor:
    """Key heads to value heads: [n, Hk, K] -> [n, Hk * repeat, K], grouped, or tiled as GGUF stores them."""
    return x.repeat(1, repeat, 1) if tiled else x.repeat_interleave(repeat, 1)


def _pair_weights(
    left: torch.Tensor, right: torch.Tensor, left_decay: torch.Tensor, right_decay: torch.Tensor
) -> torch.Tensor:
    """sum_c left_ic right_jc exp(G_ic - G_jc): left [m, H, K], right [n, H, K], decay [., H] or [., H, K] -> [H, m, n].

    Entries with j after i are meaningless (their exponent is clamped to 0) and masked by the caller.
    """
    if left_decay.dim() == 2:
        difference = left_decay.T[:, :, None] - right_decay.T[:, None, :]
        return torch.einsum("ihc,jhc->hij", left, right) * torch.exp(difference.clamp(max=0.0))
    difference = (left_decay[:, None] - right_decay[None]).clamp(max=0.0)  # [m, n, H, K]
    return torch.einsum("ihc,jhc,ijhc->hij", left, right, torch.exp(difference))


def _next_state(state: torch.Tensor, k: torch.Tensor, decay: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """The state after a whole chunk, [H, K, V]."""
    full = decay if decay.dim() == 3 else decay[:, :, None]
    last = full[-1]  # [H, K or 1]
    return torch.exp(last)[:, :, None] * state + torch.einsum("nhc,nhv->hcv", k * torch.exp(last - full), written)


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
    """Gated delta rule of every row of a step; updates the open rows and writes states at boundaries.

    q, k [T, key_heads, K] convolution outputs (normalised here, q scaled by K**-0.5); v [T, H, V]; g [T, H] or
    [T, H, K] float32 log decay (<= 0); beta [T, H] float32; storage as in RecurrentStorage. Value head h reads
    key head h // (H / key_heads), or h mod key_heads where `tiled` (GGUF's order). Returns float32 [T, H, V].
    """
    heads, key_dim = v.shape[1], q.shape[2]
    repeat = heads // q.shape[1]
    ring = open_k.shape[1]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    offsets = row_offsets.tolist()
    for row, start in enumerate(start_positions.tolist()):
        begin, end = offsets[row], offsets[row + 1]
        open_row, slot = int(open_index[row]), int(state_in[row])
        current = state[slot].float() if slot else torch.zeros_like(state[0], dtype=torch.float32)
        position, crossing, stop_position = start, 0, start + end - begin
        while position < stop_position:
            base = position - position % CHUNK
            stop = min(base + CHUNK, stop_position)
            new = slice(begin + position - start, begin + stop - start)
            old = torch.arange(base, position, device=q.device) % ring
            keys = torch.cat([open_k[open_row, old], k[new].to(open_k.dtype)])
            decay = torch.cat([open_g[open_row, old], g[new].float()]).cumsum(0)
            kn = _spread(_normalise(keys), repeat, tiled)
            qn = _spread(_normalise(q[new]) * key_dim**-0.5, repeat, tiled)
            o, d = _solve_rows(current, qn, kn, v[new].float(), decay, beta[new].float(), open_d[open_row, old])
            out[new] = o
            ring_rows = torch.arange(position, stop, device=q.device) % ring
            open_k[open_row, ring_rows] = k[new].to(open_k.dtype)
            open_g[open_row, ring_rows] = g[new].float()
            open_d[open_row, ring_rows] = d
            if stop == base + CHUNK:
                current = _next_state(current, kn, decay, torch.cat([open_d[open_row, old], d]))
                target = int(state_out[row, crossing])
                crossing += 1
                if target:
                    state[target] = current.to(state.dtype)
                    if state.dtype != torch.float32:
                        current = state[target].float()
            position = stop
    return out


def _solve_rows(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    written: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and written values of a chunk's new rows, after rows whose written values are known.

    state [H, K, V]; q, v, beta of the m new rows; k, decay of all n rows; written [n - m, H, V] -> o, d [m, H, V].
    """
    done = written.shape[0]
    grow = torch.exp(decay if decay.dim() == 3 else decay[:, :, None])[done:]
    pairs_k = _pair_weights(k[done:], k, decay[done:], decay)  # [H, m, n]
    pairs_q = _pair_weights(q, k, decay[done:], decay)
    target = v - torch.einsum("nhc,hcv->nhv", k[done:] * grow, state)
    target = target - torch.einsum("hij,jhv->ihv", pairs_k[:, :, :done], written)
    lower = torch.tril(pairs_k[:, :, done:], diagonal=-1)
    system = torch.eye(lower.shape[1], device=k.device) + beta.T[:, :, None] * lower
    new = torch.linalg.solve_triangular(
        system, (beta[:, :, None] * target).transpose(0, 1), upper=False, unitriangular=True
    ).transpose(0, 1)
    visible = torch.cat([pairs_q[:, :, :done], torch.tril(pairs_q[:, :, done:])], dim=2)
    out = torch.einsum("nhc,hcv->nhv", q * grow, state)
    return out + torch.einsum("hij,jhv->ihv", visible, torch.cat([written, new])), new
