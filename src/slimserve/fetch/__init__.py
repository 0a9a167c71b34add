"""Model files: the cache folder, download with resume, verification, adoption of what is already there."""

from slimserve.fetch.ensure import ensure, ensure_all, locate
from slimserve.fetch.progress import Progress, SilentProgress, TerminalProgress
from slimserve.fetch.settings import FetchSettings, cache_folder, model_path
from slimserve.fetch.source import (
    BundledPlace,
    FileSource,
    HubPlace,
    IndexPart,
    IndexPlace,
    Notice,
    Place,
    UrlPlace,
    total_bytes,
)

__all__ = [
    "BundledPlace",
    "FetchSettings",
    "FileSource",
    "HubPlace",
    "IndexPart",
    "IndexPlace",
    "Notice",
    "Place",
    "Progress",
    "SilentProgress",
    "TerminalProgress",
    "UrlPlace",
    "cache_folder",
    "ensure",
    "ensure_all",
    "locate",
    "model_path",
    "total_bytes",
]
