"""`penstock ps`: what a running server has loaded."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from penstock.cli.command import Command
from penstock.cli.server_client import DEFAULT_URL, URL, ask

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def ps(
    url: URL = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer.")] = False,
) -> None:
    """List the models that a running server has loaded. PENSTOCK_API_KEY is sent to one with keys."""
    from penstock.cli.terminal import print_table
    from penstock.startup.memory_plan import format_bytes

    told = ask(url, "GET", "/api/ps")
    if as_json:
        typer.echo(json.dumps(told))
        return
    rows = [
        (
            str(model.get("name", "")),
            str(model.get("digest") or "")[:12],
            format_bytes(int(model.get("size") or 0)),
            f"{model['context_length']:,}" if model.get("context_length") else "",
            str(model.get("expires_at") or "").partition(".")[0],
        )
        for model in told.get("models", ())
    ]
    print_table("", ("NAME", "ID", "SIZE", "CONTEXT", "UNTIL"), rows)
