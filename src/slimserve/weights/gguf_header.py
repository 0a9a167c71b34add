"""The header of one GGUF file: every length, count, type and offset is checked before it is believed.

Layout (version 2 and 3, little-endian): magic, u32 version, u64 tensor count, u64 key count, keys (string, u32 type,
value), tensor descriptions (string name, u32 rank, u64 sizes innermost first, u32 type, u64 offset), padding, data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from slimserve.errors import FormatError
from slimserve.quant.formats import FORMATS, PLAIN_DTYPES, find_type_id, type_name
from slimserve.quant.tensor import BlockFormat
from slimserve.weights.mapped import MappedFile, describe_foreign

MAX_TENSORS = 131_072
MAX_KEYS = 65_536
MAX_STRINGS = 1_500_000
"""Strings of one file; each costs 60 to 90 bytes once read, so a damaged file cannot take more than 200 MB."""
MAX_STRING_BYTES = 40 << 20
MAX_HEADER_BYTES = 48 << 20
"""Bytes of keys, strings and tensor descriptions; number arrays do not count, for they stay in the mapping."""
MAX_RANK = 4
DEFAULT_ALIGNMENT = 32


class ValueType(IntEnum):
    """GGUF's metadata value types."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


NUMBER_DTYPES: dict[int, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

_U32 = Struct("<I")
_U64 = Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `shape` is row-major (innermost last); `offset` is absolute in `file`, in bytes."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    num_bytes: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file says: version, metadata, tensors in file order.

    value_types: key -> its ValueType, for an array that of its items (so that a copy keeps the file's widths).
    """

    version: int
    metadata: dict[str, Any]
    value_types: dict[str, ValueType]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """A position in the mapping that never passes its end."""

    def __init__(self, mapped: MappedFile) -> None:
        self.mapped = mapped
        self.buffer = mapped.buffer
        self.size = mapped.size
        self.position = 0
        self.strings = 0
        self.header_bytes = 0

    def fail(self, message: str, at: int | None = None) -> FormatError:
        where = self.position if at is None else at
        return FormatError(f"{self.mapped.path}: at offset {where}: {message}")

    def take(self, count: int, what: str) -> int:
        """Advance over `count` bytes and return where they began."""
        start = self.position
        if count > self.size - start:
            raise self.fail(f"{what} needs {count} bytes but only {self.size - start} remain; the file is truncated")
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def spend(self, num_bytes: int, num_strings: int, what: str) -> None:
        """Account for memory that a value will take, before it takes it."""
        self.header_bytes += num_bytes
        self.strings += num_strings
        if self.strings > MAX_STRINGS or self.header_bytes > MAX_HEADER_BYTES:
            limits = f"{MAX_STRINGS} strings or {MAX_HEADER_BYTES >> 20} MiB of header"
            raise self.fail(f"{what} takes the file past {limits}; no real model has that many")

    def raw_string(self, what: str) -> bytes:
        at = self.position
        length = self.u64(f"length of {what}")
        if length > MAX_STRING_BYTES:
            raise self.fail(f"{what} claims {length} bytes, more than {MAX_STRING_BYTES >> 20} MiB", at)
        start = self.take(length, what)
        self.spend(length, 1, what)
        return self.buffer[start : start + length]

    def identifier(self, what: str) -> str:
        """A non-empty UTF-8 name."""
        at = self.position
        raw = self.raw_string(what)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}", at) from None
        if not text:
            raise self.fail(f"{what} is empty", at)
        return text


def _read_strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    """`count` strings; bytes that are not UTF-8 survive as surrogate escapes. One tight loop: vocabularies are long."""
    what = f"array {key!r}"
    if count * 8 > cursor.size - cursor.position:
        remaining = cursor.size - cursor.position
        raise cursor.fail(f"{what} claims {count} strings but only {remaining} bytes remain")
    cursor.spend(0, count, what)
    buffer, position, size, start = cursor.buffer, cursor.position, cursor.size, cursor.position
    unpack = _U64.unpack_from
    budget_end = position + MAX_HEADER_BYTES - cursor.header_bytes
    strings: list[str] = []
    append = strings.append
    last_length_at = size - 8
    for index in range(count):
        if position > last_length_at:
            raise cursor.fail(f"{what} is truncated in string {index} of {count}", position)
        end = position + 8 + unpack(buffer, position)[0]
        if end > size or end > budget_end:
            raise cursor.fail(
                f"{what}: string {index} of {count} claims {end - position - 8} bytes, too many", position
            )
        append(buffer[position + 8 : end].decode("utf-8", "surrogateescape"))
        position = end
    cursor.position = position
    cursor.spend(position - start, 0, what)
    return strings


def _read_numbers(cursor: _Cursor, value_type: int, count: int, key: str) -> np.ndarray[Any, Any]:
    dtype = NUMBER_DTYPES[value_type]
    start = cursor.take(count * dtype.itemsize, f"array {key!r} of {count} items")
    values = np.frombuffer(cursor.buffer, dtype=dtype, count=count, offset=start) if count else np.empty(0, dtype)
    if value_type == ValueType.BOOL:
        values = values.astype(bool)
    else:
        values = values.view()
    values.flags.writeable = False
    return values


def _read_value(cursor: _Cursor, key: str) -> tuple[ValueType, Any]:
    at = cursor.position
    value_type = cursor.u32(f"type of key {key!r}")
    if value_type == ValueType.STRING:
        text = cursor.raw_string(f"value of {key!r}").decode("utf-8", "surrogateescape")
        return ValueType.STRING, text
    if value_type == ValueType.ARRAY:
        return _read_array(cursor, key)
    if value_type not in NUMBER_DTYPES:
        raise cursor.fail(f"key {key!r} has unknown value type {value_type}", at)
    dtype = NUMBER_DTYPES[value_type]
    start = cursor.take(dtype.itemsize, f"value of {key!r}")
    number = np.frombuffer(cursor.buffer, dtype=dtype, count=1, offset=start)[0].item()
    return ValueType(value_type), bool(number) if value_type == ValueType.BOOL else number


def _read_array(cursor: _Cursor, key: str) -> tuple[ValueType, Any]:
    at = cursor.position
    item_type = cursor.u32(f"item type of array {key!r}")
    count = cursor.u64(f"length of array {key!r}")
    if item_type == ValueType.STRING:
        return ValueType.STRING, _read_strings(cursor, count, key)
    if item_type in NUMBER_DTYPES:
        return ValueType(item_type), _read_numbers(cursor, item_type, count, key)
    kind = "arrays" if item_type == ValueType.ARRAY else f"unknown type {item_type}"
    raise cursor.fail(f"key {key!r} is an array of {kind}, which no known model uses", at)


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Check the magic and return (version, tensor count, key count)."""
    path = cursor.mapped.path
    head = cursor.buffer[: min(64, cursor.size)]
    if not head.startswith(b"GGUF"):
        raise FormatError(f"{path} is not a GGUF file: it is {describe_foreign(head)}")
    cursor.take(4, "magic")
    version = cursor.u32("version")
    if version in (2, 3):
        num_tensors, num_keys = cursor.u64("tensor count"), cursor.u64("key count")
        return version, num_tensors, num_keys
    if version == 1:
        raise FormatError(f"{path} is GGUF version 1, whose counts have another width; convert it to version 3")
    if version and version & 0xFFFF == 0:
        raise FormatError(f"{path} is a big-endian GGUF file (version {version >> 24}); convert it to little-endian")
    raise FormatError(f"{path} is GGUF version {version}; this reader knows versions 2 and 3")


def _read_metadata(cursor: _Cursor, num_keys: int) -> tuple[dict[str, Any], dict[str, ValueType]]:
    metadata: dict[str, Any] = {}
    types: dict[str, ValueType] = {}
    for _ in range(num_keys):
        at = cursor.position
        key = cursor.identifier("key")
        if key in metadata:
            raise cursor.fail(f"key {key!r} appears twice", at)
        types[key], metadata[key] = _read_value(cursor, key)
    return metadata, types


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"{cursor.mapped.path}: general.alignment is {alignment!r}, not a power of two")
    return alignment


@dataclass(frozen=True, slots=True)
class _Description:
    """A tensor description as read, its offset still relative to the data section."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    num_bytes: int
    relative: int
    at: int


def _read_description(cursor: _Cursor) -> _Description:
    at = cursor.position
    name = cursor.identifier("tensor name")
    rank = cursor.u32(f"rank of tensor {name!r}")
    if not 1 <= rank <= MAX_RANK:
        raise cursor.fail(f"tensor {name!r} has {rank} dimensions; 1 to {MAX_RANK} are possible", at)
    sizes = [cursor.u64(f"dimension {axis} of tensor {name!r}") for axis in range(rank)]
    type_id = cursor.u32(f"type of tensor {name!r}")
    relative = cursor.u64(f"offset of tensor {name!r}")
    if 0 in sizes:
        raise cursor.fail(f"tensor {name!r} has a zero dimension: {sizes}", at)
    fmt = find_type_id(type_id)
    if fmt is None or not fmt.supported:
        known = ", ".join(f.name for f in FORMATS if f.supported and f.type_id is not None)
        title = f"type {type_name(type_id)} (id {type_id})"
        raise cursor.fail(f"tensor {name!r} has {title}, which is not supported; supported are {known}", at)
    if sizes[0] % fmt.block_size:
        raise cursor.fail(
            f"tensor {name!r}: rows of {sizes[0]} are no whole blocks of {fmt.block_size} ({fmt.name})", at
        )
    num_bytes = prod(sizes) // fmt.block_size * fmt.block_bytes
    if num_bytes > cursor.size:
        raise cursor.fail(f"tensor {name!r} {sizes} {fmt.name} needs {num_bytes} bytes, more than the whole file", at)
    return _Description(name, tuple(reversed(sizes)), fmt, num_bytes, relative, at)


def _place(cursor: _Cursor, descriptions: list[_Description], alignment: int) -> dict[str, TensorInfo]:
    """Turn relative offsets into absolute ones, refusing misaligned, overlapping and out-of-file tensors."""
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for item in descriptions:
        offset = data_start + item.relative
        if item.name in tensors:
            raise cursor.fail(f"tensor {item.name!r} appears twice", item.at)
        if item.relative % alignment:
            raise cursor.fail(f"tensor {item.name!r} lies at {item.relative}, not a multiple of {alignment}", item.at)
        if offset + item.num_bytes > cursor.size:
            end = offset + item.num_bytes
            message = f"tensor {item.name!r} ends at byte {end} but the file has {cursor.size}; the file is truncated"
            raise cursor.fail(message, item.at)
        dtype = PLAIN_DTYPES.get(item.format.name)
        if dtype is not None and offset % dtype.itemsize:
            raise cursor.fail(f"tensor {item.name!r} of {item.format.name} lies at odd byte {offset}", item.at)
        path = cursor.mapped.path
        tensors[item.name] = TensorInfo(item.name, item.shape, item.format, offset, item.num_bytes, path)
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            names = f"tensors {before.name!r} and {after.name!r}"
            raise FormatError(f"{cursor.mapped.path}: {names} overlap at byte {after.offset}")
    return tensors


def read_header(mapped: MappedFile) -> GgufHeader:
    """Read and check the header of one GGUF file; tensor data is not touched.

    Raises FormatError naming the file and the offset, key or tensor at fault.
    """
    cursor = _Cursor(mapped)
    version, num_tensors, num_keys = _read_preamble(cursor)
    remaining = cursor.size - cursor.position
    # A key takes at least 14 bytes and a tensor description at least 33.
    if num_keys > min(MAX_KEYS, remaining // 14):
        raise cursor.fail(f"the file claims {num_keys} keys in {remaining} remaining bytes", 16)
    if num_tensors > min(MAX_TENSORS, remaining // 33):
        raise cursor.fail(f"the file claims {num_tensors} tensors in {remaining} remaining bytes", 8)
    metadata, types = _read_metadata(cursor, num_keys)
    alignment = _alignment(cursor, metadata)
    descriptions = [_read_description(cursor) for _ in range(num_tensors)]
    return GgufHeader(version, metadata, types, _place(cursor, descriptions, alignment))
