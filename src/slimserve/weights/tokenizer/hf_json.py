"""Tokenizers of Hugging Face folders: tokenizer.json, with special tokens from the files beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from slimserve.errors import FormatError, RefusalError
from slimserve.weights.mapped import describe_foreign
from slimserve.weights.small_file import read_small_file
from slimserve.weights.tokenizer.base import Tokenizer
from slimserve.weights.tokenizer.byte_level import byte_level_bytes, byte_token_value
from slimserve.weights.tokenizer.matcher import StripRules
from slimserve.weights.tokenizer.text import encode_plain
from slimserve.weights.tokenizer.vocabulary import SpecialIds, TokenKind, Vocabulary, end_token_ids

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
_MAX_JSON_BYTES = 512 << 20
_MAX_SMALL_JSON_BYTES = 32 << 20


def read_json(path: Path, limit: int = _MAX_SMALL_JSON_BYTES) -> Any:
    """The value in a JSON file, or {} if there is no file; raises FormatError naming the file."""
    try:
        raw = read_small_file(path, limit)
        if raw.startswith(b"version https://git-lfs"):
            raise FormatError(f"{path} is {describe_foreign(raw[:64])}")
        return json.loads(raw.decode("utf-8"))
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a JSON file (not UTF-8 at byte {error.start})") from error
    except RecursionError as error:
        raise FormatError(f"{path}: not a JSON file (nested too deeply)") from error
    except ValueError as error:
        raise FormatError(f"{path}: not a JSON file ({error})") from error


def _read_object(path: Path, limit: int = _MAX_SMALL_JSON_BYTES) -> dict[str, Any]:
    value = read_json(path, limit)
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """A component of tokenizer.json and, if it is a sequence, its members."""
    if isinstance(node, dict):
        yield node
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            for member in node.get(key) or ():
                yield from _parts(member)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What tokenizer.json says beyond ids. byte_level: token texts use the byte alphabet.

    strips_prefix: decoding removes the space that encoding put in front. first_only: only at the start of the text.
    """

    byte_level: bool
    byte_fallback: bool
    strips_prefix: bool
    first_only: bool

    @classmethod
    def read(cls, document: Mapping[str, Any], path: Path) -> _Layout:
        model = document.get("model")
        if not isinstance(model, dict) or model.get("type", "BPE") not in ("BPE", "Unigram"):
            kind = model.get("type") if isinstance(model, dict) else None
            raise RefusalError(f"{path}: a {kind} tokenizer is not supported; supported are BPE and Unigram")
        decoders = list(_parts(document.get("decoder")))
        splitters = list(_parts(document.get("pre_tokenizer")))
        names = {part.get("type") for part in decoders}
        foreign = names & {"WordPiece", "CTC", "BPEDecoder"}
        if foreign:
            raise RefusalError(f"{path}: the decoder {', '.join(sorted(map(str, foreign)))} is not supported")
        byte_level = "ByteLevel" in names or any(part.get("type") == "ByteLevel" for part in splitters)
        strip = any(part.get("type") == "Strip" and part.get("start", 0) > 0 for part in decoders)
        schemes = [_prepend_scheme(part) for part in (*decoders, *splitters) if part.get("type") == "Metaspace"]
        return cls(
            byte_level=byte_level,
            byte_fallback="ByteFallback" in names or bool(model.get("byte_fallback")),
            strips_prefix=strip or any(scheme != "never" for scheme in schemes),
            first_only="first" in schemes,
        )


def _prepend_scheme(part: Mapping[str, Any]) -> str:
    scheme = part.get("prepend_scheme")
    if isinstance(scheme, str):
        return scheme
    return "always" if part.get("add_prefix_space", True) else "never"


@dataclass(frozen=True, slots=True)
class _FolderFiles:
    """The JSON files of a model folder that speak about tokens."""

    document: dict[str, Any]
    config: dict[str, Any]
    special_map: dict[str, Any]
    model_config: dict[str, Any]
    generation: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _FolderFiles:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise FormatError(f"{folder}: there is no tokenizer.json; copy it from the model's page into the folder")
        return cls(
            document=_read_object(path, _MAX_JSON_BYTES),
            config=_read_object(folder / "tokenizer_config.json"),
            special_map=_read_object(folder / "special_tokens_map.json"),
            model_config=_read_object(folder / "config.json"),
            generation=_read_object(folder / "generation_config.json"),
        )

    def named(self, key: str) -> str | None:
        """Text of the special token `key` (such as "bos_token"); tokenizer_config.json comes first."""
        for source in (self.config, self.special_map):
            if key in source:
                return _token_text(source[key])
        return None

    def extra_special(self) -> Iterator[str]:
        """Texts of further tokens that the files declare special."""
        for source in (self.config, self.special_map):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                listed = source.get(key) or ()
                for entry in listed.values() if isinstance(listed, dict) else listed:
                    text = _token_text(entry)
                    if text:
                        yield text

    def stated_ends(self) -> Iterator[int]:
        """EOS ids of generation_config.json and config.json."""
        nested = self.model_config.get("text_config")
        for source in (self.generation, self.model_config, nested if isinstance(nested, dict) else {}):
            value = source.get("eos_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if isinstance(token_id, int) and not isinstance(token_id, bool):
                    yield token_id


def _token_text(entry: Any) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


class JsonTokenizer(Tokenizer):
    """tokenizer.json run by the `tokenizers` library; control tokens are found by the base class."""

    def __init__(self, rust: RustTokenizer, files: _FolderFiles, layout: _Layout, folder: Path) -> None:
        vocabulary, rules = _read_vocabulary(rust, files, layout)
        special = _special_ids(files, vocabulary)
        ends = end_token_ids(vocabulary, [special.eos, *files.stated_ends()])
        super().__init__(
            vocabulary,
            special,
            add_bos=_adds_bos(rust, files, special),
            end_ids=ends,
            kind="tokenizer.json",
            adds_space_prefix=layout.strips_prefix,
            prefix_after_special=not layout.first_only,
            strip_rules=rules,
            notes=() if ends else (f"{folder.name}: no file names an end token; replies end by length only",),
        )
        self._layout = layout
        rust = _with_control_tokens(rust, self.control_ids)
        # Control tokens in a fragment are text: the base class has taken out those that count.
        rust.encode_special_tokens = True
        self._rust = rust
        self._inner = _without_prefix(rust) if layout.first_only else rust

    def _encode_fragment(self, text: str, *, boundary: bool, start: bool) -> list[int]:
        rust = self._rust if start else self._inner
        return encode_plain(rust, text)

    def _decode_token(self, token_id: int) -> bytes:
        text = self.vocabulary.texts[token_id]
        kind = self.vocabulary.kinds[token_id]
        if kind == TokenKind.BYTE:
            return byte_token_value(text)
        if kind != TokenKind.NORMAL or token_id in self.control_ids:
            return text.encode("utf-8", "surrogateescape")
        if self._layout.byte_level:
            return byte_level_bytes(text)
        return text.replace(_SPACE, " ").encode("utf-8", "surrogateescape")


def _with_control_tokens(rust: RustTokenizer, control_ids: frozenset[int]) -> RustTokenizer:
    """The tokenizer, with those added tokens declared special that only other files call so."""
    added = rust.get_added_tokens_decoder()
    if all(token.special for token_id, token in added.items() if token_id in control_ids):
        return rust
    document = json.loads(rust.to_str())
    for entry in document["added_tokens"]:
        entry["special"] = entry["special"] or entry["id"] in control_ids
    return RustTokenizer.from_str(json.dumps(document))


def _without_prefix(rust: RustTokenizer) -> RustTokenizer:
    """A copy that puts no space in front of a text: for text behind a special token."""
    document = json.loads(rust.to_str())
    for part in _parts(document.get("pre_tokenizer")):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
    copy = RustTokenizer.from_str(json.dumps(document))
    copy.encode_special_tokens = True
    return copy


def _read_vocabulary(rust: RustTokenizer, files: _FolderFiles, layout: _Layout) -> tuple[Vocabulary, StripRules]:
    table = rust.get_vocab(with_added_tokens=True)
    size = max(table.values(), default=-1) + 1
    if size > 8 * len(table) + 1024:
        raise FormatError(f"tokenizer.json has {len(table)} tokens but ids up to {size - 1}")
    texts = [""] * size
    kinds = bytearray([TokenKind.UNUSED]) * size
    for text, token_id in table.items():
        texts[token_id] = text
        is_byte = layout.byte_fallback and _BYTE_TOKEN.match(text) is not None
        kinds[token_id] = TokenKind.BYTE if is_byte else TokenKind.NORMAL
    left, right, whole = set(), set(), set()
    for token_id, added in rust.get_added_tokens_decoder().items():
        kinds[token_id] = TokenKind.CONTROL if added.special else TokenKind.USER_DEFINED
        if added.lstrip:
            left.add(token_id)
        if added.rstrip:
            right.add(token_id)
        if added.single_word:
            whole.add(token_id)
    for text in files.extra_special():
        if text in table:
            kinds[table[text]] = TokenKind.CONTROL
    rules = StripRules(frozenset(left), frozenset(right), frozenset(whole))
    return Vocabulary(texts, bytes(kinds)), rules


def _special_ids(files: _FolderFiles, vocabulary: Vocabulary) -> SpecialIds:
    def find(key: str) -> int | None:
        text = files.named(key)
        return None if text is None else vocabulary.ids.get(text)

    return SpecialIds(
        bos=find("bos_token"), eos=find("eos_token"), unknown=find("unk_token"), padding=find("pad_token")
    )


def _adds_bos(rust: RustTokenizer, files: _FolderFiles, special: SpecialIds) -> bool:
    stated = files.config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return special.bos is not None and rust.encode("a", add_special_tokens=True).ids[:1] == [special.bos]


def tokenizer_from_folder(folder: str | Path) -> JsonTokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises FormatError (missing or damaged file, named) or RefusalError (a kind that is not supported).
    """
    folder = Path(folder)
    files = _FolderFiles.read(folder)
    path = folder / "tokenizer.json"
    layout = _Layout.read(files.document, path)
    try:
        rust = RustTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any fault in the file
        raise FormatError(f"{path}: the tokenizers library cannot read it ({error})") from error
    rust.no_truncation()
    rust.no_padding()
    return JsonTokenizer(rust, files, layout, folder)
