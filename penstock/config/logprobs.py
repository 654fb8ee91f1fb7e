"""Which log-probabilities a request is told, what they are of, and how many of a token are carried together."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError

WHOLE_VOCABULARY: Final = -1
Asked = TypeVar("Asked", bound="LogprobParams")
LOGPROBS_MODES: Final = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
"""What is told: of the model's own distribution, or of the one that samplers and masks leave; logarithms or logits."""


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log-probabilities are told of an answer's tokens and of the prompt's.

    Attributes:
        logprobs: None for none, else the number of alternatives reported with each token (0: the token's own; -1: the
            whole vocabulary).
        prompt_logprobs: the same for prompt tokens; those scored are computed, whatever the prefix cache holds.
        prompt_logprobs_start: first prompt position that is scored; what comes before may be a prefix hit.
        logprob_token_ids: tokens that are reported with each of the answer's, in their order, in the place of the
            likeliest; `logprobs` is not None with them.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def told_with_each(self) -> int | None:
        """How many alternatives are told with each of the answer's tokens; -1 for all, None for nothing."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    def entries(self, vocab_size: int, n: int, prompt: int | None, answer: int | None) -> int:
        """How many log-probabilities are told of `n` answers where more than the usual number is told with a token.

        Args:
            vocab_size: what the whole vocabulary is counted as.
            n: sequences.
            prompt, answer: tokens of the prompt and of each answer at most; None where that is not known, which counts
                as all that one request may have.
        """
        most, found = limits.MAX_TOLD_LOGPROBS, 0
        if is_many(self.told_with_each):
            found += most if answer is None else n * answer * (1 + _counted(self.told_with_each, vocab_size))
        if is_many(self.prompt_logprobs):
            scored = 0 if prompt is None else max(0, prompt - max(1, self.prompt_logprobs_start))
            found += most if prompt is None else scored * (1 + _counted(self.prompt_logprobs, vocab_size))
        return found

    def first_scored(self, start: int) -> int:
        """The first prompt position at or after `start` whose next token is scored, where prompt tokens are."""
        return max(start, self.prompt_logprobs_start - 1)

    def check_named(self) -> None:
        """Raises ParameterError where tokens are named and no log-probabilities are asked for."""
        if self.logprob_token_ids and self.logprobs is None:
            told = f"{len(self.logprob_token_ids)} token ids"
            raise ParameterError("logprob_token_ids", told, "token ids only together with logprobs")


def _counted(count: int | None, vocab_size: int) -> int:
    return vocab_size if count == WHOLE_VOCABULARY else min(count or 0, vocab_size)


def within(asked: Asked, most: int, vocab_size: int, n: int, prompt: int, answer: int) -> Asked:
    """Checks what is asked for against what a server tells, and counts the whole vocabulary.

    Args:
        asked: as the client sent it.
        most: alternatives of a token, -1 for all.
        vocab_size: logits a position.
        n: sequences.
        prompt, answer: tokens of the prompt and, at most, of each answer.

    Raises:
        ParameterError: more is asked for, of a token or of all together.
    """
    allowed = f"at most {most} here; whoever starts the server can raise it with --max-logprobs"
    counted: dict[str, Any] = {}
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(asked, name)
        if count is not None and most != WHOLE_VOCABULARY and not 0 <= count <= most:
            raise ParameterError(name, count, allowed)
        if count is not None and not 0 <= count <= vocab_size:
            counted[name] = vocab_size
    named = asked.logprob_token_ids
    if most != WHOLE_VOCABULARY and len(named) > most:
        raise ParameterError("logprob_token_ids", f"{len(named)} token ids", allowed)
    _check_told(asked, vocab_size, n, prompt, answer)
    return replace(asked, **counted) if counted else asked


def _check_told(asked: LogprobParams, vocab_size: int, n: int, prompt: int, answer: int) -> None:
    """Refuses a request for which more log-probabilities would be told than one may have.

    Args:
        asked: what is asked for.
        vocab_size: logits a position.
        n: sequences.
        prompt, answer: tokens of the prompt and, at most, of each answer.

    Raises:
        ParameterError: as said; it names the field that asks for more.
    """
    entries, most = asked.entries(vocab_size, n, prompt, answer), limits.MAX_TOLD_LOGPROBS
    if entries <= most:
        return
    of_answer = asked.entries(vocab_size, n, 0, answer)
    name = "logprobs" if of_answer > entries - of_answer else "prompt_logprobs"
    remedy = "ask for fewer, lower max_tokens" if name == "logprobs" else "ask for fewer, shorten the prompt"
    told = f"at most {most} log-probabilities in one answer, of which this would be {entries}; {remedy}"
    raise ParameterError(name, getattr(asked, name), f"{told} or name tokens (logprob_token_ids)")


def larger(one: int, other: int) -> int:
    """The larger of two numbers of alternatives."""
    return WHOLE_VOCABULARY if WHOLE_VOCABULARY in (one, other) else max(one, other)


def check_mode(mode: str, what: str) -> None:
    """Raises RequestError for what is chosen by log-probabilities, where an engine tells logits in their place."""
    if mode.endswith("logits"):
        told = f"{what} goes by log-probabilities, and this server tells {mode}; whoever starts it can leave out"
        raise RequestError(f"{told} --logprobs-mode.", code="unsupported_parameter")


def packed(ids: Iterable[int], values: Iterable[float]) -> bytes:
    """Token ids and what is told of them in 12 bytes each: int32, then float64, in the machine's byte order."""
    return array("i", ids).tobytes() + array("d", values).tobytes()


def unpacked(data: bytes) -> tuple[tuple[int, float], ...]:
    """What `packed` made: (token, value) pairs."""
    count = len(data) // 12
    ids, values = array("i"), array("d")
    ids.frombytes(data[: 4 * count])
    values.frombytes(data[4 * count :])
    return tuple(zip(ids, values, strict=True))


def is_many(count: int | None) -> bool:
    """Whether so many alternatives of a token are carried packed, and counted."""
    return count is not None and not 0 <= count <= limits.MAX_TOP_LOGPROBS
