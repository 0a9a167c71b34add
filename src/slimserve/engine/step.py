"""A step: what the scheduler plans on the host, and what comes back. No device tensor lives here."""

from __future__ import annotations

from dataclasses import dataclass

from slimserve.cache.manager import CacheSequence
from slimserve.engine.request import FinishReason, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: tokens at absolute positions start_position .. start_position + q_len - 1.

    `token_ids` are those q_len tokens; the last len(draft) of them are drafted and not yet accepted.
    `num_logits` trailing tokens produce logits: first `num_scored` whose next token is a known prompt token (prompt
    log probabilities), then those to sample from (0 while a prompt is not finished, 1 for decode, 1 + k to verify
    k drafts).
    """

    request: Request
    sequence: CacheSequence
    start_position: int
    token_ids: tuple[int, ...]
    draft: tuple[int, ...] = ()
    num_logits: int = 1
    num_scored: int = 0

    @property
    def q_len(self) -> int:
        """Tokens of this row."""
        return len(self.token_ids)

    @property
    def num_samples(self) -> int:
        """Tokens to draw: one per draft and one more, or none."""
        return self.num_logits - self.num_scored


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, in scheduling order."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows: the budget used."""
        return sum(row.q_len for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row produced: accepted tokens in order (drafts that held, then the target's own draw).

    `error` says why the row's values cannot be used; nothing of it is committed then.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_accepted_drafts: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One RowResult per row of the plan, in its order."""

    rows: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a commit tells the outside about one request: new tokens, and its end if it ended.

    `num_prompt_tokens`, `num_cached_tokens` and `cache_cut_by` are set from the first output on.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    cache_cut_by: str | None = None
