"""From a model's path and a handful of settings to a loaded engine: the factory that an engine process imports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from slimserve.cache.prefix import CacheIdentity
from slimserve.engine.config import Acceptance, DrafterKind, EngineConfig
from slimserve.engine.driver import LoadedEngine, ProgressCallback
from slimserve.engine.loop import Engine
from slimserve.engine.memory import MemoryProbe
from slimserve.engine.messages import EngineSpec
from slimserve.errors import RefusalError, UsageError
from slimserve.ops import compiled
from slimserve.ops.cpu.build import outcome
from slimserve.ops.cpu.library import num_threads
from slimserve.weights.loader import LoadedModel, load_model, load_source
from slimserve.weights.source import Container, Source
from slimserve.weights.synthetic import SyntheticModel, lay_out
from slimserve.weights.tokenizer import tokenizer_from_folder, tokenizer_from_gguf


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is decided before the engine's process exists: where the model lies, and the resolved configuration.

    `name` names the model in prefix keys; `end_token_ids` end a reply; `config` is encode_config of an EngineConfig.
    `synthetic` is made on the device instead of reading `path`.
    """

    path: str
    name: str
    config: dict[str, Any]
    end_token_ids: list[int] = []
    synthetic: SyntheticModel | None = None

    def spec(self) -> EngineSpec:
        """The settings as a message for an engine process."""
        return EngineSpec("slimserve.engine.build:build", msgspec.to_builtins(self))


def encode_config(config: EngineConfig) -> dict[str, Any]:
    """An EngineConfig as plain values, for a message."""
    values: dict[str, Any] = msgspec.to_builtins(config, enc_hook=lambda dtype: str(dtype).removeprefix("torch."))
    return values


def decode_config(values: dict[str, Any]) -> EngineConfig:
    """The EngineConfig that encode_config wrote; an unknown or malformed value is a ValidationError."""
    return msgspec.convert(values, EngineConfig, dec_hook=lambda _kind, name: getattr(torch, name))


def build(arguments: dict[str, Any], progress: ProgressCallback) -> LoadedEngine:
    """Load the model and make its engine; raises the errors of the loader, UsageError and RefusalError."""
    settings = msgspec.convert(arguments, EngineSettings)
    config = decode_config(settings.config)
    started = time.monotonic()
    device = check_device(config.device)
    probe = MemoryProbe(device)
    loaded = _load(settings, config, device, lambda done, total: progress("weights", done, total))
    probe.mark()
    progress("caches", 0, 0)
    identity = CacheIdentity(settings.name, loaded.fingerprint, f"{config.cache.dtype.value}/{device.type}")
    companion = _load_companion(loaded, config, device, lambda done, total: progress("drafter", done, total))
    if companion is not None:
        probe.mark()
    engine = Engine(
        loaded.model,
        config,
        end_token_ids=frozenset(settings.end_token_ids),
        identity=identity,
        companion=companion.model if companion is not None else None,
    )
    probe.mark()
    memory = probe.measure(loaded, engine, companion)
    return LoadedEngine(engine, engine.info(_facts(loaded, config, engine, time.monotonic() - started), memory))


def _load(
    settings: EngineSettings, config: EngineConfig, device: torch.device, progress: Callable[[int, int], None]
) -> LoadedModel:
    if settings.synthetic is None:
        return load_model(settings.path, device=device, numerics=config.numerics, progress=progress)
    source = lay_out(settings.synthetic).source(device)
    return load_source(source, device=device, numerics=config.numerics, progress=progress)


def _load_companion(
    target: LoadedModel, config: EngineConfig, device: torch.device, progress: Callable[[int, int], None]
) -> LoadedModel | None:
    """The drafter's own model, where the configuration names one; RefusalError where its vocabulary is another one."""
    path = config.speculation.model_path
    if path is None:
        return None
    is_block = config.speculation.drafter is DrafterKind.DFLASH2
    loaded = load_model(path, device=device, numerics=config.numerics, progress=progress, drafter=is_block)
    if not is_block and target.source.opened is not None:
        check_vocabularies(target.source, loaded.source)
    return loaded


def check_vocabularies(target: Source, other: Source) -> None:
    """Raise RefusalError unless the tokens of two models are the same (behind the shorter table there is padding)."""
    texts = [
        (
            tokenizer_from_gguf(source.metadata)
            if source.container is Container.GGUF
            else tokenizer_from_folder(source.folder)
        ).vocabulary.texts
        for source in (target, other)
    ]
    for token_id, (own, drafted) in enumerate(zip(*texts, strict=False)):
        if own != drafted:
            raise RefusalError(
                f"{other.path} cannot draft for {target.path}: token {token_id} is {drafted!r} there and {own!r} here; "
                "the drafter needs the same vocabulary"
            )


def _drafting(config: EngineConfig) -> str:
    speculation = config.speculation
    if speculation.drafter is DrafterKind.NONE:
        return "off"
    own = f" ({speculation.model_path})" if speculation.model_path else ""
    rule = "" if speculation.acceptance is Acceptance.EXACT else ", accepted by probability"
    return f"{speculation.drafter.value}{own}, up to {speculation.max_draft} tokens{rule}"


def check_device(name: str) -> torch.device:
    """The device of a name; UsageError where torch sees no such device here."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UsageError(f"device {name} is asked for, but torch sees {count} GPUs here; use --device cpu")
        return torch.device("cuda", device.index or 0)
    return device


def _facts(loaded: LoadedModel, config: EngineConfig, engine: Engine, seconds: float) -> dict[str, str]:
    """What a person may want to know at start, in the order to show it."""
    weights = sum(family.num_bytes for family in loaded.memory)
    cache = engine.cache_plan
    minimum = engine.cache.min_reusable_prefix if config.cache.prefix_caching else 0
    return {
        "architecture": loaded.source.architecture_name(),
        "device": config.device if loaded.device.type != "cpu" else f"cpu, {num_threads()} threads",
        "weights": f"{weights / 2**20:,.0f} MiB packed{', synthetic weights' if loaded.source.identity else ''}",
        "cache": (
            f"{cache.used_bytes / 2**20:,.0f} MiB {config.cache.dtype.value}, "
            f"{engine.cache.max_request_tokens:,} tokens per request, {config.scheduler.max_sequences} at once"
        ),
        "kernels": compiled.counts.describe() if loaded.device.type == "cuda" else outcome.describe(),
        "drafting": _drafting(config),
        "prefix cache": f"on, from {minimum} tokens" if config.cache.prefix_caching else "off",
        "loaded in": f"{seconds:.1f} s",
    }
