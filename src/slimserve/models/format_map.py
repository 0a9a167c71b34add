"""A map from parameters to storage formats: what a record says about weights before any file is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch

from slimserve.errors import FormatError, UsageError
from slimserve.models.contract import ParameterSpec
from slimserve.quant.formats import find_format


@dataclass(frozen=True, slots=True)
class FormatRule:
    """Parameters whose name fits `match` (fnmatch, the own names of the table) are stored as `format`.

    `layers` narrows the rule ("0-2,5"). `scales` says how a side-scale format keeps its scales.
    """

    match: str
    format: str
    layers: str = ""
    scales: str = ""

    def applies(self, spec: ParameterSpec) -> bool:
        """Whether the rule speaks of this parameter."""
        if self.layers and (spec.layer is None or spec.layer not in parse_layers(self.layers)):
            return False
        return fnmatchcase(spec.name, self.match)


KEPT_IN_FLOAT32 = FormatRule("*", "F32")
"""How parameters are stored that a model holds in float32, whatever a map says."""


def parse_layers(text: str) -> frozenset[int]:
    """Layer numbers of "0-2,5"; UsageError for anything else."""
    layers: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"layers {text!r} is not a list like 0-2,5")
        layers.update(range(int(first), int(last or first) + 1))
    return frozenset(layers)


def find_rule(rules: Sequence[FormatRule], spec: ParameterSpec) -> FormatRule | None:
    """The first rule that speaks of a parameter; KEPT_IN_FLOAT32 for small tensors, None where none does."""
    if spec.keep is torch.float32:
        return KEPT_IN_FLOAT32
    return next((rule for rule in rules if rule.applies(spec)), None)


def scale_bytes(rule: FormatRule, shape: Sequence[int]) -> int:
    """Bytes of the side tensors of a parameter, as held in memory (see quant.formats)."""
    if not rule.scales:
        return 0
    *outer, rows, columns = (1, *shape) if len(shape) == 1 else shape
    stacks = prod(outer)
    if rule.scales == "tensor":
        return 4 * stacks
    if rule.scales == "channel":
        return 4 * stacks * rows
    if rule.scales == "block128":
        return 4 * stacks * -(-rows // 128) * -(-columns // 128)
    if rule.scales == "group16":
        return stacks * (rows * -(-columns // 16) + 4)
    return 2 * stacks * rows * -(-columns // 128)


def parameter_bytes(rule: FormatRule, spec: ParameterSpec) -> int:
    """Bytes of a parameter under a rule; small tensors that are kept in float32 count as such."""
    if spec.keep is torch.float32:
        return 4 * prod(spec.shape)
    known = find_format(rule.format)
    if known is None:
        raise UsageError(f"format {rule.format!r} of {spec.name} is not known")
    try:
        row = known.row_bytes(spec.shape[-1])
    except ValueError as error:
        raise FormatError(f"{spec.name} {list(spec.shape)} cannot be stored as {rule.format}: {error}") from error
    return prod(spec.shape[:-1]) * row + scale_bytes(rule, spec.shape)
