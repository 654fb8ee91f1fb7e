"""`penstock import`: a name for what lies here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import Command

app = typer.Typer(add_completion=False)


@app.command("import", cls=Command)
def import_model(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face folder or a .gguf file.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is to be called: my-model:latest.")],
) -> None:
    """Give a folder or file of this machine a name. On the store's disk its bytes are shared, else copied."""
    from penstock.cli.terminal import loading_bar
    from penstock.library.make import add_path
    from penstock.library.names import registry_name
    from penstock.library.store import open_store

    store = open_store()
    target = registry_name(name, store.places.registry)
    with loading_bar(title="Importing", waiting="Reading the model") as told:
        add_path(store, path.expanduser(), target, told)
    typer.echo(f"imported {target}")
