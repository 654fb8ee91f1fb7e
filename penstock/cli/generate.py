"""`penstock generate`: raw completion of a text."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import typer

from penstock.cli.command import Command
from penstock.cli.options import takes_engine_options, takes_sampling
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
@takes_engine_options
@takes_sampling
def generate(
    engine: EngineOptions,
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to continue. Default: standard input.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Alternatives listed with each token, with --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Continue a text; no chat template."""
    from penstock.cli.terminal import configure_logging, piped_input

    configure_logging(quiet=True)
    if prompt is None:
        prompt = piped_input()
        if prompt is None:
            raise ConfigError("there is nothing to continue; give --prompt TEXT, or a text on standard input.")
    sampling["seed"] = engine.seed
    if as_json:
        sampling["logprobs"] = logprobs or 0
    with asyncio.Runner() as runner:
        result = runner.run(_generate(engine, prompt, sampling, streamed=not as_json))
    typer.echo(json.dumps(result, ensure_ascii=False) if as_json else "")


async def _generate(engine: EngineOptions, prompt: str, sampling: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    from penstock.cli.start import start
    from penstock.core.request import FinishReason, GenerationRequest

    began = time.perf_counter()
    llm = await start(engine, sampling)
    try:
        params, frontend = llm.sampling(**sampling), await llm.start()
        sent = time.perf_counter()
        generation = await frontend.generate(GenerationRequest("generate", params, prompt=prompt))
        deltas, first = [], None
        async for delta in generation:
            if delta.token_ids and first is None:
                first = time.perf_counter()
            deltas.append(delta)
            if streamed:
                typer.echo(delta.text, nl=False)
        ended = time.perf_counter()
    finally:
        await llm.close()
    token_ids = [token for delta in deltas for token in delta.token_ids]
    if deltas[-1].finish_reason is FinishReason.ERROR:
        raise ConfigError(deltas[-1].error or "the engine stopped before the answer ended.")
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    return {
        "text": "".join(delta.text for delta in deltas),
        "token_ids": token_ids,
        "logprobs": [
            {"token": e.token, "logprob": e.logprob, "rank": e.rank, "top": [list(pair) for pair in e.top]}
            for e in logprobs
        ],
        "finish_reason": deltas[-1].finish_reason,
        "usage": {
            "prompt_tokens": len(generation.prompt_ids),
            "completion_tokens": len(token_ids),
            "total_tokens": len(generation.prompt_ids) + len(token_ids),
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        },
        "timings": _timings(began, sent, first or ended, ended, len(token_ids)),
    }


def _timings(began: float, sent: float, first: float, ended: float, tokens: int) -> dict[str, float | None]:
    """Milliseconds to load, to the first token and in all; tokens a second after the first."""
    return {
        "load_ms": 1e3 * (sent - began),
        "ttft_ms": 1e3 * (first - sent),
        "total_ms": 1e3 * (ended - sent),
        "output_tokens_per_s": (tokens - 1) / (ended - first) if tokens > 1 and ended > first else None,
    }
