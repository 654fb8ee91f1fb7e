"""Log-probabilities in the object that OpenAI's dialects and Ollama share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.core.protocol import TokenLogprobs

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

LEAST_LOGPROB: Final = -9999.0  # JSON has no -Infinity


def said(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LEAST_LOGPROB)


def logprob_object(
    frontend: Frontend, entry: TokenLogprobs, most: int, named: Callable[[int], str] | None = None
) -> dict[str, Any]:
    """A token with its text, bytes and log-probability, and the same of at most so many alternatives.

    `named` gives what a token is called, where that is not its text.
    """
    piece = named or frontend.piece

    def described(token: int, logprob: float) -> dict[str, Any]:
        raw = list(frontend.token_bytes(token))
        return {"token": piece(token), "bytes": raw, "logprob": said(logprob)}

    top = [described(token, logprob) for token, logprob in entry.top[:most]]
    return {**described(entry.token, entry.logprob), "top_logprobs": top}
