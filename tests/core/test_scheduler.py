"""The scheduler's rules, each on the null runner, whose answers depend on every cache slot being right."""

from __future__ import annotations

import pytest

from penstock.config.constraint import Thinking
from penstock.config.errors import ConfigError, ContextLengthError, RequestError
from penstock.core.policies.need import recompute_cost
from penstock.core.policies.order import Admission
from penstock.core.protocol import CacheOpKind, StepResult
from penstock.core.request import FinishReason
from tests.core.harness import Collector, expected_tokens, null_engine, request, run

PROMPT = list(range(1, 31))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_answers_do_not_depend_on_chunks_or_depth(budget: int, depth: int) -> None:
    engine = null_engine(budget=budget, depth=depth)
    asked = [request(f"r{i}", PROMPT[: 5 + 6 * i], temperature=1.0, seed=i, max_tokens=9 + i) for i in range(4)]
    collector = run(engine, *asked)
    for one in asked:
        assert collector.tokens[one.request_id, 0] == expected_tokens(one)
        assert collector.finished[one.request_id, 0] is FinishReason.LENGTH


def test_stop_token_ends_the_sequence_and_is_its_last_token() -> None:
    for depth in (0, 1):
        asked = request("a", PROMPT, max_tokens=40, stop_ids=tuple(range(0, 50, 5)))
        collector = run(null_engine(depth=depth), asked)
        assert collector.tokens["a", 0] == expected_tokens(asked)
        assert collector.finished["a", 0] is FinishReason.STOP


def test_min_tokens_defers_stop_tokens() -> None:
    asked = request("a", PROMPT, max_tokens=40, min_tokens=12, stop_ids=tuple(range(0, 50, 2)))
    collector = run(null_engine(), asked)
    assert len(collector.tokens["a", 0]) > 12
    assert collector.tokens["a", 0] == expected_tokens(asked)


def test_decoding_rows_go_on_while_a_long_prompt_is_chunked() -> None:
    engine = null_engine(budget=8, blocks=128)
    engine.add(request("short", [1, 2, 3], max_tokens=30))
    engine.step()
    engine.add(request("long", [t % 50 for t in range(100)], max_tokens=2))
    for _ in range(10):
        outputs = engine.step()
        assert any(o.request_id == "short" and o.tokens for o in outputs), "a decoding row was starved"
    assert not any(o.request_id == "long" for o in outputs)
    run(engine)


def test_second_request_hits_all_but_the_last_prompt_token() -> None:
    engine = null_engine()
    run(engine, request("a", PROMPT))
    assert run(engine, request("b", PROMPT)).cached("b") == len(PROMPT) - 1
    assert engine.stats().prefix_hits == len(PROMPT) - 1


def test_hits_are_exact_to_the_token_and_copy_the_partial_block() -> None:
    engine = null_engine(block_size=8)
    run(engine, request("a", PROMPT))
    changed = [*PROMPT[:21], 49, 48, 47]
    engine.add(request("b", changed))
    plan = engine.scheduler.plan()
    assert plan is not None
    assert [(op.kind, op.num_tokens) for op in plan.cache_ops] == [(CacheOpKind.COPY, 5)]
    assert plan.scheduled[0].start == 21


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    engine = null_engine()
    answer = run(engine, first := request("a", PROMPT, max_tokens=12)).tokens["a", 0]
    turn = run(engine, request("b", [*first.prompt_ids, *answer, 7, 7])).cached("b")
    assert turn == len(PROMPT) + len(answer) - 1  # the last token's entries were never computed


def test_salts_and_disabled_caching_share_nothing() -> None:
    engine = null_engine()
    run(engine, request("a", PROMPT, cache_salt="x"))
    assert run(engine, request("b", PROMPT, cache_salt="y")).cached("b") == 0
    engine = null_engine(caching=False)
    run(engine, request("a", PROMPT))
    assert run(engine, request("b", PROMPT)).cached("b") == 0
    assert engine.stats().blocks_cached == 0


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_of_a_request_compute_the_prompt_once(caching: bool) -> None:
    engine = null_engine(caching=caching, blocks=128)
    asked = request("a", PROMPT, n=5, temperature=1.0, seed=3)
    collector = run(engine, asked)
    for sequence in range(5):
        assert collector.tokens["a", sequence] == expected_tokens(asked, sequence)
        assert collector.cached("a", sequence) == (0 if sequence == 0 else len(PROMPT) - 1)
    assert len({tuple(collector.tokens["a", sequence]) for sequence in range(5)}) > 1


def test_a_prefix_in_flight_is_waited_for() -> None:
    engine = null_engine(budget=40)
    collector = run(engine, request("a", PROMPT), request("b", [*PROMPT[:26], 40, 41]))
    assert collector.cached("a") == 0
    assert collector.cached("b") >= 24  # whole blocks of the common 26 tokens
    assert engine.scheduler.ledger.counters.held_back["prefix_in_flight"] > 0


def test_waiting_for_a_prefix_ends_when_its_owner_is_cancelled() -> None:
    engine = null_engine(budget=4)
    engine.add(request("a", PROMPT))
    engine.add(asked := request("b", PROMPT))
    engine.step()
    engine.cancel("a")
    collector = run(engine)
    assert collector.tokens["b", 0] == expected_tokens(asked)
    assert collector.cached("b") == 4  # what the owner had computed


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 9, 3)])
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_resume_with_the_same_answer(windows: tuple[int | None, ...], depth: int) -> None:
    engine = null_engine(windows, blocks=16, rows=6, depth=depth)
    asked = [request(f"r{i}", PROMPT[i : i + 12], temperature=1.0, seed=i, max_tokens=40) for i in range(6)]
    collector = run(engine, *asked)
    for one in asked:
        assert collector.tokens[one.request_id, 0] == expected_tokens(one)
    if None in windows:
        assert engine.stats().preemptions > 0
        assert max(output.preemptions for output in collector.outputs) > 0


def test_the_oldest_is_never_preempted_and_the_cheapest_goes_first() -> None:
    engine = null_engine(blocks=18, rows=3)  # 17 blocks of 4
    engine.add(request("old", [1] * 20, max_tokens=30))
    engine.add(request("dear", [2] * 24, max_tokens=30))
    engine.add(request("cheap", [3] * 8, max_tokens=30))
    preempted: list[str] = []
    while engine.has_work and not preempted:
        engine.step()
        preempted = [b.request.request_id for b in engine.scheduler.waiting if b.preemptions]
    assert preempted == ["cheap"]
    assert all(output.preemptions == 0 for output in run(engine).outputs if output.request_id == "old")


def test_priority_policy_orders_and_preempts() -> None:
    engine = null_engine(rows=1, policy="priority")
    collector = run(engine, request("late", PROMPT, priority=5), request("soon", [9, 9], priority=-1))
    assert next(iter(collector.finished)) == ("soon", 0)
    with pytest.raises(ConfigError, match="fcfs, priority"):
        null_engine(policy="random")


def test_a_gate_of_ones_own_holds_admission() -> None:
    class TwoAtMost:
        name, passable, until_release = "two_at_most", False, False

        def holds(self, admission: Admission) -> bool:
            return admission.free_slots <= 6

    engine = null_engine(rows=8, gates=[TwoAtMost()])
    for i in range(5):
        engine.add(request(f"r{i}", [i + 1]))
    engine.step()
    assert engine.stats().running == 2
    assert len(run(engine).finished) == 5


@pytest.mark.parametrize(("held", "together"), [(1, False), (2, True), (6, True)])
def test_rows_that_no_step_is_planned_ahead_for(held: int, together: bool) -> None:
    """Among few of them the others are planned ahead; more than a quarter are waited for, so that none lags behind."""
    engine = null_engine(depth=1)
    ahead = []
    for n in range(6):
        thinking = Thinking((5, 6), budget=100) if n < held else None
        engine.add(request(f"{n}", (n + 1, 2, 3), max_tokens=12, thinking=thinking))
    tokens = dict.fromkeys("012345", 0)
    while min(tokens.values()) < 5:
        for output in engine.step():
            tokens[output.request_id] += len(output.tokens)
        ahead.append(engine.scheduler.outstanding)
    assert (max(ahead) == 0) is together
    assert (tokens["0"] == tokens["5"]) is together and tokens["5"] in ((5,) if together else (8, 9, 10))
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("depth", [0, 1])
def test_cancellation_frees_within_one_step(depth: int) -> None:
    engine = null_engine(depth=depth)
    for i in range(4):
        engine.add(request(f"r{i}", [*PROMPT, i], max_tokens=100))
    for _ in range(3):
        engine.step()
    for i in range(4):
        engine.cancel(f"r{i}")
        engine.scheduler.check_integrity()
    outputs = engine.step()
    assert {o.request_id for o in outputs if o.finish_reason is FinishReason.CANCELLED} == {f"r{i}" for i in range(4)}
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.cancelled) == (0, 0, 0, 4)
    assert not engine.has_work
    engine.cancel("nobody")


def test_what_can_never_fit_is_refused_at_admission() -> None:
    engine = null_engine(blocks=9, max_model_len=100)
    with pytest.raises(ContextLengthError, match=r"30 tokens and 80 more .* 110 in all.* 100"):
        engine.add(request("a", PROMPT, max_tokens=80))
    with pytest.raises(RequestError, match="KV cache holds 32"):
        engine.add(request("a", PROMPT, max_tokens=10))
    with pytest.raises(RequestError, match="empty"):
        engine.add(request("a", []))
    engine.add(request("a", PROMPT, max_tokens=3))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", PROMPT, max_tokens=3))
    assert len(run(engine).tokens["a", 0]) == 3


def test_a_sliding_window_serves_prompts_longer_than_its_pool() -> None:
    engine = null_engine((6,), blocks=12, budget=16)
    asked = request("a", [t % 50 for t in range(200)], max_tokens=20)
    assert run(engine, asked).tokens["a", 0] == expected_tokens(asked)


def test_window_evicted_prefixes_are_no_hits() -> None:
    engine = null_engine((None, 6), blocks=(80, 14), budget=16, max_model_len=512)
    run(engine, request("a", [t % 50 for t in range(100)], max_tokens=2))
    collector = run(engine, asked := request("b", [t % 50 for t in range(40)], max_tokens=4))
    assert collector.tokens["b", 0] == expected_tokens(asked)
    assert engine.scheduler.ledger.counters.miss_reasons["window_evicted"] == 1


def test_every_miss_has_a_reason() -> None:
    engine = null_engine(blocks=20)
    run(engine, request("a", PROMPT))
    run(engine, request("b", [*PROMPT[:15], 0, 0]))
    for i in range(6):
        run(engine, request(f"fill{i}", [40 + i] * 40))
    run(engine, request("again", PROMPT))
    reasons = engine.scheduler.ledger.counters.miss_reasons
    assert reasons["diverged"] >= 1 and reasons["evicted"] >= 1 and reasons["first_seen"] >= 1


def test_prompt_logprobs_compute_the_whole_prompt_even_if_cached() -> None:
    engine = null_engine(budget=7)
    run(engine, request("a", PROMPT))
    collector = run(engine, request("b", PROMPT, prompt_logprobs=0, n=2, temperature=1.0))
    assert collector.cached("b") == 0
    scored = [entry.token for output in collector.outputs for entry in output.prompt_logprobs]
    assert scored == PROMPT[1:]


def test_prompt_logprobs_come_once_also_after_preemption() -> None:
    engine = null_engine(budget=7)
    collector = Collector()
    engine.add(request("a", PROMPT, prompt_logprobs=0, max_tokens=10))
    for _ in range(6):
        collector.take(engine.step())
    assert engine.scheduler.preempt("a") == 1
    while engine.has_work:
        collector.take(engine.step())
    assert [entry.token for output in collector.outputs for entry in output.prompt_logprobs] == PROMPT[1:]
    engine = null_engine(blocks=18, rows=3)
    asked = [request(f"r{i}", [i * 3 + 1, 2] * 8, prompt_logprobs=0, max_tokens=30) for i in range(3)]
    collector = run(engine, *asked)
    assert engine.stats().preemptions > 0
    for one in asked:
        outputs = [output for output in collector.outputs if output.request_id == one.request_id]
        assert [entry.token for output in outputs for entry in output.prompt_logprobs] == list(one.prompt_ids[1:])


def test_equal_cached_prompts_are_admitted_in_one_step() -> None:
    engine = null_engine(blocks=400, rows=32, budget=512)
    run(engine, request("warm", PROMPT))
    for i in range(16):
        engine.add(request(f"r{i}", PROMPT, temperature=1.0, seed=i))
    engine.step()
    assert engine.stats().running == 16
    run(engine)


def test_decoding_rows_reserve_their_window_and_not_a_whole_chunk_more() -> None:
    engine = null_engine((32,), blocks=1 + 8 * 10 + 16, rows=8, budget=64, max_model_len=512, caching=False)
    for i in range(8):
        engine.add(request(f"r{i}", [(i * 31 + j * 7) % 50 for j in range(120)], max_tokens=60))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().running)
    assert most == 8
    assert engine.stats().preemptions == 0


def test_equal_sequences_over_a_sliding_window_hold_no_more_than_their_windows() -> None:
    engine = null_engine((6,), blocks=40, budget=16, max_model_len=1024)
    engine.add(asked := request("a", list(range(1, 13)), n=3, max_tokens=300))
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
        assert engine.stats().blocks_used <= 3 * engine.scheduler.cache.groups[0].peak_blocks(312, 16)
        engine.scheduler.check_integrity()
    assert engine.stats().preemptions == 0
    assert all(collector.tokens["a", sequence] == expected_tokens(asked, sequence) for sequence in range(3))


def test_a_failed_row_leaves_nothing_for_others_to_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine()
    original = engine.runner.sample

    def failing(step: int, masks: object = None) -> StepResult:
        result = original(step, masks)
        return result._replace(results=tuple(row._replace(tokens=(), error="not finite") for row in result.results))

    monkeypatch.setattr(engine.runner, "sample", failing)
    assert run(engine, request("a", PROMPT)).finished["a", 0] is FinishReason.ERROR
    monkeypatch.setattr(engine.runner, "sample", original)
    assert run(engine, request("b", PROMPT)).cached("b") == 0


def test_an_idle_engine_has_no_step_outstanding_and_no_block_in_use() -> None:
    engine = null_engine(depth=1)
    run(engine, request("a", PROMPT, max_tokens=40, stop_ids=tuple(range(0, 50, 5))))
    assert engine.scheduler.outstanding == 0
    assert engine.stats().blocks_used == 0


def test_the_context_costs_more_than_a_window_when_a_victim_is_chosen() -> None:
    for windows in ((None, 6), (6, None)):
        engine = null_engine(windows, blocks=200, rows=4, budget=256, max_model_len=512)
        engine.add(request("long", [7] * 200, max_tokens=50))
        engine.add(request("short", [8] * 20, max_tokens=50))
        for _ in range(4):
            engine.step()
        costs = {b.request.request_id: recompute_cost(b, engine.scheduler.cache) for b in engine.scheduler.running}
        assert costs["long"] >= 200 > costs["short"] >= 20


def test_forced_tokens_are_known_tokens_of_the_next_step() -> None:
    engine = null_engine()
    scheduler, runner = engine.scheduler, engine.runner
    engine.add(request("a", PROMPT, max_tokens=6))
    tokens: list[int] = []
    spans: list[int] = []
    while (plan := scheduler.plan()) is not None:
        spans.append(len(plan.scheduled[0].tokens))
        runner.submit(plan)
        first = plan.step == 0
        scheduler.commit(runner.sample(plan.step), {plan.scheduled[0].slot: (41, 42, 43)} if first else {})
        tokens += [token for output in scheduler.take_outputs() for token in output.tokens]
        scheduler.check_integrity()
    assert spans == [len(PROMPT), 4, 1]  # the sampled and the three forced tokens are computed in one step
    alone = expected_tokens(request("b", [*PROMPT, *tokens[:4]], max_tokens=2))
    assert tokens == [*expected_tokens(request("c", PROMPT, max_tokens=1)), 41, 42, 43, *alone]

    engine = null_engine(depth=1)
    engine.add(request("a", PROMPT, max_tokens=6))
    for _ in range(2):
        engine.runner.submit(plan := engine.scheduler.plan())
    with pytest.raises(ValueError, match="forced tokens and a step in flight"):
        engine.scheduler.commit(engine.runner.sample(0), {plan.scheduled[0].slot: (41,)})


def test_a_step_that_fails_ends_only_the_requests_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(rows=2)
    for i in range(4):
        engine.add(request(f"r{i}", [i + 1, 5]))
    original = engine.runner.sample
    monkeypatch.setattr(engine.runner, "sample", lambda *_: 1 / 0)
    failed = engine.step()
    assert {o.request_id for o in failed if o.finish_reason is FinishReason.ERROR} == {"r0", "r1"}
    monkeypatch.setattr(engine.runner, "sample", original)
    collector = run(engine)
    assert {key[0] for key, reason in collector.finished.items() if reason is FinishReason.LENGTH} == {"r2", "r3"}
    assert engine.stats().failed == 2
