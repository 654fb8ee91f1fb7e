"""Answers of the engine to TGI's objects: whole, or an event a token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core.protocol import TokenLogprobs
from penstock.core.request import FinishReason
from penstock.engine.api import Delta
from penstock.server.active_call import ActiveCall, event
from penstock.server.dialects.tgi.translate import TgiCall
from penstock.server.logprobs import said

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend


@dataclass(slots=True)
class _Sequence:
    """What is known of one sequence so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    top_tokens: list[list[dict[str, Any]]] = field(default_factory=list)
    prefill: list[TokenLogprobs] = field(default_factory=list)
    count: int = 0
    finish_reason: str = "length"


class TgiReply:
    """The answer to one call."""

    def __init__(self, call: TgiCall, active: ActiveCall, frontend: Frontend) -> None:
        self._call = call
        self._active = active
        self._frontend = frontend
        self._special = frontend.text.tokenizer.special_ids
        self._sequences = [_Sequence() for _ in range(call.request.sampling.n)]

    async def whole(self) -> dict[str, Any]:
        """The complete object; of several sequences the best, with the others among its details."""
        async for _, delta in self._active.deltas():
            found = self._sequences[delta.index]
            self._take(found, delta)
            for token, entry in self._tokens(delta) if self._call.details else ():
                found.tokens.append(token)
                if self._call.top_tokens:
                    found.top_tokens.append(self._top(entry))
        best, *others = self._sequences
        prefill = best.prefill
        body: dict[str, Any] = {"generated_text": self._text(best)}
        if self._call.details:
            body["details"] = self._details(best, prefill)
            if others:
                told = [{"generated_text": self._text(one), **self._details(one, prefill)} for one in others]
                body["details"]["best_of_sequences"] = told
        return body

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        index, last = 0, TokenLogprobs(0, 0.0, 1)
        (sequence,) = self._sequences
        async for _, delta in self._active.deltas():
            self._take(sequence, delta)
            told = list(self._tokens(delta))
            if not told and delta.finish_reason is not None:  # what was held back
                told = [(self._token(last.token, last.logprob, delta.text), last)]
            for place, (token, entry) in enumerate(told, 1):
                index, last = index + 1, entry
                body: dict[str, Any] = {"index": index, "token": token}
                if self._call.top_tokens:
                    body["top_tokens"] = self._top(entry)
                ended = delta.finish_reason is not None and place == len(told)
                body |= {"generated_text": self._text(sequence) if ended else None}
                yield event(body | {"details": self._end(sequence) if ended else None})

    def _take(self, sequence: _Sequence, delta: Delta) -> None:
        sequence.text.append(delta.text)
        sequence.count += len(delta.token_ids)
        sequence.prefill += delta.prompt_logprobs
        if delta.finish_reason is FinishReason.STOP:
            sequence.finish_reason = "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"

    def _text(self, sequence: _Sequence) -> str:
        return self._call.full_text + "".join(sequence.text)

    def _end(self, sequence: _Sequence) -> dict[str, Any]:
        told = {"finish_reason": sequence.finish_reason, "generated_tokens": sequence.count, "seed": self._call.seed}
        return {**told, "input_length": self._active.prompt_tokens}

    def _details(self, sequence: _Sequence, prefill: Sequence[TokenLogprobs]) -> dict[str, Any]:
        body = self._end(sequence) | {"prefill": self._prefill(prefill), "tokens": sequence.tokens}
        del body["input_length"]
        return body | ({"top_tokens": sequence.top_tokens} if self._call.top_tokens else {})

    def _prefill(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The prompt's tokens, of which nothing comes before the first."""
        if not self._call.prefill:
            return []
        first = self._active.generations[0].prompt_ids[0]
        told = [{"id": first, "text": self._frontend.piece(first), "logprob": None}]
        return told + [
            {"id": entry.token, "text": self._frontend.piece(entry.token), "logprob": said(entry.logprob)}
            for entry in entries
        ]

    def _tokens(self, delta: Delta) -> Iterator[tuple[dict[str, Any], TokenLogprobs]]:
        """Each token of a delta, whose text stands with the last that is no control token: pieces of one may be bytes
        of a character."""
        plain = [place for place, token in enumerate(delta.token_ids) if token not in self._special]
        pieces = [self._frontend.piece(token) for token in delta.token_ids]
        whole = "".join(pieces[place] for place in plain) == delta.text
        for place, entry in enumerate(delta.logprobs):
            text = pieces[place]
            if not whole and place in plain:
                text = delta.text if place == plain[-1] else ""
            yield self._token(entry.token, entry.logprob, text), entry

    def _token(self, token: int, logprob: float, text: str) -> dict[str, Any]:
        return {"id": token, "text": text, "logprob": said(logprob), "special": token in self._special}

    def _top(self, entry: TokenLogprobs) -> list[dict[str, Any]]:
        found = entry.top[: self._call.top_tokens]
        return [self._token(token, logprob, self._frontend.piece(token)) for token, logprob in found]
