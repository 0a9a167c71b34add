"""One row per request on standard error, and the same facts into the metrics."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from slimserve.errors import printable
from slimserve.serve.metrics import Metrics

_HEADER = "time      endpoint      status  prompt  cached   first tok  output    tok/s  end           total"


@dataclass(slots=True)
class RequestRow:
    """What happened to one HTTP request; ends exactly once."""

    endpoint: str
    metrics: Metrics
    log: RequestLog
    arrival: float = field(default_factory=time.monotonic)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    _last_of_choice: dict[int, float] = field(default_factory=dict)
    _ended: bool = False

    def saw(self, choice: int, count: int) -> None:
        """`count` tokens of a choice arrived together."""
        if count:
            now = time.monotonic()
            if self.first_token_at is None:
                self.first_token_at = now
                self.metrics.first_token.observe(now - self.arrival)
            previous = self._last_of_choice.get(choice)
            if previous is not None:
                for _ in range(count):
                    self.metrics.inter_token.observe((now - previous) / count)
            self.num_output_tokens += count
            self.last_token_at = now
            self._last_of_choice[choice] = now

    def end(self, outcome: str, *, status: int = 200, reason: str | None = None) -> None:
        """Write the row; `outcome` is a finish reason, "disconnect" or an error's code. Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        total = time.monotonic() - self.arrival
        self.metrics.requests.labels(self.endpoint, outcome).inc()
        self.metrics.prompt_tokens.inc(self.num_prompt_tokens)
        self.metrics.cached_tokens.inc(self.num_cached_tokens)
        self.metrics.generated_tokens.inc(self.num_output_tokens)
        self.metrics.total.observe(total)
        self.log.write(self, outcome, status, total, reason)

    @property
    def first_token_seconds(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first one, over the time they took."""
        if self.first_token_at is None or self.last_token_at <= self.first_token_at:
            return None
        return (self.num_output_tokens - 1) / (self.last_token_at - self.first_token_at)


class RequestLog:
    """Where rows go; `quiet` writes none."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._quiet = quiet
        self._stream = stream
        self._wrote_header = False

    def write(self, row: RequestRow, outcome: str, status: int, total: float, reason: str | None) -> None:
        """Write one row, with the reason in full where the request failed."""
        stream = self._stream or sys.stderr
        if self._quiet or stream is None:
            return
        # A full disk or a reader that left is no reason to fail the request; the metrics have its facts.
        with contextlib.suppress(OSError, ValueError):
            if not self._wrote_header:
                print(_HEADER, file=stream)
                self._wrote_header = True
            print(_line(row, outcome, status, total, reason), file=stream, flush=True)


def _line(row: RequestRow, outcome: str, status: int, total: float, reason: str | None) -> str:
    share = 100 * row.num_cached_tokens / row.num_prompt_tokens if row.num_prompt_tokens else 0.0
    first, rate = row.first_token_seconds, row.tokens_per_second
    line = (
        f"{time.strftime('%H:%M:%S')}  {row.endpoint:<12}  {status:>6}  {row.num_prompt_tokens:>6}  "
        f"{share:>5.0f}%  {'-' if first is None else f'{first:.3f} s':>10}  {row.num_output_tokens:>6}  "
        f"{'-' if rate is None else f'{rate:.1f}':>7}  {outcome:<12}  {total:.2f} s"
    )
    if reason:
        line += f"  {printable(' '.join(reason.split())[:300])}"
    return line
