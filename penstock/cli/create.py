"""`penstock create`: a model of a Modelfile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import Command

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the model is to be called: my-model:latest.")],
    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="The Modelfile, which paths are relative to.")
    ] = Path("Modelfile"),
    quantize: Annotated[
        str | None, typer.Option("--quantize", "-q", metavar="FORMAT", help="Write the weights smaller: q4_k_m, …")
    ] = None,
) -> None:
    """Make a model: FROM another one, with PARAMETER, TEMPLATE, SYSTEM, ADAPTER, LICENSE and MESSAGE.

    A TEMPLATE is Jinja, or Go's as Ollama has them, which is translated. Unchanged weights are shared, not copied.
    """
    from penstock.cli.named_model import find_model
    from penstock.cli.terminal import loading_bar
    from penstock.config.errors import ConfigError
    from penstock.library.create import create as create_model
    from penstock.library.modelfile import parse_modelfile
    from penstock.library.names import registry_name
    from penstock.library.store import open_store
    from penstock.weights.writers.quantize import quantize_model

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}; name the Modelfile with -f.") from None
    made, store = parse_modelfile(text), open_store()
    target = registry_name(name, store.places.registry)
    if not (file.parent / made.base).exists():
        find_model(made.base)  # pulls it, if the person wants that

    with loading_bar(title="Creating", waiting="Reading the model") as told:

        def smaller(model: Path, output: Path) -> None:
            quantize_model(str(model), (quantize or "").lower(), output, progress=told)

        create_model(store, target, made, file.parent, quantize=smaller if quantize else None, told=told)
    typer.echo(f"created {target}")
