"""Chats as clients send them, checked and made fit for a model's template; shared by the dialects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from penstock.config.constraint import ToolChoice, ToolMode
from penstock.config.errors import RequestError, format_value
from penstock.server.custom_tools import arguments_for, as_function, check_names, custom_names, definition_fields
from penstock.server.errors import bad_value
from penstock.server.strict_json import parse_json
from penstock.text.grammar.wellformed import SchemaFault, first_fault

_MAX_ROLE_CHARS = 64
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
_FUNCTION_FIELDS: tuple[tuple[str, type, str], ...] = (
    ("description", str, "a string"),
    ("parameters", dict, "an object"),
    ("strict", bool, "true or false"),
)
_FUNCTION_NAME = re.compile(r"[\w.:/-]{1,128}")
_RESERVED = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "self"}
)


def checked_tools(
    tools: Sequence[Mapping[str, Any]] | None, where: str = "tools"
) -> tuple[Mapping[str, Any], ...] | None:
    """Function declarations, or None where there are none; `where` names the field they were sent in.

    Custom tools are declared as the functions that stand for them.

    Raises:
        RequestError: an entry is not a function declaration, and no custom tool.
    """
    found: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") == "custom":
            at = f"{where}[{index}].custom"
            found.append({"type": "function", "function": declared(at, as_function(at, tool.get("custom")))})
            continue
        found.append(tool)
        function = tool.get("function")
        function = function if isinstance(function, dict) else {}
        if tool.get("type") != "function" or not isinstance(function.get("name"), str):
            allowed = 'an object of type "function" with function.name, or of type "custom"'
            raise bad_value(f"{where}[{index}]", tool, allowed)
        declared(f"{where}[{index}]" if where == "functions" else f"{where}[{index}].function", function)
    check_names(where, found, custom_names(tools))
    return tuple(found) if found else None


def declared(where: str, given: Mapping[str, Any], schema: str = "parameters") -> dict[str, Any]:
    """A function's declaration; `schema` names the field that holds what its arguments are held to.

    Raises:
        RequestError: a field of another kind, or a name that could not be told from the marks around it in what a
            model writes.
    """
    function: dict[str, Any] = {"name": given.get("name")}
    if not isinstance(function["name"], str) or not _FUNCTION_NAME.fullmatch(function["name"]):
        raise bad_value(f"{where}.name", function["name"], "1 to 128 letters, digits and any of _ - . : /")
    for name, kind, allowed in _FUNCTION_FIELDS:
        sent = schema if name == "parameters" else name
        check_kind(f"{where}.{sent}", given.get(sent), kind, allowed)
        if given.get(sent) is not None:
            function[name] = given[sent]
    _check_parameters(f"{where}.{schema}", function.get("parameters", {}))
    return function


def _check_parameters(where: str, schema: Mapping[str, Any]) -> None:
    """Refuses, as OpenAI and Anthropic do, a schema that is none, whether or not the arguments are held to it."""
    fault = first_fault(schema)
    kinds = schema.get("type", "object")
    if fault is None and "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        fault = SchemaFault(".type", schema["type"], '"object", as arguments have names')
    if fault is not None:
        message = f"{where}{fault.path} is {format_value(fault.value)}; allowed: {fault.allowed}."
        raise RequestError(message, param=where, code="invalid_function_parameters")


def function_fields(tools: Sequence[object] | None, sent: str) -> dict[str, str]:
    """Where a dialect has the schemas of functions that `GenerationRequest.tools` has elsewhere; see `param_names`."""
    named = {f"tools[{index}].function.parameters": sent.format(index) for index in range(len(tools or ()))}
    return named | definition_fields(tools)


def chosen_tools(
    choice: object, tools: tuple[Mapping[str, Any], ...] | None, *, parallel: bool | None
) -> tuple[tuple[Mapping[str, Any], ...] | None, ToolChoice]:
    """The functions the model is shown, and which of them it may or must call.

    Args:
        choice: in one of OpenAI's forms, of which `allowed_tools` shows some of the functions alone.
        tools: the functions there are.
        parallel: whether several calls may be made, which they may if it is not said.

    Raises:
        RequestError: as `tool_choice`.
    """
    param = "tool_choice"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        param = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
            raise bad_value(f"{param}.tools", listed, "a list of tools, each with its name")
        wanted = [tool_choice(tool, tools, param=f"{param}.tools[{i}]").name for i, tool in enumerate(listed)]
        tools = tuple(tool for tool in tools or () if tool["function"]["name"] in wanted) or None
        choice, param = allowed.get("mode", "auto"), f"{param}.mode"
    chosen = tool_choice(choice, tools, parallel=parallel is not False, param=param)
    return None if chosen.mode is ToolMode.NONE else tools, chosen


class ToolFields(Protocol):
    """OpenAI's fields of tools, and those that it had before there were tools."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    functions: list[dict[str, Any]] | None
    function_call: str | dict[str, Any] | None


def functions_or_tools(body: ToolFields) -> tuple[tuple[Mapping[str, Any], ...] | None, ToolChoice]:
    """As `chosen_tools`, from today's fields of a body or the older ones."""
    tools, where = body.tools, "tools"
    choice, function_call = body.tool_choice, body.function_call
    if body.functions and not tools:
        tools, where = [{"type": "function", "function": function} for function in body.functions], "functions"
    if function_call is not None and choice is None:
        choice = {"type": "function", "function": function_call} if isinstance(function_call, dict) else function_call
    return chosen_tools(choice, checked_tools(tools, where), parallel=body.parallel_tool_calls)


def tool_choice(
    choice: object, tools: Sequence[Mapping[str, Any]] | None, *, parallel: bool = True, param: str = "tool_choice"
) -> ToolChoice:
    """Whether and which functions an answer calls, from OpenAI's forms of the choice.

    Raises:
        RequestError: the choice has another form, or names or requires a function that is not declared.
    """
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice is None or (isinstance(choice, str) and choice in ("auto", "none")):
        return ToolChoice(ToolMode(choice or "auto"), parallel=parallel)
    if choice in ("required", "any"):
        if not names:
            raise bad_value(param, choice, '"auto" or "none" without tools')
        return ToolChoice(ToolMode.REQUIRED, parallel=parallel)
    function = choice.get("function", choice.get("custom", choice)) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        allowed = '"auto", "none", "required", or an object with function.name'
        raise bad_value(param, choice, allowed)
    if name not in names:
        raise bad_value(param, name, f"a function among the tools: {', '.join(names) or 'there are none'}")
    return ToolChoice(ToolMode.NAMED, name, parallel=False)


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Messages with text content, system roles under the name templates know, and tool arguments as objects.

    Raises:
        RequestError: a message has no role, no content, or content other than text.
    """
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))


def _message(where: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    result = dict(message)
    role = result.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_CHARS:  # the template judges those of its model
        raise bad_value(f"{where}.role", role, "system, developer, user, assistant, tool, or the template's own")
    if role == "developer":  # OpenAI's newer name of the system role; templates know the older one
        result["role"] = "system"
    for name in _TEXT_FIELDS:
        check_kind(f"{where}.{name}", result.get(name), str, "a string")
    content = result.get("content")
    if isinstance(content, list):
        result["content"] = "\n".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise bad_value(f"{where}.content", content, "a string or a list of text parts")
    elif content is None and not (role == "assistant" and ("content" in result or result.get("tool_calls"))):
        raise bad_value(f"{where}.content", None, "a string or a list of text parts")
    if result.get("tool_calls") is not None:
        result["tool_calls"] = _tool_calls(f"{where}.tool_calls", result["tool_calls"])
    return result


def string_of(where: str, given: Mapping[str, Any], name: str) -> str:
    """A field that must be there as a string; else RequestError."""
    value = given.get(name)
    if not isinstance(value, str):
        raise bad_value(f"{where}.{name}", value, "a string")
    return value


def check_kind(where: str, value: object, kind: type | tuple[type, ...], allowed: str) -> None:
    """Raises RequestError unless the value is of that kind or null."""
    if value is not None and not isinstance(value, kind):
        raise bad_value(where, value, allowed)


def _part(where: str, part: object) -> str:
    if isinstance(part, dict):
        for kind in ("text", "refusal"):
            if part.get("type") == kind and isinstance(part.get(kind), str):
                return str(part[kind])
        if part.get("type") not in ("text", "refusal"):
            allowed = '"text" (media are not available yet)'
            raise bad_value(f"{where}.type", part.get("type"), allowed, "unsupported_content")
    raise bad_value(where, part, 'an object with type "text" and a text')


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    """The assistant's earlier tool calls; arguments become objects, which is what templates write out."""
    if not isinstance(calls, list):
        raise bad_value(where, calls, "a list of tool calls")
    result = []
    for index, call in enumerate(calls):
        if isinstance(call, dict) and isinstance(custom := call.get("custom"), dict):
            given = arguments_for(string_of(f"{where}[{index}].custom", custom, "input"))
            call = {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": custom.get("name"), "arguments": given},
            }
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value(f"{where}[{index}]", call, "an object with function.name and function.arguments")
        arguments = function.get("arguments")
        allowed = "a string or an object"
        check_kind(f"{where}[{index}].function.arguments", arguments, (str, dict), allowed)
        for name in ("id", "type"):
            check_kind(f"{where}[{index}].{name}", call.get(name), str, "a string")
        if arguments is None:  # some clients call functions without parameters so
            function = {**function, "arguments": {}}
        if isinstance(arguments, str):
            with suppress(RequestError):  # what is not a JSON object stays the text it is
                function = {**function, "arguments": parse_json(arguments.encode()) if arguments.strip() else {}}
        result.append({**call, "function": function})
    return result


def template_kwargs(
    given: Mapping[str, Any] | None, effort: str | None, **fields: str | int | Sequence[Mapping[str, Any]] | None
) -> Mapping[str, Any]:
    """Further variables for the template; `fields` are the request's own, which count for more.

    Raises:
        RequestError: one would replace what the server itself sets.
    """
    kwargs = dict(given or {})
    if taken := sorted(_RESERVED & kwargs.keys()):
        message = f"chat_template_kwargs sets {', '.join(taken)}, which the server sets itself; leave it out."
        raise RequestError(message, param="chat_template_kwargs", code="invalid_value")
    if effort is not None:
        kwargs = thinking_variables("disabled" if effort == "none" else None, effort) | kwargs
    return kwargs | {name: value for name, value in fields.items() if value is not None}


def thinking_variables(mode: str | None, effort: str | None = None, budget: int | None = None) -> dict[str, Any]:
    """What templates are told of thinking, under all the names they have for it.

    Args:
        mode: "enabled", "disabled", "adaptive", or None for what the template does by itself.
        effort: "low", "medium", "high" or None.
        budget: tokens the model is told it may think for.
    """
    variables: dict[str, Any] = {"reasoning_effort": effort, "thinking_effort": effort, "thinking_budget": budget}
    if mode is not None:
        on = mode != "disabled"
        variables |= {"enable_thinking": on, "thinking": on, "thinking_mode": mode}
    return {name: value for name, value in variables.items() if value is not None}


def prompted(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Whether the template opens the assistant's turn: if not told, unless the last message is to be continued."""
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt
