"""`penstock serve -dp N`: several engines behind one server, over a real socket."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.served import Served, listening
from tests.server.support import until

FLAGS = ["--port", "0", "-dp", "2", "--threads", "2", "--max-model-len", "1024", "--kv-blocks", "400"]
SEEDS = range(4)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = listening("-m", "penstock", "serve", "penstock-concierge", *FLAGS)
    found.wait_ready()
    yield found
    assert found.stop() == 0


def body(seed: int) -> dict[str, Any]:
    said = f"I would like {seed + 2} tickets to Berkeley, please, and then a hotel."
    how = {"temperature": 1.0, "seed": seed, "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": True}
    return {"messages": [{"role": "user", "content": said}], **how}


def streamed(served: Served, seed: int, begun: threading.Event) -> str:
    """A chat's text as it was streamed, whose tokens were counted on the way."""
    text, tokens = "", 0
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body(seed), timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                tokens += len((choice["logprobs"] or {}).get("content") or ())
                if tokens > 40:
                    begun.set()
    assert tokens == 500
    return text


def all_streamed(served: Served, kill: bool = False) -> list[str]:
    found = dict[int, str]()
    begun = [threading.Event() for _ in SEEDS]

    def one(seed: int) -> None:
        found[seed] = streamed(served, seed, begun[seed])

    threads = [threading.Thread(target=one, args=(seed,)) for seed in SEEDS]
    for thread in threads:
        thread.start()
    if kill:
        assert all(event.wait(60) for event in begun)
        served.children()[0].kill()
    for thread in threads:
        thread.join(120)
    return [found[seed] for seed in SEEDS]


def series(served: Served, name: str) -> dict[str, float]:
    """A metric's values by engine."""
    told = httpx.get(f"{served.url}/metrics").text
    return {engine: float(value) for engine, value in re.findall(rf'^{name}{{engine="(\d)".*}} (.*)$', told, re.M)}


def test_streams_go_on_where_an_engine_is_killed(served: Served) -> None:
    expected = all_streamed(served)
    resumed = sum(series(served, "penstock_requests_resumed_total").values())
    assert all_streamed(served, kill=True) == expected
    assert sum(series(served, "penstock_requests_resumed_total").values()) > resumed
    until(lambda: len(served.children()) == 2)
    until(lambda: sum(series(served, "penstock_engine_restarts_total").values()) == 1)
    assert all_streamed(served) == expected


def test_every_engine_has_its_own_series(served: Served) -> None:
    all_streamed(served)
    for name in ("penstock_generation_tokens_total", "vllm:generation_tokens_total"):
        by_engine = series(served, name)
        assert set(by_engine) == {"0", "1"} and min(by_engine.values()) > 0
    assert set(series(served, "penstock_queue_seconds")) == {"0", "1"}
    until(lambda: series(served, "vllm:num_requests_running") == {"0": 0.0, "1": 0.0})


def test_all_engines_sleep_and_wake(served: Served) -> None:
    assert httpx.post(f"{served.url}/sleep", timeout=60).status_code == 200
    assert httpx.get(f"{served.url}/is_sleeping").json() == {"is_sleeping": True}
    assert served.children() == []
    assert httpx.post(f"{served.url}/wake_up", timeout=60).status_code == 200
    assert len(served.children()) == 2
    served.wait_ready()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["penstock-concierge", "--api-server-count", "2"], "there is one engine for all HTTP processes"),
        (["--models-dir", "."], "of several models each has one engine"),
        (["penstock-concierge", "--routing-policy", "luck"], "none of cost, cache-aware, session"),
        (["penstock-concierge", "--kv-disk", "1GiB"], "a folder of copies belongs to one engine"),
    ],
)
def test_what_several_engines_cannot_do_is_refused(flags: list[str], words: str) -> None:
    asked = [sys.executable, "-m", "penstock", "serve", *flags, "-dp", "2", "--port", "0"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert words in re.sub(r"[\s│]+", " ", done.stdout + done.stderr)
