"""A file mapped into memory, and what a file is that turns out to be something else."""

from __future__ import annotations

import mmap
import os
import stat
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from slimserve.errors import FormatError, UsageError

_LFS_HEAD = b"version https://git-lfs"

_FOREIGN_HEADS: tuple[tuple[bytes, str], ...] = (
    (_LFS_HEAD, "a Git-LFS pointer, not the file itself; fetch the content with `git lfs pull`"),
    (b"version ", "a text pointer (Git-LFS style), not the file itself; fetch the content with `git lfs pull`"),
    (b"<!DOCTYPE", "a web page, probably an error page saved in place of the file; download it again"),
    (b"<html", "a web page, probably an error page saved in place of the file; download it again"),
    (b"PK\x03\x04", "a zip archive (perhaps a PyTorch checkpoint)"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"lmgg", "a GGML file from before GGUF; convert it to GGUF"),
    (b"fmgg", "a GGMF file from before GGUF; convert it to GGUF"),
    (b"tjgg", "a GGJT file from before GGUF; convert it to GGUF"),
)


def describe_foreign(head: bytes) -> str:
    """What a file starting with `head` is, as a noun phrase for an error message."""
    for magic, description in _FOREIGN_HEADS:
        if head.startswith(magic):
            return description
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file"
    return f"of an unknown kind (it starts with bytes {head[:8].hex(' ')})"


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A regular file mapped copy-on-write: a stray write reaches neither the file nor another process."""

    path: Path
    size: int
    buffer: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Map `path`; raises UsageError when it cannot be read, FormatError when it is empty or no regular file."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise FormatError(f"{path} is not a regular file")
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist; check the path") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        try:
            size = os.fstat(descriptor).st_size
            if size == 0:
                raise FormatError(f"{path} is empty (0 bytes); download it again")
            # Without NORESERVE Linux refuses a private mapping larger than memory, though no page is ever written.
            no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            buffer = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | no_reserve, prot=protection)
        except OSError as error:
            raise UsageError(f"{path} cannot be mapped: {error.strerror}") from None
        finally:
            os.close(descriptor)
        return cls(path, size, buffer)

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A zero-copy tensor of the bytes at `offset`; the caller has checked bounds and alignment."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(shape)
