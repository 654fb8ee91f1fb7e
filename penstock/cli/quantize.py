"""`penstock quantize`: a smaller copy of a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import Command, one_of
from penstock.config.environment import read_environment
from penstock.config.limits import MAX_THREADS
from penstock.config.options import EngineOptions
from penstock.config.quantisation import QUANTIZE_FORMATS

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def quantize(
    to: Annotated[
        str,
        typer.Option(
            "--to", help=f"One of: {', '.join(QUANTIZE_FORMATS)}.", **{**one_of(QUANTIZE_FORMATS), "metavar": "FORMAT"}
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", show_default=False, help="A Hugging Face folder, or a .gguf file in f32, f16 or bf16."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A .gguf file, or a folder for int8, int4, fp8 and nvfp4. Default: MODEL-FORMAT here.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", help="What `penstock imatrix` measured: which inputs matter more.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what lies at the output.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=MAX_THREADS, help="Default: all cores.")
    ] = None,
) -> None:
    """Write a smaller copy of a model: GGUF for q… and iq… formats, a Hugging Face folder for the others."""
    from penstock.cli.named_model import find_model
    from penstock.cli.terminal import loading_bar
    from penstock.kernels.cpu import native
    from penstock.weights.writers.quantize import quantize_model

    environment = read_environment()
    if native.available() and (threads or environment.threads):
        native.set_num_threads(threads or environment.threads or 1)
    began = time.perf_counter()
    with loading_bar(title="Quantising", waiting="Reading the model") as told:
        written = quantize_model(
            str(find_model(model or environment.model or EngineOptions().model).path),
            to.lower(),
            output,
            imatrix=imatrix,
            force=force,
            progress=told,
            tell=lambda line: typer.echo(f"Note: {line}.", err=True),
        )
    shares = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sorted(written.formats.items()))
    typer.echo(
        f"{written.path}: {written.nbytes / 2**20:.1f} MiB ({written.nbytes / written.source_bytes:.0%} of "
        f"{written.source_bytes / 2**20:.1f} MiB before) in {time.perf_counter() - began:.1f} s; {shares}."
    )
