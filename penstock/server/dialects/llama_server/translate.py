"""llama-server bodies to internal requests. No engine: only texts are turned into tokens."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.config import limits
from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import ContextLengthError, ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.samplers import sampler_names
from penstock.config.sampling import SamplingParams
from penstock.server.biases import biases
from penstock.server.dialects.llama_server.schema import InfillBody, LlamaSampling
from penstock.server.errors import HttpError
from penstock.server.prompts import check_echoed
from penstock.server.sampler_fields import sampler_options
from penstock.server.sampling import least
from penstock.server.structured import schema_grammar
from penstock.text.infill import InfillText, InfillTokens, infill_ids

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

RANDOM_SEED: Final = 4294967295  # llama-server's own word for none
_CHAIN: Final = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling field: its name in SamplingParams, and the value llama-server takes where neither says anything."""

    ours: str
    default: Any


SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        "temperature": Sampler("temperature", 0.8),
        "top_k": Sampler("top_k", 40),
        "top_p": Sampler("top_p", 0.95),
        "min_p": Sampler("min_p", 0.05),
        "typical_p": Sampler("typical_p", 1.0),
        "repeat_penalty": Sampler("repetition_penalty", 1.0),
        "presence_penalty": Sampler("presence_penalty", 0.0),
        "frequency_penalty": Sampler("frequency_penalty", 0.0),
        "repeat_last_n": Sampler("repeat_last_n", 64),
        **{
            name: Sampler(name, SamplingParams.__dataclass_fields__[name].default)
            for name in (
                *("dynatemp_range", "dynatemp_exponent", "top_n_sigma", "xtc_probability", "xtc_threshold"),
                *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
                *("mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay"),
            )
        },
    }
)
"""By the names that llama-server has for them."""
SENT: Mapping[str, str] = MappingProxyType(
    {
        **{sampler.ours: name for name, sampler in SAMPLERS.items()},
        "max_tokens": "n_predict",
        "n": "n_cmpl",
        "logprobs": "n_probs",
        "num_speculative_tokens": "speculative.n_max",
        "bad_words": "logit_bias",
    }
)
"""What the client sent for fields of the internal request."""


@dataclass(frozen=True, slots=True)
class LlamaCall:
    """A translated call.

    Attributes:
        requests: one a prompt, each with as many tokens as are asked for and have room.
        body: how the client wants the answer.
        settings: what is told of the sampling, `generation_settings`.
        no_output: the prompt is computed, so that it is cached, and nothing is told (n_predict 0).
        context: tokens that prompt and answer have room for.
    """

    requests: tuple[GenerationRequest, ...]
    body: LlamaSampling
    settings: Mapping[str, Any]
    no_output: bool
    context: int

    @property
    def n(self) -> int:
        """Answers a prompt."""
        return self.requests[0].sampling.n


def wanted_tokens(body: LlamaSampling) -> int:
    """Most tokens of an answer, -1 for what the context has room for."""
    given = (body.n_predict, body.max_completion_tokens, body.max_tokens)
    return next((value for value in given if value is not None), -1)


def sampling_of(body: LlamaSampling, frontend: Frontend) -> SamplingParams:
    """The client's fields over the model's own over llama-server's.

    Raises:
        RequestError: a value that is not served.
    """
    defaults = frontend.text.defaults
    chosen = {sampler.ours: defaults.get(sampler.ours, sampler.default) for sampler in SAMPLERS.values()}
    for name, sampler in SAMPLERS.items():
        if (value := getattr(body, name)) is not None:
            chosen[sampler.ours] = value
    chosen |= {"samplers": sampler_names(_CHAIN), **sampler_options(body)}  # the temperature comes last there
    chosen["temperature"] = max(chosen["temperature"], 0.0)  # below 0 is greedy, as 0 is
    chosen["top_p"] = least(chosen["top_p"])
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(word for word in body.stop or () if word)
    bias, banned = biases(body.logit_bias, frontend)
    banned += chosen.pop("bad_words_ids", ())
    if body.ignore_eos:  # an end is never taken, rather than passed over
        banned += [(token,) for token in frontend.text.eos_ids]
    probs = body.n_probs if body.n_probs is not None else body.logprobs
    seeded = body.seed is not None and 0 <= body.seed != RANDOM_SEED
    if body.post_sampling_probs and probs and chosen["temperature"] > 0:
        allowed = "false, or true with temperature 0; the model's own probabilities are told without it"
        raise ParameterError("post_sampling_probs", True, allowed)
    return SamplingParams(
        **chosen,
        n=body.n_cmpl or body.n or 1,
        seed=body.seed if seeded else None,
        stop=stop or defaults.get("stop", ()),
        logit_bias=bias,
        bad_words_ids=tuple(dict.fromkeys(banned)),
        ignore_eos=bool(body.ignore_eos),
        logprobs=probs or None,
        num_speculative_tokens=body.drafts,
    )


def grammar_of(body: LlamaSampling) -> Grammar | None:
    """What the answer is held to: a grammar counts for more than a schema.

    Raises:
        RequestError: a schema that is none.
    """
    if body.grammar:
        return Grammar(GrammarKind.GBNF, body.grammar)
    if body.json_schema is None:
        return None
    return schema_grammar(body.json_schema, "json_schema", closed=True).grammar


def infill_prompt(body: InfillBody, frontend: Frontend) -> GenerationRequest:
    """What is to be filled in, cut so that an answer of n_predict tokens, or of a quarter of the context, has room.

    Raises:
        RequestError: the model cannot fill in, or the texts are far too long.
    """
    tokens = InfillTokens.of(frontend.text.tokenizer)
    if tokens.missing:
        told = ", ".join(f"{name} token" for name in tokens.missing)
        raise unsupported(f"Infill is not supported by this model: {told} missing. Send a prompt to /completion.")
    files = [(extra.filename or "tmp", extra.text) for extra in body.input_extra or ()]
    chars = len(body.input_prefix) + len(body.input_suffix) + len(body.prompt or "")
    frontend.check_length("input_extra", chars + sum(len(name) + len(text) for name, text in files))
    context, wanted = frontend.info.max_model_len, wanted_tokens(body)
    room = context - (max(1, min(wanted, context // 2)) if wanted >= 0 else context // 4)
    text = InfillText(body.input_prefix, body.input_suffix, body.prompt or "", files)
    ids = infill_ids(frontend.text.tokenizer, tokens, text, room)
    ends = SamplingParams(stop_token_ids=tokens.ends)
    return GenerationRequest(uuid.uuid4().hex, ends, prompt_ids=tuple(ids))


def call_of(
    body: LlamaSampling, prompts: Sequence[tuple[GenerationRequest, tuple[int, ...]]], frontend: Frontend
) -> LlamaCall:
    """The call, from its prompts in tokens.

    Raises:
        RequestError: a value that is not served, or a prompt that the context has no room for.
    """
    sampling, grammar = sampling_of(body, frontend), grammar_of(body)
    if sampling.n * len(prompts) > limits.MAX_PROMPTS_PER_CALL:
        allowed = f"n_cmpl times the number of prompts at most {limits.MAX_PROMPTS_PER_CALL}"
        raise ParameterError("n_cmpl", sampling.n, allowed)
    check_echoed(body.grammar, body.json_schema, sampling.n * len(prompts))
    context, wanted = frontend.info.max_model_len, wanted_tokens(body)
    requests = []
    for request, ids in prompts:
        if (room := context - len(ids)) <= 0:
            message = f"The prompt has {len(ids)} tokens; this model's context is {context} tokens. Shorten it."
            raise ContextLengthError(message, param="prompt")
        most = room if wanted < 0 else min(max(wanted, 1), room)
        ends = request.sampling.stop_token_ids
        requests.append(
            replace(
                request,
                sampling=replace(sampling, max_tokens=most, stop_token_ids=ends),
                prompt=None,
                prompt_ids=ids,
                grammar=grammar,
                cache_salt=uuid.uuid4().hex if body.cache_prompt is False else "",
            )
        )
    return LlamaCall(tuple(requests), body, settings_of(body, sampling), wanted == 0, context)


def settings_of(body: LlamaSampling, sampling: SamplingParams) -> dict[str, Any]:
    """What llama-server tells of the sampling that is used, as `generation_settings`."""
    wanted = wanted_tokens(body)
    biased = [{"bias": bias, "token": token} for token, bias in sampling.logit_bias]
    biased += [{"bias": -limits.MAX_BIAS, "token": token} for (token,) in sampling.bad_words_ids]
    schema = body.json_schema is not None and not body.grammar
    return {
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed,
        **{name: getattr(sampling, sampler.ours) for name, sampler in SAMPLERS.items()},
        "stop": list(sampling.stop),
        "max_tokens": wanted,
        "n_predict": wanted,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": sampling.ignore_eos,
        "stream": bool(body.stream),
        "logit_bias": biased,
        "n_probs": sampling.logprobs or 0,
        "min_keep": 0,
        "grammar": body.grammar or "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        **({"json_schema": body.json_schema} if schema else {}),
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "samplers": ["typ_p" if name == "typical_p" else name for name in sampling.samplers or ()],
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": bool(body.post_sampling_probs),
        "lora": [],
    }


def unsupported(message: str) -> HttpError:
    """A refusal of what a server or model of this kind does not do."""
    return HttpError(501, message, code="not_supported")
