"""Vocabularies of ranked byte strings: tekken.json (Mistral) and tiktoken files (https://github.com/openai/tiktoken).

The pair of adjacent parts is merged whose union has the lowest rank, leftmost first; a word that is itself a token is
taken whole. Both are what byte-pair merges give that are sorted by the rank of what they make.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, models

from penstock.config import limits
from penstock.config.errors import CheckpointError
from penstock.text.pretokenizer import PRE_TOKENIZERS, PreTokenizer
from penstock.text.spelling import CHAR_OF_BYTE, Kind, Spelling
from penstock.text.vocabulary import Vocabulary, cutting, implied_merges

# How each tokenizer class, which exists as Python code in a model's folder, cuts text; the code is never run.
_CLASSES: Final[Mapping[str, str]] = {
    "QWenTokenizer": "qwen2",
    "TikTokenTokenizer": "kimi-k2",
    "ChatGLM4Tokenizer": "glm4",
    "HYTokenizer": "hunyuan",
}
_QWEN_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_TEKKEN_SPECIAL: Final = tuple(
    """
    <unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
    [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]
    """.split()  # noqa: SIM905
)
"""Of tekken files without a list of their own."""


def read_tekken(file: Path) -> Vocabulary:
    """Reads a tekken.json: control tokens come first, ranked tokens after them.

    Raises:
        CheckpointError: it cannot be read, or contradicts itself.
    """
    try:
        tekken = json.loads(file.read_bytes())
        config = tekken["config"]
        vocab = tekken["vocab"]
        names = tekken.get("special_tokens")
        first, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        if not 0 <= first <= size <= min(first + len(vocab), limits.MAX_GGUF_ARRAY_ITEMS):
            raise ValueError(
                f"default_vocab_size is {size} with {first} control and {len(vocab)} other tokens; "
                "allowed: at most their sum"
            )
        given = {i: (name, True) for i, name in enumerate(_TEKKEN_SPECIAL[:first])}
        if names is not None:
            given = {int(t["rank"]): (str(t["token_str"]), bool(t.get("is_control", True))) for t in names}
        special = {index: given.get(index, (f"<SPECIAL_{index}>", True)) for index in range(first)}
        if not given.keys() <= special.keys():
            raise ValueError(f"the control token of rank {max(given)} is beyond default_num_special_tokens ({first})")
        ranked = {base64.b64decode(token["token_bytes"]): int(token["rank"]) + first for token in vocab[: size - first]}
        rules = PreTokenizer((str(config["pattern"]),))
        return _build(ranked, special, rules, bos="<s>", eos="</s>", add_bos=True)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{file}: this tekken vocabulary lacks {error}. Get another copy of it.") from error
    except Exception as error:
        raise CheckpointError(f"{file} is no usable tekken vocabulary: {error}. Get another copy of it.") from error


def read_tiktoken(file: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Reads lines of "base64 rank"; how text is cut and the control tokens' names come from tokenizer_config.json.

    Raises:
        CheckpointError: it cannot be read, or its tokenizer_class is not known.
    """
    name = str(config.get("tokenizer_class"))
    if name not in _CLASSES:
        raise CheckpointError(
            f"{file}: tokenizer_class is {name!r} in tokenizer_config.json; supported: {', '.join(_CLASSES)}. How "
            "others cut text stands only in their code; save the tokenizer with save_pretrained to tokenizer.json."
        )
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        ranked = {base64.b64decode(token): int(rank) for token, rank in pairs}
        most = max(ranked.values(), default=-1)
        if len(set(ranked.values())) != len(ranked) or not 0 <= most < limits.MAX_GGUF_ARRAY_ITEMS:
            raise ValueError(f"it has {len(ranked)} tokens with ranks up to {most}; allowed: a rank for each")
        special = {most + 1 + i: (token, True) for i, token in enumerate(_QWEN_SPECIAL)} if "QWen" in name else {}
        for index, token in (config.get("added_tokens_decoder") or {}).items():
            special[int(index)] = (str(token["content"]), bool(token.get("special", True)))
        bos, eos = _content(config, "bos_token"), _content(config, "eos_token")
        if name == "QWenTokenizer" and eos is None:
            eos = _QWEN_SPECIAL[0]
        return _build(ranked, special, PRE_TOKENIZERS[_CLASSES[name]], bos, eos)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} is no usable tiktoken file: {error}. Get another copy of it.") from error


def _content(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def _spelled(token: bytes) -> str:
    return "".join([CHAR_OF_BYTE[byte] for byte in token])


def _build(
    ranked: Mapping[bytes, int],
    special: Mapping[int, tuple[str, bool]],
    rules: PreTokenizer,
    bos: str | None,
    eos: str | None,
    add_bos: bool = False,
) -> Vocabulary:
    order: Iterable[bytes] = sorted(ranked, key=ranked.__getitem__)
    vocab = {_spelled(token): ranked[token] for token in order}
    missing = [byte for byte, char in enumerate(CHAR_OF_BYTE) if char not in vocab]
    if missing:
        raise ValueError(f"the byte 0x{missing[0]:02X} is no token")
    merges = implied_merges(list(vocab), vocab)
    names = {name: index for index, (name, _) in special.items()}
    if len(names) != len(special) or names.keys() & vocab.keys() or special.keys() & set(vocab.values()):
        raise ValueError("a control token's name or id stands for two tokens")
    vocab.update(names)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = cutting(rules)
    backend.add_tokens([AddedToken(name, special=control, normalized=False) for name, control in special.values()])
    first, last = names.get(bos or ""), names.get(eos or "")
    return Vocabulary(
        backend=backend,
        spelling=Spelling(Kind.BYTES),
        prefix_ids=(first,) if add_bos and first is not None else (),
        suffix_ids=(),
        bos_id=first,
        eos_id=last,
        end_ids=frozenset() if last is None else frozenset((last,)),
        special_ids=frozenset(index for index, (_, control) in special.items() if control),
        size=max(vocab.values()) + 1,
    )
