"""Medians with their spread, and percentiles; the shape in which every figure is reported."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A median of repeats with the lowest and highest of them."""

    median: float
    lowest: float
    highest: float
    count: int

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (self.highest - self.lowest) / self.median if self.median else 0.0

    def as_json(self) -> dict[str, float]:
        """Plain data."""
        return {
            "median": self.median, "lowest": self.lowest, "highest": self.highest,
            "spread": self.spread, "count": self.count,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.lowest:.4g}-{self.highest:.4g})"


def figure(values: Sequence[float]) -> Figure | None:
    """The figure of some repeats; None of none."""
    if not values:
        return None
    return Figure(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the sorted values lie (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered) - 1e-9) - 1))]
