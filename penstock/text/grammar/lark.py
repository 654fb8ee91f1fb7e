"""Pieces of llguidance's Lark dialect: literals, and texts in which control tokens occur."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.text.grammar.schema import check_schema

_PARTS: Final = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|\#[^\n]*)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<and>&)
    |(?P<rule>^[!?]?[A-Za-z_][\w-]*[^\n:"/]*:)""",
    re.VERBOSE | re.MULTILINE,
)


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


def check(source: str) -> None:
    """Refuses a grammar whose brackets or rules could exhaust the stack of what compiles it.

    Raises:
        RequestError: it is nested too deeply or has too many rules.
    """
    depth = rules = ands = 0
    for place in re.finditer(r"%json\s*", source):
        check_schema(_inline(source, place.end()))
    for part in _PARTS.finditer(source):
        ands += part.lastgroup == "and"
        depth += (part.lastgroup == "open") - (part.lastgroup == "close")
        rules += part.lastgroup == "rule"
        nested = part.lastgroup == "text" and part.group().count("(") > 2 * limits.MAX_GRAMMAR_DEPTH
        if depth > limits.MAX_GRAMMAR_DEPTH or (nested and _deepest(part.group()) > limits.MAX_GRAMMAR_DEPTH):
            raise _refused(f"grammar has brackets nested deeper than {limits.MAX_GRAMMAR_DEPTH} levels.")
        if ands > limits.MAX_INTERSECTED:
            raise _refused(f"grammar has more than the {limits.MAX_INTERSECTED} operators & allowed.")
        if rules > limits.MAX_GRAMMAR_RULES:
            raise _refused(f"grammar has more than the {limits.MAX_GRAMMAR_RULES} rules allowed.")


def _inline(source: str, place: int) -> Any:
    try:
        return json.JSONDecoder().raw_decode(source, place)[0]
    except (ValueError, RecursionError) as error:
        raise _refused(f"grammar has %json with what is no JSON: {error}.") from error


def _deepest(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        deepest = max(deepest, depth)
    return deepest


def _refused(message: str) -> RequestError:
    return RequestError(message, param="grammar", code="invalid_grammar")


_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def _escaped(match: re.Match[str]) -> str:
    found = match.group()
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found, found)
