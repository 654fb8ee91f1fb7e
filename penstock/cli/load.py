"""The two ways a load test sends a job: to a server that speaks OpenAI's API, or to an engine in this process."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.cli.measure import RequestRecord
from penstock.cli.workload import Job
from penstock.config.errors import ConfigError, PenstockError
from penstock.config.generation import GenerationRequest

if TYPE_CHECKING:
    import httpx

    from penstock.async_llm import AsyncLLM

Send = Callable[[Job], Awaitable[RequestRecord]]
ENDPOINTS = ("completions", "chat")


def _body(job: Job, model: str, endpoint: str, temperature: float) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": job.max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.ignore_eos:
        body["ignore_eos"] = True
    if endpoint == "completions":
        body["prompt"] = job.prompt if isinstance(job.prompt, str) else list(job.prompt)
    else:
        text = job.prompt if isinstance(job.prompt, str) else " ".join(map(str, job.prompt))
        body["messages"] = [{"role": "user", "content": text}]
    return body


def has_content(choice: dict[str, Any]) -> bool:
    """Whether a streamed choice of either endpoint brings something to read."""
    delta = choice.get("delta") or {}
    texts = (choice.get("text"), *(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")))
    return any(texts)


async def _stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> RequestRecord:
    import httpx

    started = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] = {}
    finished = False
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                return RequestRecord(started, time.perf_counter(), error=f"HTTP {response.status_code}: {text[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    finished = True
                    break
                event = json.loads(data)
                if "error" in event:
                    return RequestRecord(started, time.perf_counter(), tuple(times), error=str(event["error"])[:200])
                if any(has_content(choice) for choice in event.get("choices") or ()):
                    times.append(time.perf_counter())
                usage = event.get("usage") or usage
    except (httpx.HTTPError, ValueError) as error:
        return RequestRecord(started, time.perf_counter(), tuple(times), error=f"{type(error).__name__}: {error}"[:200])
    return RequestRecord(
        started,
        time.perf_counter(),
        tuple(times),
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or len(times)),
        int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        None if finished else "the stream ended without [DONE]",
    )


@asynccontextmanager
async def server_sender(
    base_url: str, *, model: str | None, api_key: str | None, endpoint: str, temperature: float = 0.0
) -> AsyncIterator[tuple[Send, str]]:
    """Gives (send, model name) for a server; without a model name the first one the server lists is taken.

    Raises:
        ConfigError: httpx is not installed, the endpoint is unknown, or the server does not answer as one that speaks
            OpenAI's API.
    """
    if find_spec("httpx") is None:
        raise ConfigError("a load test of a server needs httpx; install it with: pip install 'penstock-llm[bench]'.")
    import httpx

    if endpoint not in ENDPOINTS:
        raise ConfigError(f"--endpoint is {endpoint!r}; allowed: {', '.join(ENDPOINTS)}.")
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    root = base_url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=root, headers=headers, timeout=httpx.Timeout(600, connect=10), limits=limits, trust_env=False
    ) as client:
        name = model or await _first_model(client, root)

        async def send(job: Job) -> RequestRecord:
            return await _stream(client, path, _body(job, name, endpoint, temperature))

        yield send, name


async def _first_model(client: httpx.AsyncClient, root: str) -> str:
    import httpx

    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"no model could be listed at {root}/v1/models ({error}); is a server running there?"
        ) from None


async def engine_sender(llm: AsyncLLM, *, temperature: float = 0.0) -> Send:
    """Sends jobs to an engine in this process, which is started; a piece of content is what has tokens."""
    frontend = await llm.start()
    ids = itertools.count()

    async def send(job: Job) -> RequestRecord:
        started = time.perf_counter()
        times: list[float] = []
        tokens, error = 0, None
        params = llm.sampling(temperature=temperature, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)
        text = {"prompt": job.prompt} if isinstance(job.prompt, str) else {"prompt_ids": job.prompt}
        try:
            generation = await frontend.generate(GenerationRequest(f"bench-{next(ids)}", params, **text))
        except PenstockError as refusal:
            return RequestRecord(started, time.perf_counter(), error=str(refusal))
        async for delta in generation:
            if delta.token_ids:
                times.append(time.perf_counter())
                tokens += len(delta.token_ids)
            error = delta.error or error
        count, cached = len(generation.prompt_ids), generation.cached_tokens
        return RequestRecord(started, time.perf_counter(), tuple(times), count, tokens, cached, error)

    return send
