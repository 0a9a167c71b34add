"""`slimserve quantize`: GGUF that llama.cpp reads, folders that our reader reads, importance matrices, sidecars."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gguf_reader import real_file

from slimserve.cli.main import main
from slimserve.errors import FormatError, RefusalError, UsageError
from slimserve.models.contract import Role
from slimserve.quant.decode import dequantize
from slimserve.quant.encode import encodable
from slimserve.quant.formats import BF16, F32
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf import GgufFile
from slimserve.weights.gguf_write import TensorPlan, write_gguf
from slimserve.weights.imatrix import read_imatrix
from slimserve.weights.loader import load_model
from slimserve.weights.quantize import quantize
from slimserve.weights.quantize_folder import FolderType
from slimserve.weights.quantize_rules import Family
from slimserve.weights.quantized import gguf_tensors, safetensors_tensors
from slimserve.weights.safetensors import SafetensorsFolder
from slimserve.weights.safetensors_write import StoredPlan, write_safetensors
from slimserve.weights.sidecar import make_sidecar, with_sidecar

HIDDEN, FFN, LAYERS = 256, 512, 2


def f32(name: str, *shape: int, scale: float = 0.06) -> TensorPlan:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    values = 1.0 + torch.rand(shape, generator=generator) if "norm" in name else None
    data = torch.randn(shape, generator=generator) * scale if values is None else values
    return TensorPlan.of(PackedTensor(F32, shape, data, name))


def tiny_llama(path: Path, vocabulary: int = 512) -> None:
    """A random two-layer llama with the first tokens of SmolLM2's tokenizer."""
    donor = GgufFile.open(real_file("SmolLM2-135M-Instruct.Q4_1.gguf")).metadata
    metadata: dict[str, Any] = {"general.architecture": "llama", "general.name": "tiny"}
    metadata |= {
        "llama.block_count": LAYERS, "llama.context_length": 128, "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": 64,
        "llama.vocab_size": vocabulary, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": donor["tokenizer.ggml.tokens"][:vocabulary],
        "tokenizer.ggml.token_type": donor["tokenizer.ggml.token_type"][:vocabulary],
        "tokenizer.ggml.merges": donor["tokenizer.ggml.merges"][:100], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    plans = [f32("token_embd.weight", vocabulary, HIDDEN), f32("output.weight", vocabulary, HIDDEN)]
    plans.append(f32("output_norm.weight", HIDDEN))
    for layer in range(LAYERS):
        own = f"blk.{layer}"
        plans += [f32(f"{own}.{name}_norm.weight", HIDDEN) for name in ("attn", "ffn")]
        plans += [f32(f"{own}.{name}.weight", HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")]
        plans += [f32(f"{own}.{name}.weight", HIDDEN // 2, HIDDEN) for name in ("attn_k", "attn_v")]
        plans += [f32(f"{own}.{name}.weight", FFN, HIDDEN) for name in ("ffn_gate", "ffn_up")]
        plans.append(f32(f"{own}.ffn_down.weight", HIDDEN, FFN))
    write_gguf(path, metadata, plans)


def decoded_copy(source: Path, target: Path) -> None:
    """The same model with every tensor decoded to float32."""
    file = GgufFile.open(source)
    plans = []
    tensors = gguf_tensors(file)
    for name in tensors.shapes:
        packed = tensors.packed(name)
        plans.append(TensorPlan.of(PackedTensor(F32, packed.shape, dequantize(packed), name)))
    write_gguf(target, file.metadata, plans, value_types=file.value_types)


def llama_logits(path: Path) -> np.ndarray:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: no second reader")
    model = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    model.eval(list(range(5, 29)))
    scores = np.array(model.scores[:24], dtype=np.float64)
    model.close()
    return scores


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_llama(path)
    return path


@pytest.mark.parametrize(
    "name",
    [name for name in encodable() if name not in ("F32", "TQ2_0")],
)
def test_llama_cpp_reads_what_we_write(tiny: Path, tmp_path: Path, name: str) -> None:
    """llama.cpp on the packed file agrees with llama.cpp on our decode of it (its activations are int8 there)."""
    packed, plain = tmp_path / "packed.gguf", tmp_path / "plain.gguf"
    report = quantize(tiny, packed, name)
    assert report.formats[name] == LAYERS * 7 + (2 if name in ("F16", "BF16", "Q8_0", "Q6_K") else 0)
    assert GgufFile.open(packed).type_counts["F32"] == LAYERS * 2 + 1 + (LAYERS * 7 if name == "NVFP4" else 0)
    decoded_copy(packed, plain)
    first, second = llama_logits(packed), llama_logits(plain)
    error = np.linalg.norm(first - second) / np.linalg.norm(second)
    print(f"{name}: relative difference of logits {error:.4f}")
    assert error < 0.05


def test_requantizing_keeps_equal_formats_and_small_tensors(tiny: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    quantize(tiny, first, "Q4_K")
    quantize(first, second, "Q4_K")
    assert first.read_bytes() == second.read_bytes()
    kept = tmp_path / "c.gguf"
    quantize(tiny, kept, "Q4_K", keep=["blk.0.*"], head="Q8_0")
    tensors = GgufFile.open(kept).tensors
    assert tensors["blk.0.attn_q.weight"].format.name == "F32" and tensors["output.weight"].format.name == "Q8_0"
    assert tensors["blk.1.attn_q.weight"].format.name == "Q4_K"
    assert GgufFile.open(kept).metadata["general.file_type"] == 15


def test_refusals(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'IQ1_S' cannot be written to GGUF"):
        quantize(tiny, tmp_path / "x.gguf", "IQ1_S")
    with pytest.raises(UsageError, match=r"does not end in \.gguf"):
        quantize(tiny, tmp_path / "x", "Q4_K")
    with pytest.raises(UsageError, match="is the source itself"):
        quantize(tiny, tiny, "Q4_K")
    with pytest.raises(UsageError, match="cannot be written"):
        quantize(tiny, tmp_path / "absent" / "x.gguf", "Q8_0")
    with pytest.raises(UsageError, match="PATTERN=TYPE"):
        Family.parse("blk.0")


def importances(tiny: Path) -> dict[str, torch.Tensor]:
    file = GgufFile.open(tiny)
    generator = torch.Generator().manual_seed(0)
    names = [name for name in file.tensors if name.startswith("blk") and "norm" not in name]
    return {name: torch.rand(file.tensors[name].shape[1], generator=generator) ** 6 for name in names}


def write_imatrix(path: Path, values: dict[str, torch.Tensor], kind: str) -> None:
    if kind == "gguf":
        plans = []
        for name, vector in values.items():
            plans.append(TensorPlan.of(PackedTensor(F32, (1, vector.numel()), vector[None] * 8, f"{name}.in_sum2")))
            plans.append(TensorPlan.of(PackedTensor(F32, (1, 1), torch.tensor([[8.0]]), f"{name}.counts")))
        write_gguf(path, {"general.type": "imatrix", "general.architecture": "none"}, plans)
    elif kind == "binary":
        parts = [struct.pack("<i", len(values))]
        for name, vector in values.items():
            head = struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, vector.numel())
            parts.append(head + (vector * 4).numpy().astype("<f4").tobytes())
        path.write_bytes(b"".join(parts))
    else:
        write_safetensors(path, [StoredPlan.of(name, vector) for name, vector in values.items()])


@pytest.mark.parametrize("kind", ["gguf", "binary", "safetensors"])
def test_importance_matrix(tiny: Path, tmp_path: Path, kind: str) -> None:
    """All three kinds are read alike, and importances lower the error where they say it matters."""
    values = importances(tiny)
    path = tmp_path / "imatrix"
    write_imatrix(path, values, kind)
    read = read_imatrix(path)
    assert set(read) == set(values)
    for name, vector in values.items():
        torch.testing.assert_close(read[name].reshape(-1), vector, rtol=1e-6, atol=0)
    quantize(tiny, tmp_path / "plain.gguf", "IQ2_XXS")
    report = quantize(tiny, tmp_path / "weighted.gguf", "IQ2_XXS", imatrix=path)
    assert report.without_importance == ["token_embd.weight", "output.weight"]
    source, plain = GgufFile.open(tiny), GgufFile.open(tmp_path / "plain.gguf")
    weighted = GgufFile.open(tmp_path / "weighted.gguf")
    for name, vector in values.items():
        truth = dequantize(source.packed(name))
        errors = [float(((dequantize(file.packed(name)) - truth) ** 2 * vector).sum()) for file in (plain, weighted)]
        assert errors[1] < 0.9 * errors[0]


def test_damaged_importance_matrices(tmp_path: Path) -> None:
    path = tmp_path / "imatrix"
    for content, message in (
        (struct.pack("<i", -4) + bytes(8), "the entry count is -4"),
        (struct.pack("<ii", 1, 1 << 30), "the name length of entry 0"),
        (struct.pack("<ii", 1, 1) + b"w" + struct.pack("<ii", 1, 1 << 28), "the length of 'w'"),
        (struct.pack("<ii", 2, 1) + b"w" + struct.pack("<iif", 1, 1, 1.0), "cut off"),
        (struct.pack("<ii", 1, 1) + b"w" + struct.pack("<iif", 1, 1, -1.0), "'w' are negative"),
        (struct.pack("<i", 0), "holds no importances"),
    ):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=message):
            read_imatrix(path)


def small_folder(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)

    def bf16(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).bfloat16()

    tensors = {"model.embed_tokens.weight": bf16(64, 256), "lm_head.weight": bf16(64, 256)}
    tensors |= {"model.norm.weight": bf16(256), "model.layers.0.mlp.gate.weight": bf16(8, 256)}
    tensors |= {f"model.layers.0.mlp.experts.{e}.up_proj.weight": bf16(136, 256) for e in range(2)}
    tensors["model.layers.0.self_attn.q_proj.weight"] = bf16(256, 256)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", [StoredPlan.of(n, t) for n, t in tensors.items()])
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "architectures": ["Toy"]}))
    (folder / "tokenizer.json").write_text("{}")
    return tensors


@pytest.mark.parametrize("kind", list(FolderType), ids=lambda kind: kind.value)
def test_folders(tmp_path: Path, kind: FolderType) -> None:
    tensors = small_folder(tmp_path / "in")
    quantize(tmp_path / "in", tmp_path / "out", kind.value)
    folder = SafetensorsFolder.open(tmp_path / "out")
    found = safetensors_tensors(folder)
    assert found.schemes is not None and found.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    assert set(found.schemes.weights) == {name for name in tensors if "proj" in name}
    assert (tmp_path / "out" / "tokenizer.json").exists() and folder.config["quantization_config"]["quant_method"]
    for name, original in tensors.items():
        packed = found.packed(name)
        if name not in found.schemes.weights:
            assert packed.format is BF16 and torch.equal(packed.data, original)
            continue
        error = float((dequantize(packed) - original.float()).norm() / original.float().norm())
        assert error < (0.04 if "FP8" in kind.value else 0.13), f"{name}: {error:.3f}"
    with pytest.raises(UsageError, match="already holds safetensors"):
        quantize(tmp_path / "in", tmp_path / "out", kind.value)
    again = {FolderType.FP8: "NVFP4"}.get(kind, "FP8")
    quantize(tmp_path / "out", tmp_path / "again", again)
    second = safetensors_tensors(SafetensorsFolder.open(tmp_path / "again"))
    assert second.schemes is not None and len(second.schemes.weights) == 3


def test_folder_refusals(tmp_path: Path) -> None:
    small_folder(tmp_path / "in")
    with pytest.raises(UsageError, match="'Q4_K' cannot be written to safetensors"):
        quantize(tmp_path / "in", tmp_path / "out", "Q4_K")
    with pytest.raises(UsageError, match="looks like a file"):
        quantize(tmp_path / "in", tmp_path / "out.gguf", "FP8")
    with pytest.raises(RefusalError, match="no weight that can become FP8"):
        quantize(tmp_path / "in", tmp_path / "out", "FP8", keep=["*"])
    assert not (tmp_path / "out").exists()


def test_sidecar(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "side.gguf"
    families = [Family.parse("blk.*.ffn_down.weight=FP8"), Family.parse("blk.0.attn_?.weight=Q8_0")]
    families.append(Family.parse("blk.1.ffn_up.weight=NVFP4"))
    report = make_sidecar(tiny, path, families)
    assert report.formats == {"FP8": 2, "Q8_0": 3, "NVFP4": 1}
    base = gguf_tensors(GgufFile.open(tiny))
    swapped = with_sidecar(base.shapes, base.packed, path)
    formats = {name: swapped(name).format.name for name in base.shapes}
    assert formats["blk.1.ffn_down.weight"] == "F8_E4M3" and formats["blk.0.attn_q.weight"] == "Q8_0"
    assert formats["blk.1.attn_q.weight"] == "F32" and formats["blk.0.attn_output.weight"] == "F32"
    for name in ("blk.1.ffn_down.weight", "blk.0.attn_v.weight"):
        truth = dequantize(base.packed(name))
        assert float((dequantize(swapped(name)) - truth).norm() / truth.norm()) < 0.04
    up, truth = swapped("blk.1.ffn_up.weight"), dequantize(base.packed("blk.1.ffn_up.weight"))
    assert set(up.scales) == {"global_scale"} and float((dequantize(up) - truth).norm() / truth.norm()) < 0.1
    other = tmp_path / "other.gguf"
    tiny_llama(other, vocabulary=500)
    with pytest.raises(FormatError, match="made from another checkpoint"):
        stranger = gguf_tensors(GgufFile.open(other))
        with_sidecar(stranger.shapes, stranger.packed, path)
    with pytest.raises(FormatError, match="not a sidecar file"):
        with_sidecar(base.shapes, base.packed, tiny)
    with pytest.raises(UsageError, match=r"fits 'nothing\.\*'"):
        make_sidecar(tiny, path, [Family.parse("nothing.*=Q8_0")])


def test_sidecar_of_a_folder(tmp_path: Path) -> None:
    small_folder(tmp_path / "in")
    make_sidecar(tmp_path / "in", tmp_path / "s.gguf", [Family.parse("*experts*=Q4_K")])
    base = safetensors_tensors(SafetensorsFolder.open(tmp_path / "in"))
    read = with_sidecar(base.shapes, base.packed, tmp_path / "s.gguf")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert read(name).format.name == "Q4_K" and read("lm_head.weight").format is BF16


def test_a_model_loads_with_its_sidecar(tiny: Path, tmp_path: Path) -> None:
    """The loaded model holds the sidecar's formats, and its name in cache keys is another one."""
    path = tmp_path / "side.gguf"
    make_sidecar(tiny, path, [Family.parse("blk.*.ffn_*.weight=Q4_K")])
    plain, swapped = load_model(tiny), load_model(tiny, sidecar=path)
    formats = {family.format: family.num_tensors for family in swapped.memory if family.role is Role.LINEAR}
    assert formats == {"F32": 4 * LAYERS, "Q4_K": 3 * LAYERS}
    assert plain.fingerprint != swapped.fingerprint


def test_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes and sentences of `slimserve quantize`."""
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(tiny), str(out), "--type", "q4_k", "--head", "Q8_0", "--keep", "blk.0.*"]) == 0
    assert "7 Q4_K" in capsys.readouterr().err
    assert GgufFile.open(out).type_counts["Q8_0"] == 2
    assert main(["quantize", str(tiny), str(tmp_path / "s.gguf"), "--swap", "blk.*.ffn_up.weight=IQ4_NL"]) == 0
    for arguments, message in (
        ([str(tiny), str(out)], "give --type"),
        ([str(tiny), str(out), "--type", "Q9"], "'Q9' cannot be written"),
        ([str(tiny), str(out), "--type", "Q8_0", "--swap", "a=Q8_0"], "do not go with it"),
        ([str(tmp_path / "none.gguf"), str(out), "--type", "Q8_0"], "does not exist"),
        ([str(tiny), str(out), "--type", "Q8_0", "--imatrix", str(tmp_path / "none")], "does not exist"),
    ):
        assert main(["quantize", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and not captured.out
