"""`penstock embed`: vectors of texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import typer

from penstock.cli.elsewhere import AskingCommand, Elsewhere, takes_continuing_model
from penstock.config.errors import EngineDeadError, RequestError
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False)
_TOGETHER: Final = 256  # texts in a request to a server


@app.command(cls=AskingCommand)
@takes_continuing_model
def embed(
    engine: EngineOptions | Elsewhere,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="One or more texts. Default: the lines of standard input."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Take standard input as one text, not line by line.")] = False,
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", min=1, help="Keep so many leading elements of each vector.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Vectors of length 1. Default: as the model says.")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option("--prompt-name", help="One of the model's own prompts, for example query.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, as OpenAI's API answers, instead of a vector a line.")
    ] = False,
) -> None:
    """Turn texts into vectors, one JSON list a line: penstock embed MODEL "A hotel in Paris." "A table for two." """
    from penstock.cli.terminal import configure_logging

    configure_logging(quiet=True)
    texts = _texts(text, whole)
    asked = {"dimensions": dimensions, "normalize": normalize, "prompt_name": prompt_name}
    if isinstance(engine, Elsewhere):
        told = _elsewhere(engine, texts, {name: value for name, value in asked.items() if value is not None})
    else:
        told = asyncio.run(_here(engine, texts, asked))
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    for entry in told["data"]:
        typer.echo(json.dumps(entry["embedding"]))


def _texts(given: Sequence[str] | None, whole: bool) -> list[str]:
    from penstock.cli.terminal import piped_input

    if given:
        return list(given)
    piped = piped_input() or ""
    texts = [piped] if whole else piped.splitlines()
    if not any(text.strip() for text in texts):
        raise RequestError("there is nothing to embed; give TEXT after the model, or lines on standard input.")
    return [text for text in texts if text.strip()]


async def _here(engine: EngineOptions, texts: Sequence[str], asked: dict[str, Any]) -> dict[str, Any]:
    from penstock.cli.start import start
    from penstock.cli.terminal import loading_bar

    llm = await start(engine)
    rows, tokens = list[list[float]](), 0
    try:
        with loading_bar(title="Embedding", unit="", waiting="Embedding") as told:
            for some in _parts(texts):
                for result in await llm.embed(some, **asked):
                    rows.append(list(result.values))
                    tokens += result.prompt_tokens
                told(len(rows), len(texts))
        return _listed(llm.info.model, rows, tokens)
    finally:
        await llm.close()


def _elsewhere(server: Elsewhere, texts: Sequence[str], asked: dict[str, Any]) -> dict[str, Any]:
    client = server.server()
    model = client.model(server.model)
    rows, tokens = list[list[float]](), 0
    for some in _parts(texts):
        told = client.request("POST", "/v1/embeddings", {"model": model, "input": list(some), **asked})
        try:
            found = sorted(told["data"], key=lambda entry: int(entry["index"]))
            if [int(entry["index"]) for entry in found] != list(range(len(some))):
                raise ValueError("not a vector for each text")
            rows += (entry["embedding"] for entry in found)
            tokens += int((told.get("usage") or {}).get("prompt_tokens") or 0)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise EngineDeadError(f"{client.url} does not answer /v1/embeddings as OpenAI does.") from None
    return _listed(model, rows, tokens)


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    return (texts[first : first + _TOGETHER] for first in range(0, len(texts), _TOGETHER))


def _listed(model: str, rows: Sequence[Sequence[float]], tokens: int) -> dict[str, Any]:
    data = [{"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
