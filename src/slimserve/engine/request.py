"""A request and how it may be sampled and ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimserve.engine.sample.counts import TokenCounts


class FinishReason(Enum):
    """Why a request ended; every request ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestState(Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; temperature 0 is greedy. Bounds are checked at the door (serve/protocol).

    seed None draws a fresh seed at admission. logprobs None = none; n = chosen token plus the n best.
    allowed_token_ids None = all. penalties follow the OpenAI / CTRL definitions over prompt and output
    (repetition) and over output (presence, frequency).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    min_tokens: int = 0


@dataclass(slots=True)
class Request:
    """One sequence to generate; owned by the scheduler from submit to its single end.

    `output_token_ids` holds committed tokens only. `num_computed` is the number of tokens of
    prompt + output whose cache entries are committed. `deadline` is in seconds of time.monotonic(). Among waiting
    requests the larger `priority` goes first, then the earlier arrival. The scheduler draws `seed` (64 bits) where
    sampling names none; `counts` are kept where a penalty is set; prompt log probabilities of the first
    `num_prompt_scored` prompt tokens have been delivered.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    speculate: bool = True
    arrival: float = 0.0
    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    cache_cut_by: str | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    seed: int = 0
    counts: TokenCounts | None = None
    num_prompt_scored: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt plus committed output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities at one position, natural log of the raw model distribution, always finite.

    `top` lists (token id, logprob), best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
