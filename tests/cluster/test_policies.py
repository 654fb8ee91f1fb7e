"""Who gets a request: each policy by itself, and the usual one on conversations that share prompts."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import pytest

from penstock.cluster.policies import POLICIES, Asked, Seen
from penstock.cluster.router import Load, Router
from penstock.config.data_parallel import ROUTING_POLICIES
from penstock.config.options import ROUTING_SPELLINGS, EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.transfer.prefix_names import PrefixNames

BLOCK = 16
ENGINES = 4
PRICE = 1e-4


def numbers(policy: str, asked: Asked, *engines: Seen) -> list[int]:
    return [engine.number for engine in POLICIES[policy]().order(asked, engines)]


def test_every_name_has_a_policy() -> None:
    assert tuple(POLICIES) == ROUTING_POLICIES
    assert set(ROUTING_SPELLINGS.values()) <= set(ROUTING_POLICIES)
    assert EngineOptions(routing_policy="round_robin").routing_policy == "round-robin"


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_no_engine_is_left_out(policy: str) -> None:
    made = POLICIES[policy]()
    engines = [Seen(number, number / 10, number, 0.0, number, PRICE) for number in (5, 2, 9)]
    for session in range(20):
        order = made.order(Asked(100, session, str(session % 3 or "")), engines)
        assert sorted(engine.number for engine in order) == [2, 5, 9]


def test_cost_weighs_what_waits_against_what_is_cached() -> None:
    asked = Asked(1000)
    cached, idle = Seen(0, 0.01, 1, 0.0, 900, PRICE), Seen(1, 0.0, 0, 0.0, 0, PRICE)
    assert numbers("cost", asked, cached, idle) == [0, 1]
    busy = Seen(0, 1.0, 9, 0.0, 900, PRICE)
    assert numbers("cost", asked, busy, idle) == [1, 0]
    worked = Seen(0, 0.0, 0, 1.0, 100, PRICE)  # more than others, for the sake of a short prefix
    assert numbers("cost", asked, worked, idle) == [1, 0]


def test_cache_aware_follows_the_longest_match_unless_requests_are_uneven() -> None:
    asked = Asked(1000)
    engines = [Seen(0, 0.0, 10, 0.0, 800), Seen(1, 0.0, 2), Seen(2, 0.0, 1, 0.0, 100)]
    assert numbers("cache-aware", asked, *engines)[0] == 0
    assert numbers("cache-aware", asked, Seen(0, 0.0, 40, 0.0, 800), *engines[1:])[0] == 2
    assert numbers("cache-aware", asked, Seen(0, 0.0, 10, 0.0, 200), *engines[1:])[0] == 2


def test_round_robin_takes_turns() -> None:
    made, engines = POLICIES["round-robin"](), [Seen(number) for number in range(3)]
    assert [made.order(Asked(1), engines)[0].number for _ in range(5)] == [0, 1, 2, 0, 1]


def test_power_of_two_takes_the_less_busy_one_of_a_pair() -> None:
    made, engines = POLICIES["power-of-two"](), [Seen(number, seconds=float(number)) for number in range(4)]
    first = Counter(made.order(Asked(1), engines)[0].number for _ in range(400))
    assert first[0] > first[1] > first[2] > first[3] == 0


def test_sessions_and_adapters_stay_where_they_are_when_others_go() -> None:
    engines = [Seen(number) for number in range(5)]
    for policy, asked in (
        ("session", [Asked(10, f"user {number}") for number in range(200)]),
        ("adapter", [Asked(10, "", f"adapter {number}") for number in range(200)]),
    ):
        made = POLICIES[policy]()
        before = [made.order(one, engines)[0].number for one in asked]
        assert min(Counter(before).values()) > 15
        after = [made.order(one, engines[:4])[0].number for one in asked]
        assert [new for old, new in zip(before, after, strict=True) if old != 4] == [old for old in before if old != 4]


def conversations(sessions: int, turns: int, system: int, turn: int) -> list[tuple[str, tuple[int, ...]]]:
    """Prompts of conversations behind a common system prompt, sixteen at a time, in a drawn order."""
    draw = random.Random(1)
    common = [draw.randrange(4000) for _ in range(system)]
    history = [list(common) for _ in range(sessions)]
    left = [turns] * sessions
    waiting, active, found = list(range(sessions)), list[int](), list[tuple[str, tuple[int, ...]]]()
    while waiting or active:
        while waiting and len(active) < 16:
            active.append(waiting.pop(0))
        session = draw.choice(active)
        history[session] += [draw.randrange(4000) for _ in range(draw.randrange(turn // 2, turn * 3 // 2))]
        found.append((f"{session}", tuple(history[session])))
        left[session] -= 1
        if not left[session]:
            active.remove(session)
    return found


@dataclass
class Engine:
    """What an engine of the simulation has: blocks, of which the least recently used go, and work that waits."""

    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    queue: list[float] = field(default_factory=list)
    computed: int = 0
    hits: int = 0

    def take(self, names: list[int], tokens: int, room: int) -> list[int]:
        """Computes a prompt; what it tells of its blocks."""
        found = next((at for at, name in enumerate(names) if name not in self.blocks), len(names))
        news = [name for name in names if name not in self.blocks]
        for name in names:
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        while len(self.blocks) > room:
            news.append(-self.blocks.popitem(last=False)[0])
        cached = min(found * BLOCK, tokens - 1)
        self.hits += cached
        self.computed += tokens - cached
        self.queue.append((tokens - cached) * PRICE)
        return news


def simulated(policy: str, at_once: int, room: int) -> list[Engine]:
    """Engines after all conversations, where so many requests are in flight."""
    router = Router(POLICIES[policy](), PrefixNames("seed"), ENGINES, BLOCK, shared=False)
    engines = [Engine() for _ in range(ENGINES)]
    for number, (session, prompt) in enumerate(conversations(96, 6, 32, 128)):
        request = EngineRequest(str(number), prompt, SamplingParams(max_tokens=1), session=session)
        loads = {
            at: Load(sum(engine.queue), len(engine.queue), PRICE, engine.computed) for at, engine in enumerate(engines)
        }
        route = router.route(request, loads)
        router.took(route.engines[0], request, route)
        router.hear(route.engines[0], engines[route.engines[0]].take(list(route.names), len(prompt), room))
        if sum(len(engine.queue) for engine in engines) > at_once:
            for engine in engines:
                del engine.queue[:1]
    return engines


@pytest.mark.parametrize("at_once", [0, 8, 32])
def test_the_usual_policy_finds_prefixes_and_keeps_loads_even(at_once: int) -> None:
    room = 160  # blocks, which hold what is in use once, and not four times
    plain, usual = simulated("round-robin", at_once, room), simulated("cost", at_once, room)
    hits, computed = (sum(engine.hits for engine in usual), sum(engine.computed for engine in usual))
    assert hits >= 2.5 * sum(engine.hits for engine in plain)
    assert computed <= 0.6 * sum(engine.computed for engine in plain)
    loads = [engine.computed for engine in usual]
    assert max(loads) <= 1.5 * min(loads)
