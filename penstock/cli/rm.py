"""`penstock rm`: removes models and adapters."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.command import Command, model_names

app = typer.Typer(add_completion=False)


@app.command("rm", cls=Command)
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", autocompletion=model_names, help="As `penstock list` shows them.")
    ],
) -> None:
    """Remove models and pulled adapters, and what only they needed. One of the Hugging Face cache goes from there."""
    from penstock.library.store import open_store
    from penstock.startup.memory_plan import format_bytes

    store = open_store()
    for name in names:
        typer.echo(f"removed {name} ({format_bytes(store.remove(name))} became free)")
