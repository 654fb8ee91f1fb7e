"""Ollama bodies to the internal request. Pure: no engine, no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.config.errors import ParameterError, RequestError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.conversation import checked_messages, checked_tools, thinking_variables
from penstock.server.dialects.ollama.schema import AnswerBody, GenerateBody, OllamaChatBody, Options
from penstock.server.errors import bad_value
from penstock.server.sampler_fields import tail_free
from penstock.server.sampling import least
from penstock.server.structured import object_grammar, schema_grammar

_DEFAULTS: Mapping[str, Any] = MappingProxyType({"temperature": 0.8, "top_k": 40, "top_p": 0.9})  # Ollama's
_OURS: Mapping[str, str] = MappingProxyType(
    {"repeat_penalty": "repetition_penalty", "tfs_z": "tfs", "draft_num_predict": "num_speculative_tokens"}
)
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
)
SENT: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"options.{name}" for name in (*_SAME, "stop")},
        "repetition_penalty": "options.repeat_penalty",
        "tfs": "options.tfs_z",
        "num_speculative_tokens": "options.draft_num_predict",
        "max_tokens": "options.num_predict",
        "logprobs": "top_logprobs",
        "chat_template": "template",
        "grammar": "format",
    }
)
"""What the client sent for fields of the internal request."""


@dataclass(frozen=True, slots=True)
class OllamaCall:
    """A translated call.

    Attributes:
        request: what to run; None when the model is only to be loaded.
        model: as the client wrote it.
        chat: whether it chats, or generates.
        stream: whether the answer comes in lines.
        thinking: whether reasoning is told.
        context: tokens that go before the prompt's.
        keeps_context: whether the answer ends with the tokens so far.
        logprobs: alternatives to report with each token, None for none.
    """

    request: GenerationRequest | None
    model: str
    chat: bool
    stream: bool
    thinking: bool
    context: tuple[int, ...] = ()
    keeps_context: bool = False
    logprobs: int | None = None


def chat_call(body: OllamaChatBody, defaults: Mapping[str, Any]) -> OllamaCall:
    """Translates a chat; `defaults` are the model's own sampling parameters.

    Raises:
        RequestError: a value that is not served.
    """
    tools = checked_tools([{"type": "function", **tool} for tool in body.tools or ()])
    if not body.messages:
        return _call(body, None, chat=True)
    messages = checked_messages([_message(index, message) for index, message in enumerate(body.messages)])
    continued = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return _call(
        body,
        _request(
            body,
            defaults,
            messages=messages,
            tools=tools,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            add_special_tokens=False,
            parse=True,
        ),
        chat=True,
    )


def generate_call(body: GenerateBody, defaults: Mapping[str, Any], templated: bool) -> OllamaCall:
    """Translates a prompt; `templated` says whether the model has a chat template.

    Raises:
        RequestError: a value or a combination that is not served.
    """
    if body.images:
        raise bad_value("images", body.images, "none (this model takes text)", "unsupported_content")
    if not body.prompt:
        return _call(body, None, chat=False)
    if body.raw and (body.system or body.template or body.context):
        raise ParameterError("raw", True, "only without system, template and context")
    if body.suffix and (body.system or body.template or body.context):
        raise ParameterError("suffix", body.suffix, "only without system, template and context")
    if body.raw or body.suffix or not templated:
        if body.system or body.template:
            name = "system" if body.system else "template"
            raise RequestError(f"{name} cannot be used: this model has no chat template; leave it out.", param=name)
        return _call(body, _request(body, defaults, prompt=body.prompt), chat=False)
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    variables = {"chat_template": body.template} if body.template else {}
    request = _request(body, defaults, variables, messages=tuple(messages), add_special_tokens=False, parse=True)
    return _call(body, request, chat=False)


def _call(body: AnswerBody, request: GenerationRequest | None, *, chat: bool) -> OllamaCall:
    context = tuple(body.context or ()) if isinstance(body, GenerateBody) else ()
    return OllamaCall(
        request,
        body.model,
        chat,
        stream=body.stream is not False,
        thinking=body.think is not False,
        context=context,
        keeps_context=isinstance(body, GenerateBody) and not (body.raw or body.suffix),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _request(
    body: AnswerBody, defaults: Mapping[str, Any], variables: Mapping[str, Any] | None = None, **prompt: Any
) -> GenerationRequest:
    form = body.format
    asked = object_grammar("format") if form else None
    if isinstance(form, dict):
        asked = schema_grammar(form, "format", closed=True)
    mode = None if body.think is None else "enabled" if body.think else "disabled"
    effort = body.think if isinstance(body.think, str) else None
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=_sampling(body, defaults),
        template_kwargs={**thinking_variables(mode, effort), **(variables or {})},
        grammar=asked.grammar if asked else None,
        **prompt,
    )


def _sampling(body: AnswerBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """The client's options over the model's own over Ollama's, whose penalty of repetitions alone is left out."""
    options = body.options or Options()
    given = {_OURS.get(name, name): getattr(options, name) for name in (*_SAME, *_OURS)}
    chosen = {**_DEFAULTS, **defaults, **{name: value for name, value in given.items() if value is not None}}
    if options.tfs_z is not None:
        chosen["tfs"] = tail_free(options.tfs_z)
    if options.seed is not None and options.seed < 0:  # as in Ollama: any
        del chosen["seed"]
    if options.stop is not None:  # else the model's own
        chosen["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    predicted = options.num_predict or 0
    chosen["max_tokens"] = predicted if predicted > 0 else None
    chosen["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return SamplingParams(**chosen | {"top_p": least(chosen["top_p"])})


def _message(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in OpenAI's form."""
    result = dict(message)
    if result.pop("images", None):
        where = f"messages[{index}].images"
        raise bad_value(where, message["images"], "none (this model takes text)", "unsupported_content")
    for theirs, ours in (("thinking", "reasoning_content"), ("tool_name", "name")):
        if (value := result.pop(theirs, None)) is not None:
            if not isinstance(value, str):
                raise bad_value(f"messages[{index}].{theirs}", value, "a string")
            result[ours] = value
    if result.get("content") is None:
        result["content"] = ""
    return result
