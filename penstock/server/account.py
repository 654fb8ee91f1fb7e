"""What one HTTP request asked for and cost: told in the log, in traces and at /requests when it has ended."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

if TYPE_CHECKING:
    from penstock.config.sampling import SamplingParams

ACCOUNT: Final = "penstock.account"
"""Key of a request's account in its ASGI scope."""
OPERATIONS: Final = MappingProxyType(
    {
        **dict.fromkeys(
            ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/chat/completions"), "chat"
        ),
        "/v1/responses/compact": "chat",
        **dict.fromkeys(
            ("/v1/completions", "/api/generate", "/completion", "/completions", "/infill"), "text_completion"
        ),
        **dict.fromkeys(
            ("/v1/embeddings", "/api/embed", "/api/embeddings", "/v2/embed", "/pooling", "/embedding", "/embeddings"),
            "embeddings",
        ),
        **dict.fromkeys(
            ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/score", "/v1/score"), "rerank"
        ),
        **dict.fromkeys(("/classify", "/v1/classify"), "classify"),
    }
)
"""What is done at a path, by the names that OpenTelemetry has for it, where it has one."""


@dataclass(slots=True)
class RequestAccount:
    """One request; whoever works on it writes down what is known.

    Attributes:
        request_id: what its answer's X-Request-Id says.
        method, path: of the request; only paths that are told apart by OPERATIONS, or a route's template, are shown.
        owner: whose key it came with.
        route: the template of its route, when it has ended.
        status: of its answer; 0 before that began.
        began: when it came, seconds since the epoch; `started` the same on the monotonic clock.
        seconds: how long it took; None while it runs.
        model: the name of the model that answered.
        sampling: what was asked of it; forgotten when the request has been told.
        prompt_tokens, cached_tokens, output_tokens: of all its sequences; None where nobody knows.
        missed: how many prompts were not found whole in the prefix cache, by why.
        finished: how many sequences ended for which reason.
        queued, first_token, last_token: seconds since it came until it was admitted, and until those tokens.
        error: the code of its error.
    """

    request_id: str
    method: str
    path: str
    owner: str = ""
    route: str = ""
    status: int = 0
    began: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    model: str | None = None
    sampling: SamplingParams | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    missed: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    queued: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    error: str | None = None

    @property
    def operation(self) -> str | None:
        """What is done, by OpenTelemetry's names; None for what no model does."""
        return OPERATIONS.get(self.path) if self.method == "POST" else None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a token after the first, of all sequences together; None below two tokens."""
        tokens = self.output_tokens or 0
        if self.first_token is None or self.last_token is None or tokens < 2:
            return None
        return (self.last_token - self.first_token) / (tokens - 1)

    def told(self) -> dict[str, Any]:
        """What people and programs are told; times in seconds. What is not known is left out."""
        known: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route or self.path,
            "status": self.status or None,
            "began": round(self.began, 6),
            "seconds": self.seconds,
            "model": self.model,
        }
        if self.model is not None:
            known |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "cache_misses": dict(self.missed) or None,
                "output_tokens": self.output_tokens,
                "queue_seconds": self.queued,
                "time_to_first_token_seconds": self.first_token,
                "time_to_last_token_seconds": self.last_token,
                "time_per_output_token_seconds": self.seconds_per_token,
                "finish_reasons": dict(self.finished) or None,
            }
        known["error"] = self.error
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in known.items()}
        return {name: value for name, value in rounded.items() if value is not None}

    def line(self) -> str:
        """One line for people."""
        parts = [f"{self.method} {self.route} {self.status} in {self.seconds or 0.0:.3f} s"]
        if self.model is not None:
            found = ", ".join((f"{self.cached_tokens or 0} cached", *self.missed))
            known = f": prompt {self.prompt_tokens} ({found})"
            parts.append(self.model + (known if self.prompt_tokens is not None else ""))
        if self.output_tokens is not None:
            parts.append(f"output {self.output_tokens}")
        if self.first_token is not None:
            parts.append(f"first token {self.first_token:.3f} s")
        if (each := self.seconds_per_token) is not None:
            parts.append(f"{1e3 * each:.1f} ms a token")
        parts += [reason if count == 1 else f"{count} × {reason}" for reason, count in self.finished.items()]
        if self.error is not None:
            parts.append(self.error)
        return f"{', '.join(parts)} [{self.request_id}]"


def account_of(request: Request) -> RequestAccount:
    """The account of a request that has passed the gate."""
    account: RequestAccount = request.scope[ACCOUNT]
    return account
