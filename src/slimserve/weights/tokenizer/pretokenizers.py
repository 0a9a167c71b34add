"""Pre-tokenizers of byte-level BPE by the names that GGUF files use (`tokenizer.ggml.pre`).

Each is a list of regular expressions, applied one after the other: an expression splits every piece so far into its
matches and what lies between. The expressions are those of the models' published tokenizers. The names and what
belongs to them are tested against llama.cpp, name by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from slimserve.errors import RefusalError

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _modern(letters: str, digits: str, symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """The family that began with GPT-4: contractions, words with one symbol in front, digits, symbols, line ends."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{symbols}|{_LINES_AND_SPACES}"


_LLAMA3 = _modern(r"\p{L}+", r"\p{N}{1,3}")
_QWEN2 = _modern(r"\p{L}+", r"\p{N}")
_QWEN35 = _modern(r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_SEED = _modern(r"\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+")

# Words split where case changes, with the marks that follow a letter.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES_AND_SPACES,
)
# The range that DeepSeek's expressions call Chinese, Japanese and Korean: U+0800-9FA5 and U+AC00-D7FF.
_DEEPSEEK_CJK = "[\u0800-\u9fa5\uac00-\ud7ff]+"
# Cased letters as that tokenizer lists them: small Armenian and Georgian letters, for one, are not among them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_STARCODER = (r"\p{N}", _GPT2)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
)
_MINICPM5 = (r"\p{N}{1,3}", _modern(r"\p{L}+", r"\p{N}+"))


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level BPE vocabulary cuts text before merging.

    patterns: split expressions in order. ignore_merges: a piece that is a token is taken whole.
    add_bos: prompts start with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer(_DEFAULT)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3_RULE),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen megrez hunyuan stablelm2 grok-2 solar-open kormo", PreTokenizer((_QWEN2,))),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("minicpm5", PreTokenizer(_MINICPM5, ignore_merges=True)),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(_DEEPSEEK3)),
    ("gpt-2 phi-2 mpt olmo jais trillion exaone4 granite-docling gigachat a.x-4.0 mellum", PreTokenizer((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer(_STARCODER)),
    ("falcon", PreTokenizer(_FALCON)),
    ("bloom poro-chat gpt3-finnish", PreTokenizer(_BLOOM)),
    ("viking", PreTokenizer((*_BLOOM, r"\p{N}"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer(_BAILING)),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for names, rule in _GROUPS for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule of a `tokenizer.ggml.pre` name; raises RefusalError naming an unknown one."""
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise RefusalError(
            f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; token ids would be wrong, so the model is "
            f"not loaded; known names: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return rule
