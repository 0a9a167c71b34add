"""What the sampler needs to know of each logits row, gathered from its request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slimserve.engine.request import SamplingParams
from slimserve.engine.sample.counts import TokenCounts
from slimserve.ops.reference.random import Purpose

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One logits row: `position` is the absolute position of the token to draw, `seed` 64 bits.

    `drafted` are tokens that stand before this position but are not committed yet (verification of drafts): they
    count for penalties and for min_tokens. `counts` may be None where no penalty is set. `num_output_tokens` counts
    committed output. `end_token_ids` are banned until min_tokens is reached. `allowed_bitmask` (structured output)
    holds one bit per token id, low bit first, in int32 words.
    """

    params: SamplingParams
    seed: int
    position: int
    num_output_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    counts: TokenCounts | None = None
    drafted: tuple[int, ...] = ()
    allowed_bitmask: npt.NDArray[np.int32] | None = None

    @property
    def needs_counts(self) -> bool:
        """Whether a penalty is set, so that `counts` must be given."""
        params = self.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def below_min_tokens(self) -> bool:
        """Whether the sequence may not end here yet."""
        return self.num_output_tokens + len(self.drafted) < self.params.min_tokens

    @property
    def edits_logits(self) -> bool:
        """Whether anything but temperature and filters changes this row."""
        params = self.params
        return bool(
            self.needs_counts
            or params.logit_bias
            or params.banned_token_ids
            or params.allowed_token_ids is not None
            or self.allowed_bitmask is not None
            or (self.below_min_tokens and self.end_token_ids)
        )


@dataclass(frozen=True, slots=True)
class RowEdit:
    """Sparse change of one row: at `token_ids`, x becomes (x > 0 ? x / divisor : x * divisor) + addend.

    A ban is an addend of -inf. `allowed` lists the only ids that stay, or is None.
    """

    token_ids: IntArray
    divisor: FloatArray
    addend: FloatArray
    allowed: IntArray | None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one sampler call, in the order of the logits."""

    rows: tuple[SamplingRow, ...]
    vocab_size: int
    purpose: Purpose = Purpose.TARGET
    edits: tuple[RowEdit | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        edits = tuple(build_edit(row, self.vocab_size) if row.edits_logits else None for row in self.rows)
        object.__setattr__(self, "edits", edits)

    @property
    def max_logprobs(self) -> int | None:
        """The most top logprobs that a row wants; None where no row wants any."""
        wanted = [row.params.logprobs for row in self.rows if row.params.logprobs is not None]
        return max(wanted) if wanted else None


def build_batch(rows: Sequence[SamplingRow], vocab_size: int, purpose: Purpose = Purpose.TARGET) -> SamplingBatch:
    """Gather rows; raises ValueError where a penalty is set and a row's counts are missing."""
    for row in rows:
        if row.needs_counts and row.counts is None:
            raise ValueError(f"position {row.position}: a penalty is set but the row has no token counts")
    return SamplingBatch(tuple(rows), vocab_size, purpose)


def build_edit(row: SamplingRow, vocab_size: int) -> RowEdit:
    """Merge penalties, bias and bans of one row into one change per token id."""
    params = row.params
    counted = row.counts.token_ids if row.counts is not None and row.needs_counts else np.empty(0, dtype=np.int64)
    drafted = np.asarray(row.drafted if row.needs_counts else (), dtype=np.int64)
    biased = np.asarray([token for token, _ in params.logit_bias], dtype=np.int64)
    banned = np.asarray(
        (*params.banned_token_ids, *(row.end_token_ids if row.below_min_tokens else ())), dtype=np.int64
    )
    every = np.concatenate((counted, drafted, biased, banned))
    token_ids, place = np.unique(every, return_inverse=True)
    divisor = np.ones(token_ids.size, dtype=np.float32)
    addend = np.zeros(token_ids.size, dtype=np.float32)
    of_counted, of_drafted, of_biased, of_banned = np.split(place, np.cumsum((counted.size, drafted.size, biased.size)))
    if row.needs_counts:
        appearances = np.zeros(token_ids.size, dtype=np.int64)
        if row.counts is not None:
            appearances[of_counted] = row.counts.output_counts
        np.add.at(appearances, of_drafted, 1)
        divisor[np.concatenate((of_counted, of_drafted))] = params.repetition_penalty
        addend -= (params.frequency_penalty * appearances + params.presence_penalty * (appearances > 0)).astype(
            np.float32
        )
    np.add.at(addend, of_biased, np.asarray([bias for _, bias in params.logit_bias], dtype=np.float32))
    addend[of_banned] = -np.inf
    known = (token_ids >= 0) & (token_ids < vocab_size)
    return RowEdit(token_ids[known], divisor[known], addend[known], _allowed(row, vocab_size))


def _allowed(row: SamplingRow, vocab_size: int) -> IntArray | None:
    allowed: IntArray | None = None
    if row.allowed_bitmask is not None:
        bits = np.unpackbits(row.allowed_bitmask.view(np.uint8), bitorder="little", count=None)[:vocab_size]
        allowed = np.flatnonzero(bits).astype(np.int64)
    if row.params.allowed_token_ids is not None:
        listed = np.unique(np.asarray(row.params.allowed_token_ids, dtype=np.int64))
        listed = listed[(listed >= 0) & (listed < vocab_size)]
        allowed = listed if allowed is None else np.intersect1d(allowed, listed)
    return allowed
