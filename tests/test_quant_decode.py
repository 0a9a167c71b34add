"""Block decode against ggml, bit for bit: random blocks, extreme blocks, and the definitions where ggml has none."""

from __future__ import annotations

import ctypes

import ggml_oracle
import numpy as np
import pytest
import torch

from slimserve.errors import FormatError
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import FORMATS, PLAIN_DTYPES, RETIRED_TYPES, find_format, find_type_id, type_name
from slimserve.quant.tensor import BlockFormat, PackedTensor

BLOCK_FORMATS = [f for f in FORMATS if f.supported and f.type_id is not None and f.name not in PLAIN_DTYPES]
DECODED_BY_GGML = [f for f in BLOCK_FORMATS if ggml_oracle.has_decoder(f)]


def packed_of(fmt: BlockFormat, data: np.ndarray) -> PackedTensor:
    data = np.ascontiguousarray(data, dtype=np.uint8).reshape(-1, fmt.block_bytes)
    shape = (data.shape[0], fmt.block_size)
    return PackedTensor(fmt, shape, torch.from_numpy(data), name="blocks")


def check(fmt: BlockFormat, data: np.ndarray, where: str) -> None:
    ggml_oracle.assert_same_bits(dequantize(packed_of(fmt, data)), ggml_oracle.decode(fmt, data), f"{fmt.name} {where}")


@pytest.mark.parametrize("fmt", DECODED_BY_GGML, ids=lambda f: f.name)
def test_random_blocks(fmt: BlockFormat) -> None:
    rng = np.random.default_rng(fmt.type_id)
    check(fmt, rng.integers(0, 256, (3000, fmt.block_bytes), dtype=np.uint8), "random bytes")


@pytest.mark.parametrize("fmt", DECODED_BY_GGML, ids=lambda f: f.name)
def test_every_byte_value_at_every_place(fmt: BlockFormat) -> None:
    values = np.arange(256, dtype=np.uint8)
    same = np.repeat(values[:, None], fmt.block_bytes, axis=1)
    check(fmt, same, "constant blocks")
    rng = np.random.default_rng(7)
    base = rng.integers(0, 256, fmt.block_bytes, dtype=np.uint8)
    single = np.broadcast_to(base, (fmt.block_bytes, 256, fmt.block_bytes)).copy()
    for place in range(fmt.block_bytes):
        single[place, :, place] = values
    check(fmt, single, "one byte varied")


@pytest.mark.parametrize("fmt", DECODED_BY_GGML, ids=lambda f: f.name)
def test_extreme_scales(fmt: BlockFormat) -> None:
    """Zero, subnormal, largest, infinite and NaN fp16 patterns at every even and odd offset."""
    codes = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00]
    patterns = np.array(codes, dtype=np.uint16)
    rng = np.random.default_rng(11)
    for pattern in patterns:
        data = rng.integers(0, 256, (fmt.block_bytes - 1, fmt.block_bytes), dtype=np.uint8)
        for offset in range(fmt.block_bytes - 1):
            data[offset, offset : offset + 2] = np.array([pattern], dtype="<u2").view(np.uint8)
        check(fmt, data, f"pattern {pattern:#06x}")


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_sixteen_bit_value(name: str) -> None:
    fmt = find_format(name)
    assert fmt is not None
    codes = np.arange(65536, dtype=np.uint16)
    plain = torch.from_numpy(codes.view(np.int16)).view(PLAIN_DTYPES[name])
    actual = dequantize(PackedTensor(fmt, (65536,), plain))
    ggml_oracle.assert_same_bits(actual, ggml_oracle.decode(fmt, codes), name)


def test_q8_1_by_definition() -> None:
    """ggml has no decoder for Q8_1: value = d * q, the stored sum is not used."""
    fmt = find_format("Q8_1")
    assert fmt is not None
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (500, 36), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        d = data[:, 0:2].copy().view(np.float16).astype(np.float32)
        expected = d * data[:, 4:].view(np.int8).astype(np.float32)
    ggml_oracle.assert_same_bits(dequantize(packed_of(fmt, data)), expected, "Q8_1")


def test_table_agrees_with_ggml() -> None:
    lib = ggml_oracle.library()
    lib.ggml_type_name.restype = ctypes.c_char_p
    lib.ggml_blck_size.restype = ctypes.c_int64
    lib.ggml_type_size.restype = ctypes.c_size_t
    for type_id in range(43):
        fmt = find_type_id(type_id)
        if fmt is None:
            assert lib.ggml_type_size(type_id) == 0 and type_id in RETIRED_TYPES
            continue
        assert lib.ggml_type_name(type_id).decode().upper() == fmt.name
        assert (lib.ggml_blck_size(type_id), lib.ggml_type_size(type_id)) == (fmt.block_size, fmt.block_bytes)


def test_lookup() -> None:
    assert find_format("q4_k") is find_type_id(12)
    assert find_format("Q4_9") is None and find_type_id(4) is None and find_type_id(-1) is None
    assert type_name(4) == "Q4_2" and type_name(12) == "Q4_K" and type_name(999) == "unknown"
    assert len({f.name for f in FORMATS}) == len(FORMATS)
    assert all(f.used_by for f in FORMATS)


def test_shape_and_refusal() -> None:
    fmt = find_format("Q8_0")
    assert fmt is not None
    data = torch.zeros((2, 3, 68), dtype=torch.uint8)
    assert dequantize(PackedTensor(fmt, (2, 3, 64), data)).shape == (2, 3, 64)
    with pytest.raises(ValueError, match="whole blocks"):
        fmt.row_bytes(33)
    unknown = find_format("Q1_0")
    assert unknown is not None
    with pytest.raises(FormatError, match=r"'w'.*Q1_0.*41"):
        dequantize(PackedTensor(unknown, (128,), torch.zeros(18, dtype=torch.uint8), name="w"))
