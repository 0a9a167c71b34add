"""The packed tensor: weights in the bytes of their file, with what is needed to decode them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One storage format: `block_size` elements take `block_bytes` bytes; `type_id` is ggml's number or None.

    `supported` is False for formats that are known by name and size only: their tensors are refused.
    """

    name: str
    type_id: int | None
    block_size: int
    block_bytes: int
    used_by: str = ""
    supported: bool = True

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of a row of `num_elements`, which must be whole blocks."""
        if num_elements % self.block_size:
            raise ValueError(f"{self.name}: {num_elements} elements are not whole blocks of {self.block_size}")
        return num_elements // self.block_size * self.block_bytes


@dataclass(slots=True)
class PackedTensor:
    """A weight as stored.

    `shape` is the logical row-major shape, e.g. [N, K] or [E, N, K]; rows run over the last dimension.
    `data` holds the bytes: for F32/F16/BF16 (and F8_E4M3) a tensor of that dtype and logical shape, for every
    other format uint8 of shape [*shape[:-1], row_bytes]. `scales` holds side tensors of safetensors formats
    (e.g. "weight_scale", "global_scale"), already turned into multipliers.
    """

    format: BlockFormat
    shape: tuple[int, ...]
    data: torch.Tensor
    name: str = ""
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes held, side tensors included."""
        return sum(t.numel() * t.element_size() for t in (self.data, *self.scales.values()))

    @property
    def num_elements(self) -> int:
        """Logical element count."""
        return prod(self.shape)
