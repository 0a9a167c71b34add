"""Writing safetensors files: one header, then the tensors in the order given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from slimserve.errors import FormatError, UsageError
from slimserve.weights.gguf_write import tensor_bytes
from slimserve.weights.safetensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A tensor to be written: `load` gives its data, of `dtype` and `shape`, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data in the file."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> StoredPlan:
        """The plan of a tensor at hand."""
        return cls(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def write_safetensors(path: str | Path, plans: Sequence[StoredPlan], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file under a temporary name and rename it once whole.

    The header is padded to 8 bytes and wide dtypes come first, so that every tensor is aligned. Raises UsageError
    when the place cannot be written, FormatError for a dtype that the format does not have or a repeated name.
    """
    path = Path(path)
    ordered = sorted(plans, key=lambda plan: -plan.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for plan in ordered:
        if plan.dtype not in _NAMES or plan.name in header:
            raise FormatError(f"tensor {plan.name!r} of {plan.dtype} cannot be written, or would be written twice")
        span = [offset, offset + plan.num_bytes]
        header[plan.name] = {"dtype": _NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": span}
        offset = span[1]
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for plan in ordered:
                data = tensor_bytes(plan.load())
                if data.nbytes != plan.num_bytes:
                    raise FormatError(f"tensor {plan.name!r}: {data.nbytes} bytes made, {plan.num_bytes} planned")
                file.write(data)
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
