"""Incremental detokenizing and stop strings: streaming equals the whole, however the text is cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_outputs import FILES, model_file
from tokenizer_corpus import corpus
from tokenizer_oracle import sentencepiece_metadata

from slimserve.serve.detokenize import Detokenizer
from slimserve.serve.stop_strings import StopMatcher
from slimserve.weights.gguf import GgufFile
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_gguf


def stream(tokenizer: Tokenizer, ids: list[int], previous_id: int | None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, previous_id=previous_id)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("profile", FILES)
def test_streaming_equals_decoding_at_once(profile: str) -> None:
    tokenizer = tokenizer_from_gguf(GgufFile.open(model_file(profile)).metadata)
    rng = random.Random(3)
    for line in corpus(800):
        ids = tokenizer.encode(line, parse_special=True)
        pieces = stream(tokenizer, ids, None)
        assert "".join(pieces) == tokenizer.decode(ids)
        if "\ufffd" not in line:
            assert not any("\ufffd" in piece for piece in pieces), line
        # Cut anywhere, also inside a character: what was sent is a prefix, and no replacement character appears.
        cut = ids[: rng.randint(0, len(ids))]
        text = "".join(stream(tokenizer, cut, None))
        assert text == tokenizer.decode(cut)
        assert tokenizer.decode(ids).startswith(text)
    for _ in range(300):  # ids that no text would give: broken sequences of bytes
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(20)]
        assert "".join(stream(tokenizer, ids, None)) == tokenizer.decode(ids)


def test_a_character_over_several_byte_tokens_comes_once_and_whole() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(["▁", "a"], add_space_prefix=True))
    ids = tokenizer.encode("a😀a")
    assert len(ids) == 7  # the prefix, a, four bytes, a
    assert stream(tokenizer, ids, None) == ["", "a", "", "", "", "😀", "a", ""]
    assert stream(tokenizer, ids[:4], None) == ["", "a", "", "", ""]


def test_the_space_prefix_goes_only_where_encoding_put_it() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(["▁", "a", "▁a"], add_space_prefix=True))
    word = tokenizer.token_id("▁a")
    bos = tokenizer.special.bos
    assert word is not None and bos is not None
    assert "".join(stream(tokenizer, [word, word], None)) == "a a"  # the start of a text
    assert "".join(stream(tokenizer, [word, word], bos)) == "a a"  # behind a control token
    assert "".join(stream(tokenizer, [word, word], word)) == " a a"  # the continuation of a text
    assert "".join(stream(tokenizer, [bos, word, bos, word], None)) == "aa"
    assert tokenizer.decode([word], previous_id=word) == " a"


def test_kept_control_tokens_are_text() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(["a"], add_space_prefix=False))
    a, end = tokenizer.token_id("a"), tokenizer.token_id("</s>")
    detokenizer = Detokenizer(tokenizer, keep_ids=[end])
    assert [detokenizer.push(token_id) for token_id in (a, end, 1, a)] == ["a", "</s>", "", "a"]


def reference_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of those ending at one place, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


SMALL = st.text(alphabet="abc", max_size=30)


@settings(max_examples=400, deadline=None)
@given(text=SMALL, stops=st.lists(st.text(alphabet="abc", max_size=5), max_size=6), data=st.data())
def test_stop_strings_do_not_depend_on_slicing(text: str, stops: list[str], data: st.DataObject) -> None:
    expected = reference_stop(text, stops)
    matcher = StopMatcher.of(stops)
    sent, rest, stopped = "", text, False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, stopped = matcher.push(rest[:size])
        rest = rest[size:]
        sent += piece
        if not stopped:
            seen = text[: len(text) - len(rest)]
            held = seen[len(sent) :]
            # Only what may still become a stop string is held back.
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
            assert len(held) == max(
                (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
            )
    if not stopped:
        sent += matcher.flush()
    assert (sent, stopped) == expected


def test_after_a_stop_nothing_more_is_sent() -> None:
    matcher = StopMatcher.of(["\n\nUser:"])
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("er: more") == ("", True)
    assert matcher.push("still") == ("", True)
    assert matcher.flush() == ""


def test_thousands_of_stop_strings_cost_no_more_per_character() -> None:
    stops = [f"<stop {index}>" for index in range(5000)] + ["x" * 10_000]
    matcher = StopMatcher.of(stops)
    text = "x" * 9_999 + "y" + "<stop 49" * 2_000
    sent, stopped = matcher.push(text)
    assert not stopped and text == sent + matcher.flush()
    assert matcher.push("<stop 4999> tail") == ("", True)


def test_the_choices_of_a_request_share_one_automaton() -> None:
    stops = ["one", "two"]
    first, second = StopMatcher.of(stops), StopMatcher.of(list(stops))
    assert first._automaton is second._automaton
    assert first.push("xon") == ("x", False)
    assert second.push("two") == ("", True), "the state is each matcher's own"
    assert first.push("e") == ("", True)
