"""Bytes per token and per sequence of every cache group at the published geometries, against written-out formulas."""

from __future__ import annotations

import torch

from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import CacheSpec
from slimserve.models.qwen3_5 import from_hf as qwen_from_hf
from slimserve.models.recurrent import MAX_DRAFT_TOKENS
from slimserve.profiles.registry import find_record
from slimserve.profiles.resolve import describe_record

RING = BLOCK_TOKENS + MAX_DRAFT_TOKENS + 1


def groups(specs: tuple[CacheSpec, ...]) -> dict[str, tuple[float, int, int]]:
    """Name -> (bytes per token, bytes of a boundary state, bytes of a running sequence's open buffers)."""
    found = {spec.name: (spec.page_bytes() / BLOCK_TOKENS, spec.slot_bytes(), spec.open_bytes()) for spec in specs}
    for name, (per_token, state, opened) in found.items():
        print(f"{name}: {per_token:,.0f} B per token, {state:,} B per state, {opened:,} B per running sequence")
    return found


def test_glm_5_3_flash() -> None:
    config = describe_record(find_record("glm53f-q2-1")).config
    found = groups(config.caches(torch.bfloat16))
    latent_layers, kda_layers, heads, dim = 11, 34, 64, 128
    assert found["latent"] == (latent_layers * 512 * 2, 0, 0) == (11_264, 0, 0)
    ring = 4 + MAX_DRAFT_TOKENS + 1
    assert found["indexer"] == (latent_layers * dim * 2 / 4, 0, latent_layers * ring * 2 * dim * 4)
    assert found["indexer"][0] == 704
    state, tail = heads * dim * dim * 4, 3 * 3 * heads * dim * 4
    rows = 3 * heads * dim * 4  # key, decay and written value of one token
    opened = kda_layers * (RING * rows + (MAX_DRAFT_TOKENS + 1 + 4) * 3 * heads * dim * 4)
    assert found["recurrent"] == (0, kda_layers * (state + tail), opened)
    assert kda_layers * state == 142_606_336 and kda_layers * tail == 10_027_008
    drafter = groups(config.drafter_caches(torch.bfloat16))
    assert drafter["mtp_latent"][0] == 1_024 and drafter["mtp_indexer"][0] == 64
    assert groups(config.caches(torch.float8_e4m3fn))["latent"][0] == 11_264 / 2
    assert groups(config.caches(torch.float8_e4m3fn))["indexer"][0] == 704, "index keys are never fp8"


def test_qwen3_8_27b() -> None:
    text = {
        "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 17408, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
        "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    config = qwen_from_hf({"model_type": "qwen3_5", "text_config": text}, {"mtp.fc.weight": ()})
    found = groups(config.caches(torch.bfloat16))
    assert found["attention"] == (16 * 2 * 4 * 256 * 2, 0, 0) == (65_536, 0, 0)
    layers, conv = 48, 2 * 16 * 128 + 48 * 128
    state, tail = 48 * 128 * 128 * 4, 3 * conv * 4
    rows = (16 * 128 + 48 + 48 * 128) * 4
    opened = layers * (RING * rows + (MAX_DRAFT_TOKENS + 1 + 4) * conv * 4)
    assert found["recurrent"] == (0, layers * (state + tail), opened)
    assert layers * state == 150_994_944 and layers * tail == 5_898_240
    assert groups(config.drafter_caches(torch.bfloat16))["mtp"][0] == 4_096
