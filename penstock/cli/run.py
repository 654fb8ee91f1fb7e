"""`penstock run`: a chat in the terminal, or one question."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.command import Command
from penstock.cli.options import MODEL_FLAGS, flag, freely_seeded, takes, takes_sampling
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False)
System = Annotated[str | None, typer.Option("--system", help="The system message.")]
Tools = Annotated[
    Path | None,
    typer.Option("--tools", help="A JSON file of functions that the model may call, as OpenAI spells them."),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Tell after each answer what it took.")]
HideThinking = Annotated[bool, typer.Option("--hide-thinking", help="Do not show reasoning.")]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A running server that is talked to; without a model the first that it lists."""

    url: str
    api_key: str | None
    model: str | None


_SERVER_FLAGS = (
    flag("url", str | None, None, "Model", "Talk to this running server instead; MODEL is one of its models.",
         hidden=False),
    flag("api_key", str | None, None, "Model", "What the server at --url wants as a bearer token.", hidden=False),
)  # fmt: skip


def _engine_or_server(given: Mapping[str, Any]) -> EngineOptions | Elsewhere:
    own = dict(given)
    url, api_key = own.pop("url"), own.pop("api_key")
    return (
        freely_seeded(own) if url is None else Elsewhere(url, (api_key or "").partition(",")[0] or None, own["model"])
    )


@app.command(cls=Command)
@takes("engine", (*MODEL_FLAGS, *_SERVER_FLAGS), _engine_or_server)
@takes_sampling
def run(
    engine: EngineOptions | Elsewhere,
    sampling: dict[str, Any],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Ask this and leave; a text on standard input is put below it."),
    ] = None,
    system: System = None,
    tools: Tools = None,
    verbose: Verbose = False,
    hide_thinking: HideThinking = False,
) -> None:
    """Chat with a model, or ask it once: with PROMPT, with a text on standard input, or with both.

    A text on standard input follows PROMPT after a blank line: cat report.txt | penstock run MODEL "Summarise this."
    """
    from penstock.cli.conversation import Conversation, read_tools
    from penstock.cli.server_client import Server
    from penstock.cli.talkers import LocalTalker, ServerTalker, Talker
    from penstock.cli.terminal import configure_logging, piped_input

    configure_logging(quiet=True)
    question = question_of(prompt, piped_input())
    conversation = Conversation(system=system, tools=() if tools is None else read_tools(str(tools)))
    with asyncio.Runner() as runner:
        talker: Talker
        if isinstance(engine, Elsewhere):
            talker = ServerTalker(Server(engine.url, engine.api_key), engine.model)
        else:
            talker = runner.run(LocalTalker.start(engine, sampling))
        talk(runner, talker, conversation, sampling, question, verbose=verbose, reasoning=not hide_thinking)


def talk(
    runner: asyncio.Runner,
    talker: Any,
    conversation: Any,
    sampling: dict[str, Any],
    question: str | None,
    *,
    verbose: bool,
    reasoning: bool,
) -> None:
    """Asks one question, or chats where there is none; ends the talker."""
    from penstock.cli.chat import Chat

    given = {name: value for name, value in sampling.items() if value is not False}
    chat = Chat(talker, conversation, given, verbose, reasoning, sys.stdout.isatty())
    try:
        if question is not None:
            runner.run(chat.ask({"role": "user", "content": question}))
        else:
            from penstock.cli.chat import converse

            converse(chat, runner)
    finally:
        runner.run(talker.close())


def question_of(prompt: list[str] | None, piped: str | None) -> str | None:
    """What to ask once; None to chat.

    Raises:
        RequestError: PROMPT and standard input are empty.
    """
    from penstock.cli.talkers import refuse_nothing

    if not prompt and piped is None:
        return None
    return refuse_nothing("\n\n".join(part for part in (" ".join(prompt or ()), (piped or "").strip()) if part))
