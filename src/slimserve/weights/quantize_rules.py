"""Which tensors a quantization may touch and what each becomes, by name and shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slimserve.errors import UsageError
from slimserve.quant.encode import encodable
from slimserve.quant.formats import IQ4_NL, Q5_0, Q5_1, Q6_K, Q8_0, find_format
from slimserve.quant.tensor import BlockFormat

KEPT_GGUF = (
    "*norm*", "*conv*", "*ffn_gate_inp*", "*ssm_a*", "*ssm_b*", "*ssm_d*", "*indexer*", "*hc_*", "*hyper*",
    "*eh_proj*", "*exp_probs_b*", "*attn_k_b*", "*attn_v_b*", "*_beta*", "position_embd*", "token_types*", "rope_*",
    "v.*", "mm.*",
)  # fmt: skip
"""GGUF names that decide routing, decay, positions or selection, or are too small to matter."""

KEPT_HF = (
    "*norm*", "*conv*", "*mlp.gate.*", "*router*", "*shared_expert_gate*", "*A_log*", "*dt_bias*", "*in_proj_a.*",
    "*in_proj_b.*", "*in_proj_ba.*", "*.b_proj.*", "*.f_a_proj.*", "*.f_b_proj.*", "*.g_a_proj.*", "*.g_b_proj.*",
    "*kv_b_proj*", "*indexer*", "*hc_*", "*visual*", "*vision*", "*mtp.fc*", "*eh_proj*", "*pos_embed*",
)  # fmt: skip

HEADS_GGUF = ("token_embd.weight", "output.weight")
HEADS_HF = ("*embed_tokens.weight", "*lm_head.weight")

_FALLBACKS = {"Q2_K": IQ4_NL, "Q3_K": IQ4_NL, "IQ2_XXS": IQ4_NL, "IQ4_XS": IQ4_NL, "TQ2_0": IQ4_NL, "Q4_K": Q5_0}
_FALLBACKS |= {"Q5_K": Q5_1, "Q6_K": Q8_0, "NVFP4": IQ4_NL}
"""What takes the place of a format whose blocks do not divide K; each has blocks of 32 and no fewer bits."""

GGML_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ2_0": 37, "MXFP4": 38,
    "NVFP4": 39,
}  # fmt: skip
"""`general.file_type` of a file that is mostly of one type; a label, nothing decides by it."""


def writable_format(name: str) -> BlockFormat:
    """The GGUF format called `name`; UsageError listing the possible ones otherwise."""
    fmt = find_format(name)
    if fmt is None or fmt.name not in encodable():
        raise UsageError(f"type {name!r} cannot be written to GGUF; possible are {', '.join(encodable())}")
    return fmt


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a shell-style pattern fits the tensor name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def fitting(fmt: BlockFormat, columns: int) -> BlockFormat | None:
    """`fmt` where its blocks divide K, else its fallback, else None."""
    if columns % fmt.block_size == 0:
        return fmt
    fallback = _FALLBACKS.get(fmt.name)
    return fallback if fallback is not None and columns % fallback.block_size == 0 else None


def head_format(fmt: BlockFormat, columns: int) -> BlockFormat | None:
    """What embeddings and heads become beside weights of `fmt`: never fewer than 6.5 bits a weight."""
    if fmt.block_bytes * 8 / fmt.block_size >= 6.5:
        return fitting(fmt, columns)
    return fitting(Q6_K, columns)


@dataclass(frozen=True, slots=True)
class Family:
    """One PATTERN=TYPE of the command line: tensors whose names fit become `type_name`."""

    pattern: str
    type_name: str

    @classmethod
    def parse(cls, text: str) -> Family:
        """From "PATTERN=TYPE"; UsageError otherwise."""
        pattern, equals, type_name = text.rpartition("=")
        if not equals or not pattern or not type_name:
            raise UsageError(f"{text!r} is not of the form PATTERN=TYPE, e.g. 'blk.*.attn_q.weight=Q8_0'")
        return cls(pattern, type_name)


def gguf_choice(
    name: str,
    shape: Sequence[int],
    fmt: BlockFormat,
    head: BlockFormat | None,
    keep: Sequence[str],
    families: Sequence[Family],
) -> BlockFormat | None:
    """What a tensor of a GGUF file becomes; None = it stays. Among names that may change, the first family counts."""
    if len(shape) < 2 or matches(name, (*KEPT_GGUF, *keep)):
        return None
    for family in families:
        if matches(name, (family.pattern,)):
            return fitting(writable_format(family.type_name), shape[-1])
    if name in HEADS_GGUF:
        return fitting(head, shape[-1]) if head else head_format(fmt, shape[-1])
    return fitting(fmt, shape[-1])


def check_families(families: Sequence[Family], names: Iterable[str]) -> None:
    """UsageError for a family that fits none of the names."""
    known = list(names)
    for family in families:
        if not any(matches(name, (family.pattern,)) for name in known):
            raise UsageError(f"no weight fits {family.pattern!r}, e.g. {known[0] if known else 'none'} does not")
