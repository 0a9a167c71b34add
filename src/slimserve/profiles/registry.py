"""The profiles of this machine: those that ship with the package and those of the user's own folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slimserve.errors import SlimServeError, UsageError
from slimserve.profiles.reading import nearest
from slimserve.profiles.record import ProfileRecord, read_record

CATALOG_FOLDER = Path(__file__).resolve().parent / "catalog"


def user_folder() -> Path:
    """$SLIMSERVE_PROFILES, else $XDG_CONFIG_HOME/slimserve/profiles, else ~/.config/slimserve/profiles."""
    chosen = os.environ.get("SLIMSERVE_PROFILES", "").strip()
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".config") / "slimserve" / "profiles"


@dataclass(frozen=True, slots=True)
class Catalog:
    """Every readable record by name, and one sentence for each that is not."""

    records: dict[str, ProfileRecord]
    problems: tuple[str, ...]


def record_paths() -> dict[str, Path]:
    """Name -> file of every profile; a user's file takes the place of a shipped one of the same name."""
    paths = {path.stem: path for path in sorted(CATALOG_FOLDER.glob("*.toml"))}
    paths.update({path.stem: path for path in sorted(user_folder().glob("*.toml"))})
    return paths


def load_catalog() -> Catalog:
    """All records; a broken one becomes a problem and does not hide the others."""
    records, problems = {}, []
    for name, path in record_paths().items():
        try:
            records[name] = read_record(path)
        except SlimServeError as error:
            problems.append(str(error))
    return Catalog(records, tuple(problems))


def find_record(name: str) -> ProfileRecord:
    """The record called `name`; UsageError with the nearest name, or with what is wrong in its file."""
    paths = record_paths()
    if name not in paths:
        raise UsageError(f"there is no profile {name!r}{nearest(name, paths)}; see slimserve list")
    return read_record(paths[name])
