"""Pieces of llguidance's Lark dialect: literals, and texts in which control tokens occur."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from penstock.config import limits
from penstock.text.grammar import forcing, scan
from penstock.text.grammar.schema import check_schema

_MARK: Final = re.compile(r'["/#<%()\[\]{}&:]')
_JSON: Final = ("%json", "%llguidance", "%regex")
_SKIPS: Final = "%json"
_SLASH: Final = re.compile(r"\\.|/|\n", re.DOTALL)

_Tree = dict[str, Any]  # texts by their characters, one a level; a text ends where there is ""


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
    terms: list[str] = []
    begin = 0
    for place, end in _control_tokens(text, special):
        if place > begin:
            terms.append(literal(text[begin:place]))
        terms.append(f"<[{special[text[place:end]]}]>")
        begin = end
    if begin < len(text):
        terms.append(literal(text[begin:]))
    return " ".join(terms)


def _control_tokens(text: str, special: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Where control tokens stand in a text, at each place the longest."""
    firsts, tree = _tree(frozenset(filter(None, special)))
    place = 0
    while (found := firsts.search(text, place)) is not None:
        begin = at = found.start()
        end, node = -1, tree
        while at < len(text) and (inner := node.get(text[at])) is not None:
            at, node = at + 1, inner
            end = at if "" in node else end
        if end > 0:
            yield begin, end
        place = max(end, begin + 1)


@lru_cache(maxsize=8)
def _tree(names: frozenset[str]) -> tuple[re.Pattern[str], _Tree]:
    """Names to be looked for at once, however many, and what they begin with."""
    tree: _Tree = {}
    for name in names:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(f"[{''.join(map(re.escape, tree))}]" if tree else r"(?!)"), tree


def regex(pattern: str) -> str:
    """A regular expression as a term. `/` needs no escape in it."""
    return f"/{_SLASH.sub(_escaped, pattern)}/"


def check(source: str) -> bool:
    """Refuses a grammar whose brackets or rules could exhaust the stack of what compiles it.

    Returns:
        Whether it skips some text between its parts, so that nothing of it may be forced.

    Raises:
        RequestError: it is nested too deeply, has too many rules, or a text or an expression in it does not end.
    """
    depth = 0
    skips = forcing.IGNORE in source  # also inside a text; then forced tokens are the only cost
    counts = {":": 0, "&": 0, "": 0}
    for mark, text in _parts(source):
        if mark == _SKIPS:
            skips = True
            continue
        counts[""] += 1
        depth += (mark in "([{") - (mark in ")]}") if mark in "([{)]}" else 0
        nested = text.count("(") > 2 * limits.MAX_GRAMMAR_DEPTH and _deepest(text) > limits.MAX_GRAMMAR_DEPTH
        if mark in counts:
            counts[mark] += 1
        if nested or depth > limits.MAX_GRAMMAR_DEPTH:
            raise scan.refused(f"grammar has brackets nested deeper than {limits.MAX_GRAMMAR_DEPTH} levels.")
        if counts["&"] > limits.MAX_INTERSECTED:
            raise scan.refused(f"grammar has more than the {limits.MAX_INTERSECTED} operators & allowed.")
        if counts[":"] > limits.MAX_GRAMMAR_RULES:
            raise scan.refused(f"grammar has more than the {limits.MAX_GRAMMAR_RULES} rules allowed.")
        if counts[""] > limits.MAX_GRAMMAR_PARTS:
            raise scan.refused(f"grammar has more than the {limits.MAX_GRAMMAR_PARTS} words and marks allowed.")
    return skips


def _parts(source: str) -> Iterator[tuple[str, str]]:
    """A grammar's marks as its compiler cuts it, and the text of literals and expressions; comments are left out.

    A schema gives a mark if it says what is skipped between its parts.
    """
    place = 0
    while (found := _MARK.search(source, place)) is not None:
        begin = found.start()
        mark = found.group()
        place = found.end()
        if mark == "#" or source.startswith("//", begin):
            place = scan.line_end(source, place)
        elif mark in '"/':
            place = scan.quoted_end(source, begin)
            if place < 0:
                what = "text" if mark == '"' else "regular expression"
                raise scan.refused(f"grammar, line {scan.line_of(source, begin)}: the {what} {mark}… does not end.")
            yield mark, source[begin:place]
        elif mark == "<":
            place = max(place, scan.tag_end(source, begin))
        elif mark == "%":
            place, skips = _keyword(source, begin)
            if skips:
                yield _SKIPS, ""
        elif source.startswith("::", begin):
            place += 1
        else:
            yield mark, ""


def _keyword(source: str, begin: int) -> tuple[int, bool]:
    """Where a keyword that begins with % ends, with the JSON it takes, and whether that says what is skipped.

    A schema is checked.
    """
    word = next((word for word in _JSON if source.startswith(word, begin)), "")
    if not word:
        return begin + 1, False
    place = scan.spaces_end(source, begin + len(word))
    scan.check_json(source, place)
    try:
        value, end = json.JSONDecoder().raw_decode(source, place)
    except (ValueError, RecursionError) as error:
        raise scan.refused(f"grammar has {word} with what is no JSON: {error}.") from error
    if word == "%json":
        check_schema(value)
    return end, word == "%json" and forcing.skips(value)


def _deepest(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        deepest = max(deepest, depth)
    return deepest


def _escaped(match: re.Match[str]) -> str:
    found = match.group()
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found, found)
