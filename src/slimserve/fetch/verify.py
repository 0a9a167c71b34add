"""Size and sha256 of files, remembered in a sidecar so that a start does not hash gigabytes again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slimserve.errors import RunError
from slimserve.fetch.source import FileSource

_CHUNK = 1 << 22


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """sha256 of a file; `on_bytes` gets the bytes hashed so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes is not None:
                on_bytes(done)
    return digest.hexdigest()


def _sidecar(models: Path, source: FileSource) -> Path:
    return models / ".verified" / f"{source.relative}.json"


def _fingerprint(path: Path) -> dict[str, int | str]:
    stat = path.stat()
    return {"path": str(path.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def is_remembered(models: Path, source: FileSource, path: Path) -> bool:
    """Whether these very bytes (same path, size and modification time) were verified before."""
    try:
        record = json.loads(_sidecar(models, source).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record == {**_fingerprint(path), "sha256": source.sha256})


def remember(models: Path, source: FileSource, path: Path) -> None:
    """Keep the result of a verification; a folder that cannot be written only costs a later hash."""
    sidecar = _sidecar(models, source)
    temporary = sidecar.with_suffix(f".{os.getpid()}.tmp")
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**_fingerprint(path), "sha256": source.sha256}), encoding="utf-8")
        temporary.replace(sidecar)
    except OSError:
        with suppress(OSError):  # on a file system that is read-only, even this is refused
            temporary.unlink(missing_ok=True)


def mismatch(source: FileSource, path: Path, on_bytes: Callable[[int], None] | None = None) -> str | None:
    """Why a file's bytes are not the source's, in words, or None; the size is looked at before any hashing."""
    size = path.stat().st_size
    if size != source.num_bytes:
        return f"has {size:,} bytes instead of {source.num_bytes:,}"
    found = file_sha256(path, on_bytes)
    if found != source.sha256:
        return f"has sha256 {found[:16]}... instead of {source.sha256[:16]}..."
    return None


def adopt(models: Path, source: FileSource, path: Path) -> bool:
    """Whether an existing file (or link) at `path` holds the source's bytes.

    False where nothing lies there. RunError where something else does: it is somebody's file and is left alone.
    """
    if not path.exists():
        return False
    if not path.is_file():
        raise RunError(f"{path} is not a file; move it away to fetch {source.name}")
    try:
        if is_remembered(models, source, path):
            return True
        reason = mismatch(source, path)
    except PermissionError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); give this user permission to read it") from error
    if reason:
        raise RunError(f"{path} {reason}; move it away and start again to fetch the right one")
    remember(models, source, path)
    return True
