"""`penstock complete`: raw completion of a text, by a model here or a running server's."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.answer_view import harmless
from penstock.cli.elsewhere import AskingCommand, Elsewhere, takes_continuing_model
from penstock.cli.options import takes_sampling
from penstock.config.errors import ConfigError, EngineDeadError, PenstockError
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.cli.server_client import Server

app = typer.Typer(add_completion=False)
Write = Callable[[str], None]
Continue = Callable[[str, Write], Awaitable[dict[str, Any]]]
"""Continues a text, tells the pieces as they come, and gives all that is known at the end."""


@app.command(cls=AskingCommand)
@takes_continuing_model
@takes_sampling
def complete(
    engine: EngineOptions | Elsewhere,
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", "--quick", "-q", help="The text to continue. Default: standard input."),
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Alternatives listed with each token, with --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="Answer requests in the form of OpenAI's batches, one a line.")
    ] = False,
    batch_input: Annotated[Path | None, typer.Option("--input", help="Their file. Default: standard input.")] = None,
    batch_output: Annotated[Path | None, typer.Option("--output", help="Where the answers go, a line each.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what --output has answers of.")] = False,
    at_once: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, max=4096, help="Requests at a time. Default: 64.")
    ] = None,
) -> None:
    """Continue a text; no chat template. At a terminal without a text, one line after the other is continued.

    With --batch, answer the requests of a file: chats, completions and embeddings.
    """
    from penstock.cli.terminal import configure_logging, piped_input

    configure_logging(quiet=True)
    flags = {"--max-concurrency": at_once, "--input": batch_input, "--output": batch_output, "--resume": resume or None}
    _check_batch(batch, [flag for flag, given in flags.items() if given is not None], batch_input, batch_output)
    if batch:
        own = [prompt, logprobs, as_json or None, *(value for value in sampling.values() if value is not False)]
        if any(value is not None for value in own):
            raise ConfigError("--batch has requests with bodies of their own; leave out --prompt, --json and sampling.")
        answer_batch(engine, batch_input, batch_output, resume=resume, at_once=at_once or 64)
        return
    prompt = piped_input() if prompt is None else prompt
    if as_json and prompt is None:
        raise ConfigError("there is nothing to continue; give --prompt TEXT, or a text on standard input.")
    if engine.seed is not None:
        sampling["seed"] = engine.seed
    if as_json:
        sampling["logprobs"] = logprobs or 0
    with asyncio.Runner() as runner:
        if isinstance(engine, Elsewhere):
            server = engine.server()
            _each(runner, partial(_elsewhere, server, server.model(engine.model), sampling), prompt, as_json)
        else:
            began = time.perf_counter()
            llm = runner.run(_started(engine, sampling))
            try:
                _each(runner, partial(_here, llm, sampling, time.perf_counter() - began), prompt, as_json)
            finally:
                runner.run(llm.close())


def _check_batch(batch: bool, flags: Sequence[str], given: Path | None, wanted: Path | None) -> None:
    """Refuses flags of a batch that have nothing to say, or contradict each other."""
    if flags and not batch:
        raise ConfigError(f"{flags[0]} is given without --batch; add it, or leave {flags[0]} out.")
    if "--resume" in flags and wanted is None:
        raise ConfigError("--resume goes on with the file of --output, which is not given.")
    if given is not None and wanted is not None and given.resolve() == wanted.resolve():
        raise ConfigError(f"--input and --output are both {given}; the answers need a file of their own.")


def answer_batch(
    engine: EngineOptions | Elsewhere, given: Path | None, wanted: Path | None, *, resume: bool, at_once: int
) -> None:
    """Answers a batch; ends with exit status 1 if any of it failed."""
    from penstock.cli.batch import BatchLines, Tally, asking_here, output, run_batch, source

    async def run(lines: BatchLines, write: Callable[[dict[str, Any]], None]) -> Tally:
        if isinstance(engine, Elsewhere):
            async with engine.server().client(at_once) as client:
                return await run_batch(lines, client, write, at_once)
        llm = await _started(engine, {})
        try:
            async with asking_here(llm) as client:
                return await run_batch(lines, client, write, at_once)
        finally:
            await llm.close()

    with source(given) as file, output(wanted, resume=resume) as (write, done):
        tally = asyncio.run(run(BatchLines(file, done), write))
    passed = f", {len(done)} were answered before" if done else ""
    typer.echo(f"penstock: {tally.completed} completed, {tally.failed} failed{passed}.", err=True)
    if tally.failed:
        raise typer.Exit(1)


async def _started(engine: EngineOptions, sampling: dict[str, Any]) -> AsyncLLM:
    from penstock.cli.start import start

    return await start(engine, sampling)


def _each(runner: asyncio.Runner, proceed: Continue, prompt: str | None, as_json: bool) -> None:
    """Continues one text, or those that a person types."""
    if prompt is not None:
        found = runner.run(_one(proceed, prompt, as_json))
        typer.echo(json.dumps(found, ensure_ascii=False) if as_json else "")
        return
    from penstock.cli.line_editor import LineEditor

    editor = LineEditor((), ())
    typer.echo("Type a text to have it continued; Ctrl-D leaves.", err=True)
    while True:
        try:
            runner.run(_one(proceed, editor.read(), as_json))
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo("[stopped]", err=True, nl=False)
        except PenstockError as error:
            typer.echo(f"penstock: {error}", err=True, nl=False)
        typer.echo("")


async def _one(proceed: Continue, prompt: str, as_json: bool) -> dict[str, Any]:
    def write(text: str) -> None:
        typer.echo(harmless(text) if sys.stdout.isatty() else text, nl=False)

    return await proceed(prompt, (lambda text: None) if as_json else write)


async def _here(llm: AsyncLLM, sampling: dict[str, Any], load_s: float, prompt: str, write: Write) -> dict[str, Any]:
    from penstock.cli.talkers import Usage
    from penstock.config.generation import GenerationRequest
    from penstock.core.request import FinishReason

    params, frontend = llm.sampling(**sampling), await llm.start()
    sent = time.perf_counter()
    generation = await frontend.generate(GenerationRequest(llm.next_id(), params, prompt=prompt))
    deltas, first = [], None
    try:
        async for delta in generation:
            if delta.token_ids and first is None:
                first = time.perf_counter()
            deltas.append(delta)
            write(delta.text)
    finally:
        await generation.aclose()
    ended = time.perf_counter()
    token_ids = [token for delta in deltas for token in delta.token_ids]
    if deltas[-1].finish_reason is FinishReason.ERROR:
        raise EngineDeadError(deltas[-1].error or "the engine stopped before the answer ended.")
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    return {
        "text": "".join(delta.text for delta in deltas),
        "token_ids": token_ids,
        "logprobs": [
            {"token": e.token, "logprob": e.logprob, "rank": e.rank, "top": [list(pair) for pair in e.top]}
            for e in logprobs
        ],
        "finish_reason": deltas[-1].finish_reason,
        "usage": Usage(len(generation.prompt_ids), generation.cached_tokens, len(token_ids)).as_json(),
        "timings": {"load_ms": 1e3 * load_s, **_timings(sent, first or ended, ended, len(token_ids))},
    }


async def _elsewhere(server: Server, model: str, sampling: dict[str, Any], prompt: str, write: Write) -> dict[str, Any]:
    """The same of a server's model; tokens of log-probabilities are texts then, as OpenAI has them."""
    from penstock.cli.talkers import Usage

    given = {name: value for name, value in sampling.items() if value is not False}
    body = {**given, "model": model, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    if "logprobs" in given:
        body["return_token_ids"] = True
    usage = Usage()
    texts, token_ids = list[str](), list[int]()
    logprobs = list[dict[str, Any]]()
    finish, first = None, None
    sent = time.perf_counter()
    async for event in server.stream("/v1/completions", body):
        usage.take(event.get("usage") or {})
        for choice in event.get("choices") or ():
            if text := choice.get("text") or "":
                first = first or time.perf_counter()
                write(text)
            texts.append(text)
            token_ids += choice.get("token_ids") or ()
            logprobs += _entries(choice.get("logprobs") or {})
            finish = choice.get("finish_reason") or finish
    ended = time.perf_counter()
    return {
        "text": "".join(texts),
        "token_ids": token_ids,
        "logprobs": logprobs,
        "finish_reason": finish,
        "usage": usage.as_json(),
        "timings": _timings(sent, first or ended, ended, usage.output),
    }


def _entries(told: dict[str, Any]) -> list[dict[str, Any]]:
    """OpenAI's columns of log-probabilities, a token each."""
    tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
    tops = told.get("top_logprobs") or [None] * len(tokens)
    return [
        {"token": token, "logprob": value, "rank": None, "top": [list(pair) for pair in (top or {}).items()]}
        for token, value, top in zip(tokens, values, tops, strict=False)
    ]


def _timings(sent: float, first: float, ended: float, tokens: int) -> dict[str, float | None]:
    """Milliseconds to the first token and in all; tokens a second after the first."""
    return {
        "ttft_ms": 1e3 * (first - sent),
        "total_ms": 1e3 * (ended - sent),
        "output_tokens_per_s": (tokens - 1) / (ended - first) if tokens > 1 and ended > first else None,
    }
