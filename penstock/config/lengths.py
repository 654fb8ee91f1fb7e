"""Where prompts are cut that are too long, and where answers end that repeat themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt is cut that is too long.

    Attributes:
        tokens: most that are kept; None for what the context takes, less those `reserved`.
        keep_end: the last ones are kept, else the first. Tokens that the tokenizer puts around a text stay.
        reserved: tokens of the context that are left for the answer.
    """

    tokens: int | None = None
    keep_end: bool = True
    reserved: int = 1


@dataclass(frozen=True, slots=True)
class Repetition:
    """When an answer that goes round in circles ends: at `count` equal patterns, one after the other, at its end.

    Attributes:
        longest, shortest: tokens of a pattern.
        count: how often it must stand there, at least 2.
    """

    longest: int
    shortest: int
    count: int
