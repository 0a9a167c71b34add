"""`slimserve fetch` as a user meets it: full disks, no permission, no network, mirrors, folders that are there."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_fetch_files import BODY, gets, server, settings, source  # noqa: F401

from slimserve import fetch
from slimserve.cli.main import main
from slimserve.errors import RunError
from slimserve.fetch import ensure as ensure_function
from slimserve.fetch.source import HubPlace, UrlPlace
from slimserve.profiles.registry import CATALOG_FOLDER

NOBODY = 65534


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of one MiB, empty."""
    folder = Path(tempfile.mkdtemp(prefix="slimserve-small-"))
    library = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or library.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=1m") != 0:
        folder.rmdir()
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        library.umount2(str(folder).encode(), 2)
        folder.rmdir()


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_disk_that_is_full_installs_nothing(
    server: Any,  # noqa: F811
    settings: fetch.FetchSettings,  # noqa: F811
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, behaviour = server
    behaviour.body = BODY * 2
    wanted = source(UrlPlace(url), body=behaviour.body)
    here = settings.with_folder(small_disk)
    with pytest.raises(RunError, match=r"needs .* more in .* and the disk has 0\.00 GB free"):
        ensure_function(wanted, settings=here)
    assert behaviour.requests == [] and files_below(here.models) <= {".locks/file.bin.lock"}

    # The check is passed and the disk fills up meanwhile: the system says no in the middle of the transfer.
    enough = shutil.disk_usage("/")._replace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: enough)
    with pytest.raises(RunError, match="the disk is full; make room") as caught:
        ensure_function(wanted, settings=here)
    assert "\n" not in str(caught.value)
    assert not (here.models / "file.bin").exists() and fetch.locate(wanted, here) is None
    # A smaller file of the same place still arrives once there is room: the part is not mistaken for it.
    behaviour.body = BODY
    for path in (here.models / ".staging").rglob("*"):
        if path.is_file():
            path.unlink()
    assert ensure_function(source(UrlPlace(url)), settings=here).read_bytes() == BODY


def test_a_folder_of_somebody_else_is_one_sentence(
    server: Any,  # noqa: F811
    settings: fetch.FetchSettings,  # noqa: F811
) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming somebody else needs root; test_fetch_files does the same without")
    url, behaviour = server
    folder = Path(tempfile.mkdtemp(prefix="slimserve-theirs-"))
    folder.chmod(0o755)
    try:
        os.seteuid(NOBODY)
        try:
            with pytest.raises(RunError, match="no permission to write") as caught:
                ensure_function(source(UrlPlace(url)), settings=settings.with_folder(folder))
        finally:
            os.seteuid(0)
        assert "set SLIMSERVE_CACHE to a folder of yours" in str(caught.value)
        assert list(folder.iterdir()) == [] and gets(behaviour) == []
    finally:
        shutil.rmtree(folder)


def test_a_mirror_is_named_by_the_environment(
    server: Any,  # noqa: F811
    settings: fetch.FetchSettings,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, behaviour = server
    behaviour.hub = True
    monkeypatch.setenv("HF_ENDPOINT", f"{url}/")
    monkeypatch.setenv("SLIMSERVE_CACHE", str(settings.folder))
    wanted = source(HubPlace("who/what", "deep/file.bin"))
    assert fetch.FetchSettings.from_environment().hub_endpoint == url
    assert ensure_function(wanted).read_bytes() == BODY
    assert len(gets(behaviour)) >= 1
    # From now on it is here: offline serves it, and nobody is asked.
    asked = len(behaviour.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ensure_function(wanted) == settings.models / "file.bin"
    assert len(behaviour.requests) == asked


def test_a_folder_that_is_there_is_adopted_after_verification(
    settings: fetch.FetchSettings,  # noqa: F811
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "downloads" / "a-model"
    theirs.mkdir(parents=True)
    files = [replace(source(), name=f"shard-{i}.bin", folder="a-model") for i in range(3)]
    for file in files:
        (theirs / file.name).write_bytes(BODY)
    settings.models.mkdir(parents=True)
    (settings.models / "a-model").symlink_to(theirs)
    offline = replace(settings, offline=True)
    paths = fetch.ensure_all(files, settings=offline)
    assert [path.resolve() for path in paths] == [theirs / file.name for file in files]
    (theirs / "shard-1.bin").write_bytes(BODY[:-1] + b"?")
    with pytest.raises(RunError, match=r"shard-1\.bin has sha256 .* move it away"):
        fetch.ensure_all(files, settings=offline)
    assert len(list(theirs.iterdir())) == 3


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("http://127.0.0.1:9/file", "check the network or put the file at"),
        ("wrong sha256", "gave a file that has sha256"),
    ],
)
def test_the_verb_says_in_one_sentence_what_is_wrong(
    place: str,
    words: str,
    server: Any,  # noqa: F811
    settings: fetch.FetchSettings,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, behaviour = server
    behaviour.corrupt = 99
    own = tmp_path / "profiles"
    own.mkdir()
    text = (CATALOG_FOLDER / "smollm2-135m.toml").read_text(encoding="utf-8")
    head, _, tail = text.partition("[[model.files]]")
    rest = tail[tail.index("\n[model.config]") :]
    file = source()
    (own / "mine.toml").write_text(
        head.replace('name = "smollm2-135m"', 'name = "mine"')
        + f'[[model.files]]\nname = "file.bin"\nbytes = {file.num_bytes}\nsha256 = "{file.sha256}"\n'
        + f'[[model.files.places]]\nkind = "url"\nurl = "{url if "sha256" in place else place}"\n'
        + rest,
        encoding="utf-8",
    )
    monkeypatch.setenv("SLIMSERVE_PROFILES", str(own))
    monkeypatch.setenv("SLIMSERVE_CACHE", str(settings.folder))
    assert main(["fetch", "mine"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("slimserve: file.bin could not be fetched") and words in last
    assert not (settings.models / "file.bin").exists()
    assert main(["fetch", "mine", "--offline"]) == 1
    assert "offline mode is on" in capsys.readouterr().err
    assert main(["fetch", "no-such-profile"]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
