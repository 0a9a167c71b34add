"""The parameters of a model as loaded: packed tensors by name, each taken exactly once by the forward's builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slimserve import ops
from slimserve.errors import FormatError
from slimserve.ops import Activations, ExpertWeights, HeadWeight, LinearWeight, NumericsConfig
from slimserve.quant.decode import dequantize
from slimserve.quant.tensor import PackedTensor

_LARGE_BYTES = 256 << 20
"""A weight of which the device's allocator gives back what it was made in, before smaller weights settle there."""


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that `make` produces when it is taken: a model whose tensors are made need not hold them all twice."""

    make: Callable[[], PackedTensor]


class Parameters:
    """Packed tensors by parameter name, with the device and the numerics that their kernels are chosen for.

    A builder takes every parameter once; `finish` names what nobody took, so no weight is silently unused.
    """

    def __init__(
        self,
        tensors: Mapping[str, PackedTensor | MadeTensor],
        *,
        device: torch.device,
        numerics: NumericsConfig,
        progress: Callable[[int, int], None] | None = None,
        total_bytes: int = 0,
    ) -> None:
        """`total_bytes`: what `progress` counts up to."""
        self._tensors = dict(tensors)
        self._progress = progress
        self._total_bytes = total_bytes
        self._taken_bytes = 0
        self._kept_bytes = 0
        self.device = device
        self.numerics = numerics
        self._tables: dict[str, PackedTensor | LinearWeight] = {}
        self.prepared: dict[str, LinearWeight | ExpertWeights | HeadWeight] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.numerics.activation_dtype

    @property
    def resident_bytes(self) -> int:
        """Bytes that the built model holds: prepared weights, embedding tables beside a tied head's form, norms."""
        return self._kept_bytes + sum(weight.num_bytes for weight in self.prepared.values())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def packed(self, name: str) -> PackedTensor:
        """Take a packed tensor as it is."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise FormatError(f"parameter {name} is not loaded or was taken twice")
        if isinstance(tensor, MadeTensor):
            tensor = tensor.make()
        self._report(tensor)
        return tensor

    def _report(self, tensor: PackedTensor) -> None:
        self._taken_bytes += tensor.num_bytes
        if self._progress is not None:
            self._progress(self._taken_bytes, self._total_bytes)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Take a small plain tensor (norm, bias, decay) on the device."""
        value = dequantize(self.packed(name), dtype).to(self.device)
        self._kept_bytes += value.numel() * value.element_size()
        return value

    def optional(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        """Take a small tensor where the checkpoint has it."""
        return self.tensor(name, dtype) if name in self._tensors else None

    def table(self, name: str) -> PackedTensor | LinearWeight:
        """An embedding table on the device; not taken, because a tied head reads the same tensor."""
        if name not in self._tensors:
            raise FormatError(f"parameter {name} is not loaded")
        if name not in self._tables:
            packed = self._tensors[name]
            if isinstance(packed, MadeTensor):
                packed = packed.make()
            self._report(packed)
            table = ops.prepare_table(packed, device=self.device, numerics=self.numerics)
            self._tables[name] = table
            self._kept_bytes += table.num_bytes
            del packed
            self._give_back(table.num_bytes)
        return self._tables[name]

    def linear(self, *names: str) -> LinearWeight:
        """Take `name.weight` (and `name.bias` where present) of each name, stacked by rows into one product."""
        weight = self._prepare("+".join(names), [self.packed(f"{name}.weight") for name in names], names)
        self._give_back(weight.num_bytes)
        return weight

    def linear_float32(self, name: str) -> LinearWeight:
        """Take `name.weight` for a product in float32 whatever the numerics say: routers, hyper-connections."""
        exact = NumericsConfig(torch.float32, Activations.FLOAT)
        return self.prepare(name, self.packed(f"{name}.weight"), exact)

    def prepare(self, key: str, part: PackedTensor, numerics: NumericsConfig | None = None) -> LinearWeight:
        """Prepare a matrix that a builder took (and cut) itself."""
        weight = ops.prepare_linear([part], device=self.device, numerics=numerics or self.numerics)
        self.prepared[key] = weight
        return weight

    def heads(self, key: str, stack: PackedTensor) -> HeadWeight:
        """Prepare a stack [heads, N, K] that a builder took itself."""
        weight = ops.prepare_head_linear(stack, device=self.device, numerics=self.numerics)
        self.prepared[key] = weight
        return weight

    def head(self, name: str, tied_to: str | None) -> LinearWeight:
        """The output head: its own matrix, or the embedding table `tied_to`."""
        if tied_to is None:
            return self.linear(name)
        table = self.table(tied_to)
        if isinstance(table, LinearWeight):
            return table
        return self._prepare(name, [table], (name,))

    def _prepare(self, key: str, parts: list[PackedTensor], names: Sequence[str]) -> LinearWeight:
        biases = [self.optional(f"{name}.bias") for name in names]
        weight = ops.prepare_linear(parts, biases, device=self.device, numerics=self.numerics)
        self.prepared[key] = weight
        return weight

    def experts(self, name: str, gate_up: Sequence[str], down: str) -> ExpertWeights:
        """Take expert stacks: one [E, 2F, K] or the pair gate, up of [E, F, K], and down [E, H, F]."""
        weight = ops.prepare_experts(
            [self.packed(part) for part in gate_up], self.packed(down), device=self.device, numerics=self.numerics
        )
        self.prepared[name] = weight
        self._give_back(weight.num_bytes)
        return weight

    def _give_back(self, num_bytes: int) -> None:
        """Called when a weight of num_bytes is prepared and what it was prepared from is gone."""
        if num_bytes >= _LARGE_BYTES and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def finish(self) -> None:
        """Raise FormatError naming parameters that were loaded and never used."""
        unused = sorted(set(self._tensors) - set(self._tables))
        if unused:
            raise FormatError(f"{len(unused)} loaded parameters are not used by the forward: {', '.join(unused[:6])}")
