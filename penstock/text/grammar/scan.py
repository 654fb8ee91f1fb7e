"""Reading grammars' texts in linear time: a scanner never goes back over what it has passed.

Expressions here look for one character of a set, or for a run of one set: there are no two ways to read a text. Each
call is short, so that other threads get their turn between two of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import RequestError

_SPACES: Final = re.compile(r"\s+")
_WORD: Final = re.compile(r"[\w-]+")
_NO_TIMES: Final = re.compile(r"[^0-9,\s]")
_TAG_STOP: Final = re.compile(r"[<>\s]")
_QUOTE_STOPS: Final = MappingProxyType(
    {mark: re.compile(rf"[\\\n{re.escape(mark)}]") for mark in ('"', "'", "]")} | {"/": re.compile(r"[\\/]")}
)
_JSON_MARK: Final = re.compile(r'["\[\]{},]')
_JSON_STOP: Final = re.compile(r'["\\]')


def refused(message: str) -> RequestError:
    """A 400 about a grammar."""
    return RequestError(message, param="grammar", code="invalid_grammar")


def line_of(text: str, place: int) -> int:
    """The number of the line a place is in."""
    return text.count("\n", 0, place) + 1


def spaces_end(text: str, place: int) -> int:
    """Where white space ends."""
    found = _SPACES.match(text, place)
    return place if found is None else found.end()


def line_end(text: str, place: int) -> int:
    """Where the line ends, before what breaks it."""
    found = text.find("\n", place)
    return len(text) if found < 0 else found


def word_end(text: str, place: int) -> int:
    """Where a word of letters, digits, _ and - ends."""
    found = _WORD.match(text, place)
    return place if found is None else found.end()


def quoted_end(text: str, place: int) -> int:
    r"""Where what a mark opens ends, behind its closing mark; -1 if it does not.

    Args:
        text: the mark at `place` is one of `"`, `'`, `[` and `/`; a backslash takes the next character with it.
        place: of that mark.
    """
    closing = "]" if text[place] == "[" else text[place]
    stops, place = _QUOTE_STOPS[closing], place + 1
    while (found := stops.search(text, place)) is not None:
        place = found.end()
        if (mark := found.group()) == closing:
            return place
        if mark == "\n" or text[place : place + 1] in ("\n", ""):
            return -1
        place += 1
    return -1


def tag_end(text: str, place: int) -> int:
    """Where `<…>`, which opens at `place`, ends; -1 if it is none: it is not empty and holds no white space."""
    found = _TAG_STOP.search(text, place + 1)
    return found.end() if found is not None and found.group() == ">" and found.start() > place + 1 else -1


def times_end(text: str, place: int) -> int:
    """Where `{m}`, `{m,}` or `{m,n}`, which opens at `place`, ends; -1 if it is none."""
    found = _NO_TIMES.search(text, place + 1)
    if found is None or found.group() != "}":
        return -1
    first, *rest = [part.strip() for part in text[place + 1 : found.start()].split(",", 3)]
    if not first.isdigit() or len(rest) > 1 or not all(part.isdigit() or not part for part in rest):
        return -1
    return found.end()


def read_json(text: str, what: str) -> Any:
    """A whole JSON text, of bounded depth and number of values.

    Raises:
        RequestError: it is no such text; `what` names it.
    """
    if sum(map(text.count, "[{,")) > limits.MAX_GRAMMAR_PARTS:
        check_json(text, spaces_end(text, 0))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"grammar is no {what}: {error}.") from error


def check_json(text: str, place: int = 0) -> int:
    """Counts the values of what begins at a place, so that reading it is quick; where an object or a list ends.

    Raises:
        RequestError: there are too many values, nested too deeply.
    """
    depth, count = 0, 1
    for char, end in _json_marks(text, place) if text[place : place + 1] in ("{", "[") else ():
        depth += (char in "[{") - (char in "]}")
        count += char not in "]}"
        if depth > 2 * limits.MAX_GRAMMAR_DEPTH:
            raise refused(f"the JSON schema is nested too deeply; allowed: {limits.MAX_GRAMMAR_DEPTH} levels.")
        if count > 2 * limits.MAX_GRAMMAR_PARTS:
            raise refused(f"the JSON schema has more than the {limits.MAX_GRAMMAR_PARTS} values allowed.")
        if depth <= 0:
            return end
    return place


def _json_marks(text: str, place: int) -> Iterator[tuple[str, int]]:
    """Brackets and commas outside of strings, and where each ends."""
    while (found := _JSON_MARK.search(text, place)) is not None:
        place = found.end()
        if found.group() != '"':
            yield found.group(), place
            continue
        while (stop := _JSON_STOP.search(text, place)) is not None:
            place = stop.end()
            if stop.group() == '"':
                break
            place += 1
        else:
            return
