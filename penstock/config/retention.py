"""How long what a request computes is to stay in the prefix cache: hints, by the names of TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass

USUAL = 35
"""The priority of what nobody gave another, of 0 to 100."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens of a prompt.

    Attributes:
        start, end: the first, and the one behind the last; None for the prompt's end.
        priority: 0 to 100; of lower ones blocks are evicted first.
        seconds: after which they are as others are; None for never.
    """

    start: int
    end: int | None
    priority: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """Priorities of a request's blocks.

    Attributes:
        ranges: of its prompt.
        answer: of what is generated, from its first token to its last; None for the usual.
    """

    ranges: tuple[TokenRange, ...] = ()
    answer: TokenRange | None = None

    def of(self, start: int, end: int, prompt: int) -> tuple[int, float | None]:
        """Priority and seconds of the tokens from `start` to `end`, of which the first `prompt` are the prompt's.

        The highest priority counts of all that any of them is given.
        """
        found = [one for one in self.ranges if one.start < min(end, prompt) and start < (one.end or prompt)]
        if self.answer is not None and end > prompt:
            found.append(self.answer)
        best = max(found, key=lambda one: (one.priority, one.seconds or float("inf")), default=None)
        return (USUAL, None) if best is None else (best.priority, best.seconds)


NO_RETENTION = Retention()


def kept_for(seconds: float, priority: int = 80) -> Retention:
    """Prompt and answer stay longer than others for so many seconds."""
    whole = TokenRange(0, None, priority, seconds)
    return Retention((whole,), whole)
