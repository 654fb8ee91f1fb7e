"""`penstock push`: sends a model to a registry."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.command import Command, model_names

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def push(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", autocompletion=model_names, help="Of the model, and of its registry: host/space/name:tag."
        ),
    ],
    insecure: Annotated[bool, typer.Option("--insecure", help="Speak plain HTTP to the registry.")] = False,
) -> None:
    """Send a model to a registry: what it lacks, then the name. `docker login HOST` keeps credentials."""
    from penstock.cli.named_model import wish
    from penstock.library.push import push as push_model
    from penstock.library.store import open_store

    with wish(insecure=insecure, title="Pushing") as wanted:
        push_model(open_store(), name, wanted)
    typer.echo(f"pushed {name}")
