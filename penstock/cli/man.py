"""`penstock man`: the manual page, made of what the commands say of themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import typer

from penstock import __version__
from penstock.cli.command import Command

app = typer.Typer(add_completion=False)
_MANY: Final = 6  # commands that are named with a flag that several take
_VARIABLES: Final = (
    ("PENSTOCK_CONFIG", "A YAML file of flags, as --config names one."),
    ("PENSTOCK_<FLAG>", "Sets a flag: PENSTOCK_MAX_MODEL_LEN=4096 is --max-model-len 4096."),
    ("PENSTOCK_API_KEY", "Keys that the server takes, and that commands send, joined by commas."),
    ("PENSTOCK_MODELS", "Where models are kept."),
    ("PENSTOCK_LOG_LEVEL", "debug, info, warning, error or critical."),
    ("PENSTOCK_LOG_FORMAT", "text, or json for an object a line."),
    ("PENSTOCK_KV_KEY", "32 bytes, in hexadecimal digits or base64, that what is kept of prompts is encrypted with."),
    ("PENSTOCK_KV_STORE_PASSWORD", "The password of --kv-store in Redis."),
    ("AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, …", "Where --kv-store s3://… is, and who may use it."),
    ("HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE", "As Hugging Face's own programs read them."),
    ("OLLAMA_MODELS", "A store of Ollama's that is read too."),
)
_FILES: Final = (
    ("~/.local/share/penstock/models", "Models that were pulled, created or imported."),
    ("~/.cache/penstock/packed", "What is kept of models for faster starts; `penstock cache` lists and removes it."),
    ("~/.cache/penstock/kv", "What --kv-disk keeps of prompts; `penstock cache kv` lists, checks and removes it."),
    ("~/.local/state/penstock/history", "Lines that were typed to `penstock run`."),
)
_EXAMPLES: Final = (
    ('penstock run penstock-concierge "A table for two, please."', "Asks the model that ships with Penstock."),
    ("penstock serve Qwen/Qwen3-0.6B --port 8000", "Serves a model over HTTP."),
    ("penstock generate --batch < requests.jsonl", "Answers many requests, a line each."),
)


@app.command(cls=Command)
def man() -> None:
    """Show the manual page; into a pipe or file it is written as man(7) has it."""
    page = manual_page()
    viewer = shutil.which("man")
    if sys.stdout.isatty() and viewer is not None:
        subprocess.run([viewer, "-l", "-"], input=page.encode(), check=False)
    else:
        typer.echo(page, nl=False)


def manual_page() -> str:
    """The page of penstock(1) in the macros of man(7)."""
    from penstock.cli.main import COMMANDS, ONE_LINE, below, load_command

    commands = {name: list(below(name, load_command(name))) for name, _ in COMMANDS}
    lines = [
        f'.TH PENSTOCK 1 "" "Penstock {__version__}" "User Commands"',
        *(".SH NAME", rf"penstock \- {_text(ONE_LINE)}"),
        *(".SH SYNOPSIS", ".B penstock", r"\fICOMMAND\fR [\fIOPTION\fR...] [\fIARGUMENT\fR...]"),
        ".SH DESCRIPTION",
        r"Start with \fBpenstock run\fR: a small model that ships with Penstock answers at once, offline.",
        r"Every command has a short help (\fB\-\-help\fR) and a whole one (\fB\-\-help\-all\fR).",
        ".SH COMMANDS",
    ]
    for found in commands.values():
        for name, command in found:
            lines += [".TP", rf"\fB{_text(name)}\fR {_arguments(command)}".rstrip(), *_paragraphs(command.help or "")]
    lines += _options(pair for found in commands.values() for pair in found)
    for title, entries in (("ENVIRONMENT", _VARIABLES), ("FILES", _FILES), ("EXAMPLES", _EXAMPLES)):
        lines.append(f".SH {title}")
        for name, text in entries:
            lines += [".TP", rf"\fB{_text(name)}\fR", _text(text)]
    lines += [".SH EXIT STATUS", "0 on success, 1 if the work failed, 2 if a command or flag is wrong."]
    return "\n".join(lines) + "\n"


def _arguments(command: Any) -> str:
    names = (p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument")
    return " ".join(rf"[\fI{_text(name)}\fR]" for name in names)


def _options(commands: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Flags by their groups, each once, with the commands that take it."""
    groups: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, command in commands:
        context = command.make_context(name, [], resilient_parsing=True)
        for parameter in command.params:
            if parameter.param_type_name != "option" or parameter.name == "help":
                continue
            setattr(parameter, "hidden", False)  # noqa: B010 - else it tells nothing of itself
            spelt, _ = parameter.get_help_record(context)
            group = groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Other", {})
            group.setdefault((spelt, parameter.help or ""), []).append(name)
    yield ".SH OPTIONS"
    for title, flags in sorted(groups.items(), key=lambda group: group[0] == "Other"):
        yield rf".SS {_text(title)}"
        for (spelt, help), takers in flags.items():
            yield ".TP"
            yield rf"\fB{_text(spelt)}\fR"
            yield _text(help)
            shown = ", ".join(takers[:_MANY]) + (f" and {len(takers) - _MANY} more" if len(takers) > _MANY else "")
            yield rf"(\fI{_text(shown)}\fR)"


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".IP"
        yield _text(" ".join(paragraph.split()))


def _text(text: str) -> str:
    """A text in which nothing is taken for a request of roff."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("\n", " ")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
