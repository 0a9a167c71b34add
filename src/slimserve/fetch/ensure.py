"""The one way to a model file: adopt it where it lies, else bring it from the first place that gives its bytes."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from slimserve.errors import RunError
from slimserve.fetch import hub, index
from slimserve.fetch.place import PlaceError, probe
from slimserve.fetch.progress import Progress, SilentProgress, Task, folder_bytes
from slimserve.fetch.settings import FetchSettings
from slimserve.fetch.source import BundledPlace, FileSource, HubPlace, IndexPlace, Notice, Place, UrlPlace
from slimserve.fetch.transfer import download_url
from slimserve.fetch.verify import adopt, mismatch, remember

_PACKAGE = Path(__file__).resolve().parent.parent
_MARGIN_BYTES = 64 << 20


def ensure(source: FileSource, progress: Progress | None = None, settings: FetchSettings | None = None) -> Path:
    """The path of a whole, verified file; fetched when it is not there yet.

    Places are tried in order; one that does not answer costs seconds. Safe under concurrent calls of several
    processes. Raises RunError with one sentence: offline, no place gave the bytes, wrong sha256, disk full, no
    permission.
    """
    settings = settings or FetchSettings.from_environment()
    progress = progress or SilentProgress()
    target = settings.models / source.relative
    with _disk_errors(target):
        found = locate(source, settings)
        if found is not None:
            return found
        if settings.offline:
            raise RunError(
                f"{source.name} is not in {settings.models} and offline mode is on; "
                "put the file there, or allow the network"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(settings.models, source, progress):
            found = locate(source, settings)
            if found is None:
                found = _fetch(source, target, progress, settings)
            return found


def ensure_all(
    sources: Sequence[FileSource], progress: Progress | None = None, settings: FetchSettings | None = None
) -> tuple[Path, ...]:
    """`ensure` for the files of one model, several at a time."""
    settings = settings or FetchSettings.from_environment()
    if len(sources) == 1:
        return (ensure(sources[0], progress, settings),)
    with ThreadPoolExecutor(settings.parallel, thread_name_prefix="fetch") as pool:
        return tuple(pool.map(lambda source: ensure(source, progress, settings), sources))


def locate(source: FileSource, settings: FetchSettings | None = None) -> Path | None:
    """The verified file if this machine already has it: in the cache, in the package, or in the hub's own cache.

    Nothing is fetched. RunError when the cache holds other bytes under the file's name.
    """
    settings = settings or FetchSettings.from_environment()
    target = settings.models / source.relative
    if adopt(settings.models, source, target):
        return target
    for place in source.places:
        if isinstance(place, BundledPlace):
            path = _PACKAGE / place.path
            if adopt(settings.models, source, path):
                return path
        elif isinstance(place, HubPlace):
            cached = hub.cached_by_hub(place)
            if cached is not None and cached.stat().st_size == source.num_bytes:
                with suppress(RunError):
                    if adopt(settings.models, source, cached):
                        return cached
    return None


def _fetch(source: FileSource, target: Path, progress: Progress, settings: FetchSettings) -> Path:
    staging = settings.models / ".staging" / source.relative
    staging.mkdir(parents=True, exist_ok=True)
    reasons: list[str] = []
    for place in source.places:
        if isinstance(place, BundledPlace):
            continue
        _check_disk(source, staging, place)
        task = progress.task(source.name, source.num_bytes)
        try:
            path = _from_place(place, source, staging, task, settings)
        except PlaceError as error:
            reasons.append(f"{place.describe()} {error}")
            progress.note(f"{source.name}: {reasons[-1]}")
            continue
        finally:
            task.close()
        os.replace(path, target)
        remember(settings.models, source, target)
        _keep_notices(source, target, staging, progress, settings)
        shutil.rmtree(staging, ignore_errors=True)
        return target
    tried = "; ".join(reasons) or "the record names no place that holds it"
    raise RunError(f"{source.name} could not be fetched ({tried}); check the network or put the file at {target}")


def _from_place(place: Place, source: FileSource, staging: Path, task: Task, settings: FetchSettings) -> Path:
    """A verified temporary file. A mismatch after a resumed transfer is tried once more from the first byte."""
    path, resumed = _transfer(place, source, staging, task, settings)
    reason = mismatch(source, path)
    if reason and resumed:
        _forget(place, staging)
        path, _ = _transfer(place, source, staging, task, settings)
        reason = mismatch(source, path)
    if reason:
        _forget(place, staging)
        raise PlaceError(f"gave a file that {reason}")
    task.set(source.num_bytes)
    return path


def _transfer(
    place: Place, source: FileSource, staging: Path, task: Task, settings: FetchSettings
) -> tuple[Path, bool]:
    if isinstance(place, HubPlace):
        return hub.download_from_hub(place, staging, source.num_bytes, task, settings), False
    if isinstance(place, IndexPlace):
        return index.download_from_index(place, staging, source.num_bytes, task, settings)
    assert isinstance(place, UrlPlace)
    probe(place.url, settings.connect_timeout)
    path = staging / "url"
    return path, download_url(place.url, path, source.num_bytes, task, settings)


def _forget(place: Place, staging: Path) -> None:
    if isinstance(place, HubPlace):
        hub.forget(staging)
    elif isinstance(place, IndexPlace):
        index.forget(staging)
    else:
        for path in staging.glob("url*"):
            path.unlink(missing_ok=True)


def _keep_notices(source: FileSource, target: Path, staging: Path, progress: Progress, settings: FetchSettings) -> None:
    """Write the licence notices beside the file; what the index does not give is said, not fatal."""
    for notice in source.notices:
        path = target.with_name(f"{target.name}.{notice.name}")
        if path.exists():
            continue
        try:
            path.write_bytes(_notice_bytes(notice, staging, settings))
        except PlaceError as error:
            progress.note(f"{source.name}: its notice {notice.name} could not be fetched ({error})")


def _notice_bytes(notice: Notice, staging: Path, settings: FetchSettings) -> bytes:
    if notice.part is None:
        return notice.text.encode()
    wheel = index.fetch_wheel(notice.part, staging / "notice", settings)
    content = bytearray()
    index.read_member(wheel, notice.part, content.extend, 4 << 20)
    return bytes(content)


def _check_disk(source: FileSource, staging: Path, place: Place) -> None:
    """Refuse before the transfer when the disk cannot hold what is still missing."""
    held, scratch = folder_bytes(staging), 0
    if isinstance(place, IndexPlace):
        scratch = min(len(place.parts), 6) * source.num_bytes // len(place.parts)
    needed = max(source.num_bytes - held, 0) + scratch + _MARGIN_BYTES
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise RunError(
            f"{source.name} needs {needed / 1e9:.2f} GB more in {staging.parent} and the disk has {free / 1e9:.2f} GB "
            "free; make room or set SLIMSERVE_CACHE to another disk"
        )


@contextmanager
def _locked(models: Path, source: FileSource, progress: Progress) -> Iterator[None]:
    """One fetch of a file at a time on this machine; the others wait and then adopt its result."""
    folder = models / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / (source.relative.replace("/", ",") + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.note(f"{source.name}: another process is fetching it; waiting")
        while True:
            try:
                lock.acquire(timeout=5, poll_interval=0.2)
                break
            except Timeout:
                time.sleep(0.2)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Turn the operating system's refusals into sentences."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = (
                "the disk is full; make room or set SLIMSERVE_CACHE to another disk (the part fetched so far is kept)"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = (
                f"no permission to write {error.filename or target.parent}; set SLIMSERVE_CACHE to a folder of yours"
            )
        else:
            reason = f"{error.strerror or error} ({error.filename or target.parent})"
        raise RunError(f"{target.name} could not be fetched: {reason}") from error
