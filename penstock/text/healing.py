"""Prompts that end in the middle of a word: their last token is drawn anew, as the beginning of a longer one."""

from __future__ import annotations

from penstock.config.sampling import SamplingParams
from penstock.text.tokenizer import Tokenizer


def heal(
    tokenizer: Tokenizer, asked: SamplingParams, ids: tuple[int, ...], continues: bool
) -> tuple[bytes, tuple[int, ...]]:
    """What the answer has to begin with, and the prompt without it: its last token; b"" and all of it where it stays.

    It stays if nothing is asked for, if it is the only one, if it is a control token, and if its bytes are no text.

    Args:
        tokenizer: whose tokens these are.
        asked: with `token_healing` or without.
        ids: the prompt.
        continues: the answer goes on with the prompt's own text, not with what a template put behind it.
    """
    if not (asked.token_healing and continues and len(ids) > 1) or ids[-1] in tokenizer.special_ids:
        return b"", ids
    begins = tokenizer.token_bytes(ids[-1])
    return (begins, ids[:-1]) if _is_text(begins) else (b"", ids)


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
