"""`penstock pull`: a model by its name."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.command import Command

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def pull(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="owner/repo or owner/repo@revision (Hugging Face), hf.co/owner/repo:QUANT (a GGUF file there), "
            "name:tag or host/space/name:tag (a registry, as Ollama's), or an https:// address of a .gguf file.",
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Pull what cannot run here, too.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Speak plain HTTP to a registry.")] = False,
    streams: Annotated[int, typer.Option("--streams", min=1, max=32, help="Ranges under way at once.")] = 4,
) -> None:
    """Bring models here by their names. What was broken off goes on where it stopped; every byte is checked.

    HF_ENDPOINT names a mirror, HF_TOKEN opens private models, HTTPS_PROXY is used, HF_HUB_OFFLINE=1 loads nothing.
    """
    from penstock.cli.named_model import pull_model
    from penstock.library.store import open_store

    store = open_store()
    for name in names:
        found = pull_model(store, name, force=force, insecure=insecure, streams=streams)
        typer.echo(found)
