"""OpenAI bodies to the internal request. Pure: no engine, no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError
from penstock.core.constraint import ToolChoice
from penstock.core.request import GenerationRequest
from penstock.core.sampling import SamplingParams
from penstock.search.beam import BeamParams
from penstock.server.conversation import (
    checked_messages,
    checked_tools,
    chosen_tools,
    function_fields,
    prompted,
    template_kwargs,
)
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody, Sampling
from penstock.server.errors import Unavailable, refuse_unavailable
from penstock.server.prompts import prompts_of, text_request
from penstock.server.sampling import sampling_params
from penstock.server.shapes import check_stream_options
from penstock.server.structured import FIELDS, Asked, asked

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions
_UNAVAILABLE: Unavailable = {
    "suffix": (("",), "Filling in the middle is not available; leave it out."),
    "modalities": ((["text"], []), 'Only text is available; leave it out or send ["text"].'),
    "audio": ((), "Audio is not available; leave it out."),
    "web_search_options": ((), "Web search is not available; leave it out."),
    "store": ((False,), "Only responses are kept; leave it out, or send the request to /v1/responses."),
}


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A translated call: the requests to run, one a prompt, and how the client wants the answer.

    Attributes:
        id: the answer's id.
        chat: chat completion, else text completion.
        n: choices a prompt; choice index = number of the prompt · n + sequence.
        logprobs: alternatives to report with each token, None for none.
        prompt_logprobs: report those of the prompt (vLLM's field), alternatives with each.
        echo: the answer's text starts with the prompt.
        no_output: only the prompt is wanted (max_tokens 0).
        beams: searches by beams.
        best_of: generates so many sequences and tells the best n.
        legacy_functions: calls are told as OpenAI did before there were tools.
        include_reasoning: the reasoning is told.
        form: the field that says what form the answer has.
    """

    id: str
    chat: bool
    requests: tuple[GenerationRequest, ...]
    n: int
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    no_output: bool = False
    return_token_ids: bool = False
    beams: BeamParams | None = None
    best_of: int | None = None
    legacy_functions: bool = False
    include_reasoning: bool = True
    form: str = "grammar"


def sent_names(body: ChatBody | CompletionBody) -> Mapping[str, str]:
    """What the client sent for fields of the internal request that have another name; see `param_names`."""
    names = {"beam_width": "n" if body.best_of is None else "best_of"}
    if body.prompt_logprobs is None:
        names["prompt_logprobs"] = "echo"
    if isinstance(body, ChatBody):
        names |= {} if body.tools else function_fields(body.functions, "functions[{}].parameters")
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    elif body.max_tokens is None:
        names["max_tokens"] = "messages" if isinstance(body, ChatBody) else "prompt"
    return names


def chat_call(body: ChatBody, defaults: Mapping[str, Any]) -> OpenAICall:
    """Translates a chat completion; `defaults` are the model's own sampling parameters.

    Raises:
        RequestError: a value or a combination that is not served.
    """
    refuse_unavailable(body, _UNAVAILABLE)
    tools, choice = _tools(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ParameterError("top_logprobs", body.top_logprobs, "only together with logprobs: true")
    if body.add_generation_prompt and body.continue_final_message:
        raise ParameterError("continue_final_message", True, "only with add_generation_prompt: false")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    form = _asked(body)
    request = GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=_sampling(body, defaults, max_tokens=max_tokens, logprobs=logprobs),
        messages=checked_messages(body.messages),
        tools=tools,
        tool_choice=choice,
        parse=True,
        thinking_budget=body.thinking_token_budget,
        add_generation_prompt=prompted(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=template_kwargs(
            body.chat_template_kwargs,
            body.reasoning_effort,
            chat_template=body.chat_template,
            documents=body.documents,
            thinking_budget=body.thinking_token_budget,
        ),
        add_special_tokens=body.add_special_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        grammar=form.grammar if form else None,
    )
    told = {"legacy_functions": bool(body.functions), "include_reasoning": body.include_reasoning is not False}
    rest = {"chat": True, "logprobs": logprobs, "beams": _beams(body, max_tokens), **told}
    return _call(body, "chatcmpl-", (request,), form, best_of=_best_of(body), **rest)


def completion_call(body: CompletionBody, defaults: Mapping[str, Any]) -> OpenAICall:
    """Translates a text completion, one request a prompt."""
    refuse_unavailable(body, _UNAVAILABLE)
    prompts = prompts_of(body.prompt, "prompt")
    echo = bool(body.echo)
    if max(body.n or 1, body.best_of or 1) * len(prompts) > limits.MAX_PROMPTS_PER_CALL:
        raise ParameterError("n", body.n, f"n times the number of prompts at most {limits.MAX_PROMPTS_PER_CALL}")
    if body.max_tokens == 0 and not echo:
        raise ParameterError("max_tokens", 0, "an integer of at least 1, or 0 together with echo: true")
    max_tokens = _COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    extra: dict[str, Any] = {"max_tokens": max(max_tokens, 1), "logprobs": body.logprobs}
    if echo and body.logprobs is not None:
        extra["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    sampling = _sampling(body, defaults, **extra)
    form = _asked(body)
    grammar = form.grammar if form else None
    requests = tuple(replace(text_request(None, body, prompt, sampling), grammar=grammar) for prompt in prompts)
    rest = {"echo": echo, "no_output": body.max_tokens == 0, "beams": _beams(body, max(max_tokens, 1))}
    return _call(body, "cmpl-", requests, form, chat=False, logprobs=body.logprobs, best_of=_best_of(body), **rest)


def _call(
    body: Sampling, prefix: str, requests: tuple[GenerationRequest, ...], form: Asked | None, **rest: Any
) -> OpenAICall:
    options = body.stream_options
    check_stream_options(body.stream, options)
    return OpenAICall(
        id=prefix + (body.request_id or requests[0].request_id),
        requests=requests,
        n=requests[0].sampling.n,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        form=form.field if form else "grammar",
        **rest,
    )


def _sampling(body: Sampling, defaults: Mapping[str, Any], **extra: Any) -> SamplingParams:
    asked_for = {"n": body.n or 1, "prompt_logprobs": body.prompt_logprobs, **extra}
    return sampling_params(body, {} if body.use_beam_search else defaults, **asked_for)


def _asked(body: Sampling) -> Asked | None:
    form = body.response_format
    fields = {name: getattr(body, name) for name in FIELDS}
    sent = None if form is None else {"type": form.type, **(form.model_extra or {})}
    wish = asked(fields | {"response_format": sent})
    if wish is not None and body.use_beam_search:
        raise RequestError(
            f"use_beam_search cannot follow {wish.field}; leave one of them out.",
            param="use_beam_search",
            code="unsupported_parameter",
        )
    return wish


def _beams(body: Sampling, max_tokens: int | None) -> BeamParams | None:
    """Beam search with `best_of` beams, None where it is not asked for."""
    n = body.n or 1
    width = n if body.best_of is None else body.best_of
    if width < n:
        raise ParameterError("best_of", body.best_of, f"at least n ({n})")
    if not body.use_beam_search:
        return None
    return BeamParams(
        width=width,
        n=n,
        max_tokens=max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )


def _best_of(body: Sampling) -> int | None:
    """How many sequences the best are chosen of, None where that is not asked for."""
    if body.use_beam_search:
        return None
    for name, harmless in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) not in (None, harmless):
            raise ParameterError(name, getattr(body, name), "only together with use_beam_search: true")
    n = body.n or 1
    sequences = body.best_of or n
    if sequences > n and body.stream:
        allowed = f"n ({n}) with stream: true, as answers are ranked when all are there"
        raise ParameterError("best_of", sequences, allowed)
    return sequences if sequences > n else None


def _tools(body: ChatBody) -> tuple[tuple[Mapping[str, Any], ...] | None, ToolChoice]:
    """Functions and the choice among them, from today's fields or those they had before there were tools."""
    given = body.tools
    choice = body.tool_choice
    where = "tools"
    if body.functions and not body.tools:
        given, where = [{"type": "function", "function": function} for function in body.functions], "functions"
    if body.function_call is not None and choice is None:
        choice = body.function_call
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
    return chosen_tools(choice, checked_tools(given, where), parallel=body.parallel_tool_calls)
