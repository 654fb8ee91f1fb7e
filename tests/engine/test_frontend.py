"""Text in, text out: prompts, limits, stop strings over several sequences, log-probabilities, seeds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import (
    CheckpointError,
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    ParameterError,
    RequestError,
)
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams, stream_key
from penstock.core.policies.pause import Control
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine.api import Delta, EngineInfo, EngineState
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.text.tokenizer import Tokenizer
from tests.engine.support import null_engine

HELLO = [{"role": "user", "content": "Hello, I need a table."}]
IM_END = 2


@pytest.fixture(scope="module")
def text() -> TextPipeline:
    return TextPipeline.load("penstock-concierge")


class Script:
    """An engine client that plays prepared outputs and remembers what was asked."""

    state = EngineState.READY
    info = EngineInfo("m", "", "A", 64, 4096, 16, 10, 4, 16, "float32", "cpu", "exact")

    def __init__(self, outputs: list[EngineOutput | Exception]) -> None:
        self.outputs = outputs
        self.requests: list[EngineRequest] = []
        self.closed = 0

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self.requests.append(request)
        return self._play()

    async def _play(self) -> AsyncGenerator[EngineOutput, None]:
        try:
            for output in self.outputs:
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            self.closed += 1

    async def start(self) -> EngineInfo:
        return self.info

    def cancel(self, request_id: str) -> None: ...

    def end_reasoning(self, request_id: str) -> None: ...

    def control(self, control: Control) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...


def out(*tokens: int, sequence: int = 0, **fields: Any) -> EngineOutput:
    return EngineOutput("r", sequence, tokens, **fields)


def ask(prompt: str | None = "Hi", **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(**{name: fields.pop(name) for name in list(fields) if hasattr(SamplingParams, name)})
    return GenerationRequest("r", sampling, prompt=prompt, **fields)


async def play(text: TextPipeline, outputs: list[Any], request: GenerationRequest) -> tuple[list[Delta], Script]:
    client = Script(outputs)
    generation = await Frontend(client, text, served_name="m").generate(request)
    return [delta async for delta in generation], client


def joined(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def logprobs(tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -1.0, 1) for token in tokens)


async def test_stop_string_across_outputs_cuts_text_tokens_and_logprobs(text: TextPipeline) -> None:
    ids = text.tokenizer.encode("One two three four", add_special_tokens=False)
    outputs = [out(), *(out(token, logprobs=logprobs((token,))) for token in ids), out(finish_reason=FinishReason.STOP)]
    deltas, client = await play(text, outputs, ask(stop=("o thr",), logprobs=0))
    assert joined(deltas) == "One tw"
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "o thr")
    spent = [token for delta in deltas for token in delta.token_ids]
    assert spent == ids[: len(spent)]
    assert "o thr" in text.tokenizer.decode(spent)
    assert "o thr" not in text.tokenizer.decode(spent[:-1])
    assert [entry.token for delta in deltas for entry in delta.logprobs] == spent
    assert client.closed == 1


async def test_stop_inside_a_batch_of_tokens(text: TextPipeline) -> None:
    ids = tuple(text.tokenizer.encode("One two three four", add_special_tokens=False))
    (delta,), _ = await play(text, [out(*ids, logprobs=logprobs(ids))], ask(stop=(" three",), logprobs=0))
    assert delta.text == "One two"
    assert len(delta.token_ids) == len(delta.logprobs) < len(ids)


async def test_stop_ends_only_its_sequence(text: TextPipeline) -> None:
    first = text.tokenizer.encode("red END blue", add_special_tokens=False)
    second = text.tokenizer.encode("a green field", add_special_tokens=False)
    outputs: list[Any] = [out()]
    for index in range(max(len(first), len(second))):
        outputs += [
            out(token, sequence=sequence) for sequence, ids in enumerate((first, second)) for token in ids[index:][:1]
        ]
    outputs += [out(sequence=0, finish_reason=FinishReason.LENGTH), out(sequence=1, finish_reason=FinishReason.LENGTH)]
    deltas, client = await play(text, outputs, ask(stop=("END",), n=2))
    assert joined(deltas, 0) == "red "
    assert joined(deltas, 1) == "a green field"
    ends = {delta.index: delta.finish_reason for delta in deltas if delta.finish_reason}
    assert ends == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
    assert client.closed == 1


@pytest.mark.parametrize(
    ("fields", "token", "shown", "reason"),
    [
        ({}, IM_END, "", None),
        ({"skip_special_tokens": False}, IM_END, "", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, IM_END, "<|im_end|>", None),
        ({"stop_token_ids": (500,)}, 500, "", 500),
        ({"ignore_eos": True, "stop_token_ids": (IM_END,)}, IM_END, "", IM_END),
    ],
)
async def test_stop_tokens(text: TextPipeline, fields: Any, token: int, shown: str, reason: int | None) -> None:
    ids = text.tokenizer.encode("Yes", add_special_tokens=False)
    outputs = [out(), out(*ids), out(token, finish_reason=FinishReason.STOP)]
    deltas, client = await play(text, outputs, ask(**fields))
    assert joined(deltas) == "Yes" + shown
    assert deltas[-1].token_ids == (token,)
    assert deltas[-1].stop_reason == reason
    assert token in client.requests[0].stop_ids


@pytest.mark.parametrize(("include", "said"), [(False, "Chapter 1. "), (True, "Chapter 1. Chapter 2")])
async def test_a_pattern_ends_an_answer_as_a_string_does(text: TextPipeline, include: bool, said: str) -> None:
    ids = text.tokenizer.encode("Chapter 1. Chapter 2 and more", add_special_tokens=False)
    outputs = [out(), *map(out, ids), out(finish_reason=FinishReason.LENGTH)]
    request = ask(stop_regex=r"Chapter [2-9]\d*", include_stop_str_in_output=include)
    deltas, client = await play(text, outputs, request)
    strings, _ = await play(text, outputs, ask(stop="Chapter 2", include_stop_str_in_output=include))
    assert joined(deltas) == joined(strings) == said
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, r"Chapter [2-9]\d*")
    assert [delta.token_ids for delta in deltas] == [delta.token_ids for delta in strings]
    assert client.closed == 1
    with pytest.raises(ParameterError, match="at least one character"):
        await play(text, outputs, ask(stop_regex="a*"))


async def test_half_a_character_is_held_back(text: TextPipeline) -> None:
    ids = text.tokenizer.encode("🦉", add_special_tokens=False)
    assert len(ids) > 1
    deltas, _ = await play(text, [*map(out, ids), out(finish_reason=FinishReason.LENGTH)], ask())
    assert [delta.text for delta in deltas if delta.text] == ["🦉"]
    assert sum(len(delta.token_ids) for delta in deltas) == len(ids)
    deltas, _ = await play(text, [out(ids[0]), out(finish_reason=FinishReason.LENGTH)], ask())
    assert joined(deltas) == "\ufffd"


async def test_prompt_logprobs_come_once_with_the_first_delta(text: TextPipeline) -> None:
    outputs = [
        out(), out(prompt_logprobs=logprobs((1, 2))), out(7, prompt_logprobs=logprobs((3,)), cached_tokens=0),
        out(8, finish_reason=FinishReason.LENGTH),
    ]  # fmt: skip
    deltas, _ = await play(text, outputs, ask(prompt_logprobs=0))
    assert [entry.token for entry in deltas[0].prompt_logprobs] == [1, 2, 3]
    assert not deltas[1].prompt_logprobs


async def test_cached_tokens_are_known_with_the_first_delta(text: TextPipeline) -> None:
    client = Script([out(), out(7, cached_tokens=3), out(8, finish_reason=FinishReason.LENGTH)])
    generation = await Frontend(client, text, served_name="m").generate(ask())
    assert generation.cached_tokens == 0
    await anext(aiter(generation))
    assert generation.cached_tokens == 3
    await generation.aclose()
    await generation.aclose()
    assert client.closed == 1
    assert [delta async for delta in generation] == []


async def test_errors(text: TextPipeline) -> None:
    deltas, _ = await play(text, [out(), out(7), out(finish_reason=FinishReason.ERROR, error="oh")], ask())
    assert (deltas[-1].finish_reason, deltas[-1].error) == (FinishReason.ERROR, "oh")
    client = Script([out(finish_reason=FinishReason.ERROR, error="gone")])
    with pytest.raises(EngineDeadError, match="gone"):
        await Frontend(client, text, served_name="m").generate(ask())
    assert client.closed == 1
    with pytest.raises(OverloadedError):
        await Frontend(Script([OverloadedError("full")]), text, served_name="m").generate(ask())


async def test_request_reaches_the_engine_resolved(text: TextPipeline) -> None:
    frontend = Frontend(client := Script([out()]), text, served_name="m", seed=5)
    await frontend.generate(ask(bad_words=("hotel",), stop_token_ids=(9, 2), priority=3, cache_salt="s"))
    sent = client.requests[0]
    assert sent.sampling.max_tokens == 64 - len(sent.prompt_ids)
    assert sent.stop_ids == (2, 0, 9)
    assert (sent.priority, sent.cache_salt) == (3, "s")
    banned = {text.tokenizer.decode(list(ids)) for ids in sent.sampling.bad_words_ids}
    assert banned == {"hotel", " hotel"}
    await frontend.generate(ask(ignore_eos=True, stop_token_ids=(9,)))
    assert client.requests[1].stop_ids == (9,)


async def test_a_first_text_is_never_encoded_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What encodes text is built by the first; a client that sends token ids may bring it with its bad words."""
    text, threads, ready = TextPipeline.load("penstock-concierge"), [], [False]
    encode = Tokenizer.encode

    def encoded(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", encoded)
    monkeypatch.setattr(Tokenizer, "prepared", property(lambda self: ready[0]))
    frontend = Frontend(client := Script([out()]), text, served_name="m")
    asked = ask(None, prompt_ids=(5, 6), bad_words=("hotel",))
    await frontend.generate(asked)
    assert threads and threading.main_thread() not in threads
    assert client.requests[0].sampling.bad_words_ids
    threads.clear()
    ready[0] = True
    await frontend.generate(asked)  # then a few words take no time
    assert set(threads) == {threading.main_thread()}
    threads.clear()
    await frontend.generate(replace(asked, sampling=replace(asked.sampling, bad_words=("hotel " * 20,) * 10)))
    assert threading.main_thread() not in threads


async def test_many_ids_are_not_checked_on_the_event_loop_when_a_prompt_is_healed(
    text: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are checked whenever they are made anew, as with the prompt's last token."""
    threads, check = [], SamplingParams.__post_init__
    many = tuple(range(text.vocab_size)) * (10_000 // text.vocab_size + 1)
    few = ask("A table for tw", token_healing=True, negative_prompt_ids=(5, 6), guidance_scale=2.0)
    large = replace(few, sampling=replace(few.sampling, negative_prompt_ids=many))

    def checked(self: SamplingParams) -> None:
        threads.append(threading.current_thread())
        check(self)

    monkeypatch.setattr(SamplingParams, "__post_init__", checked)
    client = Script([out()])
    client.info = replace(client.info, max_model_len=20_000)
    frontend = Frontend(client, text, served_name="m")
    for asked in (few, large):
        threads.clear()
        await frontend.generate(asked)
        assert threads and (threading.main_thread() in threads) == (asked is few)
        assert client.requests[-1].sampling.begins_with == text.tokenizer.token_bytes(
            text.tokenizer.encode("A table for tw")[-1]
        )


async def test_seeds(text: TextPipeline) -> None:
    frontend = Frontend(client := Script([out()]), text, served_name="m", seed=5)
    for request_id, seed in (("a", None), ("b", None), ("a", 1), ("b", 1), ("b", 2), ("b", -1), ("b", 2**64 - 1)):
        await frontend.generate(replace(ask(), request_id=request_id, sampling=SamplingParams(seed=seed)))
    a, b, one, again, two, minus, most = (request.seed for request in client.requests)
    assert one == again
    assert len({a, b, one, two, minus, most}) == 6
    assert all(0 <= request.seed < 2**64 for request in client.requests)
    assert a == stream_key("request", 5, "a")


@pytest.mark.parametrize(
    ("request_", "kind", "param", "words"),
    [
        (ask("x " * 200), ContextLengthError, "prompt", ["401", "64"]),
        (ask("Hi", max_tokens=64), ContextLengthError, "max_tokens", ["64", "63"]),
        (ask(""), RequestError, "prompt", ["empty"]),
        (ask(None, prompt_ids=()), RequestError, "prompt", ["empty"]),
        (ask(None, prompt_ids=(5, 4096)), ParameterError, "prompt", ["4096", "4095"]),
        (ask(None, prompt_ids=(-1,)), ParameterError, "prompt", ["-1"]),
        (ask(None, prompt_ids=("a",)), ParameterError, "prompt", ['"a"']),
        (ask(None, messages=()), RequestError, "messages", ["empty"]),
        (ask(None), RequestError, "prompt", ["exactly one"]),
        (ask("Hi", prompt_ids=(1,)), RequestError, "prompt_ids", ["exactly one"]),
        (ask("Hi", stop_token_ids=(4096,)), ParameterError, "stop_token_ids", ["4096"]),
        (ask("Hi", logit_bias=((9999, 1.0),)), ParameterError, "logit_bias", ["9999"]),
        (ask("Hi", allowed_token_ids=(4096,)), ParameterError, "allowed_token_ids", ["4096"]),
        (ask("a\ud800b"), RequestError, "prompt", ["surrogate"]),
        (ask("Hi", bad_words=tuple(f"word{i} " * 30 for i in range(128))), ParameterError, "bad_words", ["1024"]),
        (ask("Hi", min_tokens=100), ParameterError, "min_tokens", ["100"]),
        (
            ask(None, messages=HELLO, template_kwargs={"messages": 1}),
            RequestError,
            "chat_template_kwargs",
            ["messages"],
        ),
    ],
)
async def test_refusals_name_field_and_values(
    text: TextPipeline, request_: GenerationRequest, kind: type[RequestError], param: str, words: list[str]
) -> None:
    if request_.prompt and request_.prompt.startswith("x "):
        words = [str(len(text.tokenizer.encode(request_.prompt))), words[1]]
    with pytest.raises(kind) as refused:
        await Frontend(Script([]), text, served_name="m").generate(request_)
    assert refused.value.param == param
    for word in words:
        assert word in str(refused.value)


async def test_template_errors_are_the_clients(text: TextPipeline) -> None:
    frontend = Frontend(Script([]), text, served_name="m")
    with pytest.raises(RequestError) as refused:
        await frontend.generate(ask(None, messages=({"role": 7},)))
    assert refused.value.status == 400
    with pytest.raises(RequestError, match="no chat template"):
        Frontend(Script([]), replace(text, template=None), served_name="m").render(ask(None, messages=HELLO))


async def test_tokenize_is_the_path_of_generate(text: TextPipeline) -> None:
    frontend = Frontend(client := Script([out()]), text, served_name="m")
    chat = ask(None, messages=HELLO)
    ids = await frontend.tokenize(chat)
    await frontend.generate(chat)
    assert client.requests[0].prompt_ids == ids
    assert frontend.detokenize(ids) == frontend.render(chat)
    long = "word " * 4000
    assert await frontend.tokenize(ask(long)) == tuple(text.tokenizer.encode(long))
    with pytest.raises(ParameterError):
        frontend.detokenize([4096])
    owl = text.tokenizer.encode("🦉", add_special_tokens=False)
    assert b"".join(map(frontend.token_bytes, owl)) == "🦉".encode()
    assert frontend.piece(IM_END) == "<|im_end|>"


async def test_cancelled_admission_closes_the_stream(text: TextPipeline) -> None:
    client = ThreadClient(null_engine)
    await client.start()
    for _ in range(20):
        task = asyncio.create_task(Frontend(client, text, served_name="m").generate(ask(max_tokens=1000)))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            await task.result().aclose()
        async with asyncio.timeout(60):
            while len(client._streams):
                await asyncio.sleep(0.005)
    await client.close()


def test_pipeline_reads_the_model(text: TextPipeline, shared_data: Path, tmp_path: Path) -> None:
    assert text.eos_ids == (2, 0)
    assert dict(text.defaults) == {"temperature": 0.6, "top_p": 0.95}
    assert text.vocab_size == 4096
    assert text.sampling(temperature=0).temperature == 0
    assert text.sampling().top_p == 0.95
    stories = TextPipeline.load(str(shared_data / "models" / "stories260K" / "hf"))
    assert stories.template is None
    assert stories.eos_ids
    with pytest.raises(CheckpointError):
        TextPipeline.load(str(tmp_path))


def test_pipeline_ignores_impossible_defaults(tmp_path: Path) -> None:
    from penstock.weights.open import bundled_model_path

    for file in bundled_model_path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "generation_config.json"
    config.unlink()
    config.write_text(json.dumps({"temperature": None, "top_k": 50, "top_p": 7, "eos_token_id": 5}))
    text = TextPipeline.load(str(tmp_path))
    assert dict(text.defaults) == {"top_k": 50}
    assert text.eos_ids == (5, 0, 2) or text.eos_ids[0] == 5
