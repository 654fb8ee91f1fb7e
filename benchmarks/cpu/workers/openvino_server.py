"""OpenVINO GenAI's continuous batching behind a small HTTP server, as its users write one: Starlette on uvicorn.

    python -m benchmarks.cpu.workers.openvino_server --model FOLDER --cache-gib 3 --threads 2 --port 8000

One thread steps the pipeline, another serves. Text is not decoded: an event holds a token's number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import openvino  # type: ignore[import-not-found]
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from benchmarks.cpu.workers.openvino import greedy, pipeline
from benchmarks.cpu.workers.protocol import die_with_parent


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: what it wants and where its tokens go; None ends them."""

    prompt: Sequence[int]
    new: int
    tokens: asyncio.Queue[int | None]
    loop: asyncio.AbstractEventLoop

    def tell(self, token: int | None) -> None:
        """Hands a token to the loop that serves."""
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)


class Steps:
    """The thread that owns the pipeline."""

    def __init__(self, made: Any) -> None:
        self._pipeline = made
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._running: list[tuple[Any, Asked, list[int]]] = []  # handle, request, tokens left
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, asked: Asked) -> None:
        """From any thread."""
        self._asked.put(asked)

    def _run(self) -> None:
        try:
            while True:
                while not self._running or not self._asked.empty():
                    self._add(self._asked.get())
                self._pipeline.step()
                self._running = [entry for entry in self._running if self._told(*entry)]
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # nobody would be answered any more

    def _add(self, asked: Asked) -> None:
        ids = openvino.Tensor(numpy.asarray([asked.prompt], dtype=numpy.int64))
        handle = self._pipeline.add_request(self._count, ids, greedy(asked.new))
        self._count += 1
        self._running.append((handle, asked, [asked.new]))

    @staticmethod
    def _told(handle: Any, asked: Asked, left: list[int]) -> bool:
        """Whether tokens are still to come."""
        while handle.can_read():
            for output in handle.read().values():
                for token in output.generated_ids:
                    asked.tell(int(token))
                    left[0] -= 1
        if left[0] > 0:
            return True
        asked.tell(None)
        return False


def application(steps: Steps) -> Starlette:
    """Completions of token ids, streamed, and whether it is up."""

    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        asked = Asked(body["prompt"], body["max_tokens"], asyncio.Queue(), asyncio.get_running_loop())
        steps.submit(asked)

        async def events() -> AsyncIterator[str]:
            while (token := await asked.tokens.get()) is not None:
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': str(token)}]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    return Starlette(
        routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)],
    )


def main() -> None:
    """Serves until it is killed, or its parent ends."""
    die_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache-gib", type=int, default=3)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    setup = {"model": given.model, "cache_gib": given.cache_gib, "caching": True, "threads": given.threads}
    uvicorn.run(application(Steps(pipeline(setup))), host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
