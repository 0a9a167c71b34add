"""Rotary positions on three axes against transformers; text gives the bits of one axis."""

from __future__ import annotations

import pytest
import torch

from slimserve.errors import FormatError
from slimserve.layers.rotary import RopeSettings, Rotary, axis_masks
from slimserve.models.qwen3_5 import _sections

DIM, ROTARY = 64, 32
SECTIONS = (6, 5, 5)


def layer(sections: tuple[int, ...] = SECTIONS) -> Rotary:
    return Rotary(RopeSettings(10_000.0, ROTARY), torch.device("cpu"), sections=sections)


def test_axes_of_the_published_sections() -> None:
    """Height turns pairs 1, 4 .. 31, width 2, 5 .. 29, time the rest of the 32."""
    time, height, width = axis_masks((11, 11, 10), 32)
    assert height.nonzero().flatten().tolist() == list(range(1, 33, 3))
    assert width.nonzero().flatten().tolist() == list(range(2, 30, 3))
    assert torch.equal(time, ~(height | width)) and not (height & width).any()


def test_three_rows_against_transformers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="the oracle is not installed")
    config = qwen.Qwen3_5TextConfig(
        hidden_size=256, num_attention_heads=4, head_dim=DIM, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
                         "mrope_section": list(SECTIONS), "mrope_interleaved": True},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 3000, (3, 17), generator=generator)
    q, k = (torch.randn(17, heads, DIM, generator=generator) for heads in (4, 2))
    cosine, sine = qwen.Qwen3_5TextRotaryEmbedding(config)(q, positions[:, None])
    heads_first = [x.transpose(0, 1)[None] for x in (q, k)]
    expected = qwen.apply_rotary_pos_emb(*heads_first, cosine, sine)
    rotary = layer()
    for x, turned in zip((q, k), expected, strict=True):
        rotary(x, positions)
        assert float((x - turned[0].transpose(0, 1)).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_rows_are_text(dtype: torch.dtype) -> None:
    x = torch.randn(9, 3, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    one, three, positions = x.clone(), x.clone(), torch.arange(100, 109)
    rotary = layer()
    rotary(one, positions)
    rotary(three, positions.expand(3, -1))
    assert torch.equal(one, three) and not torch.equal(one, x)


def test_refusals() -> None:
    x = torch.zeros(2, 1, DIM)
    with pytest.raises(ValueError, match="of 0 axes"):
        layer(())(x, torch.zeros(3, 2, dtype=torch.int64))
    assert _sections([11, 11, 10, 0], "x") == (11, 11, 10) and _sections([], "x") == ()
    for wrong in ([11, 11], [1, 2, 3, 4], ["a", 1, 2], "abc", 7):
        with pytest.raises(FormatError, match="expected three whole numbers"):
            _sections(wrong, "mrope_section")
