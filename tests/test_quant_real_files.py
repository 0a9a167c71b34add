"""Every tensor of the real model files, decoded bit for bit as ggml decodes it."""

from __future__ import annotations

import ggml_oracle
import pytest
from test_gguf_reader import REAL_FILES, real_file

from slimserve.quant.decode import dequantize
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf import GgufFile

PIECE_BYTES = 16 << 20


@pytest.mark.parametrize("name", REAL_FILES)
def test_every_tensor(name: str) -> None:
    file = GgufFile.open(real_file(name))
    elements = 0
    for tensor_name, info in file.tensors.items():
        if not ggml_oracle.has_decoder(info.format):
            assert info.format.name == "F32"
            continue
        packed = file.packed(tensor_name)
        rows = packed.data.reshape(-1, packed.data.shape[-1])
        step = max(1, PIECE_BYTES // rows.shape[1])
        for start in range(0, rows.shape[0], step):
            piece = rows[start : start + step]
            part = PackedTensor(info.format, (piece.shape[0], info.shape[-1]), piece, tensor_name)
            ggml_oracle.assert_same_bits(dequantize(part), ggml_oracle.decode(info.format, piece.numpy()), tensor_name)
            elements += part.num_elements
    print(f"{name}: {elements} packed elements equal, types {file.type_counts}")
    assert elements > 100_000_000
