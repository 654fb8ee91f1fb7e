"""How commands speak to a person: tables, progress, the log. Rich is imported only where something is shown."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from penstock.config.environment import read_environment
from penstock.config.errors import ConfigError
from penstock.config.logs import log_handler

STARTING: Final = "Starting the engine"


def configure_logging(*, quiet: bool) -> None:
    """Sends the log to standard error at PENSTOCK_LOG_LEVEL; a quiet command raises it to warnings, save for debug."""
    environment = read_environment()
    level = "warning" if quiet and environment.log_level == "info" else environment.log_level
    logging.basicConfig(level=level.upper(), handlers=[log_handler(form=environment.log_format)])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def read_standard_input() -> str:
    """All of standard input.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not UTF-8 (byte {error.start}); convert it, for example with iconv."
        ) from None


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> None:
    """A table on standard output; with `numbers` every column but the first is aligned to the right."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def piped_input() -> str | None:
    """All of standard input if something is piped into it; None if it is a terminal or closed.

    Raises:
        ConfigError: it is not UTF-8.
    """
    return None if sys.stdin is None or sys.stdin.isatty() else read_standard_input()


def tell(line: str) -> None:
    """A line on standard error, if that is a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


@contextmanager
def loading_bar(
    *, title: str = "Loading weights", unit: str = "bytes", waiting: str | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to tell (bytes loaded, bytes in all); draws a bar on standard error if that is a terminal.

    The bar shows when bytes come, and nothing of it stays. With another unit, things are counted. `waiting` shows until
    then, with the seconds since: nothing can be counted while libraries are imported and headers read.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if unit == "bytes":
        columns += [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    else:
        columns += [MofNCompleteColumn(), TimeRemainingColumn()]
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(title, start=True, total=None, visible=False)
    before = Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True)
    if waiting is not None:
        before.add_task(waiting)
        before.start()

    def told(done: int, total: int) -> None:
        before.stop()
        if not progress.live.is_started and done < total:
            progress.start()
        progress.update(task, completed=done, total=total, visible=True)
        if done >= total:
            progress.stop()

    try:
        yield told
    finally:
        before.stop()
        progress.stop()
