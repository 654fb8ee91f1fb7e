"""Responses bodies to the internal request. Pure: no engine, no store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.errors import RequestError
from penstock.core.constraint import Grammar, GrammarKind, ToolChoice, ToolMode
from penstock.core.request import GenerationRequest
from penstock.core.sampling import SamplingParams
from penstock.server.conversation import checked_messages, checked_tools, template_kwargs
from penstock.server.dialects.responses.items import Item, messages_of
from penstock.server.dialects.responses.schema import LOGPROBS, Format, InputTokensBody, ResponsesBody
from penstock.server.errors import bad_value, encode_json

SENT_AS: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
}
"""What the client sent for fields of the internal request that have another name; see `spelled`."""
_UNAVAILABLE: Mapping[str, str] = {
    "conversation": "Conversations are not kept here; continue a response with previous_response_id.",
    "prompt": "Prompt templates are not kept here; send instructions and input.",
}
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "ignore_eos"),
)
_MODES = {"auto": ToolMode.AUTO, "none": ToolMode.NONE, "required": ToolMode.REQUIRED}


@dataclass(frozen=True, slots=True)
class Call:
    """A translated call.

    Attributes:
        id: of the response.
        owner: whose it is; see `ApiKeys.owner`.
        body: what was sent.
        input: all items the model is shown, those of earlier responses included.
        request: what is run.
    """

    id: str
    owner: str
    body: ResponsesBody
    input: tuple[Item, ...]
    request: GenerationRequest

    @property
    def stored(self) -> bool:
        """Whether the response is kept, which it is unless the client says otherwise."""
        return self.body.store is not False


def check_combinations(body: ResponsesBody) -> None:
    """Raises RequestError for fields that are not served, alone or together."""
    if body.background and body.store is False:
        raise bad_value("store", False, "true, or left out, with background: true, which is fetched later")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed together with stream: true.", param="stream_options")


def prompt_request(
    body: InputTokensBody, items: Sequence[Item], request_id: str, sampling: SamplingParams
) -> GenerationRequest:
    """The internal request of a conversation.

    Raises:
        RequestError: a field that is not served, or tools or a tool choice that are not acceptable.
    """
    for name, remedy in _UNAVAILABLE.items():
        if getattr(body, name, None) is not None:
            raise RequestError(f"{name} is not available. {remedy}", param=name, code="unsupported_parameter")
    tools, choice = _tools(body)
    return GenerationRequest(
        request_id=request_id,
        sampling=sampling,
        messages=checked_messages(messages_of(items, body.instructions)),
        tools=tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs, body.reasoning.effort if body.reasoning else None),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        grammar=_grammar(body.text.format if body.text else None),
        tool_choice=choice,
        parse=True,
    )


def sampling_of(body: ResponsesBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters; `defaults` are the model's own."""
    chosen = {name: value for name, value in defaults.items() if value is not None}
    chosen |= {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        chosen["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chosen["logprobs"] = body.top_logprobs or 0
    return SamplingParams(**chosen | {"max_tokens": body.max_output_tokens})


def _grammar(wanted: Format | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if wanted.schema_ is None:
        raise bad_value("text.format.schema", None, "a JSON Schema with type 'json_schema'")
    return Grammar(GrammarKind.JSON_SCHEMA, encode_json(wanted.schema_).decode())


def _tools(body: InputTokensBody) -> tuple[tuple[Mapping[str, Any], ...] | None, ToolChoice]:
    """The functions the model is shown, and which of them it must call."""
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    mode, name, parallel = ToolMode.AUTO, "", body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, str):
        if choice not in _MODES:
            raise bad_value("tool_choice", choice, "'none', 'auto', 'required', a function or allowed_tools")
        mode = _MODES[choice]
    elif choice is not None and choice.get("type") == "function":
        mode, name = ToolMode.NAMED, _named(choice, functions, "tool_choice")
    elif choice is not None and choice.get("type") == "allowed_tools":
        mode, allowed = _MODES.get(str(choice.get("mode", "auto")), ToolMode.NONE), choice.get("tools")
        if mode is ToolMode.NONE or not isinstance(allowed, list):
            raise bad_value("tool_choice", choice, "allowed_tools with mode 'auto' or 'required' and a list of tools")
        kept = {_named(tool, functions, f"tool_choice.tools[{index}]") for index, tool in enumerate(allowed)}
        functions = [function for function in functions if function["function"]["name"] in kept]
    elif choice is not None:
        raise bad_value("tool_choice.type", choice.get("type"), "'function', 'allowed_tools'", "unsupported_parameter")
    if mode is ToolMode.REQUIRED and not functions:
        raise bad_value("tool_choice", choice, "'auto' or 'none' without tools")
    tools = checked_tools(functions if mode is not ToolMode.NONE else None)
    return tools, ToolChoice(mode, name, parallel)


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        allowed = "'function' (built-in, custom and MCP tools are not available; run them in the client)"
        raise bad_value(f"{where}.type", tool.get("type"), allowed, "unsupported_parameter")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise bad_value(f"{where}.name", name, "a string that is not empty")
    for field, kind, allowed in (
        *(("description", str, "a string"), ("parameters", dict, "an object")),
        ("strict", bool, "true or false"),
    ):
        if tool.get(field) is not None and not isinstance(tool[field], kind):
            raise bad_value(f"{where}.{field}", tool[field], allowed)
    given = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in given if tool.get(key) is not None}}


def _named(choice: object, functions: Sequence[Mapping[str, Any]], where: str) -> str:
    name = choice.get("name") if isinstance(choice, dict) else None
    names = [function["function"]["name"] for function in functions]
    if not isinstance(name, str) or name not in names:
        raise bad_value(f"{where}.name", name, f"the name of one of the tools ({', '.join(names)[:200] or 'none'})")
    return name
