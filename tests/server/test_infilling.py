"""Completions with a suffix, over a vocabulary that has the tokens for filling in the middle, and one that has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from penstock.config import limits
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.tokenizer import Tokenizer
from penstock.weights.readers.gguf_file import read_gguf_file
from tests.server.support import Running, running

PREFIX, SUFFIX, MIDDLE, PAD = 1, 3, 2, 4  # of StarCoder's vocabulary
ASKED: dict[str, Any] = {"model": "scripted", "prompt": "def f(", "suffix": "):", "max_tokens": 3}


@pytest.fixture(scope="module")
def coder(text: TextPipeline, shared_data: Path) -> Iterator[Running]:
    file = read_gguf_file(shared_data / "tokenizers" / "ggml-vocab-starcoder.gguf")
    tokenizer = Tokenizer.from_gguf(file.metadata)
    with running(replace(text, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=(0,))) as server:
        yield server


@pytest.fixture
def api(coder: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{coder.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def rendered(server: Running, **fields: Any) -> list[dict[str, Any]]:
    answer = httpx.post(f"{server.url}/v1/completions/render", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_answer_stands_between_prompt_and_suffix(api: openai.OpenAI, coder: Running) -> None:
    answer = api.completions.create(**ASKED, stop=["\n"], extra_body={"return_token_ids": True})
    ids = answer.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert [token for token in ids if token in (PREFIX, SUFFIX, MIDDLE)] == [PREFIX, SUFFIX, MIDDLE]
    assert ids[0] == PREFIX and ids[-1] == MIDDLE
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
    assert PAD in coder.runner.seen[-1].sampling.stop_token_ids  # ends what is filled in
    parts = list(api.completions.create(**ASKED, stream=True))
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_each_of_several_prompts_has_the_suffix(coder: Running) -> None:
    first, second = rendered(coder, prompt=["def f(", "def g("])
    assert first["prompt"] == "<fim_prefix>def f(<fim_suffix>):<fim_middle>"
    assert second["prompt"] == "<fim_prefix>def g(<fim_suffix>):<fim_middle>"
    assert rendered(coder, suffix="")[0]["prompt"] == "def f("


def test_marks_in_the_texts_are_text(coder: Running) -> None:
    (told,) = rendered(coder, prompt="<fim_middle>", suffix="<fim_suffix>")
    assert [token for token in told["token_ids"] if token in (PREFIX, SUFFIX, MIDDLE)] == [PREFIX, SUFFIX, MIDDLE]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": [5, 6]}, "prompt", "a text, or texts, together with suffix"),
        ({"echo": True}, "echo", "only without suffix"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "only without suffix"),
        ({"suffix": "a b " * 2000}, "prompt", "this model's context"),
        ({"prompt": ["a"] * 100, "suffix": "a" * (limits.MAX_SHARED_WORK // 100 + 1)}, "suffix", "with 100 prompts"),
    ],
)
def test_refusals(coder: Running, fields: dict[str, Any], param: str, said: str) -> None:
    answer = httpx.post(f"{coder.url}/v1/completions", json={**ASKED, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


def test_a_model_without_the_tokens_says_so(server: Running) -> None:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with api, pytest.raises(openai.BadRequestError, match="no prefix, suffix, middle token for filling in") as refused:
        api.completions.create(**ASKED)
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported_parameter")
    assert not server.runner.seen


def test_ollama_fills_in_too(coder: Running) -> None:
    before = len(coder.runner.seen)
    answer = ollama.Client(coder.url).generate("scripted", "def f(", suffix="):", options={"num_predict": 3})
    assert answer.response
    (seen,) = coder.runner.seen[before:]
    assert PAD in seen.sampling.stop_token_ids
    (told,) = rendered(coder)
    assert answer.prompt_eval_count == len(told["token_ids"])
