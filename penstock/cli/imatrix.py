"""`penstock imatrix`: which inputs of a model's weights matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import Command
from penstock.cli.options import takes_engine_options
from penstock.cli.textfile import Chunks, Context
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
@takes_engine_options
def imatrix(
    engine: EngineOptions,
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file, like what the model will read and write.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("imatrix.gguf"),
    context: Context = None,
    chunks: Chunks = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what lies at the output.")] = False,
) -> None:
    """Measure which inputs of a model matter while it reads a text; `quantize --imatrix` spends precision there."""
    from penstock.cli.terminal import STARTING, configure_logging, loading_bar
    from penstock.cli.textfile import text_windows
    from penstock.weights.imatrix import write_imatrix

    configure_logging(quiet=True)
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already; choose another --output, or replace it with --force.")
    with loading_bar(waiting="Reading the text"):
        windows, _ = text_windows(engine, text, context, None, chunks)
    chosen = replace(engine, dtype="float32" if engine.dtype == "auto" else engine.dtype, quantize=None)
    with loading_bar(waiting=STARTING) as loaded, loading_bar(title="Running over the text", unit="") as told:
        from penstock.evaluate.importance import collect_importance  # and torch with it

        matrix = collect_importance(chosen, windows, output, str(text), loading=loaded, progress=told)
    size = write_imatrix(matrix)
    typer.echo(
        f"{output}: {size / 2**20:.1f} MiB; {len(matrix.entries)} weights over {len(windows)} stretches of "
        f"{matrix.chunk_size} tokens."
    )
