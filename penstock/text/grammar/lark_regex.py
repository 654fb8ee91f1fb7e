"""Grammars in Lark whose rules do not recurse, as one regular expression: what texts within JSON can be held to.

The language is that of Lark's own documents: rules and terminals, literals with `i`, ranges, expressions between
slashes, groups, `?`, `*`, `+`, `~`, aliases, and imports of the common terminals. Every name is put in where it stands,
so the work is bounded by the length of what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

from penstock.config import limits

_TOKENS: Final = re.compile(
    r"""(?P<nothing>[ \t\f\r]+|//[^\n]*|\#[^\n]*)
    |(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<expression>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<keyword>%[a-z]+)
    |(?P<name>[_a-zA-Z][_a-zA-Z0-9]*)
    |(?P<number>\d+)
    |(?P<mark>->|\.\.|[?!*+~|:()\[\].,])
    """,
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_LETTERS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "b": "\b"}
_SPECIAL: Final = frozenset("\\.^$*+?()[]{}|")
_MOST_REPEATS: Final = 1000
COMMON: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DIGIT": "[0-9]",
        "HEXDIGIT": "[0-9a-fA-F]",
        "INT": "[0-9]+",
        "SIGNED_INT": "[+-]?[0-9]+",
        "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
        "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
        "NUMBER": r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
        "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
        "LCASE_LETTER": "[a-z]",
        "UCASE_LETTER": "[A-Z]",
        "LETTER": "[a-zA-Z]",
        "WORD": "[a-zA-Z]+",
        "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
        "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
        "WS": r"[ \t\f\r\n]+",
        "WS_INLINE": r"[ \t]+",
        "CR": r"\r",
        "LF": r"\n",
        "NEWLINE": r"(?:\r?\n)+",
    }
)
"""Lark's common terminals."""


class LarkError(Exception):
    """Why a grammar cannot be an expression: a sentence about `definition`."""


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def as_expression(source: str) -> str:
    """The regular expression of the texts that the rule `start` matches, without anchors.

    Raises:
        LarkError: the grammar is not of that language, recurs, or comes to too long an expression.
    """
    return _Grammar(list(_read(source))).expression()


def _read(source: str) -> Iterator[_Token]:
    place, line = 0, 1
    while place < len(source):
        found = _TOKENS.match(source, place)
        if found is None:
            raise LarkError(f"line {line}: {source[place]!r} is nothing that is known here")
        kind = found.lastgroup or ""
        if kind != "nothing":
            yield _Token(kind, found[0], line)
        line += kind == "line"
        place = found.end()


class _Grammar:
    """A grammar's rules as tokens, each of which becomes an expression when it is asked for."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._made: dict[str, str] = {}
        self._open: list[str] = []
        for statement in _statements(tokens):
            self._take(statement)

    def expression(self) -> str:
        if "start" not in self._rules:
            raise LarkError("it has no rule start, with which a grammar begins")
        return self._of("start", 1, 0)

    def _take(self, statement: list[_Token]) -> None:
        first = statement[0]
        if first.kind == "keyword":
            self._take_keyword(statement)
            return
        marks = next((place for place, token in enumerate(statement) if token.text not in ("?", "!")), len(statement))
        statement = statement[marks:]
        names = [token.text for token in statement[:4]]
        end = 1 if names[1:2] == [":"] else 3 if names[1:2] == ["."] and names[3:4] == [":"] else 0  # with a priority
        if not end or statement[0].kind != "name":
            raise LarkError(f"line {first.line}: a rule begins with its name and a colon")
        if names[0] in self._rules or names[0] in self._made:
            raise LarkError(f"line {first.line}: {names[0]} is there twice")
        self._rules[names[0]] = statement[end + 1 :]

    def _take_keyword(self, statement: list[_Token]) -> None:
        first, words = statement[0], [token.text for token in statement[1:]]
        if first.text != "%import":
            told = "is not known here; write what may stand where into the rules"
            raise LarkError(f"line {first.line}: {first.text} {told}")
        if words[:2] != ["common", "."] and words[:2] != ["common", "("]:
            raise LarkError(f"line {first.line}: only common terminals can be imported, as in %import common.INT")
        alias = words[4] if words[3:4] == ["->"] and len(words) == 5 else None
        listed = words[2:3] if words[1] == "." else [word for word in words[2:] if word not in (",", ")")]
        for name in listed:
            if name not in COMMON:
                raise LarkError(f"line {first.line}: common.{name} is not known here; known: {', '.join(COMMON)}")
            self._made[alias or name] = COMMON[name]

    def _of(self, name: str, line: int, depth: int) -> str:
        """The expression of a rule or terminal, which stands so many brackets and rules deep."""
        if name in self._made:
            return self._made[name]
        if name not in self._rules:
            raise LarkError(f"line {line}: nothing is called {name}")
        if name in self._open:
            raise LarkError(f"{name} contains itself, which no regular expression can say; write how often it repeats")
        self._open.append(name)
        reader = _Reader(self._rules[name], self._of, depth)
        made = reader.choices()
        if reader.rest():
            reader.fail("is not expected there")
        self._open.pop()
        self._made[name] = made
        return made


def _statements(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """The tokens of each rule: it ends with its line, unless the next begins with | or a bracket is open."""
    found: list[_Token] = []
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.text in "([") - (token.text in ")]") if token.kind == "mark" else 0
        if token.kind != "line":
            found.append(token)
            continue
        following = next((one for one in tokens[place + 1 : place + 64] if one.kind != "line"), None)
        if found and depth <= 0 and not (following is not None and following.text == "|"):
            yield found
            found, depth = [], 0
    if found:
        yield found


class _Reader:
    """Reads the tokens behind a rule's colon, which stand so many brackets and rules deep."""

    def __init__(self, tokens: list[_Token], named: Callable[[str, int, int], str], depth: int) -> None:
        """`named` gives the expression of a name in a line, at a depth."""
        self._tokens = [token for token in tokens if token.kind != "line"]
        self._at, self._depth = 0, depth
        self._named = named

    def rest(self) -> bool:
        return self._at < len(self._tokens)

    def fail(self, why: str) -> NoReturn:
        if not self.rest():
            raise LarkError(f"line {self._tokens[-1].line if self._tokens else 1}: the rule ends too early")
        token = self._tokens[self._at]
        raise LarkError(f"line {token.line}: {token.text[:40]!r} {why}")

    def choices(self) -> str:
        """Everything up to a closing bracket or the end."""
        self._depth += 1
        if self._depth > limits.MAX_GRAMMAR_DEPTH:
            raise LarkError(f"rules and brackets are nested deeper than {limits.MAX_GRAMMAR_DEPTH} levels")
        found = [self._row()]
        while self._next("|"):
            found.append(self._row())
        self._depth -= 1
        return _short(f"(?:{'|'.join(found)})" if len(found) > 1 else found[0])

    def _row(self) -> str:
        parts: list[str] = []
        while self.rest() and self._tokens[self._at].text not in ("|", ")", "]", "->"):
            parts.append(self._repeated(self._item()))
        if self._next("->"):  # what the parts would be called in a tree
            if not self.rest() or self._tokens[self._at].kind != "name":
                self.fail("is no alias")
            self._at += 1
        return _short("".join(parts))

    def _item(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        if token.kind == "string":
            return self._literal(token)
        if token.kind == "expression":
            return _expression(token)
        if token.kind == "name":
            return self._named(token.text, token.line, self._depth)
        if token.text in ("(", "["):
            inner = self.choices()
            if not self._next(")" if token.text == "(" else "]"):
                self.fail("stands where a bracket has to be closed")
            return inner if token.text == "(" else f"(?:{inner})?"
        self._at -= 1
        return self.fail("is not expected there")

    def _literal(self, token: _Token) -> str:
        if self._next(".."):
            last = self._tokens[self._at] if self.rest() else token
            begin, end = _text_of(token), _text_of(last) if last.kind == "string" else ""
            if len(begin) != 1 or len(end) != 1 or begin > end:
                self.fail("is no end of a range: both are one character, the first no later than the last")
            self._at += 1
            return f"[{_in_class(begin)}-{_in_class(end)}]"
        either = token.text.endswith("i")
        return "".join(_letter(letter, either) for letter in _text_of(token))

    def _repeated(self, item: str) -> str:
        for mark in ("?", "*", "+"):
            if self._next(mark):
                return f"(?:{item}){mark}"
        if not self._next("~"):
            return item
        least = self._count()
        most = self._count() if self._next("..") else least
        if most < least:
            self._at -= 1
            self.fail("is less than what it stands behind")
        return f"(?:{item}){{{least},{most}}}"

    def _count(self) -> int:
        if not self.rest() or self._tokens[self._at].kind != "number":
            self.fail("is no number of times")
        text = self._tokens[self._at].text
        if len(text) > 4 or int(text) > _MOST_REPEATS:
            self.fail(f"is more often than {_MOST_REPEATS} times")
        self._at += 1
        return int(text)

    def _next(self, text: str) -> bool:
        """Whether this mark comes next, which is then read."""
        found = self.rest() and self._tokens[self._at].kind == "mark" and self._tokens[self._at].text == text
        self._at += found
        return found


def _short(made: str) -> str:
    if len(made) > limits.MAX_REGEX_CHARS:
        most = limits.MAX_REGEX_CHARS
        raise LarkError(f"it comes to a regular expression of more than {most} characters; make it shorter")
    return made


def _text_of(token: _Token) -> str:
    def plain(found: re.Match[str]) -> str:
        number = found[1] or found[2] or found[3]
        if number is not None:
            code = int(number, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise LarkError(f"line {token.line}: {found[0]} is no character")
            return chr(code)
        return _LETTERS.get(found[4], found[4])

    return _ESCAPE.sub(plain, token.text.removesuffix("i")[1:-1])


def _expression(token: _Token) -> str:
    inner, _, flags = token.text[1:].rpartition("/")
    if flags:
        raise LarkError(f"line {token.line}: the flags {flags!r} of an expression are not known here; write them out")
    inner = inner.replace("\\/", "/")
    if not balanced(inner):
        raise LarkError(f"line {token.line}: the parentheses of {token.text[:40]!r} are not in pairs")
    return f"(?:{inner})"


def _letter(letter: str, either: bool) -> str:
    if either and letter.lower() != letter.upper() and len(letter.lower()) == len(letter.upper()) == 1:
        return f"[{letter.lower()}{letter.upper()}]"
    if letter in "\n\t\r":
        return {"\n": r"\n", "\t": r"\t", "\r": r"\r"}[letter]
    return f"\\{letter}" if letter in _SPECIAL else letter


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in "\\]^-[" else _letter(letter, False) if letter in "\n\t\r" else letter


def balanced(expression: str) -> bool:
    """Whether no parenthesis of a regular expression reaches out of it; in classes and escaped they are letters."""
    depth, in_class = 0, False
    letters = iter(expression)
    for letter in letters:
        if letter == "\\":
            next(letters, None)
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        else:
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                return False
    return depth == 0
