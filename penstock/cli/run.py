"""`penstock run`: a chat in the terminal, or one question."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import takes_freely_seeded_engine_options, takes_sampling
from penstock.config.errors import ConfigError, EngineDeadError, RequestError
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM

app = typer.Typer(add_completion=False)
HELP = """\
/help            this list
/system TEXT     set the system message (without TEXT: remove it)
/clear           forget the conversation, keep the system message
/save FILE       write the conversation as JSON
/quit            leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


@dataclass(slots=True)
class Conversation:
    """What was said so far.

    Attributes:
        messages: user and assistant turns, as OpenAI spells them.
        system: the system message, if any.
    """

    messages: list[dict[str, str]] = field(default_factory=list)
    system: str | None = None

    def all(self) -> list[dict[str, str]]:
        """The messages as the model gets them."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages


@app.command()
@takes_freely_seeded_engine_options
@takes_sampling
def run(
    engine: EngineOptions,
    sampling: dict[str, Any],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Ask this and leave; a text on standard input is put below it."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
) -> None:
    """Chat with a model, or ask it once: with PROMPT, with a text on standard input, or with both.

    A text on standard input follows PROMPT after a blank line: cat report.txt | penstock run MODEL "Summarise this."
    """
    from penstock.cli.start import start
    from penstock.cli.terminal import configure_logging, piped_input

    configure_logging(quiet=True)
    question = _question(prompt, piped_input())
    conversation = Conversation(system=system)
    with asyncio.Runner() as runner:
        llm = runner.run(start(engine, sampling))
        try:
            runner.run(_check_chats(llm))
            if question is not None:
                runner.run(_answer(llm, conversation, question, sampling))
            else:
                _chat(runner, llm, conversation, sampling)
        finally:
            runner.run(llm.close())


def _question(prompt: list[str] | None, piped: str | None) -> str | None:
    """What to ask once; None to chat."""
    if not prompt and piped is None:
        return None
    question = "\n\n".join(part for part in (" ".join(prompt or ()), (piped or "").strip()) if part)
    if not question:
        raise RequestError("there is no question: PROMPT and standard input are empty.")
    return question


async def _check_chats(llm: AsyncLLM) -> None:
    frontend = await llm.start()
    if frontend.text.template is None:
        name = frontend.info.model
        raise ConfigError(f"{name} has no chat template; `penstock generate` continues a text without one.")


async def _answer(llm: AsyncLLM, conversation: Conversation, question: str, sampling: dict[str, Any]) -> None:
    """Streams the answer to standard output; the turn joins the conversation even if the answer is stopped."""
    turn = [*conversation.all(), {"role": "user", "content": question}]
    said: list[str] = []
    error: str | None = None
    try:
        async for delta in llm.chat(turn, **sampling):
            said.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            error = delta.error or error
    finally:
        if said:
            sys.stdout.write("\n")
            conversation.messages += [turn[-1], {"role": "assistant", "content": "".join(said)}]
    if error:
        raise EngineDeadError(error)


def _chat(runner: asyncio.Runner, llm: AsyncLLM, conversation: Conversation, sampling: dict[str, Any]) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and line editing
    typer.echo(f"{llm.info.model}: ask away; /help lists commands.", err=True)
    while True:
        try:
            line = _read_line()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo("\n/quit or Ctrl-D leaves.", err=True)
            continue
        if line.startswith("/"):
            if not command(line, conversation):
                return
        elif line.strip():
            try:
                runner.run(_answer(llm, conversation, line, sampling))
            except KeyboardInterrupt:
                typer.echo("[stopped]", err=True)
            except RequestError as error:
                typer.echo(f"penstock: {error} /clear starts afresh.", err=True)


def _read_line() -> str:
    line = input("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("  ")
    return line


def command(line: str, conversation: Conversation) -> bool:
    """Carries out a line that starts with a slash; False ends the chat."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/quit", "/exit", "/bye"):
        return False
    if name == "/clear":
        conversation.messages.clear()
        typer.echo("The conversation is forgotten.", err=True)
    elif name == "/system":
        conversation.system = rest or None
        typer.echo("The system message is set." if rest else "The system message is removed.", err=True)
    elif name == "/save":
        _save(rest, conversation)
    else:
        if name != "/help":
            typer.echo(f"{name} is no command.", err=True)
        typer.echo(HELP, err=True)
    return True


def _save(path: str, conversation: Conversation) -> None:
    if not path:
        typer.echo("/save needs a file name.", err=True)
        return
    text = json.dumps(conversation.all(), ensure_ascii=False, indent=2)
    try:
        Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(f"{path} cannot be written: {error.strerror or error}.", err=True)
    else:
        typer.echo(f"Saved to {path}.", err=True)
