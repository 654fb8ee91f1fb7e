"""`penstock migrate`: another engine's command line as ours."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli.command import Command
from penstock.cli.foreign import lmcache
from penstock.cli.foreign.dotted import joined
from penstock.cli.foreign.table import SPOKEN, ForeignFlag, flags_of
from penstock.config.errors import ConfigError

app = typer.Typer(add_completion=False)
_MAX_CHARS: Final = 2**16
_COMMANDS: Final = (
    (("vllm", "serve"), "vllm"),
    (("vllm.entrypoints.openai.api_server",), "vllm"),
    (("sglang", "serve"), "sglang"),
    (("sglang.launch_server",), "sglang"),
    (("llama-server",), "llama-server"),
    (("text-generation-launcher",), "tgi"),
)
_PORTS: Final = {"vllm": "8000", "sglang": "30000", "llama-server": "8080", "tgi": "3000"}
_PUBLIC: Final = ("vllm", "tgi")  # they listen on all addresses unless told otherwise
_VARIABLES: Final = {
    "VLLM_API_KEY": "PENSTOCK_API_KEY",
    "LLAMA_API_KEY": "PENSTOCK_API_KEY",
    **dict.fromkeys(("HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES"), ""),
}


@dataclass(slots=True)
class Migration:
    """Our command line, and what is to be said of the one it was made of.

    Attributes:
        model: what stands for the model; "" where none was named.
        words: our flags.
        variables: assignments that go before the command.
        notes: what changes.
    """

    model: str = ""
    words: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        model = [self.model] if self.model else []
        return " ".join([*self.variables, shlex.join(["penstock", "serve", *model, *self.words])])


@app.command(cls=Command, context_settings={"ignore_unknown_options": True})
def migrate(
    line: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help='A command line, as "vllm serve MODEL --max-model-len 4096"; or a Modelfile.'
        ),
    ],
) -> None:
    """Print what a command line of vLLM, SGLang, llama-server or TGI is here, and what changes. Nothing is run.

    A Modelfile is read, and the commands that make and run its model are printed.
    """
    if len(line) == 1 and _is_file(line[0]):
        typer.echo(_of_modelfile(Path(line[0])))
        return
    made = migrated(line[0] if len(line) == 1 else shlex.join(line))
    typer.echo(made.line)
    for note in made.notes:
        typer.echo(f"# {note}")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # no path can be as long, or hold that
        return False


def migrated(line: str) -> Migration:
    """Another engine's command line as ours.

    Raises:
        ConfigError: it is too long, its quotes do not match, or it starts no engine that is known.
    """
    if len(line) > _MAX_CHARS:
        raise ConfigError(f"the command line has {len(line)} characters; allowed: {_MAX_CHARS}.")
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"the command line cannot be read: {error}.") from None
    variables, words = _assignments(joined(words))
    engine, words = _engine(words)
    made = Migration()
    _take_flags(made, engine, iter([*_of_variables(engine, variables, made), *words]))
    _keep_address(made, engine)
    return made


def _assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Variables that are set before a command, and the command."""
    found, rest = {}, list(words)
    while rest and (rest[0] == "env" or ("=" in rest[0] and rest[0].partition("=")[0].isidentifier())):
        name, equals, value = rest.pop(0).partition("=")
        if equals:
            found[name] = value
    return found, rest


def _engine(words: Sequence[str]) -> tuple[str, list[str]]:
    """The engine that a command starts, and the words behind its name."""
    rest = list(words)
    if rest and Path(rest[0]).name.startswith("python") and rest[1:2] == ["-m"]:
        rest = rest[2:]
    if rest:
        rest[0] = rest[0].replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
    for start, engine in _COMMANDS:
        if tuple(rest[: len(start)]) == start:
            return engine, rest[len(start) :]
    known = ", ".join(" ".join(start) for start, _ in _COMMANDS)
    raise ConfigError(
        f"the command line begins with {' '.join(words[:3])!r}; known: {known}, or the path of a Modelfile."
    )


def _of_variables(engine: str, given: Mapping[str, str], made: Migration) -> Iterator[str]:
    """The flags that variables stand for: TGI has one for each of its flags."""
    for name, value in given.items():
        flag = "--" + name.lower().replace("_", "-")
        if engine == "tgi" and flag in flags_of(engine):
            yield from (flag, value) if flags_of(engine)[flag].values else (flag,)
        elif name.startswith("LMCACHE_") and engine in ("vllm", "sglang"):
            words, note = lmcache.variable(name, value)
            made.words += words
            made.notes.append(note)
        elif name in _VARIABLES:
            made.variables.append(f"{_VARIABLES[name] or name}={shlex.quote(value)}")
        else:
            made.notes.append(f"{name}: nothing here reads this variable.")


def _take_flags(made: Migration, engine: str, words: Iterator[str]) -> None:
    known, waiting = flags_of(engine), list[str]()
    while (word := waiting.pop() if waiting else next(words, None)) is not None:
        if not word:  # a variable of a script that was not set
            continue
        if not word.startswith("-") or word == "-":
            made.model = _only(made, word)
            continue
        name, equals, value = word.partition("=")
        name = name[:2] + name[2:].replace("_", "-")
        flag = known.get(name)
        values = [value] if equals else []
        if not equals and (flag is None or flag.values):
            while (following := next(words, None)) is not None:
                if following.startswith("-") and not following[1:2].isdigit():
                    waiting.append(following)
                    break
                values.append(following)
                if flag is None or flag.values < 2:
                    break
        _take(made, engine, name, flag, values)


def _only(made: Migration, word: str) -> str:
    """The model; of several words that stand alone the first."""
    if made.model:
        made.notes.append(f"{word!r} stands alone, and is left out.")
    return made.model or word


def _take(made: Migration, engine: str, name: str, flag: ForeignFlag | None, values: Sequence[str]) -> None:
    if flag is None:
        made.notes.append(f"{name}: {SPOKEN[engine]} has no such flag that is known here; it is left out.")
    elif flag.word in ("nothing", "no"):
        made.notes.append(f"{shlex.join([name, *values])} is left out. {flag.about}")
    elif name == "--served-model-name":
        made.words += [name, *values[:1], *(word for more in values[1:] for word in ("--alias", more))]
    elif (ours := _ours(flag, values)) is None:
        made.notes.append(f"{shlex.join([name, *values])} is left out: that value has no like here ({flag.sentence}).")
    elif not ours:
        why = "nothing is kept unless it is asked for" if flag.is_size else "the model's files say it"
        made.notes.append(f"{shlex.join([name, *values])} is left out: {why}.")
    elif flag.about == "{}":
        made.model = _only(made, ours[0])
    else:
        made.words += ours
        if flag.word == "as" and ours != [name, *values]:
            made.notes.append(f"{shlex.join([name, *values])} is {shlex.join(ours)}.")


def _ours(flag: ForeignFlag, values: Sequence[str]) -> list[str] | None:
    """Our words for a flag with its values; None where one has no like here."""
    words = ["-".join(values)] if flag.joins else values or ("",)
    each = [flag.ours(value) for value in words]
    return None if None in each else [word for words in each for word in words or ()]


def _keep_address(made: Migration, engine: str) -> None:
    """Clients go on to find it: on the port that the other engine has by itself."""
    if "--port" not in made.words and _PORTS[engine] != "8000":
        made.words += ["--port", _PORTS[engine]]
    if "--host" not in made.words and engine in _PUBLIC:
        made.notes.append(
            f"{SPOKEN[engine]} listens on every address, penstock on this machine's own: --host 0.0.0.0 --api-key KEY."
        )


def _of_modelfile(file: Path) -> str:
    from penstock.library.modelfile import parse_modelfile

    try:
        made = parse_modelfile(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}.") from None
    name = file.resolve().parent.name.lower() or "my-model"
    lines = [shlex.join(["penstock", "create", name, "-f", str(file)]), shlex.join(["penstock", "run", name])]
    if made.adapters:
        lines.append("# ADAPTER: create merges it; penstock serve MODEL --lora PATH serves it beside the model")
    return "\n".join(lines)
