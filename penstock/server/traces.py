"""A span for each request, sent to an OpenTelemetry collector (the extra `otel`).

Names follow OpenTelemetry's conventions for generative AI; beside them stand those that vLLM uses.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from penstock import __version__
from penstock.config.errors import ConfigError, quoted

if TYPE_CHECKING:
    from penstock.server.account import RequestAccount

_FLAG = "--otlp-traces-endpoint"
_SEND_S: Final = 5  # for one attempt to send, and for the last one
_URL = re.compile(r"https?://[^\s/@?#]+(/[^\s?#]*)?")
# Sampling parameters that are attributes behind "gen_ai.request.".
_ASKED: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "frequency_penalty", "presence_penalty")
_MOST: Final = 2**63 - 1  # that an attribute can be


def traces_url(endpoint: str) -> str:
    """Where spans are sent: OTLP over HTTP, at /v1/traces unless a path is given.

    Raises:
        ConfigError: no web address.
    """
    if _URL.fullmatch(endpoint) is None:
        allowed = "a web address such as http://127.0.0.1:4318, without a name and password"
        raise ConfigError(f"{_FLAG} is {quoted(endpoint.rpartition('@')[2])}; allowed: {allowed}.")
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def check_traces(endpoint: str) -> None:
    """Raises ConfigError where nothing could be sent: no web address, or the packages are not installed."""
    traces_url(endpoint)
    try:
        found = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:  # of what lies above them
        found = None
    if found is None:
        raise ConfigError(f"{_FLAG} needs OpenTelemetry; install it: pip install 'penstock-llm[otel]'.")


class RequestTraces:
    """Makes spans of requests that have ended, and sends them from a thread of its own, many together."""

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError: no web address, or the packages are not installed."""
        check_traces(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = traces_url(endpoint)
        self._provider = TracerProvider(resource=Resource.create({"service.version": __version__} | _service()))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_SEND_S)))
        self._tracer = self._provider.get_tracer("penstock", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def tell(self, account: RequestAccount, headers: Mapping[str, str]) -> None:
        """A span of a request, below the one that its `traceparent` header names; its phases are spans below it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        began, end = account.began, account.began + (account.seconds or 0.0)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        name = f"{account.operation} {account.model}" if account.model else str(account.operation)
        span = self._tracer.start_span(
            name,
            self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes_of(account),
            start_time=_nanoseconds(began),
        )
        if account.status >= 500 or "error" in account.finished:
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for phase, first, last in _phases(account):
            inner = self._tracer.start_span(phase, below, start_time=_nanoseconds(began + first))
            inner.end(_nanoseconds(began + last))
        span.end(_nanoseconds(end))

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True, name="penstock-traces")
        last.start()
        last.join(_SEND_S)


def _service() -> dict[str, str]:
    """The service's name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES give one."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector

    return {} if SERVICE_NAME in OTELResourceDetector().detect().attributes else {SERVICE_NAME: "penstock"}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _phases(account: RequestAccount) -> list[tuple[str, float, float]]:
    """(phase, its begin, its end) of a request whose tokens came, in seconds since it came."""
    first, last = account.first_token, account.last_token
    if account.queued is None or first is None or last is None:
        return []
    admitted = min(account.queued, first)
    return [("queue", 0.0, admitted), ("prefill", admitted, first), ("decode", first, last)]


def attributes_of(account: RequestAccount) -> dict[str, Any]:
    """The attributes of a request's span."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": account.operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.id": account.request_id,
        "gen_ai.request.model": account.model,
        "gen_ai.response.model": account.model,
        "gen_ai.latency.e2e": account.seconds,
        "http.request.method": account.method,
        "http.route": account.route,
        "http.response.status_code": account.status,
        "error.type": account.error or (str(account.status) if account.status >= 400 else None),
    }
    if account.sampling is not None:
        asked = {field.name: getattr(account.sampling, field.name) for field in fields(account.sampling)}
        found |= {f"gen_ai.request.{name}": asked[name] or None for name in _ASKED}
        found["gen_ai.request.temperature"] = account.sampling.temperature  # of which 0 says something
        found["gen_ai.request.choice.count"] = account.sampling.n
    if account.prompt_tokens is not None:
        found |= {
            "gen_ai.usage.input_tokens": account.prompt_tokens,
            "gen_ai.usage.output_tokens": account.output_tokens,
            "gen_ai.usage.prompt_tokens": account.prompt_tokens,
            "gen_ai.usage.completion_tokens": account.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": account.cached_tokens,
            "gen_ai.usage.num_sequences": account.finished.total(),
            "gen_ai.response.finish_reasons": list(account.finished),
        }
    lasted = {name: last - first for name, first, last in _phases(account)}
    if lasted:
        found |= {
            "gen_ai.latency.time_in_queue": lasted["queue"],
            "gen_ai.latency.time_to_first_token": account.first_token,
            "gen_ai.latency.time_in_model_prefill": lasted["prefill"],
            "gen_ai.latency.time_in_model_decode": lasted["decode"],
            "gen_ai.latency.time_in_model_inference": lasted["prefill"] + lasted["decode"],
        }
    return {
        name: value
        for name, value in found.items()
        if value is not None and not (isinstance(value, int) and value > _MOST)
    }
