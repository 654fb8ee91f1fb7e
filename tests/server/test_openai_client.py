"""The openai package against the real application, over a socket, and a real engine with a scripted runner."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from penstock.config import limits
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running, until

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_chat(api: openai.OpenAI, server: Running) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, seed=1, user="me")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "scripted"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    request = server.runner.seen[0]
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    assert answer.usage.completion_tokens == len(server.runner.script)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == request.computed
    again = api.chat.completions.create(model="scripted", messages=HELLO)
    assert again.usage.prompt_tokens_details.cached_tokens == len(request.prompt_ids) - 1
    assert answer.system_fingerprint.startswith("fp_")


def test_the_models_own_sampling_defaults_are_used(api: openai.OpenAI, server: Running) -> None:
    api.chat.completions.create(model="scripted", messages=HELLO)
    api.chat.completions.create(model="scripted", messages=HELLO, temperature=0)
    assert [request.sampling.temperature for request in server.runner.seen] == [0.6, 0]
    assert server.runner.seen[0].sampling.top_p == 0.95


def test_chat_stream_equals_the_whole(api: openai.OpenAI) -> None:
    api.chat.completions.create(model="scripted", messages=HELLO)  # from here on the whole prompt is cached
    whole = api.chat.completions.create(model="scripted", messages=HELLO, n=2)
    assert whole.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    stream = api.chat.completions.create(
        model="scripted", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def test_a_stream_without_usage_has_none(api: openai.OpenAI) -> None:
    chunks = list(api.chat.completions.create(model="scripted", messages=HELLO, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)  # type: ignore[attr-defined]


def test_continuous_usage_grows(api: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(api.chat.completions.create(model="scripted", messages=HELLO, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_max_tokens_ends_with_length(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, max_completion_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


def test_stop_strings(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, stop=[" for"])
    assert answer.choices[0].message.content == ANSWER.split(" for")[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == " for"  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(api: openai.OpenAI, server: Running, stream: bool) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, logprobs=True, top_logprobs=2, stream=stream)
    pieces = answer if stream else [answer]
    found = [choice.logprobs for piece in pieces for choice in piece.choices if choice.logprobs is not None]
    content = [entry for logprobs in found for entry in logprobs.content]
    assert len(content) == len(server.runner.script)
    assert b"".join(bytes(entry.bytes) for entry in content).decode().startswith(ANSWER)
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in content)


def test_completion_with_echo_and_logprobs(api: openai.OpenAI, server: Running) -> None:
    answer = api.completions.create(model="scripted", prompt="Good morning", echo=True, logprobs=2, max_tokens=4)
    choice = answer.choices[0]
    assert choice.text.startswith("Good morning")
    prompt = len(server.runner.seen[0].prompt_ids)
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == prompt + 4
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert "".join(logprobs.tokens) == choice.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token


def test_scoring_a_prompt_without_output(api: openai.OpenAI, server: Running) -> None:
    answer = api.completions.create(model="scripted", prompt="Good morning", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "Good morning"
    assert len(answer.choices[0].logprobs.tokens) == len(server.runner.seen[0].prompt_ids)
    assert answer.usage.completion_tokens == 0


def test_prompts_times_n_are_numbered_as_openai_numbers_them(api: openai.OpenAI, server: Running) -> None:
    prompts = ["One", "Two", "Three"]
    answer = api.completions.create(model="scripted", prompt=prompts, n=2, echo=True, max_tokens=3)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text.startswith(prompts[i // 2]) for i, choice in enumerate(answer.choices)] == [True] * 6
    assert answer.usage.prompt_tokens == sum(len(request.prompt_ids) for request in server.runner.seen)
    assert answer.usage.completion_tokens == 18
    chunks = list(api.completions.create(model="scripted", prompt=prompts, n=2, echo=True, max_tokens=3, stream=True))
    texts = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == i) for i in range(6)]
    assert texts == [choice.text for choice in answer.choices]


def test_token_ids_in_and_out(api: openai.OpenAI, server: Running) -> None:
    ids = [5, 6, 7]
    answer = api.completions.create(model="scripted", prompt=ids, max_tokens=3, extra_body={"return_token_ids": True})
    assert server.runner.seen[0].prompt_ids == tuple(ids)
    assert answer.choices[0].prompt_token_ids == ids  # type: ignore[attr-defined]
    assert answer.choices[0].token_ids == list(server.runner.script[:3])  # type: ignore[attr-defined]


def test_prompt_logprobs(api: openai.OpenAI, server: Running) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, extra_body={"prompt_logprobs": 1})
    found = answer.prompt_logprobs  # type: ignore[attr-defined]
    assert len(found) == len(server.runner.seen[0].prompt_ids)
    assert found[0] is None
    assert found[1][str(server.runner.seen[0].prompt_ids[1])]["rank"] == 1


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["scripted"]
    assert api.models.retrieve("scripted").max_model_len == 2048  # type: ignore[attr-defined]


def test_an_unknown_model_is_404_and_lists_what_there_is(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match='available: "scripted"') as caught:
        api.chat.completions.create(model="gpt-9", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("some/other")


def test_a_prompt_longer_than_the_context_is_400_with_both_counts(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"3000 tokens.*2048") as caught:
        api.completions.create(model="scripted", prompt=[5] * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_a_limit_is_named_as_it_was_sent(api: openai.OpenAI) -> None:
    ask = functools.partial(api.chat.completions.create, model="scripted", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="max_tokens is 100000") as caught:
        ask(max_completion_tokens=100_000)
    assert caught.value.param == "max_completion_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(max_tokens=100_000)
    assert caught.value.param == "max_tokens"


def test_one_refused_prompt_refuses_the_call_and_runs_none(api: openai.OpenAI, server: Running) -> None:
    before = server.stats()
    with pytest.raises(openai.BadRequestError):
        api.completions.create(model="scripted", prompt=[[5], [6], [7] * 3000])
    server.until_idle()
    assert server.stats().finished == before.finished


def test_overload_is_429_with_retry_after(api: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 2)
    server.runner.hold()
    with ThreadPoolExecutor() as pool:
        queued = [pool.submit(api.completions.create, model="scripted", prompt=text) for text in ("One", "Two")]
        until(lambda: server.client._streams.waiting.requests == 2)
        with pytest.raises(openai.RateLimitError, match="2 requests wait already") as caught:
            api.chat.completions.create(model="scripted", messages=HELLO)
        server.runner.go()
        assert [answer.result().choices[0].finish_reason for answer in queued] == ["stop", "stop"]
    assert (caught.value.code, caught.value.type) == ("overloaded", "rate_limit_error")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert api.chat.completions.create(model="scripted", messages=HELLO).choices[0].message.content == ANSWER


def test_an_engine_that_dies_is_an_error_and_no_silent_end(api: openai.OpenAI, server: Running) -> None:
    server.runner.die_after = 2
    with pytest.raises(openai.InternalServerError, match="engine stopped"):
        api.chat.completions.create(model="scripted", messages=HELLO)
    stream = api.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    seen: list[object] = []
    with pytest.raises(openai.APIError, match="engine stopped"):
        seen.extend(stream)
    assert len(seen) == 3  # the role and the two tokens before
    with pytest.raises(openai.APIError, match="engine stopped"):
        list(api.completions.create(model="scripted", prompt=["a", "b"], stream=True))
    server.until_idle()


def test_the_servers_request_id_comes_back(api: openai.OpenAI) -> None:
    raw = api.chat.completions.with_raw_response
    answer = raw.create(model="scripted", messages=HELLO, extra_headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    refused = raw.create(model="scripted", messages=HELLO, extra_headers={"X-Request-Id": "not fine"})
    assert refused.headers["x-request-id"] not in ("", "not fine")


async def test_many_streams_at_once_with_leavers(text: TextPipeline) -> None:
    with running(text) as server:
        server.runner.delay = 0.002
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:

            async def one(number: int) -> str | None:
                stream = await api.chat.completions.create(model="scripted", messages=HELLO, stream=True)
                pieces = []
                async for chunk in stream:
                    pieces.append(chunk.choices[0].delta.content or "")
                    if number % 3 == 0 and len(pieces) == 4:
                        await stream.close()
                        return None
                return "".join(pieces)

            answers = await asyncio.gather(*map(one, range(48)))
        assert answers == [None if number % 3 == 0 else ANSWER for number in range(48)]
        assert len(server.runner.seen) == 48
        until(lambda: server.lifecycle.in_flight == 0)
        server.until_idle()


@pytest.mark.parametrize(
    "call",
    [
        lambda api: api.files.list(),
        lambda api: api.files.retrieve("file-1"),
        lambda api: api.files.content("file-1"),
        lambda api: api.files.delete("file-1"),
        lambda api: api.files.create(file=b"x", purpose="batch"),
        lambda api: api.uploads.cancel("upload_1"),
        lambda api: api.vector_stores.list(),
        lambda api: api.vector_stores.files.list("vs_1"),
        lambda api: api.batches.list(),
    ],
)
def test_files_and_stores_are_refused_by_name(server: Running, call: Callable[[openai.OpenAI], object]) -> None:
    one = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with one, pytest.raises(openai.APIStatusError) as refused:
        call(one)
    assert (refused.value.status_code, refused.value.code) == (501, "not_available")
    assert "is not available here" in refused.value.message
