"""Reasoning, texts and tool calls in the Anthropic and Ollama dialects: every cut gives one answer, streamed or not."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from penstock.config.constraint import ToolChoice
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineOutput, FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.engine.generation import TextGeneration
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.anthropic import reply as anthropic_reply
from penstock.server.dialects.anthropic.translate import AnthropicCall
from penstock.server.dialects.ollama import reply as ollama_reply
from penstock.server.dialects.ollama.translate import OllamaCall
from penstock.server.encoding import encode_json
from penstock.text.parsers.format import AnswerFormat, formats
from penstock.text.parsers.reading import Reading, answer_readers

REQUEST = GenerationRequest("id", SamplingParams(max_tokens=99), messages=({"role": "user", "content": "Hi"},))
ANTHROPIC = AnthropicCall(REQUEST, "m", stream=True, max_tokens=99, hide_thinking=False)
OLLAMA = OllamaCall(REQUEST, "m", chat=True, stream=True, thinking=True)
BOOK = {"city": "Zürich", "seats": [1, 2], "note": 'a "quoted" word'}


@dataclass
class Told:
    """An answer whose deltas are known."""

    given: Sequence[Delta]
    prompt_tokens: int = 10
    cached_tokens: int = 4
    started: float = field(default_factory=time.monotonic)
    generations: tuple[Any, ...] = (SimpleNamespace(queue_seconds=0.0, prompt_ids=(1, 2)),)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        for delta in self.given:
            yield 0, delta


def calls(index: int, name: str, arguments: str, cut: random.Random) -> list[Delta]:
    pieces = split(arguments, cut)
    first = ToolCallDelta(index, f"call_{index}", name, pieces[0])
    later = [ToolCallDelta(index, arguments=piece) for piece in pieces[1:]]
    return [Delta(0, token_ids=(1,), tool_calls=(piece,)) for piece in (first, *later)]


def split(text: str, cut: random.Random) -> list[str]:
    ends = sorted(cut.sample(range(1, len(text)), min(cut.randrange(4), len(text) - 1)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def joined(deltas: list[Delta], cut: random.Random) -> list[Delta]:
    """Some neighbours as one, as they are when a step gives several tokens."""
    result = [deltas[0]]
    for delta in deltas[1:]:
        last = result[-1]
        order = bool(last.tool_calls) <= bool(delta.tool_calls) and not (last.text and delta.reasoning)
        if cut.random() < 0.5 and order:
            result[-1] = replace(
                last,
                text=last.text + delta.text,
                reasoning=last.reasoning + delta.reasoning,
                tool_calls=last.tool_calls + delta.tool_calls,
                token_ids=last.token_ids + delta.token_ids,
            )
        else:
            result.append(delta)
    return result


def answer(seed: int, finish: FinishReason = FinishReason.STOP, arguments: str = json.dumps(BOOK)) -> Told:
    cut = random.Random(seed)
    deltas = [Delta(0, reasoning=piece, token_ids=(1,)) for piece in split("They want a table.", cut)]
    deltas += [Delta(0, text=piece, token_ids=(1,)) for piece in split("\n\nI will look. ", cut)]
    deltas += calls(0, "book", arguments, cut)
    deltas += [Delta(0, text=piece, token_ids=(1,)) for piece in split(" \n", cut)]
    deltas += calls(1, "ring", "{}", cut) if finish is FinishReason.STOP else []
    return Told([*joined(deltas, cut), Delta(0, finish_reason=finish)])


def events_of(told: Told, call: AnthropicCall = ANTHROPIC) -> list[dict[str, Any]]:
    async def read() -> list[bytes]:
        return [event async for event in anthropic_reply.AnthropicReply(call, told).events()]  # type: ignore[arg-type]

    lines = b"".join(asyncio.run(read())).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What Anthropic's own client makes of a stream."""
    snapshot, buffers = None, {}
    parse: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    for event in events:
        if event["type"] not in ("ping", "message_stop"):
            snapshot = accumulate_event(
                event=parse.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
    assert snapshot is not None
    return json.loads(snapshot.to_json())  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(50))
def test_anthropic(seed: int) -> None:
    events = events_of(answer(seed))
    whole = asyncio.run(anthropic_reply.AnthropicReply(ANTHROPIC, answer(seed)).whole())  # type: ignore[arg-type]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, book, ring = whole["content"]
    assert thinking["thinking"] == "They want a table."
    assert len(thinking["signature"]) == 64
    assert text["text"].strip() == "I will look."
    assert (book["name"], book["input"], book["id"]) == ("book", BOOK, "call_0")
    assert (ring["name"], ring["input"]) == ("ring", {})
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["input_tokens"] == 6
    assert whole["usage"]["output_tokens"] == sum(len(delta.token_ids) for delta in answer(seed).given)
    streamed = gathered(events)
    assert {name: streamed[name] for name in ("stop_reason", "usage", "model")} == {
        name: whole[name] for name in ("stop_reason", "usage", "model")
    }
    for block, other in zip(streamed["content"], whole["content"], strict=True):
        assert {name: block[name] for name in other} == other


def test_anthropic_blocks_open_and_close_in_turn() -> None:
    open_blocks: list[int] = []
    numbers = []
    for event in events_of(answer(1)):
        if event["type"] == "content_block_start":
            assert not open_blocks
            open_blocks.append(event["index"])
            numbers.append(event["index"])
        elif event["type"] == "content_block_delta":
            assert open_blocks == [event["index"]]
        elif event["type"] == "content_block_stop":
            assert open_blocks == [event["index"]]
            open_blocks.clear()
    assert not open_blocks
    assert numbers == [0, 1, 2, 3]


def test_anthropic_hides_thinking() -> None:
    whole = gathered(events_of(answer(3), replace(ANTHROPIC, hide_thinking=True)))
    assert whole["content"][0]["thinking"] == ""
    assert whole["content"][0]["signature"]


@pytest.mark.parametrize("seed", range(10))
def test_a_call_that_was_cut_short(seed: int) -> None:
    """It keeps what there is of it, as in what Anthropic's client makes of a stream."""

    def told() -> Told:
        return answer(seed, FinishReason.LENGTH, '{"city": "Zürich", "seats": [1')

    short = replace(ANTHROPIC, max_tokens=1)
    whole = asyncio.run(anthropic_reply.AnthropicReply(short, told()).whole())  # type: ignore[arg-type]
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][2]["input"] == gathered(events_of(told()))["content"][2]["input"]
    assert whole["content"][2]["input"]["city"] == "Zürich"
    said = asyncio.run(ollama_reply.OllamaReply(OLLAMA, told(), SimpleNamespace()).whole())  # type: ignore[arg-type]
    assert said["message"]["tool_calls"][0]["function"]["arguments"] == whole["content"][2]["input"]
    assert said["done_reason"] == "length"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("nonsense", {}),
        ("[1]", {}),
        ('{"a": "\\ud800"}', {}),
        ('{"a": ' + "[" * 1000 + "]" * 1000 + "}", {}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": 1180591620717411303424}', {"a": 2**70}),
        ('{"a": 1e999}', {"a": None}),
    ],
)
def test_hostile_arguments(arguments: str, expected: dict[str, Any]) -> None:
    told = answer(0, arguments=arguments)
    whole = asyncio.run(anthropic_reply.AnthropicReply(ANTHROPIC, told).whole())  # type: ignore[arg-type]
    assert json.loads(encode_json(whole["content"][2]["input"])) == expected
    said = asyncio.run(ollama_reply.OllamaReply(OLLAMA, told, SimpleNamespace()).whole())  # type: ignore[arg-type]
    assert json.loads(encode_json(said["message"]["tool_calls"][0]["function"]["arguments"])) == expected


SPOKEN = (
    "<think>\nThey want two.\n</think>\n\nFirst.\n"
    '<tool_call>\n{"name": "book", "arguments": {"seats": 2}}\n</tool_call>\nThen '
    '<tool_call>\n{"name": "ring", "arguments": {}}\n</tool_call>\n \n'
    '<tool_call>\n{"name": "book", "arguments": {"seats": 3}}\n</tool_call>\nDone.'
)


def generated(text: TextPipeline, steps: Sequence[int]) -> TextGeneration:
    """An answer whose tokens come so many at a time, the last number again and again."""
    ids = text.tokenizer.encode(SPOKEN, add_special_tokens=False)
    found = formats()
    form = AnswerFormat(found["hermes"].calls, found["think"].reasoning, None)
    tools = [{"type": "function", "function": {"name": name}} for name in ("book", "ring")]
    messages = [{"role": "user", "content": "Hi"}]
    reading = Reading.of(form, text.tokenizer, (), messages, tools, ToolChoice(), False, "key")
    sampling = SamplingParams(max_tokens=999)

    async def outputs() -> AsyncIterator[EngineOutput]:
        sizes, place = iter(steps), 0
        while place < len(ids):
            size = next(sizes, steps[-1])
            end = FinishReason.LENGTH if place + size >= len(ids) else None
            yield EngineOutput("id", 0, tuple(ids[place : place + size]), finish_reason=end)
            place += size

    readers = answer_readers(text.tokenizer, sampling, False, reading, text.mark_ids)
    return TextGeneration((1, 2), sampling, (), EngineOutput("id", 0, cached_tokens=0), outputs(), readers)  # type: ignore[arg-type]


def test_how_tokens_come_does_not_change_the_blocks(text: TextPipeline) -> None:
    """Nor the items of a response: a client that reads slowly is told the same, in fewer pieces."""

    async def deltas(steps: Sequence[int]) -> list[Delta]:
        return [delta async for delta in generated(text, steps)]

    cut, blocks = random.Random(0), list[Any]()
    for steps in ([1], [2], [7], [10**6], *([cut.randrange(1, 40) for _ in range(99)] for _ in range(20))):
        given = asyncio.run(deltas(steps))
        assert [delta.finish_reason for delta in given] == [None] * (len(given) - 1) + [FinishReason.LENGTH]
        blocks.append(gathered(events_of(Told(given)))["content"])
    assert [block["type"] for block in blocks[0]] == [
        "thinking",
        "text",
        "tool_use",
        "text",
        "tool_use",
        "tool_use",
        "text",
    ]
    assert all(other == blocks[0] for other in blocks)


@pytest.mark.parametrize("seed", range(50))
def test_ollama(seed: int) -> None:
    async def read() -> list[bytes]:
        return [line async for line in ollama_reply.OllamaReply(OLLAMA, answer(seed), SimpleNamespace()).lines()]  # type: ignore[arg-type]

    lines = [json.loads(line) for line in asyncio.run(read())]
    whole = asyncio.run(ollama_reply.OllamaReply(OLLAMA, answer(seed), SimpleNamespace()).whole())  # type: ignore[arg-type]
    assert whole["message"]["thinking"] == "They want a table."
    assert whole["message"]["content"].strip() == "I will look."
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["book", "ring"]
    assert [call["function"]["arguments"] for call in whole["message"]["tool_calls"]] == [BOOK, {}]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert "".join(line["message"].get("thinking", "") for line in lines) == whole["message"]["thinking"]
    told = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert told == whole["message"]["tool_calls"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_ollama_without_thinking_tells_none() -> None:
    call = replace(OLLAMA, thinking=False)
    whole = asyncio.run(ollama_reply.OllamaReply(call, answer(0), SimpleNamespace()).whole())  # type: ignore[arg-type]
    assert "thinking" not in whole["message"]


def test_white_space_alone_is_no_block() -> None:
    told = Told([*[Delta(0, text=" \n")] * 100_000, Delta(0, text="a"), Delta(0, text=" "), Delta(0, text="b")])
    events = events_of(Told([*told.given, Delta(0, finish_reason=FinishReason.STOP)]))
    assert gathered(events)["content"][0]["text"] == " \n" * 100_000 + "a b"
    blank = Told([Delta(0, text=" \n"), Delta(0, finish_reason=FinishReason.STOP)])
    assert gathered(events_of(blank))["content"] == []


@pytest.mark.parametrize("field", ["text", "reasoning", "arguments"])
def test_long_answers_take_no_longer_a_piece(field: str) -> None:
    """8 MB in 40,000 pieces; copied whole for each piece they would take half a minute."""
    piece, count = "x" * 200, 40_000
    if field == "arguments":
        head, *rest = (ToolCallDelta(0, arguments=text) for text in ('{"a": "', *[piece] * count, '"}'))
        deltas = [Delta(0, tool_calls=(call,)) for call in (replace(head, id="call_0", name="book"), *rest)]
    else:
        deltas = [Delta(0, **{field: piece}) for _ in range(count)]  # type: ignore[arg-type]
    told = Told([*deltas, Delta(0, finish_reason=FinishReason.STOP)])
    started = time.process_time()
    block = asyncio.run(anthropic_reply.AnthropicReply(ANTHROPIC, told).whole())["content"][0]  # type: ignore[arg-type]
    message = asyncio.run(ollama_reply.OllamaReply(OLLAMA, told, SimpleNamespace()).whole())["message"]  # type: ignore[arg-type]
    assert time.process_time() - started < 20
    if field == "arguments":
        assert block["input"] == message["tool_calls"][0]["function"]["arguments"] == {"a": piece * count}
    else:
        said = block["text" if field == "text" else "thinking"], message["content" if field == "text" else "thinking"]
        assert said == (piece * count, piece * count)
