"""`penstock cache kv pin` and `warm`: prompts of a file are computed by a running server before anybody asks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.cache_kv import AsJson
from penstock.cli.command import Command
from penstock.cli.server_client import DEFAULT_URL, URL, ask
from penstock.config.errors import ConfigError, format_value

app = typer.Typer(add_completion=False)
_MOST_BYTES: Final = 64 << 20
_FIELDS: Final = ("prompt", "messages", "tools", "cache_salt")
_ALLOWED: Final = 'a text, {"prompt": …} or {"messages": […]}, with tools and cache_salt besides'
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A prompt or conversation a line, in JSON (.jsonl, .json); else the file is one text.",
    ),
]
Model = Annotated[str | None, typer.Option("--model", help="Which model's cache, where there are several.")]
System = Annotated[bool, typer.Option("--system", help="Texts are system messages of chats, not beginnings of texts.")]


@app.command("warm", cls=Command)
def warm(
    file: File, url: URL = DEFAULT_URL, model: Model = None, system: System = False, as_json: AsJson = False
) -> None:
    """Have a running server compute prompts, so that whoever sends their beginning with the same key finds it."""
    done = []
    for line, item in _items(file, system):
        body: dict[str, Any] = {**item, "max_tokens": 1, **({"model": model} if model else {})}
        chat = "messages" in item
        if chat:
            body["add_generation_prompt"] = False
        usage = _sent(line, url, "POST", "/v1/chat/completions" if chat else "/v1/completions", body)["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        done.append({"line": line, "tokens": usage["prompt_tokens"], "cached_tokens": cached})
        if not as_json:
            typer.echo(f"{usage['prompt_tokens']} tokens, {cached} of which were there")
    if as_json:
        typer.echo(json.dumps({"prompts": done}))


@app.command("pin", cls=Command)
def pin(
    file: File,
    url: URL = DEFAULT_URL,
    model: Model = None,
    system: System = False,
    ttl: Annotated[float, typer.Option("--ttl", min=1.0, help="How many seconds they stay.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Have a running server compute prompts and keep them for a time, in whole blocks; with --kv-disk over restarts."""
    done = []
    for line, item in _items(file, system):
        body = {**item, "ttl": ttl, **({"model": model} if model else {})}
        done.append(_sent(line, url, "POST", "/v1/cache/pins", body))
        if not as_json:
            typer.echo(
                f"{done[-1]['id']}  {done[-1]['tokens']} tokens, {done[-1]['cached_tokens']} of which were there"
            )
    if as_json:
        typer.echo(json.dumps({"pins": done}))


@app.command("pins", cls=Command)
def pins(url: URL = DEFAULT_URL, model: Model = None, as_json: AsJson = False) -> None:
    """List what is pinned in a running server, with this key."""
    from penstock.cli.terminal import print_table

    found = ask(url, "GET", f"/v1/cache/pins{_query(model)}")["data"]
    if as_json:
        typer.echo(json.dumps({"pins": found}))
        return
    now = time.time()
    rows = [
        (str(one["id"]), str(one["model"]), str(one["tokens"]), f"{max(0.0, one['expires_at'] - now):.0f} s")
        for one in found
    ]
    print_table("", ("ID", "MODEL", "TOKENS", "ENDS IN"), rows)


@app.command("unpin", cls=Command)
def unpin(
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="As `cache kv pins` shows them.")],
    url: URL = DEFAULT_URL,
    model: Model = None,
) -> None:
    """End pins in a running server."""
    from urllib.parse import quote

    for one in ids:
        ask(url, "DELETE", f"/v1/cache/pins/{quote(one, safe='')}{_query(model)}")
        typer.echo(f"ended {one}")


def _query(model: str | None) -> str:
    from urllib.parse import quote

    return "" if model is None else f"?model={quote(model, safe='')}"


def _sent(line: int, url: str, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ask(url, method, path, body)
    except Exception as error:
        error.args = (f"line {line}: {error}", *error.args[1:])
        raise
    return answer


def _items(file: Path, system: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """The prompts and conversations of a file, each with its line."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{file} has more than {_MOST_BYTES} bytes; split it.")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from None
    if file.suffix not in (".jsonl", ".json"):
        yield 1, _item(text, system)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number} is no JSON ({error}); allowed: {_ALLOWED}.") from None
        if not (isinstance(found, str) or (isinstance(found, dict) and ("prompt" in found) != ("messages" in found))):
            raise ConfigError(f"{file}, line {number} is {format_value(found)}; allowed: {_ALLOWED}.")
        if isinstance(found, dict) and (unknown := sorted(set(found) - set(_FIELDS))):
            raise ConfigError(f"{file}, line {number} has {', '.join(unknown)}; allowed: {_ALLOWED}.")
        yield number, _item(found, system)


def _item(found: str | dict[str, Any], system: bool) -> dict[str, Any]:
    """The fields of a body that are about the prompt."""
    given: dict[str, Any] = {"prompt": found} if isinstance(found, str) else dict(found)
    if system and isinstance(given.get("prompt"), str):
        given["messages"] = [{"role": "system", "content": given.pop("prompt")}]
    return given
