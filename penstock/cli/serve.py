"""`penstock serve`: a model over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.command import Command
from penstock.cli.options import takes_named_engine_options, takes_server_options
from penstock.config.environment import read_environment
from penstock.config.errors import ConfigError
from penstock.config.names import BUNDLED_MODEL
from penstock.config.options import EngineOptions, HostOptions, ServerOptions

if TYPE_CHECKING:
    from penstock.host.source import ModelSource, Sources

_MANY = "Many models"
app = typer.Typer(add_completion=False)


@app.command(cls=Command)
@takes_named_engine_options
@takes_server_options
def serve(
    context: typer.Context,
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
    """Serve a model over HTTP, with OpenAI's API. Without a model, all of the library, each when it is first asked for.

    SIGTERM or Ctrl-C drains: running requests may finish, new ones are refused.
    """
    from penstock.cli.terminal import configure_logging, loading_bar
    from penstock.server.serve import serve as serve_http

    configure_logging(quiet=False)
    sources: Sources | None = None
    if models is not None or models_dir is not None:
        sources = _sources(engine, models, models_dir)
    elif context.params["model"] is None and read_environment().model is None:
        sources = _library(engine)
    if sources is not None:
        _serve_many(engine, server, sources, keep_alive)
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


def _library(engine: EngineOptions) -> Sources | None:
    """The models of the library, with the flags as their options; None where it has none but the one that ships."""
    from penstock.host.library_models import library_models
    from penstock.library.store import open_store

    store, defaults = open_store(), replace(engine, memory=None, served_model_name=None)
    if engine.served_model_name is not None or all(entry.name == BUNDLED_MODEL for entry in store.list()):
        return None
    return lambda: library_models(store, defaults)


def _serve_many(engine: EngineOptions, server: ServerOptions, sources: Sources, keep_alive: str) -> None:
    from penstock.host.models_file import seconds_of
    from penstock.server.serve_many import serve_many

    hosted = HostOptions(engine.memory, seconds_of(keep_alive, "--keep-alive"))
    serve_many(sources, hosted, server, say=lambda text: typer.echo(text))
