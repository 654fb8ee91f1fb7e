"""`penstock worker`: has this machine compute a part of a model that another one serves."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.command import Command
from penstock.cli.options import parse_bytes
from penstock.config.environment import worker_token
from penstock.config.machine import read_machine

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def worker(
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The --workers-address of the server that leads.")],
    token: Annotated[
        str | None, typer.Option(help="What both know. Better: the environment variable PENSTOCK_WORKER_TOKEN.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model lies here. Default: where it lies there.", metavar="PATH")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the kernels. Default: the cores this process may use.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Most that it may take, as 6GiB. Default: what is free.", metavar="SIZE")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End with the first engine that is joined.")] = False,
) -> None:
    """Compute a part of a model that another machine serves, for as long as it does. Ctrl-C ends it."""
    from penstock.cli.terminal import configure_logging
    from penstock.runtime.ranks.joining import address_of, check_token
    from penstock.startup.remote_worker import work

    configure_logging(quiet=False)
    address = address_of(join, "--join")
    own: dict[str, object] = {"model": model, "threads": threads or read_machine().cores}
    own["memory"] = None if memory is None else parse_bytes(memory)
    raise typer.Exit(work(address, check_token(token or worker_token()), own, once=once))
