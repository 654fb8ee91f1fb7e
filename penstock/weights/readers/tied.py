"""Whether a head is the embedding's: what the stored values say, against what the configuration says."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.quant.tensor import StoredTensor

log = logging.getLogger(__name__)
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings?)\.weight")
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|output)\.weight")
_CHUNK = 1 << 24  # bytes compared at once


def untie(config: dict[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    """Clears `tie_word_embeddings` where a head of other values than the embedding's is stored, as transformers does.

    Families that tie where the field is missing are told so too.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    if text.get("tie_word_embeddings") is False:
        return
    head, embedding = _first(_HEAD, stored), _first(_EMBEDDING, stored)
    if head is None or embedding is None or _equal(stored[head], stored[embedding]):
        return
    if text.get("tie_word_embeddings"):
        log.warning("tie_word_embeddings is true, but %s differs from %s: both are used", head, embedding)
    text["tie_word_embeddings"] = False


def _first(pattern: re.Pattern[str], stored: Mapping[str, StoredTensor]) -> str | None:
    """The outermost tensor of such a name: further predictors have embeddings below theirs."""
    return min((name for name in stored if pattern.fullmatch(name)), key=lambda name: name.count("."), default=None)


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.info.shape, one.info.format) != (other.info.shape, other.info.format):
        return False
    starts = range(0, one.info.nbytes, _CHUNK)
    return all(np.array_equal(one.data[at : at + _CHUNK], other.data[at : at + _CHUNK]) for at in starts)
