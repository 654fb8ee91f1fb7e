"""Joins text and an engine: prompts become tokens on the way in, tokens become text on the way out."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from penstock.config import limits
from penstock.config.adapters import AdapterUse, activated
from penstock.config.cache_asks import Ask
from penstock.config.constraint import Grammar, GrammarKind, Thinking, ToolMode
from penstock.config.errors import (
    ContextLengthError,
    EngineDeadError,
    ParameterError,
    RequestError,
    TemplateError,
    param_names,
)
from penstock.config.generation import GenerationRequest
from penstock.config.given_rows import NO_TOKEN, places
from penstock.config.lengths import Truncation
from penstock.config.logits_processors import check_known
from penstock.config.logprobs import WHOLE_VOCABULARY, within
from penstock.config.media import MediaSpan
from penstock.config.sampling import SamplingParams, stream_key
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.api import EngineClient, EngineInfo
from penstock.engine.generation import TextGeneration
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.cut import cut_tokens
from penstock.text.given_rows import check_rows, split_at_rows
from penstock.text.grammar.translate import translate
from penstock.text.healing import heal
from penstock.text.length import characters
from penstock.text.loops import Loop
from penstock.text.parsers.reading import AnswerReader, Reading, answer_readers
from penstock.text.sampled_texts import SampledTexts
from penstock.text.stop_patterns import stop_patterns

_RENDER_ARGUMENTS = frozenset(("self", "messages", "tools", "add_generation_prompt", "continue_final_message"))
_INLINE_CHARS = 1024  # shorter texts are tokenised at once: a worker thread would cost more
_INLINE_GRAMMAR_CHARS = 512  # what a longer schema means may take longer to find out than a loop can wait
_INLINE_IDS = 4096  # shorter lists are checked at once

_Made = TypeVar("_Made")


async def _beside(work: Callable[..., _Made], *args: Any, inline: bool) -> _Made:
    """What `work` makes of these; beside the event loop unless it is little."""
    return work(*args) if inline else await asyncio.to_thread(work, *args)


class Frontend:
    """Serves GenerationRequests from an EngineClient. Torch-free; belongs to the client's event loop.

    Attributes:
        client: the engine.
        text: the model's text side.
        served_name: the name clients use.
        adapters: what its answers are made with.
    """

    def __init__(self, client: EngineClient, text: TextPipeline, *, served_name: str, seed: int = 0) -> None:
        """`seed` and the request's id give the random stream of a request that brings no seed."""
        self.client = client
        self.text = text
        self.served_name = served_name
        self.adapters: tuple[AdapterUse, ...] = ()
        self._seed = seed
        self._texts = SampledTexts(text.tokenizer, text.eos_ids)

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    def adapted(self, served_name: str, adapters: tuple[AdapterUse, ...]) -> Frontend:
        """The same with adapters, under another name."""
        other = copy.copy(self)
        other.served_name, other.adapters = served_name, adapters
        return other

    async def generate(self, request: GenerationRequest) -> TextGeneration:
        """Starts an answer; returns once the engine has admitted the request.

        With tools, and where reasoning and calls are not told apart, special tokens stay in the text whatever
        skip_special_tokens says: they mark the calls.

        Raises:
            RequestError: the request is refused (ContextLengthError, ParameterError, OverloadedError and others).
            EngineDeadError: no engine is there, or it died before it admitted the request.
        """
        self.text.pooling.check_generates()
        ids = await self.tokenize(request)
        asked = request.sampling
        media = tuple(MediaSpan(*place) for place in await _beside(places, ids, request.rows, inline=not request.rows))
        ids = tuple(max(token, 0) for token in ids) if media else ids
        begins, prompt_ids = heal(self.text.tokenizer, asked, ids, _continues(request))
        size = len(prompt_ids) + len(asked.allowed_token_ids or ()) + len(asked.negative_prompt_ids)
        little = self._texts.is_little(asked, _INLINE_CHARS)
        sampling = await _beside(self._resolve, request, prompt_ids, begins, inline=size <= _INLINE_IDS and little)
        adapters = await _beside(activated, self.adapters, prompt_ids, inline=size <= _INLINE_IDS)
        reading = self.reading(request, prompt_ids)
        grammar = await self._held(request, reading)
        eos_ids = () if sampling.ignore_eos and grammar is None else self.text.eos_ids  # a grammar's end is the end
        outputs = self.client.submit(
            EngineRequest(
                request.live_id,
                prompt_ids,
                sampling,
                stop_ids=tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids))),
                seed=(
                    stream_key("request", self._seed, request.request_id)
                    if sampling.seed is None
                    else stream_key("seed", sampling.seed)
                ),
                priority=request.priority,
                cache_salt=request.cache_salt,
                owner=request.owner,
                retention=request.retention,
                session=request.session,
                grammar=grammar,
                thinking=self._thinking(request, reading, grammar is not None),
                speculate=0 if media else self._drafts(sampling),
                adapters=adapters,
                media=media,
                pin=request.pin,
            )
        )
        try:
            with param_names(_tools_field(request)):
                first = await anext(outputs)
        except BaseException:
            await outputs.aclose()
            raise
        if first.finish_reason is FinishReason.ERROR and not first.tokens:
            await outputs.aclose()
            raise EngineDeadError(first.error or "The engine stopped before it took the request.")
        readers = self.readers(request, sampling, reading)
        loops = None if request.repetition is None else {index: Loop(request.repetition) for index in readers}
        return TextGeneration(prompt_ids, sampling, eos_ids, first, outputs, readers, loops)

    async def ask(self, request: GenerationRequest, ask: Ask) -> dict[str, Any]:
        """What the engine answers to a question about its cache, as the owner of a request with this prompt.

        Raises:
            RequestError, EngineDeadError: as `generate`.
        """
        ids = await self.tokenize(request)
        if len(ids) >= self.info.max_model_len:
            told = f"The prompt has {len(ids)} tokens; this model's context is {self.info.max_model_len} tokens."
            raise ContextLengthError(f"{told} Shorten it.", param=_prompt_field(request))
        adapters = await _beside(activated, self.adapters, ids, inline=len(ids) <= _INLINE_IDS)
        asked = replace(request.sampling, max_tokens=1)
        outputs = self.client.submit(
            EngineRequest(
                request.live_id,
                ids,
                asked,
                cache_salt=request.cache_salt,
                owner=request.owner,
                adapters=adapters,
                ask=ask,
            )
        )
        try:
            answer = (output := await anext(outputs)).answer
        finally:
            await outputs.aclose()
        if answer is None:
            raise EngineDeadError(output.error or "The engine stopped before it answered.")
        return answer

    def reading(self, request: GenerationRequest, prompt_ids: tuple[int, ...]) -> Reading | None:
        """How answers are to be read, None where they are plain text."""
        if not request.parse or not request.messages:
            return None
        continued = request.continue_final_message
        return Reading.of(
            self.text.answers,
            self.text.tokenizer,
            prompt_ids,
            request.messages,
            request.tools,
            request.tool_choice,
            continued,
            request.request_id,
        )

    def readers(
        self, request: GenerationRequest, sampling: SamplingParams, reading: Reading | None
    ) -> dict[int, AnswerReader]:
        """What turns the tokens of each sequence into text, told apart as `reading` says."""
        return answer_readers(self.text.tokenizer, sampling, _continues(request), reading, self.text.mark_ids)

    def render(self, request: GenerationRequest) -> str:
        """The prompt text of a chat.

        Raises:
            RequestError: no messages, no template, or the template refuses them.
        """
        if not request.messages:
            raise RequestError("messages is empty; send at least one message.", param="messages", code="invalid_value")
        if len(request.messages) > limits.MAX_MESSAGES:
            raise ParameterError("messages", f"{len(request.messages)} messages", f"at most {limits.MAX_MESSAGES}")
        if self.text.template is None:
            raise RequestError(
                "messages cannot be used: this model has no chat template; send a prompt to the completions endpoint.",
                param="messages",
                code="no_chat_template",
            )
        clash = sorted(_RENDER_ARGUMENTS & request.template_kwargs.keys())
        if clash:
            raise RequestError(
                f"chat_template_kwargs sets {clash[0]}, which the request's own fields set; leave it out.",
                param="chat_template_kwargs",
            )
        if len(request.messages) > self.info.max_model_len:
            told = f"messages has {len(request.messages)} entries; this model's context is"
            raise ContextLengthError(f"{told} {self.info.max_model_len} tokens. Send fewer.", param="messages")
        variables = [value for name, value in request.template_kwargs.items() if name != "chat_template"]
        for field, given in (("messages", (request.messages, variables)), ("tools", _tools(request))):
            self.check_length(field, characters(given))
        try:
            return self.text.template.render(
                request.messages,
                tools=_tools(request),
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **request.template_kwargs,
            )
        except TemplateError as error:
            raise RequestError(str(error), param="messages", code="template_error") from error

    async def tokenize(self, request: GenerationRequest) -> tuple[int, ...]:
        """The prompt in tokens, by the same path as `generate`; NO_TOKEN where a row stands.

        Raises:
            RequestError: not exactly one of prompt, prompt_ids and messages is given; it is empty, too long to be
                tokenised, or holds ids outside the vocabulary; or rows that cannot stand in it.
        """
        given = [name for name in ("prompt", "prompt_ids", "messages") if getattr(request, name) is not None]
        if request.rows:
            info, cut = self.info, request.truncation is not None
            check_rows(request.rows, info.row_width, info.max_model_len, asked=request.sampling, cut=cut)
        if len(given) != (0 if request.rows and request.messages is None else 1):
            raise RequestError(
                f"give exactly one of prompt, prompt_ids and messages; {' and '.join(given) or 'none'} given.",
                param=given[-1] if given else "prompt",
            )
        if request.prompt_ids is not None:
            ids = request.prompt_ids
            await _beside(self._check_ids, "prompt", ids, inline=len(ids) <= _INLINE_IDS)
        elif request.prompt is not None:
            ids = await self._encode(request.prompt, "prompt", request.add_special_tokens is not False)
        elif request.messages is None:
            ids = tuple(NO_TOKEN for given in request.rows for _ in range(len(given)))
        else:
            text = await asyncio.to_thread(self.render, request)
            first, *rest = split_at_rows(text, request.request_id, len(request.rows))
            ids = await self._encode(first, "messages", bool(request.add_special_tokens))
            for rows, piece in zip(request.rows, rest, strict=True):
                ids += (NO_TOKEN,) * len(rows) + await self._encode(piece, "messages", False)
            ids = self.text.tokenizer.begin_chat(ids)
        if not ids:
            field = _prompt_field(request)
            raise RequestError(f"{field} is empty; at least one token is needed.", param=field, code="invalid_value")
        return ids if request.truncation is None else self._cut(request, ids, request.truncation)

    def _cut(self, request: GenerationRequest, ids: tuple[int, ...], how: Truncation) -> tuple[int, ...]:
        """A prompt's tokens, cut as asked; those that the tokenizer puts around a text stay.

        Raises:
            ParameterError: more tokens are to be kept than the context has.
        """
        context = self.info.max_model_len
        if how.tokens is not None and how.tokens > context:
            allowed = f"-1 or at most {context}, this model's context"
            raise ParameterError("truncate_prompt_tokens", how.tokens, allowed)
        most = max(1, context - how.reserved) if how.tokens is None else how.tokens
        return cut_tokens(ids, most, how.keep_end, self.around(request))

    def around(self, request: GenerationRequest) -> tuple[int, ...]:
        """What the tokenizer puts around the text of a request, if it has one."""
        plain = request.prompt is None or request.add_special_tokens is False
        return () if plain else tuple(self.text.tokenizer.encode(""))

    def _drafts(self, sampling: SamplingParams) -> int:
        asked, most = sampling.num_speculative_tokens, self.info.drafts
        if sampling.guidance_scale != 1:  # its draws are shared with another sequence
            return 0
        return most if asked is None else min(asked, most)

    async def _held(self, request: GenerationRequest, reading: Reading | None) -> Grammar | None:
        """What the answer is held to, as the engine takes it: by its own grammar, or by functions it may or must call.

        Raises:
            RequestError: it is too large, or not what its kind says.
        """
        tokenizer = self.text.tokenizer
        kind, source = (request.grammar.kind.value, request.grammar.source) if request.grammar else ("", "")

        def make() -> Grammar | None:
            special = {piece: token for token in tokenizer.special_ids if (piece := tokenizer.piece(token))}
            with param_names(_tools_field(request)):
                made = None if reading is None else reading.grammar(special, kind, source)
                if made is not None:
                    return Grammar(GrammarKind.LARK, translate(GrammarKind.LARK.value, made, special))
                return Grammar(GrammarKind.LARK, translate(kind, source, special)) if kind else None

        inline = len(source) <= _INLINE_GRAMMAR_CHARS and not (reading is not None and reading.functions)
        return await _beside(make, inline=inline)

    def _thinking(self, request: GenerationRequest, reading: Reading | None, held: bool) -> Thinking | None:
        """How reasoning ends, where that matters: before a grammar's text, or within a budget."""
        if reading is None or not (held or request.thinking_budget is not None):
            return None
        marks = reading.thinking_ids(self.text.tokenizer)
        return None if marks is None else Thinking(*marks, request.thinking_budget)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            ParameterError: an id outside the vocabulary.
        """
        self._check_ids("tokens", ids)
        return self.text.tokenizer.decode(list(ids), skip_special_tokens=False)

    def piece(self, token_id: int) -> str:
        """The text of a single token, for log-probabilities; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a single token."""
        return self.text.tokenizer.token_bytes(token_id)

    async def _encode(self, text: str, field: str, add_special_tokens: bool) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            text.encode()
            self.check_length(field, len(text))
            return tuple(self.text.tokenizer.encode(text, add_special_tokens=add_special_tokens))

        try:
            return await _beside(encode, inline=len(text) <= _INLINE_CHARS and self.text.tokenizer.prepared)
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{field} holds a lone surrogate at character {error.start}, which no UTF-8 text can; remove it.",
                param=field,
                code="invalid_value",
            ) from error

    def check_length(self, field: str, length: int) -> None:
        """Refuses a text of which the context cannot hold all, were each token the longest of the vocabulary."""
        if length <= limits.TOKENISED_CHARS:
            return
        context = max(self.info.max_model_len, self.text.pooling.chunked_tokens)
        longest = self.text.tokenizer.longest_piece
        if length > min(max(context * longest, limits.TOKENISED_CHARS), limits.MAX_PROMPT_CHARS):
            raise ContextLengthError(
                f"{field} has {length} characters; this model's context is {context} tokens, none of which is longer "
                f"than {longest} characters. Shorten it.",
                param=field,
            )

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        size = self.text.vocab_size
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size):
            return
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise ParameterError(field, token, f"token ids from 0 to {size - 1}")

    def _resolve(self, request: GenerationRequest, prompt_ids: tuple[int, ...], begins: bytes) -> SamplingParams:
        """Checks the parameters against this model and fills in max_tokens, bad_words_ids and begins_with."""
        sampling, field = request.sampling, _prompt_field(request)
        context, prompt = self.info.max_model_len, len(prompt_ids)
        if prompt >= context:
            raise ContextLengthError(
                f"The prompt has {prompt} tokens; this model's context is {context} tokens, prompt and output "
                "together. Shorten the prompt.",
                param=field,
            )
        self._check_ids("negative_prompt_ids", sampling.negative_prompt_ids)
        sampling = self._texts.negative(sampling, prompt_ids, self.check_length)
        negative = len(sampling.negative_prompt_ids)
        if negative >= context:
            told = f"The negative prompt has {negative} tokens; this model's context is {context}. Shorten it."
            raise ContextLengthError(told, param="negative_prompt")
        longer, name = max((prompt, "prompt"), (negative, "negative prompt"))
        wanted = context - longer if sampling.max_tokens is None else sampling.max_tokens
        if longer + wanted > context:
            raise ContextLengthError(
                f"The {name} has {longer} tokens and max_tokens is {wanted}, {longer + wanted} together; this model's "
                f"context is {context} tokens. Lower max_tokens to {context - longer} or shorten the {name}.",
                param="max_tokens",
            )
        self._check_ids("logit_bias", [token for token, _ in sampling.logit_bias])
        allowed = sampling.allowed_token_ids or ()
        if len(allowed) > self.text.vocab_size:
            told = f"at most {self.text.vocab_size}, as many as there are tokens"
            raise ParameterError("allowed_token_ids", f"{len(allowed)} token ids", told)
        self._check_ids("allowed_token_ids", allowed)
        for name in ("stop_token_ids", "logprob_token_ids", "dry_breaker_ids", "xtc_protected_ids"):
            self._check_ids(name, getattr(sampling, name))
        stop_patterns(sampling.stop_regex)  # raises what is wrong with one
        check_known(sampling.logits_processors, self.info.logits_processors)
        if request.tools and not request.parse:  # models mark their calls with special tokens
            sampling = replace(sampling, skip_special_tokens=False)
        most, size = WHOLE_VOCABULARY if request.decides else self.info.max_logprobs, self.text.vocab_size
        sampling = self._texts.in_tokens(within(sampling, most, size, sampling.n, prompt, wanted))
        return replace(sampling, max_tokens=wanted, begins_with=begins or sampling.begins_with)


def _tools(request: GenerationRequest) -> Sequence[Mapping[str, Any]] | None:
    """The functions an answer may call."""
    return None if request.tool_choice.mode is ToolMode.NONE else request.tools


def _tools_field(request: GenerationRequest) -> Mapping[str, str]:
    """Refusals of a grammar that was not sent are about the tools it was made of."""
    return {"grammar": "tools"} if request.grammar is None else {}


def _continues(request: GenerationRequest) -> bool:
    """Whether the answer goes on with the prompt's own text."""
    return request.messages is None or request.continue_final_message


def _prompt_field(request: GenerationRequest) -> str:
    return "messages" if request.messages is not None else "prompt"
