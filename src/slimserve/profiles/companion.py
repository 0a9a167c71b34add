"""The model that a drafter brings: named by its files or by a profile, known from headers or from a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slimserve import fetch
from slimserve.engine.config import DrafterKind
from slimserve.engine.speculate.build import check_block_drafter, check_small_model
from slimserve.errors import RefusalError, UsageError
from slimserve.fetch import FileSource
from slimserve.plan.description import Description, describe_file
from slimserve.profiles.registry import find_record, record_paths
from slimserve.profiles.resolve import describe_record


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A drafter's own model before it is loaded. `path` is None where a record names its files."""

    description: Description
    path: Path | None = None
    files: tuple[FileSource, ...] = ()

    def locate(self, progress: fetch.Progress | None = None) -> Path:
        """The local file or folder; fetched where it is not here yet."""
        if self.path is not None:
            return self.path
        paths = fetch.ensure_all(self.files, progress, None)
        return paths[0] if len(paths) == 1 else paths[0].parent


def find_draft_model(named: str, kind: DrafterKind, target: Description) -> DraftModel:
    """The model that a path or a profile's name means, checked against the model that it drafts for.

    Raises UsageError where there is no such path or profile, RefusalError where it cannot draft for `target`.
    """
    path = Path(named)
    if path.exists():
        found = DraftModel(describe_file(path, drafter=kind is DrafterKind.DFLASH2), path)
    elif named in record_paths():
        found = _of_record(named, kind)
    else:
        raise UsageError(f"--draft-model {named!r} is neither a file or folder nor a profile (slimserve list)")
    own, other = target.config, found.description.config
    if own is not None and other is not None:
        check = check_block_drafter if kind is DrafterKind.DFLASH2 else check_small_model
        check(own, other)
    return found


def _of_record(name: str, kind: DrafterKind) -> DraftModel:
    if kind is not DrafterKind.MODEL:
        raise UsageError(f"--draft-model {name!r} is a profile; a {kind.value} drafter is named by its file or folder")
    record = find_record(name)
    if not record.model.files:
        raise RefusalError(f"the profile {name} names no files yet; give the drafter's files with --draft-model")
    return DraftModel(describe_record(record), files=record.model.files)
