"""What an architecture declares: its config, a parameter table, a cache table and a forward.

The loader, the memory plan, the physical floor, synthetic weights and `slimserve show` are all derived from
the two tables; nothing repeats a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from slimserve.layers.contract import Caches, StepInput


class Role(Enum):
    """What a parameter is for; families of the memory plan and of the kernel table."""

    EMBEDDING = "embedding"
    HEAD = "head"
    LINEAR = "linear"
    EXPERT = "expert"
    ROUTER = "router"
    NORM = "norm"
    BIAS = "bias"
    CONV = "conv"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Transform:
    """How a container's tensor becomes the parameter: kind is one of the names that weights/loader implements."""

    kind: str = "none"
    argument: int = 0


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: its own name, logical shape, role, and the name each container uses.

    `keep` is the dtype that small tensors are held in (float32 for norms, routers, decay); None = as stored.
    `optional` parameters may be absent (biases, a tied head). Transforms per container undo its conventions.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    hf_name: str
    gguf_name: str
    layer: int | None = None
    keep: torch.dtype | None = None
    optional: bool = False
    hf_transform: Transform = Transform()
    gguf_transform: Transform = Transform()


class CacheKind(Enum):
    """Kinds of sequence state; each is one CacheGroup class."""

    ATTENTION = "attention"
    WINDOW = "window"
    LATENT = "latent"
    INDEXER = "indexer"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One tensor of a group per layer: the shape of one page, slot or open buffer, without the leading count."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one page, slot or open buffer."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache group: layers that share block tables, and the bytes they hold.

    `page` buffers exist per 64-token block, `slot` buffers per kept boundary state, `open` buffers per running
    sequence. Buffer names are the fields of the storage classes in layers.contract. `window` is the number of
    past tokens (own token included) that a WINDOW group may still read.
    """

    name: str
    kind: CacheKind
    layers: tuple[int, ...]
    page: tuple[BufferSpec, ...] = ()
    slot: tuple[BufferSpec, ...] = ()
    open: tuple[BufferSpec, ...] = ()
    window: int | None = None

    def page_bytes(self) -> int:
        """Bytes of one 64-token block over all layers."""
        return len(self.layers) * sum(b.num_bytes for b in self.page)

    def slot_bytes(self) -> int:
        """Bytes of one boundary state over all layers."""
        return len(self.layers) * sum(b.num_bytes for b in self.slot)

    def open_bytes(self) -> int:
        """Bytes of one running sequence's open buffers over all layers."""
        return len(self.layers) * sum(b.num_bytes for b in self.open)


class ModelConfig(Protocol):
    """What every architecture's frozen config offers to the engine, the plan and the server."""

    @property
    def architecture(self) -> str:
        """Name in models.registry."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of the trunk."""
        ...

    @property
    def max_context(self) -> int:
        """Positions that a sequence may reach."""
        ...

    def parameters(self) -> Sequence[ParameterSpec]:
        """The parameter table."""
        ...

    def caches(self, kv_dtype: torch.dtype) -> Sequence[CacheSpec]:
        """The cache table for a KV dtype."""
        ...


class Model(Protocol):
    """A loaded architecture."""

    config: Any

    def __call__(self, step: StepInput, caches: Caches) -> torch.Tensor:
        """Run a step; returns hidden states after the final norm [T, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states [L, hidden_size] to float32 logits [L, vocab_size]."""
        ...
