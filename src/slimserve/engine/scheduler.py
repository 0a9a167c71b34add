"""Which rows the next step has. Continuous batching with one token budget, in terms of rows alone.

Order of a plan: rows that decode (they always run), then prompts that have begun, then waiting requests. Under
memory pressure the cheapest request gives way and is recomputed later. The request that is dearest (priority, then
work done, then arrival) never gives way, so every step progresses, and every admitted request ends.
"""

from __future__ import annotations

import bisect
import secrets
import time
from collections.abc import Callable, Sequence

from slimserve.cache.contract import PrefixHit
from slimserve.cache.groups import blocks_of
from slimserve.cache.manager import CacheManager, Prompt
from slimserve.engine.config import SchedulerConfig
from slimserve.engine.job import Job, SchedulerCounters, tokens_of
from slimserve.engine.request import FinishReason, Request, RequestState, TokenLogprob
from slimserve.engine.speculate.contract import Drafter
from slimserve.engine.speculate.control import SpeculationControl
from slimserve.engine.speculate.planner import DraftPlanner
from slimserve.engine.step import RequestOutput, Row, RowResult, StepPlan, StepResult
from slimserve.errors import RequestError
from slimserve.layers.contract import BLOCK_TOKENS

LEAST_PREFILL = 16
_MOST_LOOKED_AT = 64
"""Waiting requests that one step looks at."""

_RETRY_STEPS = 16
"""Steps after which a request that did not fit is tried again though none has ended: pages also come free when drafts
fall and when two prompts turn out to share a block, and fewer are needed when a shared beginning becomes known."""

SCORED_STEP = 64
"""Most tokens of a step whose prompt log probabilities are wanted, of all requests together: each needs a row of
logits, which is as wide as the vocabulary."""


class Scheduler:
    """Owns all requests from submit to their single end; `plan` and `commit` alternate."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        *,
        end_token_ids: frozenset[int] = frozenset(),
        drafter: Drafter | None = None,
        control: SpeculationControl | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = SchedulerCounters()
        self._config = config
        self._cache = cache
        self._end_token_ids = end_token_ids
        self._drafting = None
        if drafter is not None:
            self._drafting = DraftPlanner(cache, drafter, control or SpeculationControl(0))
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._timed: dict[str, Job] = {}
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._serial = 0
        self._scored_left = 0
        self._ended: list[RequestOutput] = []

    # Requests come and go.

    @property
    def num_waiting(self) -> int:
        """Requests that hold no memory."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self._running)

    @property
    def drafting_seconds(self) -> float:
        """What the drafter took when the last step was planned."""
        return self._drafting.seconds if self._drafting is not None else 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running or self._ended)

    def jobs(self) -> list[Job]:
        """Records of all requests that have not ended."""
        return list(self._jobs.values())

    def submit(self, request: Request) -> None:
        """Queue a request; raises RequestError where it can never run (400), or not now (429)."""
        try:
            self._check(request)
        except RequestError:
            self.counters.num_refused += 1
            raise
        seed = request.sampling.seed
        request.seed = (secrets.randbits(64) if seed is None else seed) & 0xFFFF_FFFF_FFFF_FFFF
        request.state = RequestState.WAITING
        self._serial += 1
        job = Job(request, self._serial)
        self._jobs[request.request_id] = job
        if request.deadline is not None:
            self._timed[request.request_id] = job
        bisect.insort(self._waiting, job, key=lambda j: j.order)

    def _check(self, request: Request) -> None:
        prompt, most = len(request.prompt_token_ids), request.max_tokens
        # An end that is not delivered yet would be taken for the end of a new request of the same id.
        if request.request_id in self._jobs or any(end.request_id == request.request_id for end in self._ended):
            raise RequestError(
                f"request id {request.request_id!r} is in use; choose another", code="duplicate_request_id"
            )
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        if most < 0:
            raise RequestError(f"max_tokens is {most}; it must be at least 0", param="max_tokens")
        reason = self._cache.refusal(prompt + most)
        if reason is not None:
            raise RequestError(
                f"the prompt has {prompt} tokens and max_tokens asks for {most}, but {reason}; "
                f"prompt and reply together may have at most {self._cache.max_request_tokens} tokens",
                param="max_tokens" if prompt < self._cache.max_request_tokens else "prompt",
                code="context_length_exceeded",
            )
        if len(self._waiting) >= self._config.max_queue:
            raise RequestError(
                f"{len(self._waiting)} requests are waiting, which is the limit; try again later",
                code="queue_full",
                status=429,
            )

    def abort(self, request_id: str) -> None:
        """End a request now; unknown and ended ids are ignored."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._end(job, FinishReason.ABORT)

    def abort_all(self, reason: FinishReason, error: str | None = None, *, discard: bool = False) -> None:
        """End every request; `discard` also distrusts what they have computed."""
        for job in list(self._jobs.values()):
            self._end(job, reason, error, discard=discard)

    def abandon(self, error: str) -> list[RequestOutput]:
        """End every request without touching the caches, whose books may be wrong."""
        for job in list(self._jobs.values()):
            job.in_flight = True  # nobody lands it, nothing is released
            self._end(job, FinishReason.ERROR, error)
        return self.take_ended()

    def take_ended(self) -> list[RequestOutput]:
        """Ends that no commit has reported: aborts, deadlines, failures."""
        ended, self._ended = self._ended, []
        return ended

    # One step.

    def plan(self) -> StepPlan:
        """The rows of the next step; none only where nothing waits or runs."""
        self._expire()
        rows: dict[int, Row] = {}
        for job in [job for job in self._running if job.num_pending == 1]:
            if job.sequence is not None:
                self._plan_decode(job, rows)
        if self._drafting is not None:
            self._drafting.extend(rows)
        budget = self._config.token_budget - sum(row.q_len for row in rows.values())
        if rows:
            budget = min(budget, self._config.mixed_prefill_budget)
        budget = max(budget, min(LEAST_PREFILL, self._config.token_budget))
        self._scored_left = SCORED_STEP
        self._plan_prefill(rows, budget)
        if not rows and self._waiting and not self._running:
            self._end(self._waiting[0], FinishReason.ERROR, "the cache cannot hold this request, though it should")
        for job in self._running:
            job.in_flight = job.serial in rows
        return StepPlan(tuple(rows.values()))

    def _plan_decode(self, job: Job, rows: dict[int, Row]) -> None:
        request = job.request
        if self._reserve(job, request.num_tokens, rows):
            assert job.sequence is not None
            last = (request.output_token_ids or request.prompt_token_ids)[-1]
            rows[job.serial] = Row(request, job.sequence, request.num_computed, (last,))

    def _plan_prefill(self, rows: dict[int, Row], budget: int) -> None:
        begun = [job for job in self._running if job.num_pending > 1 and job.serial not in rows]
        others = len(begun) > 1 or bool(self._waiting)
        for place, job in enumerate(begun):
            if job.sequence is None or budget <= 0:
                continue
            # A long prompt leaves a quarter of the step to those behind it, so that a short one need not wait.
            share = budget - budget // 4 if others and place == 0 and budget > BLOCK_TOKENS else budget
            budget -= self._plan_chunk(job, rows, share)
        while budget > 0 and (admitted := self._admit_next(rows)) is not None:
            length = self._plan_chunk(admitted, rows, budget)
            if not length:
                return
            budget -= length
        if begun and budget >= BLOCK_TOKENS and begun[0].serial in rows and not self._is_scored(begun[0].request):
            self._widen(begun[0], rows, budget)

    def _widen(self, job: Job, rows: dict[int, Row], budget: int) -> None:
        """Give the first prompt what nobody else wanted of the step."""
        assert job.sequence is not None
        length = rows[job.serial].q_len
        self._cache.rollback(job.sequence)
        self._plan_chunk(job, rows, length + budget)

    def _plan_chunk(self, job: Job, rows: dict[int, Row], share: int) -> int:
        """Plan up to `share` tokens of a job's prompt (and of the output it had before preemption); how many."""
        request, start = job.request, job.request.num_computed
        scored = self._is_scored(request)
        length = min(job.num_pending, share, self._scored_left if scored else share)
        if length <= 0:
            return 0
        if length < job.num_pending and (start + length) % BLOCK_TOKENS < length:
            length -= (start + length) % BLOCK_TOKENS  # whole blocks where the prompt goes on
        if not self._reserve(job, start + length, rows):
            return 0
        assert job.sequence is not None
        token_ids = tuple(tokens_of(request, start, start + length))
        ends = length == job.num_pending
        num_scored = 0
        if scored:
            last_scored = min(start + length, len(request.prompt_token_ids) - 1)
            num_scored = max(0, last_scored - max(start, request.num_prompt_scored))
            self._scored_left -= length
        rows[job.serial] = Row(request, job.sequence, start, token_ids, (), num_scored + ends, num_scored)
        return length

    def _reserve(self, job: Job, end: int, rows: dict[int, Row]) -> bool:
        """Make room, at the cost of the cheapest requests; False where the job itself is the cheapest."""
        while job.sequence is not None and not self._cache.reserve(job.sequence, end):
            victim = min(self._running, key=lambda other: other.cost)
            if victim is job and len(self._running) == 1:
                self._end(job, FinishReason.ERROR, "the cache cannot hold this request, though it should")
                return False
            self._preempt(victim, rows)
        return job.sequence is not None

    def _preempt(self, job: Job, rows: dict[int, Row]) -> None:
        assert job.sequence is not None
        rows.pop(job.serial, None)
        self._cache.release(job.sequence)
        job.sequence = job.prompt = None
        job.num_known = 0
        job.refused_at = -1
        job.request.num_computed = 0
        job.request.num_preemptions += 1
        job.request.state = RequestState.PREEMPTED
        self.counters.num_preemptions += 1
        self._running.remove(job)
        bisect.insort(self._waiting, job, key=lambda j: j.order)

    # Admission.

    def _admit_next(self, rows: dict[int, Row]) -> Job | None:
        """Start the first waiting request that fits. One that does not may be passed, by its equals in priority and
        until it has aged."""
        passed = 0
        for place, job in enumerate(self._waiting[:_MOST_LOOKED_AT]):
            if job.request.priority != self._waiting[0].request.priority or passed > self._config.skip_ahead:
                break
            full = len(self._running) >= self._config.max_sequences
            if not full and (self._is_being_computed(job) or (self._is_scored(job.request) and self._scored_left <= 0)):
                continue
            if self._admit(job) or (place == 0 and self._make_way(job, rows)):
                return job
            if full or job.steps_refused >= self._config.ageing_steps:
                break
            passed += 1
        return None

    def _is_being_computed(self, job: Job) -> bool:
        """Whether a running prompt is about to compute the next block of this one: waiting for it computes it once."""
        owners = [owner for owner in self._running if owner.num_pending > 1]
        if not owners or self._is_scored(job.request):
            return False
        prompt = self._prompt_of(job)
        hashes = prompt.hashes[: (prompt.num_tokens - 1) // BLOCK_TOKENS]
        job.num_known = known = self._cache.known_blocks(prompt, job.num_known)
        if known >= len(hashes):
            return False
        return any(
            owner.prompt is not None
            and owner.request.num_computed <= known * BLOCK_TOKENS
            and owner.prompt.hashes[known : known + 1] == hashes[known : known + 1]
            for owner in owners
        )

    @staticmethod
    def _is_scored(request: Request) -> bool:
        """Whether prompt log probabilities are still owed: then every prompt token must be computed."""
        return request.sampling.prompt_logprobs and request.num_prompt_scored < len(request.prompt_token_ids) - 1

    def _prompt_of(self, job: Job) -> Prompt:
        if job.prompt is None:
            request = job.request
            job.prompt = self._cache.prompt(tokens_of(request, 0, request.num_tokens), request.cache_salt)
        return job.prompt

    def _make_way(self, job: Job, rows: dict[int, Row]) -> bool:
        """Preempt requests of lower priority until the job fits."""
        while True:
            victim = min(self._running, key=lambda other: other.cost, default=None)
            if victim is None or victim.request.priority >= job.request.priority:
                return False
            self._preempt(victim, rows)
            job.refused_at = -1
            if self._admit(job):
                return True

    def _admit(self, job: Job) -> bool:
        if len(self._running) >= self._config.max_sequences:
            return False
        if job.refused_at == self._cache.num_releases and job.steps_refused % _RETRY_STEPS:
            job.steps_refused += 1
            return False
        request = job.request
        admission = self._cache.admit(
            self._prompt_of(job), use_prefix=not self._is_scored(request), headroom=self._headroom(job)
        )
        if admission is None:
            job.refused_at = self._cache.num_releases
            job.steps_refused += 1
            return False
        job.sequence, hit = admission
        self._note_hit(request, hit)
        request.num_computed = hit.num_tokens
        request.state = RequestState.RUNNING
        job.steps_refused = 0
        self._waiting.remove(job)
        bisect.insort(self._running, job, key=lambda j: j.order)
        return True

    def _most_kept(self, request: Request) -> int:
        """Tokens whose entries the caches hold at the longest reply's end: its last token is never computed."""
        return len(request.prompt_token_ids) + max(0, request.max_tokens - 1)

    def _headroom(self, job: Job) -> int:
        """Pages to leave when `job` is admitted: one for every request, itself included, that may yet need more than it
        holds, but never more than requests run. Replies that end in their last page need none: as many requests of the
        longest length run at once as the caches were planned for."""
        grows = self._most_kept(job.request) > blocks_of(job.request.num_tokens) * BLOCK_TOKENS
        growing = sum(
            other.sequence is not None and self._cache.may_grow(other.sequence, self._most_kept(other.request))
            for other in self._running
        )
        return min(len(self._running), grows + growing)

    def _note_hit(self, request: Request, hit: PrefixHit) -> None:
        if request.num_preemptions:
            return
        request.num_cached, request.cache_cut_by = hit.num_tokens, hit.cut_by
        self.counters.prefix_query_tokens += len(request.prompt_token_ids)
        self.counters.prefix_hit_tokens += hit.num_tokens
        if hit.cut_by is not None:
            self.counters.cut_by[hit.cut_by] += 1

    # What a step brought.

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take a step's results in; returns what each request gained, ends included."""
        outputs = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            job = self._landed(row)
            if job is None:
                continue
            if row_result.error is not None:
                self._end(job, FinishReason.ERROR, row_result.error, discard=True)
                continue
            output = self._commit_row(job, row, row_result)
            if output is not None:
                outputs.append(output)
        return outputs + self.take_ended()

    def fail(self, plan: StepPlan, error: str) -> list[RequestOutput]:
        """A step was lost: its requests end, and nothing that it may have written is used again."""
        for row in plan.rows:
            job = self._landed(row, discard=True)
            if job is not None:
                self._end(job, FinishReason.ERROR, error, discard=True)
        return self.take_ended()

    def _landed(self, row: Row, *, discard: bool = False) -> Job | None:
        """The row's job; None where its request ended while the step ran (its memory is free from now on)."""
        job = self._jobs.get(row.request.request_id)
        if job is None or job.request is not row.request:
            (self._cache.discard if discard else self._cache.release)(row.sequence)
            return None
        job.in_flight = False
        return job

    def _commit_row(self, job: Job, row: Row, result: RowResult) -> RequestOutput | None:
        request = job.request
        kept, reason = self._until_end(request, result.token_ids)
        known = row.q_len - len(row.draft)
        # The last token of a reply is never computed without drafts: then it is not kept with them, so that both
        # leave the same blocks behind.
        computed = known + min(result.num_accepted_drafts, max(0, kept - 1))
        self._cache.commit(row.sequence, row.token_ids[:computed])
        request.num_computed += computed
        request.num_prompt_scored += len(result.prompt_logprobs)
        token_ids = result.token_ids[:kept]
        request.output_token_ids.extend(token_ids)
        if request.counts is not None:
            for token in token_ids:
                request.counts.append(token)
        self.counters.prompt_tokens += max(0, min(known, len(request.prompt_token_ids) - row.start_position))
        self.counters.output_tokens += kept
        if known == 1 and row.num_samples:
            self.counters.note_decode(len(row.draft), result.num_accepted_drafts, kept)
        if reason is not None:
            self._close(job, reason)
        elif not (token_ids or result.prompt_logprobs):
            return None
        return self._output(request, token_ids, result.logprobs[:kept], result.prompt_logprobs, reason)

    def _until_end(self, request: Request, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the new tokens stand, and the end that the last of them is."""
        if token_ids and not request.max_tokens:
            return 0, FinishReason.LENGTH  # only the prompt was wanted
        ends = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._end_token_ids
        num_output = len(request.output_token_ids)
        num_prompt = len(request.prompt_token_ids)
        for kept, token in enumerate(token_ids, start=1):
            num_output += 1
            if token in ends and num_output > request.sampling.min_tokens:
                return kept, FinishReason.STOP
            if num_output >= request.max_tokens or num_prompt + num_output >= self._cache.max_request_tokens:
                return kept, FinishReason.LENGTH
        return len(token_ids), None

    # Ends.

    def _expire(self) -> None:
        if not self._timed:
            return
        now = self._clock()
        for job in list(self._timed.values()):
            if job.request.deadline is not None and job.request.deadline <= now:
                self._end(job, FinishReason.ERROR, "the deadline of the request has passed")

    def _end(self, job: Job, reason: FinishReason, error: str | None = None, *, discard: bool = False) -> None:
        self._close(job, reason, discard=discard)
        self._ended.append(self._output(job.request, (), (), (), reason, error))

    def _close(self, job: Job, reason: FinishReason, *, discard: bool = False) -> None:
        """Forget a request and free its memory; a step that is under way frees it when it lands."""
        request = job.request
        request.finish_reason, request.state = reason, RequestState.FINISHED
        self.counters.finished[reason.value] += 1
        del self._jobs[request.request_id]
        self._timed.pop(request.request_id, None)
        if self._drafting is not None:
            self._drafting.release(request.request_id)
        (self._waiting if job.sequence is None else self._running).remove(job)
        if job.sequence is not None and not job.in_flight:
            (self._cache.discard if discard else self._cache.release)(job.sequence)
        job.sequence = None

    @staticmethod
    def _output(
        request: Request,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        prompt_logprobs: tuple[TokenLogprob, ...],
        reason: FinishReason | None,
        error: str | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached,
            cache_cut_by=request.cache_cut_by,
        )
