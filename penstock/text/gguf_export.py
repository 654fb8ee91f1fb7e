"""A Hugging Face tokenizer as GGUF metadata (`tokenizer.*`, docs/gguf.md): the inverse of `text.gguf_vocab`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from penstock.config.errors import CheckpointError
from penstock.text.gguf_fields import TokenType
from penstock.text.pretokenizer import PRE_TOKENIZERS
from penstock.text.vocabulary import cutting

# What cutting rules differ in: digits, contractions, case, symbols, white space, scripts.
_PROBES = (
    "Hello world, it's 12345678 o'clock! I'LL can't  wait\n\n\n  no\tmore \r\n x",
    "camelCase HTTPServer über-Straße naïve ÉCOLE don'T we'Ve",
    "1 22 333 4444 3.14 1,000 ½ ², Ⅻ _under_score $5.00 #tag @me a/b/c\\d",
    "中文字符 日本語カタカナ 한국어 русский язык العربية हिन्दी ไทย e\u0301 👍🏽 …—“quoted”",
    "   leading   and trailing   \n\t\tif (x != y) { return x->z; } // done\n",
)
_KINDS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def gguf_tokenizer_metadata(
    folder: Path,
    vocab_size: int,
    tokenizer_config: Mapping[str, Any],
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> dict[str, Any]:
    """Metadata from which readers of GGUF build the same tokenizer, and the chat templates.

    Args:
        folder: holds tokenizer.json.
        vocab_size: rows of the embedding; ids without a token become unused ones.
        tokenizer_config: with `chat_template` filled in.
        config, generation_config: name ids that the tokenizer does not.

    Returns:
        Keys and values; token types and scores are numpy arrays.

    Raises:
        CheckpointError: no tokenizer.json, or one that GGUF cannot express.
    """
    file = folder / "tokenizer.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}. A GGUF file needs the model's tokenizer.") from error
    model = state.get("model", {})
    if model.get("type") != "BPE":
        raise CheckpointError(f"{file} is of kind {model.get('type')!r}; only BPE can be written to GGUF.")
    tokens, types = _tokens(backend, vocab_size)
    merges = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model.get("merges", [])]
    found: dict[str, Any] = {}
    if model.get("byte_fallback"):
        found |= _text_level(state, tokens, types, merges)
    else:
        found |= _byte_level(backend, bool(model.get("ignore_merges")), file, merges)
    found["tokenizer.ggml.tokens"] = tokens
    found["tokenizer.ggml.token_type"] = types
    found |= _special_ids(backend, tokenizer_config, config, generation_config)
    return found | _templates(tokenizer_config.get("chat_template"))


def _tokens(backend: tokenizers.Tokenizer, vocab_size: int) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int32]]]:
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab_size, max(vocab.values(), default=-1) + 1)
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = np.full(size, TokenType.UNUSED, np.int32)
    for token, index in vocab.items():
        tokens[index], types[index] = token, TokenType.NORMAL
    for index, added in backend.get_added_tokens_decoder().items():
        types[index] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    return tokens, types


def _text_level(
    state: Mapping[str, Any], tokens: list[str], types: np.ndarray[Any, Any], merges: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """SentencePiece BPE: a token's score is how early its merge comes."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = np.array([-float(ranks.get(token, len(merges))) for token in tokens], np.float32)
    for index, token in enumerate(tokens):
        if types[index] == TokenType.NORMAL and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = TokenType.BYTE
    unknown = state["model"].get("unk_token")
    if unknown in tokens:
        types[tokens.index(unknown)] = TokenType.UNKNOWN
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": _prepends_space(state),
    }


def _prepends_space(state: Mapping[str, Any]) -> bool:
    normalizer, before = state.get("normalizer") or {}, state.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Prepend" for step in steps):
        return True
    return before.get("type") == "Metaspace" and before.get("prepend_scheme", "always") != "never"


def _byte_level(
    backend: tokenizers.Tokenizer, ignore_merges: bool, file: Path, merges: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """GPT-2's byte alphabet. The cutting rules are known by what they do to the probes, not by how they are written."""
    own = backend.pre_tokenizer
    if own is None:
        raise CheckpointError(f"{file} does not cut text into words, which GGUF cannot express.")
    wanted = [own.pre_tokenize_str(text) for text in _PROBES]
    for name, rules in PRE_TOKENIZERS.items():
        if name == "default" or not rules.byte_level or rules.ignore_merges != ignore_merges:
            continue
        cut = cutting(rules)
        if [cut.pre_tokenize_str(text) for text in _PROBES] == wanted:
            return {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": name,
                "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            }
    raise CheckpointError(
        f"{file} cuts text in a way that has no name in GGUF; known: {', '.join(PRE_TOKENIZERS)}. "
        "Write safetensors instead (--to int8, int4, fp8)."
    )


def _special_ids(
    backend: tokenizers.Tokenizer,
    tokenizer_config: Mapping[str, Any],
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name in _KINDS.items():
        token = tokenizer_config.get(key)
        token = token.get("content") if isinstance(token, Mapping) else token
        index = backend.token_to_id(token) if isinstance(token, str) else config.get(f"{key}_id")
        if type(index) is int:
            found[f"tokenizer.ggml.{name}_token_id"] = index
    ends = generation_config.get("eos_token_id", config.get("eos_token_id"))
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int]
    if ends and "tokenizer.ggml.eos_token_id" not in found:
        found["tokenizer.ggml.eos_token_id"] = ends[0]
    others = [end for end in ends if end != found.get("tokenizer.ggml.eos_token_id")]
    for name, index in zip(("eot", "eom"), others, strict=False):
        found[f"tokenizer.ggml.{name}_token_id"] = index
    plain = len(backend.encode("a", add_special_tokens=False).ids)
    mask = backend.encode("a", add_special_tokens=True).special_tokens_mask
    found["tokenizer.ggml.add_bos_token"] = len(mask) > plain and mask[0] == 1
    found["tokenizer.ggml.add_eos_token"] = len(mask) > plain and mask[-1] == 1
    return found


def _templates(template: Any) -> dict[str, Any]:
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    if not isinstance(template, Mapping):
        return {}
    others = {f"tokenizer.chat_template.{name}": text for name, text in template.items() if name != "default"}
    names = [name for name in template if name != "default"]
    default = {"tokenizer.chat_template": template["default"]} if "default" in template else {}
    return default | ({"tokenizer.chat_templates": names} if names else {}) | others
