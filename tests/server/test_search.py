"""Beam search and the best of several answers, over HTTP and a real engine."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import LLM, BeamParams, SamplingParams
from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from tests.server.support import Serving, serving, until

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> str:
    return str(shared_data / "models" / "stories260K" / "hf")


@pytest.fixture(scope="module")
def stories(folder: str) -> Iterator[Serving]:
    """A server over a small trained model."""
    from penstock.engine.build import build_engine

    options = EngineOptions(folder, threads=1, dtype="float32", kv_blocks=600, max_model_len=256)
    client = ThreadClient(functools.partial(build_engine, options, None))
    with serving(client, TextPipeline.load(folder)) as server:
        until(lambda: client.state is EngineState.READY)
        yield server


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, threads=1, dtype="float32", kv_blocks=600, max_model_len=256) as made:
        yield made


def ask(server: Serving, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, **fields}, timeout=60)
    answer: dict[str, Any] = response.json()
    assert response.status_code == 200, answer
    return answer


def test_beams_are_the_choices_best_first(stories: Serving, llm: LLM) -> None:
    answer = ask(stories, use_beam_search=True, n=3, best_of=4, max_tokens=12, length_penalty=0.7, logprobs=2)
    (expected,) = llm.beam_search(PROMPT, BeamParams(4, 3, 12, 0.7))
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in expected.outputs]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert totals == sorted(totals, reverse=True)
    assert all(len(top) == 2 for choice in answer["choices"] for top in choice["logprobs"]["top_logprobs"])
    assert answer["usage"]["completion_tokens"] == 36
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=0))[0].outputs[0]
    assert totals[0] >= sum(entry.logprob for entry in greedy.logprobs)


def test_a_stream_has_the_same_text(stories: Serving) -> None:
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 8}
    whole = ask(stories, **fields)
    texts = ["", ""]
    body = {"prompt": PROMPT, "stream": True, **fields}
    with httpx.stream("POST", f"{stories.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_a_stop_string_cuts_a_beam(stories: Serving) -> None:
    plain = ask(stories, use_beam_search=True, max_tokens=12)["choices"][0]["text"]
    cut = ask(stories, use_beam_search=True, max_tokens=12, stop=plain[9:12])["choices"][0]
    assert cut["text"] == plain[: plain.index(plain[9:12])]
    assert cut["finish_reason"] == "stop"


def test_the_best_of_several_sequences_is_given(stories: Serving, llm: LLM) -> None:
    fields = {"max_tokens": 10, "temperature": 1.3, "seed": 7}
    answer = ask(stories, n=2, best_of=6, logprobs=0, **fields)
    every = llm.generate(PROMPT, n=6, logprobs=0, **fields)[0].outputs
    means = [(sum(e.logprob for e in o.logprobs) / len(o.logprobs), o.text) for o in every]
    best = [text for _, text in sorted(means, key=lambda pair: -pair[0])]
    assert len(set(best)) > 3
    assert best != [o.text for o in every]
    assert [choice["text"] for choice in answer["choices"]] == best[:2]
    assert ask(stories, best_of=3, **fields)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "n": 21}, "n"),
        ({"use_beam_search": True, "best_of": 21}, "best_of"),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "Once " * 300}, "prompt"),
        ({"prompt": "Once " * 60, "max_tokens": 200}, "max_tokens"),
        ({"use_beam_search": True, "presence_penalty": 1.0}, "presence_penalty"),
        ({"use_beam_search": True, "logit_bias": {"5": 3}}, "logit_bias"),
        ({"use_beam_search": True, "length_penalty": 99}, "length_penalty"),
        ({"use_beam_search": True, "max_tokens": 999}, "max_tokens"),
        ({"best_of": 10**9}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
    ],
)
def test_refusals_name_the_field(stories: Serving, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{stories.url}/v1/completions", json={"prompt": PROMPT, **fields}, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
