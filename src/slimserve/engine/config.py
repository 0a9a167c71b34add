"""The engine's configuration: resolved once from record and flags, then frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from slimserve.ops.numerics import Activations, NumericsConfig

__all__ = [
    "Acceptance",
    "Activations",
    "CacheConfig",
    "CacheDtype",
    "DraftDraw",
    "DrafterKind",
    "EngineConfig",
    "NumericsConfig",
    "SchedulerConfig",
    "SpeculationConfig",
]


class CacheDtype(Enum):
    """What keys, values and latents are stored in. FP8 (e4m3) is the only quantized cache allowed.

    FLOAT32 is for parity runs against an oracle; records may name bf16, fp16 or fp8 only.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FLOAT32 = "float32"

    @property
    def torch(self) -> torch.dtype:
        """The storage dtype."""
        return {
            CacheDtype.BF16: torch.bfloat16,
            CacheDtype.FP16: torch.float16,
            CacheDtype.FP8: torch.float8_e4m3fn,
            CacheDtype.FLOAT32: torch.float32,
        }[self]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Cache memory: one byte budget for all groups; None = derived from max_context and max_sequences."""

    dtype: CacheDtype = CacheDtype.BF16
    budget_bytes: int | None = None
    prefix_caching: bool = True
    snapshot_spacing: int = 1024


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue.

    token_budget: tokens of one step; decode rows always run, and prefill keeps at least 16 tokens a step.
    mixed_prefill_budget: most prompt tokens of a step that also decodes: it bounds how much a long prompt slows
    running replies. max_queue: waiting requests before a refusal. skip_ahead: how many waiting requests may be
    tried past one that does not fit now; after ageing_steps such steps nothing passes it any more.
    """

    max_sequences: int = 32
    max_context: int = 32768
    token_budget: int = 512
    mixed_prefill_budget: int = 256
    max_queue: int = 1024
    skip_ahead: int = 8
    ageing_steps: int = 64


class DrafterKind(Enum):
    """What proposes tokens: nobody, the text itself, the model's own MTP layer, a block drafter, a smaller model."""

    NONE = "none"
    LOOKUP = "lookup"
    NEXTN = "nextn"
    DFLASH2 = "dflash2"
    MODEL = "model"


class DraftDraw(Enum):
    """How a drafter with probabilities draws: its best token, or with the target's own noise of the position."""

    GREEDY = "greedy"
    COUPLED = "coupled"


class Acceptance(Enum):
    """When a draft stands.

    EXACT: when it equals the target's own draw, so replies are those of plain decoding. REJECTION: by the ratio of
    target's and drafter's probability (arXiv:2211.17192): replies follow the same distribution as plain decoding's,
    but the tokens of a seed depend on what was drafted.
    """

    EXACT = "exact"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Drafting. It changes how fast a reply comes; with EXACT acceptance never what it says.

    max_draft: most drafted tokens of a request in a step, 1 .. 15 (7: measured on CPUs, a ninth token in a row costs as
    much as three before it, see the notebook). schedule: rows (from, to, k) over the number of decoding requests; k
    bounds the draft there, 0 = none. measured: turn drafting down or off while it does not pay.
    model_path: the drafter's own files, for DFLASH2 and MODEL. cache_bytes: memory of the caches that a MODEL drafter
    has for itself, as the plan decided; None = a part of what is free.
    """

    drafter: DrafterKind = DrafterKind.NONE
    max_draft: int = 7
    schedule: tuple[tuple[int, int, int], ...] = ()
    measured: bool = True
    draw: DraftDraw = DraftDraw.COUPLED
    acceptance: Acceptance = Acceptance.EXACT
    model_path: str | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs besides the model. graphs: replay recorded decode steps on a GPU; same bits."""

    device: str = "cpu"
    num_threads: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    graphs: bool = True
