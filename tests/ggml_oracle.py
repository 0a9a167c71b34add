"""libggml through ctypes, as an oracle for block formats (comes with llama-cpp-python; tests skip without it)."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from slimserve.quant.tensor import BlockFormat

_ROW_DECODERS = (
    {name: f"dequantize_row_{name.lower()}" for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")}
    | {
        name: f"dequantize_row_{name.lower()}"
        for name in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M")
    }
    | {name: f"dequantize_row_{name.lower()}" for name in ("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0")}
)
_ROW_DECODERS |= {name: f"dequantize_row_q{name[1]}_K" for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K")}
_ROW_DECODERS |= {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}


@lru_cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "lib" / "libggml-base.so"
    return ctypes.CDLL(str(path)) if path.exists() else None


def library() -> ctypes.CDLL:
    """libggml-base, or skip the test saying what to install."""
    lib = _library()
    if lib is None:
        pytest.skip("llama-cpp-python (libggml) is not installed: no oracle for block formats")
    return lib


def has_decoder(fmt: BlockFormat) -> bool:
    """Whether ggml has a row decoder for `fmt`."""
    return fmt.name in _ROW_DECODERS


def decode(fmt: BlockFormat, data: np.ndarray) -> np.ndarray:
    """ggml's own decode of whole blocks, uint8 [bytes] -> float32 [elements]."""
    data = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    count = data.size // fmt.block_bytes * fmt.block_size
    out = np.empty(count, dtype=np.float32)
    function = getattr(library(), _ROW_DECODERS[fmt.name])
    function.restype = None
    function(ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(count))
    return out


def encode(fmt: BlockFormat, values: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """ggml's own encode of float32 [rows, K] -> uint8 [rows, row_bytes]; `importance` is float32 [K]."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows, k = values.shape
    out = np.empty((rows, fmt.row_bytes(k)), dtype=np.uint8)
    function = library().ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    weights = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    written = function(
        ctypes.c_int(fmt.type_id),
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(0),
        ctypes.c_int64(rows),
        ctypes.c_int64(k),
        ctypes.c_void_p(None if weights is None else weights.ctypes.data),
    )
    assert written == out.size
    return out


def assert_same_bits(actual: torch.Tensor, expected: np.ndarray, where: str) -> None:
    """Equal float32 bits everywhere; a NaN matches any NaN."""
    mine, theirs = actual.contiguous().numpy().reshape(-1), expected.reshape(-1)
    assert mine.shape == theirs.shape
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(mine), nan), f"{where}: NaN in other places"
    different = np.flatnonzero((mine.view(np.uint32) != theirs.view(np.uint32)) & ~nan)
    if different.size:
        at = int(different[0])
        raise AssertionError(f"{where}: {different.size} differ, first at {at}: {mine[at]!r} against {theirs[at]!r}")
