"""Chat templates: a conversation to the text a model was trained on, as Hugging Face's apply_chat_template does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import jinja2
from jinja2 import meta

from penstock.config import limits
from penstock.config.errors import RequestError, TemplateError
from penstock.text.sandbox import TemplateSandbox

_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
# Survives escaping (plain letters); ends in a space, which shows whether the template trims.
_END_MARK: Final = "PENSTOCK_END_OF_FINAL_MESSAGE "
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_MAX_DEPTH: Final = limits.MAX_JSON_DEPTH + 8
_RESERVED: Final = frozenset(
    [
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "namespace",
        "dict",
        "range",
        "cycler",
        "joiner",
        "raise_exception",
        "strftime_now",
        "self",
        "loop",
        "caller",
        "varargs",
        "kwargs",
        "super",
    ]
)
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BY_NAME: Final = frozenset(("datetime", "functions"))  # that a few templates read, as llama.cpp gives them


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template that can be rendered, and which of `_BY_NAME` it reads."""

    template: jinja2.Template
    reads: frozenset[str]


class ChatTemplate:
    """A model's chat template, or several by name ("default", "tool_use", …). Safe to share among threads.

    Args:
        source: Jinja source; or a mapping of name to source; or a list of {"name", "template"} as in
            tokenizer_config.json.
        bos_token, eos_token: text of these tokens for the template; empty leaves the variable undefined.
        special_tokens: further ones by variable name ("pad_token" …).

    Raises:
        TemplateError: there is no template, it is not valid, or it can be seen to be unsafe.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | Sequence[Mapping[str, str]],
        *,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in tokens.items() if text}
        self._sandbox = TemplateSandbox()
        self.sources: Mapping[str, str] = _by_name(source)
        self._compiled = {name: self._compile(name, text) for name, text in self.sources.items()}

    @classmethod
    def from_config(cls, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
        """The template of a tokenizer_config.json (its `chat_template` and special tokens).

        Raises:
            TemplateError: as the constructor.
        """
        source = tokenizer_config.get("chat_template")
        if source is None:
            raise TemplateError(
                "the model has no chat template. Send `prompt` instead of `messages`, or give the model a "
                "chat_template in tokenizer_config.json or chat_template.jinja."
            )
        tokens: dict[str, str] = {}
        for name in _SPECIAL_TOKENS:
            value = tokenizer_config.get(name)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                tokens[name] = value
        return cls(
            source, bos_token=tokens.pop("bos_token", ""), eos_token=tokens.pop("eos_token", ""), special_tokens=tokens
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: OpenAI's message objects.
            tools: function declarations; they select the template "tool_use" where there is one.
            add_generation_prompt: end with what opens the assistant's turn.
            continue_final_message: end with the last message's text, for the model to continue.
            chat_template: name of one of the templates, or the source of another one to use instead.
            variables: further variables for the template (`template_kwargs` of a request).

        Raises:
            RequestError: a variable's name is reserved, or the arguments contradict each other.
            TemplateError: the template refuses the messages, fails, or takes too much time or memory; or the given
                one is not valid or unsafe.
        """
        _check_variables(variables)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true; allowed: at most one of them.",
                param="continue_final_message",
            )
        chat = [_with_reasoning(_plain_message(index, message)) for index, message in enumerate(messages)]
        final = _mark_final(chat) if continue_final_message else ""
        context: dict[str, Any] = {**self._tokens, "documents": None, **_plain(dict(variables), 0)}
        context["messages"] = chat
        context["tools"] = None if tools is None else [_plain(tool, 0) for tool in tools]
        context["add_generation_prompt"] = add_generation_prompt
        chosen = self._choose(chat_template, tools is not None)
        if "datetime" in chosen.reads:
            context.setdefault("datetime", datetime.now(UTC).strftime("%b %d %Y %H:%M:%S GMT"))
        if "functions" in chosen.reads:
            told = json.dumps(context["tools"], ensure_ascii=False, indent=2) if context["tools"] else ""
            context.setdefault("functions", told)
        text = self._run(chosen.template, context)
        return _cut_final(text, final) if continue_final_message else text

    def _compile(self, name: str, source: str) -> _Compiled:
        if len(source) > limits.MAX_TEMPLATE_SOURCE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters; allowed: {limits.MAX_TEMPLATE_SOURCE_CHARS}."
            )
        try:
            with self._sandbox.budget():
                parsed = self._sandbox.parse(source)
                asks = any(word in source for word in _BY_NAME)
                reads = _BY_NAME & meta.find_undeclared_variables(parsed) if asks else frozenset[str]()
                return _Compiled(self._sandbox.from_string(parsed), reads)
        except TemplateError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template {name!r} is not valid, line {error.lineno}: {error.message}. Correct the template."
            ) from error
        except Exception as error:
            raise TemplateError(f"the chat template {name!r} cannot be compiled: {_sentence(error)}.") from error

    def _choose(self, given: str | None, with_tools: bool) -> _Compiled:
        if given is not None:
            return self._compiled.get(given) or self._compile("of the request", given)
        if with_tools and _TOOL_USE in self._compiled:
            return self._compiled[_TOOL_USE]
        if _DEFAULT in self._compiled:
            return self._compiled[_DEFAULT]
        raise TemplateError(
            f"the model has the chat templates {', '.join(sorted(self._compiled))} but none named {_DEFAULT!r}. "
            "Name one of them so in tokenizer_config.json."
        )

    def _run(self, template: jinja2.Template, context: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        try:
            with self._sandbox.budget():
                for part in template.generate(context):
                    size += len(part)
                    if size > limits.TEMPLATE_MAX_CHARS:
                        raise TemplateError(
                            f"the chat template writes more than {limits.TEMPLATE_MAX_CHARS} characters. "
                            "Send a shorter conversation."
                        )
                    parts.append(part)
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template failed on these messages: {_sentence(error)}.") from error
        return "".join(parts)


def _sentence(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    return (str(error) or type(error).__name__).rstrip(".")[:500]


def _by_name(source: str | Mapping[str, str] | Sequence[Mapping[str, str]]) -> dict[str, str]:
    if isinstance(source, str):
        return {_DEFAULT: source}
    named: dict[Any, Any] = {}
    if isinstance(source, Mapping):
        named = dict(source)
    elif isinstance(source, Sequence):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
    if not named or not all(isinstance(key, str) and isinstance(value, str) for key, value in named.items()):
        raise TemplateError(
            f"chat_template is of type {type(source).__name__} with unusable entries; allowed: a string, or named "
            'templates as {"name": …, "template": …}.'
        )
    return named


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in _RESERVED or name.startswith("_") or not name.isidentifier():
            raise RequestError(
                f"chat_template_kwargs has {name[:80]!r}, which is reserved; allowed: other names, not beginning with "
                "an underscore.",
                param="chat_template_kwargs",
            )


def _plain(value: Any, depth: int) -> Any:
    """A copy made of plain JSON types, so that a template meets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _MAX_DEPTH:
        raise RequestError(f"messages, tools or template variables are nested deeper than {_MAX_DEPTH} levels.")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    raise RequestError(f"a template variable is of type {type(value).__name__}; allowed: JSON values.")


def _plain_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] is of type {type(message).__name__}; allowed: an object.", param=f"messages[{index}]"
        )
    plain: dict[str, Any] = _plain(message, 0)
    return plain


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Gives a message's reasoning under the names templates read (`reasoning_content`, `thinking`)."""
    found = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Puts the end mark after the last message's text; returns that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_MARK
        return content
    for block in reversed(content if isinstance(content, list) else []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text: str = block["text"]
            block["text"] = text + _END_MARK
            return text
    raise RequestError(
        "continue_final_message is true but the last message has no text to continue.", param="continue_final_message"
    )


def _cut_final(text: str, final: str) -> str:
    mark = _END_MARK.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise TemplateError(
            "the chat template leaves out or changes the last message, so it cannot be continued. "
            "Leave continue_final_message out."
        )
    kept = text[:at]
    return kept if text.startswith(_END_MARK, at) else kept.rstrip()
