"""Which cache groups a configured drafter needs, and the drafter itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slimserve.cache.budget import full_budget, plan_cache
from slimserve.cache.manager import CacheManager
from slimserve.cache.storage import CacheStorage
from slimserve.engine.config import DrafterKind, EngineConfig
from slimserve.engine.speculate.block_drafter import BlockDrafter
from slimserve.engine.speculate.contract import Drafter
from slimserve.engine.speculate.draws import DraftSampler
from slimserve.engine.speculate.lookup import PromptLookup
from slimserve.engine.speculate.model_drafter import ModelDrafter, companion_demand
from slimserve.engine.speculate.nextn import NextNDrafter
from slimserve.errors import RefusalError, UsageError
from slimserve.layers.contract import Caches
from slimserve.models.contract import CacheKind, CacheSpec, Model, ModelConfig
from slimserve.models.dflash2 import DFlash2Model
from slimserve.models.dflash2_config import DFlash2Config
from slimserve.models.recurrent import MAX_DRAFT_TOKENS

WITH_COMPANION = (DrafterKind.MODEL, DrafterKind.DFLASH2)
"""Drafters that come with a model of their own."""

_SHARE = 0.25
"""Part of the memory that is free behind everything else that a drafting model's caches may take."""

_PADDING = 1024


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """What a drafter is built into: the target, its caches (the drafter's groups from `first_group` on).

    `companion` is the drafter's own model, loaded; free_bytes is the memory that its own caches may be taken from.
    """

    model: Model
    config: EngineConfig
    cache: CacheManager
    caches: Caches
    first_group: int
    end_token_ids: frozenset[int]
    companion: Model | DFlash2Model | None
    free_bytes: int

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return torch.device(self.config.device)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step."""
        limits = self.config.scheduler
        return limits.token_budget + limits.max_sequences * (1 + self.config.speculation.max_draft)


def check_speculation(model: Model, config: EngineConfig, companion: Model | DFlash2Model | None) -> None:
    """Raise UsageError or RefusalError where the model cannot be drafted for as configured."""
    speculation = config.speculation
    if not 1 <= speculation.max_draft <= MAX_DRAFT_TOKENS:
        raise UsageError(f"max_draft is {speculation.max_draft}; it must be 1 .. {MAX_DRAFT_TOKENS}")
    if speculation.drafter is DrafterKind.NEXTN and not getattr(model, "nextn", ()):
        raise RefusalError(
            f"drafter nextn needs an MTP layer, and this {model.config.architecture} model has none in its files; "
            "use the drafter lookup, or none"
        )
    needed = speculation.drafter in WITH_COMPANION
    if needed != (companion is not None):
        kind = speculation.drafter.value
        raise UsageError(
            f"drafter {kind} needs a model of its own; name its path" if needed else f"drafter {kind} takes no model"
        )
    if companion is not None and (speculation.drafter is DrafterKind.DFLASH2) != isinstance(companion, DFlash2Model):
        kinds = "is a DFlash2 drafter" if isinstance(companion, DFlash2Model) else "is no DFlash2 drafter"
        raise UsageError(f"drafter {speculation.drafter.value}: the model named for it {kinds}")
    if isinstance(companion, DFlash2Model):
        if not hasattr(model, "taps"):
            kind = model.config.architecture
            raise RefusalError(f"a DFlash2 drafter reads layer outputs that {kind} models do not hand out")
        check_block_drafter(model.config, companion.config)
    elif companion is not None:
        check_small_model(model.config, companion.config)


def check_block_drafter(target: ModelConfig, own: DFlash2Config) -> None:
    """Raise RefusalError where a block drafter was made for a model of another shape."""
    for name in ("hidden_size", "vocab_size"):
        if getattr(own, name) != getattr(target, name):
            raise RefusalError(
                f"the drafter was made for a {name} of {getattr(own, name)} and the model's is {getattr(target, name)}"
            )
    if own.taps[-1] >= target.num_layers:
        raise RefusalError(f"the drafter reads layer {own.taps[-1]} and the model has {target.num_layers} layers")


def check_small_model(target: ModelConfig, companion: ModelConfig) -> None:
    """Raise RefusalError where one model cannot draft for another."""
    own, other = target.vocab_size, companion.vocab_size
    # Tables of one vocabulary may be padded to different sizes; a different vocabulary is another thing.
    if abs(own - other) > _PADDING:
        raise RefusalError(f"the drafting model has {other} tokens and the model {own}: they need the same vocabulary")
    if any(spec.kind is CacheKind.RECURRENT for spec in companion.caches(torch.bfloat16)):
        raise RefusalError(
            f"the drafting model ({companion.architecture}) has recurrent layers, which cannot take back drafts "
            "one by one; choose a model with attention layers only"
        )


def drafter_specs(model: Model, config: EngineConfig, companion: Model | DFlash2Model | None) -> tuple[CacheSpec, ...]:
    """Cache groups that the drafter adds to the model's own."""
    own: Any = model.config
    if config.speculation.drafter is DrafterKind.NEXTN:
        return tuple(own.drafter_caches(config.cache.dtype.torch))
    if config.speculation.drafter is DrafterKind.DFLASH2:
        assert companion is not None, "checked before"
        return tuple(companion.config.drafter_caches(config.cache.dtype.torch, _first_layer(model)))
    return ()


def _first_layer(model: Model) -> int:
    """Number of a drafter's first layer: behind the trunk's and the model's own MTP layers."""
    return int(model.config.num_layers) + int(getattr(model.config, "num_nextn", 0))


def make_drafter(setting: DraftSetting) -> Drafter | None:
    """The configured drafter; None for no drafting."""
    speculation = setting.config.speculation
    if speculation.drafter is DrafterKind.LOOKUP:
        return PromptLookup(speculation.max_draft)
    if speculation.drafter is DrafterKind.NEXTN:
        return _nextn(setting)
    if speculation.drafter is DrafterKind.DFLASH2:
        return _block_drafter(setting)
    if speculation.drafter is DrafterKind.MODEL:
        return _model_drafter(setting)
    return None


def _sampler(setting: DraftSetting, vocab_size: int) -> DraftSampler:
    return DraftSampler(setting.config.speculation, vocab_size, setting.end_token_ids)


def _nextn(setting: DraftSetting) -> NextNDrafter:
    model = setting.model
    return NextNDrafter(
        model,
        setting.cache,
        setting.caches,
        drafter_specs(model, setting.config, None),
        setting.first_group,
        _sampler(setting, model.config.vocab_size),
        max_tokens=setting.max_tokens,
        device=setting.device,
        dtype=setting.config.numerics.activation_dtype,
    )


def _block_drafter(setting: DraftSetting) -> BlockDrafter:
    model, companion = setting.model, setting.companion
    assert isinstance(companion, DFlash2Model), "checked before"
    return BlockDrafter(
        companion,
        model,
        setting.cache,
        setting.caches[_first_layer(model) :],
        drafter_specs(model, setting.config, companion),
        setting.first_group,
        _sampler(setting, model.config.vocab_size),
        max_tokens=setting.max_tokens,
        device=setting.device,
        dtype=setting.config.numerics.activation_dtype,
    )


def _model_drafter(setting: DraftSetting) -> ModelDrafter:
    companion, config = setting.companion, setting.config
    assert companion is not None and not isinstance(companion, DFlash2Model), "checked before"
    specs = tuple(companion.config.caches(config.cache.dtype.torch))
    demand = companion_demand(setting.cache.plan.demand, companion.config.max_context)
    budget = config.speculation.cache_bytes
    if budget is None:
        budget = min(full_budget(specs, demand), int(setting.free_bytes * _SHARE))
    plan = plan_cache(specs, demand, budget)
    storage = CacheStorage(specs, plan, setting.device)
    cache = CacheManager(specs, plan, storage=storage, prefix_caching=config.cache.prefix_caching)
    vocab_size = min(setting.model.config.vocab_size, companion.config.vocab_size)
    return ModelDrafter(companion, cache, storage.layers, specs, _sampler(setting, vocab_size), device=setting.device)
