"""Answers of the engine to OpenAI's objects: whole, or as chunks of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config.constraint import ToolMode
from penstock.config.logprobs import is_many
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.server.active_call import ActiveCall, event, large_event
from penstock.server.custom_tools import CustomCalls
from penstock.server.dialects.openai.translate import OpenAICall
from penstock.server.fingerprint import fingerprint
from penstock.server.logprobs import alternatives, logprob_object, ranked_by_id, said

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend
    from penstock.server.dialects.stored_chats import Keep


_FEW = 256  # log-probabilities of tokens that are told at once; more are beside the event loop


@dataclass(slots=True)
class _Choice:
    """What is known of one choice so far; `offset` counts the characters its logprobs account for."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offset: int = 0
    begun: bool = False
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    called: bool = False


class OpenAIReply:
    """The answer to one call, built from deltas."""

    def __init__(self, call: OpenAICall, active: ActiveCall, frontend: Frontend, keep: Keep | None = None) -> None:
        """`keep` is given the whole answer before the last of it is told."""
        self._call = call
        self._active, self._keep = active, keep
        self._calls = CustomCalls(call.custom)
        self._frontend = frontend
        self._choices = [_Choice() for _ in range(call.n * len(call.requests))]
        self._prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in call.requests]
        self._completion_tokens = self._reasoning_tokens = 0
        self._tells_many = is_many(call.logprobs) or is_many(call.prompt_logprobs)
        kind = "chat.completion" if call.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": call.id,
            "object": f"{kind}.chunk" if call.chat and call.stream else kind,
            "created": int(time.time()),
            "model": frontend.served_name,
            "system_fingerprint": fingerprint(frontend),
        }

    async def whole(self) -> dict[str, Any]:
        """The complete object."""
        async for index, delta in self._active.deltas():
            self._take(index, delta)
        scored = sum(map(len, self._prompt_logprobs)) + sum(len(choice.logprobs) for choice in self._choices)
        many = scored > _FEW or self._tells_many
        body = await asyncio.to_thread(self._body) if many else self._body()
        if self._keep is not None:
            await self._keep(body)
        return body

    async def events(self) -> AsyncIterator[bytes]:
        """The chunks of a stream, each a server-sent event, with the closing ones."""
        async for index, delta in self._active.deltas():
            number = index * self._call.n + delta.index
            choice = self._choices[number]
            first, choice.begun = not choice.begun, True
            if first and self._call.chat:
                yield self._opening(number)
            self._take(index, delta)
            scored = len(self._prompt_logprobs[index]) if first else 0
            many = scored > _FEW or self._tells_many
            told = partial(self._told_chunk, index, number, delta, first)
            if chunk := await asyncio.to_thread(told) if many else told():
                yield chunk
        if self._keep is not None:
            await self._keep(await asyncio.to_thread(self._body))
        if self._call.include_usage:
            yield self._chunk([], True, timings=self._active.timings())
        yield b"data: [DONE]\n\n"

    def _body(self) -> dict[str, Any]:
        choices = [self._finished(number, choice) for number, choice in enumerate(self._choices)]
        body = {**self._head, "choices": choices, "usage": self.usage(), "timings": self._active.timings()}
        return body | self._about_prompt(0) | self._prompt_text() if self._call.chat else body

    def _told_chunk(self, index: int, number: int, delta: Delta, first: bool) -> bytes:
        """What a stream tells of a delta, b"" for one that has nothing to tell."""
        body = self._chunk_choice(index, number, self._choices[number], delta, first)
        if body is None:
            return b""
        timed = self._call.timings_per_token or self._choices[number].finish_reason is not None
        more = {"timings": self._active.timings(index, delta.index)} if timed else {}
        return self._chunk([body], self._call.continuous_usage, **more)

    def usage(self) -> dict[str, Any]:
        prompt = self._active.prompt_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._active.cached_tokens},
        }
        details: dict[str, int] = {"reasoning_tokens": self._reasoning_tokens} if self._call.chat else {}
        if details := details | self._active.draft_details():
            usage["completion_tokens_details"] = details
        return usage

    def _take(self, index: int, delta: Delta) -> None:
        """Adds a delta to its choice; a stream that is not kept has counts only."""
        call = self._call
        choice = self._choices[index * call.n + delta.index]
        if delta.prompt_logprobs:
            self._prompt_logprobs[index] += delta.prompt_logprobs
        if not call.no_output:
            self._completion_tokens += len(delta.token_ids)
            self._reasoning_tokens += delta.reasoning_tokens
            choice.called = choice.called or bool(delta.tool_calls)
            if self._keep is not None or not call.stream:
                choice.text.append(delta.text)
                if call.include_reasoning:
                    choice.reasoning.append(delta.reasoning)
                choice.calls += delta.tool_calls
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            choice.finish_reason = "length" if call.no_output else self._ending(choice, delta.finish_reason)
            choice.stop_reason = None if call.no_output else delta.stop_reason

    def _ending(self, choice: _Choice, reason: FinishReason) -> str:
        """OpenAI's finish_reason: calls the client did not name beforehand are the reason an answer stopped."""
        if reason is not FinishReason.STOP or not choice.called:
            return reason.value
        if self._call.requests[0].tool_choice.mode is ToolMode.NAMED:
            return "stop"
        return "function_call" if self._call.legacy_functions else "tool_calls"

    def _finished(self, number: int, choice: _Choice) -> dict[str, Any]:
        call, index = self._call, number // self._call.n
        text = "".join(choice.text)
        body: dict[str, Any] = {"index": number}
        if call.chat:
            body["message"] = self._message(choice, text)
            body["logprobs"] = None if call.logprobs is None else self._chat_logprobs(choice.logprobs)
        else:
            body["text"] = self._echoed(index) + text
            body["logprobs"] = self._text_logprobs(index, choice, choice.logprobs, first=True)
            body |= self._about_prompt(index)
        body["token_ids"] = choice.token_ids if call.return_token_ids else None
        return {**body, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _about_prompt(self, index: int) -> dict[str, Any]:
        """vLLM's fields of a prompt, null unless they were asked for."""
        call = self._call
        return {
            "prompt_logprobs": None if call.prompt_logprobs is None else self._vllm_prompt_logprobs(index),
            "prompt_token_ids": self._prompt_ids(index) if call.return_token_ids else None,
        }

    def _prompt_text(self) -> dict[str, Any]:
        """The text of a chat's prompt, where it was asked for."""
        return (
            {"prompt_text": self._frontend.detokenize(self._prompt_ids(0) or ())}
            if self._call.return_prompt_text
            else {}
        )

    def _piece(self, token: int) -> str:
        """What log-probabilities call a token."""
        return f"token_id:{token}" if self._call.tokens_as_ids else self._frontend.piece(token)

    def _prompt_ids(self, index: int) -> list[int] | None:
        """None where rows stand among them, which are no tokens."""
        return None if self._call.requests[index].rows else list(self._active.generations[index].prompt_ids)

    def _message(self, choice: _Choice, text: str) -> dict[str, Any]:
        text = self._call.said + text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if reasoning := "".join(choice.reasoning):
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls := self._calls.whole(choice.calls):
            message["content"] = text or None
            if self._call.legacy_functions:
                message["function_call"] = calls[0]["function"]
            else:
                message["tool_calls"] = calls
        return message

    def _opening(self, number: int) -> bytes:
        """The first chunk of a chat's choice, before anything is generated."""
        role = {"role": "assistant", "content": self._call.said, "refusal": None}
        choice = {"index": number, "delta": role, "logprobs": None, "finish_reason": None}
        more: dict[str, Any] = {"prompt_token_ids": self._prompt_ids(0)} if self._call.return_token_ids else {}
        more |= self._prompt_text()
        if self._call.return_progress:
            more["prompt_progress"] = self._active.prompt_progress(0)
        return self._chunk([choice], self._call.continuous_usage, **more)

    def _chunk(self, choices: Sequence[Mapping[str, Any]], with_usage: bool, **more: Any) -> bytes:
        body: dict[str, Any] = {**self._head, "choices": choices, **more}
        if self._call.include_usage:
            body["usage"] = self.usage() if with_usage else None
        return large_event(body) if self._tells_many else event(body)

    def _chunk_choice(
        self, index: int, number: int, choice: _Choice, delta: Delta, first: bool
    ) -> dict[str, Any] | None:
        """The delta as a chunk's choice, None when it has nothing to tell."""
        call = self._call
        text = "" if call.no_output else delta.text
        ids = () if call.no_output else delta.token_ids
        entries = () if call.no_output else delta.logprobs
        ending = {"finish_reason": choice.finish_reason}
        if choice.finish_reason is not None:
            ending["stop_reason"] = choice.stop_reason  # type: ignore[assignment]
        counted = False
        if call.chat:
            logprobs = self._chat_logprobs(entries) if call.logprobs is not None and entries else None
            told = {} if call.no_output else self._told(delta)
            if text or (entries and not told):
                told["content"] = text
            body: dict[str, Any] = {"index": number, "delta": told, "logprobs": logprobs}
            counted = bool(told)
        else:
            echoed = self._echoed(index) if first else ""
            shown = self._text_logprobs(index, choice, entries, first) if entries or (first and call.echo) else None
            text = echoed + text
            body = {"index": number, "text": text, "logprobs": shown}
        if call.return_token_ids:
            body["token_ids"] = list(ids)
            if first and not call.chat:
                body["prompt_token_ids"] = self._prompt_ids(index)
        counted = counted or (bool(ids) and (call.continuous_usage or call.return_token_ids))
        if not (text or entries or counted or choice.finish_reason is not None):
            return None
        return {**body, **ending}

    def _told(self, delta: Delta) -> dict[str, Any]:
        """Reasoning and calls of a delta, as a chunk tells them."""
        told: dict[str, Any] = {}
        if delta.reasoning and self._call.include_reasoning:
            told |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        calls = [self._calls.piece(delta.index, piece) for piece in delta.tool_calls]
        if calls and self._call.legacy_functions:
            first = [call["function"] for call in calls if call["index"] == 0]
            if first:
                told["function_call"] = first[0]
        elif calls:
            told["tool_calls"] = calls
        return told

    def _echoed(self, index: int) -> str:
        if not self._call.echo:
            return ""
        request = self._call.requests[index]
        return request.prompt if request.prompt is not None else self._frontend.detokenize(request.prompt_ids or ())

    def _chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        most = self._call.logprobs or 0
        content = [logprob_object(self._frontend, entry, most, self._piece) for entry in entries]
        return {"content": content, "refusal": None}

    def _text_logprobs(
        self, index: int, choice: _Choice, entries: Sequence[TokenLogprobs], first: bool
    ) -> dict[str, Any] | None:
        """OpenAI's four parallel lists; with echo, those of the prompt come first, its first token without a value."""
        call = self._call
        if call.logprobs is None:
            return None
        rows: list[tuple[int, TokenLogprobs | None]] = []
        if call.echo and first:
            prompt_ids = self._active.generations[index].prompt_ids
            rows.append((prompt_ids[0], None))
            rows += [(entry.token, entry) for entry in self._prompt_logprobs[index]]
        rows += [(entry.token, entry) for entry in entries]
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, row in rows:
            piece = self._piece(token)
            result["tokens"].append(piece)
            result["token_logprobs"].append(None if row is None else said(row.logprob))
            result["top_logprobs"].append(None if row is None else self._top(row, call.logprobs))
            result["text_offset"].append(choice.offset)
            choice.offset += len(piece)
        return result

    def _top(self, entry: TokenLogprobs, most: int) -> dict[str, float]:
        """By text, the token that was taken first, as vLLM has it; then the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in ((entry.token, entry.logprob), *alternatives(entry, most)):
            top.setdefault(self._piece(token), said(logprob))
        return top

    def _vllm_prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """One entry a prompt token, None for the first: token id → logprob, rank and text."""
        most = self._call.prompt_logprobs or 0
        return [None, *(ranked_by_id(self._frontend, entry, most) for entry in self._prompt_logprobs[index])]
