"""`penstock convert`: Hugging Face folder to GGUF file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import Command, model_names

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def convert(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", autocompletion=model_names, help="A model's name, folder or .gguf file."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .gguf file, or a folder. Default: the other form, in this folder."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FORMAT", help="bf16, f16 or f32; of a .gguf file also as `quantize` has them."),
    ] = None,
) -> None:
    """Write a model in the other form: a Hugging Face folder as a GGUF file, a GGUF file as a folder."""
    from penstock.cli.named_model import find_model
    from penstock.cli.terminal import loading_bar
    from penstock.config.names import served_name
    from penstock.startup.memory_plan import format_bytes
    from penstock.weights.open import open_checkpoint
    from penstock.weights.writers.float_folder import write_float_folder
    from penstock.weights.writers.quantize import quantize_model

    found = find_model(model)
    checkpoint = open_checkpoint(found.path)
    formats = {info.format for info in checkpoint.tensors.values()} & {"bf16", "f16", "f32"}
    usual = "bf16" if "bf16" in formats else "f32" if formats == {"f32"} and not checkpoint.metadata else "f16"
    format = (to or usual).lower()
    name = (found.name or served_name(str(found.path))).replace("/", "-").replace(":", "-")
    place = output or Path(name if checkpoint.metadata else f"{name}-{format.upper()}.gguf")
    with loading_bar(title="Converting", waiting="Reading the model") as told:
        if place.suffix == ".gguf":
            size = quantize_model(str(found.path), format, place, progress=told).nbytes
        else:
            size = write_float_folder(checkpoint, format, place.expanduser(), told)
    typer.echo(f"{place}: {format_bytes(size)} in {format}")
