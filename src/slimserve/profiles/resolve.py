"""From a profile or a file, flags and a machine to one frozen configuration in which every value has an origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from slimserve import fetch
from slimserve.engine.config import (
    Acceptance,
    Activations,
    CacheConfig,
    CacheDtype,
    DrafterKind,
    EngineConfig,
    NumericsConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from slimserve.errors import RefusalError, UsageError
from slimserve.fetch import FileSource
from slimserve.hardware import DeviceKind, Hardware, detect
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.plan.description import (
    Description,
    describe_config,
    describe_file,
    describe_geometry,
    describe_recorded,
)
from slimserve.profiles.evidence import Status, find_evidence, load_evidence, settings_hash
from slimserve.profiles.reading import nearest
from slimserve.profiles.record import PlatformRecord, ProfileRecord
from slimserve.profiles.registry import find_record
from slimserve.profiles.settings import SETTINGS, SettingValue, check, most_drafts

_CPU_CONTEXT = 32768
_CPU_SEQUENCES = 8
_WIDEST_SPACING = 16384


class Origin(Enum):
    """Who set a value."""

    DEFAULT = "default"
    MODEL = "model"
    RECORD = "record"
    PLATFORM = "platform"
    FLAG = "flag"
    MACHINE = "lowered to fit this machine"


@dataclass(frozen=True, slots=True)
class Setting:
    """A resolved setting. `recorded` is the value that a flag replaced, where it did."""

    name: str
    value: SettingValue | None
    origin: Origin
    why: str = ""
    recorded: SettingValue | None = None


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """Everything that a run needs to know, resolved once.

    `platform` is the tuned record in use, None where no record was made for this machine. `invalidated` names the
    overrides by which the configuration is no longer the recorded one. `path` is set for models given as files.
    `draft_model` is the model that the drafter brings, where somebody named one (see profiles.companion).
    """

    name: str
    title: str
    record: ProfileRecord | None
    platform: PlatformRecord | None
    device: DeviceKind
    device_index: int
    hardware: Hardware
    settings: Mapping[str, Setting]
    description: Description
    files: tuple[FileSource, ...]
    path: Path | None
    chat: bool
    sampling: Mapping[str, float]
    served_name: str
    reasoning_parser: str
    tool_parser: str
    status: Status
    status_reason: str
    invalidated: tuple[str, ...]
    missing: tuple[str, ...]
    draft_model: Description | None = None
    draft_acceptance: Acceptance = Acceptance.EXACT

    def value(self, name: str) -> Any:
        """A setting's value; None where nothing sets it."""
        return self.settings[name].value

    @property
    def platform_name(self) -> str:
        """The tuned record's name, or the kind of device."""
        return self.platform.name if self.platform is not None else f"{self.device.value} (untuned)"

    @property
    def config_hash(self) -> str:
        """Names this configuration; evidence counts for one hash only."""
        return _hash(self.name, self.platform, self.files, self.settings)

    @property
    def num_devices(self) -> int:
        """Accelerators that share one replica (1 for the CPU)."""
        return int(self.value("tensor_parallel") or 1)

    @property
    def max_draft(self) -> int:
        """Most drafted tokens of a row."""
        if self.value("drafter") == "none":
            return 0
        return most_drafts(self.value("draft_schedule") or ()) or SpeculationConfig().max_draft

    def refusals(self) -> tuple[str, ...]:
        """What keeps this configuration from running in this build, one clause each."""
        return (*self.missing, *_refused_settings(self.settings, self.device))

    def engine_config(self, budget_bytes: int | None = None) -> EngineConfig:
        """The engine's configuration; RefusalError naming everything that this build does not do.

        budget_bytes: memory of the caches as the plan decided (see plan.memory); a recorded cache_bytes wins.
        """
        refused = self.refusals()
        if refused:
            raise RefusalError(f"{self.name} does not run in this build: {'; '.join(refused)}")
        return self.planned_config(budget_bytes)

    def planned_config(self, budget_bytes: int | None = None) -> EngineConfig:
        """The same configuration without the question whether this build can run it; for plans."""
        value = self.value
        return EngineConfig(
            device="cpu" if self.device is DeviceKind.CPU else f"cuda:{self.device_index}",
            num_threads=value("num_threads"),
            cache=CacheConfig(
                dtype=CacheDtype(value("kv_dtype")),
                budget_bytes=value("cache_bytes") or budget_bytes,
                prefix_caching=value("prefix_caching"),
                snapshot_spacing=value("snapshot_spacing"),
            ),
            scheduler=SchedulerConfig(
                max_sequences=value("max_sequences"),
                max_context=value("max_context"),
                token_budget=value("token_budget"),
                mixed_prefill_budget=value("mixed_prefill_budget"),
                max_queue=value("max_queue"),
                skip_ahead=value("skip_ahead"),
                ageing_steps=value("ageing_steps"),
            ),
            speculation=self._speculation(),
            numerics=NumericsConfig(
                activation_dtype=torch.float32 if value("activation_dtype") == "float32" else torch.bfloat16,
                cpu_activations=Activations(value("cpu_activations")),
            ),
        )

    def _speculation(self) -> SpeculationConfig:
        """Drafting as recorded; none where this build lacks the drafter (such a profile is refused or only planned)."""
        kinds = {kind.value: kind for kind in DrafterKind}
        kind = kinds.get(self.value("drafter"), DrafterKind.NONE)
        if kind is DrafterKind.NONE:
            return SpeculationConfig()
        schedule = self.value("draft_schedule") or ()
        return SpeculationConfig(kind, self.max_draft, schedule, acceptance=self.draft_acceptance)

    def model_path(
        self, progress: fetch.Progress | None = None, fetch_settings: fetch.FetchSettings | None = None
    ) -> Path:
        """The local file or folder of the model; fetched where it is not here yet."""
        if self.path is not None:
            return self.path
        if not self.files:
            raise RefusalError(f"{self.name} names no files yet; give the model with --model FILE-OR-FOLDER")
        paths = fetch.ensure_all(self.files, progress, fetch_settings)
        return paths[0] if len(paths) == 1 else paths[0].parent


def resolve(
    profile: str | None = None,
    *,
    model: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    hardware: Hardware | None = None,
    platform: str | None = None,
    device: str | None = None,
) -> ResolvedProfile:
    """Resolve a profile by name, a model by path (an ad-hoc profile), or a profile on files of one's own.

    `flags` are settings by name (see profiles.settings). Raises UsageError for unknown names or values, RefusalError
    for what policy or build do not allow.
    """
    machine = hardware or detect()
    if profile is None and model is None:
        raise UsageError("name a profile or give --model FILE-OR-FOLDER")
    record = find_record(profile) if profile is not None else None
    path = Path(model) if model is not None else None
    if record is None:
        assert path is not None
        return _ad_hoc(path, flags or {}, machine, device)
    return resolve_record(record, flags=flags, hardware=machine, platform=platform, device=device, path=path)


def resolve_record(
    record: ProfileRecord,
    *,
    flags: Mapping[str, Any] | None = None,
    hardware: Hardware | None = None,
    platform: str | None = None,
    device: str | None = None,
    path: Path | None = None,
) -> ResolvedProfile:
    """Resolve a record that was read already."""
    machine = hardware or detect()
    entry = record.platform(platform) if platform else pick_platform(record, machine, device)
    kind = entry.machine.kind if entry is not None else _device_kind(machine, device)
    description = describe_record(record) if path is None else describe_file(path)
    settings = _defaults(kind, description)
    for origin, values in ((Origin.RECORD, record.settings), (Origin.PLATFORM, entry.settings if entry else {})):
        for name, recorded in values.items():
            settings[name] = Setting(name, recorded.value, origin, recorded.why)
    as_recorded = dict(settings)
    overridden = _apply_flags(settings, flags or {})
    _check_limits(settings, description.max_context)
    changed = tuple(name for name in overridden if settings[name].value != as_recorded[name].value)
    if path is not None:
        changed = (*changed, "model files")
    status, reason = _status(record, entry, settings, as_recorded, changed)
    missing = (*record.missing, *(entry.missing if entry else ()))
    return ResolvedProfile(
        name=record.name,
        title=record.model.title,
        record=record,
        platform=entry,
        device=kind,
        device_index=_device_index(device),
        hardware=machine,
        settings=settings,
        description=description,
        files=record.model.files,
        path=path,
        chat=record.model.chat,
        sampling=record.sampling,
        served_name=record.served_name,
        reasoning_parser=record.reasoning_parser,
        tool_parser=record.tool_parser,
        status=status,
        status_reason=reason,
        invalidated=changed,
        missing=missing,
    )


def describe_record(record: ProfileRecord) -> Description:
    """The model of a record before any download; a verified file on this machine is not needed."""
    model = record.model
    if not model.config:
        return describe_recorded(record.name, model.architecture, model.weights, model.caches, model.max_context)
    if model.formats:
        description = describe_config(record.name, model.config, model.formats, model.present)
    else:
        description = describe_geometry(record.name, model.config, model.weights, model.present)
    stated = (model.architecture or description.architecture, model.max_context)
    if stated != (description.architecture, description.max_context):
        raise UsageError(
            f"{record.name}: architecture and max_context are {stated[0]} and {stated[1]}, but config says "
            f"{description.architecture} and {description.max_context}"
        )
    return description


def pick_platform(record: ProfileRecord, machine: Hardware, device: str | None = None) -> PlatformRecord | None:
    """The tuned record made for this machine, accelerators first; None where nobody tuned one for it."""
    wanted = None if device in (None, "auto") else _device_kind(machine, device)
    matches = [entry for entry in record.platforms if matches_machine(entry, machine)]
    if wanted is not None:
        matches = [entry for entry in matches if entry.machine.kind is wanted]
    elif machine.accelerators:
        matches = [entry for entry in matches if entry.machine.kind is not DeviceKind.CPU]
    return max(matches, key=lambda entry: entry.machine.count, default=None)


def matches_machine(entry: PlatformRecord, machine: Hardware) -> bool:
    """Whether a platform record was tuned for such a machine; it is never widened to another."""
    need = entry.machine
    if need.kind is DeviceKind.CPU:
        return True
    devices = machine.of_kind(need.kind)
    # A card shows a little less than its nominal memory, and never much more.
    fitting = [
        d for d in devices
        if (not need.names or any(name.lower() in d.name.lower() for name in need.names))
        and (not need.memory_bytes or 0.9 * need.memory_bytes <= d.total_bytes <= 1.1 * need.memory_bytes)
    ]  # fmt: skip
    return len(fitting) >= need.count


def _device_kind(machine: Hardware, device: str | None) -> DeviceKind:
    """The kind that `device` names ("auto", "cpu", "cuda", "cuda:1", ...), or the machine's best."""
    if device is None or device == "auto":
        return machine.accelerators[0].kind if machine.accelerators else DeviceKind.CPU
    kinds = {kind.value: kind for kind in DeviceKind}
    name = device.partition(":")[0]
    if name not in kinds:
        raise UsageError(f"device {device!r} is not known{nearest(name, (*kinds, 'auto'))}")
    return kinds[name]


def _device_index(device: str | None) -> int:
    """The N of "cuda:N"; 0 where none is named."""
    _, colon, number = (device or "").partition(":")
    if colon and not number.isdigit():
        raise UsageError(f"device {device!r} is not a name like cuda or cuda:1")
    return int(number or 0)


def _snapshot_spacing(description: Description) -> int:
    """A power of two at which kept recurrent states take no more memory than the keys and values between them."""
    spacing = CacheConfig().snapshot_spacing
    specs = description.caches(torch.bfloat16)
    state = sum(spec.slot_bytes() for spec in specs)
    per_token = sum(spec.page_bytes() for spec in specs if spec.window is None) / BLOCK_TOKENS
    while state and spacing * per_token < state and spacing < _WIDEST_SPACING:
        spacing *= 2
    return spacing


def _defaults(kind: DeviceKind, description: Description) -> dict[str, Setting]:
    """Settings where neither record nor flag says anything."""
    cpu, max_context = kind is DeviceKind.CPU, description.max_context
    scheduler, cache = SchedulerConfig(), CacheConfig()
    values: dict[str, SettingValue | None] = dict.fromkeys(SETTINGS)
    values.update(
        max_context=min(max_context, _CPU_CONTEXT) if cpu else max_context,
        max_sequences=_CPU_SEQUENCES if cpu else scheduler.max_sequences,
        kv_dtype=CacheDtype.FP16.value if cpu else cache.dtype.value,
        state_dtype="f32",
        snapshot_spacing=_snapshot_spacing(description),
        prefix_caching=cache.prefix_caching,
        token_budget=scheduler.token_budget if cpu else 2048,
        mixed_prefill_budget=scheduler.mixed_prefill_budget if cpu else 1024,
        max_queue=scheduler.max_queue,
        skip_ahead=scheduler.skip_ahead,
        ageing_steps=scheduler.ageing_steps,
        activation_dtype="float32" if cpu else "bf16",
        cpu_activations=Activations.INT8.value,
        numerics="exact",
        drafter="none",
        tensor_parallel=1,
        data_parallel=1,
        expert_parallel=False,
        host_tier_bytes=0,
        disk_tier_bytes=0,
        expert_arena_bytes=0,
    )
    settings = {name: Setting(name, value, Origin.DEFAULT) for name, value in values.items()}
    for name in ("max_context", "snapshot_spacing"):
        settings[name] = Setting(name, values[name], Origin.MODEL)
    return settings


_FLAGS = {
    "max_context": "--ctx",
    "max_sequences": "--max-seqs",
    "num_threads": "--threads",
    "draft_schedule": "--drafts",
}
"""Flags of the command line that are not called as their settings are."""


def _apply_flags(settings: dict[str, Setting], flags: Mapping[str, Any]) -> list[str]:
    names = []
    for name, value in flags.items():
        if value is None:
            continue
        if name not in SETTINGS:
            raise UsageError(f"there is no setting {name!r}{nearest(name, SETTINGS)}")
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        # float32 keys and values exist for parity runs against an oracle; no record may ask for them.
        checked = value if (name, value) == ("kv_dtype", "float32") else check(name, value, flag)
        settings[name] = Setting(name, checked, Origin.FLAG, recorded=settings[name].value)
        names.append(name)
    return names


def _check_limits(settings: dict[str, Setting], max_context: int) -> None:
    context = settings["max_context"]
    if isinstance(context.value, int) and context.value > max_context:
        raise UsageError(f"max_context {context.value} is beyond the model's {max_context}; lower --ctx")


def _status(
    record: ProfileRecord,
    entry: PlatformRecord | None,
    settings: Mapping[str, Setting],
    as_recorded: Mapping[str, Setting],
    changed: Sequence[str],
) -> tuple[Status, str]:
    """Computed from evidence of exactly this configuration; otherwise what the platform's record says of itself."""
    if entry is None:
        return Status.IN_PROGRESS, "no tuned record for this machine"
    wanted = _hash(record.name, entry, record.model.files, as_recorded if changed else settings)
    evidence, reason = find_evidence(load_evidence(record.name), entry.name, wanted, record.qualify.gates)
    if changed:
        was = "recorded" if evidence is None else "qualified"
        return Status.IN_PROGRESS, f"changed by {', '.join(changed)}: no longer the {was} configuration"
    if evidence is not None:
        return Status.SUPPORTED, reason
    if entry.stage.value == Status.REFERENCE.value:
        return Status.REFERENCE, "figures recorded elsewhere, not reproduced here"
    return Status.IN_PROGRESS, reason


def _hash(
    name: str, platform: PlatformRecord | None, files: Sequence[FileSource], settings: Mapping[str, Setting]
) -> str:
    values = {key: setting.value for key, setting in settings.items()}
    return settings_hash(name, platform.name if platform else "", [file.sha256 for file in files], values)


def _refused_settings(settings: Mapping[str, Setting], device: DeviceKind) -> list[str]:
    """Settings whose values this build does not carry out; each is refused rather than ignored."""
    value = {name: setting.value for name, setting in settings.items()}
    refused = []
    if device not in (DeviceKind.CPU, DeviceKind.CUDA):
        refused.append(f"device {device.value} (this build computes on CPU and CUDA)")
    if value["state_dtype"] != "f32":
        refused.append(f"state_dtype {value['state_dtype']} (recurrent state is kept in f32)")
    if value["numerics"] != "exact":
        refused.append("numerics fast (every kernel of this build is exact)")
    if value["drafter"] not in {kind.value for kind in DrafterKind}:
        refused.append(f"drafter {value['drafter']} (this build does not have it)")
    elif value["drafter"] == "none" and value["draft_schedule"] and settings["drafter"].origin is not Origin.FLAG:
        refused.append("draft_schedule without a drafter")
    for name in ("tensor_parallel", "data_parallel"):
        if value[name] != 1:
            refused.append(f"{name} {value[name]} (this build runs on one device)")
    if value["expert_parallel"]:
        refused.append("expert_parallel (this build runs on one device)")
    for name, what in (("host_tier_bytes", "host tier"), ("disk_tier_bytes", "disk tier"),
                       ("expert_arena_bytes", "expert offload")):  # fmt: skip
        if value[name]:
            refused.append(f"{name} (this build has no {what} yet)")
    return refused


def _ad_hoc(path: Path, flags: Mapping[str, Any], machine: Hardware, device: str | None) -> ResolvedProfile:
    """A profile from a file's own metadata."""
    description = describe_file(path)
    kind = _device_kind(machine, device)
    settings = _defaults(kind, description)
    _apply_flags(settings, flags)
    _check_limits(settings, description.max_context)
    name = path.stem if path.suffix == ".gguf" else path.resolve().name
    return ResolvedProfile(
        name=name,
        title=f"{name} ({description.architecture})",
        record=None,
        platform=None,
        device=kind,
        device_index=_device_index(device),
        hardware=machine,
        settings=settings,
        description=description,
        files=(),
        path=path,
        chat=_has_template(path),
        sampling={},
        served_name=name,
        reasoning_parser="",
        tool_parser="",
        status=Status.IN_PROGRESS,
        status_reason="an ad-hoc profile: nobody measured it",
        invalidated=(),
        missing=(),
    )


def _has_template(path: Path) -> bool:
    """Whether the model carries a chat template."""
    from slimserve.weights.source import Container, open_source
    from slimserve.weights.tokenizer.hf_json import read_json

    source = open_source(path)
    if source.container is Container.GGUF:
        return bool(source.metadata.get("tokenizer.chat_template"))
    if (source.folder / "chat_template.jinja").exists() or (source.folder / "chat_template.json").exists():
        return True
    return "chat_template" in (read_json(source.folder / "tokenizer_config.json") or {})
