"""`slimserve quantize FOLDER FILE.gguf`: glm5_next folders as GGUF files, tokenizer and template included."""

from __future__ import annotations

from pathlib import Path

import nano_models
import pytest
import tiny_hybrids
import torch
from hybrid_driver import HybridDriver

from slimserve.cli.main import main
from slimserve.errors import RefusalError, UsageError
from slimserve.models.glm5_config import from_gguf, from_hf
from slimserve.models.glm5_gguf import gguf_form, gguf_metadata
from slimserve.ops import Activations, NumericsConfig
from slimserve.weights.convert import convert
from slimserve.weights.gguf import GgufFile
from slimserve.weights.loader import load_model
from slimserve.weights.quantize import quantize
from slimserve.weights.quantize_rules import Family
from slimserve.weights.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

FLOAT = NumericsConfig(cpu_activations=Activations.FLOAT)


def logits(path: Path, tokens: list[int]) -> torch.Tensor:
    driver = HybridDriver(load_model(path, numerics=FLOAT).model)
    return driver.step([(driver.new(), tokens)], every_logit=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in the published names with the nano tokenizer's files, all weights exact in bfloat16."""
    source = nano_models.WHOLE / nano_models.GLM
    if not source.exists():
        source = nano_models.PACKAGED / nano_models.QWEN
    if not (source / "tokenizer.json").exists():
        pytest.skip("no nano tokenizer is here")
    oracle = tiny_hybrids.build_glm(vocab_size=4096)
    tensors = {
        name: value.bfloat16().float() if value.dim() > 1 else value
        for name, value in tiny_hybrids.glm_tensors(oracle).items()
    }
    made = tiny_hybrids.save_folder(oracle, tensors, tmp_path_factory.mktemp("glm"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (made / name).write_bytes((source / name).read_bytes())
    return made


def test_converted_model_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Unquantized, every tensor survives: the logits are the folder's but for the absorbed product's own order."""
    report = convert(folder, tmp_path / "whole.gguf", "BF16")
    assert set(report.formats) == {"F32", "BF16"}
    tokens = torch.randint(1, 4096, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits(folder, tokens)
    apart = (logits(tmp_path / "whole.gguf", tokens) - expected).abs().max() / expected.abs().max()
    assert float(apart) < 1e-5


def test_types_are_placed_by_name(folder: Path, tmp_path: Path) -> None:
    families = [Family.parse("blk.*_exps.weight=Q8_0"), Family.parse("blk.3.attn_*.weight=Q8_0")]
    convert(folder, tmp_path / "mixed.gguf", "BF16", families=families, head="Q8_0")
    formats = {name: info.format.name for name, info in GgufFile.open(tmp_path / "mixed.gguf").tensors.items()}
    assert formats["blk.1.ffn_up_exps.weight"] == formats["blk.3.attn_q_b.weight"] == "Q8_0"
    assert formats["token_embd.weight"] == formats["output.weight"] == "Q8_0"
    assert formats["blk.7.attn_q_b.weight"] == formats["blk.3.attn_k_b.weight"] == "BF16"
    assert formats["blk.0.kda_q_conv.weight"] == formats["blk.1.ffn_gate_inp.weight"] == "F32"
    assert formats["blk.3.indexer.attn_k.weight"] == formats["blk.0.hc_attn_fn.weight"] == "BF16"
    quantize(tmp_path / "mixed.gguf", tmp_path / "again.gguf", "BF16", families=[Family.parse("*_exps.weight=Q4_0")])
    again = GgufFile.open(tmp_path / "again.gguf")
    assert again.tensors["blk.1.ffn_up_exps.weight"].format.name == "Q4_0"


def test_tokenizer_and_template_survive(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "m.gguf", "Q8_0")
    metadata = GgufFile.open(tmp_path / "m.gguf").metadata
    own, made = tokenizer_from_folder(folder), tokenizer_from_gguf(metadata)
    assert metadata["tokenizer.ggml.pre"] == "qwen2"
    assert metadata["tokenizer.chat_template"] == (folder / "chat_template.jinja").read_text()
    assert made.end_ids == own.end_ids and made.control_ids == own.control_ids and made.add_bos == own.add_bos
    text = nano_models.documentation()[:20_000] + " ÄÖ 你好 12345 'LL <|user|> <think> [gMASK]"
    for special in (False, True):
        ids = own.encode(text, parse_special=special)
        assert made.encode(text, parse_special=special) == ids
        assert made.decode(ids, skip_special=False) == own.decode(ids, skip_special=False)


def test_command_line_and_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.gguf"
    arguments = ["quantize", str(folder), str(target), "--type", "Q8_0", "--as", "*_exps.weight=Q4_0"]
    assert main(arguments) == 0 and target.exists()
    assert "Q4_0" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"no weight fits 'nothing\*'"):
        convert(folder, target, "Q8_0", families=[Family.parse("nothing*=Q4_0")])
    with pytest.raises(UsageError, match="there is no folder"):
        convert(folder, tmp_path / "absent" / "x.gguf", "Q8_0")
    with pytest.raises(UsageError, match="write a BF16 file first"):
        convert(folder, target, "NVFP4")
    if (nano_models.WHOLE / nano_models.QWEN).exists():
        with pytest.raises(RefusalError, match="only glm5_next folders become GGUF files"):
            convert(nano_models.WHOLE / nano_models.QWEN, target, "Q8_0")


def test_metadata_of_the_published_geometry_reads_back() -> None:
    """The full-size model's keys say everything: config -> keys -> the same config."""
    config = from_hf(
        {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "text_config": {
                "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64,
                "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0,
                "v_head_dim": 256, "intermediate_size": 12288, "moe_intermediate_size": 2048,
                "n_routed_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1, "vocab_size": 154880,
                "routed_scaling_factor": 2.5, "norm_topk_prob": True, "swiglu_limit": 10.0, "index_n_heads": 32,
                "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4, "linear_num_heads": 64,
                "linear_head_dim": 128, "linear_lower_bound": -5.0, "num_nextn_predict_layers": 1,
                "first_k_dense_replace": 3, "max_position_embeddings": 1048576,
            },
        },
        {"model.language_model.layers.45.eh_proj.weight": (), "model.language_model.norm.weight": ()},
    )  # fmt: skip
    form = gguf_form(config)
    shapes = {spec.gguf_name: spec.shape for spec in form.parameters()}
    assert "blk.45.nextn.eh_proj.weight" in shapes and shapes["blk.3.attn_k_b.weight"] == (64, 512, 256)
    assert from_gguf(gguf_metadata(config), shapes) == form
