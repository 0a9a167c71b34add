"""Which cache groups a configured drafter needs, and the drafter itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slimserve.cache.manager import CacheManager
from slimserve.engine.config import DrafterKind, EngineConfig
from slimserve.engine.speculate.contract import Drafter
from slimserve.engine.speculate.draws import DraftSampler
from slimserve.engine.speculate.lookup import PromptLookup
from slimserve.engine.speculate.nextn import NextNDrafter
from slimserve.errors import RefusalError, UsageError
from slimserve.layers.contract import Caches
from slimserve.models.contract import CacheSpec, Model
from slimserve.models.recurrent import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """What a drafter is built into: the target, its caches (the drafter's groups from `first_group` on)."""

    model: Model
    config: EngineConfig
    cache: CacheManager
    caches: Caches
    first_group: int
    end_token_ids: frozenset[int]


def check_speculation(model: Model, config: EngineConfig) -> None:
    """Raise UsageError or RefusalError where the model cannot be drafted for as configured."""
    speculation = config.speculation
    if not 1 <= speculation.max_draft <= MAX_DRAFT_TOKENS:
        raise UsageError(f"max_draft is {speculation.max_draft}; it must be 1 .. {MAX_DRAFT_TOKENS}")
    if speculation.drafter is DrafterKind.NEXTN and not getattr(model, "nextn", ()):
        raise RefusalError(
            f"drafter nextn needs an MTP layer, and this {model.config.architecture} model has none in its files; "
            "use the drafter lookup, or none"
        )


def drafter_specs(model: Model, config: EngineConfig) -> tuple[CacheSpec, ...]:
    """Cache groups that the drafter adds to the model's own."""
    if config.speculation.drafter is DrafterKind.NEXTN:
        own: Any = model.config
        return tuple(own.drafter_caches(config.cache.dtype.torch))
    return ()


def make_drafter(setting: DraftSetting) -> Drafter | None:
    """The configured drafter; None for no drafting."""
    model, config = setting.model, setting.config
    speculation, limits = config.speculation, config.scheduler
    if speculation.drafter is DrafterKind.LOOKUP:
        return PromptLookup(speculation.max_draft)
    if speculation.drafter is DrafterKind.NEXTN:
        return NextNDrafter(
            model,
            setting.cache,
            setting.caches,
            drafter_specs(model, config),
            setting.first_group,
            DraftSampler(speculation, model.config.vocab_size, setting.end_token_ids),
            max_tokens=limits.token_budget + limits.max_sequences * (1 + speculation.max_draft),
            device=torch.device(config.device),
            dtype=config.numerics.activation_dtype,
        )
    return None
