"""What a program is made of: texts, what is to be generated or chosen, and the turns of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.constraint import Grammar
from penstock.config.errors import ConfigError, ParameterError


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of text and of what is to be generated, in order; made by adding them."""

    parts: tuple[str | Gen | Select | Role, ...]

    def __add__(self, other: Piece) -> Pieces:
        return Pieces((*self.parts, *parts_of(other)))

    def __radd__(self, other: str) -> Pieces:
        return Pieces((other, *self.parts))


class _Addable:
    """What can be added to texts and pieces."""

    __slots__ = ()

    def __add__(self, other: Piece) -> Pieces:
        return Pieces((*parts_of(self), *parts_of(other)))  # type: ignore[arg-type]

    def __radd__(self, other: str) -> Pieces:
        return Pieces((other, *parts_of(self)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Gen(_Addable):
    """Text to be generated; see `gen`."""

    name: str
    sampling: Mapping[str, Any]
    grammar: Grammar | None


@dataclass(frozen=True, slots=True)
class Select(_Addable):
    """A choice to be made; see `select`."""

    name: str
    choices: tuple[str, ...]
    normalize: bool


@dataclass(frozen=True, slots=True)
class Role(_Addable):
    """One turn of a chat; see `system`, `user` and `assistant`."""

    role: str
    pieces: Pieces


Piece = str | Pieces | Gen | Select | Role


def gen(name: str, *, grammar: Grammar | None = None, **sampling: Any) -> Gen:
    """Text that the model generates here, kept under `name`.

    Args:
        name: read it with `state[name]`.
        grammar: what the text must follow.
        sampling: fields of SamplingParams, for example max_tokens=32, stop="\\n", temperature=0; n is 1.

    Raises:
        ParameterError: n is given.
    """
    if sampling.get("n", 1) != 1:
        raise ParameterError("n", sampling["n"], "1; fork the state for several continuations")
    return Gen(name, sampling, grammar)


def select(name: str, choices: Sequence[str], *, normalize: bool = True) -> Select:
    """The most probable of some texts, kept under `name`.

    Args:
        choices: at least one, none empty.
        normalize: compare mean log-probabilities a token; else sums, which favour short choices.

    Raises:
        ParameterError: no choice, or an empty one.
    """
    if not choices or not all(choices):
        raise ParameterError("choices", list(choices), "at least one text, none of them empty")
    return Select(name, tuple(choices), normalize)


def system(*pieces: Piece) -> Role:
    """A system message."""
    return _role("system", pieces)


def user(*pieces: Piece) -> Role:
    """A user's message."""
    return _role("user", pieces)


def assistant(*pieces: Piece) -> Role:
    """The assistant's turn: texts, `gen` and `select`."""
    return _role("assistant", pieces)


def _role(role: str, pieces: Sequence[Piece]) -> Role:
    parts = tuple(part for piece in pieces for part in parts_of(piece))
    if any(isinstance(part, Role) for part in parts) or (
        role != "assistant" and any(not isinstance(part, str) for part in parts)
    ):
        raise ConfigError(f"{role}(…) holds {'texts, gen and select' if role == 'assistant' else 'texts'} only.")
    return Role(role, Pieces(parts))


def parts_of(piece: Piece) -> tuple[str | Gen | Select | Role, ...]:
    """The parts of a piece; raises ConfigError for what is none."""
    if isinstance(piece, Pieces):
        return piece.parts
    if isinstance(piece, (str, Gen, Select, Role)):
        return (piece,)
    raise ConfigError(f"{type(piece).__name__} cannot be added; allowed: texts, gen, select, system, user, assistant.")
