"""One view of every container: what it says about the model, which tensors it holds, and how to read one."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from slimserve.errors import FormatError, UsageError
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf import GgufFile
from slimserve.weights.quantized import gguf_tensors, safetensors_tensors
from slimserve.weights.safetensors import SafetensorsFolder


class Container(Enum):
    """How a model is stored."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class Source:
    """An opened model: headers are read and checked, no tensor is.

    `metadata`: GGUF keys, or the object of config.json. `shapes`: logical shape of every tensor. `folder`: where
    companion files (tokenizer, templates) lie. `packed(name)` is a zero-copy view where the container allows one.
    Tensors that are made and not read have no `opened` file, and an `identity` that names them.
    """

    path: Path
    folder: Path
    container: Container
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    packed: Callable[[str], PackedTensor]
    num_bytes: int
    opened: GgufFile | SafetensorsFolder | None
    identity: str = ""

    def architecture_name(self) -> str:
        """general.architecture of a GGUF file, or the first of config.json's architectures."""
        if self.container is Container.GGUF:
            name = self.metadata.get("general.architecture")
        else:
            stated = self.metadata.get("architectures")
            name = stated[0] if isinstance(stated, list) and stated else self.metadata.get("model_type")
        if not isinstance(name, str) or not name:
            raise FormatError(f"{self.path} does not say which architecture it holds")
        return name

    def forget_pages(self) -> None:
        """Let the system take back the mapped pages that were read; who still needs one reads it from the file again.

        Nothing is ever written into the mappings, so their private pages hold no change that could be lost.
        """
        if self.opened is not None and hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self.opened.files.values():
                mapped.buffer.madvise(mmap.MADV_DONTNEED)

    def header_digest(self) -> bytes:
        """A digest of everything the container says about the model besides its tensors."""
        return hashlib.sha256(json.dumps(_plain(self.metadata), sort_keys=True).encode("utf-8", "replace")).digest()


def _plain(value: Any) -> Any:
    """A JSON-ready form of metadata; long arrays (vocabularies) by their digest."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tobytes"):
        return hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def open_source(path: Path) -> Source:
    """Open a GGUF file (or any file of a set), a .safetensors file beside its config.json, or a model folder.

    Raises UsageError where `path` is no model, FormatError where a header is damaged.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist; check the path")
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    if path.suffix == ".json":
        raise UsageError(f"{path} is a configuration; name its folder instead")
    return _from_gguf(path)


def _open_folder(folder: Path) -> Source:
    if (folder / "config.json").exists():
        return _from_safetensors(folder)
    files = sorted(folder.glob("*.gguf"))
    firsts = [file for file in files if "-of-" not in file.stem or "-00001-of-" in file.stem]
    if len(firsts) == 1:
        return _from_gguf(firsts[0])
    if firsts:
        names = ", ".join(file.name for file in firsts[:4])
        raise UsageError(f"{folder} holds {len(firsts)} GGUF models ({names}); name one of them")
    raise UsageError(f"{folder} is no model folder: it holds neither config.json nor a GGUF file")


def _from_gguf(path: Path) -> Source:
    opened = GgufFile.open(path)
    tensors = gguf_tensors(opened)
    return Source(
        opened.path,
        path.parent,
        Container.GGUF,
        opened.metadata,
        tensors.shapes,
        tensors.packed,
        opened.num_bytes,
        opened,
    )


def _from_safetensors(path: Path) -> Source:
    opened = SafetensorsFolder.open(path)
    tensors = safetensors_tensors(opened)
    return Source(
        path,
        opened.folder,
        Container.SAFETENSORS,
        opened.config,
        tensors.shapes,
        tensors.packed,
        opened.num_bytes,
        opened,
    )
