"""Grammar states of sequences: masks, forced tokens, budgets of reasoning, rewinding."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher

from penstock.config import limits
from penstock.config.constraint import Thinking
from penstock.config.errors import RequestError
from penstock.config.sampling import SamplingParams
from penstock.structured import grammar_compiler, masks
from penstock.structured.grammar_compiler import GrammarCompiler, Vocabulary, compute_mask
from penstock.structured.grammar_state import GrammarState, SlowMasks, Words
from penstock.structured.masks import Masks
from penstock.text.grammar.translate import translate

EOS, ALSO_EOS, BEGIN, END = 0, 1, 2, 3
SPECIAL = ("<eos>", "<also>", "<think>", "</think>")
TEXTS = [*SPECIAL, *map(chr, range(32, 127)), '{"', '":', '",', "name", "yes", "no", "certain", "true"]
SIZE = len(TEXTS) + 40  # rows of logits behind the vocabulary


def encode(text: str) -> list[int]:
    """Longest match first; control tokens are plain text."""
    ids, place = [], 0
    while place < len(text):
        token = max((t for t in range(4, len(TEXTS)) if text.startswith(TEXTS[t], place)), key=lambda t: len(TEXTS[t]))
        ids.append(token)
        place += len(TEXTS[token])
    return ids


def vocabulary() -> Vocabulary:
    def token_bytes(token: int) -> bytes:
        return TEXTS[token].encode() if token < len(TEXTS) else b""

    return Vocabulary(SIZE, token_bytes, encode, frozenset(range(4)), (EOS, ALSO_EOS))


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(vocabulary)
    yield made
    made.close()


def matcher(compiler: GrammarCompiler, kind: str, source: str) -> LLMatcher:
    job = compiler.want(translate(kind, source))
    assert job.done.wait(60)
    outcome = compiler.outcome(job)
    assert isinstance(outcome, LLMatcher), outcome
    return outcome.deep_copy()


def state_of(
    compiler: GrammarCompiler, kind: str, source: str, thinking: Thinking | None = None, **sampling: object
) -> GrammarState:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return GrammarState(matcher(compiler, kind, source) if kind else None, thinking, params, (EOS, ALSO_EOS))


def mask(state: GrammarState, size: int = SIZE) -> Words:
    row = np.zeros((size + 31) // 32, np.uint32)
    source, unready = state.mask_source()
    if source is not None:
        compute_mask(source, row)
    if unready:
        state.finish_mask(row)
    return row


def allowed(state: GrammarState, size: int = SIZE) -> set[int]:
    bits = np.unpackbits(mask(state, size).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:size]).tolist())


def text(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in tokens if token not in (EOS, ALSO_EOS))


def walk(state: GrammarState, seed: int = 0, most: int = 500) -> list[int]:
    """Random tokens that the masks allow, up to the end."""
    chance, tokens = random.Random(seed), list[int]()
    while not tokens or tokens[-1] not in (EOS, ALSO_EOS):
        assert len(tokens) < most
        token = chance.choice(sorted(allowed(state)))
        tokens += (token, *state.accept([token]))
    return tokens


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["yes", "no"]}, "other": {"type": "boolean"}},
        "required": ["name", "other"],
        "additionalProperties": False,
    }
)


def test_forced_tokens_follow_what_was_sampled_to_the_very_end(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, "json_schema", SCHEMA)
    assert allowed(state) == {TEXTS.index('{"')}
    forced = state.accept([TEXTS.index('{"')])
    assert text(forced) == 'name":"'
    forced = state.accept([TEXTS.index("yes")])
    assert text(forced) == '","other":'
    assert text(state.accept([TEXTS.index("f")])) == "alse}"
    assert state.accept([]) == ()


def test_the_end_is_forced_when_nothing_else_is_allowed(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, "choice", '["yes", "no"]')
    assert state.accept([TEXTS.index("no")]) == (EOS,)


def test_with_logprobs_the_same_tokens_come_one_by_one(compiler: GrammarCompiler) -> None:
    for seed in range(20):
        tokens = walk(state_of(compiler, "json_schema", SCHEMA), seed)
        one_by_one = state_of(compiler, "json_schema", SCHEMA, logprobs=0)
        for token in tokens:
            assert token in allowed(one_by_one)
            assert one_by_one.accept([token]) == ()
    json.loads(text(tokens))


@pytest.mark.parametrize("first", [{"const": "b"}, {"enum": ["a", "b"]}], ids=["at first", "after a choice"])
def test_long_forced_texts_are_found_and_taken_in_parts(first: object) -> None:
    wanted, asked = ["b", "é" * 700 + "lorem ipsum " * 700], []

    def encode_bytes(text: str) -> list[int]:
        asked.append(len(text))
        return [4 + byte for byte in text.encode()]

    def token_bytes(token: int) -> bytes:
        return bytes([token - 4]) if 4 <= token < 260 else b""

    compiler = GrammarCompiler(lambda: Vocabulary(300, token_bytes, encode_bytes, frozenset(range(4)), (EOS,)))
    schema = json.dumps({"type": "array", "prefixItems": [first, {"const": wanted[1]}], "minItems": 2, "items": False})
    state = state_of(compiler, "json_schema", schema, max_tokens=100_000)
    tokens: list[int] = []
    while tokens[-1:] != [EOS]:
        token = max(allowed(state, 300))
        forced = state.accept([token])
        assert len(forced) < 2048
        tokens += [token, *forced]
    assert json.loads(bytes(token - 4 for token in tokens[:-1])) == wanted
    assert max(asked) <= 1025
    brief = state_of(compiler, "json_schema", schema, max_tokens=20)
    before = len(asked)
    while brief.length < 20:
        brief.accept([max(allowed(brief, 300))])
    assert len(asked) - before <= 5, "no more is looked for than max_tokens lets come"
    compiler.close()


def test_what_is_looked_for_later_is_the_same(compiler: GrammarCompiler) -> None:
    waited = 0
    for seed in range(20):
        chance, now, later = random.Random(seed), state_of(compiler, "json_schema", SCHEMA), list[int]()
        state, tokens = state_of(compiler, "json_schema", SCHEMA), list[int]()
        while tokens[-1:] != [EOS]:
            token = chance.choice(sorted(allowed(now)))
            tokens += (token, *now.accept([token]))
            while len(later) < len(tokens):
                assert tokens[len(later)] in allowed(state)
                waits = chance.random() < 0.5
                later.append(tokens[len(later)])
                later += (following := state.accept(later[-1:], defer=waits))
                waited += waits and not following
                if state.deferred and chance.random() < 0.5:
                    state.rewind(1)
                    del later[-1]
        assert later == tokens
    assert waited > 20


def test_a_warm_compiler_has_its_vocabulary_before_it_is_asked() -> None:
    loaded = threading.Event()

    def load() -> Vocabulary:
        loaded.set()
        return vocabulary()

    compiler = GrammarCompiler(load)
    compiler.warm()
    assert loaded.wait(60)
    assert allowed(state_of(compiler, "choice", '["no"]')) == {TEXTS.index("no")}
    compiler.close()


def test_engines_that_start_at_once_leave_the_size_of_stacks_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    original, before = threading.stack_size, threading.stack_size()

    def slowly(size: int) -> int:
        was = original(size)
        time.sleep(0.01)  # so that the others come in between
        return was

    monkeypatch.setattr(threading, "stack_size", slowly)
    compilers = [GrammarCompiler(vocabulary) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(GrammarCompiler.warm, compilers))
    assert original() == before
    for compiler in compilers:
        compiler.close()


def test_a_matcher_in_place_of_a_failed_one_has_time_to_wait_and_to_take_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go, compile_grammar = threading.Event(), grammar_compiler.compile_grammar
    monkeypatch.setattr(grammar_compiler, "compile_grammar", lambda *given: may_go.wait(60) and compile_grammar(*given))
    monkeypatch.setattr(limits, "GRAMMAR_QUEUE_S", 0.0)
    monkeypatch.setattr(limits, "GRAMMAR_TIMEOUT_S", 0.0)
    compiler = GrammarCompiler(vocabulary, threads=1)
    first = compiler.want(translate("regex", "a+"))
    taken = (TEXTS.index("a"),) * 600
    renewed = [compiler.renew(first, taken), compiler.renew(first, ())]
    time.sleep(0.01)
    assert [compiler.outcome(job) for job in renewed] == [None, None], "they wait for as long as it takes"
    monkeypatch.setattr(limits, "GRAMMAR_TIMEOUT_S", 10.0)
    assert renewed[0].limit_s == 10 + 600 * limits.GRAMMAR_REPLAY_S
    may_go.set()
    for job in renewed:
        assert job.done.wait(60)
        assert isinstance(compiler.outcome(job), LLMatcher)
    monkeypatch.setattr(limits, "GRAMMAR_TIMEOUT_S", 0.0)
    late = grammar_compiler.Compilation("", time.monotonic() - 10, began=time.monotonic() - 10, tokens=taken)
    assert compiler.outcome(late) is None, "60 s for 600 tokens"
    late.began = time.monotonic() - 61
    assert isinstance(compiler.outcome(late), RequestError)
    compiler.close()


def test_what_was_compiled_too_late_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, compile_grammar = threading.Event(), grammar_compiler.compile_grammar
    monkeypatch.setattr(grammar_compiler, "compile_grammar", lambda *given: slow.wait(60) and compile_grammar(*given))
    monkeypatch.setattr(limits, "GRAMMAR_TIMEOUT_S", 0.001)
    compiler = GrammarCompiler(vocabulary)
    job = compiler.want(translate("regex", "a+"))
    while (outcome := compiler.outcome(job)) is None:
        compiler.wait(0.01)
    assert isinstance(outcome, RequestError)
    slow.set()
    assert job.done.wait(60)
    again = compiler.want(translate("regex", "a+"))
    assert isinstance(compiler.outcome(again), LLMatcher)
    compiler.close()


@pytest.mark.parametrize(
    "said",
    [
        "panic: attempt to subtract with overflow",
        "\n  panic: index out of bounds\n stack backtrace:\n  0: std::rt::begin_unwind",
        "thread 'main' panicked at src/earley/lexerspec.rs:120:9:\nnote: run with `RUST_BACKTRACE=1`",
    ],
)
def test_what_a_broken_compiler_says_is_kept_from_clients(said: str) -> None:
    told = grammar_compiler.explained(said)
    assert "write it with fewer rules" in told
    assert not any(word in told for word in ("panic", "backtrace", ".rs", "BACKTRACE"))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("lexer error: too many expressions constructed\n<non-verbose/>", "smaller counts"),
        (
            "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate",
            '{"coerce_one_of": true}',
        ),
        ("Unable to determine if regex is empty: (And (Regex /a/) (Regex /b/))", "write one"),
        ('Unimplemented keys: ["not"]\n<non-verbose/>', 'Unimplemented keys: ["not"]'),
    ],
)
def test_what_a_compiler_says_of_its_own_parts_becomes_a_remedy(said: str, told: str) -> None:
    message = grammar_compiler.explained(said)
    assert told in message
    assert not any(word in message for word in ("verbose", "Regex /", "Enable 'coerce", "expressions constructed"))


def test_messages_about_a_schema_stay_though_it_speaks_of_panic() -> None:
    assert "unknown keys: panic" in grammar_compiler.explained("unknown keys: panic")


def test_a_panic_of_native_code_refuses_its_grammar_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panics(*_: object) -> LLMatcher:
        raise PanicException("index out of bounds: the len is 3")

    compiler = GrammarCompiler(vocabulary, threads=1)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_compiler, "compile_grammar", panics)
        broken = compiler.want(translate("regex", "a+"))
        assert broken.done.wait(60)
    refusal = compiler.outcome(broken)
    assert isinstance(refusal, RequestError)
    assert refusal.status == 400
    assert "fewer rules" in str(refusal)
    assert allowed(state_of(compiler, "regex", "b")) == {TEXTS.index("b")}  # its only thread lives
    compiler.close()


def test_the_masks_of_forced_tokens_allow_one(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, "choice", '["certainly yes"]', logprobs=0)
    tokens = walk(state)
    again = state_of(compiler, "choice", '["certainly yes"]', logprobs=0)
    for token in tokens:
        assert allowed(again) == {token}
        again.accept([token])
    assert tokens == [*encode("certainly yes"), EOS]


def test_rows_behind_the_vocabulary_are_never_allowed(compiler: GrammarCompiler) -> None:
    assert max(allowed(state_of(compiler, "regex", "(?s:.)*"))) < len(TEXTS)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_grammars_end_is_the_end_whatever_min_tokens_and_bans_say(
    compiler: GrammarCompiler, logprobs: int | None
) -> None:
    for rest in ({"min_tokens": 50}, {"allowed_token_ids": tuple(encode("no"))}, {"ignore_eos": True}):
        state = state_of(compiler, "choice", '["no"]', logprobs=logprobs, **rest)
        assert state.accept([TEXTS.index("no")]) == (EOS,) or allowed(state) == {EOS}


def test_ignore_eos_goes_on_where_the_grammar_does(compiler: GrammarCompiler) -> None:
    going = state_of(compiler, "regex", "a+", ignore_eos=True)
    going.accept([TEXTS.index("a")])
    assert allowed(going) == {TEXTS.index("a")}
    ending = state_of(compiler, "regex", "a+")
    ending.accept([TEXTS.index("a")])
    assert allowed(ending) == {TEXTS.index("a"), EOS, ALSO_EOS}


def test_reasoning_is_free_but_cannot_end_the_answer(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, "choice", '["yes", "no"]', Thinking((END,)))
    assert allowed(state) >= set(range(len(TEXTS))) - {EOS, ALSO_EOS}
    assert not allowed(state) & {EOS, ALSO_EOS}
    state.accept(encode("let me see"))
    state.accept([END])
    assert allowed(state) == {TEXTS.index(t) for t in ("yes", "no", "y", "n")}


def test_a_spent_budget_forces_the_end_of_reasoning_and_what_the_grammar_forces(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, "choice", '["certain", "certainty"]', Thinking((END, 5), budget=3))
    assert state.accept([10]) == () == state.accept([11])
    assert state.accept([12]) == (END, 5)[:2] + forced_at_first(compiler)
    alone = GrammarState(None, Thinking((END,), budget=0), SamplingParams(), ())
    assert not alone.unconstrained and allowed(alone) == {END}
    alone.accept([END])
    assert alone.unconstrained


def forced_at_first(compiler: GrammarCompiler) -> tuple[int, ...]:
    """What is forced at the beginning of the grammar of the test above."""
    return tuple(matcher(compiler, "choice", '["certain", "certainty"]').compute_ff_tokens())


def test_reasoning_that_is_ended_ends_behind_the_next_token() -> None:
    state = GrammarState(None, Thinking((7, 8), budget=1000), SamplingParams(), ())
    assert state.accept([10]) == () == state.accept([11])
    state.end_reasoning()
    assert allowed(state) == set(range(SIZE))  # a mask may be in flight already
    assert state.accept([12]) == (7, 8)
    assert state.unconstrained
    state.end_reasoning()  # there is no more of it
    assert state.accept([13]) == () and state.unconstrained


def test_an_end_half_said_when_the_budget_is_spent_is_completed() -> None:
    state = GrammarState(None, Thinking((7, 8, 9), budget=3), SamplingParams(), ())
    state.accept([5])
    state.accept([7])
    assert state.accept([8]) == (9,)
    assert state.unconstrained


def test_owners_have_grammars_of_their_own(compiler: GrammarCompiler) -> None:
    """What is compiled already would tell one owner what another has sent."""
    source = translate("regex", "(owner)+")
    mine = compiler.want(source, "one")
    assert compiler.want(source, "one") is mine and compiler.want(source, "two") is not mine
    assert compiler.want(source) is not mine


def test_a_model_may_think_or_answer_at_once(compiler: GrammarCompiler) -> None:
    thinking = Thinking((END,), begin_ids=(BEGIN,), budget=2)
    state = state_of(compiler, "choice", '["yes"]', thinking)
    assert allowed(state) == {BEGIN, TEXTS.index("yes")}
    assert state.accept([TEXTS.index("yes")]) == (EOS,)
    state = state_of(compiler, "choice", '["yes"]', thinking)
    assert state.accept([BEGIN]) == ()
    assert state.accept(encode("a")) == ()
    assert state.accept(encode("b")) == (END, TEXTS.index("yes"), EOS)


@pytest.mark.parametrize(
    "thinking", [None, Thinking((END,)), Thinking((END,), (BEGIN,), 4), Thinking((END,), (BEGIN,))]
)
def test_rewinding_leads_to_the_same_masks(compiler: GrammarCompiler, thinking: Thinking | None) -> None:
    chance = random.Random(1)
    for seed in range(8):
        state = state_of(compiler, "json_schema", SCHEMA, thinking, logprobs=0)
        tokens: list[int] = []
        before = [allowed(state)]
        pick = random.Random(seed)
        while not (tokens and tokens[-1] in (EOS, ALSO_EOS)) and len(tokens) < 60:
            options = allowed(state)
            token = END if END in options and pick.random() < 0.3 else pick.choice(sorted(options))
            state.accept([token])
            tokens.append(token)
            before.append(allowed(state))
        for _ in range(6):
            count = chance.randint(0, len(tokens))
            state.rewind(count)
            assert allowed(state) == before[len(tokens) - count]
            for place in range(len(tokens) - count, len(tokens)):
                state.accept([tokens[place]])
                assert allowed(state) == before[place + 1]
        with pytest.raises(ValueError, match="cannot be taken back"):
            state.rewind(len(tokens) + 1)


def test_a_token_outside_the_grammar_is_an_error_of_the_sequence(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, "choice", '["yes"]')
    with pytest.raises(RequestError, match="left its grammar"):
        state.accept([TEXTS.index("x")])


def test_a_grammar_whose_masks_take_too_long_ends_its_own_sequence_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(masks, "thread_time", lambda: next(clock))  # each mask takes a second
    slow = state_of(compiler, "regex", "a+")
    with ThreadPoolExecutor(1) as pool:
        for _ in range(17):
            Masks((SIZE + 31) // 32, {0: slow}, pool, timed=True).of([0])
            slow.accept([TEXTS.index("a")])
        assert slow.slow_masks.count == 16  # the first token is forced
        Masks((SIZE + 31) // 32, {0: slow}, pool, timed=True).of([0])
        with pytest.raises(RequestError, match="too complex"):
            slow.accept([TEXTS.index("a")])


def test_slow_masks_are_counted_for_all_sequences_of_a_request_and_where_they_are_made_at_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(masks, "thread_time", lambda: next(clock))  # each mask takes a second
    made, shared = matcher(compiler, "regex", "[ab]+"), SlowMasks()
    sequences = {row: GrammarState(made.deep_copy(), None, SamplingParams(), (EOS,), shared) for row in range(3)}
    for _ in range(6):
        Masks((SIZE + 31) // 32, sequences, timed=True).of([0, 1, 2])
    assert {sequence.slow_masks.count for sequence in sequences.values()} == {18}
    for sequence in sequences.values():
        with pytest.raises(RequestError, match="too complex"):
            sequence.accept([TEXTS.index("a")])


def test_masks_come_in_the_order_asked_for_with_all_ones_for_free_rows(compiler: GrammarCompiler) -> None:
    state = {row: state_of(compiler, "choice", json.dumps([word])) for row, word in ((4, "yes"), (2, "no"))}
    with ThreadPoolExecutor(1) as pool:
        for how in ((), (pool,), (pool, LLExecutor())):
            made = Masks((SIZE + 31) // 32, state, *how)
            got = made.of([2, 7, 4])
            assert (got[1] == 0xFFFFFFFF).all()
            for row, place in ((2, 0), (4, 2)):
                assert (got[place] == mask(state[row])).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_masks_behind_drafts_are_those_of_later_steps(
    compiler: GrammarCompiler, seed: int, thinks: bool, pooled: bool
) -> None:
    """Of several sequences at once; drafts change no state, whether they are right, leave the grammar or go too far."""
    thinking = Thinking((END,), (BEGIN,), 3) if thinks else None
    chance, words, ends = random.Random(seed), (SIZE + 31) // 32, (EOS, ALSO_EOS)

    def new(slot: int, said: Sequence[int] = ()) -> GrammarState:
        state = state_of(compiler, "json_schema", SCHEMA, thinking, logprobs=(None, 0)[slot % 2])
        state.replay(said)
        return state

    states, said = {slot: new(slot) for slot in range(3)}, [list[int](), list[int](), list[int]()]
    with ThreadPoolExecutor(1) as pool:
        while states:
            drafts: dict[int, tuple[int, ...]] = {}
            expected: list[tuple[int, Words]] = []
            for slot in states:
                tokens, state = list[int](), new(slot, said[slot])
                expected.append((slot, mask(state)))
                for _ in range(chance.randrange(4)):
                    tokens.append(chance.choice(sorted(allowed(state))))
                    if tokens[-1] in ends:
                        break
                    state.replay(tokens[-1:])
                    expected.append((slot, mask(state)))
                drafts[slot] = (*tokens, *(chance.randrange(SIZE) for _ in range(chance.randrange(2))))
            together = LLExecutor() if pooled else None
            made = Masks(words, states, pool if pooled else None, together, drafts=drafts, timed=bool(seed % 2))
            named = [slot for slot in sorted(states, reverse=True) for _ in range(len(drafts[slot]) + 1)]
            found, seen = made.of(named), dict.fromkeys(states, 0)
            for slot, one in expected:
                assert (found[named.index(slot) + seen[slot]] == one).all()
                seen[slot] += 1
            for slot, state in list(states.items()):
                token = chance.choice(sorted(allowed(state)))
                said[slot] += (token, *state.accept([token]))
                assert not state.broken
                if said[slot][-1] in ends:
                    del states[slot]
    for tokens in said:
        answer = tokens[tokens.index(END) + 1 :] if END in tokens else tokens
        json.loads(text(answer))
