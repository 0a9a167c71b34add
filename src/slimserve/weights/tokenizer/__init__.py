"""Tokenizers: one contract over GGUF metadata and Hugging Face folders."""

from slimserve.weights.tokenizer.base import Tokenizer, incomplete_tail
from slimserve.weights.tokenizer.gguf_metadata import tokenizer_from_gguf
from slimserve.weights.tokenizer.hf_json import tokenizer_from_folder
from slimserve.weights.tokenizer.prompt import RenderedPrompt
from slimserve.weights.tokenizer.text import clean_text
from slimserve.weights.tokenizer.vocabulary import SpecialIds, TokenKind, Vocabulary

__all__ = [
    "RenderedPrompt",
    "SpecialIds",
    "TokenKind",
    "Tokenizer",
    "Vocabulary",
    "clean_text",
    "incomplete_tail",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]
