"""GBNF, llama.cpp's notation for grammars (and EBNF as other engines write it), to llguidance's Lark dialect.

What does not recurse becomes a terminal, that is one regular expression: a lexer matches it as a whole, exactly and
fast, where a rule would cut it into lexemes, each of which takes as much as it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from penstock.config import limits
from penstock.config.errors import RequestError, format_value
from penstock.text.grammar import scan
from penstock.text.grammar.scan import refused

_ESCAPE: Final = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_EMPTY: Final = '""'
_RANGES: Final = {"*": "*", "+": "+", "?": "?"}
_QUOTES: Final = {'"': "literal", "'": "literal", "[": "chars"}
_CLASS_PART: Final = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)|.", re.DOTALL)
_OTHER_TOKEN: Final = re.compile(r"!<\[(\d+)\]>")


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a rule.

    Attributes:
        kind: "text" (Lark for a literal, a class, or a control token), "name", "sequence", "choice" or "times".
        text: of a text or name; how often, of "times".
        parts: of the others.
        terminal: of a text: whether it may be part of a terminal.
    """

    kind: str
    text: str = ""
    parts: tuple[_Node, ...] = ()
    terminal: bool = True


def gbnf_to_lark(source: str) -> str:
    """A grammar whose first rule to match is `root`.

    Raises:
        RequestError: it is no such grammar; the message tells the line.
    """
    rules = _Reader(source).rules()
    if "root" not in rules:
        raise refused(f"grammar has no rule named root; it has {', '.join(sorted(rules)[:8]) or 'none'}.")
    for name, rule in rules.items():
        for other in _names(rule):
            if other not in rules:
                raise refused(f"grammar uses the rule {other} in {name}, but does not define it.")
    return _Writer(rules).write()


class _Reader:
    """Recursive descent, no deeper than MAX_GRAMMAR_DEPTH."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = list(islice(self._cut(), limits.MAX_GRAMMAR_PARTS + 2))  # and the end
        if len(self._tokens) > limits.MAX_GRAMMAR_PARTS + 1:
            raise refused(f"grammar has more than the {limits.MAX_GRAMMAR_PARTS} words and marks allowed.")
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while (token := self._peek())[0] == "define":
            self._next += 1
            name = token[1].removesuffix("::=").rstrip()
            if name in rules:
                raise self._error(token, f"the rule {name} is defined twice")
            if len(rules) >= limits.MAX_GRAMMAR_RULES:
                raise self._error(token, f"there are more than the {limits.MAX_GRAMMAR_RULES} rules allowed")
            rules[name] = self._choice()
        if token[0] != "end":
            raise self._error(token, "expected a rule, as in: root ::= ...")
        return rules

    def _cut(self) -> Iterator[tuple[str, str, int]]:
        source, place = self._source, 0
        while place < len(source):
            kind, end = _word(source, place)
            if end < 0:
                raise self._error(("", source[place], place), "this is not part of GBNF")
            if kind:
                yield kind, source[place:end], place
            place = end
        yield "end", "", place

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._next]

    def _error(self, token: tuple[str, str, int], what: str) -> RequestError:
        return refused(
            f"grammar, line {scan.line_of(self._source, token[2])}, at {format_value(token[1][:40])}: {what}."
        )

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self._peek()[1] == "|":
            self._next += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Node("choice", parts=tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (item := self._item()) is not None:
            while self._peek()[0] == "times":
                item = _Node("times", self._times(), (item,))
            parts.append(item)
        return parts[0] if len(parts) == 1 else _Node("sequence", parts=tuple(parts))

    def _times(self) -> str:
        text = self._peek()[1]
        self._next += 1
        return _RANGES.get(text) or "".join(text.split())

    def _item(self) -> _Node | None:
        kind, text, _ = token = self._peek()
        if kind in ("end", "define") or text in ("|", ")"):
            return None
        self._next += 1
        if kind == "name":
            return _Node("name", text)
        if kind == "literal":
            return _Node("text", _literal(text[1:-1]))
        if kind == "chars":
            return _Node("text", f"/{_char_class(text[1:-1])}/")
        if kind == "token":
            return _Node("text", _token(text), terminal=False)
        if text == ".":
            return _Node("text", "/(?s:.)/")
        if text != "(":
            raise self._error(token, "nothing stands before it")
        self._depth += 1
        if self._depth > limits.MAX_GRAMMAR_DEPTH:
            raise self._error(token, f"brackets are nested deeper than {limits.MAX_GRAMMAR_DEPTH} levels")
        inside = self._choice()
        if self._peek()[1] != ")":
            raise self._error(token, "this bracket is not closed")
        self._next += 1
        self._depth -= 1
        return inside


def _word(source: str, place: int) -> tuple[str, int]:
    """The kind of what stands at a place, "" for space and comments, and where it ends, -1 if it is nothing."""
    char = source[place]
    if char.isspace():
        return "", scan.spaces_end(source, place)
    if char == "#" or source.startswith("//", place):
        return "", scan.line_end(source, place)
    if char == "_" or (char.isascii() and char.isalpha()):
        end = scan.word_end(source, place)
        defined = scan.spaces_end(source, end)
        return ("define", defined + 3) if source.startswith("::=", defined) else ("name", end)
    if char in _QUOTES:
        return _QUOTES[char], scan.quoted_end(source, place)
    if char == "<" or source.startswith("!<", place):
        return "token", scan.tag_end(source, place + (char == "!"))
    if char == "{":
        return "times", scan.times_end(source, place)
    if char in _RANGES:
        return "times", place + 1
    return "mark", place + 1 if char in "().|" else -1


def _plain(text: str) -> str:
    """What a text with escapes stands for."""

    def one(match: re.Match[str]) -> str:
        code = match.group(1)
        if len(code) == 1:
            return _LETTERS.get(code, code)
        try:
            return chr(int(code[1:], 16))
        except (ValueError, OverflowError) as error:
            raise refused(f"grammar has {match.group()}, which is no character.") from error

    return _ESCAPE.sub(one, text)


def _literal(text: str) -> str:
    plain = _plain(text)
    return f"/{_escaped(plain)}/" if plain else _EMPTY


def _escaped(text: str) -> str:
    """A regular expression for exactly this text: what is no letter or digit by its number."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def _char_class(text: str) -> str:
    """A class, with every character that could mean something written by its number."""
    negated = text.startswith("^")
    body = text[negated:]
    raw = [found.group() for found in _CLASS_PART.finditer(body)]
    last = len(raw) - 1
    out = ["-" if part == "-" and 0 < i < last else _escaped(_plain(part)) for i, part in enumerate(raw)]
    if not out:
        return "(?s:.)" if negated else "[^\\x{0}-\\x{10ffff}]"
    return f"[{'^' if negated else ''}{''.join(out)}]"


def _token(text: str) -> str:
    """llama.cpp writes `!<[5]>` for any token but one; Lark writes it `<[^5]>`."""
    if not text.startswith("!"):
        return text
    number = _OTHER_TOKEN.fullmatch(text)
    if number is None:
        raise refused(f"grammar has {text}; a negated token is written by its number, as in !<[5]>.")
    return f"<[^{number.group(1)}]>"


def _names(node: _Node) -> Iterator[str]:
    stack = [node]
    while stack:
        top = stack.pop()
        if top.kind == "name":
            yield top.text
        stack += top.parts


class _Writer:
    """Writes rules in Lark: those that do not recurse as terminals."""

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        self._rules = rules
        self._regular = _regular_rules(rules)
        self._spelled: dict[str, str] = {}
        for name in rules:
            self._spelled[name] = f"T{len(self._spelled)}" if name in self._regular else f"r{len(self._spelled)}"
        self._known = frozenset(self._spelled.values())
        self._terminals: dict[str, str] = {}

    def write(self) -> str:
        lines = [f"start: {self._spelled['root']}"]
        for name, rule in self._rules.items():
            body = self._term(rule) if name in self._regular else self._rule(rule)
            lines.append(f"{self._spelled[name]}: {body}")
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(lines)

    def _is_regular(self, node: _Node) -> bool:
        stack = [node]
        while stack:
            top = stack.pop()
            if (top.kind == "name" and top.text not in self._regular) or not top.terminal:
                return False
            stack += top.parts
        return True

    def _term(self, node: _Node) -> str:
        """A node as part of a terminal."""
        if node.kind == "name":
            return self._spelled[node.text]
        return self._joined(node, [self._term(part) for part in node.parts])

    def _rule(self, node: _Node) -> str:
        """A node as part of a rule: neighbours in a sequence that are regular are one terminal."""
        if (node.kind == "text" and node.terminal) or (node.kind != "name" and self._is_regular(node)):
            return self._named(self._term(node))
        if node.kind == "name":
            return self._spelled[node.text]
        if node.kind != "sequence":
            return self._joined(node, [self._rule(part) for part in node.parts])
        return " ".join(self._runs(node.parts))

    def _runs(self, parts: Sequence[_Node]) -> Iterator[str]:
        run: list[_Node] = []
        for part in (*parts, None):
            if part is not None and self._is_regular(part):
                run.append(part)
                continue
            if run:
                yield self._named(self._term(run[0] if len(run) == 1 else _Node("sequence", parts=tuple(run))))
                run = []
            if part is not None:
                yield self._rule(part)

    def _joined(self, node: _Node, parts: Sequence[str]) -> str:
        if node.kind == "text":
            return node.text
        if node.kind == "times":
            return f"({parts[0]}){node.text}"
        if node.kind == "choice":
            return f"({' | '.join(parts)})"
        return f"({' '.join(parts)})" if parts else _EMPTY

    def _named(self, text: str) -> str:
        """A terminal of its own for a term."""
        if text in self._known:
            return text
        return self._terminals.setdefault(text, f"U{len(self._terminals)}")


def _regular_rules(rules: Mapping[str, _Node]) -> frozenset[str]:
    """Names of the rules that can be terminals: they use no control token, and reach no rule that recurses."""
    uses = {name: set(_names(rule)) for name, rule in rules.items()}
    plain = {name for name, rule in rules.items() if _without_tokens(rule)}
    regular: set[str] = set()
    waiting = {name: len(used) for name, used in uses.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    ready = [name for name, count in waiting.items() if count == 0]
    while ready:
        name = ready.pop()
        if name not in plain:
            continue
        regular.add(name)
        for user in users[name]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return frozenset(regular)


def _without_tokens(node: _Node) -> bool:
    stack = [node]
    while stack:
        top = stack.pop()
        if not top.terminal:
            return False
        stack += top.parts
    return True
