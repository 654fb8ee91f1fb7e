"""`serve` as people run it: its own process, the engine in another, the bundled model, real signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.server.served import SCRIPT, Served, start
from tests.server.support import until

LONG = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True, "seed": 3}
HELLO = [{"role": "user", "content": "Hello! I want to book a table for two."}]


@pytest.fixture(scope="module")
def served(shared_data: Path) -> Iterator[Served]:
    served = start()
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def stream_in_background(served: Served) -> tuple[threading.Thread, list[str]]:
    events: list[str] = []

    def work() -> None:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG, timeout=60) as answer:
            assert answer.status_code == 200
            events.extend(line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, events


def gauge(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics").text
    return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)))


def test_it_listens_while_it_loads_and_says_where(served: Served) -> None:
    assert httpx.get(f"{served.url}/livez").status_code == 200
    first = httpx.post(f"{served.url}/v1/completions", json={"prompt": "Hello"})
    assert first.status_code in (200, 503)
    served.wait_ready()
    until(lambda: any("curl" in line for line in served.lines))
    assert any(f"{served.url}/v1/chat/completions" in line for line in served.lines)


def test_the_bundled_model_answers(served: Served) -> None:
    served.wait_ready()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
        asked = {"model": "penstock-concierge", "messages": HELLO, "temperature": 0, "max_tokens": 40}
        whole = api.chat.completions.create(**asked)
        pieces = [chunk.choices[0].delta.content or "" for chunk in api.chat.completions.create(**asked, stream=True)]
        again = api.chat.completions.create(**asked)
        assert whole.choices[0].message.content == "".join(pieces)
        assert len("".join(pieces)) > 10
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        scored = api.completions.create(
            model="penstock-concierge", prompt="Good morning", max_tokens=0, echo=True, logprobs=2
        )
        logprobs = scored.choices[0].logprobs
        assert "".join(logprobs.tokens) == "Good morning"
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_what_curl_line_says_works(served: Served) -> None:
    served.wait_ready()
    line = next(line for line in served.lines if "curl" in line)
    body = json.loads(line[line.index("-d '") + 4 : -1])
    assert httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_leavers_free_the_engine(served: Served) -> None:
    served.wait_ready()
    for _ in range(4):
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG) as answer:
            next(answer.iter_lines())
    cancelled = 'penstock_requests_finished_total{finished_reason="cancelled"'
    until(lambda: gauge(served, cancelled) == 4)
    until(lambda: gauge(served, "penstock_requests_running") == 0)
    until(lambda: gauge(served, "penstock_kv_cache_usage_ratio") == 0)


def test_streams_outlive_a_killed_engine(served: Served) -> None:
    served.wait_ready()
    undisturbed = stream_in_background(served)
    undisturbed[0].join(60)
    streams = [stream_in_background(served) for _ in range(4)]
    until(lambda: all(events for _, events in streams))
    for child in served.children():
        child.kill()
    for thread, _ in streams:
        thread.join(90)
    for _, events in streams:
        assert events[-1] == "[DONE]"
        assert "".join(map(text_of, events)) == "".join(map(text_of, undisturbed[1]))
    assert gauge(served, "penstock_engine_restarts_total") == 1
    assert 1 <= gauge(served, "penstock_requests_resumed_total") <= 4
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 3}, timeout=60)
    assert answer.status_code == 200


def text_of(event: str) -> str:
    """The text that an event of a stream brings."""
    return str(json.loads(event)["choices"][0]["text"]) if event.startswith("{") else ""


def test_sigterm_lets_streams_finish_and_leaves_nothing_behind(served: Served) -> None:
    served.wait_ready()
    children = served.children()
    assert children
    streams = [stream_in_background(served) for _ in range(2)]
    until(lambda: all(events for _, events in streams))
    for child in children:
        child.suspend()  # no stream ends before it has been seen that the server waits for them
    served.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{served.url}/readyz").json() == {"status": "draining"})
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "Hello"})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    for child in children:
        child.resume()
    for thread, _ in streams:
        thread.join(60)
    assert served.process.wait(60) == 0
    for _, events in streams:
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert psutil.wait_procs(children, 60)[1] == []
    until(lambda: served.lines[-1] in ("True", "False"))
    assert served.lines[-1] == "False", "the HTTP process loaded torch"


def test_a_second_signal_ends_streams_at_once(shared_data: Path) -> None:
    served = start()
    try:
        served.wait_ready()
        children = served.children()
        stream = stream_in_background(served)
        until(lambda: bool(stream[1]))
        served.process.send_signal(signal.SIGINT)
        until(lambda: httpx.get(f"{served.url}/readyz").status_code == 503)
        assert served.stop() == 0
        stream[0].join(60)
        assert json.loads(stream[1][-1])["error"]["code"] == "shutting_down"
        assert psutil.wait_procs(children, 60)[1] == []
    finally:
        served.process.kill()
        served.process.wait()


def test_a_signal_while_loading_ends_it(shared_data: Path) -> None:
    served = start()
    children = served.children()
    assert served.stop() == 0
    assert psutil.wait_procs(children, 60)[1] == []


def test_a_model_that_is_not_there_is_an_error_with_its_reason(tmp_path: Path) -> None:
    script = SCRIPT.format(drain=1, max_model_len=1024)
    script = script.replace("threads=1", f"model={str(tmp_path / 'none')!r}, threads=1")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr.splitlines()[-1]
