"""Weights in the plan: by family and format, as the kernels of a device hold them."""

from __future__ import annotations

from slimserve.models.contract import Role
from slimserve.ops.held import held_bytes
from slimserve.plan.description import DRAFTER, Description
from slimserve.plan.working import HOST, DeviceMemory, Term

REPLICATED = frozenset({Role.NORM.value, Role.SMALL.value, Role.ROUTER.value, Role.CONV.value, Role.BIAS.value})
"""Families that every device of several holds whole."""


def weight_terms(description: Description, memory: DeviceMemory, *, companion: bool = False) -> list[Term]:
    """Weights by family and format, as their kernels hold them; families that are not split are whole everywhere.

    `companion`: of a drafter's own model, which every device holds whole.
    """
    sums: dict[tuple[str, str, str, bool], int] = {}
    for weight in description.weights:
        key = (weight.family, weight.format, weight.source, weight.host)
        size = weight.num_bytes
        if memory.kind == "cuda" and weight.shape and weight.format:
            size = held_bytes(weight.format, weight.shape, size)
        sums[key] = sums.get(key, 0) + size
    terms = []
    for (family, fmt, source, host), num_bytes in sums.items():
        split = family not in REPLICATED and memory.count > 1 and not host and not companion
        held = -(-num_bytes // memory.count) if split else num_bytes
        shared = f", 1/{memory.count} of it" if split else ""
        words = {"bound": "catalog: upper bound by the machine of the record"}.get(source)
        name = DRAFTER if family == DRAFTER else f"weights.{family}"
        if companion:
            name = f"{DRAFTER}.weights.{family}"
            shared = f", {description.name}"
        label = HOST if host and memory.kind != "cpu" else memory.label
        terms.append(Term(f"{name}.{fmt}", held, label, f"{words or description.source}{shared}"))
    return terms


def made_terms(description: Description, memory: DeviceMemory) -> list[Term]:
    """What weights that are made, not read, take besides: on a CPU the embedding table of a tied head, which has a form
    of its own (but in formats that the kernels read as stored, which no record has there); a file's table stays in its
    mapping."""
    tied = not any(weight.family == Role.HEAD.value for weight in description.weights)
    table = sum(weight.num_bytes for weight in description.weights if weight.family == Role.EMBEDDING.value)
    if memory.kind != "cpu" or not tied or not table:
        return []
    return [Term("weights.table", table, memory.label, "made: a tied head has its own form beside the table")]
