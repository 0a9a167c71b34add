"""Qualification: boot a profile as a user would, run its gates, and leave evidence that others can read and repeat."""

from __future__ import annotations

import json
import os
import platform as platform_module
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import slimserve
from slimserve import fetch
from slimserve.errors import RefusalError, RunError, UsageError
from slimserve.hardware import DeviceKind, free_device_memory
from slimserve.measure import gates, gates_load
from slimserve.measure.booted import BootedProfile
from slimserve.measure.gates import GateResult, Trial
from slimserve.measure.gates_needles import needles
from slimserve.measure.page import evidence_page
from slimserve.measure.questions import task_score
from slimserve.plan.memory import MemoryPlan, plan_json
from slimserve.profiles.evidence import CHANGED
from slimserve.profiles.planning import admit, fitted
from slimserve.profiles.resolve import Origin, ResolvedProfile
from slimserve.profiles.synthetic import SYNTHETIC, synthetic_of

Say = Callable[[str], None]
Gate = Callable[[Trial], GateResult]

RATE_NOISE = 0.25
"""Largest difference, as a share of the larger one, between the median rates that two boots of one build may show; a
machine on which they differ by more is too busy for its rates to say anything."""
RATE_NAMES = r"tokens_per_second\..*\.median"

WORDLESS = ("row-independence", "prefix-cache", "concurrency", "bench-exact", "soak", "memory")
"""Gates that ask nothing of what a model says: those that synthetic weights can pass."""
MADE = " with synthetic weights"
"""End of the platform's name in evidence of synthetic weights, which therefore supports no platform."""


def qualify(
    profile: ResolvedProfile, *, weights: str | None = None, quick: bool = False, say: Say = lambda text: None
) -> dict[str, Any]:
    """Run every gate of a profile in its recorded configuration; returns the evidence as plain data.

    Every gate runs twice, in two boots of the same build: what must be equal is compared to the last bit, and what may
    differ (rates, memory) tells its noise. quick: one boot, fewer cases and passes, to see whether the gates work; such
    evidence is marked and supports nothing. weights "synthetic": the gates of WORDLESS on made weights at the profile's
    real geometry; speed, memory and independence are shown by it, but nothing is supported.
    """
    made = synthetic_of(profile, weights) is not None
    if profile.record is None or profile.platform is None:
        raise UsageError(f"{profile.name} has no tuned record for this machine; only recorded configurations qualify")
    if profile.invalidated:
        raise UsageError(f"{', '.join(profile.invalidated)} changed; only the recorded configuration qualifies")
    lowered = [s.name for s in fitted(profile, made=made).settings.values() if s.origin is Origin.MACHINE]
    if lowered:
        raise RefusalError(
            f"{profile.name} runs here with less {', '.join(lowered)} only; qualify it on a larger machine"
        )
    _, plan = admit(profile, made=made)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    boots = [_boot(profile, plan, quick, say, made) for _ in range(1 if quick else 2)]
    results = [calibrated(runs) for runs in zip(*(boot.results for boot in boots), strict=True)]
    for result in results:
        if not result["passed"]:
            say(f"FAIL  {result['name']}: {result['detail']}")
    evidence = {
        "profile": profile.name,
        "platform": profile.platform.name + (MADE if made else ""),
        "settings_hash": profile.config_hash if not quick else f"quick run of {profile.config_hash}",
        "started": started,
        "boot_seconds": [round(boot.seconds, 2) for boot in boots],
        "hardware": _hardware(profile),
        "versions": _versions(),
        "revision": revision(),
        "settings": {name: setting.value for name, setting in profile.settings.items() if setting.value is not None},
        "asked": {**asdict(profile.record.qualify), "needle_style": profile.record.qualify.needle_style.value},
        "files": [{"name": f.name, "bytes": f.num_bytes, "sha256": f.sha256} for f in profile.files if not made],
        "plan": plan_json(plan),
        "gates": results,
        "passed": all(result["passed"] for result in results),
        "server_said": list(boots[0].said)[:40],
    }
    cleaned: dict[str, Any] = without_places(evidence)
    return cleaned


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot of the profile: seconds until it served, what its gates found, what the server said."""

    seconds: float
    results: tuple[GateResult, ...]
    said: tuple[str, ...]


def _boot(profile: ResolvedProfile, plan: MemoryPlan, quick: bool, say: Say, made: bool) -> Boot:
    free_before = _device_free(profile)
    results: list[GateResult] = []
    with BootedProfile([profile.name, *(("--weights", SYNTHETIC) if made else ())]) as booted:
        say(f"serving after {booted.boot_seconds:.1f} s")

        def live_bytes() -> int:
            if profile.device is DeviceKind.CPU:
                return booted.resident_bytes()
            return free_before - _device_free(profile)

        trial = gates.start_trial(booted, profile, live_bytes, quick)
        memory = gates_load.MemoryGate(plan, live_bytes(), profile.device is DeviceKind.CPU)
        for name, gate in _gates(profile, memory, made):
            results.append(_run(name, gate, trial))
            say(f"{'pass' if results[-1].passed else 'FAIL'}  {name}: {results[-1].detail}")
        return Boot(booted.boot_seconds, tuple(results), booted.said)


def _device_free(profile: ResolvedProfile) -> int:
    """Free bytes of the accelerator that the profile runs on; 0 on the CPU."""
    return 0 if profile.device is DeviceKind.CPU else free_device_memory(0)


def _gates(profile: ResolvedProfile, memory: Gate, made: bool = False) -> list[tuple[str, Gate]]:
    """The gates that this model is asked to pass, by name; made: with synthetic weights."""
    assert profile.record is not None
    known: dict[str, Gate] = {
        "canary-text": gates.canary_text, "canary-thinking": gates.canary_thinking, "canary-tool": gates.canary_tool,
        "likelihood": gates.likelihood, "needles": needles, "row-independence": gates.row_independence,
        "prefix-cache": gates.prefix_cache, "concurrency": gates_load.concurrency, "bench-exact": gates_load.bench,
        "task-score": task_score, "soak": gates_load.soak, "memory": memory,
    }  # fmt: skip
    asked = [(name, known[name]) for name in profile.record.qualify.gates if not made or name in WORDLESS]
    if not made and gates.load_oracle(profile.name) is not None:
        asked.insert([name for name, _ in asked].index("likelihood"), ("agreement", gates.agreement))
    return asked


def _run(name: str, gate: Gate, trial: Trial) -> GateResult:
    """A gate with its time; a gate that breaks has failed."""
    started = time.monotonic()
    try:
        result = gate(trial)
    except RefusalError:
        raise
    except (RunError, AssertionError, KeyError, ValueError, TypeError, IndexError, OSError) as error:
        result = GateResult(name, False, f"{type(error).__name__}: {error}")
    return replace(result, seconds=time.monotonic() - started)


def calibrated(runs: Sequence[GateResult]) -> dict[str, Any]:
    """One gate from its runs in boots of the same build, as plain data.

    It passes where every run passed, where what must be exact is the same in all, and where rates differ by no more
    than RATE_NOISE. `noise`: for every figure the difference between its runs as a share of the larger one.
    """
    first = runs[0]
    failed = next((run for run in runs if not run.passed), None)
    shown = failed or first
    differing = sorted(
        {name for run in runs[1:] for name, value in first.exact.items() if run.exact.get(name) != value}
    )
    leaves = [_leaves(run.figures) for run in runs]
    noise = {
        name: (max(values) - min(values)) / (max(map(abs, values)) or 1.0)
        for name in leaves[0]
        if len(values := [found[name] for found in leaves if name in found]) == len(runs) > 1
    }
    loud = [name for name, value in noise.items() if re.fullmatch(RATE_NAMES, name) and value > RATE_NOISE]
    notes = [f"two boots DIFFER in {', '.join(differing)}"] if differing else []
    notes += [f"two boots differ by {noise[name]:.0%} in {name}: the machine was too busy" for name in loud]
    return {
        "name": first.name,
        "passed": failed is None and not differing and not loud,
        "detail": "; ".join([shown.detail, *notes]),
        "figures": dict(first.figures),
        "again": [dict(run.figures) for run in runs[1:]],
        "exact": dict(first.exact),
        "noise": noise,
        "seconds": [round(run.seconds, 2) for run in runs],
    }


def _leaves(value: Any, path: str = "") -> dict[str, float]:
    """Numbers of nested figures by dotted path."""
    if isinstance(value, Mapping):
        found: dict[str, float] = {}
        for key, inner in value.items():
            found |= _leaves(inner, f"{path}.{key}" if path else str(key))
        return found
    return {path: float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else {}


def without_places(value: Any) -> Any:
    """Plain data without this machine's folders and its name, which are nobody's business."""
    models = fetch.FetchSettings.from_environment().models
    folders = {str(Path(slimserve.__file__).resolve().parents[2]): ".", str(Path.home()): "~", str(models): "<models>"}
    if Path.home() not in models.parents:
        folders[str(models.parent)] = "<cache>"
    longest_first = sorted((folder for folder in folders if len(folder) > 1), key=len, reverse=True)
    host = platform_module.node()

    def clean(inner: Any) -> Any:
        if isinstance(inner, Mapping):
            return {key: clean(item) for key, item in inner.items()}
        if isinstance(inner, (list, tuple)):
            return [clean(item) for item in inner]
        if not isinstance(inner, str):
            return inner
        for folder in longest_first:
            inner = inner.replace(folder, folders[folder])
        return re.sub(rf"\b{re.escape(host)}\b", "<host>", inner) if len(host) > 3 else inner

    return clean(value)


def _hardware(profile: ResolvedProfile) -> dict[str, Any]:
    machine = profile.hardware
    return {
        "cpu": machine.cpu_model,
        "cores": machine.num_cores,
        "memory_bytes": machine.memory_total,
        "accelerators": [
            {"name": d.name, "bytes": d.total_bytes, "capability": d.capability} for d in machine.accelerators
        ],
        "system": platform_module.platform(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform_module.python_version(), "torch": torch.__version__}
    for name in ("slimserve-engine", "triton", "tokenizers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> str:
    """The git revision of the running code, marked where files differ from it.

    A copy that is in no checkout may be told its revision by $SLIMSERVE_REVISION, else it is "unknown".
    """
    root = Path(__file__).resolve().parent
    try:
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", Path(__file__).name], cwd=root, capture_output=True, timeout=20,
            check=True,
        )  # fmt: skip
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "..", ":(exclude)../profiles/evidence"],
            cwd=root, capture_output=True, text=True, timeout=20, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        stated = os.environ.get("SLIMSERVE_REVISION", "")
        return f"{stated} as stated, in no checkout" if stated else "unknown"
    return f"{head}{CHANGED if changed else ''}"


def write_evidence(evidence: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write <folder>/<profile>/<platform>.json and a readable page beside it; returns both paths."""
    home = folder / evidence["profile"]
    try:
        home.mkdir(parents=True, exist_ok=True)
        name = evidence["platform"].replace(MADE, "-synthetic")
        data, page = home / f"{name}.json", home / f"{name}.html"
        data.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
        page.write_text(evidence_page(evidence), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"evidence cannot be written to {home} ({error.strerror}); give another folder with --out"
        ) from error
    return data, page
