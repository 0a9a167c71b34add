"""tokenizer.json folders against the tokenizers library and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_corpus import corpus
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from slimserve.errors import FormatError, RefusalError
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_folder

NANO = Path(__file__).resolve().parents[2] / "shared" / "nano"
CORPUS = corpus()


def nano(name: str) -> Path:
    folder = NANO / name
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"the trained checkpoint {name} is not beside the checkout")
    return folder


def check_against(tokenizer: Tokenizer, rust: RustTokenizer, lines: list[str]) -> None:
    """Ids with control tokens parsed and not parsed, and decoded text, equal the library's."""
    for parse_special in (True, False):
        rust.encode_special_tokens = not parse_special
        for line in lines:
            expected = rust.encode(line, add_special_tokens=False).ids
            assert tokenizer.encode(line, parse_special=parse_special) == expected, (line, parse_special)
    rust.encode_special_tokens = False


@pytest.mark.parametrize("name", ["nano-qwen3_5", "nano-glm5-next"])
def test_trained_checkpoints(name: str) -> None:
    folder = nano(name)
    tokenizer = tokenizer_from_folder(folder)
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    check_against(tokenizer, rust, CORPUS)
    for line in CORPUS:
        ids = tokenizer.encode(line, parse_special=True)
        assert tokenizer.decode(ids, skip_special=False, keep=True) == rust.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.end_ids == (0, 4, 6)
    assert not tokenizer.add_bos


def test_trained_checkpoint_against_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = nano("nano-qwen3_5")
    # AutoTokenizer would put the pre-tokenizer of the architecture over the one in tokenizer.json.
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer = tokenizer_from_folder(folder)
    for line in CORPUS:
        assert tokenizer.encode(line, parse_special=True) == reference(line, add_special_tokens=False)["input_ids"]
    recorded = json.loads((folder / "reference.json").read_text())["prompts"]
    assert len(recorded) == 8
    for case in recorded:
        assert tokenizer.encode_prompt(case["prompt_text"]) == case["prompt_ids"]
        assert tokenizer.decode(case["greedy_ids"], previous_id=0, skip_special=False) == case["greedy_text"]


def sentencepiece_like(scheme: str, folder: Path) -> RustTokenizer:
    """A BPE with byte fallback in the layouts of Llama, Mistral and Gemma, trained on the corpus and saved."""
    rust = RustTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "prepend":
        rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "gemma":
        rust.normalizer = normalizers.Replace(" ", "▁")
        rust.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=names, limit_alphabet=200, show_progress=False)
    rust.train_from_iterator(corpus(600, seed=2, look_alikes=False), trainer)
    document = json.loads(rust.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    rust = RustTokenizer.from_str(json.dumps(document))
    rust.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    mask = AddedToken("[MASK]", lstrip=True, normalized=False)
    rust.add_special_tokens([AddedToken("<|im_end|>", normalized=False), mask])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme not in ("gemma", "never"):
        steps.append(decoders.Strip(" ", 1, 0))
    rust.decoder = decoders.Sequence(steps)
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    return rust


@pytest.mark.parametrize("scheme", ["first", "always", "never", "prepend", "gemma"])
def test_sentencepiece_layouts(scheme: str, tmp_path: Path) -> None:
    rust = sentencepiece_like(scheme, tmp_path)
    tokenizer = tokenizer_from_folder(tmp_path)
    lines = [*corpus(800, seed=3), "a<|im_end|>b <s> c", "x [MASK] y", " <think> a", "<s>hello", "<|im_end|> x"]
    check_against(tokenizer, rust, lines)
    assert (tokenizer.special.bos, tokenizer.special.eos, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.end_ids == (2, tokenizer.token_id("<|im_end|>"))
    for line in lines:
        assert tokenizer.encode_prompt(line)[0] == 1
        # Metaspace puts no space in front of a text that has one: that text is written like the one without it.
        if not line.startswith((" ", "▁")) and "<think> " not in line:
            assert tokenizer.decode(tokenizer.encode(line)) == line.replace("▁", " "), line


def save_nano_variant(folder: Path, tokenizer_json: dict[str, Any] | str, **files: Any) -> Path:
    text = tokenizer_json if isinstance(tokenizer_json, str) else json.dumps(tokenizer_json)
    (folder / "tokenizer.json").write_text(text)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def small_document() -> dict[str, Any]:
    rust = RustTokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<|im_end|>", "<s>", "</s>", "<|end|>"])
    return json.loads(rust.to_str())


def test_end_ids_are_the_union_of_the_files(tmp_path: Path) -> None:
    folder = save_nano_variant(
        tmp_path,
        small_document(),
        generation_config={"eos_token_id": [5, 99, True]},
        config={"text_config": {"eos_token_id": 1}},
        tokenizer_config={"eos_token": "<s>"},
    )
    # <|im_end|> 3 and <|end|> 6 by name, <s> 4 by tokenizer_config, </s> 5 and 1 by the other files; 99 does not exist.
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.end_ids == (1, 3, 4, 5, 6)
    # An end token is never produced from text, even one that the vocabulary lists as ordinary.
    assert tokenizer.control_ids >= set(tokenizer.end_ids)


def test_a_declared_special_token_is_control(tmp_path: Path) -> None:
    document = small_document()
    document["added_tokens"][0]["special"] = False
    folder = save_nano_variant(tmp_path, document, special_tokens_map={"additional_special_tokens": ["<|im_end|>"]})
    tokenizer = tokenizer_from_folder(folder)
    assert 3 in tokenizer.control_ids
    assert tokenizer.encode("<|im_end|>") != [3]
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "not a JSON file"),
        ("[1]", "expected a JSON object"),
        ("[" * 100_000, "not a JSON file"),
        ({"model": {"type": "BPE", "vocab": 3}}, "cannot read it"),
    ],
)
def test_damaged_files_are_named(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=rf"tokenizer\.json.*{message}"):
        tokenizer_from_folder(save_nano_variant(tmp_path, change))


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"there is no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    document = small_document()
    with pytest.raises(RefusalError, match="WordPiece"):
        tokenizer_from_folder(save_nano_variant(tmp_path, {**document, "model": {"type": "WordPiece"}}))
    folder = save_nano_variant(tmp_path, document, generation_config="{'")
    with pytest.raises(FormatError, match=r"generation_config\.json"):
        tokenizer_from_folder(folder)
