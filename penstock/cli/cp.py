"""`penstock cp`: another name for a model."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.command import Command, model_names

app = typer.Typer(add_completion=False)


@app.command("cp", cls=Command)
def copy(
    source: Annotated[str, typer.Argument(metavar="NAME", autocompletion=model_names, help="A model that is here.")],
    target: Annotated[str, typer.Argument(metavar="NEW", help="Its new name, for example my-model:latest.")],
) -> None:
    """Give a model another name. Its parts are shared, so that it takes no room."""
    from penstock.library.make import copy_model
    from penstock.library.store import open_store

    typer.echo(f"copied {source} to {copy_model(open_store(), source, target)}")
