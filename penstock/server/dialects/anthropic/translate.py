"""Anthropic bodies to the internal request. Pure: no engine, no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.config.constraint import ANY_TOOL, ToolChoice, ToolMode
from penstock.config.errors import ParameterError, RequestError, format_value
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.conversation import declared, string_of, thinking_variables
from penstock.server.dialects.anthropic.schema import CountTokensBody, MessagesBody
from penstock.server.errors import bad_value
from penstock.server.retention import marked_retention
from penstock.server.sampling import least
from penstock.server.structured import schema_grammar
from penstock.server.turns import ChatTurns

_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}
_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# Fields and the codes of their refusal; Anthropic's client goes on without a thread where it reads this one.
_UNAVAILABLE: Mapping[str, str] = MappingProxyType(
    {
        "container": "unsupported_parameter",
        "mcp_servers": "unsupported_parameter",
        "thread": "thread_unsupported_request",
    }
)
_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know three


@dataclass(frozen=True, slots=True)
class AnthropicCall:
    """A translated call.

    Attributes:
        request: what to run.
        model: as the client wrote it.
        stream: whether the answer comes in events.
        max_tokens: as asked; 0 wants no answer, only the prompt in the cache.
        hide_thinking: thinking blocks come without their text.
    """

    request: GenerationRequest
    model: str
    stream: bool
    max_tokens: int
    hide_thinking: bool


def messages_call(body: MessagesBody, defaults: Mapping[str, Any]) -> AnthropicCall:
    """Translates a body; `defaults` are the model's own sampling parameters.

    Raises:
        RequestError: a value or a combination that is not served.
    """
    top_p = None if body.top_p is None else least(body.top_p)
    stop = None if body.stop_sequences is None else tuple(body.stop_sequences)
    given = {"temperature": body.temperature, "top_p": top_p, "top_k": body.top_k, "stop": stop}
    chosen = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    sampling = SamplingParams(**chosen | {"max_tokens": max(body.max_tokens, 1)})
    hidden = body.thinking is not None and body.thinking.display == "omitted"
    return AnthropicCall(prompt_request(body, sampling), body.model, bool(body.stream), body.max_tokens, hidden)


def prompt_request(body: CountTokensBody, sampling: SamplingParams) -> GenerationRequest:
    """The request that a body's prompt makes.

    Raises:
        RequestError: a value or a combination that is not served.
    """
    for name, code in _UNAVAILABLE.items():
        if value := getattr(body, name):
            message = f"{name} is {format_value(value)}; it is not available here, leave it out."
            raise RequestError(message, param=name, code=code)
    tools = _tools(body.tools or ())
    choice = _tool_choice(body, [tool["function"]["name"] for tool in tools])
    messages = _chat(body)
    continued = messages[-1]["role"] == "assistant"
    if continued and messages[-1].get("tool_calls"):
        where = f"messages[{len(body.messages) - 1}]"
        raise RequestError(f"{where} ends with a tool_use; send a message with its tool_result.", param=where)
    config = body.output_config
    wanted = (config and config.format) or body.output_format
    thinking = body.thinking
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=sampling,
        messages=messages,
        tools=tools if tools and choice.mode is not ToolMode.NONE else None,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        template_kwargs=_variables(body),
        add_special_tokens=False,
        grammar=schema_grammar(wanted.json_schema, "output_config.format.schema").grammar if wanted else None,
        tool_choice=choice,
        parse=True,
        thinking_budget=thinking.budget_tokens if thinking and thinking.type == "enabled" else None,
        retention=marked_retention(_marked(body)),
    )


def _marked(body: CountTokensBody) -> Iterator[Mapping[str, Any]]:
    """Whatever of a body may have a mark of its cache."""
    yield {"cache_control": body.cache_control}
    for listed in (body.tools, body.system, *(message.get("content") for message in body.messages)):
        if isinstance(listed, list):
            yield from (part for part in listed if isinstance(part, Mapping))


def _variables(body: CountTokensBody) -> Mapping[str, Any]:
    """What thinking and effort are to the templates of models that know them."""
    mode = None
    budget = None
    effort = body.output_config.effort if body.output_config else None
    if (thinking := body.thinking) is not None:
        mode, budget = thinking.type, thinking.budget_tokens
        if mode == "enabled" and budget is None:
            name = "thinking.budget_tokens"
            raise RequestError(f'{name} is required with thinking.type "enabled".', param=name)
    return thinking_variables(mode, effort and _EFFORTS.get(effort, effort), budget)


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Declarations of functions as templates know them."""
    result = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            allowed = '"custom" (tools that a service runs, or that a model was trained on, are not available)'
            raise bad_value(f"{where}.type", tool["type"], allowed, "unsupported_parameter")
        if tool.get("input_schema") is None:
            raise bad_value(f"{where}.input_schema", None, "an object")
        result.append({"type": "function", "function": declared(where, tool, schema="input_schema")})
    return tuple(result)


def _tool_choice(body: CountTokensBody, names: Sequence[str]) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ANY_TOOL
    mode = _MODES[choice.type]
    if mode in (ToolMode.REQUIRED, ToolMode.NAMED) and not names:
        raise ParameterError("tool_choice.type", choice.type, '"auto" or "none" without tools')
    if mode is ToolMode.NAMED and choice.name not in names:
        raise ParameterError("tool_choice.name", choice.name, f"one of tools: {', '.join(names)}"[:200])
    single = mode is ToolMode.NAMED or choice.disable_parallel_tool_use
    return ToolChoice(mode, choice.name or "", parallel=not single)


def _chat(body: CountTokensBody) -> tuple[Mapping[str, Any], ...]:
    """The conversation in OpenAI's message objects; turns of the same side that follow each other become one."""
    turns = ChatTurns()
    if body.system:
        turns.add("system", body.system if isinstance(body.system, str) else _joined("system", body.system))
    for index, message in enumerate(body.messages):
        _add(turns, f"messages[{index}]", message)
    return tuple(turns.messages())


def _add(turns: ChatTurns, where: str, message: Mapping[str, Any]) -> None:
    """Adds a message: results of tools first, each a turn, then what was said."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _OF_ROLE:
        raise bad_value(f"{where}.role", role, ", ".join(_OF_ROLE))
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise bad_value(f"{where}.content", content, "a string or a list of blocks")
    blocks = [(f"{where}.content[{index}]", block) for index, block in enumerate(content)]
    for spot, block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in _OF_ROLE[role]:
            allowed = f"{', '.join(map(format_value, _OF_ROLE[role]))} (this model takes text)"
            raise bad_value(f"{spot}.type" if isinstance(block, dict) else spot, kind, allowed, "unsupported_content")
    for spot, block in blocks:
        if block["type"] == "tool_result":
            _add_result(turns, spot, block)
    said = [(spot, block) for spot, block in blocks if block["type"] != "tool_result"]
    if said:
        turns.add(role, joint=None if role == "system" else "\n")
    for spot, block in said:
        if block["type"] == "tool_use":
            _add_call(turns, spot, block)
        elif block["type"] == "thinking":
            turns.add(role, thought=string_of(spot, block, "thinking"), joint="\n")
        elif block["type"] == "text":
            turns.add(role, string_of(spot, block, "text"), joint="\n")


def _add_call(turns: ChatTurns, where: str, block: Mapping[str, Any]) -> None:
    name, call = string_of(where, block, "name"), string_of(where, block, "id")
    if not isinstance(block.get("input"), dict):
        raise bad_value(f"{where}.input", block.get("input"), "an object")
    turns.call(call, name, block["input"])


def _add_result(turns: ChatTurns, where: str, block: Mapping[str, Any]) -> None:
    call, content = string_of(where, block, "tool_use_id"), block.get("content")
    if call not in turns.functions:
        raise bad_value(f"{where}.tool_use_id", call, "the id of a tool_use in an earlier message")
    text = content if isinstance(content, str) else _joined(f"{where}.content", content or [])
    turns.result(call, f"Error: {text}" if block.get("is_error") else text)


def _joined(where: str, blocks: object) -> str:
    """The text of a list of text blocks."""
    if not isinstance(blocks, list):
        raise bad_value(where, blocks, "a string or a list of text blocks")
    for index, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else block
            raise bad_value(f"{where}[{index}].type", kind, '"text" (this model takes text)', "unsupported_content")
    return "\n".join(string_of(f"{where}[{index}]", block, "text") for index, block in enumerate(blocks))
