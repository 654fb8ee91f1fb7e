"""How byte-level BPE vocabularies cut text into words before merging, by the name GGUF files give it.

The patterns are those of each model's own tokenizer.json (`pre_tokenizer`); a GGUF file stores only a name,
`tokenizer.ggml.pre`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

_CONTRACTION: Final = r"'s|'t|'re|'ve|'m|'ll|'d"
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER_NOT_HAN: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER_NOT_HAN: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_JOINER: Final = r"[^\r\n\p{L}\p{N}]?"

_GPT2: Final = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letter: str = r"\p{L}", tail: str = _TAIL) -> str:
    """The pattern family of GPT-4's vocabulary; `digits` says how many digits stay together."""
    symbols = rf" ?[^\s{letter.strip('[]')}\p{{N}}]+[\r\n]*"
    return rf"(?i:{_CONTRACTION})|{_JOINER}{letter}+|{digits}|{symbols}|{tail}"


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
        add_sep: whether the separator is put after the text when the file does not say.
        byte_level: tokens are written in GPT-2's byte alphabet, else as text with U+2581 for spaces.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False
    byte_level: bool = True


_ONE_DIGIT: Final = r"\p{N}"
_THREE_DIGITS: Final = r"\p{N}{1,3}"
_ANY_CASE: Final = rf"(?i:{_CONTRACTION})?"
_CJK: Final = r"[一-龥぀-ゟ゠-ヿ]+"
_CASCADE: Final = "|".join([rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)]) + r"|\s{1,2}(?!\S)|\s"
_NOT_STOPS: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_PUNCTUATED: Final = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_THAI_TO_HANGUL: Final = r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"

_PLAIN: Final = PreTokenizer((_GPT2,))
_PLAIN_SEP: Final = PreTokenizer((_GPT2,), add_sep=True)
_DIGITS_APART: Final = PreTokenizer((_ONE_DIGIT, _GPT2))
_CL100K: Final = PreTokenizer((_cl100k(_THREE_DIGITS),))
_LLAMA3: Final = PreTokenizer((_cl100k(_THREE_DIGITS),), ignore_merges=True, add_bos=True)
_QWEN2: Final = PreTokenizer((_cl100k(_ONE_DIGIT),))
_GPT4O: Final = PreTokenizer((_o200k(_THREE_DIGITS, _ANY_CASE),))
_DEEPSEEK3: Final = PreTokenizer((_THREE_DIGITS, _CJK, rf"{_PUNCTUATED}[\r\n]*|{_TAIL}"))
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
_BLOOM: Final = PreTokenizer((_NOT_STOPS,))
_BAILING: Final = PreTokenizer(
    (
        rf"'(?i:[sdmt]|ll|ve|re)|{_JOINER}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_AYA: Final = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _o200k(_ONE_DIGIT, _ANY_CASE)))
_KIMI: Final = PreTokenizer(
    (
        rf"\p{{Han}}+|{_JOINER}{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_ANY_CASE}"
        rf"|{_JOINER}{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_ANY_CASE}"
        rf"|{_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    )
)
_CHAMELEON: Final = PreTokenizer(
    (
        r"<sentinel:[0-9]+>",
        r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        _ONE_DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
    add_bos=True,
)
_YOUTU: Final = PreTokenizer(
    (
        r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _o200k(_ONE_DIGIT, _ANY_CASE),
    ),
    ignore_merges=True,
)
_EXAONE_MOE: Final = PreTokenizer(
    (
        rf"(?i:{_CONTRACTION})|{_JOINER}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_LINES: Final = PreTokenizer((r"\n+",), byte_level=False)

_NAMES: Final = (
    ("gpt-2 default olmo mpt phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert", _PLAIN),
    ("jina-es jina-de jina-v2-es jina-v2-de", _PLAIN),
    ("roberta-bpe jina-v1-en jina-v2-code", _PLAIN_SEP),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _CL100K),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez grok-2 solar-open kormo f2llmv2", _QWEN2),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS_APART),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    ("poro-chat bloom gpt3-finnish", _BLOOM),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    ("tiny_aya cohere2moe", _AYA),
    ("gemma4 granite-embed-multi-311m sarvam-moe", _LINES),
)
_ALONE: Final = MappingProxyType(
    {
        "qwen35": PreTokenizer((_cl100k(_ONE_DIGIT, r"[\p{L}\p{M}]"),)),
        "tekken": PreTokenizer((_o200k(_ONE_DIGIT, ""),), ignore_merges=True, add_bos=True),
        "granite-embed-multi-97m": replace(_GPT4O, ignore_merges=True),
        "falcon": _FALCON,
        "deepseek-llm": _DEEPSEEK_LLM,
        "deepseek-coder": _DEEPSEEK_CODER,
        "spark2_5": PreTokenizer((_THREE_DIGITS, _CJK, rf"{_PUNCTUATED}|[\r\n]|\s+(?!\S)|\s+", _ONE_DIGIT)),
        "jais-2": PreTokenizer((_cl100k(_THREE_DIGITS, tail=rf"\s*[\r\n]+|{_CASCADE}"),)),
        "viking": PreTokenizer((_NOT_STOPS, _ONE_DIGIT)),
        "kimi-k2": _KIMI,
        "chameleon": _CHAMELEON,
        "youtu": _YOUTU,
        "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
        "seed-coder": PreTokenizer(
            (rf"(?i:{_CONTRACTION})|{_JOINER}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)
        ),
        "ufakzeka": PreTokenizer((rf"{_JOINER}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",)),
        "afmoe": PreTokenizer(
            (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _THAI_TO_HANGUL, rf"{_PUNCTUATED}[\r\n]*|{_TAIL}")
        ),
        "laguna": PreTokenizer((r"[^\n]+|\n+", _cl100k(_ONE_DIGIT))),
        "exaone-moe": _EXAONE_MOE,
        "minicpm5": PreTokenizer((_THREE_DIGITS, _cl100k(r"\p{N}+")), ignore_merges=True),
    }
)

PRE_TOKENIZERS: Final = MappingProxyType({name: rules for names, rules in _NAMES for name in names.split()} | _ALONE)
"""Pre-tokenizers by GGUF name."""
