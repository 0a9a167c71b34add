"""Where a step's time goes on a GPU: kernels by name, their launches, and what the device waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's share of a step: launches and microseconds per step."""

    name: str
    launches: float
    microseconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Per step: wall time, time in kernels, and the kernels, longest first (all in microseconds)."""

    steps: int
    wall: float
    busy: float
    launches: float
    kernels: tuple[KernelTime, ...]

    def as_json(self, count: int = 40) -> dict[str, Any]:
        """Plain data of the `count` longest kernels."""
        return {
            "steps": self.steps,
            "wall_us": round(self.wall, 1),
            "busy_us": round(self.busy, 1),
            "launches": round(self.launches, 1),
            "kernels": [[k.name, round(k.launches, 2), round(k.microseconds, 1)] for k in self.kernels[:count]],
        }

    def lines(self, title: str, count: int = 14) -> list[str]:
        """A table for people."""
        busy = f"kernels {self.busy / 1e3:.2f} ms in {self.launches:.0f} launches"
        head = f"{title}: {self.wall / 1e3:.2f} ms a step, {busy}"
        rows = [f"    {k.microseconds:9.1f} us {k.launches:7.1f} x  {k.name[:90]}" for k in self.kernels[:count]]
        return [head, *rows]


def trace_steps(step: Callable[[], object], steps: int) -> Trace:
    """Profile `steps` calls of `step` (each ends with a wait for the device)."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    found = []
    for event in profiler.key_averages():
        device_time = float(getattr(event, "self_device_time_total", 0.0))
        if device_time > 0:
            found.append(KernelTime(event.key, event.count / steps, device_time / steps))
    found.sort(key=lambda kernel: -kernel.microseconds)
    busy = sum(kernel.microseconds for kernel in found)
    launches = sum(kernel.launches for kernel in found)
    return Trace(steps, 1e6 * wall / steps, busy, launches, tuple(found))
