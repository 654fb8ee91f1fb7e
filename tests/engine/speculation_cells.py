"""Cells of everything that speculation meets: a drafter, samplers, a state, a form of the answer, a kind of cache.

    python -m tests.engine.speculation_cells 2000    so many cells chosen at random

Answers go the whole way, from messages to text, reasoning and calls told apart. Those of an engine that drafts are, in
every field, those of one that does not.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from penstock.config.constraint import Grammar, GrammarKind, ToolChoice, ToolMode
from penstock.config.engine_stats import EngineStats
from penstock.config.generation import GenerationRequest
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineOutput, EngineRequest
from penstock.engine.api import EngineInfo
from penstock.engine.build import build_engine
from penstock.engine.frontend import Frontend
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.runtime.drafters.depths import FixedDepths
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.runner import ModelRunner
from tests.models import tiny

MARKS = ("<pad>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
LETTERS = ("\n", *map(chr, range(32, 126)))
TEMPLATES: Mapping[str, str] = {
    "none": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "grammar": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "tools": "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}",
    "reasoning": "{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}",
}
FORMS: Mapping[str, str] = {"grammar": "((ab|ba|aab|a|b) ){5,12}", "reasoning": "((ab|ba|b) ){4,9}"}
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"enum": ["aa", "ab"]}, "minItems": 4, "maxItems": 6}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"temperature": 1.0},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "filters": {"temperature": 1.2, "top_k": 6, "top_p": 0.95, "min_p": 0.02},
}
CACHES: Mapping[str, str] = {
    "full": "llama",
    "sliding": "gemma3",
    "latent": "deepseek-v2",
    "recurrent": "falcon-mamba",
    "hybrid": "qwen3-next",
}
DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6},
    "suffix": {"method": "suffix", "prompt_lookup_min": 1},
    "lookahead": {"method": "lookahead", "max_ngram_size": 3, "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "self": {"method": "self", "layers": 1, "num_speculative_tokens": 4},
}
IMPOSSIBLE = {("draft_model", "recurrent"), ("self", "sliding"), ("self", "recurrent"), ("self", "hybrid")}
STATES = ("hit", "chunk", "preempted", "company 1", "company 8", "company 32", "n", "stop", "bad words")
FACTORS: Mapping[str, Sequence[str]] = {
    "drafter": tuple(DRAFTERS),
    "sampling": tuple(SAMPLING),
    "state": STATES,
    "form": tuple(TEMPLATES),
    "cache": tuple(CACHES),
    "depths": ("all", "any"),
}
_LENGTH: Final = 260
_CHUNK: Final = 7
_MOST_ROUNDS: Final = 40
_END: Final = MARKS.index("<|im_end|>")


class Cell(NamedTuple):
    """One of each."""

    drafter: str
    sampling: str
    state: str
    form: str
    cache: str
    depths: str

    @property
    def possible(self) -> bool:
        """What drafts as a model needs layers that keep every position."""
        return (self.drafter, self.cache) not in IMPOSSIBLE


def every_cell() -> list[Cell]:
    """All there are."""
    return [cell for one in product(*FACTORS.values()) if (cell := Cell(*one)).possible]


def covering() -> list[Cell]:
    """Cells in which every possible pair of two factors' values is met: the one with the most new pairs comes next."""
    dice, cells = random.Random(18), every_cell()
    dice.shuffle(cells)
    pairs = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    missing = set[Any]().union(*pairs.values())
    found = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        missing -= pairs[best]
        found.append(best)
    return found


class AnyDepths(FixedDepths):
    """Asks for some slots, for some drafts, and verifies some of those: whatever a controller may choose."""

    def __init__(self, seed: int, rests: bool) -> None:
        """`rests`: now and then nobody is asked or told for some steps; a model has to be told always."""
        super().__init__()
        self._dice, self._rests = random.Random(seed), rests

    def rest(self) -> int:
        return self._dice.randint(0, 4) if self._rests else 0

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        if self._rests and self._dice.random() < 0.2:
            return {}
        return {slot: self._dice.randint(1, length) for slot, length in most.items() if self._dice.random() < 0.8}

    def chosen(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        found = (draft._replace(tokens=draft.tokens[: self._dice.randint(0, len(draft.tokens))]) for draft in drafts)
        return [draft for draft in found if draft.tokens]


@dataclass
class Stepped:
    """An engine client whose steps are made on its event loop; after those of `preempts` all that runs goes back."""

    engine: Engine
    info: EngineInfo
    preempts: frozenset[int] = frozenset()
    most_running: int = 0
    queues: dict[str, asyncio.Queue[EngineOutput]] = field(default_factory=dict)

    def submit(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        queue = self.queues[request.request_id] = asyncio.Queue[EngineOutput]()
        self.engine.add(request)

        async def outputs() -> AsyncIterator[EngineOutput]:
            left = request.sampling.n
            try:
                yield EngineOutput(request.request_id, 0)
                while left:
                    output = await queue.get()
                    assert output.error is None, output.error
                    left -= output.finish_reason is not None
                    yield output
            finally:
                del self.queues[request.request_id]
                if left:
                    self.engine.cancel(request.request_id)

        return outputs()

    async def run(self) -> None:
        """Steps until nobody waits for anything."""
        steps = 0
        while self.queues or self.engine.has_work:
            for compiled, error in self.engine.structured.ready():
                assert error is None
                self.engine.admit(compiled)
            for output in self.engine.step() if self.engine.has_work else ():
                if (queue := self.queues.get(output.request_id)) is not None:
                    queue.put_nowait(output)
            running = [sequence.request.request_id for sequence in self.engine.scheduler.running]
            self.most_running = max(self.most_running, len(running))
            steps += bool(running)
            for name in set(running) if steps in self.preempts else ():
                self.engine.scheduler.preempt(name)
            self.engine.scheduler.check_integrity()
            await asyncio.sleep(0)


@dataclass
class Told:
    """All of an answer's sequences, as they are told; of several pieces, together."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    calls: dict[int, list[tuple[str | None, str]]] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)


async def told(frontend: Frontend, request: GenerationRequest) -> Told:
    """An answer, read to its end."""
    found = Told()
    async with aclosing(await frontend.generate(request)) as generation:  # type: ignore[type-var]
        async for delta in generation:
            number = delta.index
            texts = found.texts.setdefault(number, ["", ""])
            texts[0] += delta.text
            texts[1] += delta.reasoning
            found.tokens.setdefault(number, []).extend(delta.token_ids)
            found.logprobs.setdefault(number, []).extend(delta.logprobs)
            for call in delta.tool_calls:
                found.calls.setdefault(number, []).append((call.name, call.arguments))
            if delta.finish_reason is not None:
                found.ends[number] = (delta.finish_reason, delta.stop_reason)
    joined = {number: [("".join(name or "" for name, _ in calls), "".join(said for _, said in calls))]
              for number, calls in found.calls.items()}  # fmt: skip
    return replace(found, calls=joined)  # type: ignore[arg-type]


class Workshop:
    """Engines of tiny models, each made when a first cell wants it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[tuple[str, str, int], tuple[Engine, EngineInfo]] = {}
        self._truth: dict[Any, Told] = {}
        self._texts: dict[tuple[str, str], TextPipeline] = {}
        _save("llama", folder / "draft", num_hidden_layers=1)

    def close(self) -> None:
        for engine, _ in self._engines.values():
            engine.close()

    def _depths(self, cell: Cell, seed: int) -> FixedDepths:
        return AnyDepths(seed, cell.drafter in ("ngram", "suffix")) if cell.depths == "any" else FixedDepths()

    def check(self, cell: Cell) -> EngineStats:
        """Answers of rounds with other seeds until drafts were accepted and rejected: each is the one without drafts.

        Returns:
            The counters of this cell alone.

        Raises:
            AssertionError: an answer differs, drafts were not accepted and rejected, or the state did not come about.
        """
        engine, info = self.engine(cell.cache, cell.drafter, _CHUNK if cell.state == "chunk" else 0)
        assert isinstance(engine.runner, ModelRunner)
        before, met = engine.stats(), False
        for number in range(_MOST_ROUNDS):
            seed = 100 * number + 7
            engine.runner._drafting._depths = self._depths(cell, seed)
            client = Stepped(engine, info, frozenset(range(2, 90, 5) if cell.state == "preempted" else ()))
            if cell.state != "hit":
                engine.scheduler.cache.clear()
            since = engine.stats()
            requests = requests_of(cell, seed)
            found = self._answers(client, cell, requests)
            for request, answer in zip(requests, found, strict=True):
                expected = self._true(cell, request)
                assert answer == expected, f"{cell}, {request.request_id}: {_apart(answer, expected)}"
            met = met or _came_about(cell, client, since, engine.stats(), found)
            stats = _difference(engine.stats(), before)
            assert stats.drafter_failures == 0
            if met and 0 < stats.accepted_tokens < stats.drafted_tokens:
                return stats
        raise AssertionError(f"{cell}: {'' if met else 'its state did not come about; '}{stats}")

    def _true(self, cell: Cell, request: GenerationRequest) -> Told:
        key = (cell.cache, cell.form, request.request_id.partition("#")[0], request.sampling)
        if key not in self._truth:
            engine, info = self.engine(cell.cache, "", 0)
            name = request.request_id.partition("#")[0]
            self._truth[key] = self._answers(Stepped(engine, info), cell, [replace(request, request_id=name)])[0]
        return self._truth[key]

    def _answers(self, client: Stepped, cell: Cell, requests: Sequence[GenerationRequest]) -> list[Told]:
        frontend = Frontend(client, self.text(cell), served_name="tiny")  # type: ignore[arg-type]

        async def ask() -> list[Told]:
            if cell.state == "hit":  # those that come first leave their prefixes to the others
                first = await _together(client, [told(frontend, one) for one in requests[:1]])
                return [*first, *await _together(client, [told(frontend, one) for one in requests[1:]])]
            return await _together(client, [told(frontend, one) for one in requests])

        return asyncio.run(ask())

    def text(self, cell: Cell) -> TextPipeline:
        if (cell.cache, cell.form) not in self._texts:
            self._model(cell.cache)
            parsers = {"tools": ("hermes", "none"), "reasoning": ("none", "think")}.get(cell.form, ("none", "none"))
            text = TextPipeline.load(str(self._folder / cell.cache))
            self._texts[cell.cache, cell.form] = text.templated(TEMPLATES[cell.form], *parsers)
        return self._texts[cell.cache, cell.form]

    def _model(self, cache: str) -> Path:
        folder = self._folder / cache
        if not folder.exists():
            _save(CACHES[cache], folder)
        return folder

    def engine(self, cache: str, drafter: str, chunk: int) -> tuple[Engine, EngineInfo]:
        if (cache, drafter, chunk) not in self._engines:
            config = dict(DRAFTERS[drafter], adaptive=False) if drafter else None
            if drafter == "draft_model":
                config = {**(config or {}), "model": str(self._folder / "draft")}
            options = EngineOptions(
                str(self._model(cache)),
                dtype="float32",
                threads=1,
                max_num_seqs=40,
                max_model_len=_LENGTH,
                block_size=4,
                kv_blocks=1200,
                max_chunk_tokens=chunk or None,
                speculative_config=None if config is None else json.dumps(config),
                pack_cache="off",
            )
            self._engines[cache, drafter, chunk] = build_engine(options)
        return self._engines[cache, drafter, chunk]


def _apart(answer: Told, expected: Told) -> str:
    """What is not the same."""
    names = [one.name for one in fields(answer) if getattr(answer, one.name) != getattr(expected, one.name)]
    return "; ".join(f"{name} {getattr(answer, name)} instead of {getattr(expected, name)}" for name in names)


async def _together(client: Stepped, asked: Sequence[Any]) -> list[Told]:
    tasks = [asyncio.ensure_future(one) for one in asked]
    while not all(task.done() for task in tasks):
        await client.run()
        await asyncio.sleep(0)
    return [task.result() for task in tasks]


def requests_of(cell: Cell, seed: int) -> list[GenerationRequest]:
    """Those of a round: as many as the state's company, else three, of which two have their prompt in common."""
    count = int(cell.state.split()[1]) if cell.state.startswith("company") else 3
    return [_request(cell, seed + number, number) for number in range(count)]


def _request(cell: Cell, seed: int, number: int) -> GenerationRequest:
    asked: dict[str, Any] = dict(SAMPLING[cell.sampling], seed=seed, max_tokens=150 if cell.form == "tools" else 44)
    dice = random.Random(seed - number)
    words = " ".join(dice.choices(("ab", "ba", "aab", "aa", "b"), k=8))
    biases = {_id(letter): 9.0 + dice.uniform(-4.0, 4.0) for letter in 'ab "'}  # drafts are right now and then
    if cell.sampling == "bias":
        biases |= {_id("c"): 7.0, _id("d"): -100.0, _id(" "): 8.0 + dice.uniform(-1.0, 1.0)}
    if cell.sampling == "filters" and cell.form == "none":
        asked["allowed_token_ids"] = tuple(map(_id, "abc "))
    if cell.state == "n":
        asked["n"] = 3
    if cell.state == "stop":
        asked |= {"stop": ("ab a", 'ab",', "b b", "bb"), "include_stop_str_in_output": bool(number % 2)}
    if cell.state == "bad words":
        banned = [(_id("a"), _id("a")), (_id("b"), _id(" "), _id("b")), (_id("c"),), (_id("b"), _END), (_END,)]
        asked["bad_words_ids"] = tuple(banned[: 3 + number % 3])
    name = f"{cell.sampling}{cell.state.split()[0]}{seed}"
    form = FORMS.get(cell.form)
    return GenerationRequest(
        f"{name}#{number}",
        SamplingParams(logit_bias=tuple(biases.items()), **asked),
        messages=({"role": "user", "content": f"{words} " * 2 + ("" if number % 2 else "a")},),
        tools=(TOOL,) if cell.form == "tools" else None,
        grammar=None if form is None else Grammar(GrammarKind.REGEX, form),
        tool_choice=ToolChoice(ToolMode.REQUIRED) if cell.form == "tools" else ToolChoice(),
        parse=cell.form in ("tools", "reasoning"),
        thinking_budget=9 if cell.form == "reasoning" else None,
    )


def _came_about(cell: Cell, client: Stepped, before: EngineStats, after: EngineStats, answers: Sequence[Told]) -> bool:
    """Whether what a cell's state is about has happened."""
    if cell.state == "hit":
        return after.prefix_hits > before.prefix_hits
    if cell.state == "preempted":
        return after.preemptions > before.preemptions
    if cell.state.startswith("company"):
        return client.most_running >= int(cell.state.split()[1])
    if cell.state == "n":
        return all(len(answer.ends) == 3 for answer in answers) and client.most_running >= 9
    if cell.state == "stop":
        return any(isinstance(reason, str) for answer in answers for _, reason in answer.ends.values())
    if cell.state == "bad words":
        pairs = {pair for answer in answers for said in answer.tokens.values() for pair in pairwise(said)}
        return (_id("a"), _id("b")) in pairs and (_id("a"), _id("a")) not in pairs
    return client.engine.scheduler.options.max_chunk_tokens == _CHUNK


def _difference(after: EngineStats, before: EngineStats) -> EngineStats:
    names = ("drafted_tokens", "accepted_tokens", "preemptions", "prefix_hits", "drafter_failures")
    return replace(after, **{name: getattr(after, name) - getattr(before, name) for name in names})


def _id(letter: str) -> int:
    return len(MARKS) + LETTERS.index(letter)


def _save(family: str, folder: Path, **fields: Any) -> None:
    """A tiny model whose tokens are single letters and the marks of reasoning and calls."""
    tiny.save(family, folder, max_position_embeddings=_LENGTH, **fields)
    spelled = {" ": "Ġ", "\n": "Ċ"}
    words = {word: number for number, word in enumerate((*MARKS, *(spelled.get(one, one) for one in LETTERS)))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": MARKS[1], "pad_token": MARKS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def cells(count: int, seed: int) -> Iterator[Cell]:
    """So many at random; no two are the same while there are others."""
    yield from random.Random(seed).sample(every_cell(), count)


def main() -> None:
    """Tries random cells; ends with the first whose answers differ."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 18
    say = partial(print, flush=True)
    drafted = accepted = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for number, cell in enumerate(cells(count, seed), 1):
            try:
                stats = workshop.check(cell)
            except AssertionError as error:
                failed += 1
                say(str(error)[:2000])
                continue
            drafted, accepted = drafted + stats.drafted_tokens, accepted + stats.accepted_tokens
            if number % 50 == 0:
                say(f"{number} cells: {drafted} drafts, {accepted} of them accepted; {failed} cells failed")
        workshop.close()
    say(f"{count} cells: {drafted} drafts, {accepted} of them accepted; {failed} cells failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
