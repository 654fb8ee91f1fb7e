"""Grammars through the engine: the same answer whatever runs beside, no step for what is forced, compiling aside."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock import LLM, Grammar, GrammarKind
from penstock.config import limits
from penstock.config.constraint import Thinking
from penstock.config.errors import GRAMMAR_TOO_COMPLEX, ConfigError, OverloadedError, RequestError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.api import EngineInfo
from penstock.engine.build import build_engine, grammar_vocabulary
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.startup import first_start
from penstock.startup.build_runner import load
from penstock.structured import grammar_compiler, manager
from penstock.structured.grammar_compiler import compute_mask
from penstock.structured.manager import StructuredOutputManager
from penstock.text.grammar.translate import translate
from tests.engine.support import VOCAB, Slow, null_engine, read, request, tokens_of

MODEL = "penstock-concierge"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "restaurant_name": {"type": "string", "maxLength": 12},
        "party_size": {"type": "integer", "minimum": 1, "maximum": 20},
        "outdoor_seating": {"type": "boolean"},
    },
    "required": ["restaurant_name", "party_size", "outdoor_seating"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text() -> TextPipeline:
    return TextPipeline.load(MODEL)


def held(
    text: TextPipeline, name: str, schema: Any = SCHEMA, thinking: Thinking | None = None, **sampling: Any
) -> EngineRequest:
    """A request whose answer follows a schema."""
    prompt = tuple(text.tokenizer.encode("<|im_start|>user\nA table, please.<|im_end|>\n<|im_start|>assistant\n"))
    params = SamplingParams(**{"max_tokens": 120, "temperature": 1.0, **sampling})
    source = Grammar(GrammarKind.LARK, translate("json_schema", json.dumps(schema)))
    return EngineRequest(name, prompt, params, text.eos_ids, seed=2**60 + 7, grammar=source, thinking=thinking)


def finish(engine: Engine, *requests: EngineRequest, between: Callable[[], None] = lambda: None) -> dict[Any, Any]:
    """Tokens of every sequence; compiling takes no steps."""
    answers: dict[Any, Any] = {}
    for asked in requests:
        engine.add(asked)
    while engine.has_work:
        for compiled, error in engine.structured.ready():
            assert error is None
            engine.admit(compiled)
        for output in engine.step():
            assert output.error is None, output.error
            answers.setdefault((output.request_id, output.sequence), []).extend(output.tokens)
        between()
        engine.scheduler.check_integrity()
    assert not engine.structured._active
    return answers


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., Engine]]:
    made: dict[Any, Engine] = {}

    def make(chunk: int, depth: int) -> Engine:
        if (chunk, depth) not in made:
            options = EngineOptions(threads=1, max_num_seqs=8, kv_blocks=200, max_chunk_tokens=chunk, depth=depth)
            made[chunk, depth], _ = build_engine(options)
        return made[chunk, depth]

    yield make
    for engine in made.values():
        engine.close()


def test_the_same_answer_whatever_chunks_depth_company_and_preemption(
    engines: Callable[..., Engine], text: TextPipeline
) -> None:
    truth = finish(engines(512, 0), held(text, "alone", n=2))
    for sequence in range(2):
        jsonschema.validate(json.loads(text.tokenizer.decode(truth["alone", sequence])), SCHEMA)
    assert truth["alone", 0] != truth["alone", 1]
    for number, (chunk, depth, company, preempt) in enumerate(product((7, 512), (0, 1), (0, 3), (False, True))):
        engine, steps = engines(chunk, depth), iter(range(10**6))

        def between(engine: Engine = engine, steps: Iterator[int] = steps, preempt: bool = preempt) -> None:
            if preempt and next(steps) in (3, 4, 9, 15):
                engine.scheduler.preempt("asked")

        others = [replace(held(text, f"other{i}"), seed=i, grammar=None) for i in range(company)]
        others += [replace(held(text, f"more{i}", logprobs=0), seed=i) for i in range(company)]
        got = finish(engine, held(text, "asked", n=2), *others, between=between)
        assert [got["asked", sequence] for sequence in range(2)] == [
            truth["alone", sequence] for sequence in range(2)
        ], number


def test_forced_tokens_take_no_step(engines: Callable[..., Engine], text: TextPipeline) -> None:
    engine = engines(512, 0)
    schema = {"properties": {f"a_long_name_{i}": {"const": f"a value that is fixed, {i}"} for i in range(6)}}
    schema |= {"type": "object", "required": list(schema["properties"]), "additionalProperties": False}
    before = engine.stats().steps
    answer = finish(engine, held(text, "fixed", schema, max_tokens=400))["fixed", 0]
    assert engine.stats().steps - before == 1  # the prompt's own; all that follows its token is forced, the end too
    assert len(answer) > 60
    assert answer[-1] == text.eos_ids[0]
    assert len(json.loads(text.tokenizer.decode(answer))) == 6
    scored = finish(engine, held(text, "scored", schema, max_tokens=400, logprobs=0))["scored", 0]
    assert scored == answer


@pytest.mark.parametrize("thinks", [False, True])
def test_what_is_forced_may_be_found_beside_the_forward_pass(
    engines: Callable[..., Engine], text: TextPipeline, monkeypatch: pytest.MonkeyPatch, thinks: bool
) -> None:
    thinking = (
        Thinking(tuple(text.tokenizer.encode("</think>", add_special_tokens=False)), budget=3) if thinks else None
    )
    for depth in (0, 1):
        engine = engines(512, depth)
        asked = held(text, "asked", n=4, thinking=thinking)
        before = engine.stats().steps
        truth = finish(engine, asked)
        between = engine.stats().steps
        with monkeypatch.context() as patched:
            patched.setattr(manager, "_MOST_FORCING_S", -1.0)  # no step has time for it
            assert finish(engine, asked) == truth
        assert engine.stats().steps - between > between - before


def test_the_vocabulary_is_prepared_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    loading: list[set[threading.Thread]] = []

    def load_slowly(*given: Any) -> Any:
        loading.append({thread for thread in threading.enumerate() if thread.name == "penstock-grammar"})
        return load(*given)

    monkeypatch.setattr(first_start, "load", load_slowly)
    for grammars in (False, True):
        build_engine(EngineOptions(threads=1, max_num_seqs=2, kv_blocks=50), grammars=grammars)[0].close()
    assert len(loading[1] - loading[0]) == limits.GRAMMAR_THREADS


def test_max_tokens_cuts_what_is_forced(engines: Callable[..., Engine], text: TextPipeline) -> None:
    whole = finish(engines(512, 0), held(text, "whole"))["whole", 0]
    for most in (1, 2, 5, len(whole) - 1):
        assert finish(engines(512, 0), held(text, "cut", max_tokens=most))["cut", 0] == whole[:most]


def test_reasoning_comes_before_the_grammar_within_its_budget(
    engines: Callable[..., Engine], text: TextPipeline
) -> None:
    end = tuple(text.tokenizer.encode("</think>", add_special_tokens=False))
    answer = finish(engines(512, 0), held(text, "thinks", thinking=Thinking(end, budget=9)))["thinks", 0]
    assert tuple(answer[9 : 9 + len(end)]) == end
    jsonschema.validate(json.loads(text.tokenizer.decode(answer[9 + len(end) :])), SCHEMA)


def null_over(text: TextPipeline) -> tuple[Engine, EngineInfo]:
    made = StructuredOutputManager(VOCAB, partial(grammar_vocabulary, text, VOCAB))
    return null_engine(wrap=lambda runner: Slow(runner, 0.001), structured=made)


@pytest.fixture
def slow_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each grammar takes a fifth of a second, in which the interpreter is free."""
    original = grammar_compiler.compile_grammar

    def compile_slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return original(*args)

    monkeypatch.setattr(grammar_compiler, "compile_grammar", compile_slowly)


async def test_other_streams_go_on_while_a_grammar_is_compiled(
    text: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, may_end = grammar_compiler.compile_grammar, threading.Event()

    def compile_when_told(*args: Any) -> Any:
        assert may_end.wait(60)
        return original(*args)

    monkeypatch.setattr(grammar_compiler, "compile_grammar", compile_when_told)
    monkeypatch.setattr(limits, "GRAMMAR_TIMEOUT_S", 60)
    client = ThreadClient(lambda: null_over(text))
    await client.start()
    waiting = asyncio.create_task(read(client.submit(held(text, "waits"))))
    assert len(tokens_of(await read(client.submit(request(max_tokens=100))))) == 100
    assert not waiting.done()
    may_end.set()
    assert json.loads(text.tokenizer.decode(tokens_of(await waiting)))
    await client.close()


@pytest.mark.usefixtures("slow_compiling")
async def test_a_request_that_waits_for_its_grammar_can_be_cancelled(text: TextPipeline) -> None:
    client = ThreadClient(lambda: null_over(text))
    await client.start()
    streams = [client.submit(held(text, f"r{i}", {"const": i})) for i in range(6)]
    for stream in streams[:5]:
        await stream.aclose()
    assert json.loads(text.tokenizer.decode(tokens_of(await read(streams[5])))) == 5
    async with asyncio.timeout(60):
        while len(client._streams):
            await asyncio.sleep(0.01)
    stats = await client.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    await client.close()


async def test_what_takes_too_long_is_refused_and_what_waits_too_long_sent_away(
    text: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(grammar_compiler, "compile_grammar", lambda *_: may_end.wait(60))
    monkeypatch.setattr(grammar_compiler, "_MOST_THREADS", 2)
    monkeypatch.setattr(limits, "GRAMMAR_TIMEOUT_S", 0.1)
    client = ThreadClient(lambda: null_over(text))
    await client.start()
    streams = [client.submit(held(text, f"r{i}", {"const": i})) for i in range(4)]
    for stream in streams[:2]:
        with pytest.raises(RequestError, match="longer to compile than"):
            await read(stream)
    monkeypatch.setattr(limits, "GRAMMAR_QUEUE_S", 0.0)
    for stream in streams[2:]:
        with pytest.raises(OverloadedError):
            await read(stream)
    may_end.set()
    await client.close()


async def test_bad_requests_with_good_grammars_are_refused_and_forgotten(text: TextPipeline) -> None:
    client = ThreadClient(lambda: null_over(text))
    await client.start()
    with pytest.raises(RequestError, match="context holds"):
        await read(client.submit(held(text, "long", max_tokens=100_000)))
    plain = ThreadClient(null_engine)
    await plain.start()
    with pytest.raises(RequestError, match="takes no grammars"):
        await read(plain.submit(held(text, "none")))
    await plain.close()
    outputs = await read(client.submit(held(text, "good")))
    assert outputs[-1].finish_reason is FinishReason.STOP
    await client.close()


def test_compiled_grammars_are_kept_by_number_and_size(text: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_COMPILED_GRAMMARS", 8)
    compiler = grammar_compiler.GrammarCompiler(partial(grammar_vocabulary, text, VOCAB))
    for number in range(40):
        job = compiler.want(translate("choice", json.dumps([f"choice {number}"])))
        assert job.done.wait(60)
        assert compiler.want(job.source) is job
        assert len(compiler._jobs) <= 8
    monkeypatch.setattr(limits, "MAX_COMPILED_BYTES", 3 * grammar_compiler._BYTES_A_GRAMMAR)
    compiler.want(translate("choice", '["one more"]')).done.wait(60)
    assert len(compiler._jobs) <= 3
    assert compiler._bytes == sum(job.counted for job in compiler._jobs.values())
    compiler.close()


def test_the_python_interface(shared_data: Path) -> None:
    with LLM(MODEL, threads=1, max_model_len=512) as llm:
        (one,) = llm.generate("A table:", json_schema=SCHEMA, max_tokens=100, temperature=0.7, seed=1)
        jsonschema.validate(json.loads(one.text), SCHEMA)
        (two,) = llm.chat([{"role": "user", "content": "Yes or no?"}], choice=["yes", "no"], max_tokens=9)
        assert two.text in ("yes", "no")
        both = llm.generate(["A:", "B:"], regex="[a-c]{2}", max_tokens=9)
        assert all(len(answer.text) == 2 for answer in both)
        gbnf = Grammar(GrammarKind.GBNF, 'root ::= "x" [0-9]')
        assert llm.generate("A", grammar=gbnf, max_tokens=9)[0].text[0] == "x"
        assert llm.generate("A", grammar='start: "y" /[0-9]/', max_tokens=9)[0].text[0] == "y"
        with pytest.raises(ConfigError, match="one form"):
            llm.generate("A", regex="a", choice=["b"])
        with pytest.raises(RequestError, match="uniqueItems"):
            llm.generate("A", json_schema={"uniqueItems": True})


WORDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "summary": {"type": "string", "minLength": 1, "maxLength": 500, "pattern": r"^(?:\S+\s+){0,49}\S+$"}
    },
    "required": ["summary"],
    "additionalProperties": False,
}


def run(engine: Engine, *requests: EngineRequest) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and error of every request."""
    found: dict[str, tuple[list[int], str | None]] = {asked.request_id: ([], None) for asked in requests}
    for asked in requests:
        engine.add(asked)
    while engine.has_work:
        for compiled, error in engine.structured.ready():
            assert error is None, error
            engine.admit(compiled)
        for output in engine.step():
            tokens, _ = found[output.request_id]
            found[output.request_id] = ([*tokens, *output.tokens], output.error)
        engine.scheduler.check_integrity()
    assert not (engine.structured._active or engine.structured._renewals)
    return found


@pytest.mark.usefixtures("little_fuel")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_became_too_complex_fails_its_own_request_alone(text: TextPipeline, depth: int) -> None:
    def fresh() -> Engine:
        return build_engine(EngineOptions(threads=1, max_num_seqs=4, kv_blocks=200, depth=depth))[0]

    brief = [held(text, f"brief {i}", WORDS, max_tokens=3 + i, seed=i) for i in range(3)]
    alone = fresh()
    expected = {asked.request_id: run(alone, asked)[asked.request_id] for asked in brief}
    assert all(error is None for _, error in expected.values())
    alone.close()

    engine = fresh()
    beside = run(engine, held(text, "greedy for fuel", WORDS, max_tokens=100), *brief)
    assert beside.pop("greedy for fuel")[1] == GRAMMAR_TOO_COMPLEX
    assert beside == expected, "streams that shared its lexer go on as if it had not been there"
    for asked in brief:
        assert run(engine, asked) == {asked.request_id: expected[asked.request_id]}
    engine.close()


@pytest.mark.usefixtures("little_fuel")
def test_streams_whose_shared_lexer_failed_go_on_where_they_were(text: TextPipeline) -> None:
    engine, _ = build_engine(EngineOptions(threads=1, max_num_seqs=4, kv_blocks=200))
    either = {"anyOf": [SCHEMA, WORDS]}
    expected = run(engine, held(text, "calm", either, temperature=0.0))
    for compiled in engine.structured._compiler._jobs.values():  # type: ignore[union-attr]
        assert compiled.matcher is not None
        row = np.zeros((engine.structured._words,), np.uint32)
        spoilt = compiled.matcher.deep_copy()
        for token in text.tokenizer.encode('{"summary":"', add_special_tokens=False):
            spoilt.consume_token(token)
        while not spoilt.is_error():
            allowed = np.flatnonzero(np.unpackbits(compute_mask(spoilt, row).view(np.uint8), bitorder="little"))
            spoilt.consume_token(int(allowed[len(allowed) // 3]))
    assert run(engine, held(text, "calm", either, temperature=0.0)) == expected
    assert run(engine, held(text, "calm", either, temperature=0.0)) == expected
    engine.close()
