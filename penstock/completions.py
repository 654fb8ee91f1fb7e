"""Answers of `penstock.llm`: whole, or read as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.config.errors import EngineDeadError
from penstock.config.generation import GenerationRequest
from penstock.config.logprobs import unpacked
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.engine.frontend import Frontend
from penstock.engine.generation import TextGeneration


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function: its id, its name and its arguments, a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation.

    Attributes:
        index: its sequence, 0 … n - 1.
        text: without the stop string or token, unless asked for.
        token_ids: every generated token, the end-of-sequence or stop token included.
        logprobs: one entry a token where asked, else empty.
        finish_reason: "stop", "length", "cancelled" or "error".
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence or length.
        error: a sentence when finish_reason is "error".
        reasoning, tool_calls: told apart from the text where that was asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        prompt_ids: the prompt in tokens.
        outputs: one continuation a sequence, in order of index.
        cached_tokens: prompt tokens that came from the prefix cache.
        prompt_logprobs: entries of prompt positions 1 … len(prompt_ids) - 1 where asked, else empty.
    """

    prompt_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...]

    @property
    def text(self) -> str:
        """The first continuation's text."""
        return self.outputs[0].text


@dataclass(slots=True)
class _Parts:
    """What a sequence has said so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(map(_unpacked, delta.logprobs))
        self.reasoning.append(delta.reasoning)
        self.calls.extend(delta.tool_calls)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        arguments: dict[int, list[str]] = {}
        for piece in self.calls:
            arguments.setdefault(piece.index, []).append(piece.arguments)
        begun = [piece for piece in self.calls if piece.id is not None]
        return tuple(ToolCall(call.id or "", call.name or "", "".join(arguments[call.index])) for call in begun)


def _unpacked(entry: TokenLogprobs) -> TokenLogprobs:
    return replace(entry, top=unpacked(entry.packed), packed=b"") if entry.packed else entry


async def collect(generation: TextGeneration, n: int) -> Completion:
    """Reads a generation of `n` sequences to its end."""
    parts = [_Parts() for _ in range(n)]
    outputs: dict[int, CompletionOutput] = {}
    prompt_logprobs: list[TokenLogprobs] = []
    async for delta in generation:
        part = parts[delta.index]
        part.add(delta)
        prompt_logprobs.extend(map(_unpacked, delta.prompt_logprobs))
        if delta.finish_reason is not None:
            outputs[delta.index] = CompletionOutput(
                delta.index,
                "".join(part.text),
                tuple(part.token_ids),
                tuple(part.logprobs),
                delta.finish_reason,
                delta.stop_reason,
                delta.error,
                "".join(part.reasoning),
                part.tool_calls,
            )
    if len(outputs) < n:
        raise EngineDeadError("The answer was closed before it ended.")
    return Completion(
        generation.prompt_ids,
        tuple(outputs[index] for index in range(n)),
        generation.cached_tokens,
        tuple(prompt_logprobs),
    )


class Answer:
    """A request of AsyncLLM. Iterate it for deltas as they come, or await it for the whole Completion; not both.

    The request is sent at the first `async for` step or at the `await`.
    """

    def __init__(self, start: Callable[[], Awaitable[Frontend]], request: GenerationRequest) -> None:
        """`start` gives what serves the request."""
        self._start_frontend = start
        self._request = request
        self._generation: TextGeneration | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        generation = await self._start()
        try:
            async for delta in generation:
                scored, prompt = map(_unpacked, delta.logprobs), map(_unpacked, delta.prompt_logprobs)
                yield replace(delta, logprobs=tuple(scored), prompt_logprobs=tuple(prompt))
        finally:
            await generation.aclose()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._result().__await__()

    @property
    def prompt_tokens(self) -> int | None:
        """Of the prompt; None before the request is sent."""
        return None if self._generation is None else len(self._generation.prompt_ids)

    @property
    def cached_tokens(self) -> int | None:
        """Those of the prompt that the prefix cache had; None before the request is sent."""
        return None if self._generation is None else self._generation.cached_tokens

    async def aclose(self) -> None:
        """Cancels the request."""
        if self._generation is not None:
            await self._generation.aclose()

    async def _start(self) -> TextGeneration:
        if self._generation is not None:
            raise EngineDeadError("An answer can be read once; call generate or chat again.")
        frontend = await self._start_frontend()
        self._generation = await frontend.generate(self._request)
        return self._generation

    async def _result(self) -> Completion:
        generation = await self._start()
        try:
            return await collect(generation, self._request.sampling.n)
        finally:
            await generation.aclose()
