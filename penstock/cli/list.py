"""`penstock list`: the models and adapters that are here."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.command import Command, model_names

if TYPE_CHECKING:
    from penstock.library.store import Entry

app = typer.Typer(add_completion=False)
_AGES = ((86400 * 30, "months"), (86400 * 7, "weeks"), (86400, "days"), (3600, "hours"), (60, "minutes"))


@app.command("list", cls=Command)
def list_models(
    like: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=model_names, help="Only names that begin with this.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models that are here: pulled and made ones, Ollama's, those of the Hugging Face cache, the bundled; then
    the adapters that were pulled.
    """
    from penstock.cli.terminal import print_table
    from penstock.library.store import open_store
    from penstock.startup.memory_plan import format_bytes

    store = open_store()
    entries = [entry for entry in (*store.list(), *store.adapters()) if entry.name.lower().startswith(like.lower())]
    if as_json:
        names = ("name", "bytes", "digest", "modified", "where")
        rows = [{name: getattr(entry, name) for name in names} | {"details": dict(entry.details)} for entry in entries]
        typer.echo(json.dumps(rows, ensure_ascii=False))
        return
    now = time.time()
    print_table(
        "",
        ("NAME", "ID", "SIZE", "MODIFIED", "WHERE"),
        [(e.name, e.digest[:12], format_bytes(e.bytes), age(now - e.modified), _where(e)) for e in entries],
    )


def _where(entry: Entry) -> str:
    return f"{entry.where}, adapter" if entry.details.get("format") == "adapter" else entry.where


def age(seconds: float) -> str:
    """A time in people's words: "3 days ago"."""
    for size, unit in _AGES:
        if (count := int(seconds // size)) >= 1:
            return f"{count} {unit if count > 1 else unit[:-1]} ago"
    return "just now"
