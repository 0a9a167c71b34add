"""What the scheduler knows about a request, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slimserve.cache.manager import CacheSequence, Prompt
from slimserve.engine.request import Request


@dataclass(slots=True, eq=False)
class Job:
    """A request and what the scheduler knows about it.

    `serial` counts arrivals; `num_known` blocks of a waiting prompt were in the prefix index when it was last seen.
    """

    request: Request
    serial: int
    prompt: Prompt | None = None
    sequence: CacheSequence | None = None
    num_known: int = 0
    steps_refused: int = 0
    refused_at: int = -1
    in_flight: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Place among waiting and running requests."""
        return -self.request.priority, self.serial

    @property
    def cost(self) -> tuple[int, int, int]:
        """What giving way would lose: the least of these does."""
        return self.request.priority, self.request.num_computed, -self.serial

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet."""
        return self.request.num_tokens - self.request.num_computed


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    decode_rows: int = 0
    decode_tokens: int = 0
    num_preemptions: int = 0
    num_refused: int = 0
    cut_by: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)

    def note_decode(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """A row of one known token and num_drafts drafts gave num_tokens tokens. Drafts count per position."""
        self.decode_rows += 1
        self.decode_tokens += num_tokens
        self.drafted_tokens += num_drafts
        self.accepted_tokens += num_accepted
        while len(self.drafted_at) < num_drafts:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(num_drafts):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < num_accepted


def tokens_of(request: Request, start: int, end: int) -> list[int]:
    """Tokens start .. end - 1 of prompt and output."""
    prompt = request.prompt_token_ids
    if end <= len(prompt):
        return prompt[start:end]
    first = max(0, start - len(prompt))
    return [*prompt[start:], *request.output_token_ids[first : end - len(prompt)]]
