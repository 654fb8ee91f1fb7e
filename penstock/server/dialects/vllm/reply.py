"""Answers of the engine as tokens: whole, or as the chunks of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config.logprobs import is_many
from penstock.core.protocol import TokenLogprobs
from penstock.engine.api import Delta
from penstock.server.active_call import ActiveCall, event, large_event
from penstock.server.dialects.vllm.translate import TokensCall
from penstock.server.logprobs import alternatives, ranked_by_id, said

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ending: Mapping[str, Any] = field(default_factory=lambda: {"finish_reason": None, "stop_reason": None})


class TokensReply:
    """The answer to one call."""

    def __init__(self, call: TokensCall, active: ActiveCall, frontend: Frontend) -> None:
        self._call, self._active = call, active
        self._frontend = frontend
        self._answers = [_Answer() for _ in range(call.request.sampling.n)]
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._tokens = 0
        sampling = call.request.sampling
        self._tells_many = is_many(sampling.told_with_each) or is_many(sampling.prompt_logprobs)

    async def whole(self) -> dict[str, Any]:
        """The complete object."""
        async for _, delta in self._active.deltas():
            answer = self._take(delta)
            answer.text.append(delta.text)
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs
        return await asyncio.to_thread(self._body) if self._tells_many else self._body()

    def _body(self) -> dict[str, Any]:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        head = {"model": self._frontend.served_name, "created": int(time.time())}
        asked = self._call.request.sampling.prompt_logprobs
        ranked = (ranked_by_id(self._frontend, entry, asked or 0) for entry in self._prompt_logprobs)
        scored = None if asked is None else [None, *ranked]
        return {**self._head(), **head, "choices": choices, "usage": self._usage(), "prompt_logprobs": scored}

    async def events(self) -> AsyncIterator[bytes]:
        """The chunks of a stream, and the closing one."""
        more = self._head()
        async for _, delta in self._active.deltas():
            answer = self._take(delta)
            told = _Answer([delta.text], [*delta.token_ids], [*delta.logprobs], answer.ending)
            chunk = partial(self._chunk, more, delta.index, told)
            yield await asyncio.to_thread(chunk) if self._tells_many else chunk()
            more = self._head(first=False)
        if self._call.include_usage:
            yield event({**more, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _chunk(self, head: Mapping[str, Any], index: int, told: _Answer) -> bytes:
        body = {**head, "choices": [self._choice(index, told)]}
        return large_event(body) if self._tells_many else event(body)

    def _take(self, delta: Delta) -> _Answer:
        answer = self._answers[delta.index]
        self._tokens += len(delta.token_ids)
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            answer.ending = {"finish_reason": delta.finish_reason.value, "stop_reason": delta.stop_reason}
        return answer

    def _head(self, *, first: bool = True) -> dict[str, Any]:
        call = self._call
        head: dict[str, Any] = {"request_id": call.id, "output_mode": "text" if call.text else "tokens"}
        if call.tells_prompt and first:
            head["prompt_token_ids"] = list(self._active.generations[0].prompt_ids)
        return head

    def _choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        text = {"text": "".join(answer.text)} if self._call.text else {}
        asked = self._call.request.sampling.told_with_each
        scored = None if asked is None else {"content": [self._scored(entry, asked) for entry in answer.logprobs]}
        return {"index": index, "token_ids": answer.token_ids, **text, "logprobs": scored, **answer.ending}

    def _scored(self, entry: TokenLogprobs, most: int) -> dict[str, Any]:
        top = [self._one(token, logprob, rank) for rank, (token, logprob) in enumerate(alternatives(entry, most), 1)]
        return {**self._one(entry.token, entry.logprob, entry.rank), "top_logprobs": top}

    def _one(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        told: dict[str, Any] = {"token_id": token, "logprob": said(logprob), "rank": rank}
        return told | {"token": self._frontend.piece(token)} if self._call.text else told

    def _usage(self) -> dict[str, Any]:
        prompt = self._active.prompt_tokens
        cached = {"cached_tokens": self._active.cached_tokens}
        counts = {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}
        return {**counts, "prompt_tokens_details": cached}
