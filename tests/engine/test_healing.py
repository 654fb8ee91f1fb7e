"""Prompts whose last token is drawn anew: to the bit the answers to the shorter prompt, held to what begins so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM
from penstock.config.errors import RequestError
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.tokenizer import Tokenizer

PROMPTS = ("A table for tw", "What time do you op", "Hello the", "My name is J", "Tea, ple")
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 3, "n": 3, "logprobs": 2},
    {"seed": 4, "temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.2, "num_speculative_tokens": 0},
    {"seed": 5, "banned_strings": ("inion", "ff")},
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TextPipeline.load("penstock-concierge").tokenizer


def test_answers_are_those_of_the_first_token_held_by_its_ids(llm: LLM, tokenizer: Tokenizer) -> None:
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        begins = tokenizer.token_bytes(ids[-1])
        may = [
            token
            for token in range(tokenizer.vocab_size)
            if token not in tokenizer.special_ids and tokenizer.token_bytes(token).startswith(begins)
        ]
        assert ids[-1] in may
        for options in SAMPLED:
            found = llm.generate(prompt, max_tokens=8, token_healing=True, **options)[0]
            held = llm.generate(ids[:-1], max_tokens=1, allowed_token_ids=may, **options)[0]
            assert list(found.prompt_ids) == ids[:-1]
            for answer, first in zip(found.outputs, held.outputs, strict=True):
                assert answer.token_ids[:1] == first.token_ids
                whole = b"".join(map(tokenizer.token_bytes, answer.token_ids)).decode("utf-8", "replace")
                assert whole.startswith(begins.decode() + answer.text)


def test_the_rest_of_the_answer_is_what_follows_its_beginning(llm: LLM, tokenizer: Tokenizer) -> None:
    for prompt in PROMPTS:
        found = llm.generate(prompt, max_tokens=8, temperature=0, token_healing=True)[0]
        first, *rest = found.outputs[0].token_ids
        if not rest:
            continue
        ids = [*found.prompt_ids, first]
        assert llm.generate(ids, max_tokens=len(rest), temperature=0)[0].outputs[0].token_ids == tuple(rest)


def test_beginnings_of_words_are_healed_and_whole_words_may_stay(llm: LLM) -> None:
    plain = llm.generate("What time do you op", max_tokens=6, temperature=0)[0].outputs[0].text
    healed = llm.generate("What time do you op", max_tokens=6, temperature=0, token_healing=True)[0].outputs[0].text
    assert healed != plain
    assert llm.generate("A", max_tokens=4, temperature=0, token_healing=True)[0].prompt_ids


@pytest.mark.parametrize("held", [{"regex": "[a-z]+"}, {"choice": ["a", "b"]}])
def test_what_holds_the_whole_answer_is_refused(llm: LLM, held: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="token_healing goes with no grammar"):
        llm.generate("A table for tw", max_tokens=4, token_healing=True, **held)
    assert llm.generate("A table for tw", max_tokens=1, token_healing=True)[0].outputs
