"""Byte-level BPE from GGUF metadata (`tokenizer.ggml.model = "gpt2"`)."""

from __future__ import annotations

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from slimserve.errors import FormatError
from slimserve.weights.tokenizer.base import Tokenizer
from slimserve.weights.tokenizer.pretokenizers import PreTokenizer
from slimserve.weights.tokenizer.text import encode_plain
from slimserve.weights.tokenizer.vocabulary import SpecialIds, TokenKind, Vocabulary


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's table: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


BYTE_OF_CHARACTER = _byte_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """Bytes of a token written in the byte alphabet; text outside it stands for itself."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:
        return text.encode("utf-8", "surrogateescape")


def parse_merges(lines: list[str], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs of a merge list, each checked against the vocabulary; raises FormatError naming the first bad one."""
    merges = []
    ids = vocabulary.ids
    for number, line in enumerate(lines):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise FormatError(f"tokenizer.ggml.merges[{number}] = {line!r} does not join two tokens into a third")
        merges.append((left, right))
    return merges


def splitter(rule: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The `tokenizers` library's form of a rule."""
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(splits)


class ByteLevelTokenizer(Tokenizer):
    """GPT-2 style BPE; merging is done by the `tokenizers` library, special tokens by the base class."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialIds,
        merges: list[tuple[str, str]],
        rule: PreTokenizer,
        *,
        add_bos: bool,
        end_ids: tuple[int, ...],
        kind: str,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(vocabulary, special, add_bos=add_bos, end_ids=end_ids, kind=kind, notes=notes)
        # With `ignore_merges` a whole word that is a token is taken: leave out control tokens, unless they are merged.
        merged = {left + right for left, right in merges} if rule.ignore_merges else set()
        hidden = {vocabulary.texts[index] for index in self.control_ids} - merged if rule.ignore_merges else set()
        ordinary = {text: index for text, index in vocabulary.ids.items() if text not in hidden}
        try:
            model = models.BPE(vocab=ordinary, merges=merges, ignore_merges=rule.ignore_merges)
        except Exception as error:  # the library raises several kinds; tokens that are not UTF-8 are one cause
            raise FormatError(f"tokenizer.ggml.tokens and merges do not form a vocabulary: {error}") from error
        self._merger = RustTokenizer(model)
        self._merger.pre_tokenizer = splitter(rule)

    def _encode_fragment(self, text: str, *, boundary: bool, start: bool) -> list[int]:
        return encode_plain(self._merger, text)

    def _decode_token(self, token_id: int) -> bytes:
        text = self.vocabulary.texts[token_id]
        kind = self.vocabulary.kinds[token_id]
        if kind == TokenKind.NORMAL and token_id not in self.control_ids:
            return byte_level_bytes(text)
        if kind == TokenKind.BYTE:
            return byte_token_value(text)
        return b"" if kind == TokenKind.UNUSED else text.encode("utf-8", "surrogateescape")


def byte_token_value(text: str) -> bytes:
    """The byte of a fallback token written `<0xHH>`; other text stands for itself."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.encode("utf-8", "surrogateescape")
