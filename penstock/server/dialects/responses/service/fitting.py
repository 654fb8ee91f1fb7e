"""Chats that have outgrown the context, shortened where the client asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config.errors import ContextLengthError
from penstock.config.generation import GenerationRequest

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_OUTPUT_SHARE = 4  # of the context, one part is left for an answer whose length nobody limits


async def shortened(frontend: Frontend, request: GenerationRequest) -> GenerationRequest:
    """A chat without its oldest turns, no more of them than the context needs; a system message at its head stays.

    A turn begins where the user speaks, so that no tool's result loses its call. The last turn always stays; if it
    alone is too long, the request is refused as any other.
    """
    messages = request.messages or ()
    head = messages[:1] if messages and messages[0]["role"] == "system" else ()
    turns = [index for index, message in enumerate(messages) if message["role"] == "user" and index > len(head)]
    choices = [request, *(replace(request, messages=(*head, *messages[index:])) for index in turns)]
    context = frontend.info.max_model_len
    room = context - (request.sampling.max_tokens or context // _OUTPUT_SHARE)

    async def fits(choice: GenerationRequest) -> bool:
        try:
            return len(await frontend.tokenize(choice)) <= room
        except ContextLengthError:
            return False

    if await fits(request):
        return request
    low, high = min(1, len(turns)), len(turns)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(choices[middle]) else (middle + 1, high)
    return choices[low]
