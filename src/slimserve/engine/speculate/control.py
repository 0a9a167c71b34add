"""Whether drafting pays at the present load: measured, per batch size, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.1
"""Weight of a new step in the running means."""

_LEAST_STEPS = 4
"""Steps of each kind before a bucket is judged."""

_GIVE_UP_BELOW = 1.0
_TRY_AGAIN_ABOVE = 1.05
_PROBE_EVERY = 64
"""Steps between probes of a bucket that is switched off (a probe at twice the cost of a plain step takes 1.6 % of the
time), and between plain steps of one that is switched on (the yardstick moves with context and company)."""


@dataclass(slots=True)
class _Bucket:
    """Means of one range of batch sizes: seconds and tokens per row of steps without and with drafts."""

    plain_seconds: float = 0.0
    plain_steps: int = 0
    draft_seconds: float = 0.0
    draft_tokens: float = 0.0
    draft_steps: int = 0
    on: bool = True
    since_other: int = 0

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over those without; 1 while too little is known."""
        if self.plain_steps < _LEAST_STEPS or self.draft_steps < _LEAST_STEPS or self.draft_seconds <= 0:
            return 1.0
        return self.draft_tokens * self.plain_seconds / self.draft_seconds


class SpeculationControl:
    """Turns drafting off where it costs more than it brings, and looks again now and then.

    A fixed schedule, rows of (from, to, k) over the number of decoding requests, bounds the draft length; ranges that
    no row names use max_draft. What it decides changes how fast a reply comes, never what it says.
    """

    def __init__(
        self, max_draft: int, schedule: tuple[tuple[int, int, int], ...] = (), *, measured: bool = True
    ) -> None:
        """`measured` False keeps drafting on whatever it costs."""
        self._max_draft = max_draft
        self._schedule = schedule
        self._measured = measured
        self._buckets: dict[int, _Bucket] = {}
        self.num_switches = 0

    def draft_length(self, num_rows: int) -> int:
        """Most drafted tokens per request when num_rows requests decode; 0 = decode plainly."""
        limit = self._max_draft
        for first, last, count in self._schedule:
            if first <= num_rows <= last:
                limit = min(limit, count)
        if not limit or not self._measured:
            return limit
        bucket = self._bucket(num_rows)
        if bucket.plain_steps < _LEAST_STEPS:
            return 0  # the plain step is the yardstick: measure it first
        bucket.since_other += 1
        probe = bucket.since_other >= _PROBE_EVERY
        return limit if bucket.on != probe else 0

    def observe(self, num_rows: int, drafted: bool, num_tokens: int, seconds: float) -> None:
        """Account for a step that only decoded: num_rows requests gained num_tokens tokens in `seconds`."""
        bucket = self._bucket(num_rows)
        if drafted != bucket.on:
            bucket.since_other = 0
        if not drafted:
            bucket.plain_seconds = _mean(bucket.plain_seconds, seconds, bucket.plain_steps)
            bucket.plain_steps += 1
            return
        bucket.draft_seconds = _mean(bucket.draft_seconds, seconds, bucket.draft_steps)
        bucket.draft_tokens = _mean(bucket.draft_tokens, num_tokens / num_rows, bucket.draft_steps)
        bucket.draft_steps += 1
        if bucket.on and bucket.gain < _GIVE_UP_BELOW:
            bucket.on = False
            self.num_switches += 1
        elif not bucket.on and bucket.gain > _TRY_AGAIN_ABOVE:
            bucket.on = True
            self.num_switches += 1

    def gains(self) -> dict[int, float]:
        """Measured gain per bucket, named by its largest batch size."""
        return {1 << number: bucket.gain for number, bucket in sorted(self._buckets.items())}

    def _bucket(self, num_rows: int) -> _Bucket:
        return self._buckets.setdefault(max(0, num_rows - 1).bit_length(), _Bucket())


def _mean(mean: float, value: float, count: int) -> float:
    """A running mean that is plain at first and forgets later."""
    return mean + (value - mean) * max(_SMOOTHING, 1.0 / (count + 1))
