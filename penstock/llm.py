"""`LLM` and `AsyncLLM`: the engine inside a Python program."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.completions import Answer, Completion, collect
from penstock.config.environment import settle_torch
from penstock.config.errors import ConfigError, EngineDeadError
from penstock.config.names import served_name
from penstock.config.options import EngineOptions
from penstock.core.pooling import PoolingParams
from penstock.core.request import EngineStats, GenerationRequest
from penstock.core.sampling import SamplingParams
from penstock.engine.api import EngineInfo
from penstock.engine.frontend import Frontend
from penstock.engine.pooling import Pooled, pool_all, score_pairs
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import THREAD_NAME, ThreadClient
from penstock.search.beam import BeamParams, beam_search
from penstock.text.pairs import text_pairs

if TYPE_CHECKING:
    from penstock.engine.loop import Engine

Prompt = str | Sequence[int]
"""A text, or token ids taken as they are."""
Message = Mapping[str, Any]
"""One chat message as OpenAI spells it, for example {"role": "user", "content": "Hello"}."""
Params = SamplingParams | None
Progress = Callable[[int, int], None]
T = TypeVar("T")
_IN_FLIGHT = 1024  # requests of one call handed to the engine at a time; the rest wait here


class AsyncLLM:
    """A model for asyncio programs: many answers at once, streamed or whole.

    >>> async with AsyncLLM("penstock-concierge") as llm:
    ...     async for delta in llm.chat([{"role": "user", "content": "A table for two, please."}]):
    ...         print(delta.text, end="")
    ...     whole = await llm.generate("The weather in", SamplingParams(max_tokens=16))

    The engine runs in a thread and loads at the first use, or with `await llm.start()`. An object belongs to the event
    loop it is first used in.
    """

    def __init__(
        self, model: str | Path = "penstock-concierge", *, progress: Progress | None = None, **options: Any
    ) -> None:
        """Takes the fields of `penstock.config.options.EngineOptions` as keywords; `progress` as in LLM.

        Raises:
            ConfigError: an unknown option; the message names the nearest known one.
            CheckpointError: no usable model is there.
        """
        chosen = engine_options(str(model), options)
        name = chosen.served_model_name or served_name(chosen.model)
        chosen = replace(chosen, served_model_name=name)
        self._text = TextPipeline.load(chosen.model)
        self._client = ThreadClient(functools.partial(_build, chosen, progress))
        self._frontend = Frontend(self._client, self._text, served_name=name, seed=chosen.seed)
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._ids = itertools.count()

    async def start(self) -> Frontend:
        """Loads the model unless that is done; returns the frontend that serves requests.

        Raises:
            PenstockError: the engine cannot start.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._client.start())
        await asyncio.shield(self._starting)
        return self._frontend

    @property
    def info(self) -> EngineInfo:
        """Facts of the running engine; raises EngineDeadError before it is started."""
        return self._client.info

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling parameters: what is given, else the model's own defaults (generation_config.json)."""
        return self._text.sampling(**given)

    async def stats(self) -> EngineStats:
        """Counters of the engine."""
        return await self._client.stats()

    def generate(
        self, prompt: Prompt, params: Params = None, *, priority: int = 0, cache_salt: str = "", **sampling: Any
    ) -> Answer:
        """Continues a text or token ids; see LLM.generate for the arguments."""
        text = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": tuple(prompt)}
        return self._answer(params, sampling, **text, priority=priority, cache_salt=cache_salt)

    def chat(
        self,
        messages: Sequence[Message],
        params: Params = None,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Answer:
        """Answers a conversation; see LLM.chat for the arguments."""
        return self._answer(
            params,
            sampling,
            messages=tuple(messages),
            tools=None if tools is None else tuple(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs or {},
            priority=priority,
            cache_salt=cache_salt,
        )

    async def embed(
        self, prompts: Sequence[Prompt], *, dimensions: int | None = None, normalize: bool | None = None
    ) -> list[Pooled]:
        """One vector a text; see LLM.embed."""
        return await self._pool(prompts, self._text.pooling.embedding(dimensions, normalize))

    async def classify(self, prompts: Sequence[Prompt]) -> list[Pooled]:
        """The scores of all labels for each text; see LLM.classify."""
        return await self._pool(prompts, self._text.pooling.classification())

    async def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """How well each document answers its query; see LLM.score."""
        pairs, scores = text_pairs(queries, documents), list[float]()
        frontend = await self.start()
        for first in range(0, len(pairs), _IN_FLIGHT):
            some = pairs[first : first + _IN_FLIGHT]
            results = await score_pairs(frontend, some, self._prompt, "documents", instruction)
            scores += (result.values[-1] for result in results)
        return scores

    @property
    def labels(self) -> tuple[str, ...]:
        """Of a classifier; () for other models."""
        return self._text.pooling.labels

    async def _pool(self, prompts: Sequence[Prompt], params: PoolingParams) -> list[Pooled]:
        frontend, results = await self.start(), list[Pooled]()
        for first in range(0, len(prompts), _IN_FLIGHT):
            requests = [self._prompt(prompt) for prompt in prompts[first : first + _IN_FLIGHT]]
            results += await pool_all(frontend, requests, [params] * len(requests), "prompts")
        return results

    def _prompt(self, prompt: Prompt) -> GenerationRequest:
        """A request that generates nothing."""
        text = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": tuple(prompt)}
        return GenerationRequest(f"local-{next(self._ids)}", SamplingParams(max_tokens=1), **text)

    async def beam_search(self, prompt: Prompt, params: BeamParams, *, logprobs: int | None = None) -> Completion:
        """The most probable continuations of a text or token ids; see LLM.beam_search."""
        request = replace(self._prompt(prompt), sampling=SamplingParams(logprobs=logprobs))
        generation = await beam_search(await self.start(), request, params)
        try:
            return await collect(generation, params.n)
        finally:
            await generation.aclose()

    async def close(self) -> None:
        """Ends the engine and frees its memory; unfinished answers end with an error. Safe to call twice."""
        await self._client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _answer(self, params: Params, sampling: Mapping[str, Any], **request: Any) -> Answer:
        return Answer(
            self.start, GenerationRequest(f"local-{next(self._ids)}", self._params(params, sampling), **request)
        )

    def _params(self, params: Params, sampling: Mapping[str, Any]) -> SamplingParams:
        _check_names("sampling parameter", sampling, SamplingParams)
        return self.sampling(**sampling) if params is None else replace(params, **sampling)


class LLM:
    """A model, loaded once and asked as often as you like.

    >>> from penstock import LLM, SamplingParams
    >>> with LLM("penstock-concierge", max_model_len=1024) as llm:
    ...     answers = llm.chat([{"role": "user", "content": "Find me a hotel in Paris."}], temperature=0)
    ...     print(answers[0].text)
    ...     for completion in llm.generate(["Once upon a time", "The weather"], SamplingParams(max_tokens=20)):
    ...         print(completion.outputs[0].text, completion.outputs[0].finish_reason)

    All prompts of a call run together in one batch; give them in one list rather than in a loop. Methods block and
    may be called from any thread, also from inside a running event loop (use AsyncLLM there to keep it responsive).
    With an equal model, options, calls and seeds the answers are equal.
    """

    def __init__(
        self, model: str | Path = "penstock-concierge", *, progress: Progress | None = None, **options: Any
    ) -> None:
        """Loads a Hugging Face folder, a .gguf file or the bundled model.

        Args:
            model: path, or "penstock-concierge".
            progress: called with (bytes read, bytes in all) while weights load, in the engine's thread.
            options: fields of `penstock.config.options.EngineOptions`, for example dtype="bfloat16", threads=4,
                max_model_len=4096, seed=1.

        Raises:
            ConfigError: an unknown option (the message names the nearest), or one that cannot be honoured.
            CheckpointError: no usable model is there.
            MemoryPlanError: the model does not fit; the message names the missing bytes and a remedy.
        """
        self._async = AsyncLLM(model, progress=progress, **options)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="penstock-llm", daemon=True)
        thread.start()
        self._loop = loop
        self._end = weakref.finalize(self, _shut_down, self._async, loop, thread)
        try:
            self._wait(self._async.start())
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine: limits, memory, kernels in use, and why."""
        return self._async.info

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling parameters: what is given, else the model's own defaults (generation_config.json)."""
        return self._async.sampling(**given)

    def stats(self) -> EngineStats:
        """Counters of the engine: steps, tokens, prefix hits, preemptions."""
        return self._wait(self._async.stats())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[SamplingParams] = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> list[Completion]:
        """Continues texts or token ids.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one for each; None takes the model's own defaults.
            priority: lower is sooner, under the priority policy.
            cache_salt: prompts share cached prefixes only with those of the same salt.
            sampling: single fields of SamplingParams, for example temperature=0, max_tokens=32.

        Returns:
            One Completion a prompt, in order.

        Raises:
            RequestError: a prompt or parameter is refused (a note tells which prompt); the others are cancelled.
            EngineDeadError: the engine is closed.
        """
        listed = _listed(prompts)
        each = _spread(params, len(listed))
        make = functools.partial(self._async.generate, priority=priority, cache_salt=cache_salt, **sampling)
        return self._wait(_gather([functools.partial(make, *pair) for pair in zip(listed, each, strict=True)]))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[SamplingParams] = None,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> list[Completion]:
        """Answers one conversation or several, through the model's own chat template.

        Args:
            messages: a list of messages, or a list of such lists.
            params, priority, cache_salt, sampling: as in `generate`.
            tools: function declarations as OpenAI spells them, offered to the model in every conversation.
            add_generation_prompt: end the prompt with the start of an assistant turn.
            continue_final_message: let the model go on with the last message instead.
            template_kwargs: further variables for the template.

        Returns:
            One Completion a conversation, in order; tool calls are in its text as the model writes them.

        Raises:
            RequestError: as in `generate`; also without a chat template, or where the template refuses the messages.
        """
        listed: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        each = _spread(params, len(listed))
        make = functools.partial(
            self._async.chat,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            priority=priority,
            cache_salt=cache_salt,
            **sampling,
        )
        return self._wait(_gather([functools.partial(make, *pair) for pair in zip(listed, each, strict=True)]))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[Pooled]:
        """Turns texts or token ids into vectors, as the model's files say.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            dimensions: only so many leading elements (Matryoshka embeddings).
            normalize: to a length of one; None does as the model's files say.

        Returns:
            One result a prompt, in order; `values` is its vector, an array of float32.

        Raises:
            RequestError: the model does not embed, has fewer dimensions, or a prompt is refused.
            EngineDeadError: the engine is closed.
        """
        return self._wait(self._async.embed(_listed(prompts), dimensions=dimensions, normalize=normalize))

    def classify(self, prompts: Prompt | Sequence[Prompt]) -> list[Pooled]:
        """The score of each of `labels`, as `values`, for texts or token ids.

        Raises:
            RequestError: the model has no classification head, or a prompt is refused.
        """
        return self._wait(self._async.classify(_listed(prompts)))

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """How well documents answer queries: what a ranking model says, else the cosine of their embeddings.

        Args:
            queries: one text for all documents, or as many as there are.
            documents: a text or several.
            instruction: tells models that take one what to look for.

        Raises:
            RequestError: the model cannot score, or a text is refused.
        """
        return self._wait(self._async.score(queries, documents, instruction=instruction))

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, instruction: str | None = None
    ) -> list[tuple[int, float]]:
        """The documents' places in the list and their scores, the best first; only `top_n` of them if given."""
        scores = self.score(query, documents, instruction=instruction)
        return sorted(enumerate(scores), key=lambda entry: -entry[1])[:top_n]

    @property
    def labels(self) -> tuple[str, ...]:
        """Of a classifier; () for other models."""
        return self._async.labels

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams, *, logprobs: int | None = None
    ) -> list[Completion]:
        """The most probable continuations of texts or token ids: `params.n` outputs a prompt, the best first.

        Raises:
            RequestError: as in `generate`; also where more candidates are needed than the engine reports.
        """
        search = functools.partial(self._async.beam_search, params=params, logprobs=logprobs)
        return self._wait(_gather([functools.partial(search, prompt) for prompt in _listed(prompts)]))

    def close(self) -> None:
        """Ends the engine and frees its memory; safe to call twice. Also happens when the object is dropped."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work in this object's own event loop; an interrupt cancels it."""
        if not self._end.alive:
            work.close()
            raise EngineDeadError("This LLM is closed; make a new one.")
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    single = isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], int))
    return [prompts] if single else prompts


def engine_options(model: str, options: Mapping[str, Any]) -> EngineOptions:
    """EngineOptions from keywords; raises ConfigError for an unknown one, naming one like it."""
    _check_names("option", options, EngineOptions)
    return EngineOptions(model=model, **options)


def _check_names(what: str, given: Mapping[str, Any], known: type) -> None:
    names = [known_field.name for known_field in fields(known)]
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown {what} {name!r};{hint} known: {', '.join(names)}.")


def _build(options: EngineOptions, progress: Progress | None) -> tuple[Engine, EngineInfo]:
    settle_torch()
    from penstock.engine.build import build_engine

    return build_engine(options, progress)


def _spread(params: Params | Sequence[SamplingParams], count: int) -> Sequence[Params]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} params for {count} prompts; give one for all, or one for each.")
    return params


async def _gather(calls: Sequence[Callable[[], Awaitable[Completion]]]) -> list[Completion]:
    """All answers, at most _IN_FLIGHT at a time; the first refusal cancels the rest."""
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def one(index: int, call: Callable[[], Awaitable[Completion]]) -> Completion:
        async with slots:
            try:
                return await call()
            except Exception as error:
                error.add_note(f"in prompt {index} of {len(calls)}")
                raise

    tasks = [asyncio.ensure_future(one(index, call)) for index, call in enumerate(calls)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shut_down(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends engine, loop and threads; runs at close, when the LLM is dropped, or at interpreter exit."""
    if threading.current_thread().name in (THREAD_NAME, thread.name):  # dropped by one of them: it cannot wait here
        threading.Thread(target=_shut_down, args=(llm, loop, thread), daemon=True).start()
        return
    closing = asyncio.run_coroutine_threadsafe(llm.close(), loop)
    try:
        closing.result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
