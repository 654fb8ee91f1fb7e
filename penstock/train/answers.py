"""A model's own answers, in tokens, as they are kept while a head is trained. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        prompt, answer: token ids; what ended the answer included.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Both, one after the other."""
        return self.prompt + self.answer


_FEWEST: Final = 2  # tokens of an answer that teaches or measures anything


class AnswerFile:
    """Answers, one a line, in the order of their prompts."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be read; a line that was cut off is left out."""
        self._path = path
        self.answers: list[Answer] = []
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            whole = lines[:-1]  # what has no end of line was being written
            self.answers = [_answer(line) for line in whole]
            if lines and lines[-1]:
                path.write_bytes(b"".join(line + b"\n" for line in whole))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Remove it, and answers are made again.") from None

    def keep(self, prompts: Sequence[Sequence[int]], size: int) -> None:
        """Leaves out what answers no such prompt, and what is no whole part of `size`, in which answers are drawn.

        Raises:
            OSError: it cannot be written.
        """
        kept = self.answers[: len(prompts)]
        if len(kept) < len(prompts):
            del kept[len(kept) // size * size :]
        wrong = (at for at, (one, prompt) in enumerate(zip(kept, prompts, strict=False)) if one.prompt != tuple(prompt))
        if (first := next(wrong, None)) is not None:
            del kept[first // size * size :]
        if len(kept) < len(self.answers):
            self._path.unlink()
            self.answers = []
            self.add(kept)

    def add(self, answers: Sequence[Answer]) -> None:
        """Keeps further ones."""
        with self._path.open("a", encoding="ascii") as file:
            for answer in answers:
                file.write(json.dumps({"prompt": answer.prompt, "answer": answer.answer}) + "\n")
        self.answers += answers


def _answer(line: bytes) -> Answer:
    read = json.loads(line)
    found = Answer(tuple(read["prompt"]), tuple(read["answer"]))
    if not all(type(token) is int and token >= 0 for token in found.tokens):
        raise ValueError("a line holds what is no token id")
    return found


def held_out(answers: Sequence[Answer], share: float) -> tuple[list[Answer], list[Answer]]:
    """The answers that are learned from, and those that are kept to measure it: spread evenly, at least one of each.

    Answers without two tokens teach nothing and are left out.

    Raises:
        ConfigError: there are too few.
    """
    usable = [answer for answer in answers if len(answer.answer) >= _FEWEST]
    if len(usable) < 2:
        raise ConfigError(
            f"{len(usable)} of {len(answers)} answers have two tokens or more; at least 2 such answers are needed. "
            "Give a longer --text."
        )
    every = max(2, round(1 / share))
    kept = [answer for index, answer in enumerate(usable) if index % every == 1]
    return [answer for index, answer in enumerate(usable) if index % every != 1], kept


def measurable(answers: Sequence[Answer]) -> list[Answer]:
    """Those that measure anything; raises ConfigError where none does."""
    found = [answer for answer in answers if len(answer.answer) >= _FEWEST]
    if not found:
        raise ConfigError(
            f"none of the {len(answers)} answers that are held out has two tokens or more. Give a longer --text."
        )
    return found
