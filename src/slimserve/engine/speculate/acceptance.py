"""Which drafts of a row stand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slimserve.engine.request import TokenLogprob
from slimserve.engine.sample import SamplingRow
from slimserve.engine.sample.batch import build_edit
from slimserve.engine.speculate.distribution import Distribution, certain, distribution
from slimserve.engine.step import Row, RowResult
from slimserve.ops.reference.random import Purpose, random_bits, uniform


def accept_equal(
    row: Row, drawn: Sequence[tuple[int, TokenLogprob | None]], scored: tuple[TokenLogprob, ...]
) -> RowResult:
    """A draft holds when it equals the draw that plain decoding would have made at its position."""
    accepted = 0
    while accepted < len(row.draft) and drawn[accepted][0] == row.draft[accepted]:
        accepted += 1
    kept = drawn[: accepted + 1]
    logprobs = tuple(logprob for _, logprob in kept if logprob is not None)
    return RowResult(tuple(token for token, _ in kept), logprobs, scored, accepted)


def accept_by_ratio(
    draft: Sequence[int],
    drafted_from: Sequence[Distribution],
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    vocab_size: int,
) -> list[int]:
    """Tokens that stand: accepted drafts, then one of the target's (Leviathan et al., arXiv:2211.17192).

    Draft d of distribution q holds with probability min(1, p(d) / q(d)), p being the target's; the first that does
    not is replaced by a draw from max(0, p - q). logits [1 + k, V] and rows are the target's, one per draft and one
    more. A drafter that names no distribution counts as certain of its draft. p and q are both cut to the request's
    own filters. The three kinds of random numbers (draft, acceptance, residual) are independent.
    """
    table = logits.cpu().numpy()
    tokens: list[int] = []
    for i, row in enumerate(rows):
        edit = build_edit(row, vocab_size) if row.edits_logits else None
        target = distribution(table[i], row, edit)
        if i == len(draft):
            return [*tokens, target.draw(row.seed, row.position, Purpose.TARGET)]
        token = draft[i]
        source = drafted_from[i] if i < len(drafted_from) else certain(token)
        bits = random_bits(np.asarray([token], dtype=np.int64), row.seed, row.position, Purpose.ACCEPT)
        if float(uniform(bits)[0]) * source.of(token) >= target.of(token):
            return [*tokens, target.without(source).draw(row.seed, row.position, Purpose.RESIDUAL)]
        tokens.append(token)
    raise AssertionError("a row has one logits row more than drafts")
