"""Outputs of the timed sequence operations against plain float64 formulas that share no code with any kernel.

Each function gives a relative error |got - expected| / |expected| over what it looks at (see `Checked`); of long
outputs it looks at some tokens, rows and heads, because a float64 pass over everything would take longer than what is
timed. An output that breaks a rule (an index out of range, an unordered list) has an infinite error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from slimserve.layers.contract import BLOCK_TOKENS

Tensors = Mapping[str, torch.Tensor]
TOKENS = 4
NORM_EPS = 1e-6


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| in float64; infinite where it is no number."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))
    return error if math.isfinite(error) else math.inf


def some(count: int, most: int = TOKENS) -> list[int]:
    """At most `most` indices below `count`, spread evenly, the first and the last among them."""
    return sorted({round(place * (count - 1) / max(1, most - 1)) for place in range(most)})


def _place(t: Tensors, token: int) -> tuple[int, int]:
    """(row, absolute position) of a flat token."""
    offsets = t["row_offsets"].tolist()
    row = next(r for r in range(len(offsets) - 1) if offsets[r + 1] > token)
    return row, int(t["start_positions"][row]) + token - offsets[row]


def attention(t: Tensors, out: torch.Tensor, scale: float, window: int | None) -> float:
    """Softmax over the keys that some tokens see; t has q [T, Hq, D], k and v [pages, Hkv, 64, D] and the index."""
    got, expected = [], []
    for token in some(out.shape[0]):
        row, position = _place(t, token)
        first = 0 if window is None else max(0, position - window + 1)
        pages = t["block_table"][row, first // BLOCK_TOKENS : position // BLOCK_TOKENS + 1].long()
        seen = slice(first % BLOCK_TOKENS, position - first // BLOCK_TOKENS * BLOCK_TOKENS + 1)
        k, v = (t[name][pages].transpose(0, 1).flatten(1, 2)[:, seen].double() for name in ("k", "v"))  # [Hkv, n, D]
        q = t["q"][token].double().view(k.shape[0], -1, k.shape[2])  # [Hkv, Hq / Hkv, D]
        expected.append((torch.softmax(q @ k.transpose(1, 2) * scale, dim=-1) @ v).flatten(0, 1))
        got.append(out[token])
    return relative(torch.stack(got), torch.stack(expected))


def latent(t: Tensors, out: torch.Tensor, scale: float, pool: int) -> float:
    """Softmax over the members of the listed pools and the open pool's tail; q [T, H, C], latent [pages, 64, C]."""
    got, expected = [], []
    for token in some(out.shape[0]):
        row, position = _place(t, token)
        listed = t["pools"][token].long()
        members = listed[listed >= 0, None] * pool + torch.arange(pool, device=listed.device)
        tail = torch.arange((position + 1) // pool * pool, position + 1, device=listed.device)
        tokens = torch.cat([members.flatten(), tail])
        keys = t["latent"][t["block_table"][row, tokens // BLOCK_TOKENS].long(), tokens % BLOCK_TOKENS].double()
        expected.append(torch.softmax(t["q"][token].double() @ keys.T * scale, dim=-1) @ keys)
        got.append(out[token])
    return relative(torch.stack(got), torch.stack(expected))


def selection(t: Tensors, chosen: torch.Tensor, scale: float, top_pools: int) -> float:
    """Float64 scores of the chosen pools against the best ones, both sorted: pools that score alike may change places.

    t has queries [T, H, D], weights [T, H], pages [pages, pools, D].
    """
    got, expected = [], []
    per_page = t["pages"].shape[1]
    pool = BLOCK_TOKENS // per_page
    for token in some(chosen.shape[0]):
        row, position = _place(t, token)
        visible = (position + 1) // pool
        keys = t["pages"][t["block_table"][row, : -(-visible // per_page)].long()].flatten(0, 1)[:visible].double()
        dots = torch.relu(t["queries"][token].double() @ keys.T * scale)  # [H, P]
        scores = t["weights"][token].double() @ dots
        count = min(visible, top_pools)
        mine = chosen[token].long()
        kept, rest = mine[:count], mine[count:]
        ordered = bool((kept[1:] > kept[:-1]).all() and (kept >= 0).all() and (kept < visible).all())
        if not ordered or not bool((rest == -1).all()):
            return math.inf
        expected.append(scores.topk(count).values)
        got.append(scores[kept].sort(descending=True).values)
    return relative(torch.cat(got), torch.cat(expected))


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()


def delta_rule(before: Tensors, out: torch.Tensor, after: Tensors, tiled: bool = False) -> float:
    """The recurrence token by token, from the kept state and the chunk's kept rows, of some rows and heads.

    Looks at outputs, the last state that is written, and the written value of the last token where its chunk stays
    open. S = diag(exp g) S + k (beta (v - (diag(exp g) S)^T k))^T, o = S^T q.
    """
    t, errors = before, []
    heads, key_heads = t["v"].shape[1], t["q"].shape[1]
    picked = torch.tensor(some(heads), device=out.device)
    of_key = picked % key_heads if tiled else picked // (heads // key_heads)
    ring = t["open_k"].shape[1]

    def decayed(state: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        factor = g[picked].double().exp()
        return state * (factor[:, :, None] if factor.dim() == 2 else factor[:, None, None])

    for row in some(t["row_offsets"].numel() - 1, 2):
        begin, end = t["row_offsets"][row : row + 2].tolist()
        start, opened = int(t["start_positions"][row]), int(t["open_index"][row])
        base = start - start % BLOCK_TOKENS
        state = t["state"][int(t["state_in"][row])][picked].double()  # [heads, K, V]
        for position in range(base, start):
            place = (opened, position % ring)
            key = _unit(t["open_k"][place][of_key])
            state = decayed(state, t["open_g"][place]) + key[:, :, None] * t["open_d"][place][picked].double()[:, None]
        q, k = _unit(t["q"][begin:end][:, of_key]) * t["q"].shape[2] ** -0.5, _unit(t["k"][begin:end][:, of_key])
        v, beta = t["v"][begin:end][:, picked].double(), t["beta"][begin:end][:, picked].double()
        expected, crossing, written = [], 0, state
        for index in range(end - begin):
            state = decayed(state, t["g"][begin + index])
            taken = torch.einsum("hc,hcv->hv", k[index], state)
            written = beta[index][:, None] * (v[index] - taken)
            state = state + k[index][:, :, None] * written[:, None]
            expected.append(torch.einsum("hc,hcv->hv", q[index], state))
            if (start + index + 1) % BLOCK_TOKENS == 0:
                target = int(t["state_out"][row, crossing])
                crossing += 1
                if target:
                    errors.append(relative(after["state"][target][picked], state))
        errors.append(relative(out[begin:end][:, picked], torch.stack(expected)))
        last = start + end - begin - 1
        if (last + 1) % BLOCK_TOKENS:
            errors.append(relative(after["open_d"][opened, last % ring][picked], written))
    return max(errors)


def convolution(before: Tensors, out: torch.Tensor, after: Tensors) -> float:
    """Weighted sums of the last W inputs with SiLU, of some rows, and the inputs that are kept at a boundary."""
    t, errors = before, []
    width, ring = t["weight"].shape[1], t["open_conv"].shape[1]
    for row in some(t["row_offsets"].numel() - 1, 2):
        begin, end = t["row_offsets"][row : row + 2].tolist()
        start, opened = int(t["start_positions"][row]), int(t["open_index"][row])
        base = start - start % BLOCK_TOKENS
        tail = t["conv_tail"][int(t["state_in"][row])]
        earlier = [
            t["open_conv"][opened, position % ring] if position >= base else tail[position - base + width - 1]
            for position in range(start - width + 1, start)
        ]
        inputs = torch.cat([torch.stack(earlier).double(), t["x"][begin:end].double()])  # [W - 1 + q, C]
        count = end - begin
        total = sum(inputs[tap : tap + count] * t["weight"][:, tap].double() for tap in range(width))
        assert isinstance(total, torch.Tensor)
        errors.append(relative(out[begin:end], total * torch.sigmoid(total)))
        for crossing, boundary in enumerate(range(base + BLOCK_TOKENS, start + count + 1, BLOCK_TOKENS)):
            target = int(t["state_out"][row, crossing])
            if target:
                stop = boundary - start + width - 1
                errors.append(relative(after["conv_tail"][target], inputs[stop - width + 1 : stop]))
    return max(errors)
