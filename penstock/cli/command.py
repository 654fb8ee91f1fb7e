"""Commands of `penstock`: a short help and a long one, and flags that files and environment variables set too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand

from penstock.config.environment import flag_variable, flag_variables

SOURCES: Final = "penstock.sources"
"""Where a context keeps what set a flag that was not typed: a variable or a file, by the parameter's name."""
_ALL, _CONFIG = "--help-all", "--config"


class Command(TyperCommand):
    """Takes flags from the command line, else from PENSTOCK_… variables, else from a file (--config), in this order.

    Flags that few people need are hidden from --help and shown by --help-all.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        context = {"max_content_width": 100, **(settings.pop("context_settings", None) or {})}
        super().__init__(name, **{**settings, "context_settings": context, "rich_markup_mode": None})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = args[: args.index("--")] if "--" in args else args
        if _ALL in typed:
            for parameter in self.params:
                setattr(parameter, "hidden", False)  # noqa: B010 - an argument has no such attribute, and needs none
            typer.echo(ctx.get_help())
            ctx.exit()
        if ctx.ignore_unknown_options:  # they are another command's, and so is what sets them
            return super().parse_args(ctx, args)
        path, args = _without_config(args, len(typed))
        named = {_key(parameter): parameter for parameter in self.get_params(ctx) if parameter.name != "help"}
        variables = flag_variables([*named, "config"])
        path = path or variables.pop("config", None)
        values, sources = dict[str, Any](), dict[str, str]()
        for key, value in _read_config(path, ctx, named).items() if path else ():
            values[named[key].name] = value
            sources[named[key].name] = str(path)
        for key, text in variables.items():
            values[named[key].name] = text.split(",") if getattr(named[key], "multiple", False) else text
            sources[named[key].name] = flag_variable(key)
        ctx.default_map = values
        ctx.meta[SOURCES] = sources
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then options under the panels they belong to; names are never cut."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for title, records in sorted(panels.items(), key=lambda panel: panel[0] != "Arguments"):
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)
        hidden = sum(bool(getattr(parameter, "hidden", False)) for parameter in self.params)
        formatter.write_paragraph()
        if hidden:
            formatter.write_text(f"{hidden} more flags: {ctx.command_path} {_ALL}")
        formatter.write_text(
            f"Flags can also be set in a YAML file ({_CONFIG} FILE, or PENSTOCK_CONFIG) and by variables: "
            f"PENSTOCK_MAX_MODEL_LEN=4096. What holds, and why: penstock config show."
        )


def _without_config(args: Sequence[str], typed: int) -> tuple[str | None, list[str]]:
    """The value of --config among the first `typed` arguments, and the arguments without it."""
    path, rest = None, list[str]()
    places = iter(enumerate(args))
    for place, word in places:
        if place < typed and word.startswith(f"{_CONFIG}="):
            path = word.partition("=")[2]
        elif place < typed and word == _CONFIG:
            path = next(places, (0, ""))[1]
            if not path:
                raise typer.BadParameter(f"{_CONFIG} needs the name of a YAML file.")
        else:
            rest.append(word)
    return path, rest


def _key(parameter: Any) -> str:
    """What a flag is called in files and variables: its first spelling, without the dashes in front."""
    spellings = [name.lstrip("-") for name in parameter.opts if name.startswith("--")]
    return (spellings[0] if spellings else str(parameter.name)).replace("-", "_")


def _read_config(path: str, ctx: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says to a command: its flags at the top, or below the command's name, which counts for more."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise typer.BadParameter(f"{_CONFIG} {path!r} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{_CONFIG} {path!r} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{_CONFIG} {path!r} holds no flags; write lines such as: max-model-len: 4096")
    own = found.get(ctx.info_name)
    values = dict[str, Any]()
    for key, value in _entries(path, found):
        if key in named:
            values[key] = value
    for key, value in _entries(path, own) if isinstance(own, dict) else ():
        if key not in named:
            raise typer.BadParameter(f"{path}: {ctx.info_name} has no flag {key!r}.{near(key, named)}")
        values[key] = value
    _check_known(path, found, named)
    return values


def _entries(path: str, found: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict):
            continue
        for item in value if isinstance(value, list) else (value,):
            if not isinstance(item, (str, int, float)):
                raise typer.BadParameter(f"{path}: {key} is {item!r}; allowed: texts, numbers, true, false and lists.")
        listed = [str(item) for item in value] if isinstance(value, list) else str(value)
        yield name, listed.lower() if isinstance(value, bool) and isinstance(listed, str) else listed


def _check_known(path: str, found: Mapping[Any, Any], named: Mapping[str, Any]) -> None:
    """Refuses keys that are flags of no command; modules of others are looked at only where one is not ours."""
    others = [str(key) for key in found if str(key).replace("-", "_") not in named]
    if not others:
        return
    from penstock.cli.main import COMMANDS, commands_of

    known = {*(name for name, _ in COMMANDS), *named}
    for command in commands_of():
        known |= {_key(parameter) for parameter in command.params}
    for key in others:
        if key.replace("-", "_") not in known and key not in known:
            raise typer.BadParameter(f"{path}: no command has a flag {key!r}.{near(key, known)}")


def near(name: str, known: Sequence[str] | Mapping[str, Any] | set[str]) -> str:
    """A question that names what is most like a name that is not known; "" if nothing is."""
    found = get_close_matches(name.replace("-", "_"), known, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def one_of(allowed: Sequence[str], also: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings of a flag that takes one of these values, or another spelling of one.

    Shells complete them; any other is a usage error that names the nearest.
    """
    spellings = also or {}

    def checked(value: str | None) -> str | None:
        if value is None:
            return None
        lowered = value.lower()
        if lowered not in allowed and lowered not in spellings:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}.{near(lowered, [*allowed])}")
        return spellings.get(lowered, lowered)

    return {"callback": checked, "autocompletion": completion(allowed), "metavar": "|".join(allowed)}


def model_names(incomplete: str) -> list[str]:
    """What shells offer for a model: those that are here."""
    from penstock.config.errors import PenstockError
    from penstock.library.store import open_store

    try:
        return [entry.name for entry in open_store().list() if entry.name.startswith(incomplete)]
    except (PenstockError, OSError):
        return []  # a completion says nothing


def parser_names(kind: str) -> Callable[[str], list[str]]:
    """What shells offer for a format of answers; `kind` is tool_names or reasoning_names."""

    def complete(incomplete: str) -> list[str]:
        from penstock.text.parsers.format import names

        return [name for name in (*names(kind), "none") if name.startswith(incomplete)]

    return complete


def completion(names: Sequence[str]) -> Callable[[str], list[str]]:
    """What shells offer for a flag's value."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete
