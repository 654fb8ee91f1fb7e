"""`penstock chat`: one question, or a conversation, spelt as with other servers' clients; JSON on demand."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.elsewhere import AskingCommand, Elsewhere, takes_chatting_model
from penstock.cli.options import takes_sampling
from penstock.cli.run import HideThinking, Tools, Verbose, begun, given_sampling, question_of, talk, talker_of
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.cli.conversation import Conversation
    from penstock.cli.talkers import Talker

app = typer.Typer(add_completion=False)


@app.command(cls=AskingCommand)
@takes_chatting_model
@takes_sampling
def chat(
    engine: EngineOptions | Elsewhere,
    sampling: dict[str, Any],
    quick: Annotated[
        str | None,
        typer.Option(
            "--quick", "-q", metavar="MESSAGE", help="Ask this and leave; a text on standard input is put below it."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system-prompt", "--system", help="The system message.")] = None,
    tools: Tools = None,
    verbose: Verbose = False,
    hide_thinking: HideThinking = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as one JSON object: message, usage, timings.")
    ] = False,
) -> None:
    """Ask a model, here or at --url: once with -q or a text on standard input, else line by line as `penstock run`."""
    from penstock.cli.terminal import configure_logging, piped_input

    configure_logging(quiet=True)
    question = question_of(None if quick is None else [quick], piped_input())
    if as_json and question is None:
        raise ConfigError("--json is for one question; give it with -q, or on standard input.")
    conversation = begun(system, tools)
    with asyncio.Runner() as runner:
        talker = talker_of(runner, engine, sampling)
        if not as_json:
            talk(runner, talker, conversation, sampling, question, verbose=verbose, reasoning=not hide_thinking)
            return
        conversation.messages.append({"role": "user", "content": question})
        try:
            told = runner.run(_whole(talker, conversation, given_sampling(sampling)))
        finally:
            runner.run(talker.close())
    typer.echo(json.dumps(told, ensure_ascii=False))


async def _whole(talker: Talker, conversation: Conversation, sampling: dict[str, Any]) -> dict[str, Any]:
    """An answer, read to its end."""
    from penstock.cli.answer_view import AnswerView, Clock
    from penstock.cli.talkers import Usage

    view = AnswerView(False, write=lambda text: None)
    clock, usage = Clock(), Usage()
    await view.show(clock.watch(talker.answer(conversation, sampling, usage)))
    first, rest = clock.times()
    message = view.message() or {"role": "assistant", "content": ""}
    if view.thoughts:
        message["reasoning_content"] = "".join(view.thoughts)
    return {
        "model": talker.model,
        "message": message,
        "finish_reason": "tool_calls" if view.calls and view.finish == "stop" else view.finish,
        "usage": usage.as_json(),
        "timings": {
            "ttft_ms": 1e3 * first,
            "total_ms": 1e3 * (first + rest),
            "output_tokens_per_s": (usage.output - 1) / rest if usage.output > 1 and rest > 0 else None,
        },
    }
