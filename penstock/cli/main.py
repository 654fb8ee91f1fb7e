"""The `penstock` command. Sub-commands live in one module each and are imported when they are called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup

from penstock import __version__

COMMANDS = (
    ("serve", "Serve a model over HTTP, with OpenAI's API."),
    ("worker", "Compute a part of a model that another machine serves."),
    ("run", "Chat with a model, or ask it once."),
    ("chat", "Ask a model here, or at --url; -q for one question."),
    ("complete", "Continue a text, here or at --url; no chat template."),
    ("generate", "The same as `complete`."),
    ("embed", "Turn texts into vectors."),
    ("tokenize", "List a text's tokens, or the text of token ids."),
    ("detect", "Say whether a text was written with a watermark."),
    ("draft", "Train heads that draft for a model."),
    ("bench", "Measure latency, throughput or a running server."),
    ("tune", "Measure which threads and step sizes suit a model here."),
    ("quantize", "Write a smaller copy of a model: GGUF or safetensors."),
    ("imatrix", "Measure which inputs of a model matter, for `quantize`."),
    ("perplexity", "Measure how well a model predicts a text, or how far it lies from another."),
    ("eval", "Ask a model the tasks of lm-eval, as they are compared everywhere."),
    ("doctor", "Say what this machine offers and what Penstock makes of it."),
    ("collect-env", "Print what a bug report needs: versions, processor, memory, packages, settings."),
    ("plan", "Say what memory a model needs, without loading it."),
    ("pull", "Bring a model here by its name: Hugging Face, a registry as Ollama's, an address."),
    ("list", "List the models that are here."),
    ("show", "Say what a model is, and what it needs here."),
    ("cp", "Give a model another name."),
    ("rm", "Remove models."),
    ("create", "Make a model of a Modelfile."),
    ("fuse", "Merge adapters into a model's weights."),
    ("import", "Give a folder or file of this machine a name."),
    ("push", "Send a model to a registry."),
    ("migrate", "Print what a command line of another engine is here."),
    ("inspect", "List a model's metadata and tensors."),
    ("convert", "Write a model in the other form: Hugging Face folder or GGUF file."),
    ("ps", "List the models that a running server has loaded."),
    ("stop", "Have a running server unload a model."),
    ("prune", "Remove what no model needs, and what came of pulls that were given up."),
    ("cache", "List or remove what is kept of models and prompts for faster starts and answers."),
    ("man", "Show the manual page."),
    ("config", "Show every setting of a command, and what set it."),
)
_FILES: Final = MappingProxyType(
    {"import": "import_model", "inspect": "inspect_model", "generate": "complete", "collect-env": "collect_env"}
)
ONE_LINE: Final = "One engine for running and serving large language models."
_HELP = f"""{ONE_LINE}

Start with `penstock run`: a small model that ships with Penstock answers at once, offline."""


class LazyGroup(TyperGroup):
    """Knows its commands by name and a line of help; a command's module is imported when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in self.commands:
            self.commands[name] = load_command(name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; a deliberate error is told on standard error, without a trace, and exit code 1."""
        from penstock.config.environment import read_environment
        from penstock.config.errors import PenstockError

        try:
            debug = read_environment().log_level == "debug"
        except PenstockError as error:
            raise _failure(error) from None
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            if debug:
                raise
            raise _failure(error) from None


def load_command(name: str) -> Any:
    """A command by its name, with the commands below it if it has any."""
    command = cast(Any, typer.main.get_command(import_module(f"penstock.cli.{_FILES.get(name, name)}").app))
    command.name = name
    return command


def commands_of() -> Iterator[Any]:
    """Every command that takes flags."""
    for name, _ in COMMANDS:
        yield from (command for _, command in below(name, load_command(name)))


def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands of a group, with the words that call them; or a command itself."""
    commands = getattr(command, "commands", None)
    if commands is None:
        yield name, command
        return
    for word, found in commands.items():
        yield from below(f"{name} {word}", found)


def _failure(error: Exception) -> typer.Exit:
    typer.echo(f"penstock: {error}", err=True)
    return typer.Exit(1)


app = typer.Typer(
    cls=LazyGroup,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for _name, _line in COMMANDS:
    app.command(_name, help=_line)(lambda: None)


def main() -> None:
    """Entry point of the `penstock` script."""
    try:
        app(prog_name="penstock")
    except BrokenPipeError:  # the reader of our output has gone, for example `| head`
        sys.stderr.close()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
