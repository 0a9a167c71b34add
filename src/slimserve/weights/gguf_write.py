"""Writing GGUF version 3: header first, then tensor data one tensor at a time, so that a large model streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import IO, Any

import numpy as np
import torch

from slimserve.errors import FormatError, UsageError
from slimserve.quant.tensor import BlockFormat, PackedTensor
from slimserve.weights.gguf_header import DEFAULT_ALIGNMENT, MAX_RANK, NUMBER_DTYPES, ValueType

_VALUE_TYPES = {dtype: ValueType(value_type) for value_type, dtype in NUMBER_DTYPES.items() if value_type != 7}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to be written: `shape` row-major; `load` gives its data (as PackedTensor.data) when its turn comes."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    load: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data in the file."""
        num_rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return num_rows * self.format.row_bytes(self.shape[-1])

    @classmethod
    def of(cls, packed: PackedTensor, name: str | None = None) -> TensorPlan:
        """The plan of a tensor that is already packed."""
        return cls(name or packed.name, packed.shape, packed.format, lambda: packed.data)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return pack("<Q", len(raw)) + raw


def _scalar_type(key: str, value: Any) -> ValueType:
    if isinstance(value, (bool, np.bool_)):
        return ValueType.BOOL
    if isinstance(value, np.generic) and value.dtype in _VALUE_TYPES:
        return _VALUE_TYPES[value.dtype]
    if isinstance(value, str):
        return ValueType.STRING
    if isinstance(value, float):
        return ValueType.FLOAT32
    if isinstance(value, int):
        if value < 0:
            return ValueType.INT32 if value >= -(1 << 31) else ValueType.INT64
        return ValueType.UINT32 if value < 1 << 32 else ValueType.UINT64
    raise FormatError(f"key {key!r}: a value of type {type(value).__name__} cannot be written to GGUF")


def _encode_scalar(key: str, value: Any, value_type: ValueType) -> bytes:
    if value_type == ValueType.STRING:
        return _string(value)
    return np.asarray(value).astype(NUMBER_DTYPES[value_type]).tobytes()


def _encode_array(key: str, values: Sequence[Any] | np.ndarray[Any, Any], item_type: ValueType | None) -> bytes:
    if isinstance(values, np.ndarray):
        found = ValueType.BOOL if values.dtype == np.bool_ else _VALUE_TYPES.get(values.dtype.newbyteorder("<"))
        item_type = found if item_type is None else item_type
        if item_type is None:
            raise FormatError(f"key {key!r}: an array of {values.dtype} cannot be written to GGUF")
    if item_type is None:
        item_type = _scalar_type(key, values[0]) if len(values) else ValueType.STRING
        # Lists of small non-negative numbers are conventionally int32 (token types, layer tables).
        item_type = ValueType.INT32 if item_type == ValueType.UINT32 else item_type
    head = pack("<IIQ", ValueType.ARRAY, item_type, len(values))
    if item_type == ValueType.STRING:
        return head + b"".join(_string(text) for text in values)
    return head + np.asarray(values).astype(NUMBER_DTYPES[item_type]).tobytes()


def _encode_value(key: str, value: Any, value_type: ValueType | None) -> bytes:
    if isinstance(value, (list, tuple, np.ndarray)):
        return _encode_array(key, value, value_type)
    if value_type is None:
        value_type = _scalar_type(key, value)
    return pack("<I", value_type) + _encode_scalar(key, value, value_type)


def _padding(position: int, alignment: int) -> int:
    return -position % alignment


def _encode_header(
    metadata: Mapping[str, Any], plans: Sequence[TensorPlan], value_types: Mapping[str, ValueType], alignment: int
) -> bytes:
    parts = [b"GGUF", pack("<IQQ", 3, len(plans), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _encode_value(key, value, value_types.get(key))]
    offset = 0
    for plan in plans:
        if not 1 <= len(plan.shape) <= MAX_RANK or plan.format.type_id is None:
            raise FormatError(f"tensor {plan.name!r} {plan.shape} {plan.format.name} has no form in GGUF")
        sizes = pack(f"<{len(plan.shape)}Q", *reversed(plan.shape))
        parts += [_string(plan.name), pack("<I", len(plan.shape)), sizes, pack("<IQ", plan.format.type_id, offset)]
        offset += plan.num_bytes
        offset += _padding(offset, alignment)
    header = b"".join(parts)
    return header + bytes(_padding(len(header), alignment))


def tensor_bytes(data: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    flat = data.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def _write_data(file: IO[bytes], plan: TensorPlan, alignment: int) -> None:
    data = tensor_bytes(plan.load())
    if data.nbytes != plan.num_bytes:
        raise FormatError(f"tensor {plan.name!r}: {data.nbytes} bytes were made where {plan.num_bytes} were planned")
    file.write(data)
    file.write(bytes(_padding(data.nbytes, alignment)))


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    plans: Sequence[TensorPlan],
    *,
    value_types: Mapping[str, ValueType] | None = None,
    progress: Callable[[TensorPlan], None] | None = None,
) -> None:
    """Write a GGUF file under a temporary name and rename it once whole.

    metadata values: bool, int, float, str, numpy scalars (which fix the width), lists, numpy arrays. `value_types`
    overrides the width per key. `progress` is called before each tensor. Raises UsageError when the place cannot
    be written, FormatError for a value or a tensor that GGUF cannot hold.
    """
    path = Path(path)
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"tensor {twice!r} would be written twice")
    header = _encode_header(metadata, plans, value_types or {}, alignment)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for plan in plans:
                if progress is not None:
                    progress(plan)
                _write_data(file, plan, alignment)
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
