"""What a router knows of an engine's cache is what the engine itself would find, block by block."""

from __future__ import annotations

import random
from dataclasses import replace

from penstock.cluster.known_prefixes import MOST_BLOCKS, MOST_EXPECTED, KnownPrefixes, PromptNames
from penstock.config.adapters import AdapterUse
from penstock.config.cache_asks import Ask
from penstock.config.sampling import SamplingParams
from penstock.core.request import PUBLIC, EngineRequest
from penstock.engine.loop import Engine
from penstock.startup.prefix_news import telling_prefixes
from penstock.transfer.prefix_names import PrefixNames
from tests.engine.support import null_engine

NAMES = PrefixNames("a seed")
SIZE = 16


class Watched:
    """An engine, and what is known of its cache from its news alone."""

    def __init__(self, blocks: int = 1024) -> None:
        self.engine: Engine = null_engine(num_blocks=blocks)[0]
        self.known = KnownPrefixes()
        self.news = 0
        self._tell = telling_prefixes(self.engine.scheduler.cache, "a seed", self._hear)

    def _hear(self, news: list[int]) -> None:
        self.news += len(news)
        self.known.hear(news)

    def run(self, request: EngineRequest) -> None:
        self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()
            self._tell()

    def found(self, request: EngineRequest) -> int:
        """Tokens of whole blocks that the engine would find."""
        asked = replace(request, request_id="ask", ask=Ask("match"))
        answer = self.engine.answer(asked).answer
        assert answer is not None
        return int(answer["device"]) // SIZE * SIZE

    def expected(self, request: EngineRequest) -> int:
        """The same, as is known from news; the last token of a prompt is always computed."""
        known = self.known.cached(PromptNames(NAMES, request, SIZE, shared=False))
        return min(known, (len(request.prompt_ids) - 1) // SIZE * SIZE)


def asked(name: str, tokens: tuple[int, ...], **given: object) -> EngineRequest:
    return EngineRequest(name, tokens, SamplingParams(max_tokens=2, temperature=0.0), **given)  # type: ignore[arg-type]


def test_owners_and_salts_are_told_apart_as_the_engine_does() -> None:
    watched, common = Watched(), tuple(range(3, 3 + 4 * SIZE))
    kinds: list[dict[str, object]] = [{"owner": "a"}, {"owner": "b"}, {"owner": "a", "cache_salt": "x"}]
    for number, given in enumerate(kinds):
        watched.run(asked(f"r{number}", (*common, *range(number, number + 3 * SIZE)), **given))
        for other, kind in enumerate(kinds):
            probe = asked("probe", (*common, *range(other, other + 3 * SIZE), 1, 2), **kind)
            assert watched.expected(probe) == watched.found(probe)
            assert (watched.found(probe) > 0) == (other <= number)


def test_adapters_have_names_of_their_own() -> None:
    prompt = tuple(range(100))
    one = AdapterUse("digest", "path")
    uses = ((), (one,), (replace(one, weight=2.0),))
    named = [asked("r", prompt, adapters=use) for use in uses]
    names = [frozenset(PromptNames(NAMES, request, SIZE, shared=False).own) for request in named]
    assert len(names[0] | names[1] | names[2]) == 18


def test_behind_a_public_prompt_each_owner_has_its_own() -> None:
    watched, common = Watched(), tuple(range(3, 3 + 4 * SIZE))
    watched.run(asked("public", common, owner=PUBLIC))
    told = tuple(range(9, 9 + 3 * SIZE))
    watched.run(asked("of a", (*common, *told), owner="a"))
    for owner, tokens in (("a", 7 * SIZE), ("b", 4 * SIZE), (PUBLIC, 4 * SIZE)):
        probe = asked("probe", (*common, *told, 1, 2), owner=owner)
        assert watched.expected(probe) == watched.found(probe) == tokens


def test_what_is_evicted_is_not_known_any_more() -> None:
    watched, draw = Watched(blocks=40), random.Random(3)
    heads = [tuple(draw.randrange(90) for _ in range(4 * SIZE)) for _ in range(6)]
    seen = set[int]()
    for number in range(60):
        tokens = (*draw.choice(heads), *(draw.randrange(90) for _ in range(draw.randrange(1, 5 * SIZE))))
        watched.run(asked(f"r{number}", tokens))
        for head in heads:
            probe = asked("probe", (*head, 1, 2, 3))
            assert watched.expected(probe) == watched.found(probe)
            seen.add(watched.found(probe))
    assert len(seen) > 2  # prefixes came and went
    assert len(watched.known) <= 40


def test_flushing_is_told() -> None:
    watched = Watched()
    request = asked("r", tuple(range(100)))
    watched.run(request)
    assert watched.expected(request) == 96
    watched.engine.scheduler.cache.clear()
    watched._tell()
    assert watched.expected(request) == 0 and len(watched.known) == 0


def test_what_is_expected_counts_until_it_is_told_and_is_bounded() -> None:
    known, prompt = KnownPrefixes(), PromptNames(NAMES, asked("r", tuple(range(100))), SIZE, shared=False)
    known.expect(prompt.own)
    assert known.cached(prompt) == 96
    known.hear([-prompt.own[2]])  # it was told to have gone
    assert known.cached(prompt) == 32
    for first in range(1, 10 * MOST_EXPECTED, 1000):
        known.expect(range(first, first + 1000))
    assert len(known) <= MOST_EXPECTED
    known.forget()
    assert len(known) == 0 and known.cached(prompt) == 0


def test_of_a_long_prompt_the_beginning_is_looked_up() -> None:
    long = asked("r", tuple(number % 90 for number in range((MOST_BLOCKS + 50) * SIZE)))
    assert len(PromptNames(NAMES, long, SIZE, shared=False).own) == MOST_BLOCKS
    assert PromptNames(NAMES, long, SIZE, 0, shared=False).own == []
