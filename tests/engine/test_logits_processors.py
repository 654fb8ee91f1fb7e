"""Logits processors by name: exact in company, with drafts, hits and preemption; a failure is one request's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.config.errors import ConfigError, ParameterError
from penstock.config.logits_processors import ProcessorCall
from penstock.core.request import EngineRequest
from tests.engine import processors
from tests.engine.test_drafts import Rehearsed, again, check, made, run
from tests.engine.test_samplers import asked
from tests.models import tiny

KINDS: tuple[dict[str, Any], ...] = (
    {"logits_processors": ["history"], "temperature": 0.0, "logprobs": 2},
    {"logits_processors": [{"name": "history", "kwargs": {"strength": 6}}, "Odd"], "temperature": 1.0, "logprobs": 0},
    {"logits_processors": [{"name": "Odd", "args": [3]}], "top_p": 0.9, "repetition_penalty": 1.2, "n": 2},
    {"temperature": 0.8, "logprobs": 1},
    {"logits_processors": ["history"], "mirostat": 2, "dry_multiplier": 0.5},
    {"temperature": 0.0},
)
BIASES = {"3": 2.5, "7": -100.0, "40": 1.25, "88": 4.0}


def test_random_lives(tmp_path: Path) -> None:
    """Alone, together, with right, mixed and wrong drafts, preempted, cancelled, with hits: the same to the bit."""
    tiny.save("llama", tmp_path)
    options = {"logits_processors": processors.ALL}
    plain = made(tmp_path, **options)
    truth = {}
    for request in asked(KINDS, speculate=False):
        truth |= run(plain, request)
    assert run(plain, *asked(KINDS, speculate=False)) == truth
    plain.close()
    bare = made(tmp_path)
    without = [
        EngineRequest("r0", asked(KINDS, speculate=False)[0].prompt_ids, SamplingParams(temperature=0, max_tokens=24))
    ]
    assert run(bare, *without)["r0", 0].tokens != truth["r0", 0].tokens
    bare.close()
    odd = [asked(KINDS, speculate=False)[1].prompt_ids[-1], *truth["r1", 0].tokens]
    assert all(a % 2 != b % 2 for a, b in itertools.pairwise(odd))
    known = {key: answer.tokens for key, answer in truth.items()}
    for number, right in enumerate((8, 6, 0)):
        more = {"max_chunk_tokens": (64, 7, 16)[number], "kv_blocks": 60, **options}
        engine = made(tmp_path, Rehearsed(known, right), **more)
        for turn in range(3):
            check(run(engine, *again(asked(KINDS, speculate=False), turn), dice=random.Random(f"{right}{turn}")), truth)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.drafted_tokens > 60 and stats.prefix_hits > 0
        assert (stats.accepted_tokens > 60) == (right > 0)
        engine.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "processed_logits"])
def test_a_processor_that_biases_is_logit_bias(tmp_path: Path, mode: str, depth: int) -> None:
    """Tokens, log-probabilities and ranks are to the bit those of the field that does the same."""
    tiny.save("llama", tmp_path)
    engine = made(tmp_path, logits_processors=processors.ALL, logprobs_mode=mode, depth=depth)
    call = [{"qualname": "bias", "args": [BIASES]}]
    for seed, options in enumerate(({"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02, "tfs": 0.9})):
        found = []
        for how in ({"logit_bias": {int(t): v for t, v in BIASES.items()}}, {"logits_processors": call}, {}):
            params = SamplingParams(max_tokens=30, logprobs=5, **options, **how)  # type: ignore[arg-type]
            found.append(run(engine, EngineRequest("r", tuple(tiny.prompt(13)), params, seed=seed)))
        assert found[0] == found[1] != found[2]
    engine.close()


def failures(engine: Any, *requests: EngineRequest) -> dict[str, str | None]:
    for request in requests:
        engine.add(request)
    told: dict[str, str | None] = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                told[output.request_id] = output.error
        engine.scheduler.check_integrity()
    return told


@pytest.mark.parametrize("drafted", [False, True])
def test_a_failure_ends_its_own_request_alone(tmp_path: Path, drafted: bool) -> None:
    tiny.save("llama", tmp_path)
    truth = {}
    calls: dict[str, list[Any]] = {
        "none": [],
        "first": ["failing"],
        "later": ["history", {"name": "failing", "kwargs": {"after": 3}}],
        "short": [{"name": "wrong", "args": ["short"]}],
        "text": [{"name": "wrong", "args": ["text"]}],
        "nan": [{"name": "wrong", "args": ["nan"]}],
        "inf": [{"name": "wrong", "args": ["inf"]}],
        "arguments": [{"name": "bias", "kwargs": {"other": 1}}],
        "made": [{"name": "Odd", "args": [0]}],
        "good": ["history"],
    }
    engine = made(tmp_path, logits_processors=processors.ALL)
    requests = [
        EngineRequest(name, tuple(tiny.prompt(9)), SamplingParams(max_tokens=8, logits_processors=call), seed=1)
        for name, call in calls.items()
    ]
    for name in ("none", "good"):
        truth |= run(engine, next(one for one in requests if one.request_id == name))
    if drafted:
        engine.close()
        known = {key: answer.tokens for key, answer in truth.items()} | {
            (name, 0): truth["good", 0].tokens for name in calls if name not in ("none", "good")
        }
        engine = made(tmp_path, Rehearsed(known, 8), logits_processors=processors.ALL)
        requests = [
            EngineRequest(one.request_id, one.prompt_ids, one.sampling, seed=1, speculate=True) for one in requests
        ]
    told = failures(engine, *requests)
    assert told["none"] is told["good"] is None
    for name, said in (
        ("first", "raised RuntimeError"),
        ("later", "raised RuntimeError"),
        ("short", "raised ValueError"),
        ("text", "raised ValueError"),
        ("nan", "left logits that are no numbers"),
        ("inf", "left logits that are no numbers"),
        ("arguments", "does not take the arguments"),
        ("made", "does not take the arguments"),
    ):
        error = told[name]
        assert error is not None and said in error and "secret" not in error
    engine.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    named = (processors.history, "mine=tests.engine.processors:bias", processors.Odd, processors.failing)
    with LLM(threads=1, logits_processors=named) as made:
        yield made


def test_in_python_they_are_registered_when_an_engine_is_made(llm: LLM) -> None:
    held = llm.generate("Hello", max_tokens=6, temperature=0, logits_processors=[{"name": "mine", "args": [{"9": 90}]}])
    assert held[0].outputs[0].token_ids == (9,) * 6
    asked = SamplingParams(max_tokens=6, seed=3, n=3, logits_processors=("history",))
    together = llm.generate(["Hello", "A table", "Hello"], asked)
    assert [one.outputs[1].token_ids for one in together] == [
        llm.generate(text, asked)[0].outputs[1].token_ids for text in ("Hello", "A table", "Hello")
    ]
    for wrong in ("nobody", "bias"):
        with pytest.raises(ParameterError, match="one of history, mine, Odd, failing"):
            llm.generate("Hello", logits_processors=wrong)
    failed = llm.generate("Hello", logits_processors=["failing"])[0].outputs[0]
    assert failed.finish_reason == "error" and not failed.token_ids
    assert llm.generate("Hello", max_tokens=2)[0].outputs[0].token_ids


def test_a_start_without_torch_has_them(tmp_path: Path) -> None:
    """An engine that goes on from what an earlier start kept computes the same rows."""
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.save("llama", folder)
    options = {"pack_cache": str(tmp_path / "kept"), "logits_processors": processors.ALL}
    found = []
    for _ in range(2):
        engine = made(folder, **options)
        found.append(run(engine, *asked(KINDS, speculate=False)))
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options",
    [
        ["nomodule"],
        ["tests.engine.processors:missing"],
        ["no.such.module:thing"],
        ["tests.engine.processors:NAMES"],
        ["a=tests.engine.processors:bias", "a=tests.engine.processors:history"],
        ["a b=tests.engine.processors:bias"],
        [lambda *_: None],
        "tests.engine.processors:bias",
    ],
)
def test_what_cannot_be_registered_ends_the_start(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"logits.processors"):
        LLM(threads=1, logits_processors=options)


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        [3],
        [{"args": []}],
        [{"name": "a", "other": 1}],
        [{"name": "a", "args": "text"}],
        [{"name": "a", "kwargs": [1]}],
        [{"name": "a", "kwargs": {1: 2}}],
        [{"name": "", "args": []}],
        ["a"] * 9,
        [{"name": "a", "args": ["x" * 20_000]}],
        [{"name": "a", "args": [object()]}],
        [{"name": "a", "arguments": "["}],
        [{"name": "a", "arguments": '{"x": 1}'}],
    ],
)
def test_what_names_none(value: Any) -> None:
    with pytest.raises(ParameterError, match="logits_processors"):
        SamplingParams(logits_processors=value)


def test_calls_in_one_form() -> None:
    told = SamplingParams(logits_processors=["a", {"qualname": "b.c", "args": [1], "kwargs": None}])  # type: ignore[arg-type]
    assert told.logits_processors == (ProcessorCall("a"), ProcessorCall("b.c", '{"args":[1],"kwargs":{}}'))
    assert told.logits_processors[1].given() == ([1], {})
    listed: Any = [{"name": call.name, "arguments": call.arguments} for call in told.logits_processors]
    assert SamplingParams(logits_processors=listed) == told
