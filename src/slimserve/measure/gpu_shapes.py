"""Shapes whose memory is measured beside the recorded ones, and the processes of a run of `gpu_geometry`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimserve.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shape:
    """A configuration whose memory is measured, and how many requests of its longest length then run at once."""

    label: str
    flags: dict[str, Any]
    requests: int


SHAPES: dict[str, tuple[Shape, ...]] = {
    "qwen35-4b": (
        Shape("8,192 x 4 bf16", {"max_context": 8192, "max_sequences": 4}, 4),
        Shape("4,096 x 32 fp8", {"max_context": 4096, "max_sequences": 32, "kv_dtype": "fp8"}, 32),
        Shape("65,536 x 1 bf16", {"max_context": 65536, "max_sequences": 1}, 1),
        Shape("4,096 x 8 bf16, lookup", {"max_context": 4096, "max_sequences": 8, "drafter": "lookup"}, 8),
    ),
    "qwen38-nvfp4-1": (Shape("16,384 x 2 fp8", {"max_context": 16384, "max_sequences": 2, "kv_dtype": "fp8"}, 2),),
    "glm53f-q2-1": (Shape("8,192 x 2 bf16", {"max_context": 8192, "max_sequences": 2}, 2),),
}


SHAPE_SECONDS = {"qwen35-4b": 30.0, "qwen38-nvfp4-1": 40.0, "glm53f-q2-1": 125.0}
"""What a shape's process may take: python and torch, making the weights (3, 6 and 79 s on an H200), requests."""


def find_shape(name: str, label: str) -> Shape:
    """A shape of a profile by its label; UsageError naming those that exist."""
    shapes = {shape.label: shape for shape in SHAPES.get(name, ())}
    if label not in shapes:
        raise UsageError(f"{name} has no shape {label!r}; choose from {', '.join(map(repr, shapes)) or 'none'}")
    return shapes[label]


@dataclass(frozen=True, slots=True)
class Job:
    """A process of a run: a profile, or one of its shapes; `weight` shares out what no shape needs."""

    name: str
    label: str | None = None
    weight: float = 0.0

    @property
    def seconds(self) -> float:
        """What a shape needs; 0 for a profile, which takes what it is given."""
        return SHAPE_SECONDS.get(self.name, 60.0) if self.label is not None else 0.0


def jobs_of(profiles: Sequence[str]) -> list[Job]:
    """The first profile's shapes, then every profile, each later one followed by its shapes."""
    shapes = {name: [Job(name, shape.label) for shape in SHAPES.get(name, ())] for name in profiles}
    jobs = shapes[profiles[0]] if profiles else []
    for place, name in enumerate(profiles):
        # A later, larger model needs more of what is left.
        jobs = [*jobs, Job(name, weight=1.0 + 0.6 * place), *(shapes[name] if place else [])]
    return jobs


def seconds_of(jobs: Sequence[Job], left: float) -> float:
    """What the first of the jobs that are left may take of the time that is left."""
    first = jobs[0]
    if first.label is not None:
        return first.seconds
    free = left - sum(job.seconds for job in jobs)
    return max(0.0, free) * first.weight / sum(job.weight for job in jobs)
