"""`penstock inspect`: a model's metadata and tensors."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.cli.command import Command, model_names

app = typer.Typer(add_completion=False)
_SHOWN = 60  # characters of a value


@app.command("inspect", cls=Command)
def inspect_model(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", autocompletion=model_names, help="A model's name, folder or .gguf file."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all values.")] = False,
) -> None:
    """List a model's metadata, or configuration, and its tensors by the names of Hugging Face."""
    from penstock.cli.named_model import find_model
    from penstock.cli.terminal import print_table
    from penstock.startup.memory_plan import format_bytes
    from penstock.weights.open import open_checkpoint

    checkpoint = open_checkpoint(find_model(name).path)
    told = dict(checkpoint.metadata or checkpoint.config)
    tensors = list(checkpoint.tensors.values())
    if as_json:
        rows = [{"name": t.name, "shape": t.shape, "format": t.format, "bytes": t.nbytes} for t in tensors]
        typer.echo(json.dumps({"path": str(checkpoint.path), "metadata": told, "tensors": rows}, ensure_ascii=False))
        return
    print_table(str(checkpoint.path), ("key", "value"), [(key, _short(value)) for key, value in told.items()])
    typer.echo("")
    rows_shown = [(t.name, "x".join(map(str, t.shape)), t.format, format_bytes(t.nbytes)) for t in tensors]
    print_table(f"{len(tensors)} tensors", ("tensor", "shape", "format", "size"), rows_shown)


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"{len(value):,} values"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
