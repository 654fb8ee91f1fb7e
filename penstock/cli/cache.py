"""`penstock cache`: what is kept of models for faster starts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.cache_kv import app as kv
from penstock.cli.cache_pins import app as pins
from penstock.cli.command import Command, near
from penstock.cli.options import parse_bytes
from penstock.config.environment import pack_folder, read_environment
from penstock.config.errors import ConfigError

if TYPE_CHECKING:
    from penstock.weights.kept_files import KeptModel

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List or remove what is kept for faster starts; `cache kv`: what is kept of prompts.",
)
kv.add_typer(pins)
app.add_typer(kv, name="kv")
Folder = Annotated[
    str | None, typer.Option("--pack-cache", metavar="FOLDER", help="The folder. Default: as for serve and run.")
]


@app.command("list", cls=Command)
def list_kept(
    pack_cache: Folder = None,
    pack_cache_size: Annotated[
        str | None, typer.Option("--pack-cache-size", metavar="SIZE", help="What the folder may hold, as for serve.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List packed weights, with the starts and vocabularies kept beside them: the least recently used goes first."""
    from penstock.cli.list import age
    from penstock.cli.terminal import print_table
    from penstock.startup.memory_plan import format_bytes
    from penstock.weights.kept_files import in_use, most_bytes

    folder = _folder(pack_cache)
    most = most_bytes(folder, None if pack_cache_size is None else parse_bytes(pack_cache_size))
    kept = [(model, in_use(model)) for model in _read(folder)]
    if as_json:
        rows = [
            {"name": m.name, "bytes": m.bytes, "last_used": m.used, "in_use": used, "model": m.model}
            for m, used in kept
        ]
        typer.echo(json.dumps({"folder": str(folder), "most_bytes": most, "models": rows}, ensure_ascii=False))
        return
    now = time.time()
    print_table(
        "",
        ("NAME", "SIZE", "LAST USED", "MODEL"),
        [(m.name, format_bytes(m.bytes), "in use" if used else age(now - m.used), m.model) for m, used in kept],
    )
    total = format_bytes(sum(model.bytes for model, _ in kept))
    typer.echo(f"{total} of at most {format_bytes(most)} (--pack-cache-size) in {folder}")


@app.command("rm", cls=Command)
def remove_kept(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="As `cache list` shows them, or where models lie."),
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="All but what is in use.")] = False,
    pack_cache: Folder = None,
) -> None:
    """Remove what is kept of models: their next start packs anew. The models themselves stay."""
    from penstock.startup.memory_plan import format_bytes
    from penstock.weights.kept_files import remove

    if bool(names) == all_of_them:
        raise typer.BadParameter("name what to remove, or say --all.")
    kept = _read(_folder(pack_cache))
    chosen = kept if names is None else [model for name in names for model in _named(name, kept)]
    used = list[str]()
    for model in chosen:
        try:
            if remove(model):
                typer.echo(f"removed {model.name} ({format_bytes(model.bytes)} became free)")
            else:
                used.append(model.name)
        except OSError as error:
            raise ConfigError(f"{model.name} cannot be removed: {error.strerror or error}.") from None
    if used:
        raise ConfigError(
            f"in use by a running engine or start, or on a disk without locks: {', '.join(used)}; end that first "
            "(penstock stop), or delete the files."
        )


def _folder(setting: str | None) -> Path:
    folder = pack_folder(setting or read_environment().pack_cache)
    if folder is None:
        raise ConfigError("nothing is kept: it is switched off (--pack-cache, PENSTOCK_PACK_CACHE).")
    return folder


def _read(folder: Path) -> list[KeptModel]:
    from penstock.weights.kept_files import kept_models

    try:
        return kept_models(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}.") from None


def _named(name: str, kept: list[KeptModel]) -> list[KeptModel]:
    place = str(Path(name).expanduser().resolve())
    found = [model for model in kept if name == model.name or place == model.model]
    if not found:
        raise ConfigError(f"nothing is kept of {name!r}.{near(name, [model.name for model in kept])}")
    return found
