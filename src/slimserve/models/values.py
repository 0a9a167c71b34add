"""Strict reading of a model's configuration: every key is read, known to be harmless, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from slimserve.errors import FormatError, RefusalError

MAX_EXTENT = 1 << 28
"""Largest count that a configuration may state; keeps products of two extents far below 2^63."""

MAX_CONTEXT = 1 << 31

HARMLESS_HF_KEYS = (
    "_*",
    "architectures",
    "auto_map",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "do_sample",
    "dtype",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_length",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "repetition_penalty",
    "return_dict",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "unsloth_*",
    "use_cache",
)
"""Keys of a config.json that say nothing about the forward (how weights are stored is read by quant.schemes)."""

_MISSING: Any = object()


class ConfigValues:
    """Reads one mapping with types and bounds, remembers what was read, and refuses the rest.

    `where` names the source in errors ("config.json", "GGUF metadata"); `prefix` is put before every key.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix
        self._seen: set[str] = set()

    def raw(self, key: str) -> Any:
        """The value as it stands, None where absent; marks the key as read."""
        self._seen.add(self._prefix + key)
        value = self._values.get(self._prefix + key)
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            if default is _MISSING:
                raise FormatError(f"{self._where} has no {self._prefix}{key}, which this architecture needs")
            return default
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> FormatError:
        return FormatError(f"{self._where}: {self._prefix}{key} is {str(value)[:80]!r}, expected {expected}")

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 1, maximum: int = MAX_EXTENT) -> int:
        """A whole number within [minimum, maximum]."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._wrong(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: Any = _MISSING, *, above: float = 0.0) -> float:
        """A finite number above `above`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not math.isfinite(value) or value <= above:
            raise self._wrong(key, value, f"a finite number above {above:g}")
        return float(value)

    def optional_integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_CONTEXT) -> int | None:
        """A whole number, or None where the key is absent or null."""
        return None if self.raw(key) is None else self.integer(key, minimum=minimum, maximum=maximum)

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None where the key is absent or null."""
        return None if self.raw(key) is None else self.number(key)

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None where absent."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return value

    def per_layer_integer(self, key: str, num_layers: int, default: Any = _MISSING) -> tuple[int, ...]:
        """A whole number for every layer: a scalar is repeated, an array must have one entry per layer."""
        value = self._value(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str):
            entries = list(value)
            if len(entries) != num_layers:
                raise self._wrong(key, entries, f"{num_layers} entries, one per layer")
        else:
            entries = [value] * num_layers
        for entry in entries:
            if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry <= MAX_EXTENT:
                raise self._wrong(key, entry, f"whole numbers from 0 to {MAX_EXTENT}")
        return tuple(entries)

    def uniform_integer(self, key: str, num_layers: int, default: Any = _MISSING) -> int:
        """A whole number that must be the same in every layer."""
        entries = set(self.per_layer_integer(key, num_layers, default))
        if len(entries) != 1 or entries == {0}:
            raise RefusalError(
                f"{self._where}: {self._prefix}{key} differs per layer or is 0 ({sorted(entries)[:8]}), "
                "which this architecture does not support; use a model with one value for all layers"
            )
        return entries.pop()

    def require(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Refuse the model by name unless the key is absent or holds one of `allowed`."""
        value = self.raw(key)
        if value is None:
            value = default if default is not None else (allowed[0] if allowed else None)
        if value is not None and value not in allowed:
            expected = " or ".join(repr(a) for a in allowed) or "nothing"
            raise RefusalError(
                f"{self._where} asks for {self._prefix}{key} = {str(value)[:80]!r}, which is not supported here "
                f"(supported: {expected}); use another model"
            )

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse keys (under the prefix) that were not read and are not harmless patterns; empty values pass."""
        patterns = tuple(harmless)
        unknown = [
            key
            for key, value in self._values.items()
            if key.startswith(self._prefix)
            and key not in self._seen
            and not (value is None or value is False or value == "" or value == [] or value == {})
            and not any(fnmatchcase(key[len(self._prefix) :], pattern) for pattern in patterns)
        ]
        if unknown:
            shown = ", ".join(f"{key} = {str(self._values[key])[:40]}" for key in sorted(unknown)[:6])
            raise RefusalError(
                f"{self._where} holds settings that this build does not know: {shown}; they could change the "
                "model's arithmetic, so it is refused (remove them from the file if they do not)"
            )
