"""How byte-level BPE vocabularies cut text into words before merging, by the name GGUF files give it.

The patterns are those of each model's own tokenizer.json (`pre_tokenizer`); a GGUF file stores only a name,
`tokenizer.ggml.pre`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_CONTRACTION: Final = r"'s|'t|'re|'ve|'m|'ll|'d"
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_JOINER: Final = r"[^\r\n\p{L}\p{N}]?"

_GPT2: Final = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letter: str = r"\p{L}") -> str:
    """The pattern family of GPT-4's vocabulary; `digits` says how many digits stay together."""
    symbols = rf" ?[^\s{letter.strip('[]')}\p{{N}}]+[\r\n]*"
    return rf"(?i:{_CONTRACTION})|{_JOINER}{letter}+|{digits}|{symbols}|{_TAIL}"


def _o200k(digits: str, contraction: str) -> str:
    """The pattern family of GPT-4o's vocabulary, which also cuts where lower case turns to upper."""
    words = rf"{_JOINER}{_UPPER}*{_LOWER}+{contraction}|{_JOINER}{_UPPER}+{_LOWER}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    Attributes:
        patterns: regular expressions (Oniguruma syntax), applied in turn; matches and the text between them are words.
        ignore_merges: a word that is itself a token is taken whole, without merging.
        add_bos: whether beginning-of-text is added when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_ONE_DIGIT: Final = r"\p{N}"
_THREE_DIGITS: Final = r"\p{N}{1,3}"
_LLAMA3: Final = PreTokenizer((_cl100k(_THREE_DIGITS),), ignore_merges=True, add_bos=True)
_QWEN2: Final = PreTokenizer((_cl100k(_ONE_DIGIT),))
_DIGITS_APART: Final = PreTokenizer((_ONE_DIGIT, _GPT2))
_PLAIN: Final = PreTokenizer((_GPT2,))
_DEEPSEEK3: Final = PreTokenizer(
    (
        _THREE_DIGITS,
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
    )
)
_DEEPSEEK_CODER: Final = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _ONE_DIGIT))
_DEEPSEEK_LLM: Final = PreTokenizer(
    (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    )
)
_FALCON: Final = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Final = MappingProxyType(
    {
        "default": _PLAIN,
        "gpt-2": _PLAIN,
        "olmo": _PLAIN,
        "mpt": _PLAIN,
        "phi-2": _PLAIN,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "falcon3": _LLAMA3,
        "dbrx": PreTokenizer((_cl100k(_THREE_DIGITS),)),
        "smaug-bpe": PreTokenizer((_cl100k(_THREE_DIGITS),)),
        "glm4": PreTokenizer((_cl100k(_THREE_DIGITS),)),
        "chatglm-bpe": PreTokenizer((_cl100k(_THREE_DIGITS),)),
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "qwen35": PreTokenizer((_cl100k(_ONE_DIGIT, r"[\p{L}\p{M}]"),)),
        "stablelm2": PreTokenizer((_cl100k(_ONE_DIGIT),)),
        "gpt-4o": PreTokenizer((_o200k(_THREE_DIGITS, rf"(?i:{_CONTRACTION})?"),)),
        "llama4": PreTokenizer((_o200k(_THREE_DIGITS, rf"(?i:{_CONTRACTION})?"),)),
        "tekken": PreTokenizer((_o200k(_ONE_DIGIT, ""),), ignore_merges=True, add_bos=True),
        "starcoder": _DIGITS_APART,
        "refact": _DIGITS_APART,
        "command-r": _DIGITS_APART,
        "smollm": _DIGITS_APART,
        "codeshell": _DIGITS_APART,
        "exaone": _DIGITS_APART,
        "falcon": _FALCON,
        "deepseek-llm": _DEEPSEEK_LLM,
        "deepseek-coder": _DEEPSEEK_CODER,
        "deepseek-v3": _DEEPSEEK3,
        "hunyuan-dense": _DEEPSEEK3,
    }
)
"""Pre-tokenizers by GGUF name."""
