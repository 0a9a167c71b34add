"""The plan beside what was measured at start: every term, the difference, and whether it is within the margin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slimserve.hardware import format_bytes
from slimserve.plan.memory import MIB, MemoryPlan, group_of

TOTAL_MARGIN = 0.03
TERM_MARGIN = 0.10
TERM_LEAST = 64 * MIB


@dataclass(frozen=True, slots=True)
class Comparison:
    """One planned amount and its measurement (None: not measured)."""

    name: str
    planned: int
    measured: int | None
    within: bool

    @property
    def difference(self) -> int | None:
        """measured - planned."""
        return None if self.measured is None else self.measured - self.planned


def compare(plan: MemoryPlan, measured: Mapping[str, int]) -> tuple[Comparison, ...]:
    """Compare a plan with measured bytes.

    `measured` maps term names or groups (weights, cache, runtime, working, inputs, graphs, allocator) to bytes; a
    term's own measurement wins over its group's. What caches leave of their budget is never allocated: it does not
    count. The last entry is the total of what was measured in full.
    """
    rows = []
    groups: dict[str, int] = {}
    for term in plan.terms:
        if term.name == "reserve" or term.name.endswith(".unused") or term.device != plan.memory.label:
            continue
        if term.name in measured:
            rows.append(_row(term.name, term.num_bytes, measured[term.name]))
        else:
            group = group_of(term.name)
            groups[group] = groups.get(group, 0) + term.num_bytes
    rows += [_row(name, size, measured.get(name)) for name, size in groups.items()]
    known = [row for row in rows if row.measured is not None]
    planned = sum(row.planned for row in known)
    total = measured.get("total", sum(row.measured or 0 for row in known))
    if "total" in measured:
        planned = plan.total_bytes
    within = abs(total - planned) <= TOTAL_MARGIN * max(planned, 1)
    return (*rows, Comparison("total", planned, total, within))


def _row(name: str, planned: int, measured: int | None) -> Comparison:
    if measured is None:
        return Comparison(name, planned, None, True)
    margin = max(TERM_MARGIN * planned, TERM_LEAST)
    return Comparison(name, planned, measured, abs(measured - planned) <= margin)


def comparison_lines(rows: tuple[Comparison, ...]) -> list[str]:
    """A table for people: planned, measured, difference; an exclamation mark where the margin is left."""
    lines = [f"{'term':28} {'planned':>12} {'measured':>12} {'difference':>12}"]
    for row in rows:
        measured = "-" if row.measured is None else format_bytes(row.measured)
        difference = "" if row.difference is None else f"{row.difference / MIB:+.1f} MiB"
        mark = "" if row.within else "  !"
        lines.append(f"{row.name:28} {format_bytes(row.planned):>12} {measured:>12} {difference:>12}{mark}")
    return lines
