"""What is refused at once: requests that are empty, or can never be computed whatever is waited for."""

from __future__ import annotations

from penstock.config.errors import ContextLengthError, RequestError
from penstock.config.options import SchedulerOptions
from penstock.core.kv.cache import KVCache
from penstock.core.policies.need import can_hold
from penstock.core.request import EngineRequest


class Acceptance:
    """The bounds of one engine: its context, its KV cache, what a step may compute."""

    def __init__(self, options: SchedulerOptions, cache: KVCache) -> None:
        self._options = options
        self._cache = cache
        self._chunk = options.most_chunk

    def check(self, request: EngineRequest) -> None:
        """Raises RequestError if a request is empty or can never fit into the context or the KV cache."""
        prompt = len(request.prompt_ids)
        most = request.sampling.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token.", param="prompt")
        if most is None:
            raise RequestError("max_tokens is not resolved; the frontend sets it.", param="max_tokens")
        if prompt + (most if request.pooling is None else 0) > self._options.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {most} more are asked for: {prompt + most} in all, but the "
                f"context holds {self._options.max_model_len}. Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        if request.encoder is not None and self._cache.cross_group < 0:
            raise RequestError("the model has no encoder whose output a prompt could attend to.", param="messages")
        encoder = 0 if request.encoder is None else request.encoder.length
        lengths = [prompt + most - 1]
        if request.guided:
            lengths.append(self._negative(request) + most - 1)
        if not can_hold(self._cache, lengths, self._chunk) or not self._cache.cross.can_hold(encoder):
            told = f", beside the negative prompt's {lengths[1] - most + 1}" if request.guided else ""
            raise RequestError(
                f"the prompt has {prompt} tokens{told} and {most} more are asked for, but the KV cache holds "
                f"{self._cache.capacity} tokens in all. Lower max_tokens, or start with a larger --kv-cache-memory.",
                param="max_tokens",
                code="kv_cache_too_small",
            )
        self._check_media(request)

    def _negative(self, request: EngineRequest) -> int:
        """Tokens of a guided request's negative prompt; raises RequestError where it cannot be computed beside."""
        negative, most = len(request.sampling.negative_prompt_ids), request.sampling.max_tokens or 1
        options, field = self._options, "negative_prompt"
        if not negative:
            raise RequestError("negative_prompt_ids is empty; the frontend fills it in.", param=field)
        if negative + most > options.max_model_len:
            raise ContextLengthError(
                f"the negative prompt has {negative} tokens and {most} are asked for: {negative + most} in all, but "
                f"the context holds {options.max_model_len}. Shorten it or lower max_tokens.",
                param=field,
            )
        if options.whole_prompts or min(options.max_num_seqs, options.max_num_batched_tokens) < 2 or request.media:
            raise RequestError(
                "guidance_scale needs a second sequence in every step, beside a prompt that is computed in parts. Here "
                "prompts are computed whole, --max-num-seqs is 1, or the prompt has media; send 1.",
                param="guidance_scale",
            )
        return negative

    def _check_media(self, request: EngineRequest) -> None:
        end = 0
        for span in request.media:
            if span.length < 1 or not end <= span.start < span.end <= len(request.prompt_ids):
                raise RequestError(
                    f"a medium is said to lie at tokens {span.start} to {span.end} of a prompt of "
                    f"{len(request.prompt_ids)}, behind another that ends at {end}; media lie in order and apart.",
                    param="messages",
                )
            if span.length > self._chunk:
                raise RequestError(
                    f"a medium of the prompt takes {span.length} tokens, but a step computes at most {self._chunk} of "
                    "a prompt, and a medium is computed in one. Send it smaller, or raise --max-num-batched-tokens.",
                    param="messages",
                )
            end = span.end
