"""States: prompts under way, their forks, and functions of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, overload

from penstock.completions import CompletionOutput, collect
from penstock.config.errors import ConfigError, EngineDeadError, ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.logprobs import check_mode
from penstock.config.sampling import SamplingParams
from penstock.core.request import FinishReason
from penstock.program.pieces import Gen, Piece, Role, Select, parts_of

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_ROLES: Final = ("system", "user", "assistant")
_THREADS: Final = 64  # programs of one run_batch at a time
_PATIENCE_S: Final = 0.5  # between two checks that there is still an engine to wait for


@dataclass(slots=True)
class Host:
    """What states run on.

    Attributes:
        start: gives the frontend.
        sampling: fills in the model's own sampling defaults.
        loop: where requests run; states belong to other threads.
        owner: what must live as long as its states.
    """

    start: Callable[[], Awaitable[Frontend]]
    sampling: Callable[..., SamplingParams]
    loop: asyncio.AbstractEventLoop
    owner: object


@dataclass(slots=True)
class _Said:
    """What a state has said: its text, in tokens too, the chat's messages, and results by name."""

    text: str = ""
    ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, CompletionOutput] = field(default_factory=dict)
    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    cached_tokens: int = 0
    prompt_tokens: int = 0


class State:
    """A prompt under way. Made by `LLM.program`; add pieces with `+=`, read results by name.

    A state may be used from one thread at a time; different states run side by side.
    """

    def __init__(self, host: Host, name: str, after: Future[None] | None = None) -> None:
        """`name` begins the ids of its requests, and so, with the engine's seed, fixes what they draw."""
        self._host = host
        self._name = name
        self._said = _Said()
        self._last = after
        self._forked = 0
        self._asked = itertools.count()

    def __iadd__(self, piece: Piece) -> State:
        """Adds a piece; returns at once.

        Raises:
            ConfigError: it is no piece.
        """
        for part in parts_of(piece):
            self._then(self._run(part))
        return self

    def __add__(self, piece: Piece) -> State:
        """As `+=`: this very state, with the piece."""
        self += piece
        return self

    def __getitem__(self, name: str) -> Any:
        """A result: the text of a `gen` or `select`; a list of those of all forks after `join`.

        Raises:
            PenstockError: a piece failed; what was added after it did not run.
            KeyError: no piece of that name was added.
        """
        self.wait()
        return self._said.results[name]

    def __contains__(self, name: str) -> bool:
        self.wait()
        return name in self._said.results

    @property
    def text(self) -> str:
        """All that was said, once it is there."""
        self.wait()
        return self._said.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The same in tokens."""
        self.wait()
        return self._said.ids

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        """The chat so far."""
        self.wait()
        return self._said.messages

    @property
    def cached_share(self) -> float:
        """Of the prompt tokens of this state's requests since it was made, the share that was not computed again."""
        self.wait()
        return self._said.cached_tokens / max(1, self._said.prompt_tokens)

    def output(self, name: str) -> CompletionOutput:
        """What a `gen` gave besides its text: tokens, log-probabilities, why it ended."""
        self.wait()
        return self._said.outputs[name]

    def scores(self, name: str) -> tuple[float, ...]:
        """The log-probability of each choice of a `select`."""
        self.wait()
        return self._said.scores[name]

    def wait(self) -> State:
        """Waits until all that was added is there."""
        while self._last is not None:
            try:
                self._last.result(_PATIENCE_S)
                break
            except TimeoutError:
                if self._last.done():
                    raise
                if not self._host.loop.is_running():
                    raise EngineDeadError("The LLM was closed before this was there.") from None
        return self

    def fork(self, n: int) -> Forks:
        """`n` states that go on from here, each on its own; returns at once.

        Raises:
            ParameterError: n is below 1.
        """
        if n < 1:
            raise ParameterError("n", n, "at least 1")
        self._forked += 1
        names = [f"{self._name}.{self._forked}.{index}" for index in range(n)]
        forks = Forks(self, tuple(State(self._host, name, self._last) for name in names))
        for fork in forks:
            fork._then(fork._inherit(self._said))
        return forks

    def _then(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work after all that was added before; a failure there is this one's too."""
        before = self._last
        if self._host.loop.is_closed():
            work.close()
            raise EngineDeadError("The LLM is closed; make a new one.")

        async def run() -> None:
            try:
                if before is not None:
                    await asyncio.wrap_future(before)
            except BaseException:
                work.close()
                raise
            await work

        self._last = asyncio.run_coroutine_threadsafe(run(), self._host.loop)

    async def _inherit(self, said: _Said) -> None:
        self._said = _Said(
            said.text, said.ids, said.messages, dict(said.results), dict(said.outputs), dict(said.scores)
        )

    async def _run(self, part: str | Gen | Select | Role) -> None:
        frontend = await self._host.start()
        if isinstance(part, Role):
            await self._turn(frontend, part)
        elif isinstance(part, str) and self._said.messages:
            raise ConfigError("a text was added after system, user or assistant; put it into one of them.")
        else:
            await self._say(frontend, part)

    async def _say(self, frontend: Frontend, part: str | Gen | Select | Role) -> None:
        if isinstance(part, str):
            await self._append(frontend, part)
        elif isinstance(part, Gen):
            await self._generate(frontend, part)
        elif isinstance(part, Select):
            await self._select(frontend, part)

    async def _turn(self, frontend: Frontend, turn: Role) -> None:
        said = self._said
        if said.text and not said.messages:
            raise ConfigError(f"{turn.role}(…) was added after a text; begin with one of {', '.join(_ROLES)}.")
        if turn.role == "assistant":
            await self._render(frontend, prompted=True)
            begin = len(said.text)
            for part in turn.pieces.parts:
                await self._say(frontend, part)
            content = said.text[begin:]
        else:
            content = "".join(part for part in turn.pieces.parts if isinstance(part, str))
        said.messages = (*said.messages, {"role": turn.role, "content": content})

    async def _render(self, frontend: Frontend, *, prompted: bool) -> None:
        """Says what the chat template makes of the messages; where it rewrites what was said, all is said anew."""
        said = self._said
        asked = GenerationRequest("", SamplingParams(), messages=said.messages, add_generation_prompt=prompted)
        text = await asyncio.to_thread(frontend.render, asked)
        if not text.startswith(said.text):
            said.text, said.ids = "", ()
        await self._append(frontend, text[len(said.text) :], special=False)

    async def _append(self, frontend: Frontend, text: str, *, special: bool = True) -> None:
        said = self._said
        if text:
            asked = GenerationRequest("", SamplingParams(), prompt=text, add_special_tokens=special and not said.ids)
            ids = await frontend.tokenize(asked)
            said.ids += ids if special or said.ids else frontend.text.tokenizer.begin_chat(ids)
            said.text += text

    def _request(self, ids: tuple[int, ...], sampling: SamplingParams, **rest: Any) -> GenerationRequest:
        return GenerationRequest(f"{self._name}:{next(self._asked)}", sampling, prompt_ids=ids, **rest)

    async def _generate(self, frontend: Frontend, part: Gen) -> None:
        said = self._said
        request = self._request(said.ids, self._host.sampling(**part.sampling), grammar=part.grammar)
        output = await self._answer(frontend, request)
        said.results[part.name], said.outputs[part.name] = output.text, output
        ended = output.finish_reason is FinishReason.STOP and output.token_ids[-1] in frontend.text.eos_ids
        ids = output.token_ids[:-1] if ended else output.token_ids
        if frontend.text.tokenizer.decode(list(ids)) == output.text:
            said.ids, said.text = said.ids + ids, said.text + output.text
        else:  # a stop string, or a special token that is not shown, was cut off
            await self._append(frontend, output.text)

    async def _select(self, frontend: Frontend, part: Select) -> None:
        check_mode(frontend.info.logprobs_mode, "select")
        said, one = self._said, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        if not said.ids:
            raise ConfigError(f"select({part.name!r}) is the first piece; add a text or a role before it.")
        asked = [GenerationRequest("", one, prompt=choice, add_special_tokens=False) for choice in part.choices]
        endings = [await frontend.tokenize(request) for request in asked]
        one = replace(one, prompt_logprobs_start=len(said.ids))
        answers = await asyncio.gather(*(self._score(frontend, said.ids + ids, one) for ids in endings))
        totals = [total / len(ids) if part.normalize else total for total, ids in zip(answers, endings, strict=True)]
        best = max(range(len(totals)), key=totals.__getitem__)
        said.scores[part.name], said.results[part.name] = tuple(totals), part.choices[best]
        said.text, said.ids = said.text + part.choices[best], said.ids + endings[best]

    async def _score(self, frontend: Frontend, ids: tuple[int, ...], one: SamplingParams) -> float:
        generation = await frontend.generate(self._request(ids, one))
        try:
            completion = await collect(generation, 1)
        finally:
            await generation.aclose()
        _check(completion.outputs[0])
        self._count(len(ids), completion.cached_tokens)
        return sum(entry.logprob for entry in completion.prompt_logprobs)

    async def _answer(self, frontend: Frontend, request: GenerationRequest) -> CompletionOutput:
        generation = await frontend.generate(request)
        try:
            completion = await collect(generation, 1)
        finally:
            await generation.aclose()
        self._count(len(completion.prompt_ids), completion.cached_tokens)
        return _check(completion.outputs[0])

    def _count(self, prompt: int, cached: int) -> None:
        self._said.prompt_tokens += prompt
        self._said.cached_tokens += cached


@dataclass(frozen=True, slots=True)
class Forks(Sequence[State]):
    """States that went on from one; see `State.fork`."""

    parent: State
    states: tuple[State, ...]

    def __len__(self) -> int:
        return len(self.states)

    @overload
    def __getitem__(self, index: int) -> State: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[State, ...]: ...

    def __getitem__(self, index: int | slice) -> State | tuple[State, ...]:
        return self.states[index]

    def join(self, *, append: bool = False) -> State:
        """Waits for all and gives the parent their new results, a list by name (None where a fork has none).

        Args:
            append: the parent also says what the forks said since, one after the other.

        Raises:
            PenstockError: a piece of a fork failed.
            ConfigError: `append` with a chat, whose turns cannot be joined.
        """
        said = self.parent.wait()._said
        ends = [state.wait()._said for state in self.states]
        if append and said.messages:
            raise ConfigError("join(append=True) joins texts, not chats; read the forks' results instead.")
        names = dict.fromkeys(name for end in ends for name in end.results if name not in said.results)
        said.results |= {name: [end.results.get(name) for end in ends] for name in names}
        if append:
            self.parent.__iadd__("".join(end.text[len(said.text) :] for end in ends))
        return self.parent


class Programmable(Protocol):
    """An LLM."""

    def program(self) -> State: ...


@dataclass(frozen=True, slots=True)
class Function:
    """A program as a function of a state and arguments; see `function`."""

    body: Callable[..., Any]

    def run(self, llm: Programmable, **arguments: Any) -> State:
        """Runs it once; returns its state, all pieces there."""
        state = llm.program()
        self.body(state, **arguments)
        return state.wait()

    def run_batch(self, llm: Programmable, batch: Sequence[Mapping[str, Any]]) -> list[State]:
        """Runs it for several sets of arguments side by side; the states in their order."""
        states = [llm.program() for _ in batch]  # named in order, so that draws do not depend on which thread is first
        with ThreadPoolExecutor(min(_THREADS, max(1, len(batch))), "penstock-program") as pool:
            runs = [
                pool.submit(self.body, state, **dict(arguments)) for state, arguments in zip(states, batch, strict=True)
            ]
            for run in runs:
                run.result()
        return [state.wait() for state in states]


def function(body: Callable[..., Any]) -> Function:
    """Makes a program of a function whose first argument is the state.

    >>> @function
    ... def answer(state, question):
    ...     state += user(question)
    ...     state += assistant(gen("answer", max_tokens=64))
    >>> answer.run_batch(llm, [{"question": "Where?"}, {"question": "When?"}])
    """
    return Function(body)


def _check(output: CompletionOutput) -> CompletionOutput:
    if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        raise EngineDeadError(output.error or "The generation was ended before it was complete.")
    return output
