"""Log-probabilities in the object that OpenAI's dialects and Ollama share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.config.logprobs import WHOLE_VOCABULARY, unpacked
from penstock.core.protocol import TokenLogprobs

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

LEAST_LOGPROB: Final = -9999.0  # JSON has no -Infinity


def said(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, LEAST_LOGPROB)


def alternatives(entry: TokenLogprobs, most: int) -> Sequence[tuple[int, float]]:
    """(token, logprob) of at most so many alternatives, of all with -1."""
    top = unpacked(entry.packed) if entry.packed else entry.top
    return top if most == WHOLE_VOCABULARY else top[:most]


def ranked_by_id(frontend: Frontend, entry: TokenLogprobs, most: int) -> dict[str, Any]:
    """vLLM's object: a token and its alternatives by their ids, each with log-probability, rank and text."""
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(alternatives(entry, most), 1)]
    return {
        str(token): {"logprob": said(logprob), "rank": rank, "decoded_token": frontend.piece(token)}
        for token, logprob, rank in ((entry.token, entry.logprob, entry.rank), *ranked)
    }


def logprob_object(
    frontend: Frontend, entry: TokenLogprobs, most: int, named: Callable[[int], str] | None = None
) -> dict[str, Any]:
    """A token with its text, bytes and log-probability, and the same of at most so many alternatives, of all with -1.

    `named` gives what a token is called, where that is not its text.
    """
    piece = named or frontend.piece

    def described(token: int, logprob: float) -> dict[str, Any]:
        raw = list(frontend.token_bytes(token))
        return {"token": piece(token), "bytes": raw, "logprob": said(logprob)}

    top = [described(token, logprob) for token, logprob in alternatives(entry, most)]
    return {**described(entry.token, entry.logprob), "top_logprobs": top}
