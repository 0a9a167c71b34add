"""Whether drafting pays at the present load, and how far: measured, per batch size, with hysteresis."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

_SMOOTHING = 0.1
"""Weight of a new step in the running mean of a step's seconds."""

_TOKEN_SMOOTHING = 0.04
"""The same for its tokens, which one row gains all or nothing: ten steps would say little."""

_LEAST_STEPS = 4
"""Steps of each kind before a bucket is judged, and of a probe."""

_SURE_STEPS = 12
_GIVE_UP_BELOW = 1.0
_GIVE_UP_EARLY_BELOW = 0.85
"""Gain below which drafting ends: after _SURE_STEPS drafting steps, and before (a few steps may have been unlucky)."""

_TRY_AGAIN_ABOVE = 1.05
_CHANGE_ABOVE = 1.04
"""How much better another draft length must look, or prove, before it replaces the present one."""

_REVIEW_EVERY = 16
"""Drafting steps between looks at the draft length."""

_PROBE_EVERY = 64
"""Plain steps per drafting step of a probe, in a bucket that is switched off (at twice the cost of a plain step they
take 1.6 % of the time; dearer ones come as much more rarely); drafting steps between plain ones in one that is
switched on (the yardstick moves with context and company)."""

_FRESH_STEPS = 512
"""Drafting steps after which what was measured at another draft length counts as forgotten: texts change."""

_CURIOUS_STEPS = 256
"""Drafting steps between trials of half and of twice the draft length where nothing speaks for them. Only a trial shows
that costs grow unevenly (a product over nine rows may cost twice one over eight), or that later drafts hold again."""

_TRY_ABOVE = 0.8
"""Share of the present gain that a trial must at least promise."""

_DEBT_STEPS = 32
"""Drafting steps that share what the drafter took once to read a request's prompt."""

_MOST_UNPAID = 512
"""Plain steps' worth of reading that may bring no draft (replies that end before their prompt is read) before the
bucket is left alone for _PROBE_EVERY times as long."""


@dataclass(slots=True)
class _Mean:
    """Running means over steps: seconds of a step, tokens that a row gained."""

    seconds: float = 0.0
    tokens: float = 1.0
    steps: int = 0
    seen_at: int = 0

    def add(self, seconds: float, tokens: float = 1.0) -> None:
        """Plain at first, then forgetting."""
        first = 1.0 / (self.steps + 1)
        self.seconds += (seconds - self.seconds) * max(_SMOOTHING, first)
        self.tokens += (tokens - self.tokens) * max(_TOKEN_SMOOTHING, first)
        self.steps += 1


@dataclass(slots=True)
class _Share:
    """Running share of drafts that held, of those reached: from one half on a plain mean, later forgetting."""

    value: float = 0.5
    count: int = 1

    def add(self, held: bool) -> None:
        """One more draft."""
        self.count += 1
        self.value += (held - self.value) * max(_SMOOTHING / 4, 1.0 / self.count)


@dataclass(slots=True)
class _Bucket:
    """One range of batch sizes. `acceptance[i]` is about drafts at position i; `overhead` is what a drafting step
    pays of the drafter's preparations."""

    length: int
    plain: _Mean = field(default_factory=_Mean)
    drafted: dict[int, _Mean] = field(default_factory=dict)
    acceptance: list[_Share] = field(default_factory=list)
    overhead: float = 0.0
    on: bool = True
    asked: int = 0
    since_other: int = 0
    probe_after: float = _PROBE_EVERY * _LEAST_STEPS
    probing: int = 0
    since_review: int = 0
    debt: float = 0.0
    unpaid: float = 0.0
    doubted: bool = False
    tried_at: int = 0
    tries_longer: bool = True
    clock: int = 0

    @property
    def gain(self) -> float:
        """Tokens per second with drafts of the present length over those without; 1 while too little is known."""
        return self.gain_of(self.length) or 1.0

    def gain_of(self, length: int) -> float | None:
        """The same for another length: measured, or foreseen from acceptance and the cost of a measured length."""
        if self.plain.steps < _LEAST_STEPS:
            return None
        known = self.drafted.get(length)
        if known is not None and length != self.length and self.clock - known.seen_at > _FRESH_STEPS:
            known = None
        if known is not None and known.steps >= _LEAST_STEPS:
            return self._rate(known.tokens, known.seconds)
        base = self.drafted.get(self.length)
        if base is None or base.steps < _LEAST_STEPS or len(self.acceptance) < min(length, self.length):
            return None
        # A step grows with its drafted rows: linear between no draft and the present length.
        seconds = self.plain.seconds + (base.seconds - self.plain.seconds) * length / self.length
        # Rows that drafted nothing, or less than they might have, would do so at another length as well.
        reach = min(1.0, (base.tokens - 1.0) / max(1e-9, self._expected(self.length) - 1.0))
        return self._rate(1.0 + reach * (self._expected(length) - 1.0), seconds)

    def _rate(self, tokens: float, seconds: float) -> float | None:
        """Tokens per second over those of a plain step."""
        seconds += self.overhead
        return tokens * self.plain.seconds / seconds if seconds > 0 else None

    def _expected(self, length: int) -> float:
        """Tokens of a row with `length` drafts; positions never drafted are taken to hold like the last known one."""
        total = reached = 1.0
        for i in range(length):
            reached *= self.acceptance[min(i, len(self.acceptance) - 1)].value
            total += reached
        return total

    def note_acceptance(self, held: Sequence[tuple[int, int]]) -> None:
        """(drafted, accepted) of each row."""
        for drafted, accepted in held:
            for i in range(min(drafted, accepted + 1)):
                if i == len(self.acceptance):
                    self.acceptance.append(_Share())
                self.acceptance[i].add(i < accepted)


class SpeculationControl:
    """Turns drafting up, down or off by what it costs and brings, and looks again now and then.

    A fixed schedule, rows of (from, to, k) over the number of decoding requests, bounds the draft length; ranges that
    no row names use max_draft. What it decides changes how fast a reply comes, never what it says.
    """

    def __init__(
        self,
        max_draft: int,
        schedule: tuple[tuple[int, int, int], ...] = (),
        *,
        measured: bool = True,
        first_length: int | None = None,
    ) -> None:
        """`measured` False keeps drafting at full length whatever it costs; `first_length` is where it starts."""
        self._max_draft = max_draft
        self._first_length = min(max_draft, first_length or max_draft)
        self._schedule = schedule
        self._measured = measured
        self._buckets: dict[int, _Bucket] = {}
        self.num_switches = 0
        self.num_length_changes = 0

    def limit(self, num_rows: int) -> int:
        """The most that the schedule allows when num_rows requests decode."""
        limit = self._max_draft
        for first, last, count in self._schedule:
            if first <= num_rows <= last:
                limit = min(limit, count)
        return limit

    def draft_length(self, num_rows: int) -> int:
        """Most drafted tokens per request when num_rows requests decode; 0 = decode plainly."""
        limit = self.limit(num_rows)
        if not limit or not self._measured:
            return limit
        bucket = self._bucket(num_rows)
        bucket.asked = 0
        if bucket.plain.steps < _LEAST_STEPS:
            return 0  # the plain step is the yardstick: measure it first
        bucket.since_other += 1
        if bucket.on:
            drafts = bucket.since_other < _PROBE_EVERY
        else:
            if not bucket.probing and bucket.since_other >= bucket.probe_after:
                bucket.probing = _LEAST_STEPS
                bucket.drafted.pop(bucket.length, None)  # what was measured long ago does not count
            drafts = bucket.probing > 0
        if drafts:
            bucket.asked = min(limit, bucket.length)
        return bucket.asked

    def observe(
        self,
        num_rows: int,
        drafted: bool,
        num_tokens: int,
        seconds: float,
        held: Sequence[tuple[int, int]] = (),
        preparation: float = 0.0,
    ) -> None:
        """Account for a step that only decoded: num_rows requests gained num_tokens tokens in `seconds`.

        `held`: (drafted, accepted) of the rows with drafts. `preparation`: seconds, not part of `seconds`, that the
        drafter took to read what it did not know yet; following drafts share them.
        """
        bucket = self._bucket(num_rows)
        bucket.debt += preparation
        if drafted != bucket.on:
            bucket.since_other = 0
        bucket.probing = max(0, bucket.probing - 1)
        if not drafted:
            bucket.plain.add(seconds)
            bucket.unpaid += preparation
            if preparation and bucket.unpaid > _MOST_UNPAID * bucket.plain.seconds:
                self._leave_alone(bucket)
            return
        bucket.unpaid = 0.0
        length = bucket.asked or min(self.limit(num_rows), bucket.length)
        bucket.overhead = bucket.debt / _DEBT_STEPS
        bucket.debt -= bucket.overhead
        tokens = num_tokens / num_rows
        bucket.clock += 1
        mean = bucket.drafted.setdefault(length, _Mean())
        mean.add(seconds, tokens)
        mean.seen_at = bucket.clock
        bucket.note_acceptance(held)
        if bucket.plain.seconds > 0:
            lost = (seconds + bucket.debt) / bucket.plain.seconds - tokens
            bucket.probe_after = _PROBE_EVERY * _LEAST_STEPS * max(1.0, lost)
        self._switch(bucket, num_rows)
        self._review(bucket, self.limit(num_rows))

    def _leave_alone(self, bucket: _Bucket) -> None:
        bucket.probe_after = _PROBE_EVERY * bucket.unpaid / bucket.plain.seconds
        bucket.probing = bucket.since_other = 0
        bucket.debt = max(0.0, bucket.debt - bucket.unpaid)
        bucket.unpaid = 0.0
        if bucket.on:
            bucket.on = False
            self.num_switches += 1

    def _switch(self, bucket: _Bucket, num_rows: int) -> None:
        known = bucket.drafted.get(bucket.length)
        sure = known is not None and known.steps >= _SURE_STEPS
        if bucket.on and bucket.gain < (_GIVE_UP_BELOW if sure else _GIVE_UP_EARLY_BELOW):
            bucket.since_review = _REVIEW_EVERY  # a shorter draft may still pay
            if not self._best_other(bucket, {*range(1, bucket.length), *bucket.drafted}, _GIVE_UP_BELOW):
                if bucket.doubted:
                    bucket.on = bucket.doubted = False
                    self.num_switches += 1
                else:
                    # Perhaps the whole machine has become slower since the last plain steps: measure those again.
                    bucket.doubted = True
                    bucket.plain = _Mean()
        elif bucket.on:
            bucket.doubted = False
        elif bucket.gain > _TRY_AGAIN_ABOVE:
            bucket.on = True
            self.num_switches += 1
        elif not bucket.probing:
            # The next probe tries a shorter draft; behind the shortest the first length comes again.
            bucket.length = bucket.length // 2 or min(self._first_length, self.limit(num_rows))

    def _review(self, bucket: _Bucket, limit: int) -> None:
        """Move to another draft length where it promises, or has shown, clearly more."""
        bucket.since_review += 1
        if bucket.since_review < _REVIEW_EVERY or not bucket.on:
            return
        bucket.since_review = 0
        lengths = {bucket.length // 2, bucket.length - 1, bucket.length + 1, 2 * bucket.length, *bucket.drafted}
        best = self._best_other(bucket, {k for k in lengths if 1 <= k <= limit}, bucket.gain * _CHANGE_ABOVE)
        if not best and bucket.clock - bucket.tried_at >= _CURIOUS_STEPS:
            bucket.tried_at = bucket.clock
            bucket.tries_longer = not bucket.tries_longer
            trial = min(2 * bucket.length, limit) if bucket.tries_longer else max(1, bucket.length // 2)
            best = self._best_other(bucket, {trial}, bucket.gain * _TRY_ABOVE)
        if best:
            bucket.length = best
            self.num_length_changes += 1

    @staticmethod
    def _best_other(bucket: _Bucket, lengths: Set[int], above: float) -> int:
        """The length of the largest gain beyond `above`; 0 where there is none."""
        gains = {k: gain for k in sorted(lengths) if k != bucket.length and (gain := bucket.gain_of(k)) is not None}
        best = max(gains, key=lambda k: gains[k], default=0)
        return best if best and gains[best] > above else 0

    def gains(self) -> dict[int, float]:
        """Measured gain per bucket, named by its largest batch size."""
        return {1 << number: bucket.gain for number, bucket in sorted(self._buckets.items())}

    def lengths(self) -> dict[int, int]:
        """Present draft length per bucket, named by its largest batch size; 0 = off."""
        return {1 << number: bucket.length if bucket.on else 0 for number, bucket in sorted(self._buckets.items())}

    def _bucket(self, num_rows: int) -> _Bucket:
        return self._buckets.setdefault(max(0, num_rows - 1).bit_length(), _Bucket(self._first_length))
