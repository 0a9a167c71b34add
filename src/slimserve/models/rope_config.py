"""Rotary settings as configurations state them: config.json (old and new form) and GGUF keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimserve.errors import FormatError, RefusalError
from slimserve.layers.rotary import RopeKind, RopeSettings
from slimserve.models.values import MAX_CONTEXT, ConfigValues

DYNAMIC_KINDS = ("ntk", "longrope", "su")
"""Scalings whose frequencies depend on the length reached so far: cached keys would have to be rotated anew."""


def refuse_kind(kind: str, where: str) -> RefusalError:
    """The refusal of a scaling that is not implemented."""
    reason = (
        "its frequencies depend on the length of the sequence, so a cached key could not be reused"
        if kind in DYNAMIC_KINDS
        else "this build does not know it"
    )
    known = ", ".join(k.value for k in RopeKind)
    return RefusalError(f"{where} asks for rope scaling {kind!r}: {reason}; supported: {known}")


def rope_from_hf(
    section: Mapping[str, Any] | None, *, theta: float, head_dim: int, max_context: int, where: str = "config.json"
) -> RopeSettings:
    """Settings from a `rope_parameters` or `rope_scaling` object; `theta` is used where the object has none."""
    if section is not None and not isinstance(section, Mapping):
        raise FormatError(f"{where}: rope settings are {str(section)[:40]!r}, expected an object")
    values = ConfigValues(section or {}, f"{where} rope settings")
    old_name = values.text("type", "default")
    kind_name = values.text("rope_type", old_name)
    theta = values.number("rope_theta", theta, above=1.0)
    check_even(head_dim, where)
    fraction = values.number("partial_rotary_factor", 1.0)
    if fraction != 1.0:
        raise RefusalError(f"{where} asks for partial_rotary_factor = {fraction}, which this architecture does not use")
    values.optional_integer("max_position_embeddings")
    settings = _kind_from_hf(values, kind_name, theta, head_dim, max_context, where)
    values.finish()
    return settings


def _kind_from_hf(
    values: ConfigValues, kind: str, theta: float, head_dim: int, max_context: int, where: str
) -> RopeSettings:
    if kind in ("default", "none"):
        return RopeSettings(theta, head_dim)
    if kind == "linear":
        return RopeSettings(theta, head_dim, RopeKind.LINEAR, factor=values.number("factor"))
    if kind == "llama3":
        low = values.number("low_freq_factor")
        return RopeSettings(
            theta,
            head_dim,
            RopeKind.LLAMA3,
            factor=values.number("factor"),
            low_freq_factor=low,
            high_freq_factor=values.number("high_freq_factor", above=low),
            original_context=values.integer("original_max_position_embeddings", max_context, maximum=MAX_CONTEXT),
        )
    if kind == "yarn":
        return _yarn_from_hf(values, theta, head_dim, max_context)
    if kind == "dynamic":
        # Dynamic scaling starts past max_position_embeddings, and no sequence here grows past it.
        values.number("factor")
        values.require("original_max_position_embeddings", max_context)
        return RopeSettings(theta, head_dim)
    raise refuse_kind(kind, where)


def _yarn_from_hf(values: ConfigValues, theta: float, head_dim: int, max_context: int) -> RopeSettings:
    original = values.integer("original_max_position_embeddings", max_context, maximum=MAX_CONTEXT)
    factor = values.number("factor", max_context / original)
    attention_factor = values.optional_number("attention_factor")
    mscale, mscale_all = values.optional_number("mscale"), values.optional_number("mscale_all_dim")
    base = RopeSettings(theta, head_dim, RopeKind.YARN, factor=factor)
    if attention_factor is None and mscale and mscale_all and factor > 1.0:
        growth = base.scale() - 1.0
        attention_factor = (growth * mscale + 1.0) / (growth * mscale_all + 1.0)
    return RopeSettings(
        theta,
        head_dim,
        RopeKind.YARN,
        factor=factor,
        original_context=original,
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=values.boolean("truncate", True),
    )


def rope_from_gguf(values: ConfigValues, *, head_dim: int, max_context: int, default_theta: float) -> RopeSettings:
    """Settings from the `rope.*` keys of an architecture."""
    theta = values.number("rope.freq_base", default_theta, above=1.0)
    check_even(head_dim, "GGUF metadata")
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise RefusalError(
            f"GGUF metadata: rope.dimension_count {rotary_dim} differs from the head size {head_dim}; "
            "partly rotated heads are not supported for this architecture"
        )
    old_factor = values.optional_number("rope.scale_linear")
    factor = values.optional_number("rope.scaling.factor") or old_factor
    kind = values.text("rope.scaling.type", "linear" if factor is not None else "none")
    values.raw("rope.scaling.finetuned")
    attention_factor = values.number("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        return _yarn_from_gguf(values, theta, head_dim, max_context, factor, attention_factor)
    if attention_factor != 1.0:
        raise RefusalError(f"GGUF metadata: rope.scaling.attn_factor {attention_factor} without yarn is not supported")
    values.optional_integer("rope.scaling.original_context_length")
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return RopeSettings(theta, head_dim)
    if kind == "linear":
        return RopeSettings(theta, head_dim, RopeKind.LINEAR, factor=factor or 1.0)
    raise refuse_kind(kind, "GGUF metadata")


def _yarn_from_gguf(
    values: ConfigValues, theta: float, head_dim: int, max_context: int, factor: float | None, attention_factor: float
) -> RopeSettings:
    original = values.integer("rope.scaling.original_context_length", max_context, maximum=MAX_CONTEXT)
    factor = factor or max_context / original
    values.require("rope.scaling.yarn_ext_factor", 1.0)
    values.require("rope.scaling.yarn_log_multiplier", 0.0)
    attention_factor *= values.number("rope.scaling.yarn_attn_factor", 1.0)
    base = RopeSettings(theta, head_dim, RopeKind.YARN, factor=factor)
    return RopeSettings(
        theta,
        head_dim,
        RopeKind.YARN,
        factor=factor,
        original_context=original,
        beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=base.scale() * attention_factor,
    )


def usable_context(rope: RopeSettings, stated: int) -> int:
    """Positions that may be used: yarn files often state the original context and a factor that extends it."""
    if rope.kind is RopeKind.YARN:
        return max(stated, int(min(rope.original_context * rope.factor, MAX_CONTEXT)))
    return stated


def check_even(head_dim: int, where: str) -> None:
    """Rotation turns pairs: raise FormatError for an odd head size."""
    if head_dim % 2:
        raise FormatError(f"{where}: the head size {head_dim} is odd, so its dimensions cannot be rotated in pairs")
