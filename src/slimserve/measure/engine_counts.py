"""What a SlimServe server's own counters say about a stretch of time: steps, tokens per row, drafts that held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from slimserve.errors import RunError
from slimserve.measure.client import Endpoint

_PREFIX = "slimserve_"


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Totals of /metrics. A row is one request in one step that decodes; `drafted[i]` and `accepted[i]` count drafts
    at position i + 1 and those that held."""

    steps: int
    decode_rows: int
    decode_tokens: int
    drafter: str = "none"
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def read(cls, endpoint: Endpoint) -> EngineCounts | None:
        """The counters now; None where the server has none of this kind (it is another server, or hides them)."""
        try:
            return cls.parse(endpoint.get("/metrics"))
        except RunError:
            return None

    @classmethod
    def parse(cls, text: str) -> EngineCounts | None:
        """The counters in the Prometheus text format; None where steps are not among them."""
        plain: dict[str, int] = {}
        drafter, places = "none", {"drafted": dict[int, int](), "accepted": dict[int, int]()}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if not name.startswith(_PREFIX):
                continue
            name, _, labels = name.removeprefix(_PREFIX).partition("{")
            kind, _, by_position = name.partition("_tokens_by_position")
            if by_position == "_total" and kind in places:
                found = _labels(labels)
                drafter = found.get("drafter", drafter)
                places[kind][int(found["position"])] = int(float(value))
            elif name in ("steps_total", "decode_rows_total", "decode_tokens_total"):
                plain[name] = int(float(value))
        if "steps_total" not in plain:
            return None
        drafted, accepted = (tuple(counts.get(i + 1, 0) for i in range(len(counts))) for counts in places.values())
        return cls(
            plain["steps_total"],
            plain.get("decode_rows_total", 0),
            plain.get("decode_tokens_total", 0),
            drafter,
            drafted,
            accepted,
        )

    def since(self, before: EngineCounts) -> EngineCounts:
        """What came about between two readings of one server."""
        return EngineCounts(
            self.steps - before.steps,
            self.decode_rows - before.decode_rows,
            self.decode_tokens - before.decode_tokens,
            self.drafter,
            _difference(self.drafted, before.drafted),
            _difference(self.accepted, before.accepted),
        )

    @property
    def tokens_per_row(self) -> float | None:
        """Tokens that a request gained per step: 1 without drafts. None where nothing was decoded."""
        return self.decode_tokens / self.decode_rows if self.decode_rows else None

    @property
    def acceptance(self) -> float | None:
        """Share of all drafts that held; None where nothing was drafted."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at each position that held together with all before them."""
        return [held / max(1, drafted) for held, drafted in zip(self.accepted, self.drafted, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "steps": self.steps,
            "tokens_per_row": self.tokens_per_row,
            "drafter": self.drafter,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "acceptance": self.acceptance,
            "acceptance_by_position": self.acceptance_by_position,
        }


def total_counts(parts: Sequence[EngineCounts]) -> EngineCounts:
    """The sum of several stretches of one server."""
    drafted, accepted = (
        tuple(sum(counts) for counts in zip_longest(*(getattr(part, name) for part in parts), fillvalue=0))
        for name in ("drafted", "accepted")
    )
    return EngineCounts(
        sum(part.steps for part in parts),
        sum(part.decode_rows for part in parts),
        sum(part.decode_tokens for part in parts),
        parts[-1].drafter if parts else "none",
        drafted,
        accepted,
    )


def drafting_words(counts: Mapping[str, Any]) -> str:
    """`EngineCounts.as_json` for people."""
    rate = counts["tokens_per_row"]
    words = f"{rate:.2f} tokens per stream and step" if rate is not None else "nothing decoded"
    if counts["acceptance"] is None:
        return f"{words}, no drafts"
    shares = " ".join(f"{share:.0%}" for share in counts["acceptance_by_position"])
    return f"{words}; {counts['drafter']}: {counts['acceptance']:.0%} of the drafts held, by position {shares}"


def _labels(text: str) -> dict[str, str]:
    """{name="value",...} without escapes, which these labels never need."""
    pairs = (pair.partition("=") for pair in text.rstrip("}").split(",") if pair)
    return {name: value.strip('"') for name, _, value in pairs}


def _difference(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value - (before[i] if i < len(before) else 0) for i, value in enumerate(after))
