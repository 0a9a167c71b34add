"""GGUF models: one file or a numbered set, read in place from a memory mapping."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimserve.errors import FormatError, UsageError
from slimserve.quant.formats import PLAIN_DTYPES
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf_header import GgufHeader, TensorInfo, ValueType, read_header
from slimserve.weights.mapped import MappedFile

__all__ = ["GgufFile", "TensorInfo", "shard_paths"]

_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_MAX_SHARDS = 4096


def shard_paths(path: Path) -> list[Path]:
    """All files of the set that `path` belongs to, in order; `[path]` if its name is not a shard's.

    Raises FormatError naming the first missing shard, or a number outside the set.
    """
    match = _SHARD_NAME.match(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= _MAX_SHARDS:
        raise FormatError(f"{path}: shard {number} of {count} is not a possible name")
    paths = [path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]
    missing = [shard.name for shard in paths if not shard.exists()]
    if missing:
        if not path.exists():
            raise UsageError(f"{path} does not exist; check the path")
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise FormatError(f"{path.name} is one of {count} files; missing beside it: {names}")
    return paths


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF model, possibly split over files; opening reads headers only.

    metadata: key -> int, float, bool, str, list[str] or a read-only numpy array of numbers, from the first file.
        Strings that are not UTF-8 hold their bytes as surrogate escapes.
    value_types: key -> ValueType in the file (for an array: of its items).
    tensors: name -> TensorInfo, in file order.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    value_types: dict[str, ValueType]
    tensors: dict[str, TensorInfo]
    files: dict[Path, MappedFile]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Read the headers of `path` and of the other files of its set.

        Raises FormatError naming file and offset, key or tensor; UsageError when the path cannot be read.
        """
        paths = shard_paths(Path(path))
        files = {shard: MappedFile.open(shard) for shard in paths}
        headers = [read_header(mapped) for mapped in files.values()]
        _check_split(paths, headers)
        tensors: dict[str, TensorInfo] = {}
        for shard, header in zip(paths, headers, strict=True):
            for name, info in header.tensors.items():
                if name in tensors:
                    raise FormatError(f"{shard}: tensor {name!r} is already in {tensors[name].file.name}")
                tensors[name] = info
        _check_tensor_count(paths, headers, len(tensors))
        return cls(paths[0], headers[0].version, headers[0].metadata, headers[0].value_types, tensors, files)

    @property
    def architecture(self) -> str:
        """`general.architecture`; raises FormatError when the file does not say."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise FormatError(f"{self.path}: key 'general.architecture' is missing; the file is not a model")
        return value

    @property
    def type_counts(self) -> dict[str, int]:
        """How many tensors have each format, most frequent first."""
        return dict(Counter(info.format.name for info in self.tensors.values()).most_common())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def packed(self, name: str) -> PackedTensor:
        """The tensor called `name`, as a zero-copy view of the mapping; raises FormatError when there is none."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.path}: there is no tensor {name!r}")
        mapped = self.files[info.file]
        dtype = PLAIN_DTYPES.get(info.format.name)
        if dtype is not None:
            return PackedTensor(info.format, info.shape, mapped.tensor(dtype, info.offset, info.shape), name)
        shape = (*info.shape[:-1], info.format.row_bytes(info.shape[-1]))
        return PackedTensor(info.format, info.shape, mapped.tensor(torch.uint8, info.offset, shape), name)


def _check_split(paths: list[Path], headers: list[GgufHeader]) -> None:
    """Names and `split.*` keys must tell the same story."""
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if count in (0, 1) and len(paths) == 1:
            continue
        if count != len(paths):
            message = f"{path} says that it is one of {count} files, but its name says {len(paths)}"
            raise FormatError(f"{message}; give shards their original names NAME-00001-of-{len(paths):05d}.gguf")
        if number != index:
            raise FormatError(f"{path} holds shard {number + 1} under the name of shard {index + 1}")


def _check_tensor_count(paths: list[Path], headers: list[GgufHeader], found: int) -> None:
    expected = headers[0].metadata.get("split.tensors.count")
    if len(paths) > 1 and expected is not None and expected != found:
        raise FormatError(f"{paths[0]}: the set claims {expected} tensors but its {len(paths)} files hold {found}")
