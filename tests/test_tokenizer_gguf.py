"""GGUF tokenizers against llama.cpp: real files and every pre-tokenizer name, on the seeded corpus."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from reference_outputs import FILES, model_file, recorded_cases
from tokenizer_corpus import LOOK_ALIKES, corpus
from tokenizer_oracle import (
    LLAMA_CPP_QUIRK,
    LlamaCppTokenizer,
    byte_level_metadata,
    sentencepiece_metadata,
    write_vocabulary,
)

from slimserve.errors import FormatError, RefusalError
from slimserve.weights.gguf import GgufFile
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_gguf
from slimserve.weights.tokenizer.pretokenizers import PRE_TOKENIZERS

CORPUS = corpus()
COMPARABLE = [line for line in CORPUS if LLAMA_CPP_QUIRK not in line]


def load(profile: str) -> Tokenizer:
    return tokenizer_from_gguf(GgufFile.open(model_file(profile)).metadata)


def first_difference(lines: list[str], ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]]) -> str:
    """ "" if all lines agree, else how many do not and the first of them."""
    wrong = [line for line in lines if ours(line) != theirs(line)]
    return f"{len(wrong)} of {len(lines)} lines differ, first {wrong[0]!r}" if wrong else ""


def test_the_corpus_is_what_the_claim_says() -> None:
    assert len(COMPARABLE) >= 2000
    assert len(set(CORPUS)) > 2000
    joined = "".join(CORPUS)
    for sample in ("😀", "你好", "שלום", "مرحبا", "e\u0301", "<|im_end|>", "def f(", " " * 64, "\t", "१२"):
        assert sample in joined


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("profile", FILES)
def test_ids_equal_llama_cpp(profile: str, parse_special: bool) -> None:
    path = model_file(profile)
    oracle = LlamaCppTokenizer(path)
    tokenizer = load(profile)
    problem = first_difference(
        COMPARABLE,
        lambda line: tokenizer.encode(line, parse_special=parse_special),
        lambda line: oracle.encode(line, parse_special=parse_special),
    )
    assert not problem


@pytest.mark.parametrize("profile", FILES)
def test_token_bytes_equal_llama_cpp(profile: str) -> None:
    oracle = LlamaCppTokenizer(model_file(profile))
    tokenizer = load(profile)
    step = 1 + tokenizer.vocab_size // 40_000
    for token_id in range(0, tokenizer.vocab_size, step):
        assert tokenizer.token_bytes(token_id) == oracle.token_bytes(token_id), token_id


@pytest.mark.parametrize("profile", FILES)
def test_recorded_prompts_and_texts(profile: str) -> None:
    tokenizer = load(profile)
    for case in recorded_cases(profile):
        ids = tokenizer.encode_prompt(case["prompt"])
        assert ids == case["prompt_token_ids"], case["name"]
        text = tokenizer.decode(case["output_token_ids"], previous_id=ids[-1], skip_special=False)
        assert text == case["text"], case["name"]


@pytest.mark.parametrize("profile", FILES)
def test_plain_text_never_becomes_a_control_token(profile: str) -> None:
    tokenizer = load(profile)
    for line in [*CORPUS, *(f"a{name}b" for name in tokenizer.control_matcher.ids)]:
        assert tokenizer.control_ids.isdisjoint(tokenizer.encode(line)), line
    special = tokenizer.encode("".join(LOOK_ALIKES), parse_special=True)
    assert not tokenizer.control_ids.isdisjoint(special)


@pytest.mark.parametrize("profile", ["qwen25-coder-0.5b", "gemma3-270m"])
def test_text_survives_the_round_trip(profile: str) -> None:
    tokenizer = load(profile)
    for line in CORPUS:
        # Gemma writes a space as U+2581, so that character itself comes back as a space.
        expected = line.replace("▁", " ") if profile == "gemma3-270m" else line
        assert tokenizer.decode(tokenizer.encode(line)) == expected


def test_what_the_files_say_about_ends() -> None:
    assert load("qwen25-coder-0.5b").end_ids == (151643, 151645)
    assert load("smollm2-135m").end_ids == (0, 2)
    gemma = load("gemma3-270m")
    assert gemma.end_ids == (1, 106)
    assert gemma.describe()[:2] == [
        "tokenizer: SentencePiece BPE, 262,144 tokens, prompts start with <bos> (2)",
        "end tokens: <eos> (1), <end_of_turn> (106)",
    ]


def test_bos_is_added_once() -> None:
    gemma = load("gemma3-270m")
    assert gemma.encode_prompt("hello")[:2] == [2, *gemma.encode("hello")[:1]]
    assert gemma.encode_prompt("<bos>hello") == gemma.encode_prompt("hello")
    assert gemma.encode_prompt("") == [2]
    assert load("qwen25-coder-0.5b").encode_prompt("") == []


# llama.cpp reads two families by approximations of the published expressions, which SlimServe uses as published.
_CASED = frozenset(["tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2"])  # no marks, no case outside ASCII
_OLD_DEEPSEEK = frozenset(("deepseek-llm", "deepseek-coder"))  # white space outside ASCII is not in U+0800-9FA5
_DEEPSEEK3 = frozenset(["deepseek-v3", "hunyuan-dense", "joyai-llm"])  # symbols of Unicode 16 and later


def comparable(name: str, line: str) -> bool:
    """Whether llama.cpp's approximation of this pre-tokenizer is exact on the line."""
    outside = [character for character in line if ord(character) > 127]
    if name in _CASED:
        return not any(character.isalpha() or unicodedata.category(character)[0] == "M" for character in outside)
    if name in _OLD_DEEPSEEK:
        return not any(character.isspace() for character in outside)
    if name in _DEEPSEEK3:
        return not any(0x1F8AE < ord(character) < 0x1F900 for character in outside)
    return True


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizer_splits_like_llama_cpp(name: str, tmp_path: Path) -> None:
    metadata = byte_level_metadata(name)
    oracle = LlamaCppTokenizer(write_vocabulary(tmp_path / "vocabulary.gguf", metadata))
    tokenizer = tokenizer_from_gguf(metadata)
    lines = [line for line in corpus(600, look_alikes=False) if comparable(name, line)]
    assert len(lines) > 200
    problem = first_difference(
        lines, lambda line: tokenizer.encode(line), lambda line: oracle.encode(line, parse_special=False)
    )
    assert not problem


@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_sentencepiece_with_and_without_space_prefix(add_space_prefix: bool, tmp_path: Path) -> None:
    # Equal scores, tokens with an inner space mark and a token whose characters are no tokens test the merge order.
    texts = [
        "▁",
        "e",
        "t",
        "a",
        "h",
        "n",
        "▁t",
        "th",
        "he",
        "the",
        "▁the",
        "an",
        "▁an",
        "nd",
        "and",
        "▁and",
        "o▁",
        "o",
        "▁▁",
        "▁▁▁▁",
        "aa",
        "aaa",
        "aaaa",
        "l",
        "ll",
        "el",
        "hel",
        "hello",
        "▁hello",
        "é",
        "好",
        "你好",
    ]
    metadata = sentencepiece_metadata(texts, add_space_prefix=add_space_prefix)
    metadata["tokenizer.ggml.scores"][-8:] = [-5.0] * 8
    oracle = LlamaCppTokenizer(write_vocabulary(tmp_path / "vocabulary.gguf", metadata))
    tokenizer = tokenizer_from_gguf(metadata)
    lines = [*corpus(1500), "the hello and", "  aaaaaaaaa  ", "<s>hello</s> <s> the", "hello<s>hello", "o o  o"]
    for parse_special in (False, True):
        problem = first_difference(
            lines,
            lambda line, flag=parse_special: tokenizer.encode(line, parse_special=flag),
            lambda line, flag=parse_special: oracle.encode(line, parse_special=flag),
        )
        assert not problem
    for line in lines:
        assert tokenizer.decode(tokenizer.encode(line)) == line.replace("▁", " ")


def test_long_pieces_without_cuts_are_exact_and_quick() -> None:
    tokenizer = load("gemma3-270m")
    oracle = LlamaCppTokenizer(model_file("gemma3-270m"))
    for text in ("a" * 20_000, "ab" * 9_000, "好" * 8_000, "\u0301" * 5_000, "=" * 30_001):
        assert tokenizer.encode(text) == oracle.encode(text, parse_special=False)


def test_invalid_text_is_replaced_once_at_the_door() -> None:
    tokenizer = load("qwen25-coder-0.5b")
    assert tokenizer.encode(b"a\xffb\xe4\xbdc") == tokenizer.encode("a\ufffdb\ufffdc")
    assert tokenizer.encode("emoji \ud83d!") == tokenizer.encode("emoji \ufffd!")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


def test_unknown_names_are_refused_by_name() -> None:
    metadata = byte_level_metadata("no-such-pre")
    with pytest.raises(RefusalError, match=r"'no-such-pre'.*known names: .*qwen2"):
        tokenizer_from_gguf(metadata)
    with pytest.raises(RefusalError, match="'rwkv'"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.model": "rwkv"})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", None, "no tokenizer.ggml.model"),
        ("tokenizer.ggml.model", 7, "tokenizer.ggml.model is a int"),
        ("tokenizer.ggml.tokens", [], "tokenizer.ggml.tokens is empty"),
        ("tokenizer.ggml.tokens", [1, 2], "tokenizer.ggml.tokens is missing or not a list of strings"),
        ("tokenizer.ggml.token_type", [1, 2], "token_type has 2 entries"),
        ("tokenizer.ggml.token_type", "x", "token_type is a str"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges is missing"),
        ("tokenizer.ggml.merges", ["ab"], r"merges\[0\]"),
        ("tokenizer.ggml.merges", ["qq qqq"], r"merges\[0\]"),
        ("tokenizer.ggml.eos_token_id", 1.5, "eos_token_id is a float"),
        ("tokenizer.ggml.add_bos_token", 1, "add_bos_token is a int"),
    ],
)
def test_damaged_metadata_names_the_key(key: str, value: object, message: str) -> None:
    metadata = {**byte_level_metadata("qwen2"), key: value}
    if value is None:
        del metadata[key]
    with pytest.raises(FormatError, match=message):
        tokenizer_from_gguf(metadata)


def test_damaged_scores_are_refused() -> None:
    metadata = sentencepiece_metadata(["a"], add_space_prefix=False)
    with pytest.raises(FormatError, match="259 scores"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.scores": metadata["tokenizer.ggml.scores"][:-1]})
    with pytest.raises(FormatError, match="not finite"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.scores": [float("nan")] * 260})


def test_ids_outside_the_vocabulary_are_noted_and_harmless() -> None:
    tokenizer = tokenizer_from_gguf({**byte_level_metadata("qwen2"), "tokenizer.ggml.bos_token_id": 10**9})
    assert tokenizer.special.bos is None
    assert any("bos_token_id = 1000000000" in note for note in tokenizer.describe())
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5, -3]) == ""


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_a_control_token_that_merging_would_produce_is_spelled_out(pre: str) -> None:
    metadata = byte_level_metadata(pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    victim = next(index for index, text in enumerate(tokens) if index > 300 and text.isascii() and len(text) > 3)
    metadata["tokenizer.ggml.token_type"][victim] = 3
    tokenizer = tokenizer_from_gguf(metadata)
    text = f"{tokens[victim]} and{tokens[victim]}"
    assert victim not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(tokens[victim], parse_special=True) == [victim]


def test_random_damage_is_refused_or_harmless() -> None:
    rng = random.Random(11)
    byte_level = byte_level_metadata("qwen2")
    tokens = byte_level["tokenizer.ggml.tokens"][:400]
    merges = [line for line in byte_level["tokenizer.ggml.merges"] if line.replace(" ", "") in tokens]
    byte_level |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * 400,
    }
    bases = [byte_level, sentencepiece_metadata(["▁", "a", "the", "▁the", "\n"], add_space_prefix=True)]
    odd = [
        None,
        0,
        -1,
        2**63,
        1.5,
        float("nan"),
        "",
        "x",
        b"x",
        [],
        [1, 2],
        ["a"] * 3,
        True,
        {},
        "\udcff",
        "<|im_end|>",
    ]
    survived = 0
    for _ in range(1500):
        metadata = dict(rng.choice(bases))
        for _ in range(rng.randint(1, 2)):
            key = rng.choice([*metadata, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.scores"])
            value = metadata.get(key)
            if isinstance(value, list) and value and rng.random() < 0.6:
                value = list(value)
                value[rng.randrange(len(value))] = rng.choice([rng.choice(odd), rng.choice(value)])
                metadata[key] = value
            else:
                metadata[key] = rng.choice(odd)
        try:
            tokenizer = tokenizer_from_gguf(metadata)
        except (FormatError, RefusalError):
            continue
        survived += 1
        for line in CORPUS[:120:11]:
            ids = tokenizer.encode(line, parse_special=True)
            assert tokenizer.decode(ids) is not None and tokenizer.describe()
    assert 50 < survived < 1450
