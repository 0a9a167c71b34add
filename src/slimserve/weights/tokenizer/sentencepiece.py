"""SentencePiece BPE from GGUF metadata (`tokenizer.ggml.model = "llama"`): merging by score, byte fallback.

The two neighbouring symbols whose join has the highest score are merged first (the leftmost of equals), until no
join is a token. Text is first cut wherever its two neighbouring characters are neighbours in no token, since no merge
can cross such a place: this is exact, makes pieces about a word long, and lets them be remembered.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Sequence

import numpy as np

from slimserve.errors import FormatError
from slimserve.weights.tokenizer.base import Tokenizer
from slimserve.weights.tokenizer.byte_level import byte_token_value
from slimserve.weights.tokenizer.vocabulary import SpecialIds, TokenKind, Vocabulary

_SPACE = "▁"
_MAX_REMEMBERED = 1 << 16
_MAX_REMEMBERED_LENGTH = 64


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def _neighbour_pairs(texts: Sequence[str]) -> np.ndarray:
    """Sorted codes `first << 21 | second` of all characters that stand side by side in some text."""
    codes = _code_points("\n".join(texts))
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    ends = np.cumsum(lengths + 1) - 1  # places of the separators, [len(texts)]; the last lies past the end
    inside = np.ones(len(codes), dtype=bool)
    inside[ends[:-1]] = False
    both = inside[:-1] & inside[1:]
    return np.unique((codes[:-1] << 21 | codes[1:])[both])


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece BPE over a scored vocabulary.

    add_space_prefix: text gets a space in front at the start and after special tokens.
    Raises FormatError if the scores do not match the tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: SpecialIds,
        scores: np.ndarray,
        *,
        add_space_prefix: bool,
        add_bos: bool,
        end_ids: tuple[int, ...],
        kind: str,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(
            vocabulary,
            special,
            add_bos=add_bos,
            end_ids=end_ids,
            kind=kind,
            adds_space_prefix=add_space_prefix,
            notes=notes,
        )
        if len(scores) != len(vocabulary):
            raise FormatError(f"the tokenizer has {len(vocabulary)} tokens but {len(scores)} scores")
        if not np.isfinite(scores).all():
            raise FormatError("tokenizer.ggml.scores holds a value that is not finite")
        mergeable = frozenset((TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED))
        kinds, control = vocabulary.kinds, self.control_ids
        self._ids = {
            text: index for text, index in vocabulary.ids.items() if kinds[index] in mergeable and index not in control
        }
        self._costs: list[float] = (-np.asarray(scores, dtype=np.float64)).tolist()
        self._pairs = _neighbour_pairs(list(self._ids))
        self._byte_ids = self._find_byte_ids()
        self._remembered: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def _find_byte_ids(self) -> list[list[int]]:
        """Ids that stand for each byte where no token fits: the byte token, the character's token, or unknown."""
        unknown = [] if self.special.unknown is None else [self.special.unknown]
        found = []
        for byte in range(256):
            token_id = self.vocabulary.ids.get(f"<0x{byte:02X}>")
            if token_id is None and byte < 0x80:
                token_id = self._ids.get(chr(byte))
            found.append(unknown if token_id is None else [token_id])
        return found

    def _encode_fragment(self, text: str, *, boundary: bool, start: bool) -> list[int]:
        if self.adds_space_prefix and boundary:
            text = " " + text
        text = text.replace(" ", _SPACE)
        ids: list[int] = []
        remembered = self._remembered
        for piece in self._cut(text):
            known = remembered.get(piece)
            if known is None:
                known = self._merge(piece)
                if len(piece) <= _MAX_REMEMBERED_LENGTH:
                    self._remember(piece, known)
            ids += known
        return ids

    def _cut(self, text: str) -> list[str]:
        """Pieces of `text` between places that no token spans."""
        if len(text) < 2:
            return [text]
        codes = _code_points(text)
        neighbours = codes[:-1] << 21 | codes[1:]  # [len(text) - 1]
        places = np.searchsorted(self._pairs, neighbours)
        places[places == len(self._pairs)] = 0
        cuts = np.flatnonzero(self._pairs[places] != neighbours) if len(self._pairs) else np.arange(len(neighbours))
        edges = [0, *(cuts + 1).tolist(), len(text)]
        return [text[left:right] for left, right in itertools.pairwise(edges)]

    def _remember(self, piece: str, ids: list[int]) -> None:
        with self._lock:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[piece] = ids

    def _merge(self, piece: str) -> list[int]:
        """Ids of one piece by repeated merging, O(n log n)."""
        symbols = list(piece)  # "" once merged into the symbol on its left
        following = list(range(1, len(symbols) + 1))
        preceding = list(range(-1, len(symbols) - 1))
        vocabulary, costs = self._ids, self._costs
        queue: list[tuple[float, int, int, int]] = []  # (cost, left, right, length of the join)
        for left in range(len(symbols) - 1):
            token_id = vocabulary.get(symbols[left] + symbols[left + 1])
            if token_id is not None:
                queue.append((costs[token_id], left, left + 1, 2))
        heapq.heapify(queue)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # Stale entries name a symbol that was merged away or has grown since.
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after = following[left] = following[right]
            if after < len(symbols):
                preceding[after] = left
            before = preceding[left]
            for first, second in ((before, left), (left, after)):
                if first < 0 or second >= len(symbols):
                    continue
                joined = symbols[first] + symbols[second]
                token_id = vocabulary.get(joined)
                if token_id is not None:
                    heapq.heappush(queue, (costs[token_id], first, second, len(joined)))
        ids: list[int] = []
        for symbol in symbols:
            if symbol:
                ids += self._symbol_ids(symbol)
        return ids

    def _symbol_ids(self, symbol: str) -> list[int]:
        token_id = self._ids.get(symbol)
        if token_id is not None:
            return [token_id]
        return [index for byte in symbol.encode("utf-8") for index in self._byte_ids[byte]]

    def _decode_token(self, token_id: int) -> bytes:
        text = self.vocabulary.texts[token_id]
        kind = self.vocabulary.kinds[token_id]
        if kind == TokenKind.BYTE:
            return byte_token_value(text)
        if kind == TokenKind.NORMAL and token_id not in self.control_ids:
            text = text.replace(_SPACE, " ")
        return b"" if kind == TokenKind.UNUSED else text.encode("utf-8", "surrogateescape")
