"""Importance matrices: the mean square of each input channel of each weight, from llama.cpp's files or our own.

Three containers: GGUF with `general.type` = "imatrix" (tensors `<weight>.in_sum2` and `<weight>.counts`), the older
binary file (i32 count, then per entry name, calls, values), and safetensors with one float vector per weight name.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct

import torch

from slimserve.errors import FormatError
from slimserve.quant.decode import dequantize
from slimserve.weights.gguf import GgufFile
from slimserve.weights.mapped import MappedFile
from slimserve.weights.safetensors import SafetensorsFolder

_I32 = Struct("<i")
_MAX_ENTRIES = 1 << 17
_MAX_NAME = 1024

Importances = dict[str, torch.Tensor]
"""Weight name -> float32 [K], or [E, K] for stacked experts."""


def read_imatrix(path: Path) -> Importances:
    """Read an importance matrix of any of the three kinds; raises FormatError naming the file and entry."""
    with_head = MappedFile.open(path)
    head = with_head.buffer[: min(16, with_head.size)]
    if head.startswith(b"GGUF"):
        found = _from_gguf(GgufFile.open(path))
    elif head[8:9] == b"{":
        folder = SafetensorsFolder.open(path)
        found = {name: folder.tensor(name).to(torch.float32) for name in folder.tensors}
    else:
        found = _from_binary(with_head)
    for name, values in found.items():
        if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
            raise FormatError(f"{path}: importances of {name!r} are negative or not finite")
    if not found:
        raise FormatError(f"{path} holds no importances")
    return found


def _from_gguf(file: GgufFile) -> Importances:
    if file.metadata.get("general.type") != "imatrix":
        raise FormatError(f"{file.path} is a GGUF file but not an importance matrix (general.type is not 'imatrix')")
    found: Importances = {}
    for name in file.tensors:
        if not name.endswith(".in_sum2"):
            continue
        weight = name.removesuffix(".in_sum2")
        if f"{weight}.counts" not in file.tensors:
            raise FormatError(f"{file.path}: {weight + '.counts'!r} is missing beside {name!r}")
        sums = dequantize(file.packed(name))
        counts = dequantize(file.packed(f"{weight}.counts")).reshape(-1, 1)
        sums = sums.reshape(counts.shape[0], -1)
        # An expert that was never called has no importances: equal ones then.
        mean = torch.where(counts > 0, sums / counts.clamp(min=1.0), 1.0)
        found[weight] = mean if mean.shape[0] > 1 else mean[0]
    return found


def _from_binary(mapped: MappedFile) -> Importances:
    """The older file: every length is checked against what remains."""
    position = 0

    def number(what: str, limit: int) -> int:
        nonlocal position
        if position + 4 > mapped.size:
            raise FormatError(f"{mapped.path}: at offset {position}: {what} is cut off; is this an importance matrix?")
        value = int(_I32.unpack_from(mapped.buffer, position)[0])
        if not 0 <= value <= limit:
            raise FormatError(f"{mapped.path}: at offset {position}: {what} is {value}; is this an importance matrix?")
        position += 4
        return value

    found: Importances = {}
    for index in range(number("the entry count", _MAX_ENTRIES)):
        length = number(f"the name length of entry {index}", min(_MAX_NAME, mapped.size - position))
        name = mapped.buffer[position : position + length].decode("utf-8", "replace")
        position += length
        calls = max(1, number(f"the calls of {name!r}", (1 << 31) - 1))
        count = number(f"the length of {name!r}", max(0, (mapped.size - position - 4) // 4))
        raw = mapped.buffer[position : position + 4 * count]
        found[name] = torch.frombuffer(bytearray(raw), dtype=torch.float32) / calls if count else torch.empty(0)
        position += 4 * count
    return found
