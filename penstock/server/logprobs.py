"""Log-probabilities in the object that OpenAI's dialects and Ollama share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.core.protocol import TokenLogprobs

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

LEAST_LOGPROB: Final = -9999.0  # JSON has no -Infinity


def logprob_object(frontend: Frontend, entry: TokenLogprobs, most: int) -> dict[str, Any]:
    """A token with its text, bytes and log-probability, and the same of at most so many alternatives."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        raw = list(frontend.token_bytes(token))
        return {"token": frontend.piece(token), "bytes": raw, "logprob": max(logprob, LEAST_LOGPROB)}

    top = [described(token, logprob) for token, logprob in entry.top[:most]]
    return {**described(entry.token, entry.logprob), "top_logprobs": top}
