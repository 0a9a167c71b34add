"""Readings of sizes and layer kinds that several architectures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimserve.errors import FormatError, RefusalError
from slimserve.models.values import ConfigValues

Shapes = Mapping[str, tuple[int, ...]]
"""The tensors that a container holds: name to logical shape."""


def head_dim_of(values: ConfigValues, hidden_size: int, num_heads: int) -> int:
    """The stated head size, or hidden_size / num_heads."""
    head_dim = values.optional_integer("head_dim", maximum=4096)
    if head_dim is None:
        if hidden_size % num_heads:
            raise FormatError(f"config.json: hidden_size {hidden_size} is no multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    return head_dim


def layer_windows(
    values: ConfigValues, num_layers: int, window: int | None, sliding_by_default: Sequence[bool]
) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types` where the config lists them, else where `sliding_by_default`."""
    kinds = values.raw("layer_types")
    if kinds is None:
        return tuple(window if sliding else None for sliding in sliding_by_default)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise FormatError(f"config.json: layer_types must list {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise RefusalError(f"config.json: layer type {str(kind)[:40]!r} is not supported for this architecture")
        if kind == "sliding_attention" and window is None:
            raise FormatError("config.json: layer_types names sliding_attention but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def gguf_vocab_size(values: ConfigValues, shapes: Shapes) -> int:
    """Rows of the embedding table; a stated vocab_size must agree."""
    table = shapes.get("token_embd.weight")
    if table is None or len(table) != 2:
        raise FormatError(f"GGUF tensor token_embd.weight is missing or no matrix (shape {table})")
    stated = values.optional_integer("vocab_size")
    if stated is not None and stated != table[0]:
        raise FormatError(f"GGUF metadata states vocab_size {stated}, token_embd.weight has {table[0]} rows")
    return table[0]


def gguf_head_dim(values: ConfigValues, hidden_size: int, num_heads: int) -> int:
    """key_length, or embedding_length / head_count; keys and values must be equally wide."""
    head_dim = values.integer("attention.key_length", max(hidden_size // num_heads, 1), maximum=4096)
    value_dim = values.integer("attention.value_length", head_dim, maximum=4096)
    if head_dim != value_dim:
        raise RefusalError(f"GGUF metadata: key_length {head_dim} and value_length {value_dim} differ; not supported")
    return head_dim


def check_groups(num_heads: int, num_kv_heads: int, where: str) -> int:
    """num_kv_heads, which must divide num_heads; raises FormatError."""
    if num_heads % num_kv_heads:
        raise FormatError(f"{where}: {num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
    return num_kv_heads
