"""OpenAI bodies to the internal request. Pure: no engine, no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError
from penstock.config.generation import GenerationRequest
from penstock.config.logprobs import larger
from penstock.config.sampling import SamplingParams
from penstock.search.beam import BeamParams
from penstock.server.conversation import (
    checked_messages,
    function_fields,
    functions_or_tools,
    prompted,
    template_kwargs,
)
from penstock.server.custom_tools import custom_names, definition_fields
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody, Sampling
from penstock.server.ending import beams, best_of, repetition
from penstock.server.prompt_embeds import all_prompts, marked
from penstock.server.prompts import of_cache, text_request
from penstock.server.sampling import sampling_params
from penstock.server.shapes import check_stream_options
from penstock.server.structured import FIELDS, Asked, asked
from penstock.server.truncation import truncation

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A translated call: the requests to run, one a prompt, and how the client wants the answer.

    Attributes:
        id: the answer's id.
        chat: chat completion, else text completion.
        n: choices a prompt; choice index = number of the prompt · n + sequence.
        logprobs: alternatives to report with each token, -1 for all, None for none.
        prompt_logprobs: report those of the prompt (vLLM's field), alternatives with each.
        echo: the answer's text starts with the prompt.
        no_output: only the prompt is wanted (max_tokens 0).
        beams: searches by beams.
        best_of: generates so many sequences and tells the best n.
        legacy_functions: calls are told as OpenAI did before there were tools.
        include_reasoning: the reasoning is told.
        custom: names of tools whose input is a text.
        form: the field that says what form the answer has.
        timings_per_token: times are told with each chunk, not with the last alone.
        said: what a chat's answer begins with: the text of the message that it goes on from.
        tokens_as_ids: log-probabilities name tokens by their ids.
        return_prompt_text: the prompt's text is told.
        return_progress: how much of the prompt is computed is told with the first.
        reasoning_control: the reasoning may be ended while it runs.
        ping: seconds of silence after which a stream sends a comment, -1 for none.
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
    custom: frozenset[str] = frozenset()
    form: str = "grammar"
    timings_per_token: bool = False
    return_progress: bool = False
    ping: int | None = None
    said: str = ""
    tokens_as_ids: bool = False
    return_prompt_text: bool = False
    reasoning_control: bool = False


def sent_names(body: ChatBody | CompletionBody) -> Mapping[str, str]:
    """What the client sent for fields of the internal request that have another name; see `param_names`."""
    names = {"beam_width": "n" if body.best_of is None else "best_of"}
    if body.prompt_logprobs is None:
        names["prompt_logprobs"] = "echo"
    if isinstance(body, ChatBody):
        legacy = function_fields(body.functions, "functions[{}].parameters")
        names |= definition_fields(body.tools) if body.tools else legacy
        names["logprobs"] = "top_logprobs"
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
    tools, choice = functions_or_tools(body)
    if body.top_logprobs and not body.logprobs:
        raise ParameterError("top_logprobs", body.top_logprobs, "only together with logprobs: true")
    if body.add_generation_prompt and body.continue_final_message:
        raise ParameterError("continue_final_message", True, "only with add_generation_prompt: false")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    form = _asked(body)
    budget = body.thinking_token_budget
    if budget is None and body.reasoning_budget_tokens != -1:
        budget = body.reasoning_budget_tokens
    if body.reasoning_control and body.use_beam_search:
        raise ParameterError("reasoning_control", True, "without use_beam_search, whose answers are many requests")
    controlled = limits.MAX_TOKENS if body.reasoning_control else None  # a budget that is spent when that is asked
    request_id = uuid.uuid4().hex
    searched, text = body.use_beam_search, body.return_prompt_text
    messages, rows = marked(body.messages, request_id, use_beam_search=searched, return_prompt_text=text)
    request = GenerationRequest(
        request_id=request_id,
        sampling=_sampling(body, defaults, max_tokens=max_tokens, logprobs=logprobs),
        messages=checked_messages(messages),
        rows=rows,
        tools=tools,
        tool_choice=choice,
        parse=body.reasoning_format != "none",
        thinking_budget=controlled if budget is None else budget,
        add_generation_prompt=prompted(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=template_kwargs(
            body.chat_template_kwargs,
            body.reasoning_effort,
            chat_template=body.chat_template,
            documents=body.documents,
            thinking_budget=budget,
        ),
        add_special_tokens=body.add_special_tokens,
        priority=body.priority or 0,
        **of_cache(body),
        grammar=form.grammar if form else None,
        truncation=truncation(body, reserved=max_tokens or 1, keep_end=True),
        repetition=repetition(body),
    )
    told: dict[str, Any] = {
        "legacy_functions": bool(body.functions),
        "include_reasoning": body.include_reasoning is not False,
        "reasoning_control": bool(body.reasoning_control),
        "custom": custom_names(body.tools),
    }
    told |= {"said": _said(body), "return_prompt_text": bool(body.return_prompt_text)}
    rest = {"chat": True, "logprobs": request.sampling.told_with_each, "beams": beams(body, max_tokens), **told}
    return _call(body, "chatcmpl-", (request,), form, best_of=best_of(body), **rest)


def completion_call(body: CompletionBody, defaults: Mapping[str, Any]) -> OpenAICall:
    """Translates a text completion, one request a prompt."""
    echo = bool(body.echo)
    searched = body.use_beam_search
    prompts = all_prompts(body, echo=echo, suffix=body.suffix, use_beam_search=searched)
    if max(body.n or 1, body.best_of or 1) * len(prompts) > limits.MAX_PROMPTS_PER_CALL:
        raise ParameterError("n", body.n, f"n times the number of prompts at most {limits.MAX_PROMPTS_PER_CALL}")
    if echo and (body.suffix or body.token_healing):
        allowed = "only without suffix and token_healing, where the answer does not stand behind the prompt"
        raise ParameterError("echo", True, allowed)
    if body.max_tokens == 0 and not echo:
        raise ParameterError("max_tokens", 0, "an integer of at least 1, or 0 together with echo: true")
    max_tokens = _COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    extra: dict[str, Any] = {"max_tokens": max(max_tokens, 1), "logprobs": body.logprobs}
    if echo and body.logprobs is not None:
        extra["prompt_logprobs"] = larger(body.logprobs, body.prompt_logprobs or 0)
    sampling = _sampling(body, defaults, **extra)
    form = _asked(body)
    grammar = form.grammar if form else None
    cut = truncation(body, reserved=max(max_tokens, 1), keep_end=True)
    more: dict[str, Any] = {"grammar": grammar, "truncation": cut, "repetition": repetition(body)}
    requests = tuple(replace(text_request(None, body, prompt, sampling), **more) for prompt in prompts)
    told = {"chat": False, "echo": echo, "no_output": body.max_tokens == 0, "logprobs": sampling.told_with_each}
    rest: dict[str, Any] = {**told, "beams": beams(body, max(max_tokens, 1))}
    return _call(body, "cmpl-", requests, form, best_of=best_of(body), **rest)


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
        timings_per_token=bool(body.timings_per_token),
        return_progress=bool(body.return_progress),
        ping=body.sse_ping_interval,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        **rest,
    )


def _said(body: ChatBody) -> str:
    """What an answer begins with that echoes the message it goes on from."""
    last = body.messages[-1]
    content = last.get("content")
    if not body.echo or last.get("role") != "assistant":
        return ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())


def _sampling(body: Sampling, defaults: Mapping[str, Any], **extra: Any) -> SamplingParams:
    named = tuple(body.logprob_token_ids or ())
    asked_for = {"n": body.n or 1, "prompt_logprobs": body.prompt_logprobs, "logprob_token_ids": named, **extra}
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
