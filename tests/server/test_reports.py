"""What is told of requests when they have ended: lines of the log, JSON, spans, and the list at /requests."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.config.errors import ConfigError
from penstock.config.logs import log_handler
from penstock.config.options import ServerOptions
from penstock.config.sampling import SamplingParams
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.account import RequestAccount
from penstock.server.reports import RequestReports
from penstock.server.traces import check_traces, traces_url
from tests.server.support import ANSWER, Running, running, until

CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, "temperature": 0}


@contextlib.contextmanager
def logged(form: str) -> Iterator[Callable[[], list[str]]]:
    """Gives the lines that the log has got of requests."""
    stream = io.StringIO()
    handler, logger = log_handler(stream, form), logging.getLogger("penstock.requests")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lambda: stream.getvalue().splitlines()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def ended(server: Running, count: int, **headers: str) -> list[dict[str, Any]]:
    """The last requests, when so many have ended: that is after their clients have their answers."""
    found: list[dict[str, Any]] = []

    def told() -> bool:
        found[:] = httpx.get(f"{server.url}/requests", headers=headers).json()["requests"]
        return sum("seconds" in one for one in found) >= count

    until(told)
    return found


def test_a_line_of_json_has_the_tokens_and_times_of_a_request(text: TextPipeline) -> None:
    with logged("json") as lines, running(text, ServerOptions(log_requests=True)) as server:
        whole = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
        assert whole.status_code == 200
        ended(server, 1)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True})
        ended(server, 2)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": 5}).status_code == 400
        httpx.get(f"{server.url}/livez")
        httpx.get(f"{server.url}/nowhere")
        until(lambda: len(lines()) >= 4)
    chat, stream, refused, unmatched = map(json.loads, lines())
    usage = whole.json()["usage"]
    assert chat["request_id"] == "mine" and chat["route"] == "/v1/chat/completions" and chat["status"] == 200
    assert chat["model"] == "scripted" and chat["level"] == "info" and chat["finish_reasons"] == {"length": 1}
    assert (chat["prompt_tokens"], chat["output_tokens"]) == (usage["prompt_tokens"], 5)
    assert 0 <= chat["queue_seconds"] <= chat["time_to_first_token_seconds"] <= chat["time_to_last_token_seconds"]
    assert chat["time_to_last_token_seconds"] <= chat["seconds"] and chat["time_per_output_token_seconds"] >= 0
    assert stream["output_tokens"] == 12 and stream["finish_reasons"] == {"length": 4}
    assert refused["status"] == 400 and refused["error"] == "invalid_value" and "model" not in refused
    assert unmatched["status"] == 404 and unmatched["route"] == "unmatched" and "nowhere" not in lines()[-1]


def test_a_line_for_people(text: TextPipeline) -> None:
    with logged("text") as lines, running(text, ServerOptions(log_requests=True)) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
        ended(server, 1)
    (line,) = lines()
    assert re.search(r"INFO penstock.requests: POST /v1/chat/completions 200 in \d+\.\d{3} s, ", line)
    assert "scripted: prompt " in line and "output 5" in line and line.endswith("length [mine]")


def test_nothing_is_logged_of_requests_by_default(text: TextPipeline) -> None:
    with logged("text") as lines, running(text) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
        ended(server, 1)
    assert lines() == []


def test_clients_that_leave_and_sequences_that_fail_are_told(text: TextPipeline) -> None:
    with running(text) as server:
        server.runner.delay = 0.05
        long = {"prompt": "a", "stream": True, "max_tokens": 1000, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            answer.close()
        (left,) = ended(server, 1)
        assert left["status"] == 499 and left["finish_reasons"] == {"cancelled": 1}
        server.runner.reset()
        server.runner.die_after = 2
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 500
        failed = ended(server, 2)[-1]
        assert failed["error"] == "generation_failed" and failed["finish_reasons"] == {"error": 1}


def test_owners_see_their_own_requests_and_administrators_all(text: TextPipeline) -> None:
    options = ServerOptions(api_keys=("one", "two"), admin_keys=("admin",))
    with running(text, options) as server:
        for key in ("one", "two", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers)
        assert len(ended(server, 3, Authorization="Bearer admin")) == 3
        assert len(ended(server, 1, Authorization="Bearer one")) == 1
        assert len(ended(server, 2, Authorization="Bearer two")) == 2
        assert httpx.get(f"{server.url}/requests").status_code == 401


def test_streams_that_fail_and_work_in_the_background_are_told(text: TextPipeline) -> None:
    with running(text) as server:
        server.runner.die_after = 2
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "stream": True})
        (failed,) = ended(server, 1)
        assert failed["status"] == 200 and failed["error"] == "generation_failed"
        server.runner.reset()
        httpx.post(f"{server.url}/v1/responses", json={"input": "Hello", "background": True, "max_output_tokens": 5})
        found = ended(server, 3)[1:]
        (done,) = [one for one in found if one["request_id"].startswith("resp_")]
        (asked,) = [one for one in found if one is not done]
        assert "output_tokens" not in asked and "model" not in asked
        assert done["output_tokens"] == 5 and done["model"] == "scripted"


def test_embeddings_are_told_with_what_was_cached(text: TextPipeline) -> None:
    with running(text) as server:
        httpx.post(f"{server.url}/v1/embeddings", json={"input": "Hello"})
        (told,) = ended(server, 1)
        assert told["prompt_tokens"] > 0 and "cached_tokens" in told and "output_tokens" not in told


def test_what_is_remembered_is_bounded_for_each_owner(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("one", "two"))) as server, httpx.Client(base_url=server.url) as client:
        own, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        client.post("/v1/completions", json={"prompt": 5}, headers=own)
        for _ in range(210):
            client.post("/v1/completions", json={"prompt": 5}, headers=other)
            client.post("/v1/completions", json={"prompt": 5}, headers={"Authorization": "Bearer nobody"})
        assert len(ended(server, 200, **other)) == 200
        assert len(ended(server, 1, **own)) == 1


def test_lists_of_a_request_are_not_kept_with_it() -> None:
    reports = RequestReports()
    account = RequestAccount("a", "POST", "/v1/completions", sampling=SamplingParams(allowed_token_ids=(1, 2)))
    reports.begin(account)
    reports.end(account)
    assert account.sampling is None and len(reports.recent("")) == 1


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector that takes spans over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/traces"
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
            self.server.services |= {
                pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
            }
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_spans_reach_a_collector_below_their_clients(text: TextPipeline, collector: Collector) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with running(text, ServerOptions(otlp_traces_endpoint=collector.url)) as server:
        headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "mine"}
        httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": 5}, headers={"traceparent": "nonsense"})
        httpx.get(f"{server.url}/livez")
        ended(server, 2)
    until(lambda: len(collector.spans) >= 5)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"chat scripted", "queue", "prefill", "decode", "text_completion"}
    assert collector.services == {"penstock"}
    chat = spans["chat scripted"]
    assert (chat.trace_id.hex(), chat.parent_span_id.hex()) == (trace, parent)
    for phase in ("queue", "prefill", "decode"):
        assert spans[phase].parent_span_id == chat.span_id
        assert chat.start_time_unix_nano <= spans[phase].start_time_unix_nano <= spans[phase].end_time_unix_nano
        assert spans[phase].end_time_unix_nano <= chat.end_time_unix_nano
    found = _attributes(chat)
    assert found["gen_ai.request.id"] == "mine" and found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.max_tokens"] == 5 and found["gen_ai.request.temperature"] == 0
    assert found["gen_ai.usage.output_tokens"] == found["gen_ai.usage.completion_tokens"] == 5
    assert found["gen_ai.response.model"] == "scripted" and found["http.response.status_code"] == 200
    assert found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    refused = spans["text_completion"]
    assert refused.trace_id.hex() != trace and not refused.parent_span_id
    assert _attributes(refused)["error.type"] == "invalid_value"


def test_a_collector_that_is_away_stops_nothing(text: TextPipeline) -> None:
    with socket.socket() as away:
        away.bind(("127.0.0.1", 0))  # which does not listen
        url = f"http://127.0.0.1:{away.getsockname()[1]}"
        with running(text, ServerOptions(otlp_traces_endpoint=url)) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "max_tokens": 100}).json()
            assert answer["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/", "https://collector.example/v1/traces"),
        ("http://collector.example/api/traces", "http://collector.example/api/traces"),
    ],
)
def test_where_spans_go(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://x", "", "http://a b", "http://name:pass@host"])
def test_what_is_no_collector_is_refused_before_the_start(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint is .*allowed: a web address"):
        check_traces(endpoint)
