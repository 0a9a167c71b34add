"""The architectures of this build, found by the names that the two containers use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slimserve.errors import FormatError, RefusalError
from slimserve.models import dense, dflash2, dflash2_config, gemma3, glm5_config, glm5_next, llama, qwen2, qwen3_5
from slimserve.models.contract import ModelConfig
from slimserve.models.geometry import Shapes
from slimserve.models.parameters import Parameters

ConfigReader = Callable[[Mapping[str, Any], Shapes], ModelConfig]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: the names it goes by, its config readers and its forward.

    `hf_architectures` and `model_types` are values of config.json; `gguf_names` of general.architecture. The
    ignored patterns (fnmatch) name tensors that a container may hold and the forward has no use for.
    """

    name: str
    hf_architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf_names: tuple[str, ...]
    from_hf: ConfigReader
    from_gguf: ConfigReader
    build: Callable[[Any, Parameters], Any]
    ignored_hf: tuple[str, ...] = ()
    ignored_gguf: tuple[str, ...] = ()


_SUPERFLUOUS_HF = ("*.rotary_emb.inv_freq", "lm_head.weight")
"""Buffers that old checkpoints store, and a head that a tied model repeats (an untied one uses it)."""

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "qwen2",
        ("Qwen2ForCausalLM",),
        ("qwen2",),
        ("qwen2",),
        qwen2.from_hf,
        qwen2.from_gguf,
        dense.DenseModel,
        ignored_hf=_SUPERFLUOUS_HF,
    ),
    Architecture(
        "llama",
        ("LlamaForCausalLM", "MistralForCausalLM"),
        ("llama", "mistral"),
        ("llama",),
        llama.from_hf,
        llama.from_gguf,
        dense.DenseModel,
        ignored_hf=_SUPERFLUOUS_HF,
    ),
    Architecture(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "gemma3"),
        ("gemma3",),
        gemma3.from_hf,
        gemma3.from_gguf,
        gemma3.Gemma3Model,
        ignored_hf=(
            *_SUPERFLUOUS_HF,
            "vision_tower.*",
            "multi_modal_projector.*",
            "model.vision_tower.*",
            "model.multi_modal_projector.*",
        ),
    ),
    Architecture(
        "qwen3_5",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
        ("qwen3_5", "qwen3_5_text"),
        ("qwen35",),
        qwen3_5.from_hf,
        qwen3_5.from_gguf,
        qwen3_5.Qwen35Model,
        ignored_hf=("model.visual.*", "visual.*"),
    ),
    Architecture(
        "glm5_next",
        ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"),
        ("glm5_next", "glm5_next_text"),
        ("glm5-next", "glm5next"),
        glm5_config.from_hf,
        glm5_config.from_gguf,
        glm5_next.Glm5Model,
        ignored_hf=("model.visual.*", "visual.*"),
    ),
)


DRAFTERS: tuple[Architecture, ...] = (
    Architecture(
        "dflash2",
        ("DFlash2DraftModel", "DFlashDraftModel"),
        (),
        ("dflash",),
        dflash2_config.from_hf,
        dflash2_config.from_gguf,
        dflash2.DFlash2Model,
        ignored_hf=("embed_tokens.*", "*.rotary_emb.inv_freq"),
        ignored_gguf=("token_embd.weight",),
    ),
)
"""Models that only draft for another one; the target's embedding serves them."""


def find_drafter(name: str) -> Architecture:
    """The drafter that a container's architecture name means; raises RefusalError where it is none."""
    for entry in DRAFTERS:
        if name in (*entry.hf_architectures, *entry.gguf_names):
            return entry
    known = ", ".join(name for entry in DRAFTERS for name in (*entry.hf_architectures, *entry.gguf_names))
    raise RefusalError(f"architecture {name[:80]!r} is not a drafter of this build ({known})")


def supported_names(attribute: str) -> str:
    """The names that a container may use, for messages."""
    return ", ".join(sorted({name for entry in ARCHITECTURES for name in getattr(entry, attribute)}))


def find_hf(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json; raises RefusalError listing the supported ones."""
    stated = config.get("architectures")
    names = [str(name) for name in stated] if isinstance(stated, list) else []
    for entry in ARCHITECTURES:
        if any(name in entry.hf_architectures for name in names):
            return entry
    model_type = config.get("model_type")
    if not names:
        for entry in ARCHITECTURES:
            if model_type in entry.model_types:
                return entry
    if not names and model_type is None:
        raise FormatError("config.json has neither architectures nor model_type; it is not a model's configuration")
    shown = ", ".join(names) or str(model_type)
    raise RefusalError(f"architecture {shown[:80]} is not supported; supported: {supported_names('hf_architectures')}")


def find_gguf(name: str) -> Architecture:
    """The architecture of a GGUF file; raises RefusalError listing the supported ones."""
    for entry in ARCHITECTURES:
        if name in entry.gguf_names:
            return entry
    raise RefusalError(f"GGUF architecture {name[:80]!r} is not supported; supported: {supported_names('gguf_names')}")
