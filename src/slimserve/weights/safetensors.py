"""Safetensors models: one file, or a folder with an index, read in place from memory mappings.

A file is u64 header length, a JSON object (name -> dtype, shape, data_offsets), then the data, without holes.
Every size, offset and dtype is checked by hand before a tensor is handed out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from slimserve.errors import FormatError, UsageError
from slimserve.quant.formats import PLAIN_DTYPES, find_format
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.mapped import MappedFile, describe_foreign
from slimserve.weights.small_file import read_small_file

MAX_HEADER_BYTES = 48 << 20
"""A header becomes about five times its size once parsed."""
MAX_RANK = 8
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
EXTRA_NAMES = ("model_mtp.safetensors", "mtp.safetensors")
"""Files that some checkpoints place beside the indexed ones: the next-token-prediction block."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
"""Safetensors dtype names that can be handed out."""

_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `dtype` is a key of DTYPES; `offset` is absolute in `file`, in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int
    file: Path


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"{twice!r} appears twice")
    return result


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse `raw` as one JSON object without repeated names; FormatError starts with `where`."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_object)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: holds a {type(value).__name__}, not an object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; UsageError when it cannot be read, FormatError when it is damaged."""
    try:
        raw = read_small_file(path, MAX_HEADER_BYTES)
    except FileNotFoundError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if raw.startswith(b"version https://git-lfs"):
        raise FormatError(f"{path} is {describe_foreign(raw[:64])}")
    return parse_json_object(raw, str(path))


def _integers(value: Any) -> list[int] | None:
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        return None
    return value


def _read_entry(mapped: MappedFile, data_start: int, name: str, entry: Any) -> StoredTensor:
    where = f"{mapped.path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where} is described by a {type(entry).__name__}, not an object")
    dtype, shape, span = entry.get("dtype"), _integers(entry.get("shape")), _integers(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{where} has dtype {dtype!r}, which is not supported; supported are {', '.join(DTYPES)}")
    if shape is None or len(shape) > MAX_RANK:
        raise FormatError(f"{where} has no proper shape: {str(entry.get('shape'))[:80]}")
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise FormatError(f"{where} has no proper data_offsets: {str(entry.get('data_offsets'))[:80]}")
    num_bytes = prod(shape) * DTYPES[dtype].itemsize
    if num_bytes != span[1] - span[0]:
        raise FormatError(f"{where} {shape} {dtype} needs {num_bytes} bytes but data_offsets span {span[1] - span[0]}")
    if data_start + span[1] > mapped.size:
        end = data_start + span[1]
        raise FormatError(f"{where} ends at byte {end} but the file has {mapped.size}; the file is truncated")
    return StoredTensor(name, tuple(shape), dtype, data_start + span[0], num_bytes, mapped.path)


def _check_layout(mapped: MappedFile, data_start: int, tensors: dict[str, StoredTensor]) -> None:
    """The format allows neither overlaps nor holes nor a tail: each is a sign of damage."""
    expected, previous = data_start, "the header"
    for info in sorted(tensors.values(), key=lambda item: (item.offset, item.num_bytes)):
        if info.offset < expected:
            raise FormatError(f"{mapped.path}: tensors {previous!r} and {info.name!r} overlap at byte {info.offset}")
        if info.offset > expected:
            message = f"{info.offset - expected} bytes at {expected}, before tensor {info.name!r}, belong to no tensor"
            raise FormatError(f"{mapped.path}: {message}")
        expected, previous = info.offset + info.num_bytes, info.name
    if expected != mapped.size:
        raise FormatError(f"{mapped.path}: {mapped.size - expected} bytes after the last tensor belong to none")


def read_header(mapped: MappedFile) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read and check one file's header; returns (tensors in header order, `__metadata__`).

    Raises FormatError naming the file and the offset or tensor at fault.
    """
    head = mapped.buffer[: min(64, mapped.size)]
    if mapped.size < 9 or head[8:9] != b"{":
        raise FormatError(f"{mapped.path} is not a safetensors file: it is {describe_foreign(head)}")
    length = int.from_bytes(head[:8], "little")
    if length > mapped.size - 8:
        raise FormatError(
            f"{mapped.path}: the header claims {length} bytes but {mapped.size - 8} remain; the file is truncated"
        )
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{mapped.path}: the header claims {length} bytes, more than {MAX_HEADER_BYTES >> 20} MiB")
    raw = parse_json_object(mapped.buffer[8 : 8 + length], f"{mapped.path}: header")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{mapped.path}: __metadata__ is not an object of strings")
    data_start = 8 + length
    tensors = {name: _read_entry(mapped, data_start, name, entry) for name, entry in raw.items()}
    _check_layout(mapped, data_start, tensors)
    return tensors, metadata


def _indexed_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Files of an index and its tensor -> file map; names that leave the folder are refused."""
    index = read_json(folder / INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{folder / INDEX_NAME}: 'weight_map' is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise FormatError(f"{folder / INDEX_NAME}: tensor {tensor!r} lies in {name!r}, which is no file name")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise FormatError(f"{folder}: {len(missing)} of {len(names)} files of the index are missing: {listed}")
    extra = [name for name in EXTRA_NAMES if name not in names and (folder / name).exists()]
    return [folder / name for name in (*names, *extra)], weight_map


def _unindexed_files(folder: Path) -> list[Path]:
    """The files of a folder without index: `model.safetensors`, or the only file, or one complete numbered set."""
    found = sorted(folder.glob("*.safetensors"))
    extra = [path for path in found if path.name in EXTRA_NAMES]
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME, *extra]
    main = [path for path in found if path not in extra]
    if len(main) == 1:
        match = _SHARD_NAME.match(main[0].name)
        if match is None or int(match["count"]) == 1:
            return [*main, *extra]
    if not main:
        raise UsageError(f"{folder} holds no safetensors file; give a folder with {SINGLE_NAME} or {INDEX_NAME}")
    matches = [_SHARD_NAME.match(path.name) for path in main]
    sets = {(match["stem"], int(match["count"])) for match in matches if match is not None}
    if len(sets) != 1 or None in matches:
        raise UsageError(f"{folder} holds {len(main)} safetensors files and no {INDEX_NAME}; name one file")
    ((stem, count),) = sets
    have = {int(match["number"]) for match in matches if match is not None}
    missing = [number for number in range(1, count + 1) if number not in have][:3]
    if missing:
        names = ", ".join(f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in missing)
        raise FormatError(f"{folder}: files of the set are missing: {names}")
    return [*main, *extra]


class SafetensorsFolder:
    """A safetensors model: a folder with `config.json`, or one file; opening reads headers only.

    tensors: name -> StoredTensor. Open with `SafetensorsFolder.open(path)`.
    """

    def __init__(self, path: Path, files: dict[Path, MappedFile], tensors: dict[str, StoredTensor]) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.files = files
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFolder:
        """Read all headers below `path` (a folder or one .safetensors file).

        Raises FormatError naming file, offset or tensor; UsageError when the path cannot be read.
        """
        path = Path(path)
        weight_map: dict[str, str] = {}
        if not path.exists():
            raise UsageError(f"{path} does not exist; check the path")
        if not path.is_dir():
            paths = [path]
        elif (path / INDEX_NAME).exists():
            paths, weight_map = _indexed_files(path)
        else:
            paths = _unindexed_files(path)
        files = {file: MappedFile.open(file) for file in paths}
        tensors: dict[str, StoredTensor] = {}
        for file, mapped in files.items():
            for name, info in read_header(mapped)[0].items():
                if name in tensors:
                    raise FormatError(f"{file}: tensor {name!r} is already in {tensors[name].file.name}")
                tensors[name] = info
        for name, file_name in weight_map.items():
            if name not in tensors or tensors[name].file.name != file_name:
                raise FormatError(f"{path / INDEX_NAME}: tensor {name!r} is not in {file_name}")
        return cls(path, files, tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json` beside the weights; UsageError when there is none."""
        return read_json(self.folder / "config.json")

    def json(self, name: str) -> dict[str, Any] | None:
        """Another JSON object of the folder, e.g. "generation_config.json", or None when there is no such file."""
        path = self.folder / name
        return read_json(path) if path.exists() else None

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor called `name`, a zero-copy view (a copy where the file placed it on an odd byte)."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.path}: there is no tensor {name!r}")
        mapped, dtype = self.files[info.file], DTYPES[info.dtype]
        if info.offset % dtype.itemsize == 0:
            return mapped.tensor(dtype, info.offset, info.shape)
        raw = mapped.tensor(torch.uint8, info.offset, (info.num_bytes,))
        return raw.clone().view(dtype).view(info.shape)

    def packed(self, name: str) -> PackedTensor:
        """A plain tensor (F32, F16, BF16, F64, I8..I64, F8_E4M3) as a PackedTensor without scales."""
        data = self.tensor(name)
        dtype = self.tensors[name].dtype
        fmt = find_format(dtype)
        if fmt is None or dtype not in PLAIN_DTYPES:
            raise FormatError(f"{self.path}: tensor {name!r} of {dtype} is no plain weight")
        return PackedTensor(fmt, tuple(data.shape), data, name)
