"""How commands take a model by name: one that is not here is pulled, if the person at the terminal says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from penstock.library.outlook import Outlook
    from penstock.library.resolve import Found
    from penstock.library.store import Store
    from penstock.library.wish import Wish


def find_model(text: str) -> Found:
    """The model of a path or name.

    Raises:
        ConfigError: there is none, and nobody wants it pulled.
    """
    from penstock.library.resolve import UnknownModelError, find

    try:
        return find(text)
    except UnknownModelError as error:
        if error.name is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        if not typer.confirm(f"{text} is not here. Pull it now?", default=True, err=True):
            raise
    from penstock.library.store import open_store

    store = open_store()
    return find(pull_model(store, text), store)


def pull_model(store: Store, text: str, *, force: bool = False, insecure: bool = False, streams: int = 4) -> str:
    """Pulls a model with a bar on the terminal; gives the name that finds it.

    Raises:
        PenstockError: it cannot be pulled, or cannot run here.
    """
    from penstock.library.pull import pull

    with wish(force=force, insecure=insecure, streams=streams) as wanted:
        return pull(store, text, wanted)


@contextmanager
def wish(*, force: bool = False, insecure: bool = False, streams: int = 4, title: str = "Pulling") -> Iterator[Wish]:
    """How a person at the terminal wants models to come."""
    from penstock.cli.terminal import loading_bar
    from penstock.library.transfer import Manner
    from penstock.library.wish import Wish

    with loading_bar(title=title) as told:
        yield Wish(
            progress=told,
            say=lambda line: typer.echo(line, err=True),
            judge=None if force else _judge,
            insecure=insecure,
            manner=Manner(streams=streams),
        )


def _judge(outlook: Outlook) -> str | None:
    """Why a model cannot run on this machine; what it needs to run is told."""
    from penstock.startup.forecast import refusal

    found = refusal(outlook)
    if found.remark:
        typer.echo(found.remark, err=True)
    return found.why
