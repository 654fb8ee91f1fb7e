"""`AsyncLLM`: the engine inside an asyncio program."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Unpack

from penstock.completions import Answer, Completion, collect
from penstock.config.adapters import MOST_WEIGHT, AdapterUse
from penstock.config.constraint import ANY_TOOL, Grammar, GrammarKind, ToolChoice
from penstock.config.engine_stats import EngineStats
from penstock.config.environment import settle_torch
from penstock.config.errors import ConfigError, ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.keywords import EngineKeywords
from penstock.config.names import BUNDLED_MODEL, served_name
from penstock.config.options import EngineOptions
from penstock.config.pooling import PoolingParams
from penstock.config.resolve import validate
from penstock.config.sampling import SamplingParams
from penstock.engine.api import EngineClient, EngineInfo
from penstock.engine.frontend import Frontend
from penstock.engine.pooling import Pooled, pool_all
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.sampling_keywords import Adapters, AnswerKeywords, SamplingKeywords
from penstock.search.beam import BeamParams, beam_search
from penstock.search.ranking import score_pairs
from penstock.text.pairs import text_pairs
from penstock.weights.adapters.open import adapter_state, read_adapter

if TYPE_CHECKING:
    from penstock.engine.loop import Engine

Prompt = str | Sequence[int]
"""A text, or token ids taken as they are."""
Message = Mapping[str, Any]
"""One chat message as OpenAI spells it, for example {"role": "user", "content": "Hello"}."""
Params = SamplingParams | None
Progress = Callable[[int, int], None]
IN_FLIGHT = 1024  # requests of one call handed to the engine at a time; the rest wait here


_ADAPTERS: Final = f"the path of an adapter, or paths, each with a number of at most {MOST_WEIGHT:g}"
_FORMS: Final[Mapping[str, GrammarKind]] = MappingProxyType(
    {
        "grammar": GrammarKind.LARK,
        "json_schema": GrammarKind.JSON_SCHEMA,
        "regex": GrammarKind.REGEX,
        "choice": GrammarKind.CHOICE,
    }
)


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
        self,
        model: str | Path = "penstock-concierge",
        *,
        progress: Progress | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        """Takes the fields of `penstock.config.options.EngineOptions` as keywords; `progress` as in LLM.

        Raises:
            ConfigError: an unknown option; the message names the nearest known one.
            CheckpointError: no usable model is there.
        """
        chosen = engine_options(str(model), options)
        name = chosen.served_model_name or served_name(chosen.model)
        chosen = replace(chosen, served_model_name=name)
        self.options = chosen
        self._text = TextPipeline.of(chosen)
        self._client = _client(chosen, progress)
        self._frontend = Frontend(self._client, self._text, served_name=name, seed=chosen.seed)
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._ids = itertools.count()
        self._adapters: dict[str, tuple[object, AdapterUse]] = {}  # by path, and of which state of its files

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

    def sampling(self, **given: Unpack[SamplingKeywords]) -> SamplingParams:
        """Sampling parameters: what is given, else the model's own defaults (generation_config.json)."""
        return self._text.sampling(**given)

    async def stats(self) -> EngineStats:
        """Counters of the engine."""
        return await self._client.stats()

    def generate(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Unpack[AnswerKeywords],
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
        tool_choice: ToolChoice = ANY_TOOL,
        parse: bool = False,
        thinking_budget: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Unpack[AnswerKeywords],
    ) -> Answer:
        """Answers a conversation; see LLM.chat for the arguments."""
        return self._answer(
            params,
            sampling,
            messages=tuple(messages),
            tools=None if tools is None else tuple(tools),
            tool_choice=tool_choice,
            parse=parse,
            thinking_budget=thinking_budget,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs or {},
            priority=priority,
            cache_salt=cache_salt,
        )

    async def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[Pooled]:
        """One vector a text; see LLM.embed."""
        pooling = self._text.pooling
        params = pooling.embedding(dimensions, normalize)
        return await self._pool(pooling.prompted(prompts, prompt_name, prompt), params)

    async def classify(self, prompts: Sequence[Prompt]) -> list[Pooled]:
        """The scores of all labels for each text; see LLM.classify."""
        return await self._pool(prompts, self._text.pooling.classification())

    async def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """How well each document answers its query; see LLM.score."""
        pairs, scores = text_pairs(queries, documents), list[float]()
        frontend = await self.start()
        for first in range(0, len(pairs), IN_FLIGHT):
            some = pairs[first : first + IN_FLIGHT]
            results = await score_pairs(frontend, some, self._prompt, "documents", instruction)
            scores += (result.values[-1] for result in results)
        return scores

    @property
    def labels(self) -> tuple[str, ...]:
        """Of a classifier; () for other models."""
        return self._text.pooling.labels

    async def _pool(self, prompts: Sequence[Prompt], params: PoolingParams) -> list[Pooled]:
        frontend, results = await self.start(), list[Pooled]()
        for first in range(0, len(prompts), IN_FLIGHT):
            requests = [self._prompt(prompt) for prompt in prompts[first : first + IN_FLIGHT]]
            results += await pool_all(frontend, requests, [params] * len(requests), "prompts")
        return results

    def next_id(self) -> str:
        """An id no other request or program of this object has."""
        return f"local-{next(self._ids)}"

    def _prompt(self, prompt: Prompt) -> GenerationRequest:
        """A request that generates nothing."""
        text = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": tuple(prompt)}
        return GenerationRequest(self.next_id(), SamplingParams(max_tokens=1), **text)

    async def beam_search(
        self, prompt: Prompt, params: BeamParams, *, logprobs: int | None = None, adapter: Adapters | None = None
    ) -> Completion:
        """The most probable continuations of a text or token ids; see LLM.beam_search."""
        request = replace(self._prompt(prompt), sampling=SamplingParams(logprobs=logprobs))
        frontend = await (self.start() if adapter is None else self._adapted(_weights(adapter)))
        generation = await beam_search(frontend, request, params)
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

    def _answer(self, params: Params, given: Mapping[str, Any], **request: Any) -> Answer:
        sampling = {name: value for name, value in given.items() if name not in (*_FORMS, "adapter")}
        grammar = _grammar({name: given[name] for name in _FORMS if given.get(name) is not None})
        params = self._params(params, sampling)
        adapter = given.get("adapter")
        start = self.start if adapter is None else functools.partial(self._adapted, _weights(adapter))
        return Answer(start, GenerationRequest(self.next_id(), params, grammar=grammar, **request))

    async def _adapted(self, weights: Mapping[str, float]) -> Frontend:
        """The frontend that answers with adapters, whose files are read again only where they changed."""
        named = [replace(await asyncio.to_thread(self._read, name), weight=w) for name, w in weights.items()]
        frontend = await self.start()
        return frontend.adapted(frontend.served_name, tuple(named))

    def _read(self, path: str) -> AdapterUse:
        """What names an adapter; raises CheckpointError where there is none."""
        from penstock.library.adapters import adapter_path

        path = adapter_path(path)
        state = adapter_state(path)
        known = self._adapters.get(path)
        if known is None or known[0] != state:
            known = self._adapters[path] = state, read_adapter(path)[0]
        return known[1]

    def _params(self, params: Params, sampling: Mapping[str, Any]) -> SamplingParams:
        _check_names("sampling parameter", sampling, SamplingParams)
        return self.sampling(**sampling) if params is None else replace(params, **sampling)


def _grammar(forms: Mapping[str, Any]) -> Grammar | None:
    """What holds an answer to a form: the one of `grammar`, `json_schema`, `regex` and `choice` that is given."""
    if len(forms) > 1:
        raise ConfigError(f"{' and '.join(forms)} are given; an answer takes one form.")
    for name, value in forms.items():
        if name == "grammar":
            return value if isinstance(value, Grammar) else Grammar(GrammarKind.LARK, str(value))
        return Grammar(_FORMS[name], value if isinstance(value, str) else json.dumps(value))
    return None


def engine_options(model: str, options: Mapping[str, Any]) -> EngineOptions:
    """EngineOptions from keywords and a path or a name of the library.

    Raises:
        ConfigError: an unknown option, named with one like it; or a model that is not here.
    """
    _check_names("option", options, EngineOptions)
    if model != BUNDLED_MODEL and not os.path.exists(os.path.expanduser(model)):
        from penstock.library.resolve import find

        found = find(model)
        options = {**found.options, "served_model_name": found.name, **options}
        model = str(found.path)
    if drafts := options.get("speculative_config"):
        from penstock.library.resolve import with_draft_path

        options = {**options, "speculative_config": with_draft_path(drafts)}
    return EngineOptions(model=model, **options)


def _weights(adapter: Adapters) -> Mapping[str, float]:
    """How much each of these adapters counts, by its path; raises ParameterError for anything else."""
    if not isinstance(adapter, str | os.PathLike | Mapping):
        raise ParameterError("adapter", adapter, _ADAPTERS)
    given = adapter if isinstance(adapter, Mapping) else {adapter: 1.0}
    for path, weight in given.items():
        sound = isinstance(path, str | os.PathLike) and isinstance(weight, int | float)
        if not (sound and abs(weight) <= MOST_WEIGHT):
            raise ParameterError("adapter", adapter, _ADAPTERS)
    return {os.path.expanduser(path): float(weight) for path, weight in given.items()}


def _check_names(what: str, given: Mapping[str, Any], known: type) -> None:
    names = [known_field.name for known_field in fields(known)]
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown {what} {name!r};{hint} known: {', '.join(names)}.")


def _client(options: EngineOptions, progress: Progress | None) -> EngineClient:
    """An engine in a thread of this process; or several, in processes of their own."""
    if options.data_parallel_size == 1:
        return ThreadClient(functools.partial(_build, options, progress))
    from penstock.cluster.engines import cluster  # its libraries are the server's

    validate(options)
    return cluster(options, progress=progress)


def _build(options: EngineOptions, progress: Progress | None) -> tuple[Engine, EngineInfo]:
    settle_torch()
    from penstock.engine.build import build_engine

    return build_engine(options, progress)


async def gather(calls: Sequence[Callable[[], Awaitable[Completion]]]) -> list[Completion]:
    """All answers, at most IN_FLIGHT at a time; the first refusal cancels the rest."""
    slots = asyncio.Semaphore(IN_FLIGHT)

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
