"""`penstock prune`: removes what no model needs."""

from __future__ import annotations

import typer

from penstock.cli.command import Command

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def prune() -> None:
    """Remove blobs that no model needs, and what came of pulls that were given up. Nothing goes while one runs."""
    from penstock.library.store import open_store
    from penstock.startup.memory_plan import format_bytes

    typer.echo(f"{format_bytes(open_store().prune())} became free")
