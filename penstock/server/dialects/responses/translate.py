"""Responses bodies to the internal request. Pure: no engine, no store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.constraint import ToolChoice
from penstock.config.errors import ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.conversation import checked_messages, chosen_tools, declared, function_fields, template_kwargs
from penstock.server.custom_tools import as_function, check_names, custom_names
from penstock.server.dialects.responses.items import Item, messages_of
from penstock.server.dialects.responses.schema import LOGPROBS, InputTokensBody, ResponsesBody
from penstock.server.errors import Unavailable, bad_value, refuse_unavailable
from penstock.server.prompts import of_cache
from penstock.server.sampling import sampling_params
from penstock.server.shapes import check_stream_options
from penstock.server.structured import asked

_UNAVAILABLE: Unavailable = {
    "prompt": ((), "Prompt templates are not kept here; send instructions and input."),
}


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A translated call.

    Attributes:
        id: of the response.
        body: what was sent.
        input: all items the model is shown, those of earlier responses included.
        request: what is run.
        earlier: how many items come from responses or the conversation before it.
    """

    id: str
    body: ResponsesBody
    input: tuple[Item, ...]
    request: GenerationRequest
    earlier: int = 0

    @property
    def stored(self) -> bool:
        """Whether the response is kept, which it is unless the client says otherwise."""
        return self.body.store is not False


def check_continuation(body: InputTokensBody) -> None:
    """Raises RequestError for a response that would go on from two places."""
    if body.conversation is not None and body.previous_response_id is not None:
        told = "only without previous_response_id; leave one of them out"
        raise ParameterError("conversation", body.conversation_id, told)


def check_combinations(body: ResponsesBody) -> None:
    """Raises RequestError for fields that are not served, alone or together."""
    if body.background and body.store is False:
        raise bad_value("store", False, "true, or left out, with background: true, which is fetched later")
    check_stream_options(body.stream, body.stream_options)


def prompt_request(
    body: InputTokensBody, items: Sequence[Item], request_id: str, sampling: SamplingParams
) -> GenerationRequest:
    """The internal request of a conversation.

    Raises:
        RequestError: a field that is not served, or tools or a tool choice that are not acceptable.
    """
    refuse_unavailable(body, _UNAVAILABLE)
    tools, choice = _tools(body)
    form = asked({"response_format": body.text.format if body.text else None})
    return GenerationRequest(
        request_id=request_id,
        sampling=sampling,
        messages=checked_messages(messages_of(items, body.instructions)),
        tools=tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs, body.reasoning.effort if body.reasoning else None),
        priority=body.priority or 0,
        **of_cache(body),
        grammar=form.grammar if form else None,
        tool_choice=choice,
        parse=True,
    )


def sampling_of(body: ResponsesBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters; `defaults` are the model's own."""
    logprobs = body.top_logprobs or (0 if LOGPROBS in (body.include or ()) else None)
    return sampling_params(body, defaults, max_tokens=body.max_output_tokens, logprobs=logprobs)


def sent_names(body: InputTokensBody) -> Mapping[str, str]:
    """What the client sent for fields of the internal request that have another name; see `param_names`."""
    forced = body.tool_choice not in (None, "auto", "none")
    return {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "grammar": "tools" if forced or not body.text else "text.format.schema",
        "response_format.type": "text.format.type",
        "response_format.json_schema": "text.format.schema",
        "response_format.schema": "text.format.schema",
        **function_fields(body.tools, "tools[{}].parameters"),
    }


def _tools(body: InputTokensBody) -> tuple[tuple[Mapping[str, Any], ...] | None, ToolChoice]:
    """The functions the model is shown, and which of them it must call."""
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") not in ("function", "custom"):
            allowed = '"function", "custom" (built-in and MCP tools are not available; run them in the client)'
            raise bad_value(f"tools[{index}].type", tool.get("type"), allowed, "unsupported_parameter")
        where = f"tools[{index}]"
        given = as_function(where, tool) if tool["type"] == "custom" else tool
        tools.append({"type": "function", "function": declared(where, given)})
    check_names("tools", tools, custom_names(body.tools))
    choice = body.tool_choice
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind not in ("function", "custom", "allowed_tools"):
        raise bad_value("tool_choice.type", kind, '"function", "custom", "allowed_tools"', "unsupported_parameter")
    return chosen_tools(choice, tuple(tools) or None, parallel=body.parallel_tool_calls)
