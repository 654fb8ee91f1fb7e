"""`penstock tokenize`: a text's token ids and pieces, or the text of ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from penstock.cli.command import Command
from penstock.cli.elsewhere import SERVER_FLAGS, Elsewhere, place
from penstock.cli.options import MODEL_FLAGS, takes
from penstock.config.errors import EngineDeadError, RequestError, format_value

app = typer.Typer(add_completion=False)


def _model_or_server(given: Mapping[str, Any]) -> str | Elsewhere | None:
    own, elsewhere = place(given)
    model: str | None = own["model"]
    return elsewhere or model


@app.command(cls=Command)
@takes("model", (MODEL_FLAGS[0], *SERVER_FLAGS), _model_or_server)
def tokenize(
    model: str | Elsewhere | None,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="The text, or ids with --decode. Default: standard input."),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", "-d", help="Turn token ids into text.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the ids alone, as one JSON list.")] = False,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Begin and end as the model's texts do.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the tokens of a text, an id and a piece a line; with --decode the text of ids. Loads no weights."""
    from penstock.cli.terminal import read_standard_input

    given = " ".join(text) if text else read_standard_input()
    names = _Elsewhere(model) if isinstance(model, Elsewhere) else _Here(model)
    if decode:
        decoded = names.decode(_ids(given))
        typer.echo(json.dumps({"text": decoded}, ensure_ascii=False) if as_json else decoded)
        return
    found, pieces = names.encode(given, special)
    if as_json:
        typer.echo(json.dumps({"count": len(found), "tokens": found, "pieces": pieces}, ensure_ascii=False))
    elif ids:
        typer.echo(json.dumps(found))
    else:
        for token, piece in zip(found, pieces, strict=True):
            typer.echo(f"{token:>7}  {json.dumps(piece, ensure_ascii=False)}")


def _ids(text: str) -> list[int]:
    """Numbers between anything that is no digit or sign, so that lists in JSON are understood.

    Raises:
        RequestError: something else stands there, or nothing.
    """
    words = re.split(r"[\s,\[\]]+", text.strip(" \t\r\n[],"))
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise RequestError(f"{format_value(word)} is no token id; give numbers, for example: --decode MODEL 1 2 3")
    return [int(word) for word in words]


class _Here:
    """The tokenizer of a model on this machine."""

    def __init__(self, model: str | None) -> None:
        from penstock.cli.named_model import find_model
        from penstock.config.environment import read_environment
        from penstock.config.options import EngineOptions
        from penstock.engine.text_pipeline import TextPipeline

        found = find_model(model or read_environment().model or EngineOptions().model)
        self._text = TextPipeline.load(str(found.path))

    def encode(self, text: str, special: bool) -> tuple[list[int], list[str]]:
        tokenizer = self._text.tokenizer
        found = tokenizer.encode(text, add_special_tokens=special)
        return found, [tokenizer.piece(token) or "" for token in found]

    def decode(self, ids: Sequence[int]) -> str:
        if (largest := max(ids)) >= self._text.vocab_size:
            raise RequestError(f"{largest} is no token of this model; ids are below {self._text.vocab_size}.")
        return self._text.tokenizer.decode(ids, skip_special_tokens=False)


class _Elsewhere:
    """The tokenizer of a running server's model."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        self._server = elsewhere.server()
        self._model = self._server.model(elsewhere.model)

    def encode(self, text: str, special: bool) -> tuple[list[int], list[str]]:
        body = {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
        told = self._ask("/tokenize", body)
        try:
            found = [int(token) for token in told["tokens"]]
            return found, [str(piece) for piece in told.get("token_strs") or [""] * len(found)]
        except (AttributeError, LookupError, TypeError, ValueError):
            raise self._strange("/tokenize") from None

    def decode(self, ids: Sequence[int]) -> str:
        told = self._ask("/detokenize", {"tokens": list(ids)})
        try:
            return str(told["prompt"])
        except (LookupError, TypeError):
            raise self._strange("/detokenize") from None

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return self._server.request("POST", path, {"model": self._model, **body})

    def _strange(self, path: str) -> EngineDeadError:
        return EngineDeadError(f"{self._server.url} does not answer {path} as vLLM and Penstock do.")
