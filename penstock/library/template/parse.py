"""Go's text/template, as far as chat templates use it: its text and actions as a tree
(https://pkg.go.dev/text/template)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.config.errors import TemplateError, quoted
from penstock.config.limits import MAX_TEMPLATE_SOURCE_CHARS

_MAX_DEPTH: Final = 48
_TOKEN = re.compile(
    r'\s+|(?P<string>"(?:[^"\\\n]|\\.)*"|`[^`]*`)|(?P<number>-?\d+)|(?P<mark>:=|[()|,=])'
    r"|(?P<variable>\$\w*(?:\.\w+)*)|(?P<field>(?:\.\w+)+|\.)|(?P<word>\w+)"
)
_COMMENT = re.compile(r"\s*/\*")
_END = re.compile(r"(\s+-)?\s*\}\}")
_BLOCKS = ("if", "range", "with")


@dataclass(frozen=True, slots=True)
class Token:
    """A word of an action: its kind ("string", "number", "mark", "variable", "field", "word") and text."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Operand:
    """A value: a literal, the dot or a variable with its fields, or a pipeline in parentheses with fields behind it."""

    kind: str  # "string", "number", "word", "field", "variable", "pipeline"
    text: str = ""
    fields: tuple[str, ...] = ()
    inner: Pipeline | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands, each a function or value with its arguments; what one gives is the last argument of the next."""

    commands: tuple[tuple[Operand, ...], ...]


@dataclass(frozen=True, slots=True)
class Text:
    """What is written as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Action:
    """A pipeline whose value is written, or kept: `declares` a variable, or `assigns` one."""

    pipeline: Pipeline
    variable: str = ""
    declares: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """if, range or with: what is done where the pipeline is true, and where it is not. `variables` of a range are its
    index and element, or the element alone.
    """

    kind: str
    pipeline: Pipeline
    variables: tuple[str, ...]
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Jump:
    """break or continue."""

    kind: str


Node = Text | Action | Block | Jump


def parse_go(source: str) -> tuple[Node, ...]:
    """Reads a template.

    Raises:
        TemplateError: it is too long, not closed, or uses what has no translation, which is named.
    """
    if len(source) > MAX_TEMPLATE_SOURCE_CHARS:
        raise TemplateError(f"the template has {len(source)} characters; {MAX_TEMPLATE_SOURCE_CHARS} are allowed.")
    pieces = list(_pieces(source))
    body, at, end = _body(pieces, 0, 0)
    if at < len(pieces) or end:
        raise TemplateError("the template has an {{ end }} or {{ else }} without a block.")
    return body


def _pieces(source: str) -> Iterator[str | list[Token]]:
    """Texts, trimmed as the actions beside them ask, and the words of each action."""
    at, trim = 0, False
    while at < len(source):
        start = source.find("{{", at)
        text = source[at:] if start < 0 else source[at:start]
        text = text.lstrip(" \t\r\n") if trim else text
        if start < 0:
            yield text
            return
        begin = start + 2
        if re.match(r"-[ \t\r\n]", source[begin : begin + 2]):
            text, begin = text.rstrip(" \t\r\n"), begin + 1
        yield text
        comment = _COMMENT.match(source, begin)
        closed = source.find("*/", comment.end()) if comment else -1
        ending = _END.match(source, closed + 2) if closed >= 0 else None
        if ending:
            at, trim = ending.end(), bool(ending[1])
            continue
        tokens, at, trim = _action(source, begin)
        yield tokens


def _action(source: str, at: int) -> tuple[list[Token], int, bool]:
    tokens: list[Token] = []
    while True:
        ending = _END.match(source, at)
        if ending:
            return tokens, ending.end(), bool(ending[1])
        match = _TOKEN.match(source, at)
        if match is None or match.end() == at:
            raise TemplateError(f"the template cannot be read at {quoted(source[at : at + 30], 40)}.")
        if match.lastgroup:
            tokens.append(Token(match.lastgroup, match[0]))
        at = match.end()


def _body(pieces: Sequence[str | list[Token]], at: int, depth: int) -> tuple[tuple[Node, ...], int, list[Token]]:
    """Nodes up to the end or else that is not theirs, its place, and its words; [] at the end of the template."""
    if depth > _MAX_DEPTH:
        raise TemplateError(f"the template has more than {_MAX_DEPTH} blocks inside each other.")
    nodes: list[Node] = []
    while at < len(pieces):
        piece = pieces[at]
        at += 1
        if isinstance(piece, str):
            nodes += [Text(piece)] if piece else []
            continue
        word = piece[0].text if piece and piece[0].kind == "word" else ""
        if word in ("end", "else"):
            return tuple(nodes), at, piece
        if word in _BLOCKS:
            node, at = _block(pieces, at, piece, depth)
            nodes.append(node)
        elif word in ("break", "continue"):
            nodes.append(Jump(word))
        elif word in ("define", "template", "block"):
            raise TemplateError(f"the template uses {{{{ {word} }}}}, which has no translation; write it in Jinja.")
        elif piece:
            nodes.append(_statement(piece))
    return tuple(nodes), at, []


def _block(pieces: Sequence[str | list[Token]], at: int, piece: list[Token], depth: int) -> tuple[Block, int]:
    kind, tokens = piece[0].text, piece[1:]
    names: tuple[str, ...] = ()
    marks = [index for index, token in enumerate(tokens) if token.text == ":=" and token.kind == "mark"]
    if marks:
        names = tuple(token.text for token in tokens[: marks[0]] if token.kind == "variable")
        tokens = tokens[marks[0] + 1 :]
    pipeline = _pipeline(tokens)
    body, at, end = _body(pieces, at, depth + 1)
    otherwise: tuple[Node, ...] = ()
    if end and end[0].text == "else":
        if len(end) > 1:  # else if: a block of its own, which shares the end
            if end[1].text not in _BLOCKS:
                raise TemplateError("the template has an {{ else }} with something else than if behind it.")
            inner, at = _block(pieces, at, end[1:], depth + 1)
            return Block(kind, pipeline, names, body, (inner,)), at
        otherwise, at, end = _body(pieces, at, depth + 1)
    if not end or end[0].text != "end":
        raise TemplateError(f"the template has an {{{{ {kind} }}}} without its {{{{ end }}}}.")
    return Block(kind, pipeline, names, body, otherwise), at


def _statement(tokens: list[Token]) -> Action:
    if len(tokens) > 2 and tokens[0].kind == "variable" and tokens[1].text in (":=", "="):
        return Action(_pipeline(tokens[2:]), tokens[0].text, tokens[1].text == ":=")
    return Action(_pipeline(tokens))


def _pipeline(tokens: Sequence[Token]) -> Pipeline:
    found, at = _commands(tokens, 0, 0)
    if at != len(tokens) or not all(found.commands):
        raise TemplateError(f"the template has an action that cannot be read: {_shown(tokens)}.")
    return found


def _commands(tokens: Sequence[Token], at: int, depth: int) -> tuple[Pipeline, int]:
    if depth > _MAX_DEPTH:
        raise TemplateError(f"the template has more than {_MAX_DEPTH} parentheses inside each other.")
    commands: list[tuple[Operand, ...]] = []
    operands: list[Operand] = []
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token.text == ")" and token.kind == "mark":
            at -= 1
            break
        if token.text == "|" and token.kind == "mark":
            commands.append(tuple(operands))
            operands = []
        elif token.text == "(" and token.kind == "mark":
            inner, at = _commands(tokens, at, depth + 1)
            if at >= len(tokens):
                raise TemplateError(f"the template has a parenthesis that is not closed: {_shown(tokens)}.")
            at += 1
            fields: tuple[str, ...] = ()
            if at < len(tokens) and tokens[at].kind == "field" and len(tokens[at].text) > 1:
                fields = tuple(tokens[at].text[1:].split("."))
                at += 1
            operands.append(Operand("pipeline", "", fields, inner))
        else:
            operands.append(_operand(token, tokens))
    commands.append(tuple(operands))
    return Pipeline(tuple(commands)), at


def _operand(token: Token, tokens: Sequence[Token]) -> Operand:
    if token.kind == "string":
        return Operand("string", _string(token.text))
    if token.kind == "field":
        return Operand("field", "", tuple(filter(None, token.text.split("."))))
    if token.kind == "variable":
        name, *fields = token.text.split(".")
        return Operand("variable", name, tuple(fields))
    if token.kind == "mark":
        raise TemplateError(f"the template has an action that cannot be read: {_shown(tokens)}.")
    return Operand(token.kind, token.text)


def _string(text: str) -> str:
    if text.startswith("`"):
        return text[1:-1]
    try:
        return str(json.loads(text))
    except ValueError:
        raise TemplateError(f"the template has the string {quoted(text, 60)}, which cannot be read.") from None


def _shown(tokens: Sequence[Token]) -> str:
    return quoted(" ".join(token.text for token in tokens), 80)
