"""The floor as a report: per concurrency the bytes of every term, and what the bandwidth makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimserve.profiles.planning import floors
from slimserve.profiles.resolve import ResolvedProfile


def floor_report(
    profile: ResolvedProfile, concurrency: Sequence[int], context: int, bandwidth: float, source: str
) -> dict[str, Any]:
    """Floors of a profile's decode step as plain data. `bandwidth` in bytes per second."""
    rows = floors(profile, concurrency, context=context, bandwidth=bandwidth)
    return {
        "kind": "floor",
        "profile": profile.name,
        "weights": profile.description.source,
        "context": context,
        "bandwidth_bytes_per_second": bandwidth,
        "bandwidth_source": source,
        "rows": [
            {
                "concurrency": row.concurrency,
                "bytes": row.num_bytes,
                "milliseconds": row.milliseconds,
                "tokens_per_second": row.tokens_per_second,
                "terms": {term.name: term.num_bytes for term in row.terms},
            }
            for row in rows
        ],
    }


def floor_lines(report: dict[str, Any]) -> list[str]:
    """The report for people: a column per concurrency, a line per term in MB."""
    rows = report["rows"]
    lines = [
        f"{report['profile']}: decode floor at {report['context']} tokens of context, "
        f"{report['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s ({report['bandwidth_source']})",
        f"{'MB moved per step':24}" + "".join(f"{'c' + str(row['concurrency']):>12}" for row in rows),
    ]
    for name in rows[0]["terms"]:
        lines.append(f"{name:24}" + "".join(f"{row['terms'][name] / 1e6:>12.1f}" for row in rows))
    lines.append(f"{'total':24}" + "".join(f"{row['bytes'] / 1e6:>12.1f}" for row in rows))
    lines.append(f"{'ms per step':24}" + "".join(f"{row['milliseconds']:>12.3f}" for row in rows))
    lines.append(f"{'tok/s':24}" + "".join(f"{row['tokens_per_second']:>12.1f}" for row in rows))
    return lines
