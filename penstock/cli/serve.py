"""`penstock serve`: a model over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.foreign.serve_command import UNNEEDED, ServeCommand
from penstock.cli.options import takes_default_sampling, takes_named_engine_options, takes_server_options
from penstock.config.data_parallel import check_one_engine
from penstock.config.environment import read_environment
from penstock.config.errors import ConfigError
from penstock.config.names import BUNDLED_MODEL
from penstock.config.options import EngineOptions, HostOptions, ServerOptions
from penstock.config.resolve import validate

if TYPE_CHECKING:
    from penstock.host.source import ModelSource, Sources

_MANY = "Many models"
app = typer.Typer(add_completion=False)


@app.command(cls=ServeCommand)
@takes_named_engine_options
@takes_server_options
@takes_default_sampling
def serve(
    context: typer.Context,
    engine: EngineOptions,
    server: ServerOptions,
    sampling: Mapping[str, float],
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
    from penstock.cluster.engines import make_engine
    from penstock.host.adapters import of_several
    from penstock.server.serve import serve as serve_http

    configure_logging(quiet=False)
    for told in context.meta.get(UNNEEDED, ()):
        logging.getLogger(__name__).info("%s", told)
    server = replace(server, default_sampling=tuple(sampling.items()))
    sources: Sources | None = None
    first: str | None = None
    if models is not None or models_dir is not None:
        sources = _sources(engine, models, models_dir)
    elif context.params["model"] is None and read_environment().model is None and engine.served_model_name is None:
        sources, first = _library(engine)
    if sources is not None:
        _check_many(server)
        check_one_engine(engine, "of several models each has one engine")
        if server.lora_modules:
            modules, sources = of_several(server.lora_modules, sources)
            server = replace(server, lora_modules=modules)
        _serve_many(engine, server, sources, keep_alive, first)
        return
    engine = replace(engine, enable_lora=engine.enable_lora or bool(server.lora_modules or server.lora))
    with loading_bar() as told:
        serve_http(engine, server, say=lambda text: typer.echo(text), on_progress=told, make_engine=make_engine)


def _check_many(server: ServerOptions) -> None:
    """Raises ConfigError for what is said of one model alone."""
    given = {
        "--any-model": server.any_model,
        "--alias": server.aliases,
        "--chat-template": server.chat_template is not None,
        "--lora": server.lora,
        "--temperature, --top-k, --top-p, --min-p and --repetition-penalty": server.default_sampling,
    }
    if wrong := [name for name, value in given.items() if value]:
        told = "with several models, a file of models (--models) says names and options of each; leave it out."
        raise ConfigError(f"{wrong[0]} is of a server of one model: {told}")


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


def _library(engine: EngineOptions) -> tuple[Sources, str | None]:
    """The models of the library, with the flags as their options; the one that ships is loaded at the start where there
    is no other.
    """
    from penstock.host.library_models import library_models
    from penstock.library.store import open_store

    validate(engine)
    store, defaults = open_store(), replace(engine, memory=None)
    alone = all(entry.name == BUNDLED_MODEL for entry in store.list())
    return lambda: library_models(store, defaults), BUNDLED_MODEL if alone else None


def _serve_many(
    engine: EngineOptions, server: ServerOptions, sources: Sources, keep_alive: str, first: str | None
) -> None:
    from penstock.host.models_file import seconds_of
    from penstock.server.serve_many import serve_many

    hosted = HostOptions(engine.memory, seconds_of(keep_alive, "--keep-alive"), first)
    serve_many(sources, hosted, server, say=lambda text: typer.echo(text))
