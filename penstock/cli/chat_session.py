"""A chat at the terminal: lines that are asked, and commands that begin with a slash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import typer

from penstock.cli.answer_view import AnswerView, Call, Clock
from penstock.cli.command import near
from penstock.cli.conversation import Conversation
from penstock.cli.line_editor import LineEditor
from penstock.cli.talkers import Talker, Usage, another_seed
from penstock.config.errors import PenstockError, RequestError
from penstock.core.request import FinishReason

HELP: Final = """\
/help              this list
/set NAME VALUE    a parameter (temperature, max_tokens, top_p, seed, stop …), system TEXT, verbose on|off, think on|off
/set NAME          back to the model's own; /set alone shows what is set
/show [info|system|messages]   what there is to know of the model, or what was said
/system TEXT       set the system message (without TEXT: remove it)
/regen             answer the last question again, with another draw
/tool TEXT         give the result of the last answer's call
/clear             forget the conversation, keep the system message
/save FILE, /load FILE   write the conversation as JSON; take one up again
/model NAME        go on with another model
/quit              leave (also Ctrl-D)
Ctrl-C stops an answer. Enter asks; Alt-Enter, or a line that ends in \\, goes on in the next line."""
_NUMBERS: Final[Mapping[str, Callable[[str], Any]]] = MappingProxyType(
    {
        "temperature": float, "top_p": float, "min_p": float, "typical_p": float, "repetition_penalty": float,
        "presence_penalty": float, "frequency_penalty": float, "top_k": int, "max_tokens": int, "min_tokens": int,
        "seed": int, "stop": lambda text: (text,),
    }
)  # fmt: skip
_OTHER_NAMES: Final = MappingProxyType({"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"})
_ON: Final = MappingProxyType({"on": True, "true": True, "": True, "off": False, "false": False})
COMMANDS: Final = (
    *("/help", "/set", "/show", "/system", "/regen", "/tool", "/clear", "/save", "/load", "/model", "/quit"),
)


@dataclass(slots=True)
class Chat:
    """A chat's state.

    Attributes:
        talker: who answers.
        conversation: what was said.
        sampling: parameters of the next answers.
        verbose: tell what each answer took.
        reasoning: show it.
        person: somebody looks at what is written.
    """

    talker: Talker
    conversation: Conversation
    sampling: dict[str, Any]
    verbose: bool = False
    reasoning: bool = True
    person: bool = True
    told: Callable[[str], None] = field(default=lambda text: typer.echo(text, err=True))

    async def ask(self, turn: Mapping[str, Any], sampling: Mapping[str, Any] | None = None) -> None:
        """Answers a turn; it joins the conversation with what was said, even if the answer is stopped.

        Raises:
            PenstockError: the request is refused, or the answer ends with an error.
        """
        question = dict(turn)
        asked = Conversation([*self.conversation.messages, question], self.conversation.system, self.conversation.tools)
        view = AnswerView(self.person, self.reasoning)
        clock, usage = Clock(), Usage()
        given = self.sampling if sampling is None else sampling
        try:
            await view.show(clock.watch(self.talker.answer(asked, given, usage)))
        finally:
            if (answer := view.message()) is not None:
                self.conversation.messages += [question, answer]
            if view.finish is FinishReason.LENGTH and self.person:
                self.told("[cut: max_tokens, or the end of the context]")
            if self.verbose and usage.prompt is not None:
                self.told(clock.told(usage))

    def command(self, line: str, runner: asyncio.Runner) -> bool:
        """Carries out a line that starts with a slash; False ends the chat.

        Raises:
            PenstockError: it cannot be carried out.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit", "/bye"):
            return False
        simple: dict[str, Callable[[str], None]] = {
            "/set": self.set, "/show": self.show, "/system": self._system, "/clear": self._clear,
            "/save": self._save, "/load": self._load,
        }  # fmt: skip
        if name in simple:
            simple[name](rest)
        elif name in ("/regen", "/retry"):
            runner.run(self._again())
        elif name == "/tool":
            runner.run(self._result(rest))
        elif name == "/model":
            runner.run(self._model(rest))
        else:
            if name not in ("/help", "/?"):
                self.told(f"{name} is no command.{near(name, COMMANDS)}")
            self.told(HELP)
        return True

    def set(self, rest: str) -> None:
        """`/set`: a parameter, the system message, or how answers are shown."""
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        name, value = _OTHER_NAMES.get(name, name), value.strip()
        if not name:
            self.told("\n".join(f"{key} {value}" for key, value in self._settings()))
        elif name == "system":
            self._system(value)
        elif name in ("verbose", "quiet"):
            self.verbose = self._switch(name, value) == (name == "verbose")
            self.told(f"What an answer took is {'told' if self.verbose else 'not told'}.")
        elif name in ("think", "nothink"):
            self.reasoning = self._switch(name, value) == (name == "think")
            self.told(f"Reasoning is {'shown' if self.reasoning else 'hidden'}.")
        elif name in _NUMBERS:
            self._parameter(name, value)
        else:
            known = (*_NUMBERS, "system", "verbose", "think")
            raise RequestError(f"/set knows no {name!r}; known: {', '.join(known)}.{near(name, known)}")

    def _parameter(self, name: str, value: str) -> None:
        if not value:
            self.sampling.pop(name, None)
            self.told(f"{name} is the model's own again.")
            return
        try:
            changed = {**self.sampling, name: _NUMBERS[name](value)}
        except ValueError:
            raise RequestError(f"{name} is {value!r}; a number is needed.") from None
        self.talker.check(changed)
        self.sampling = changed
        self.told(f"{name} is {value}.")

    def _switch(self, name: str, value: str) -> bool:
        if value not in _ON:
            raise RequestError(f"/set {name} is {value!r}; allowed: on, off.")
        return _ON[value]

    def _settings(self) -> list[tuple[str, str]]:
        own = [("system", self.conversation.system or "(none)"), ("verbose", "on" if self.verbose else "off")]
        own.append(("think", "on" if self.reasoning else "off"))
        given = self.sampling.items()  # of which 0 is a value, and None and False are none
        return own + [(name, str(value)) for name, value in given if value is not None and value is not False]

    def show(self, rest: str) -> None:
        """`/show`: facts of the model, the system message, or what was said."""
        if rest in ("", "info", "model", "parameters"):
            rows = [*self.talker.facts(), *self._settings()]
            self.told("\n".join(f"{name:<24} {value}" for name, value in rows))
        elif rest == "system":
            self.told(self.conversation.system or "There is no system message.")
        elif rest == "messages":
            for message in self.conversation.all():
                said = [str(message.get("content") or ""), *map(_call_of, message.get("tool_calls") or ())]
                self.told(f"{message['role']}: " + "\n".join(filter(None, said)))
        else:
            raise RequestError(f"/show knows no {rest!r}; known: info, system, messages.")

    def _system(self, rest: str) -> None:
        self.conversation.system = rest or None
        self.told("The system message is set." if rest else "The system message is removed.")

    def _clear(self, rest: str) -> None:
        self.conversation.messages.clear()
        self.told("The conversation is forgotten.")

    def _save(self, rest: str) -> None:
        self.conversation.save(_needed("/save", rest))
        self.told(f"Saved to {rest}.")

    def _load(self, rest: str) -> None:
        self.conversation.load(_needed("/load", rest))
        self.told(f"Loaded {len(self.conversation.messages)} messages from {rest}.")

    async def _again(self) -> None:
        kept = list(self.conversation.messages)
        question = self.conversation.take_back()
        if question is None:
            raise RequestError("nothing was asked yet.")
        before = len(self.conversation.messages)
        try:
            await self.ask(question, another_seed(self.sampling))
        finally:
            if len(self.conversation.messages) == before:  # nothing came instead
                self.conversation.messages = kept

    async def _result(self, rest: str) -> None:
        call = self.conversation.open_call()
        if call is None:
            raise RequestError("the last answer calls nothing that has no result yet.")
        await self.ask({"role": "tool", "tool_call_id": call, "content": rest})

    async def _model(self, rest: str) -> None:
        if not rest:
            self.told(f"{self.talker.model} answers.")
            return
        await self.talker.change(rest)
        self.told(f"{self.talker.model} answers now.")


def _call_of(told: Mapping[str, Any]) -> str:
    """A call of a message, as answers show it."""
    function = told.get("function") or {}
    return f"→ {Call('', str(function.get('name')), str(function.get('arguments') or '')).shown()}"


def _needed(command: str, rest: str) -> str:
    if not rest:
        raise RequestError(f"{command} needs a file name.")
    return rest


def converse(chat: Chat, runner: asyncio.Runner) -> None:
    """Asks and answers until the person leaves."""
    editor = LineEditor(COMMANDS, (*_NUMBERS, "system", "verbose", "think"))
    chat.told(f"{chat.talker.model}: ask away; /help lists commands.")
    while True:
        try:
            line = editor.read()
        except EOFError:
            return
        except KeyboardInterrupt:
            chat.told("/quit or Ctrl-D leaves.")
            continue
        try:
            if line.startswith("/"):
                if not chat.command(line.strip(), runner):
                    return
            elif line.strip():
                runner.run(chat.ask({"role": "user", "content": line}))
        except KeyboardInterrupt:
            chat.told("[stopped]")
        except PenstockError as error:
            chat.told(f"penstock: {error}")
