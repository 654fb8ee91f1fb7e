"""Guidance by a negative prompt, by the names that each dialect's clients send; the bundled model, over a socket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock import LLM
from tests.server.support import Serving

PROMPT, NEGATIVE, SCALE, TOKENS = "A table for two, please.", "The train leaves at nine.", 3.0, 24


@pytest.fixture(scope="module")
def truth() -> dict[float, str]:
    """By scale, what `penstock.LLM` says."""
    with LLM(threads=1) as llm:
        return {
            scale: llm.generate(
                PROMPT, max_tokens=TOKENS, temperature=0.0, guidance_scale=scale, negative_prompt=NEGATIVE
            )[0].outputs[0].text
            for scale in (1.0, SCALE)
        }  # fmt: skip


def said(server: Serving, path: str, **fields: Any) -> str:
    answer = httpx.post(server.url + path, json={"prompt": PROMPT, "temperature": 0, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    for name in ("choices", "results"):
        if name in body:
            return str(body[name][0]["text"])
    return str(body["content"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"max_tokens": TOKENS, "guidance_scale": SCALE, "negative_prompt": NEGATIVE}),
        ("/v1/completions", {"max_tokens": TOKENS, "cfg_scale": SCALE, "negative_prompt": NEGATIVE}),
        ("/v1/completions", {"max_tokens": TOKENS, "cfg_scale": SCALE, "cfg_negative_prompt": NEGATIVE}),
        ("/completion", {"n_predict": TOKENS, "guidance_scale": SCALE, "negative_prompt": NEGATIVE}),
        ("/api/v1/generate", {"max_length": TOKENS, "guidance_scale": SCALE, "negative_prompt": NEGATIVE}),
    ],
)
def test_the_same_answer_under_every_name(
    concierge: Serving, truth: dict[float, str], path: str, fields: dict[str, Any]
) -> None:
    assert truth[SCALE] != truth[1.0]
    assert said(concierge, path, **fields) == truth[SCALE]


def test_a_scale_of_one_does_nothing(concierge: Serving, truth: dict[float, str]) -> None:
    for fields in ({"guidance_scale": 1, "negative_prompt": NEGATIVE}, {"negative_prompt": NEGATIVE}, {"cfg_scale": 1}):
        assert said(concierge, "/v1/completions", max_tokens=TOKENS, **fields) == truth[1.0]


def test_chats_grammars_stops_and_several_answers(concierge: Serving) -> None:
    def chat(**fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "seed": 5, **fields}
        answer = httpx.post(f"{concierge.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    guided = {"guidance_scale": SCALE, "negative_prompt": NEGATIVE}
    whole = chat(n=2, logprobs=True, **guided)
    assert whole["choices"] == chat(n=2, logprobs=True, **guided)["choices"]
    assert whole["usage"]["prompt_tokens"] == chat()["usage"]["prompt_tokens"]
    assert all(len(choice["logprobs"]["content"]) for choice in whole["choices"])
    held = chat(structured_outputs={"choice": ["maybe", "never"]}, **guided)
    assert held["choices"][0]["message"]["content"] in ("maybe", "never")
    text = chat(temperature=0, **guided)["choices"][0]["message"]["content"]
    word = text.split()[1]
    banned = chat(temperature=0, banned_strings=[word], **guided)["choices"][0]["message"]["content"]
    assert word in text and word.lower() not in banned.lower()
    cut = chat(temperature=0, stop=[word], **guided)["choices"][0]
    assert cut["message"]["content"] == text[: text.index(word)] and cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale": 2, "cfg_scale": 3}, "cfg_scale"),
        ({"guidance_scale": 2, "negative_prompt": "long " * 4000}, "negative_prompt"),
        ({"guidance_scale": 2, "use_beam_search": True, "n": 2}, "guidance_scale"),
    ],
)
def test_what_cannot_be_is_refused_by_name(concierge: Serving, fields: dict[str, Any], param: str) -> None:
    content, kind = json.dumps({"prompt": PROMPT, "max_tokens": 4, **fields}), {"Content-Type": "application/json"}
    answer = httpx.post(f"{concierge.url}/v1/completions", content=content, headers=kind)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_other_dialects_refuse_it(concierge: Serving) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    for path, body in (
        ("/v1/messages", {"messages": messages, "max_tokens": 4, "model": "m"}),
        ("/v1/responses", {"input": PROMPT}),
        ("/generate", {"text": PROMPT, "sampling_params": {"guidance_scale": 2.0}}),
    ):
        wrong = body if "sampling_params" in body else {**body, "guidance_scale": 2.0}
        answer = httpx.post(concierge.url + path, json=wrong)
        assert answer.status_code in (400, 422) and "guidance_scale" in answer.text, (path, answer.text)
