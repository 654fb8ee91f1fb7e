"""`penstock config show`: every setting of a command, what set it, and why it has the value it gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.command import SOURCES, Command, near
from penstock.cli.options import make_engine_options
from penstock.config.errors import ConfigError, PenstockError
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Show every setting of a command.")


def _commands(incomplete: str) -> list[str]:
    from penstock.cli.main import COMMANDS

    return [name for name, _ in COMMANDS if name.startswith(incomplete)]


@app.callback()
def _root() -> None:
    pass


@app.command(cls=Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show(
    ctx: typer.Context,
    command: Annotated[
        str, typer.Argument(help="The command, for example serve or run.", autocompletion=_commands)
    ] = "serve",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show each setting of a command, with the flags that follow it: what it is, what set it, and why.

    penstock config show serve --max-model-len 4096 --config FILE.yaml
    """
    from penstock.cli.main import COMMANDS, load_command
    from penstock.cli.terminal import print_table

    names = [name for name, _ in COMMANDS if name not in ("bench", "cache", "config")]
    if command not in names:
        raise typer.BadParameter(f"there is no command {command!r}; known: {', '.join(names)}.{near(command, names)}")
    given = load_command(command).make_context(command, [*ctx.args])
    rows = list(_rows(given))
    if as_json:
        typer.echo(json.dumps([dict(zip(("setting", "value", "from", "because"), row, strict=True)) for row in rows]))
        return
    print_table(f"Settings of penstock {command}", ("setting", "value", "from", "because"), rows)


def _rows(ctx: Any) -> Iterator[tuple[str, str, str, str]]:
    derived = dict[str, tuple[str, str]]()
    note = ""
    if "gpu_memory_utilization" in ctx.params:
        try:
            derived = {name: (_shown(name, value), why) for name, value, why in _derived(ctx.params)}
        except PenstockError as error:
            note = f"not decided: {error}"
    for parameter in ctx.command.params:
        value, source = ctx.params[parameter.name], ctx.get_parameter_source(parameter.name)
        origin = {"COMMANDLINE": "flag", "DEFAULT_MAP": ctx.meta[SOURCES].get(parameter.name, "")}.get(source.name, "")
        text, why = _shown(parameter.name, value), ""
        if not origin and parameter.name in derived:
            text, why = derived[parameter.name]
        elif not origin and value in (None, "auto"):
            why = note
        yield parameter.opts[0], text, origin or "default", why


def _derived(params: dict[str, Any]) -> tuple[tuple[str, Any, str], ...]:
    """What every option that was left open becomes for this model on this machine, and why."""
    from penstock.config.machine import has_accelerator_files, read_machine
    from penstock.config.resolve import resolve
    from penstock.kernels.cpu import native
    from penstock.weights.facts import model_facts
    from penstock.weights.open import open_checkpoint

    names = set(EngineOptions.__dataclass_fields__) | {"async_scheduling"}
    options = make_engine_options({name: value for name, value in params.items() if name in names})
    if options.device not in ("cpu", "auto") or (options.device == "auto" and has_accelerator_files()):
        raise ConfigError("a GPU is looked at by `penstock plan`")
    facts = model_facts(open_checkpoint(options.model, options.hf_overrides))
    return resolve(options, facts, read_machine(isas=native.usable_isas(), refused_isas=native.refused_isas())).reasons


def _shown(name: str, value: Any) -> str:
    if name == "api_key" and value:
        return f"{len(value)} keys"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
