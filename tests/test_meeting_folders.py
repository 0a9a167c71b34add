"""Folders of servers that were killed: the next start removes them, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slimserve.engine import meeting
from slimserve.engine.meeting import MeetingFolder, remove_abandoned

SERVER = Path(__file__).with_name("fake_server.py")
ORPHAN = """
import os, signal, sys
sys.path[:0] = {paths!r}
from slimserve.engine.meeting import MeetingFolder
folder = MeetingFolder()
open(folder.path + "/spec", "w").close()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # pytest's own folders may be too deep for a socket
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def orphan(place: Path) -> Path:
    """The folder of an owner that was killed."""
    script = ORPHAN.format(paths=[entry for entry in sys.path if entry])
    path = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout.strip()
    assert path and Path(path).parent == place and sorted(os.listdir(path)) == ["owner", "spec"]
    return Path(path)


class Server:
    """A server process over the fake engine."""

    def __init__(self, place: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        before = set(place.iterdir())
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), "0", "1", "{}"], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[1]
        (self.folder,) = set(place.iterdir()) - before

    def answers(self) -> bool:
        reply = httpx.post(self.url + "/v1/completions", json={"prompt": "say:fine|", "max_tokens": 16}, timeout=60)
        return bool(reply.json()["choices"][0]["text"] == "fine")

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)


def test_the_next_start_removes_what_a_killed_server_left(place: Path) -> None:
    killed, living = Server(place), Server(place)
    try:
        assert {killed.folder, living.folder} == set(place.iterdir())
        killed.end(signal.SIGKILL)
        assert killed.folder.exists()
        later = Server(place)
        try:
            assert set(place.iterdir()) == {living.folder, later.folder}
            assert living.answers() and later.answers()
        finally:
            later.end(signal.SIGTERM)
        assert living.answers() and set(place.iterdir()) == {living.folder}
    finally:
        living.end(signal.SIGTERM)
        killed.end(signal.SIGKILL)
    assert list(place.iterdir()) == []


def test_an_orphan_goes_and_its_sockets_with_it(orphan: Path, place: Path) -> None:
    for name in (meeting.COMMANDS, meeting.EVENTS):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(orphan / name))
    remove_abandoned()
    assert list(place.iterdir()) == []


def test_a_folder_that_is_owned_stays_whoever_looks(place: Path) -> None:
    folder = MeetingFolder()
    for _ in range(3):
        remove_abandoned()
    assert os.listdir(folder.path) == ["owner"]
    folder.remove()
    folder.remove()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "case",
    ["unmarked", "no owner", "another machine", "open to others", "a file more", "a folder more", "owner is a link"],
)
def test_what_cannot_be_judged_stays(orphan: Path, case: str) -> None:
    if case == "unmarked":  # as between the making of a folder and its mark
        (orphan / "owner").write_bytes(b"")
    elif case == "no owner":
        (orphan / "owner").unlink()
    elif case == "another machine":
        (orphan / "owner").write_bytes(b"x" + (orphan / "owner").read_bytes())
    elif case == "open to others":
        orphan.chmod(0o755)
    elif case == "a file more":
        (orphan / "notes").write_text("mine")
    elif case == "a folder more":
        (orphan / "commands").mkdir()
    elif case == "owner is a link":
        (orphan / "owner").rename(orphan.parent / "kept")
        (orphan / "owner").symlink_to(orphan.parent / "kept")
    remove_abandoned()
    assert orphan.is_dir() and (case == "no owner" or os.path.lexists(orphan / "owner"))


def test_another_users_folder_stays(orphan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: orphan.stat().st_uid + 1)
    remove_abandoned()
    assert sorted(os.listdir(orphan)) == ["owner", "spec"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to give a folder away")
def test_the_superuser_leaves_other_users_folders_alone(orphan: Path) -> None:
    os.chown(orphan, 4711, 4711)
    remove_abandoned()
    assert sorted(os.listdir(orphan)) == ["owner", "spec"]


def test_links_lead_nowhere(orphan: Path, place: Path) -> None:
    elsewhere = place / "elsewhere"
    orphan.rename(elsewhere)  # all that a meeting folder has, but not at a meeting folder's place
    (place / "slimserve-link").symlink_to(elsewhere)
    kept = place / "kept"
    kept.write_text("kept")
    (elsewhere / "commands").symlink_to(kept)
    remove_abandoned()
    assert sorted(os.listdir(elsewhere)) == ["commands", "owner", "spec"]
    (place / "slimserve-link").unlink()
    elsewhere.rename(orphan)
    (place / "slimserve-pipe").mkdir(0o700)
    os.mkfifo(place / "slimserve-pipe" / "owner", 0o600)  # would wait for ever where it is opened as it is
    (place / "slimserve-file").write_text("a file")
    remove_abandoned()
    assert sorted(path.name for path in place.iterdir()) == ["kept", "slimserve-file", "slimserve-pipe"]
    assert kept.read_text() == "kept"


def test_a_removal_that_was_cut_short_is_taken_up(orphan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "rmdir", _fail)
    monkeypatch.setattr(os, "unlink", lambda name, dir_fd: _fail() if name == "owner" else None)
    remove_abandoned()
    assert (orphan / "owner").exists()
    monkeypatch.undo()
    tempfile.tempdir, before = str(orphan.parent), tempfile.tempdir
    try:
        remove_abandoned()
    finally:
        tempfile.tempdir = before
    assert not orphan.exists()


def _fail(*_: object) -> None:
    raise OSError("as asked")


def test_no_folder_to_look_into_is_no_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "absent"))
    remove_abandoned()


def test_many_that_start_and_clean_at_once(place: Path) -> None:
    """A folder is never taken from its owner, at any moment of its making; those of the dead are gone at the end."""
    until = time.monotonic() + 3
    lost: list[str] = []

    def live(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until:
            remove_abandoned()
            folder = MeetingFolder()
            Path(folder.path, meeting.SPEC).write_bytes(b"spec")
            time.sleep(draw.random() / 100)
            remove_abandoned()
            if sorted(os.listdir(folder.path)) != ["owner", "spec"]:
                lost.append(folder.path)
            if draw.random() < 0.5:
                folder.remove()
            else:
                os.close(folder._owner or -1)  # as if killed

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    remove_abandoned()
    assert lost == [] and list(place.iterdir()) == []


def test_modes_of_what_is_made(place: Path) -> None:
    folder = MeetingFolder()
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{folder.path}/owner").st_mode) == 0o600
    folder.remove()
