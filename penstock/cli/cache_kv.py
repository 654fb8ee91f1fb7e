"""`penstock cache kv`: what engines keep of prompts on disk (--kv-disk)."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.command import Command, near
from penstock.config.environment import kv_folder
from penstock.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.transfer.kept_blocks import KeptBlocks

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="List, check, remove, prepare or pin what is kept of prompts."
)
Base = Annotated[
    str | None,
    typer.Option(
        "--kv-disk-path", metavar="FOLDER", help="The folder, as for serve. Default: one in your cache folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Folders as `cache kv list` shows them, or models. Default: all of them."),
]


@app.command("ls", cls=Command, help="The same as `list`.", hidden=True)
@app.command("list", cls=Command)
def list_blocks(kv_disk_path: Base = None, as_json: AsJson = False) -> None:
    """List the folders of --kv-disk: model, size, blocks, tokens, and when an engine last had one."""
    from penstock.cli.list import age
    from penstock.cli.terminal import print_table
    from penstock.startup.memory_plan import format_bytes

    base = _base(kv_disk_path)
    kept = _read(base)
    if as_json:
        rows = [
            {
                "name": one.name, "model": one.model, "bytes": one.bytes, "blocks": one.blocks, "tokens": one.tokens,
                "last_used": one.used, "in_use": one.in_use,
            }
            for one in kept
        ]  # fmt: skip
        typer.echo(json.dumps({"folder": str(base), "models": rows}, ensure_ascii=False))
        return
    now = time.time()
    print_table(
        "",
        ("NAME", "MODEL", "SIZE", "BLOCKS", "TOKENS", "LAST USED"),
        [
            (
                *(_plain(one.name), _plain(one.model), format_bytes(one.bytes), str(one.blocks), str(one.tokens)),
                "in use" if one.in_use else age(now - one.used),
            )
            for one in kept
        ],
    )
    typer.echo(f"{format_bytes(sum(one.bytes for one in kept))} in {base}")


@app.command("show", cls=Command)
def show_chains(
    names: Names = None,
    most: Annotated[int, typer.Option("--most", min=1, max=10_000, help="Prefixes that are listed of a folder.")] = 10,
    kv_disk_path: Base = None,
    as_json: AsJson = False,
) -> None:
    """Show the longest prefixes that are kept: their tokens and blocks, not what they say or whose they are."""
    from penstock.cli.terminal import print_table
    from penstock.transfer.kept_blocks import chains

    rows = []
    for kept in _chosen(names, _base(kv_disk_path)):
        with _told(kept.name):
            found, lost = chains(kept.folder)
        rows.append(
            {
                "name": kept.name, "model": kept.model, "block_size": kept.about.block_size if kept.about else None,
                "prefixes": len(found), "longest": [chain._asdict() for chain in found[:most]],
                "unreachable_blocks": lost, "damaged_lines": kept.damaged_lines,
            }
        )  # fmt: skip
        if as_json:
            continue
        prefixes = "1 prefix" if len(found) == 1 else f"{len(found)} prefixes"
        typer.echo(f"{_plain(kept.name)}: {prefixes}, {kept.tokens} tokens in {kept.blocks} blocks")
        longest = [(str(n), str(chain.tokens), str(chain.blocks)) for n, chain in enumerate(found[:most], 1)]
        print_table("", ("NUMBER", "TOKENS", "BLOCKS"), longest, numbers=True)
        for count, what in ((lost, "blocks that nothing leads to"), (kept.damaged_lines, "damaged lines of the index")):
            if count:
                typer.echo(f"{count} {what}: the next start leaves them out")
    if as_json:
        typer.echo(json.dumps({"models": rows}, ensure_ascii=False))


@app.command("verify", cls=Command)
def verify_blocks(names: Names = None, kv_disk_path: Base = None, as_json: AsJson = False) -> None:
    """Read every block of folders that no engine has, and compare it with its checksum; exit 1 if any is damaged."""
    from penstock.cli.terminal import loading_bar
    from penstock.transfer.kept_blocks import verify

    rows = []
    for kept in _chosen(names, _base(kv_disk_path)):
        if kept.in_use and not names:
            typer.echo(f"{_plain(kept.name)} is left out: it is in use", err=True)
            continue
        with _told(kept.name), loading_bar(title=f"Reading {_plain(kept.name)}", unit="blocks") as progress:
            verdict = verify(kept, progress)
        rows.append(
            {
                "name": kept.name, "model": kept.model, "whole": verdict.whole, "damaged": verdict.damaged,
                "unreadable": verdict.unreadable, "first": verdict.first or None,
            }
        )  # fmt: skip
        if not as_json:
            first = f" ({verdict.first})" if verdict.first else ""
            told = f"{verdict.whole} whole, {verdict.damaged} damaged, {verdict.unreadable} unreadable"
            typer.echo(f"{_plain(kept.name)}: {told}{first}")
    if as_json:
        typer.echo(json.dumps({"models": rows}, ensure_ascii=False))
    if any(row["damaged"] or row["unreadable"] for row in rows):
        raise typer.Exit(1)


@app.command("rm", cls=Command)
def remove_blocks(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Folders as `cache kv list` shows them, or models.")
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="All but what is in use.")] = False,
    kv_disk_path: Base = None,
) -> None:
    """Remove folders of --kv-disk that no engine has: what they keep is computed anew. The models themselves stay."""
    from penstock.startup.memory_plan import format_bytes
    from penstock.transfer.kept_blocks import remove

    if bool(names) == all_of_them:
        raise typer.BadParameter("name what to remove, or say --all.")
    failed: list[str] = []
    for kept in _chosen(names, _base(kv_disk_path)):
        try:
            with _told(kept.name):
                remove(kept)
        except ConfigError as error:
            failed.append(str(error))
        else:
            typer.echo(f"removed {_plain(kept.name)} ({format_bytes(kept.bytes)} became free)")
    if failed:
        raise ConfigError("\n".join(failed))


def _base(setting: str | None) -> Path:
    try:
        return kv_folder(setting)
    except RuntimeError:
        raise ConfigError("this user has no home folder; name the folder with --kv-disk-path.") from None


def _read(base: Path) -> list[KeptBlocks]:
    from penstock.transfer.kept_blocks import kept_blocks

    with _told(str(base)):
        return kept_blocks(base)


def _chosen(names: Sequence[str] | None, base: Path) -> list[KeptBlocks]:
    """Those of these names, each once; all without names."""
    kept = _read(base)
    chosen = kept if not names else [one for name in names for one in _named(name, kept, base)]
    return list({one.name: one for one in chosen}.values())


def _named(name: str, kept: Sequence[KeptBlocks], base: Path) -> list[KeptBlocks]:
    found = [one for one in kept if name in (one.name, one.model, str(one.folder))]
    if not found:
        known = [*(one.model for one in kept), *(one.name for one in kept)]
        raise ConfigError(f"no blocks are kept of {name!r} in {base}.{near(name, known)}")
    return found


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says of which folder something could not be read or written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} cannot be read or written: {error.strerror or error}.") from None


def _plain(text: str) -> str:
    """A name of a folder as a terminal may get it."""
    from penstock.cli.answer_view import harmless

    return harmless(text)
