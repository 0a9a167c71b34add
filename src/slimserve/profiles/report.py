"""What `slimserve list`, `show` and `plan` tell, as data and as lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slimserve import fetch
from slimserve.errors import RefusalError, SlimServeError
from slimserve.hardware import Hardware, detect, format_bytes
from slimserve.plan.memory import MemoryPlan, plan_json
from slimserve.profiles.evidence import Status, load_evidence
from slimserve.profiles.planning import fitted, plan_profile
from slimserve.profiles.record import PlatformRecord, ProfileRecord, Stage
from slimserve.profiles.registry import load_catalog
from slimserve.profiles.resolve import ResolvedProfile, resolve_record


class Verdict(Enum):
    """Whether a profile runs on a machine."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    NOT_IN_THIS_BUILD = "not in this build"


@dataclass(frozen=True, slots=True)
class Row:
    """One profile on one machine, in one line."""

    name: str
    title: str
    status: Status
    verdict: Verdict
    platform: str
    reason: str
    download_bytes: int
    here: bool
    status_reason: str

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "status": self.status.value,
            "status_reason": self.status_reason,
            "verdict": self.verdict.value,
            "fits": self.verdict is Verdict.FITS,
            "platform": self.platform,
            "reason": self.reason,
            "download_bytes": self.download_bytes,
            "downloaded": self.here,
        }


def list_rows(hardware: Hardware | None = None) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """A row per profile, those that fit first, and one sentence per record that cannot be read."""
    machine = hardware or detect()
    catalog = load_catalog()
    rows, problems = [], list(catalog.problems)
    for record in catalog.records.values():
        try:
            rows.append(row_of(record, machine))
        except SlimServeError as error:
            problems.append(f"{record.name}: {error}")
    order = {Verdict.FITS: 0, Verdict.DOES_NOT_FIT: 1, Verdict.NOT_IN_THIS_BUILD: 2}
    rows.sort(key=lambda row: (order[row.verdict], row.name))
    return tuple(rows), tuple(problems)


def row_of(record: ProfileRecord, machine: Hardware) -> Row:
    """One profile on a machine."""
    profile = fitted(resolve_record(record, hardware=machine))
    verdict, reason = judge(profile)
    status = profile.status if profile.platform is not None else recorded_status(record)
    return Row(
        name=record.name,
        title=record.model.title,
        status=status,
        verdict=verdict,
        platform=profile.platform_name if profile.platform is not None else tuned_for(record),
        reason=reason,
        download_bytes=fetch.total_bytes(record.model.files),
        here=_is_here(profile),
        status_reason=profile.status_reason,
    )


def recorded_status(record: ProfileRecord) -> Status:
    """What the record claims of any of its platforms, without evidence."""
    stages = {platform.stage for platform in record.platforms}
    return Status.REFERENCE if Stage.REFERENCE in stages else Status.IN_PROGRESS


def tuned_for(record: ProfileRecord) -> str:
    """The machines of a record, in words."""
    return "; ".join(platform.machine.describe() for platform in record.platforms)


def judge(profile: ResolvedProfile) -> tuple[Verdict, str]:
    """Whether a profile runs on its machine, and why (not), in one line."""
    refused = profile.refusals()
    if refused:
        return Verdict.NOT_IN_THIS_BUILD, f"needs {refused[0]}" + _more(len(refused) - 1)
    if profile.platform is None and profile.record is not None and profile.record.missing:
        return Verdict.NOT_IN_THIS_BUILD, f"needs {profile.record.missing[0]}"
    try:
        plan = plan_profile(profile)
    except RefusalError as error:
        return Verdict.DOES_NOT_FIT, str(error)
    if not plan.fits:
        tuned = (
            "" if profile.platform is not None or profile.record is None else f"; made for {tuned_for(profile.record)}"
        )
        return Verdict.DOES_NOT_FIT, (
            f"needs {format_bytes(plan.needed_bytes)}, {format_bytes(plan.memory.free_bytes)} free{tuned}"
        )
    files = "" if profile.files or profile.path else "; no checkpoint is named yet, give --model"
    return Verdict.FITS, fit_line(plan) + files


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def fit_line(plan: MemoryPlan) -> str:
    """What a plan that fits gives."""
    sequences = f"{plan.sequences_at_context:.1f} of {plan.max_sequences} sequences"
    return (
        f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.memory.free_bytes)} free; {sequences} at "
        f"{plan.max_context} tokens"
    )


def _is_here(profile: ResolvedProfile) -> bool:
    """Whether every file lies here with its size (hashes are verified at use, and other bytes are refused there)."""
    try:
        return bool(profile.files) and all(_lies_here(source) for source in profile.files)
    except SlimServeError:
        return False


def _lies_here(source: fetch.FileSource) -> bool:
    path = fetch.FetchSettings.from_environment().models / source.relative
    if path.is_file() and path.stat().st_size == source.num_bytes:
        return True
    bundled = any(isinstance(place, fetch.BundledPlace) for place in source.places)
    return bundled and fetch.locate(source) is not None


def list_lines(rows: tuple[Row, ...]) -> list[str]:
    """A table: name, status, verdict, why."""
    width = max((len(row.name) for row in rows), default=4)
    lines = [f"{'profile':{width}}  {'status':11}  {'on this machine':17}  why"]
    for row in rows:
        lines.append(f"{row.name:{width}}  {row.status.value:11}  {row.verdict.value:17}  {row.reason}")
    return lines


def show_json(profile: ResolvedProfile) -> dict[str, Any]:
    """Everything about a resolved profile, as plain data."""
    verdict, reason = judge(profile)
    record = profile.record
    return {
        "name": profile.name,
        "title": profile.title,
        "served_name": profile.served_name,
        "status": profile.status.value,
        "status_reason": profile.status_reason,
        "verdict": verdict.value,
        "reason": reason,
        "platform": profile.platform_name,
        "device": profile.device.value,
        "settings_hash": profile.config_hash,
        "invalidated_by": list(profile.invalidated),
        "missing": list(profile.refusals()),
        "summary": "" if record is None else record.summary,
        "licence": "" if record is None else record.model.licence,
        "size": "" if record is None else record.model.size,
        "quantization": "" if record is None else record.model.quantization,
        "recorded_bytes_per_token": {} if record is None else dict(record.model.active_bytes),
        "architecture": profile.description.architecture,
        "weight_bytes": profile.description.weight_bytes,
        "max_context": profile.description.max_context,
        "chat": profile.chat,
        "reasoning_parser": profile.reasoning_parser,
        "tool_parser": profile.tool_parser,
        "sampling": dict(profile.sampling),
        "settings": [_setting_json(profile, name) for name in profile.settings],
        "files": [] if record is None else [_file_json(source) for source in record.model.files],
        "platforms": [] if record is None else [_platform_json(entry) for entry in record.platforms],
        "notes": [] if record is None else list(record.notes),
        "evidence": [run.summary(profile.config_hash) for run in load_evidence(profile.name)],
        "plan": _plan_or_none(profile),
    }


def _plan_or_none(profile: ResolvedProfile) -> dict[str, object] | None:
    try:
        return plan_json(plan_profile(profile))
    except RefusalError:
        return None


def _setting_json(profile: ResolvedProfile, name: str) -> dict[str, Any]:
    setting = profile.settings[name]
    entry: dict[str, Any] = {"name": name, "value": setting.value, "origin": setting.origin.value}
    if setting.why:
        entry["why"] = setting.why
    if setting.recorded is not None and setting.recorded != setting.value:
        entry["recorded"] = setting.recorded
    return entry


def _file_json(source: fetch.FileSource) -> dict[str, Any]:
    return {
        "name": source.name,
        "bytes": source.num_bytes,
        "sha256": source.sha256,
        "path": source.relative,
        "places": [place.describe() for place in source.places],
        "notices": [notice.name for notice in source.notices],
    }


def _platform_json(entry: PlatformRecord) -> dict[str, Any]:
    return {
        "name": entry.name,
        "machine": entry.machine.describe(),
        "stage": entry.stage.value,
        "missing": list(entry.missing),
        "figures": [figure.line() for figure in entry.figures],
        "notes": list(entry.notes),
    }


def show_lines(profile: ResolvedProfile) -> list[str]:
    """The same for people."""
    data = show_json(profile)
    lines = [
        f"{data['name']}: {data['title']}",
        f"  status      {data['status']} ({data['status_reason']})",
        f"  here        {data['verdict']}: {data['reason']}",
        f"  platform    {data['platform']}; settings hash {data['settings_hash']}",
        f"  model       {data['architecture']}, {format_bytes(data['weight_bytes'])} of weights, context "
        f"{data['max_context']}, {'chat' if data['chat'] else 'completion only: no chat template'}",
    ]
    if profile.record is not None:
        lines.append(f"  weights     {data['size']} parameters, {data['quantization'] or 'as shipped'}")
        lines.append(f"  licence     {data['licence']}; {data['summary']}")
    if data["recorded_bytes_per_token"]:
        recorded = ", ".join(f"{name} {size / 1e9:g} GB" for name, size in data["recorded_bytes_per_token"].items())
        lines.append(f"  per token   {recorded} (recorded)")
    if data["reasoning_parser"] or data["tool_parser"]:
        lines.append(f"  parsers     reasoning {data['reasoning_parser'] or '-'}, tools {data['tool_parser'] or '-'}")
    if data["sampling"]:
        lines.append("  sampling    " + ", ".join(f"{k} {v:g}" for k, v in data["sampling"].items()) + " (the maker's)")
    for source in data["files"]:
        lines.append(f"  file        {source['name']}, {source['bytes']:,} bytes, sha256 {source['sha256'][:16]}...")
        lines += [f"              at {place}" for place in source["places"]]
    lines += _setting_lines(data["settings"])
    if data["invalidated_by"]:
        lines.append(f"  overridden  {', '.join(data['invalidated_by'])}")
    lines += [f"  missing     {clause}" for clause in data["missing"]]
    lines += [f"  note        {note}" for note in data["notes"]]
    for run in data["evidence"]:
        lines += _evidence_lines(run)
    for entry in data["platforms"]:
        stage = data["status"] if entry["name"] == data["platform"] else entry["stage"]
        lines.append(f"  {stage:11} {entry['name']} ({entry['machine']})")
        lines += [f"              {figure}" for figure in entry["figures"]]
        lines += [f"              missing: {clause}" for clause in entry["missing"]]
        lines += [f"              {note}" for note in entry["notes"]]
    return lines


def _evidence_lines(run: Mapping[str, Any]) -> list[str]:
    """One qualification run: when, what, and the word of every gate."""
    about = "these settings" if run["current"] else "other settings"
    verdict = "passed" if run["passed"] else f"failed at {', '.join(run['failed'])}"
    lines = [f"  evidence    {run['platform']}, {about}: {verdict}; {run['started'][:10]}, revision {run['revision']}, "
             f"{run['processor'] or 'processor not recorded'} ({run['file']}, a page beside it)"]  # fmt: skip
    width = max((len(name) for name in run["gates"]), default=0)
    return lines + [f"    {name:{width}} {_short(detail)}" for name, detail in run["gates"].items()]


def _short(text: str, length: int = 160) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _setting_lines(settings: list[Mapping[str, Any]]) -> list[str]:
    lines = ["  settings"]
    for setting in settings:
        if setting["value"] is None:
            continue
        was = f", was {setting['recorded']}" if "recorded" in setting else ""
        why = f": {setting['why']}" if "why" in setting else ""
        value = setting["value"]
        shown = [list(row) for row in value] if isinstance(value, tuple) else value
        lines.append(f"    {setting['name']:22} {shown!s:12} ({setting['origin']}{was}{why})")
    return lines


def plan_lines(plan: MemoryPlan) -> list[str]:
    """The plan for people: every term, then the answers."""
    lines = [f"{plan.memory.name or plan.memory.label}: {format_bytes(plan.memory.free_bytes)} of "
             f"{format_bytes(plan.memory.total_bytes)} free on {plan.memory.label}"]  # fmt: skip
    for term in plan.terms:
        lines.append(f"  {term.name:32} {format_bytes(term.num_bytes):>12}  {term.source}")
    lines.append(f"  {'total without the reserve':32} {format_bytes(plan.total_bytes):>12}")
    if plan.cache is not None:
        lines.append(
            f"fits: {plan.sequences_at_context:.2f} of {plan.max_sequences} sequences of {plan.max_context} tokens at "
            f"once; {plan.cache.num_tokens} tokens cached in all; {plan.binding} binds"
        )
    else:
        lines.append(
            "does not fit: cache_bytes is too small for one request of that length"
            if plan.caches_too_small
            else f"does not fit: {format_bytes(plan.shortfall_bytes)} more are needed"
        )
    lines.append(
        f"longest context {plan.longest_context}; one more GiB of cache holds {plan.tokens_per_gib} tokens more"
        + (f", {plan.tokens_per_gib / plan.max_context:.2f} sequences of {plan.max_context}" if plan.fits else "")
    )
    return lines + [f"note: {note}" for note in plan.notes]
