"""Answers of the engine to llama-server's objects: whole, or as the events of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.protocol import TokenLogprobs
from penstock.core.request import FinishReason
from penstock.engine.api import Delta
from penstock.server.active_call import ActiveCall, event
from penstock.server.dialects.llama_server.translate import LlamaCall
from penstock.server.encoding import is_large
from penstock.server.logprobs import said

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_T = TypeVar("_T")
_SPACES = " \t"
_FEW = 1024  # tokens that are written out at once


@dataclass(slots=True)
class _Answer:
    """What is known of one answer so far.

    Attributes:
        indent: spaces at the beginning of the line that is written; None before the first line ends, and behind them.
        stop_type: why it ended, "" while it has not.
    """

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    count: int = 0
    first: float = 0.0
    has_new_line: bool = False
    indent: int | None = None
    stop_type: str = ""
    stopping_word: str = ""
    full: bool = False
    begun: bool = False

    def indented(self, text: str, least: int) -> str:
        """A piece of the text as far as every line of it but the first has so many spaces; ends where one has not."""
        for place, char in enumerate(text):
            if self.indent is not None and char in _SPACES:
                self.indent += 1
                continue
            if self.indent is not None and self.indent < least:
                self.stop_type = "limit"
                return text[:place]
            self.indent = 0 if char == "\n" else None
        return text


class LlamaReply:
    """The answer to one call, built from deltas."""

    def __init__(self, call: LlamaCall, active: ActiveCall, frontend: Frontend) -> None:
        self._call = call
        self._body = call.body
        self._active = active
        self._frontend = frontend
        self._prompts: dict[int, str] = {}  # texts, by number
        self._settings_large = is_large(call.settings)
        self._answers = [_Answer() for _ in range(call.n * len(call.requests))]

    async def whole(self) -> Any:
        """The complete object; of several answers a list of them."""
        async for _ in self._walk():
            pass
        found = [await self._told(number, self._final) for number in range(len(self._answers))]
        return found[0] if len(found) == 1 else found

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        async for number, delta, text in self._walk():
            answer = self._answers[number]
            if self._body.return_progress and not answer.begun:
                answer.begun = True
                yield event(
                    self._partial(number, "", ())
                    | {"prompt_progress": self._active.prompt_progress(number // self._call.n)}
                )
            if text or delta.token_ids:
                yield event(self._partial(number, text, delta.logprobs, delta.token_ids))
            if answer.stop_type:
                yield await self._told(number, lambda number: event(self._final(number)))

    async def _walk(self) -> AsyncIterator[tuple[int, Delta, str]]:
        """The number of each answer that goes on, with what it brings and the text that is told of it."""
        running = len(self._answers)
        async for index, delta in self._active.deltas():
            number = index * self._call.n + delta.index
            answer = self._answers[number]
            if answer.stop_type:
                continue
            text = self._take(answer, index, delta)
            yield number, delta if not self._call.no_output else Delta(delta.index), text
            running -= bool(answer.stop_type)
            if not running:
                return

    def _take(self, answer: _Answer, index: int, delta: Delta) -> str:
        """Adds a delta to its answer; returns the text that is told of it."""
        now, body = time.monotonic(), self._body
        text = "" if self._call.no_output else delta.text
        if delta.finish_reason is not None:
            self._end(answer, index, delta)
        if delta.token_ids and not self._call.no_output:
            answer.first = answer.first or now
            answer.count += len(delta.token_ids)
        if body.n_indent:
            text = answer.indented(text, body.n_indent)
        answer.has_new_line = answer.has_new_line or "\n" in text
        late = body.t_max_predict_ms and (now - answer.first) * 1000 > body.t_max_predict_ms > 0
        if late and answer.has_new_line and not answer.stop_type:
            answer.stop_type = "limit"
        if not (body.stream or self._call.no_output):
            answer.text.append(text)
            answer.logprobs += delta.logprobs
            if body.return_tokens:
                answer.tokens += delta.token_ids
        return text

    def _end(self, answer: _Answer, index: int, delta: Delta) -> None:
        """Why the engine ended it."""
        if isinstance(delta.stop_reason, str):
            answer.stop_type, answer.stopping_word = "word", delta.stop_reason
        else:
            answer.stop_type = "eos" if delta.finish_reason is FinishReason.STOP else "limit"
        sampling = self._call.requests[index].sampling
        room = self._call.context - len(self._call.requests[index].prompt_ids or ())
        ended = delta.finish_reason is FinishReason.LENGTH and not self._call.no_output
        answer.full = ended and sampling.max_tokens == room

    def _head(self, number: int, text: str, tokens: Sequence[int], *, stop: bool) -> dict[str, Any]:
        index = number // self._call.n
        return {
            "index": number,
            "content": text,
            "tokens": list(tokens),
            "id_slot": max(0, self._body.id_slot or 0),
            "stop": stop,
            "tokens_predicted": self._answers[number].count,
            "tokens_evaluated": len(self._active.generations[index].prompt_ids),
        }

    def _partial(
        self, number: int, text: str, logprobs: Sequence[TokenLogprobs], tokens: Sequence[int] = ()
    ) -> dict[str, Any]:
        body = self._head(number, text, tokens, stop=False)
        if self._body.timings_per_token:
            body["timings"] = self._timings(number)
        if logprobs and not self._call.no_output:
            body["completion_probabilities"] = list(map(self._described, logprobs))
        return body

    async def _told(self, number: int, make: Callable[[int], _T]) -> _T:
        """What is made of the last object of an answer; beside the event loop where there is much to write out."""
        generation = self._active.generations[number // self._call.n]
        few = len(generation.prompt_ids) + len(self._answers[number].logprobs) <= _FEW
        return make(number) if few and not self._settings_large else await asyncio.to_thread(make, number)

    def _prompt(self, index: int) -> str:
        """The text of a prompt."""
        if index not in self._prompts:
            self._prompts[index] = self._frontend.detokenize(self._active.generations[index].prompt_ids)
        return self._prompts[index]

    def _final(self, number: int) -> Mapping[str, Any]:
        answer, generation = self._answers[number], self._active.generations[number // self._call.n]
        prompt = generation.prompt_ids
        body = {
            **self._head(number, "".join(answer.text), answer.tokens, stop=True),
            "model": self._frontend.served_name,
            "generation_settings": self._call.settings,
            "prompt": self._prompt(number // self._call.n),
            "has_new_line": answer.has_new_line,
            "truncated": answer.full,
            "stop_type": answer.stop_type or "limit",
            "stopping_word": answer.stopping_word,
            "tokens_cached": len(prompt) + max(answer.count - 1, 0),
            "timings": self._timings(number),
        }
        if answer.logprobs:
            body["completion_probabilities"] = list(map(self._described, answer.logprobs))
        fields = self._body.response_fields
        return nested_fields(body, fields) if fields else body

    def _timings(self, number: int) -> dict[str, Any]:
        timings = self._active.timings(number // self._call.n, number % self._call.n)
        hidden = [name for name in timings if name.startswith("predicted")] if self._call.no_output else ()
        return timings | dict.fromkeys(hidden, 0)

    def _described(self, entry: TokenLogprobs) -> dict[str, Any]:
        """A token's log-probability with the likeliest ones'; after sampling without chance, the one that is left."""
        most = self._call.requests[0].sampling.logprobs or 0
        if self._body.post_sampling_probs:
            taken = self._token(entry.token) | {"prob": 1.0}
            return {**taken, "top_probs": [taken]}
        top = [self._token(token) | {"logprob": said(logprob)} for token, logprob in entry.top[:most]]
        return {**self._token(entry.token), "logprob": said(entry.logprob), "top_logprobs": top}

    def _token(self, token: int) -> dict[str, Any]:
        raw = self._frontend.token_bytes(token)
        return {"id": token, "token": raw.decode("utf-8", "ignore"), "bytes": list(raw)}


def nested_fields(body: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Some fields of an object; `a/b` is the field b of a, under that name. Those that are not there are left out."""
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = body
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found
