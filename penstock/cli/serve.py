"""`penstock serve`: a model over HTTP."""

from __future__ import annotations

import typer

from penstock.cli.options import takes_named_engine_options, takes_server_options
from penstock.config.options import EngineOptions, ServerOptions

app = typer.Typer(add_completion=False)


@app.command()
@takes_named_engine_options
@takes_server_options
def serve(engine: EngineOptions, server: ServerOptions) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    SIGTERM or Ctrl-C drains: running requests may finish, new ones are refused.
    """
    from penstock.cli.terminal import configure_logging, loading_bar
    from penstock.server.serve import serve as serve_http

    configure_logging(quiet=False)
    with loading_bar() as told:
        serve_http(engine, server, say=lambda text: typer.echo(text), on_progress=told)
