"""A file of a model hub, through the huggingface-hub library and its own settings (token, mirror, cache)."""

from __future__ import annotations

import shutil
from pathlib import Path

from slimserve.fetch.place import PlaceError, probe
from slimserve.fetch.progress import Task, folder_bytes, watched
from slimserve.fetch.settings import FetchSettings
from slimserve.fetch.source import HubPlace

_unreachable: dict[str, str] = {}


def cached_by_hub(place: HubPlace) -> Path | None:
    """The file in the hub library's own cache, where an earlier use of that library left it."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(place.repository, place.path, revision=place.revision)
    except (OSError, ValueError):
        return None
    return Path(found) if isinstance(found, str) and Path(found).is_file() else None


def download_from_hub(place: HubPlace, staging: Path, num_bytes: int, task: Task, settings: FetchSettings) -> Path:
    """Bring a hub file into `staging` and return its path; the library resumes what an earlier call left.

    Raises PlaceError within seconds when the hub does not answer (the library alone would try for much longer), and
    for every refusal of the hub.
    """
    import huggingface_hub
    from huggingface_hub import constants, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import disable_progress_bars

    endpoint = settings.hub_endpoint or constants.ENDPOINT
    if endpoint in _unreachable:
        raise PlaceError(_unreachable[endpoint])
    url = hf_hub_url(place.repository, place.path, revision=place.revision, endpoint=endpoint)
    try:
        probe(url, settings.connect_timeout)
    except PlaceError as error:
        _unreachable[endpoint] = str(error)
        raise
    disable_progress_bars()
    folder = staging / "hub"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with watched(lambda: min(folder_bytes(folder), num_bytes), task):
            fetched = hf_hub_download(
                place.repository,
                place.path,
                revision=place.revision,
                local_dir=folder,
                endpoint=endpoint,
                etag_timeout=8,
            )
    except OSError as error:
        if error.errno is not None and not _is_network(error):
            raise
        raise PlaceError(_first_sentence(error)) from error
    except (huggingface_hub.errors.HfHubHTTPError, ValueError, RuntimeError) as error:
        raise PlaceError(_first_sentence(error)) from error
    except Exception as error:
        # The library lets exceptions of whichever HTTP client it uses pass; they are all troubles of the transfer.
        if type(error).__module__.split(".")[0] not in ("httpx", "httpcore", "requests", "urllib3", "hf_xet"):
            raise
        raise PlaceError(_first_sentence(error)) from error
    return Path(fetched)


def forget(staging: Path) -> None:
    """Drop what the hub left in `staging`."""
    shutil.rmtree(staging / "hub", ignore_errors=True)


def _is_network(error: OSError) -> bool:
    return isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.split(".")[0] in (
        "requests",
        "huggingface_hub",
    )


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0][:200]
