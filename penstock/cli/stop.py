"""`penstock stop`: has a running server unload a model."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.command import Command, model_names
from penstock.cli.server_client import DEFAULT_URL, URL, ask
from penstock.config.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=model_names, help="As `penstock ps` shows it.")],
    url: URL = DEFAULT_URL,
) -> None:
    """Have a running server unload a model, whose memory becomes free; it is loaded again when it is asked."""
    told = ask(url, "POST", "/api/generate", {"model": name, "keep_alive": 0, "stream": False})
    if told.get("done_reason") != "unload":
        raise ConfigError(f"the server at {url} serves {name} alone, and does not unload it; end the server instead.")
    typer.echo(f"stopped {name}")
