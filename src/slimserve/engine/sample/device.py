"""The sampler on a CUDA device: every row drawn where its logits are, with one small upload and no download.

Only where a filter may reach past the candidates (top-p or min-p without top-k, or a very large top-k) is one flag
per row read back; such rows are drawn by the host sampler from their whole distribution.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from slimserve.engine.sample import host
from slimserve.engine.sample.batch import SamplingBatch, SamplingRow

CANDIDATES = 1024


def edited(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [L, V] with penalties, bias and bans applied to a copy; the same tensor where no row changes."""
    changed = [(r, edit) for r, edit in enumerate(batch.edits) if edit is not None]
    if not changed:
        return logits
    x = logits.clone()
    flat = np.concatenate([edit.token_ids + r * batch.vocab_size for r, edit in changed])
    values = np.stack(
        [
            np.concatenate([edit.divisor for _, edit in changed]),
            np.concatenate([edit.addend for _, edit in changed]),
        ]
    )
    where = torch.from_numpy(flat).to(x.device)
    divisor, addend = torch.from_numpy(values).to(x.device)
    old = x.view(-1)[where]
    x.view(-1)[where] = torch.where(old > 0, old / divisor, old * divisor) + addend
    for r, edit in changed:
        if edit.allowed is not None:
            allowed = torch.from_numpy(edit.allowed).to(x.device)
            kept = x[r, allowed]
            x[r] = -torch.inf
            x[r, allowed] = kept
    return x


def best_candidates(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best logits per row of x [L, V] and their ids, best first, equals by lowest id."""
    values, ids = x.topk(min(count, x.shape[1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _is_filtered(row: SamplingRow, vocab_size: int) -> bool:
    params = row.params
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def sample_device(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Token ids [L] int64 for logits [L, V] float32 on the device."""
    from slimserve.ops.triton import sampling

    x = edited(logits, batch)
    rows, vocab = batch.rows, batch.vocab_size
    greedy = [row.params.temperature < host.GREEDY_BELOW for row in rows]
    filtered = [not g and _is_filtered(row, vocab) for g, row in zip(greedy, rows, strict=True)]
    floats = torch.tensor(
        [
            [1.0 if g else 1.0 / row.params.temperature for g, row in zip(greedy, rows, strict=True)],
            [row.params.top_p for row in rows],
            [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows],
        ],
        dtype=torch.float32,
    ).to(x.device, non_blocking=True)
    seeds = [(row.seed & (1 << 64) - 1) - (1 << 64 if row.seed & 1 << 63 else 0) for row in rows]
    kinds = [0 if g else 2 if f else 1 for g, f in zip(greedy, filtered, strict=True)]
    tops = [row.params.top_k if 0 < row.params.top_k < vocab else 0 for row in rows]
    integers = torch.tensor([seeds, [row.position for row in rows], tops, kinds], dtype=torch.int64)
    seed, position, top_k, kind = integers.to(x.device, non_blocking=True)
    inverse, top_p, log_min_p = floats
    draw = (seed, position, int(batch.purpose))
    best, lowest, total, drawn = sampling.row_statistics(x, inverse, None if all(greedy) else draw)
    tokens = lowest.long()
    if drawn is not None:
        tokens = torch.where(kind == 1, drawn.long(), tokens)
    if any(filtered):
        values, ids = best_candidates(torch.nan_to_num(x, nan=-1e30, posinf=1e30, neginf=-1e30), CANDIDATES)
        narrow, incomplete = sampling.draw_candidates(
            values, ids, vocab, (inverse, best, total), (top_k.int(), top_p, log_min_p), draw
        )
        tokens = torch.where(kind == 2, narrow.long(), tokens)
        if any(f and not 0 < t <= CANDIDATES for f, t in zip(filtered, tops, strict=True)):
            tokens = _redraw(logits, batch, tokens, incomplete * (kind == 2))
    return tokens


def _redraw(logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor, incomplete: torch.Tensor) -> torch.Tensor:
    for r in torch.nonzero(incomplete).flatten().tolist():
        row = logits[r].cpu().numpy()
        tokens[r] = host.sample_row(row, batch.rows[r], batch.edits[r], batch.purpose)
    return tokens


def score_device(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of token_ids [L], ids and log probabilities of the num_top best, of raw logits [L, V]."""
    from slimserve.ops.triton import sampling

    x = torch.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
    ones = torch.ones(x.shape[0], dtype=torch.float32, device=x.device)
    best, _, total, _ = sampling.row_statistics(x, ones)
    norm = best + torch.log(total)
    chosen = x.gather(1, token_ids.view(-1, 1))[:, 0] - norm
    values, ids = best_candidates(x, num_top + 8)
    values, ids = values[:, :num_top] - norm.unsqueeze(1), ids[:, :num_top]
    return chosen.clamp(min=host.LOGPROB_FLOOR), ids, values.clamp(min=host.LOGPROB_FLOOR)
