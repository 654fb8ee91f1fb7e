"""`penstock run`: a chat in the terminal, or one question."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.elsewhere import AskingCommand, Elsewhere, takes_chatting_model
from penstock.cli.options import takes_sampling
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.cli.conversation import Conversation
    from penstock.cli.talkers import Talker

app = typer.Typer(add_completion=False)
System = Annotated[str | None, typer.Option("--system", help="The system message.")]
Tools = Annotated[
    Path | None,
    typer.Option("--tools", help="A JSON file of functions that the model may call, as OpenAI spells them."),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Tell after each answer what it took.")]
HideThinking = Annotated[bool, typer.Option("--hide-thinking", help="Do not show reasoning.")]


@app.command(cls=AskingCommand)
@takes_chatting_model
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
    from penstock.cli.terminal import configure_logging, piped_input

    configure_logging(quiet=True)
    question = question_of(prompt, piped_input())
    conversation = begun(system, tools)
    with asyncio.Runner() as runner:
        talker = talker_of(runner, engine, sampling)
        talk(runner, talker, conversation, sampling, question, verbose=verbose, reasoning=not hide_thinking)


def begun(system: str | None, tools: Path | None) -> Conversation:
    """A conversation in which nothing was said. Raises RequestError for tools that cannot be read."""
    from penstock.cli.conversation import Conversation, read_tools

    return Conversation(system=system, tools=() if tools is None else read_tools(str(tools)))


def talker_of(runner: asyncio.Runner, engine: EngineOptions | Elsewhere, sampling: dict[str, Any]) -> Talker:
    """Who answers, ready.

    Raises:
        PenstockError: the model cannot be loaded or cannot chat, or no server is there.
    """
    from penstock.cli.talkers import LocalTalker, ServerTalker

    if isinstance(engine, EngineOptions):
        return runner.run(LocalTalker.start(engine, sampling))
    if engine.seed is not None:
        sampling.setdefault("seed", engine.seed)
    return ServerTalker(engine.server(), engine.model)


def given_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """Without switches that are off, which are no parameters of others' servers."""
    return {name: value for name, value in sampling.items() if value is not False}


def talk(
    runner: asyncio.Runner,
    talker: Talker,
    conversation: Conversation,
    sampling: dict[str, Any],
    question: str | None,
    *,
    verbose: bool,
    reasoning: bool,
) -> None:
    """Asks one question, or chats where there is none; ends the talker."""
    from penstock.cli.chat_session import Chat, converse

    chat = Chat(talker, conversation, given_sampling(sampling), verbose, reasoning, sys.stdout.isatty())
    try:
        if question is not None:
            runner.run(chat.ask({"role": "user", "content": question}))
        else:
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
    return refuse_nothing("\n\n".join(part for part in (" ".join(prompt or ()).strip(), (piped or "").strip()) if part))
