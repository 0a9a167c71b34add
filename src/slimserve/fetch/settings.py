"""Where fetched files lie and how patient fetching is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from slimserve.errors import UsageError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def environment_flag(name: str) -> bool:
    """Whether an on/off environment variable is on; UsageError for a value that is neither."""
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageError(f"{name}={value!r} is neither 1 nor 0")


def cache_folder() -> Path:
    """$SLIMSERVE_CACHE, else $XDG_CACHE_HOME/slimserve, else ~/.cache/slimserve."""
    chosen = os.environ.get("SLIMSERVE_CACHE", "").strip()
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "slimserve"


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Cache folder, offline switch, and the patience of transfers in seconds.

    `connect_timeout` bounds the look whether a place answers at all; `stall_timeout` bounds silence in the middle
    of a transfer; `attempts` counts tries without progress. `pip_command` brings wheels with the user's own settings.
    """

    folder: Path
    offline: bool = False
    connect_timeout: float = 4.0
    stall_timeout: float = 20.0
    attempts: int = 4
    backoff: float = 0.5
    parallel: int = 3
    pip_command: tuple[str, ...] = (sys.executable, "-m", "pip")
    hub_endpoint: str | None = None

    @classmethod
    def from_environment(cls, *, offline: bool = False) -> FetchSettings:
        """Settings of this process: SLIMSERVE_CACHE, SLIMSERVE_OFFLINE, HF_HUB_OFFLINE, HF_ENDPOINT."""
        switched_off = offline or environment_flag("SLIMSERVE_OFFLINE") or environment_flag("HF_HUB_OFFLINE")
        endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or None
        return cls(folder=cache_folder(), offline=switched_off, hub_endpoint=endpoint)

    def with_folder(self, folder: Path) -> FetchSettings:
        """The same settings with another cache folder."""
        return replace(self, folder=folder)

    @property
    def models(self) -> Path:
        """The folder that holds whole, verified files."""
        return self.folder / "models"


def model_path(file_name: str) -> Path:
    """Where a single-file model lies: <cache>/models/<file name> (it may not exist yet)."""
    return cache_folder() / "models" / file_name
