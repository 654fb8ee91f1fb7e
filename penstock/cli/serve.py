"""`penstock serve`: a model over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.command import Command
from penstock.cli.options import takes_named_engine_options, takes_server_options
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions, HostOptions, ServerOptions

if TYPE_CHECKING:
    from penstock.host.source import ModelSource, Sources

_MANY = "Many models"
app = typer.Typer(add_completion=False)


@app.command(cls=Command)
@takes_named_engine_options
@takes_server_options
def serve(
    engine: EngineOptions,
    server: ServerOptions,
    models: Annotated[
        Path | None, typer.Option(help="A YAML file that lists the models to serve.", rich_help_panel=_MANY)
    ] = None,
    models_dir: Annotated[
        Path | None, typer.Option(help="A folder whose models are served.", rich_help_panel=_MANY)
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(help="How long a model stays loaded after its last use; -1 for ever.", rich_help_panel=_MANY),
    ] = "5m",
) -> None:
    """Serve a model over HTTP, with OpenAI's API; or several, each of which is loaded when it is first asked for.

    SIGTERM or Ctrl-C drains: running requests may finish, new ones are refused.
    """
    from penstock.cli.terminal import configure_logging, loading_bar
    from penstock.server.serve import serve as serve_http

    configure_logging(quiet=False)
    if models is not None or models_dir is not None:
        _serve_many(engine, server, _sources(engine, models, models_dir), keep_alive)
        return
    with loading_bar() as told:
        serve_http(engine, server, say=lambda text: typer.echo(text), on_progress=told)


def _sources(engine: EngineOptions, file: Path | None, folder: Path | None) -> Sources:
    """The models of a file, a folder or both, with the flags as the options of those that say nothing else."""
    from penstock.host.models_file import models_in, read_models_file

    if engine.model != EngineOptions().model or engine.served_model_name is not None:
        raise ConfigError("a model and a list of models are given; put it on the list, or leave --models out.")
    defaults = replace(engine, memory=None)

    def sources() -> Mapping[str, ModelSource]:
        found = {} if folder is None else dict(models_in(folder, defaults))
        return found if file is None else {**found, **read_models_file(file, defaults)}

    return sources


def _serve_many(engine: EngineOptions, server: ServerOptions, sources: Sources, keep_alive: str) -> None:
    from penstock.host.models_file import seconds_of
    from penstock.server.serve_many import serve_many

    hosted = HostOptions(engine.memory, seconds_of(keep_alive, "--keep-alive"))
    serve_many(sources, hosted, server, say=lambda text: typer.echo(text))
