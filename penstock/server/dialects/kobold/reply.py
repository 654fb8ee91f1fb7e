"""Answers of the engine to Kobold's objects, and those that run now, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from penstock.core.request import FinishReason
from penstock.server.active_call import ActiveCall, GenerationError, event
from penstock.server.dialects.kobold.translate import KoboldCall

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend


class KoboldReply:
    """The answer to one call."""

    def __init__(self, call: KoboldCall, active: ActiveCall, frontend: Frontend) -> None:
        self._active = active
        self._frontend = frontend
        n = call.request.sampling.n
        self._pieces: list[list[str]] = [[] for _ in range(n)]
        self._tokens = [0] * n
        self._finish = ["stop"] * n  # also of answers that are aborted

    @property
    def text(self) -> str:
        """What there is so far."""
        return "".join(self._pieces[0])

    def abort(self) -> None:
        """Ends the answer, which is told as far as it has come."""
        for request in self._active.requests:
            self._frontend.client.cancel(request.live_id)

    async def whole(self) -> dict[str, Any]:
        """The complete object."""
        async for _ in self._walk():
            pass
        prompt = self._active.prompt_tokens
        results = [
            {
                "text": "".join(pieces),
                "finish_reason": self._finish[number],
                "logprobs": None,
                "prompt_tokens": prompt,
                "completion_tokens": self._tokens[number],
            }
            for number, pieces in enumerate(self._pieces)
        ]
        return {"results": results}

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream; the last tells why it ended."""
        async for text in self._walk():
            if text:
                yield event({"token": text, "finish_reason": None}, "message")
        yield event({"token": "", "finish_reason": self._finish[0]}, "message")

    async def _walk(self) -> AsyncIterator[str]:
        try:
            async for _, delta in self._active.deltas():
                self._pieces[delta.index].append(delta.text)
                self._tokens[delta.index] += len(delta.token_ids)
                if delta.finish_reason is FinishReason.LENGTH:
                    self._finish[delta.index] = "length"
                yield delta.text
        except GenerationError as error:
            if not error.cancelled:
                raise


class RunningReplies:
    """The answers that are written now, by their clients and names."""

    def __init__(self) -> None:
        self._replies: dict[tuple[str, str], KoboldReply] = {}

    def add(self, owner: str, genkey: str, reply: KoboldReply) -> None:
        """One more; of several of one name the newest is meant."""
        self._replies[owner, genkey] = reply

    def remove(self, owner: str, genkey: str, reply: KoboldReply) -> None:
        """It has ended."""
        if self._replies.get((owner, genkey)) is reply:
            del self._replies[owner, genkey]

    def find(self, owner: str, genkey: str) -> KoboldReply | None:
        """The one of that name, if it runs."""
        return self._replies.get((owner, genkey))
