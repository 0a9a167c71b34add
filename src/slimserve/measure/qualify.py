"""Qualification: boot a profile as a user would, run its gates, and leave evidence that others can read and repeat."""

from __future__ import annotations

import json
import platform as platform_module
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from slimserve.errors import RefusalError, RunError, UsageError
from slimserve.hardware import DeviceKind, free_device_memory
from slimserve.measure import gates
from slimserve.measure.booted import BootedProfile
from slimserve.measure.gates import Gate, GateResult, Trial
from slimserve.measure.page import evidence_page
from slimserve.measure.questions import task_score
from slimserve.plan.memory import plan_json
from slimserve.profiles.planning import admit
from slimserve.profiles.resolve import ResolvedProfile

Say = Callable[[str], None]


def qualify(profile: ResolvedProfile, *, quick: bool = False, say: Say = lambda text: None) -> dict[str, Any]:
    """Run every gate of a profile in its recorded configuration; returns the evidence as plain data.

    quick: fewer cases and passes, to see whether the gates work; such evidence is marked and supports nothing.
    """
    if profile.record is None or profile.platform is None:
        raise UsageError(f"{profile.name} has no tuned record for this machine; only recorded configurations qualify")
    if profile.invalidated:
        raise UsageError(f"{', '.join(profile.invalidated)} changed; only the recorded configuration qualifies")
    _, plan = admit(profile)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    results: list[GateResult] = []
    free_before = _device_free(profile)
    with BootedProfile([profile.name]) as booted:
        say(f"serving after {booted.boot_seconds:.1f} s")

        def live_bytes() -> int:
            if profile.device is DeviceKind.CPU:
                return booted.resident_bytes()
            return free_before - _device_free(profile)

        trial = gates.start_trial(booted, profile, live_bytes, quick)
        for gate in _gates(profile, plan.total_bytes):
            results.append(_run(gate, trial))
            say(f"{'pass' if results[-1].passed else 'FAIL'}  {results[-1].name}: {results[-1].detail}")
        boot_seconds, said = booted.boot_seconds, booted.said
    return {
        "profile": profile.name,
        "platform": profile.platform.name,
        "settings_hash": profile.config_hash if not quick else f"quick run of {profile.config_hash}",
        "started": started,
        "boot_seconds": round(boot_seconds, 2),
        "hardware": _hardware(profile),
        "versions": _versions(),
        "revision": revision(),
        "settings": {name: setting.value for name, setting in profile.settings.items() if setting.value is not None},
        "files": [{"name": f.name, "bytes": f.num_bytes, "sha256": f.sha256} for f in profile.files],
        "plan": plan_json(plan),
        "gates": [result.as_json() for result in results],
        "passed": all(result.passed for result in results),
        "server_said": list(said)[:40],
    }


def _device_free(profile: ResolvedProfile) -> int:
    """Free bytes of the accelerator that the profile runs on; 0 on the CPU."""
    return 0 if profile.device is DeviceKind.CPU else free_device_memory(0)


def _gates(profile: ResolvedProfile, planned_bytes: int) -> list[Gate]:
    """The gates that this model is asked to pass."""
    assert profile.record is not None
    asked: list[Gate] = [gates.canary_text]
    if profile.record.qualify.thinks:
        asked.append(gates.canary_thinking)
    if profile.record.qualify.calls_tools:
        asked.append(gates.canary_tool)
    if gates.load_oracle(profile.name) is not None:
        asked.append(gates.agreement)
    asked += [gates.likelihood, gates.needles, gates.row_independence, gates.prefix_cache, gates.bench]
    if profile.name.startswith("qwen25-coder"):
        asked.append(task_score)
    asked += [gates.soak, lambda trial: gates.memory(trial, planned_bytes)]
    return asked


def _run(gate: Gate, trial: Trial) -> GateResult:
    """A gate with its time; a gate that breaks has failed."""
    started = time.monotonic()
    try:
        result = gate(trial)
    except RefusalError:
        raise
    except (RunError, AssertionError, KeyError, ValueError, TypeError, IndexError, OSError) as error:
        name = getattr(gate, "__name__", "gate").replace("_", "-")
        result = GateResult(name, False, f"{type(error).__name__}: {error}")
    return replace(result, seconds=time.monotonic() - started)


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
    """The git revision of the running code, marked where files differ from it; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", str(root.parent)],
            cwd=root, capture_output=True, text=True, timeout=20, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}{' with changes' if changed else ''}"


def write_evidence(evidence: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write <folder>/<profile>/<platform>.json and a readable page beside it; returns both paths."""
    home = folder / evidence["profile"]
    try:
        home.mkdir(parents=True, exist_ok=True)
        data, page = home / f"{evidence['platform']}.json", home / f"{evidence['platform']}.html"
        data.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
        page.write_text(evidence_page(evidence), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"evidence cannot be written to {home} ({error.strerror}); give another folder with --out"
        ) from error
    return data, page
