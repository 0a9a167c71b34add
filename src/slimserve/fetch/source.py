"""What a file to fetch is: its name, its exact bytes, and the places that hold those bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from slimserve.errors import UsageError

_SHA256 = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A file in a model hub repository at a revision."""

    repository: str
    path: str
    revision: str = "main"

    def describe(self) -> str:
        """The place in words, for notes and errors."""
        return f"hub {self.repository}"


@dataclass(frozen=True, slots=True)
class UrlPlace:
    """A plain URL that serves the file's bytes."""

    url: str

    def describe(self) -> str:
        """The place in words, for notes and errors."""
        return self.url


@dataclass(frozen=True, slots=True)
class IndexPart:
    """One wheel of a package index and the data file in it (matched by the end of its path)."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class IndexPlace:
    """Wheels of a package index whose data files, joined in order, are the file."""

    parts: tuple[IndexPart, ...]

    @classmethod
    def numbered(cls, package: str, version: str, member: str, count: int = 1) -> IndexPlace:
        """A set of `count` wheels; `{n}` counts from 1 and `{i}` from 0 in the package and member patterns."""
        numbers = [{"n": i + 1, "i": i} for i in range(count)]
        return cls(tuple(IndexPart(package.format(**n), version, member.format(**n)) for n in numbers))

    def describe(self) -> str:
        """The place in words, for notes and errors."""
        first, last = self.parts[0].package, self.parts[-1].package
        return f"package index {first}" + (f" .. {last}" if last != first else "")


@dataclass(frozen=True, slots=True)
class BundledPlace:
    """A file that ships inside the installed package, at a path relative to it."""

    path: str

    def describe(self) -> str:
        """The place in words, for notes and errors."""
        return f"the installed package's {self.path}"


Place = HubPlace | IndexPlace | UrlPlace | BundledPlace


@dataclass(frozen=True, slots=True)
class Notice:
    """A licence notice kept beside a file: its text, or the wheel member that holds it."""

    name: str
    text: str = ""
    part: IndexPart | None = None


@dataclass(frozen=True, slots=True)
class FileSource:
    """One file of a model: name, exact size and sha256, places in the order to try.

    `folder` is the model's folder below `models/` for models of several files; single-file models have none.
    Raises UsageError for a name that would leave the cache folder, a size below one byte or a malformed sha256.
    """

    name: str
    num_bytes: int
    sha256: str
    places: tuple[Place, ...]
    folder: str = ""
    notices: tuple[Notice, ...] = ()

    def __post_init__(self) -> None:
        path = PurePosixPath(self.folder, self.name)
        if path.is_absolute() or ".." in path.parts or not self.name or self.name.startswith("."):
            raise UsageError(f"file name {self.name!r} is not a plain name inside the cache folder")
        if self.num_bytes < 1:
            raise UsageError(f"{self.name}: bytes is {self.num_bytes}, it must be at least 1")
        if not _SHA256.match(self.sha256):
            raise UsageError(f"{self.name}: sha256 {self.sha256!r} is not 64 lower-case hex digits")

    @property
    def relative(self) -> str:
        """Path below the cache's `models/` folder."""
        return str(PurePosixPath(self.folder, self.name))


def total_bytes(sources: Sequence[FileSource]) -> int:
    """Bytes of a set of files."""
    return sum(source.num_bytes for source in sources)
