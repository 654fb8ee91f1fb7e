"""Many requests of a file in the form of OpenAI's batches, by a model here or a running server's.

A line in is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}, a line out
{"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": {…}}, "error": null}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import typer

from penstock.cli.server_client import PATIENCE_S, patiently
from penstock.config.errors import ConfigError, EngineDeadError, RequestError, quoted

if TYPE_CHECKING:
    import httpx2

    from penstock.async_llm import AsyncLLM

PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
LONGEST_LINE: Final = 33 << 20  # bytes: more than a server takes
LONGEST_ID: Final = 512


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(RequestError):
    """A line that asks nothing; `custom_id` is told if it has one."""

    def __init__(self, message: str, code: str, custom_id: str | None = None) -> None:
        super().__init__(message, code=code)
        self.custom_id = custom_id


@dataclass(slots=True)
class BatchLines:
    """Reads a batch line by line; a `custom_id` is taken once, and those in `done` are passed over."""

    source: IO[bytes]
    done: frozenset[str] = frozenset()
    _seen: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[BatchRequest | LineError]:
        number = 0
        while line := self.source.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = self.source.readline(LONGEST_LINE)
                yield LineError(f"line {number} has more than {LONGEST_LINE:,} bytes.", "line_too_long")
            elif line.strip():
                try:
                    request = self._parse(number, line)
                except LineError as error:
                    yield error
                else:
                    if request.custom_id not in self.done:
                        yield request

    def _parse(self, number: int, line: bytes) -> BatchRequest:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LineError(f"line {number} is no JSON: {error}", "invalid_json_line") from None
        custom_id = found.get("custom_id") if isinstance(found, dict) else None
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= LONGEST_ID:
            allowed = f"a text of 1 to {LONGEST_ID} characters"
            raise LineError(f"line {number} has no custom_id; allowed: {allowed}.", "missing_custom_id")
        if custom_id in self._seen:
            raise LineError(f"line {number} has the custom_id of an earlier line.", "duplicate_custom_id", custom_id)
        self._seen.add(custom_id)
        url, body = found.get("url"), found.get("body")
        if found.get("method", "POST") != "POST" or url not in PATHS:
            message = f"line {number} asks for {quoted(str(url))}; allowed: POST to {', '.join(PATHS)}."
            raise LineError(message, "invalid_url", custom_id)
        if not isinstance(body, dict) or body.get("stream") or body.get("background"):
            message = f"line {number} has no object as body, or asks for a stream or for work in the background."
            raise LineError(message, "invalid_body", custom_id)
        return BatchRequest(custom_id, str(url), body)


@dataclass(slots=True)
class Tally:
    """What became of a batch's requests."""

    completed: int = 0
    failed: int = 0


async def run_batch(
    lines: BatchLines,
    client: httpx2.AsyncClient,
    write: Callable[[dict[str, Any]], None],
    at_once: int,
    patience_s: float = PATIENCE_S,
) -> Tally:
    """Answers every line, `at_once` at a time, and writes each answer when it is there.

    What a server that is busy or away does not answer is asked for again for `patience_s`, and no more lines are read
    than there are places.
    """
    tally, slots = Tally(), asyncio.Semaphore(at_once)
    tasks = set[asyncio.Task[None]]()

    def written(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        if response is not None and response["status_code"] < 400:
            tally.completed += 1
        else:
            tally.failed += 1
        write({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error})

    async def answer(request: BatchRequest) -> None:
        try:
            written(request.custom_id, *await _answered(client, request, patience_s))
        finally:
            slots.release()

    try:
        reader = iter(lines)
        while (line := await asyncio.to_thread(next, reader, None)) is not None:  # who pipes them in may be slow
            if isinstance(line, LineError):
                written(line.custom_id, None, {"code": str(line.code), "message": str(line)})
                continue
            await slots.acquire()
            for done in [task for task in tasks if task.done()]:
                tasks.discard(done)
                done.result()
            tasks.add(asyncio.ensure_future(answer(line)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tally


async def _answered(
    client: httpx2.AsyncClient, request: BatchRequest, patience_s: float
) -> tuple[dict[str, Any] | None, dict[str, str] | None]:
    """(response, error) of a line, of which one is None."""
    try:
        answer = await patiently(client, "POST", request.url, request.body, patience_s)
        body = answer.json()
    except EngineDeadError as error:
        return None, {"code": "no_answer", "message": str(error)}
    except ValueError:
        body = {"error": {"message": answer.text[:300]}}
    except Exception as error:  # of one line, which stops no other
        return None, {"code": "no_answer", "message": f"{type(error).__name__}: {error}"}
    request_id = answer.headers.get("x-request-id", "")
    return {"status_code": answer.status_code, "request_id": request_id, "body": body}, None


@contextmanager
def output(path: Path | None, *, resume: bool) -> Iterator[tuple[Callable[[dict[str, Any]], None], frozenset[str]]]:
    """Gives what writes lines to a file (None: standard output), and which requests it has answers of already.

    Raises:
        ConfigError: the file is there and not to be resumed, or cannot be written.
    """
    if path is None:
        yield lambda told: typer.echo(json.dumps(told)), frozenset()
        return
    if path.exists() and not resume:
        raise ConfigError(f"{path} is there already; --resume goes on with it, or name another --output.")
    with ExitStack() as stack:
        try:
            done = _answered_before(path) if path.exists() else frozenset[str]()
            file = stack.enter_context(path.open("a", encoding="ascii"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None

        def write(told: dict[str, Any]) -> None:
            file.write(json.dumps(told) + "\n")
            file.flush()

        yield write, done


def _answered_before(path: Path) -> frozenset[str]:
    """The ids that were answered well; cuts off a last line that a writer who was killed has begun."""
    done, whole = set[str](), 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                break
            whole += len(line)
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                found = json.loads(line)
                if found["response"]["status_code"] < 400:
                    done.add(str(found["custom_id"]))
    return frozenset(done)


@contextmanager
def source(path: Path | None) -> Iterator[IO[bytes]]:
    """The lines of a file, or of standard input.

    Raises:
        ConfigError: the file cannot be read, or nothing is piped in.
    """
    if path is not None:
        try:
            with path.open("rb") as file:
                yield file
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    elif sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("--batch reads requests from standard input; pipe a file in, or name one with --input.")
    else:
        yield sys.stdin.buffer


@asynccontextmanager
async def asking_here(llm: AsyncLLM) -> AsyncIterator[httpx2.AsyncClient]:
    """What asks an engine in this process, through the server's own application."""
    import httpx2

    from penstock.config.options import ServerOptions
    from penstock.server.app import create_app

    app = create_app(await llm.start(), ServerOptions(page=False))
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client,
    ):
        yield client
