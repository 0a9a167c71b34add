"""The one table of storage formats: name, ggml id, block size, block bytes and who uses it.

Sizes and ids are facts of the ggml block layouts; the side-scale formats at the end are the canonical in-memory
form of safetensors schemes (see `quant.schemes`), which have no ggml id.
"""

from __future__ import annotations

import torch

from slimserve.quant.tensor import BlockFormat

F32 = BlockFormat("F32", 0, 1, 4, "norms, routers, decay parameters; every container")
F16 = BlockFormat("F16", 1, 1, 2, "plain GGUF and safetensors weights")
Q4_0 = BlockFormat("Q4_0", 2, 32, 18, "older GGUF files, quantization-aware Gemma releases")
Q4_1 = BlockFormat("Q4_1", 3, 32, 20, "GGUF files whose K is no multiple of 256 (SmolLM2)")
Q5_0 = BlockFormat("Q5_0", 6, 32, 22, "Q4_K_M recipes where K is no multiple of 256 (Qwen2.5 0.5B, Gemma 3 270M)")
Q5_1 = BlockFormat("Q5_1", 7, 32, 24, "Q5_K recipes where K is no multiple of 256")
Q8_0 = BlockFormat("Q8_0", 8, 32, 34, "embeddings, heads, attention of most GGUF files")
Q8_1 = BlockFormat("Q8_1", 9, 32, 36, "activations of Q4_1, Q5_1 products")
Q2_K = BlockFormat("Q2_K", 10, 256, 84, "expert down projections of 2-bit GGUF files")
Q3_K = BlockFormat("Q3_K", 11, 256, 110, "Q2_K and Q3_K recipes")
Q4_K = BlockFormat("Q4_K", 12, 256, 144, "Q4_K recipes: the everyday GGUF weight")
Q5_K = BlockFormat("Q5_K", 13, 256, 176, "Q5_K recipes, shared experts of 2-bit files")
Q6_K = BlockFormat("Q6_K", 14, 256, 210, "heads, value and down projections of K recipes")
Q8_K = BlockFormat("Q8_K", 15, 256, 292, "activations of K and I products")
IQ2_XXS = BlockFormat("IQ2_XXS", 16, 256, 66, "expert gate and up projections of 2-bit GGUF files")
IQ2_XS = BlockFormat("IQ2_XS", 17, 256, 74, "experts of 2-bit GGUF files")
IQ3_XXS = BlockFormat("IQ3_XXS", 18, 256, 98, "experts of 2- and 3-bit GGUF files")
IQ1_S = BlockFormat("IQ1_S", 19, 256, 50, "1-bit GGUF files")
IQ4_NL = BlockFormat("IQ4_NL", 20, 32, 18, "4-bit GGUF files whose K is no multiple of 256")
IQ3_S = BlockFormat("IQ3_S", 21, 256, 110, "3-bit GGUF files")
IQ2_S = BlockFormat("IQ2_S", 22, 256, 82, "2-bit GGUF files")
IQ4_XS = BlockFormat("IQ4_XS", 23, 256, 136, "4-bit GGUF files")
I8 = BlockFormat("I8", 24, 1, 1, "raw bytes, e.g. FP8 payloads with a separate scale tensor")
I16 = BlockFormat("I16", 25, 1, 2, "index tables")
I32 = BlockFormat("I32", 26, 1, 4, "index tables")
I64 = BlockFormat("I64", 27, 1, 8, "index tables")
F64 = BlockFormat("F64", 28, 1, 8, "constants")
IQ1_M = BlockFormat("IQ1_M", 29, 256, 56, "1-bit GGUF files")
BF16 = BlockFormat("BF16", 30, 1, 2, "plain GGUF and safetensors weights")
TQ1_0 = BlockFormat("TQ1_0", 34, 256, 54, "ternary models")
TQ2_0 = BlockFormat("TQ2_0", 35, 256, 66, "ternary models")
MXFP4 = BlockFormat("MXFP4", 39, 32, 17, "gpt-oss experts")
NVFP4 = BlockFormat("NVFP4", 40, 64, 36, "GGUF files converted from NVFP4 checkpoints")
Q1_0 = BlockFormat("Q1_0", 41, 128, 18, "binary models", supported=False)
Q2_0 = BlockFormat("Q2_0", 42, 64, 18, "ternary models", supported=False)

F8_E4M3 = BlockFormat("F8_E4M3", None, 1, 1, "safetensors FP8: per channel, per tensor or 128 x 128 blocks")
E2M1_G16 = BlockFormat("E2M1_G16", None, 2, 1, "safetensors NVFP4: compressed-tensors and ModelOpt")
INT4 = BlockFormat("INT4", None, 2, 1, "safetensors symmetric int4: GPTQ, AutoRound, compressed-tensors")

# The three formats below keep their scales beside the data, as multipliers in PackedTensor.scales:
#   F8_E4M3   data float8 [N, K]; "weight_scale" float32 [1], [N, 1] or [ceil(N/128), ceil(K/128)]
#   E2M1_G16  data uint8 [N, K/2], low nibble = even k; "weight_scale" float8 [N, K/16]; "global_scale" float32 [1]
#   INT4      data uint8 [N, K/2], low nibble = even k, value code - 8; "weight_scale" float16 or bfloat16 [N, K/group]
# Stacked experts have a leading E on data and scales ("global_scale" and per-tensor scales become [E, 1]). A tensor
# stacked from parts with different globals has "global_scale" [N, 1]. GGUF NVFP4 may carry a "global_scale" too.
FORMATS: tuple[BlockFormat, ...] = tuple(value for value in list(globals().values()) if isinstance(value, BlockFormat))
"""Every format that SlimServe knows by name, ggml types first."""

RETIRED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""ggml ids that old files may hold and ggml itself no longer reads."""

PLAIN_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Formats whose `PackedTensor.data` is a tensor of this dtype and of the logical shape."""

_BY_NAME = {fmt.name: fmt for fmt in FORMATS}
_BY_TYPE_ID = {fmt.type_id: fmt for fmt in FORMATS if fmt.type_id is not None}


def find_format(name: str) -> BlockFormat | None:
    """The format called `name` (ggml's spelling, any case), or None."""
    return _BY_NAME.get(name.upper())


def find_type_id(type_id: int) -> BlockFormat | None:
    """The format with ggml's number `type_id`, or None; the caller names the tensor in its refusal."""
    return _BY_TYPE_ID.get(type_id)


def type_name(type_id: int) -> str:
    """A readable name for any ggml id, retired and unknown ones included."""
    fmt = _BY_TYPE_ID.get(type_id)
    if fmt is not None:
        return fmt.name
    return RETIRED_TYPES.get(type_id, "unknown")


def is_plain(fmt: BlockFormat) -> bool:
    """Whether the data of `fmt` is a plain tensor of its own dtype rather than packed bytes."""
    return fmt.name in PLAIN_DTYPES
