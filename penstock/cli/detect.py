"""`penstock detect`: whether a text was written with a watermark."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.command import Command
from penstock.cli.options import MODEL_FLAGS, takes
from penstock.config.errors import RequestError
from penstock.config.samplers import SamplerParams

app = typer.Typer(add_completion=False)
_FEWEST = 16  # pairs of tokens, below which nothing can be said


@app.command(cls=Command)
@takes("model", (MODEL_FLAGS[0],), lambda given: given["model"])
def detect(
    model: str | None,
    text: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="The text. Default: standard input.")] = None,
    gamma: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="The share of marked tokens (watermark_gamma).")
    ] = SamplerParams().watermark_gamma,
    key: Annotated[
        int,
        typer.Option(
            "--key", "--watermark-key", min=0, max=2**53, help="The number the text was marked with (watermark_key)."
        ),
    ] = SamplerParams().watermark_key,
    threshold: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Standard deviations from which a text counts as marked.")
    ] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether a text was written with a watermark, by the tokens of the model that wrote it. Loads no weights."""
    from penstock.cli.named_model import find_model
    from penstock.cli.terminal import read_standard_input
    from penstock.config.environment import read_environment
    from penstock.config.options import EngineOptions
    from penstock.engine.text_pipeline import TextPipeline
    from penstock.evaluate import watermark

    given = " ".join(text) if text else read_standard_input()
    found = find_model(model or read_environment().model or EngineOptions().model)
    tokens = TextPipeline.load(str(found.path)).tokenizer.encode(given, add_special_tokens=False)
    told = watermark.detect(tokens, gamma, key)
    if told.scored < _FEWEST:
        told_of = f"the text has {told.scored} different pairs of tokens; at least {_FEWEST} are needed"
        raise RequestError(f"{told_of} to tell a watermark from chance. Give a longer text.")
    marked = told.z >= threshold
    if as_json:
        typer.echo(json.dumps({"watermark": marked, **asdict(told)}))
        return
    share = told.green / told.scored
    typer.echo("watermark" if marked else "no watermark")
    typer.echo(f"{told.green} of {told.scored} pairs are marked ({share:.0%}; chance: {gamma:.0%})")
    typer.echo(f"z {told.z:.2f}, p {told.p:.2g}")
