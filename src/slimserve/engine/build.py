"""From a model's path and a handful of settings to a loaded engine: the factory that an engine process imports."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch

from slimserve.cache.prefix import CacheIdentity
from slimserve.engine.config import CacheConfig, CacheDtype, EngineConfig, SchedulerConfig
from slimserve.engine.driver import LoadedEngine, ProgressCallback
from slimserve.engine.loop import Engine
from slimserve.engine.messages import EngineSpec
from slimserve.errors import RefusalError, UsageError
from slimserve.ops import NumericsConfig
from slimserve.weights.loader import LoadedModel, default_numerics, load_model


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is decided before the engine's process exists: record and flags, resolved.

    device: auto, cpu, cuda or cuda:N. context: longest prompt + reply in tokens; None = the model's, at most
    `default_context`. end_token_ids end a reply. None elsewhere = the engine's own default.
    """

    path: str
    name: str
    end_token_ids: list[int] = []
    device: str = "auto"
    context: int | None = None
    default_context: int = SchedulerConfig().max_context
    max_sequences: int | None = None
    max_queue: int | None = None
    token_budget: int | None = None
    mixed_prefill_budget: int | None = None
    num_threads: int | None = None
    kv_dtype: str | None = None
    cache_budget_bytes: int | None = None
    prefix_caching: bool = True

    def spec(self) -> EngineSpec:
        """The settings as a message for an engine process."""
        return EngineSpec("slimserve.engine.build:build", msgspec.to_builtins(self))


def build(arguments: dict[str, Any], progress: ProgressCallback) -> LoadedEngine:
    """Load the model and make its engine; raises the errors of the loader, UsageError and RefusalError."""
    settings = msgspec.convert(arguments, EngineSettings)
    started = time.monotonic()
    device = resolve_device(settings.device)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    loaded = load_model(
        settings.path,
        device=device,
        numerics=default_numerics(device),
        progress=lambda done, total: progress("weights", done, total),
    )
    progress("caches", 0, 0)
    config = resolve_config(settings, loaded, device)
    identity = CacheIdentity(settings.name, loaded.fingerprint, f"{config.cache.dtype.value}/{device.type}")
    engine = Engine(loaded.model, config, end_token_ids=frozenset(settings.end_token_ids), identity=identity)
    return LoadedEngine(engine, engine.info(_facts(loaded, config, engine, time.monotonic() - started)))


def resolve_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or the CPU. UsageError where there is no such device."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device is {name!r}; it must be auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UsageError(f"--device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise UsageError(f"--device is {name!r}, but torch sees {count} GPUs here; use --device cpu")
    return torch.device("cuda", index)


def resolve_config(settings: EngineSettings, loaded: LoadedModel, device: torch.device) -> EngineConfig:
    """Settings over defaults; a context that the model was not made for is refused with the numbers."""
    most = loaded.config.max_context
    context = min(most, settings.default_context) if settings.context is None else settings.context
    if context > most:
        raise RefusalError(f"--ctx is {context}, but the model takes at most {most} tokens; use --ctx {most}")
    return EngineConfig(
        device=str(device),
        num_threads=settings.num_threads,
        cache=CacheConfig(
            dtype=_kv_dtype(settings.kv_dtype),
            budget_bytes=settings.cache_budget_bytes,
            prefix_caching=settings.prefix_caching,
        ),
        scheduler=_scheduler(settings, context),
        numerics=_numerics(loaded),
    )


def _scheduler(settings: EngineSettings, context: int) -> SchedulerConfig:
    given = {
        name: value
        for name in ("max_sequences", "max_queue", "token_budget", "mixed_prefill_budget")
        if (value := getattr(settings, name)) is not None
    }
    return SchedulerConfig(max_context=context, **given)


def _numerics(loaded: LoadedModel) -> NumericsConfig:
    return loaded.numerics


def _kv_dtype(name: str | None) -> CacheDtype:
    if name is None:
        return CacheDtype.BF16
    try:
        return CacheDtype(name)
    except ValueError:
        known = ", ".join(kind.value for kind in CacheDtype)
        raise UsageError(f"--kv-dtype is {name!r}; it must be one of {known}") from None


def _facts(loaded: LoadedModel, config: EngineConfig, engine: Engine, seconds: float) -> dict[str, str]:
    """What a person may want to know at start, in the order to show it."""
    weights = sum(family.num_bytes for family in loaded.memory)
    cache = engine.cache_plan
    minimum = engine.cache.min_reusable_prefix if config.cache.prefix_caching else 0
    return {
        "architecture": loaded.source.architecture_name(),
        "device": config.device if loaded.device.type != "cpu" else f"cpu, {torch.get_num_threads()} threads",
        "weights": f"{weights / 2**20:,.0f} MiB packed",
        "cache": (
            f"{cache.used_bytes / 2**20:,.0f} MiB {config.cache.dtype.value}, "
            f"{engine.cache.max_request_tokens:,} tokens per request, {config.scheduler.max_sequences} at once"
        ),
        "prefix cache": f"on, from {minimum} tokens" if config.cache.prefix_caching else "off",
        "loaded in": f"{seconds:.1f} s",
    }
