"""`LLM`: the engine inside a Python program."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from penstock.async_llm import AsyncLLM, Message, Params, Progress, Prompt, gather
from penstock.completions import Completion
from penstock.config.constraint import ANY_TOOL, ToolChoice
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ConfigError, EngineDeadError
from penstock.config.keywords import EngineKeywords
from penstock.config.sampling import SamplingParams
from penstock.engine.api import EngineInfo
from penstock.engine.pooling import Pooled
from penstock.engine.thread_client import THREAD_NAME
from penstock.program import Host, State
from penstock.sampling_keywords import Adapters, AnswerKeywords, SamplingKeywords
from penstock.search.beam import BeamParams

T = TypeVar("T")


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
        self,
        model: str | Path = "penstock-concierge",
        *,
        progress: Progress | None = None,
        **options: Unpack[EngineKeywords],
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

    def sampling(self, **given: Unpack[SamplingKeywords]) -> SamplingParams:
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
        **sampling: Unpack[AnswerKeywords],
    ) -> list[Completion]:
        """Continues texts or token ids.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one for each; None takes the model's own defaults.
            priority: lower is sooner, under the priority policy.
            cache_salt: prompts share cached prefixes only with those of the same salt.
            sampling: single fields of SamplingParams, for example temperature=0, max_tokens=32; and what form the
                answer has: `json_schema` (an object), `regex`, `choice` (a list of strings) or `grammar` (a Grammar, or
                text in Lark's notation); and `adapter`, the folder or file of a low-rank adapter, or of several how
                much each counts, of an engine with `enable_lora=True`.

        Returns:
            One Completion a prompt, in order.

        Raises:
            RequestError: a prompt or parameter is refused (a note tells which prompt); the others are cancelled.
            EngineDeadError: the engine is closed.
        """
        listed = _listed(prompts)
        each = _spread(params, len(listed))
        make = functools.partial(self._async.generate, priority=priority, cache_salt=cache_salt, **sampling)
        return self._wait(gather([functools.partial(make, *pair) for pair in zip(listed, each, strict=True)]))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[SamplingParams] = None,
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
    ) -> list[Completion]:
        """Answers one conversation or several, through the model's own chat template.

        Args:
            messages: a list of messages, or a list of such lists.
            params, priority, cache_salt, sampling: as in `generate`.
            tools: function declarations as OpenAI spells them, offered to the model in every conversation.
            tool_choice: whether they may or must be called; to require calls, `parse` is needed.
            parse: tell reasoning and tool calls apart from the text, as docs/tools.md says.
            thinking_budget: most tokens of reasoning, with `parse`.
            add_generation_prompt: end the prompt with the start of an assistant turn.
            continue_final_message: let the model go on with the last message instead.
            template_kwargs: further variables for the template.

        Returns:
            One Completion a conversation, in order; unless parsed, tool calls are in its text as the model writes them.

        Raises:
            RequestError: as in `generate`; also without a chat template, or where the template refuses the messages.
        """
        listed: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        each = _spread(params, len(listed))
        make = functools.partial(
            self._async.chat,
            tools=tools,
            tool_choice=tool_choice,
            parse=parse,
            thinking_budget=thinking_budget,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            priority=priority,
            cache_salt=cache_salt,
            **sampling,
        )
        return self._wait(gather([functools.partial(make, *pair) for pair in zip(listed, each, strict=True)]))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[Pooled]:
        """Turns texts or token ids into vectors, as the model's files say.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            dimensions: only so many leading elements (Matryoshka embeddings).
            normalize: to a length of one; None does as the model's files say.
            prompt_name: puts the model's own prompt of this name before each text, for example "query"; None takes the
                one its files call the default, if any.
            prompt: puts this before each text instead.

        Returns:
            One result a prompt, in order; `values` is its vector, an array of float32.

        Raises:
            RequestError: the model does not embed, has fewer dimensions or no such prompt, or a text is refused.
            EngineDeadError: the engine is closed.
        """
        how: dict[str, Any] = {"dimensions": dimensions, "normalize": normalize}
        return self._wait(self._async.embed(_listed(prompts), prompt_name=prompt_name, prompt=prompt, **how))

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
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamParams,
        *,
        logprobs: int | None = None,
        adapter: Adapters | None = None,
    ) -> list[Completion]:
        """The most probable continuations of texts or token ids: `params.n` outputs a prompt, the best first.

        `adapter` as in `generate`.

        Raises:
            RequestError: as in `generate`; also where more candidates are needed than the engine reports.
        """
        search = functools.partial(self._async.beam_search, params=params, logprobs=logprobs, adapter=adapter)
        return self._wait(gather([functools.partial(search, prompt) for prompt in _listed(prompts)]))

    def program(self) -> State:
        """An empty prompt to write piece by piece, with parts that are generated; see `penstock.program`.

        Raises:
            EngineDeadError: the LLM is closed.
            ConfigError: the prefix cache is off, in which forks find what they share.
        """
        if not self._end.alive:
            raise EngineDeadError("This LLM is closed; make a new one.")
        if not self._async.options.enable_prefix_caching:
            raise ConfigError("programs share prefixes through the prefix cache, which is off; enable it.")
        return State(Host(self._async.start, self._async.sampling, self._loop, self), self._async.next_id())

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
        loop = self._loop  # not self: an object that is dropped ends
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def begin() -> None:
            task = loop.create_task(work)
            task.add_done_callback(functools.partial(_hand_over, answer))
            answer.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

        try:
            loop.call_soon_threadsafe(begin)  # an interrupt that comes right after it is caught too
            return answer.result()
        except BaseException:
            answer.cancel()
            raise


def _hand_over(answer: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    """Gives a task's outcome to whoever waits for it in another thread."""
    if task.cancelled():
        answer.cancel()
    elif not answer.set_running_or_notify_cancel():
        task.exception()  # nobody waits any more: it counts as seen
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    single = isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], int))
    return [prompts] if single else prompts


def _spread(params: Params | Sequence[SamplingParams], count: int) -> Sequence[Params]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} params for {count} prompts; give one for all, or one for each.")
    return params


def _shut_down(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends engine, loop and threads; runs at close, when the LLM is dropped, or at interpreter exit."""
    if threading.current_thread().name in (THREAD_NAME, thread.name):  # a thread cannot wait for itself to end
        threading.Thread(target=_shut_down, args=(llm, loop, thread), daemon=True).start()
        return
    closing = asyncio.run_coroutine_threadsafe(llm.close(), loop)
    try:
        closing.result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
