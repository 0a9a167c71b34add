"""Evidence: what a qualification run left behind, and the status that is computed from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from slimserve.errors import FormatError, UsageError
from slimserve.weights.small_file import read_small_file

_MOST_BYTES = 16 << 20
EVIDENCE_FOLDER = Path(__file__).resolve().parent / "evidence"
CHANGED = " with changes"
"""End of a git revision to whose files somebody made changes."""


class Status(Enum):
    """What may be claimed of a profile on a platform."""

    SUPPORTED = "supported"
    REFERENCE = "reference"
    IN_PROGRESS = "in-progress"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One qualification run. `gates` maps each gate to whether it passed; `body` is the whole document."""

    profile: str
    platform: str
    settings_hash: str
    gates: Mapping[str, bool]
    path: Path
    body: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether there were gates and all of them passed."""
        return bool(self.gates) and all(self.gates.values())

    @property
    def revision(self) -> str:
        """The git revision of the code that was qualified, or "unknown"."""
        return str(self.body.get("revision", "unknown"))

    @property
    def started(self) -> str:
        """When the run began, in UTC; empty where the file does not say."""
        return str(self.body.get("started", ""))

    def summary(self, wanted_hash: str) -> dict[str, Any]:
        """What `show` tells of it: `current` is whether it is about the settings of `wanted_hash`."""
        gates = self.body["gates"]
        failed = [name for name, ok in self.gates.items() if not ok]
        return {
            "file": f"{self.path.parent.name}/{self.path.name}",
            "platform": self.platform,
            "current": self.settings_hash == wanted_hash,
            "passed": self.passed,
            "started": self.started,
            "revision": self.revision,
            "processor": self.body.get("hardware", {}).get("cpu", ""),
            "failed": failed,
            "gates": {str(gate["name"]): str(gate.get("detail", "")) for gate in gates},
        }


def settings_hash(profile: str, platform: str, files: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The hash that names a configuration: profile, platform, sha256 of its files, every engine setting."""
    content = {"profile": profile, "platform": platform, "files": list(files), "settings": dict(settings)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()[:16]


def load_evidence(profile: str, folder: Path | None = None) -> tuple[Evidence, ...]:
    """Evidence files of a profile (<folder>/<profile>/*.json); UsageError naming a damaged one."""
    found = []
    for path in sorted(((folder or EVIDENCE_FOLDER) / profile).glob("*.json")):
        try:
            body = json.loads(read_small_file(path, _MOST_BYTES))
            gates = {str(gate["name"]): gate["passed"] is True for gate in body["gates"]}
            evidence = Evidence(
                str(body["profile"]), str(body["platform"]), str(body["settings_hash"]), gates, path, body
            )
        except (FormatError, OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no evidence file ({type(error).__name__}: {error}); remove it") from error
        if evidence.profile == profile:
            found.append(evidence)
    return tuple(found)


def find_evidence(
    found: Sequence[Evidence], platform: str, wanted_hash: str, gates: Sequence[str]
) -> tuple[Evidence | None, str]:
    """The evidence that supports a configuration, or None and why there is none.

    gates: what a qualification of the profile asks today; evidence that lacks one of them supports nothing, nor does
    evidence of code that nobody can check out.
    """
    here = [evidence for evidence in found if evidence.platform == platform]
    if not here:
        return None, "no qualification run on this platform"
    same = [evidence for evidence in here if evidence.settings_hash == wanted_hash]
    if not same:
        return None, "qualified with other settings; run slimserve qualify again"
    failed = [name for name, ok in same[-1].gates.items() if not ok]
    passed = [evidence for evidence in same if evidence.passed]
    if not passed:
        return None, f"qualification failed at {', '.join(failed) or 'its first gate'}"
    lacking = [name for name in gates if name not in passed[-1].gates]
    if lacking:
        return None, f"qualified without {', '.join(lacking)}; run slimserve qualify again"
    if passed[-1].revision.endswith(CHANGED):
        return None, "qualified by code with local changes; commit them and run slimserve qualify again"
    return passed[-1], f"qualified {passed[-1].started[:10]} at revision {passed[-1].revision}"
