"""Answers of the engine to SGLang's objects: whole, or events of which each tells all that came so far."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.protocol import TokenLogprobs
from penstock.core.request import FinishReason
from penstock.engine.api import Delta
from penstock.server.active_call import ActiveCall
from penstock.server.dialects.sglang.translate import SglangCall
from penstock.server.encoding import joined_json
from penstock.server.logprobs import said

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_SHARE = 128  # an event is sent once the answer has grown by this share: all together are so many answers at most
_FEW = 1024  # tokens and alternatives that are written out at once
_Made = TypeVar("_Made")
_Entry = list[Any]  # log-probability, token, text or null


@dataclass(slots=True)
class _Sequence:
    """What is known of one answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sent: int = 0
    begun: bool = False
    finish: dict[str, Any] | None = None


class SglangReply:
    """The answer to one call."""

    def __init__(self, call: SglangCall, active: ActiveCall, frontend: Frontend) -> None:
        self._call = call
        self._active = active
        self._frontend = frontend
        self._sequences = [_Sequence() for _ in range(call.n * len(call.requests))]

    async def whole(self) -> Any:
        """The complete object; of several answers a list of them."""
        async for _ in self._walk():
            pass
        numbers = range(len(self._sequences))
        found = [await self._made(number, partial(self._object, number, prompt=True)) for number in numbers]
        return found if self._call.listed else found[0]

    @property
    def tokens(self) -> list[int]:
        """Those of the first answer so far."""
        return self._sequences[0].tokens

    def abort(self, rid: str) -> None:
        """Ends the prompts whose ids begin so, each told as far as it has come."""
        for request in self._active.requests:
            if request.request_id.startswith(rid):
                self._frontend.client.cancel(request.live_id)

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        async for number in self._walk():
            sequence = self._sequences[number]
            size = len(sequence.tokens)
            if sequence.finish is None and size - sequence.sent <= sequence.sent // _SHARE:
                continue
            prompt = not sequence.begun or sequence.finish is not None
            sequence.sent, sequence.begun = size, True
            yield await self._made(number, partial(self._event, number, prompt=prompt))
        yield b"data: [DONE]\n\n"

    async def _walk(self) -> AsyncIterator[int]:
        """The number of each answer that goes on."""
        async for index, delta in self._active.deltas(cancelled=True):
            number = index * self._call.n + delta.index
            self._take(self._sequences[number], delta, no_output=self._call.told[index].no_output)
            yield number

    def _take(self, sequence: _Sequence, delta: Delta, *, no_output: bool) -> None:
        sequence.prompt_logprobs += delta.prompt_logprobs
        if not no_output:
            sequence.text.append(delta.text)
            sequence.tokens += delta.token_ids
            sequence.logprobs += delta.logprobs
        if delta.finish_reason is FinishReason.CANCELLED:
            sequence.finish = {"type": "abort", "message": "Aborted"}
        elif delta.finish_reason is FinishReason.STOP and not no_output:
            ended = delta.stop_reason if delta.stop_reason is not None else sequence.tokens[-1]
            sequence.finish = {"type": "stop", "matched": ended}
        elif delta.finish_reason is not None:
            sequence.finish = {"type": "length", "length": len(sequence.tokens)}

    async def _made(self, number: int, make: Callable[[], _Made]) -> _Made:
        """What is made of an answer so far; beside the event loop where there is much of it."""
        index = number // self._call.n
        told, prompt = self._call.told[index], self._active.generations[index].prompt_ids
        size = (len(self._sequences[number].tokens) + len(prompt)) * (1 + told.top * told.logprobs)
        return make() if size <= _FEW else await asyncio.to_thread(make)

    def _event(self, number: int, *, prompt: bool) -> bytes:
        """The event of an answer so far."""
        body = self._object(number, prompt=prompt)
        return b"data: " + joined_json({**body, "index": number} if self._call.listed else body) + b"\n\n"

    def _object(self, number: int, *, prompt: bool) -> dict[str, Any]:
        """An answer so far, with or without what is told of the prompt's tokens."""
        sequence, index = self._sequences[number], number // self._call.n
        told, generation = self._call.told[index], self._active.generations[index]
        about: dict[str, Any] = {
            "id": told.name,
            "finish_reason": sequence.finish,
            "prompt_tokens": len(generation.prompt_ids),
            "weight_version": "default",
            "reasoning_tokens": 0,
            "completion_tokens": len(sequence.tokens),
            "cached_tokens": generation.cached_tokens,
            "e2e_latency": time.monotonic() - self._active.started,
        }
        if told.logprobs:
            about |= self._output_scores(number)
            if prompt:
                about |= self._input_scores(number)
        body = {"text": "".join(sequence.text), "output_ids": list(sequence.tokens), "meta_info": about}
        return body | ({"prompt_token_ids": list(generation.prompt_ids)} if prompt and self._call.prompt_ids else {})

    def _output_scores(self, number: int) -> dict[str, Any]:
        """Log-probabilities of the answer."""
        scored, top = self._sequences[number].logprobs, self._call.told[number // self._call.n].top
        found = {"output_token_logprobs": self._entries(scored), "output_token_logprobs_length": len(scored)}
        return found | ({"output_top_logprobs": self._tops(scored, top)} if top else {})

    def _input_scores(self, number: int) -> dict[str, Any]:
        """Log-probabilities of the prompt, from where they are wanted."""
        index = number // self._call.n
        told, prompt = self._call.told[index], self._active.generations[index].prompt_ids
        inputs: list[_Entry] = []
        input_tops: list[list[_Entry] | None] = []
        if 0 <= told.start < len(prompt):
            scored = self._sequences[index * self._call.n].prompt_logprobs
            scored = scored[max(0, len(scored) - (len(prompt) - told.start - 1)) :]
            inputs = [self._entry(prompt[told.start], None), *self._entries(scored)]
            input_tops = [None, *self._tops(scored, told.top)]
        return {"input_token_logprobs": inputs} | ({"input_top_logprobs": input_tops} if told.top else {})

    def _entry(self, token: int, logprob: float | None) -> _Entry:
        told = None if logprob is None else said(logprob)
        return [told, token, self._frontend.piece(token) if self._call.texts else None]

    def _entries(self, scored: Sequence[TokenLogprobs]) -> list[_Entry]:
        return [self._entry(entry.token, entry.logprob) for entry in scored]

    def _tops(self, scored: Sequence[TokenLogprobs], most: int) -> list[list[_Entry] | None]:
        return [[self._entry(token, logprob) for token, logprob in entry.top[:most]] for entry in scored]


class RunningReplies:
    """The answers that are written now, by their clients."""

    def __init__(self) -> None:
        self._replies: defaultdict[str, set[SglangReply]] = defaultdict(set)

    def add(self, owner: str, reply: SglangReply) -> None:
        """One more."""
        self._replies[owner].add(reply)

    def remove(self, owner: str, reply: SglangReply) -> None:
        """It has ended."""
        self._replies[owner].discard(reply)
        if not self._replies[owner]:
            del self._replies[owner]

    def abort(self, owner: str, rid: str) -> None:
        """Ends the prompts of one client whose ids begin so, as SGLang does."""
        for reply in self._replies.get(owner, ()):
            reply.abort(rid)
