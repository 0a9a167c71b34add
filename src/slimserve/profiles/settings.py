"""Every engine setting that a record or a flag may name: its type, bounds, and what it does in this build.

One table: the schema, the flags, the resolution and `slimserve show` all read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slimserve.errors import RefusalError, UsageError
from slimserve.hardware import parse_bytes

KV_POLICY = (
    "keys and values may be stored as bf16, fp16 or fp8 (e4m3) only; every other quantization of the KV cache, "
    "TurboQuant included, is prohibited"
)

SettingValue = int | str | bool | tuple[tuple[int, int, int], ...]


class SettingKind(Enum):
    """How a setting's value reads."""

    INTEGER = "integer"
    BOOLEAN = "boolean"
    CHOICE = "choice"
    BYTES = "bytes"
    SCHEDULE = "schedule"


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting. `choices` bounds CHOICE; minimum, maximum and multiple bound INTEGER.

    `performance` settings change neither tokens nor what was qualified about them; they still change the hash.
    """

    name: str
    kind: SettingKind
    meaning: str
    minimum: int = 0
    maximum: int = 1 << 31
    multiple: int = 1
    choices: tuple[str, ...] = ()


_I, _B, _C, _S = SettingKind.INTEGER, SettingKind.BOOLEAN, SettingKind.CHOICE, SettingKind.BYTES
SETTINGS: dict[str, SettingSpec] = {
    spec.name: spec
    for spec in (
        SettingSpec("max_context", _I, "longest prompt plus reply, in tokens", 64),
        SettingSpec("max_sequences", _I, "requests that run at once", 1, 4096),
        SettingSpec("kv_dtype", _C, "storage of keys, values and latents", choices=("bf16", "fp16", "fp8")),
        SettingSpec("state_dtype", _C, "storage of recurrent state", choices=("f32", "bf16")),
        SettingSpec("snapshot_spacing", _I, "tokens between kept recurrent states", 64, 1 << 24, 64),
        SettingSpec("cache_bytes", _S, "memory of all caches together"),
        SettingSpec("prefix_caching", _B, "whether later prompts reuse the prefixes of earlier ones"),
        SettingSpec("token_budget", _I, "tokens of one step", 16, 1 << 20),
        SettingSpec("mixed_prefill_budget", _I, "prompt tokens of a step that also decodes", 16, 1 << 20),
        SettingSpec("max_queue", _I, "waiting requests before a refusal", 1, 1 << 20),
        SettingSpec("skip_ahead", _I, "waiting requests tried past one that does not fit now", 0, 1 << 16),
        SettingSpec("ageing_steps", _I, "steps after which nothing passes a waiting request", 1, 1 << 20),
        SettingSpec("activation_dtype", _C, "dtype of activations", choices=("float32", "bf16")),
        SettingSpec("cpu_activations", _C, "what CPU products multiply weights with", choices=("int8", "float")),
        SettingSpec("numerics", _C, "exact: a row's bits never depend on others", choices=("exact", "fast")),
        SettingSpec("num_threads", _I, "CPU threads", 1, 1024),
        SettingSpec("drafter", _C, "who drafts tokens", choices=("none", "nextn", "dflash2", "lookup", "model")),
        SettingSpec("draft_schedule", SettingKind.SCHEDULE, "[from, to, drafts] by running sequences"),
        SettingSpec("tensor_parallel", _I, "devices that share one model", 1, 64),
        SettingSpec("data_parallel", _I, "replicas of the model", 1, 64),
        SettingSpec("expert_parallel", _B, "whole experts per device"),
        SettingSpec("host_tier_bytes", _S, "pinned memory that holds cold cache"),
        SettingSpec("disk_tier_bytes", _S, "disk that holds cold cache"),
        SettingSpec("expert_arena_bytes", _S, "device memory for offloaded experts"),
    )
}


def check(name: str, value: Any, where: str) -> SettingValue:
    """A setting's value, checked; UsageError naming `where`, the value and what is allowed.

    RefusalError with the policy for a KV dtype that it prohibits.
    """
    spec = SETTINGS[name]
    if name == "kv_dtype" and value not in spec.choices:
        raise RefusalError(f"{where}: kv_dtype {value!r} is refused: {KV_POLICY}")
    if spec.kind is SettingKind.BOOLEAN:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {name} is {value!r}, expected true or false")
        return value
    if spec.kind is SettingKind.CHOICE:
        if value not in spec.choices:
            raise UsageError(f"{where}: {name} is {value!r}, expected {' or '.join(spec.choices)}")
        return str(value)
    if spec.kind is SettingKind.BYTES:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise UsageError(f"{where}: {name} is {value!r}, expected a size like 24GiB")
        return value if isinstance(value, int) else parse_bytes(value)
    if spec.kind is SettingKind.SCHEDULE:
        return _schedule(name, value, where)
    if isinstance(value, bool) or not isinstance(value, int) or not spec.minimum <= value <= spec.maximum:
        raise UsageError(f"{where}: {name} is {value!r}, expected a whole number {spec.minimum} to {spec.maximum}")
    if value % spec.multiple:
        raise UsageError(f"{where}: {name} is {value}, expected a multiple of {spec.multiple}")
    return value


def _schedule(name: str, value: Any, where: str) -> tuple[tuple[int, int, int], ...]:
    """[[from, to, drafts], ...]: ranges of running sequences that follow one another from 1."""
    rows = []
    expected = 1
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f"{where}: {name} is {value!r}, expected rows of [from, to, drafts]")
    for row in value:
        plain = isinstance(row, Sequence) and not isinstance(row, str) and len(row) == 3
        if not plain or not all(isinstance(n, int) and not isinstance(n, bool) for n in row):
            raise UsageError(f"{where}: {name} row {row!r} is not [from, to, drafts]")
        first, last, drafts = row
        if first != expected or last < first or not 0 <= drafts <= 15:
            raise UsageError(f"{where}: {name} row {list(row)} must start at {expected} and name 0 to 15 drafts")
        rows.append((first, last, drafts))
        expected = last + 1
    return tuple(rows)


def most_drafts(schedule: Sequence[tuple[int, int, int]]) -> int:
    """The largest draft count of a schedule."""
    return max((drafts for _, _, drafts in schedule), default=0)
