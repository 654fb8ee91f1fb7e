"""Pieces of llguidance's Lark dialect: literals, and texts in which control tokens occur."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


def literal(text: str) -> str:
    """A string literal; the empty text is the empty literal."""
    return json.dumps(text, ensure_ascii=False)


def sequence(text: str, special: Mapping[str, int]) -> str:
    """A text as a sequence of terms, in which control tokens are matched as those tokens and not as their letters.

    Args:
        text: any text.
        special: control tokens, as they are written, and their ids.

    Returns:
        Terms to be used in a rule (not in a terminal); "" for the empty text.
    """
    if not text:
        return ""
    names = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else literal(part) for part in parts if part)


def regex(pattern: str) -> str:
    """A regular expression as a term. `/` needs no escape in it."""
    return f"/{re.sub(_SLASH, _escaped, pattern)}/"


_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    found = match.group()
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found, found)
