"""One tokenizer contract for every container: text to ids, ids to bytes, special tokens, end ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property

from slimserve.weights.tokenizer.matcher import StripRules, TokenMatcher
from slimserve.weights.tokenizer.prompt import RenderedPrompt
from slimserve.weights.tokenizer.text import clean_text
from slimserve.weights.tokenizer.vocabulary import SpecialIds, TokenKind, Vocabulary


class Tokenizer(ABC):
    """Text <-> token ids of one model.

    vocab_size: tokens in the table; the model's embedding may have more rows (padding).
    add_bos: whether a prompt starts with the BOS token.
    end_ids: ids that end a generation, ascending: the union of what the files say.
    control_ids: ids that message text can never produce.
    adds_space_prefix: text at the start (and, if `prefix_after_special`, after a special token) gets one space in
        front when encoded, which decoding removes again.
    notes: sentences for start-up about metadata that was repaired or not followed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialIds,
        *,
        add_bos: bool,
        end_ids: tuple[int, ...],
        kind: str,
        adds_space_prefix: bool = False,
        prefix_after_special: bool = True,
        strip_rules: StripRules = StripRules(),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.special = special
        self.add_bos = add_bos and special.bos is not None
        self.end_ids = end_ids
        self.kind = kind
        self.adds_space_prefix = adds_space_prefix
        self.prefix_after_special = prefix_after_special
        self.notes = notes
        self._strip_rules = strip_rules
        # An end token counts as control even where the table calls it user-defined: text must never end a reply.
        self.control_ids = frozenset(vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)) | frozenset(end_ids)
        # Vocabularies without byte tokens write <unk> for characters they lack; no other control token comes from text.
        self._never_from_text = self.control_ids - {special.unknown}
        self.user_defined_ids = frozenset(vocabulary.of_kind(TokenKind.USER_DEFINED)) - self.control_ids
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @abstractmethod
    def _encode_fragment(self, text: str, *, boundary: bool, start: bool) -> list[int]:
        """Ids of a fragment without special tokens; boundary: it starts the text or follows a special token."""

    @abstractmethod
    def _decode_token(self, token_id: int) -> bytes:
        """Bytes of one token of the table."""

    def encode(self, text: str | bytes, *, parse_special: bool = False) -> list[int]:
        """Ids of `text`, without BOS.

        parse_special: control tokens written in the text become their ids; otherwise they stay text. Tokens that
        the files call user-defined are recognised either way, as the models were trained.
        """
        text = clean_text(text)
        matcher = self._all_matcher if parse_special else self._user_matcher
        return self._encode_pieces(matcher.split(text))

    def encode_prompt(self, prompt: str | bytes | RenderedPrompt, *, parse_special: bool = True) -> list[int]:
        """Ids of a whole prompt, with BOS in front if the files ask for one and the prompt does not bring it.

        A RenderedPrompt takes control tokens from its template only; a plain text follows `parse_special`.
        """
        if isinstance(prompt, RenderedPrompt):
            ids = self._encode_rendered(prompt)
        else:
            ids = self.encode(prompt, parse_special=parse_special)
        bos = self.special.bos
        if self.add_bos and bos is not None and (not ids or ids[0] != bos):
            return [bos, *ids]
        return ids

    def _encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        if not prompt.mark:
            return self.encode(prompt.text, parse_special=True)
        pieces: list[str | int] = []
        for piece in self.control_matcher.split(prompt.marked_text):
            if isinstance(piece, int):
                pieces.append(piece)
            else:
                pieces.extend(self._user_matcher.split(piece.replace(prompt.mark, "")))
        return self._encode_pieces(pieces)

    def _encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        boundary = start = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                boundary = self.prefix_after_special
            else:
                found = self._encode_fragment(piece, boundary=boundary, start=start)
                ids.extend(found if self._never_from_text.isdisjoint(found) else self._spell_out(found))
                boundary = False
            start = False
        return ids

    def _spell_out(self, ids: list[int]) -> list[int]:
        """`ids` with control tokens written character by character: a file may list one as an ordinary merge, too."""
        spelled: list[int] = []
        for token_id in ids:
            if token_id not in self._never_from_text:
                spelled.append(token_id)
                continue
            for character in self.token_text(token_id):
                found = self._encode_fragment(character, boundary=False, start=False)
                spelled.extend(index for index in found if index not in self._never_from_text)
        return spelled

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token stands for; special tokens give their name, padding ids past the table nothing."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        found = self._bytes[token_id]
        if found is None:
            found = self._bytes[token_id] = self._decode_token(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Readable form of one token (bytes that are not UTF-8 alone become U+FFFD)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """Id of the token stored as `text` (a special token's name, say); None if there is none."""
        return self.vocabulary.ids.get(text)

    def follows_boundary(self, token_id: int | None) -> bool:
        """Whether text after this token (None: at the start) was given a space prefix when it was encoded."""
        if not self.adds_space_prefix:
            return False
        if token_id is None:
            return True
        return self.prefix_after_special and (token_id in self.control_ids or token_id in self.user_defined_ids)

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, previous_id: int | None = None, keep: bool = False
    ) -> str:
        """Text of `ids`: bytes joined, then read as UTF-8; a trailing incomplete character is left out.

        skip_special: control tokens give no text. previous_id: the token before the first one (None: start of text),
        which decides whether a leading space belongs to the text. keep: show a trailing incomplete character as U+FFFD.
        Equal to streaming the ids through serve.detokenize.
        """
        data = bytearray()
        for token_id in ids:
            if not (skip_special and token_id in self.control_ids):
                data += self.piece(token_id, previous_id)
            previous_id = token_id
        return decode_whole(bytes(data), keep=keep)

    def piece(self, token_id: int, previous_id: int | None) -> bytes:
        """Bytes that a token adds after `previous_id`: its bytes less the space prefix that encoding put there."""
        data = self.token_bytes(token_id)
        if data[:1] == b" " and self.follows_boundary(previous_id) and token_id not in self.user_defined_ids:
            return data[1:]
        return data

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / max_token_bytes tokens."""
        return max((len(text.encode("utf-8", "surrogateescape")) for text in self.vocabulary.texts), default=1) or 1

    @cached_property
    def control_matcher(self) -> TokenMatcher:
        """Finds control tokens in text."""
        return self._matcher(self.control_ids)

    @cached_property
    def _user_matcher(self) -> TokenMatcher:
        return self._matcher(self.user_defined_ids)

    @cached_property
    def _all_matcher(self) -> TokenMatcher:
        return self._matcher(self.control_ids | self.user_defined_ids)

    def _matcher(self, ids: frozenset[int]) -> TokenMatcher:
        texts = self.vocabulary.texts
        table = {texts[index]: index for index in sorted(ids, reverse=True) if texts[index]}
        return TokenMatcher(table, self._strip_rules)

    def describe(self) -> list[str]:
        """Lines for start-up: kind and size, BOS rule, end tokens, notes."""
        names = ", ".join(f"{self.vocabulary.texts[index]} ({index})" for index in self.end_ids) or "none"
        bos = self.special.bos
        start = "no BOS"
        if self.add_bos and bos is not None:
            start = f"prompts start with {self.vocabulary.texts[bos]} ({bos})"
        return [f"tokenizer: {self.kind}, {self.vocab_size:,} tokens, {start}", f"end tokens: {names}", *self.notes]


def decode_whole(data: bytes, *, keep: bool = False) -> str:
    """UTF-8 text of `data`: invalid sequences become U+FFFD, a trailing incomplete one is left out unless `keep`."""
    if keep:
        return data.decode("utf-8", "replace")
    return data[: len(data) - incomplete_tail(data)].decode("utf-8", "replace")


def incomplete_tail(data: bytes) -> int:
    """Length (0 to 3) of the beginning of a character at the end of `data` that more bytes could complete."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue
        tail = data[-length:]
        try:
            tail.decode("utf-8")
        except UnicodeDecodeError as error:
            return length if error.reason == "unexpected end of data" else 0
        return 0
    return 0
