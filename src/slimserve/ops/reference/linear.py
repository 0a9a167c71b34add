"""Matrix products with packed weights, decoded tile by tile: slow, right, and never a whole decoded copy."""

from __future__ import annotations

import torch

from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.reference.activation import silu_mul
from slimserve.ops.reference.packed_rows import gather_rows, slice_rows, to_device
from slimserve.quant.decode import dequantize
from slimserve.quant.tensor import PackedTensor

_TILE_ROWS = 1024


def embedding(token_ids: torch.Tensor, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode rows token_ids [T] of packed [V, H]."""
    rows = token_ids.long().clamp(0, packed.shape[0] - 1)
    return dequantize(gather_rows(packed, rows), torch.float32).to(dtype)


def _multiply(x: torch.Tensor, packed: PackedTensor, out: torch.Tensor) -> None:
    """Write float32 x [T, K] times packed [N, K] into out [T, N], one matrix-vector product per row.

    A product over many rows at once may order its sums by the number of rows; one row at a time, copied to the
    same place, cannot.
    """
    num_outputs = packed.shape[0]
    row = torch.empty(x.shape[1], device=x.device)
    for start in range(0, num_outputs, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, num_outputs)
        tile = dequantize(slice_rows(packed, start, stop), torch.float32)  # [n, K]
        for t in range(x.shape[0]):
            row.copy_(x[t])
            out[t, start:stop] = torch.mv(tile, row)


class ReferenceLinear:
    """One part, held packed."""

    def __init__(self, part: PackedTensor, device: torch.device, numerics: NumericsConfig) -> None:
        del numerics  # float activations always
        self.packed = to_device(part, device)
        self.num_bytes = self.packed.num_bytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See PreparedLinear."""
        _multiply(x.float(), self.packed, out)


class ReferenceExperts:
    """All experts of a layer, held packed; the experts that a step names are decoded one after the other."""

    def __init__(
        self,
        gate_up: tuple[PackedTensor, ...],
        down: PackedTensor,
        device: torch.device,
        numerics: NumericsConfig,
    ) -> None:
        del numerics
        self.gate_up = tuple(to_device(part, device) for part in gate_up)
        self.down = to_device(down, device)
        self.num_bytes = self.down.num_bytes + sum(part.num_bytes for part in self.gate_up)

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, limit: float | None
    ) -> torch.Tensor:
        """See PreparedExperts."""
        num_rows, num_slots = expert_ids.shape
        hidden = x.float()
        results = torch.zeros((num_rows, num_slots, self.down.shape[1]), device=x.device)  # [T, k, H]
        for expert in sorted(set(expert_ids.flatten().tolist())):
            row, slot = torch.nonzero(expert_ids == expert, as_tuple=True)
            parts = []
            for packed in self.gate_up:
                part = torch.empty((row.numel(), packed.shape[1]), device=x.device)
                _multiply(hidden[row], expert_of(packed, expert), part)
                parts.append(part)
            activated = silu_mul(torch.cat(parts, dim=-1), limit)  # [n, F]
            out = torch.empty((row.numel(), self.down.shape[1]), device=x.device)
            _multiply(activated, expert_of(self.down, expert), out)
            results[row, slot] = out
        total = torch.zeros((num_rows, self.down.shape[1]), device=x.device)
        for slot_index in range(num_slots):
            total = total + results[:, slot_index] * weights[:, slot_index : slot_index + 1]
        return total.to(x.dtype)


def expert_of(packed: PackedTensor, expert: int) -> PackedTensor:
    """The [N, K] matrix of one expert of packed [E, N, K]."""
    shared = {name: scale for name, scale in packed.scales.items() if scale.numel() == 1}
    own = {name: scale[expert] for name, scale in packed.scales.items() if name not in shared}
    return PackedTensor(packed.format, packed.shape[1:], packed.data[expert], packed.name, {**shared, **own})
