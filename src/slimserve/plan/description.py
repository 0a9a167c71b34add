"""What the plan knows of a model before it is loaded: every parameter's bytes, its caches, its widths.

Built from file headers, from a config and a map of formats (before any download), or from recorded sizes of an
architecture that this build does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from slimserve.errors import UsageError
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import BufferSpec, CacheKind, CacheSpec, ModelConfig, ParameterSpec, Role
from slimserve.models.format_map import FormatRule, find_rule, parameter_bytes
from slimserve.models.registry import find_hf
from slimserve.weights.loader import read_config
from slimserve.weights.source import Container, Source, open_source

DRAFTER = "drafter"
VISION = "vision"

CacheTable = Callable[[torch.dtype], Sequence[CacheSpec]]


@dataclass(frozen=True, slots=True)
class RecordedWeights:
    """Bytes of a family of weights in one format; `source` says whether they were recorded, derived from counts of
    parameters, or only bounded by the machine that held them. `host`: they stay in host memory."""

    family: str
    format: str
    num_bytes: int
    source: str = "recorded"
    host: bool = False


@dataclass(frozen=True, slots=True)
class CacheTerm:
    """A recorded cache group: bytes per token or per sequence over all layers, at bf16."""

    name: str
    kind: str
    bytes_per_token: int = 0
    bytes_per_sequence: int = 0
    window: int | None = None
    scales_with_dtype: bool = True


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter's bytes as stored. `experts`: how many experts a stacked parameter holds (0 = no expert).

    `shape` is set for matrices, whose layout on a device may differ from the stored one.
    """

    name: str
    family: str
    format: str
    num_bytes: int
    rows: int = 0
    layer: int | None = None
    experts: int = 0
    source: str = ""
    host: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """A model as the plan sees it.

    `per_token_width`: elements that a token's activations hold at the widest point of a layer, `product_width` beside
    its products, and `routed_width` beside the last product of routed experts (0 without any), estimated from the
    parameter table. `experts_per_token` of `num_experts` are routed to.
    """

    name: str
    architecture: str
    source: str
    weights: tuple[Weight, ...]
    caches: CacheTable
    drafter_caches: CacheTable
    max_context: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    per_token_width: int
    product_width: int = 0
    routed_width: int = 0
    num_kv_heads: int = 1
    num_experts: int = 0
    experts_per_token: int = 0
    runnable: bool = True
    config: Any = None

    @property
    def heads(self) -> tuple[int, int, int] | None:
        """(query heads, key heads, elements of a head) of paged attention; None for a model without it."""
        found = tuple(int(getattr(self.config, name, 0)) for name in ("num_heads", "num_kv_heads", "head_dim"))
        kinds = {spec.kind for spec in self.caches(torch.bfloat16)}
        paged = kinds & {CacheKind.ATTENTION, CacheKind.WINDOW}
        return (found[0], found[1], found[2]) if paged and all(found) else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.num_bytes for weight in self.weights)


def describe_config(
    name: str, config: Mapping[str, Any], rules: Sequence[FormatRule], present: Sequence[str] = ()
) -> Description:
    """A model from a config.json and format rules, before any file is here.

    Raises RefusalError for an architecture that this build does not hold, UsageError for a parameter without rule.
    """
    architecture = find_hf(config)
    parsed = architecture.from_hf(config, dict.fromkeys(present, ()))
    weights, used = [], set()
    for spec in parsed.parameters():
        rule = find_rule(rules, spec)
        if rule is None:
            raise UsageError(f"{name}: no format rule fits parameter {spec.name}")
        used.add(rule)
        weights.append(_weight(parsed, spec, rule.format, parameter_bytes(rule, spec)))
    idle = [rule.match for rule in rules if rule not in used]
    if idle:
        raise UsageError(f"{name}: the format rule for {idle[0]!r} fits no parameter that an earlier rule left over")
    return _from_config(name, architecture.name, "catalog: config and format map", parsed, weights)


def describe_file(path: str | Path, *, drafter: bool = False) -> Description:
    """A model from the headers of its file or folder; `drafter`: they hold a block drafter for another model."""
    return describe_source(open_source(Path(path)), drafter=drafter)


def describe_source(source: Source, *, drafter: bool = False) -> Description:
    """A model, or a block drafter, from an opened container."""
    architecture, parsed = read_config(source, drafter=drafter)
    gguf = source.container is Container.GGUF
    weights = []
    for spec in parsed.parameters():
        name = spec.gguf_name if gguf else spec.hf_name
        transform = spec.gguf_transform if gguf else spec.hf_transform
        names = (
            [name.format(expert=e) for e in range(transform.argument)] if transform.kind == "stack_experts" else [name]
        )
        held = [source.packed(n) for n in names if n in source.shapes]
        if not held:
            continue
        stored = sum(tensor.num_bytes for tensor in held)
        kept = spec.keep is torch.float32
        num_bytes = 4 * prod(spec.shape) if kept else stored
        weights.append(_weight(parsed, spec, "F32" if kept else held[0].format.name, num_bytes))
    return _from_config(source.path.name, architecture.name, "file header", parsed, weights)


def describe_recorded(
    name: str,
    architecture: str,
    weights: Sequence[RecordedWeights],
    caches: Sequence[CacheTerm],
    max_context: int,
) -> Description:
    """A model of which only sizes are recorded; it can be planned and listed, not run."""

    def table(dtype: torch.dtype) -> Sequence[CacheSpec]:
        return tuple(_recorded_cache(term, dtype) for term in caches)

    return Description(
        name=name,
        architecture=architecture,
        source="catalog: recorded sizes",
        weights=_recorded_weights(weights),
        caches=table,
        drafter_caches=lambda dtype: (),
        max_context=max_context,
        vocab_size=0,
        hidden_size=0,
        num_layers=0,
        per_token_width=0,
        runnable=False,
    )


def describe_geometry(
    name: str, config: Mapping[str, Any], weights: Sequence[RecordedWeights], present: Sequence[str] = ()
) -> Description:
    """A model whose config is known but whose formats are only recorded as totals."""
    architecture = find_hf(config)
    parsed = architecture.from_hf(config, dict.fromkeys(present, ()))
    exact = [_weight(parsed, spec, "", 0) for spec in parsed.parameters()]
    return replace(
        _from_config(name, architecture.name, "catalog: config and recorded sizes", parsed, exact),
        weights=_recorded_weights(weights),
    )


def _recorded_weights(weights: Sequence[RecordedWeights]) -> tuple[Weight, ...]:
    return tuple(Weight(w.family, w.family, w.format, w.num_bytes, source=w.source, host=w.host) for w in weights)


def _recorded_cache(term: CacheTerm, dtype: torch.dtype) -> CacheSpec:
    kind = CacheKind(term.kind)
    if kind is CacheKind.RECURRENT:
        slot = (BufferSpec("state", (term.bytes_per_sequence,), torch.uint8),)
        return CacheSpec(term.name, kind, (0,), slot=slot)
    per_token = term.bytes_per_token
    if term.scales_with_dtype:
        per_token = per_token * dtype.itemsize // 2
    page = (BufferSpec("page", (BLOCK_TOKENS, per_token), torch.uint8),)
    return CacheSpec(term.name, kind, (0,), page=page, window=term.window)


def _weight(config: Any, spec: ParameterSpec, fmt: str, num_bytes: int) -> Weight:
    family = spec.role.value
    if spec.layer is not None and spec.layer >= config.num_layers:
        family = DRAFTER
    experts = spec.shape[0] if spec.role is Role.EXPERT else 0
    rows = spec.shape[-2] if len(spec.shape) > 1 and spec.role in (Role.LINEAR, Role.EXPERT) else 0
    matrix = spec.role in (Role.LINEAR, Role.EXPERT, Role.EMBEDDING, Role.HEAD)
    return Weight(spec.name, family, fmt, num_bytes, rows, spec.layer, experts, shape=spec.shape if matrix else ())


def _from_config(
    name: str, architecture: str, source: str, config: ModelConfig, weights: Sequence[Weight]
) -> Description:
    no_caches: CacheTable = lambda dtype: ()  # noqa: E731
    top_k = int(getattr(config, "top_k", 0))
    widest, product, routed = _widths(config, weights, top_k)
    return Description(
        name=name,
        architecture=architecture,
        source=source,
        weights=tuple(weights),
        caches=config.caches,
        drafter_caches=getattr(config, "drafter_caches", no_caches),
        max_context=config.max_context,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        per_token_width=widest,
        product_width=product,
        routed_width=routed,
        num_kv_heads=int(getattr(config, "num_kv_heads", 1)),
        num_experts=max((weight.experts for weight in weights), default=0),
        experts_per_token=top_k,
        config=config,
    )


def _widths(config: ModelConfig, weights: Sequence[Weight], top_k: int) -> tuple[int, int, int]:
    """Elements of the activations' size alive per token: at the widest point, beside the products of a layer, and
    beside the last product of its routed experts.

    Residual streams stand beside one of the parts. Feed-forward: gate and up, and their product. Routed experts,
    `top_k` rows per token: both products in float32 (two elements each) and the gated rows. Linear attention: the
    convolution's inputs, outputs and copies, and values in float32. tests/test_plan_device.py holds both against the
    tensors that the code makes.
    """
    streams = int(getattr(config, "streams", 1))
    residual = 4 * config.hidden_size if streams == 1 else (streams + 6) * config.hidden_size
    recurrent = getattr(config, "recurrent", None)
    widest = 3 * (recurrent.conv_dim + recurrent.heads * recurrent.value_dim) if recurrent is not None else 0
    by_layer: dict[int, list[Weight]] = {}
    for weight in weights:
        if weight.layer is not None and weight.rows:
            by_layer.setdefault(weight.layer, []).append(weight)
    product = experts = 0
    for layer in by_layer.values():
        plain = sorted((weight.rows for weight in layer if not weight.experts), reverse=True)[:2]
        product = max(product, sum(plain) + max(plain, default=0))
        routed = [(2.0 if ".down" in weight.name else 2.5) * weight.rows for weight in layer if weight.experts]
        experts = max(experts, int(top_k * sum(routed)))
    return residual + max(widest, product, experts), residual + product, residual + experts if experts else 0
