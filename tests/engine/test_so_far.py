"""A request that goes on in another engine gives what it would have given in the first, to the bit."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.so_far import SoFar
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.work_record import WorkRecord, read_record
from penstock.text.grammar.translate import translate
from tests.engine.support import null_engine, request
from tests.models import tiny

SAMPLED = SamplingParams(
    max_tokens=14, temperature=0.9, n=3, logprobs=2, prompt_logprobs=1, frequency_penalty=0.5, min_tokens=9
)


@dataclass
class Said:
    """All that was said of a sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached: list[int] = field(default_factory=list)

    def take(self, output: EngineOutput) -> None:
        assert output.error is None, output.error
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason or self.finish_reason
        self.cached += [] if output.cached_tokens is None else [output.cached_tokens]


def answer(engine: Engine, asked: EngineRequest, so_far: SoFar | None = None) -> dict[int, Said]:
    """All that is said of a request's sequences."""
    said = {number: Said() for number in range(asked.sampling.n)}
    engine.scheduler.cache.clear()
    engine.add(asked, so_far)
    while engine.has_work:
        for compiled, error in engine.structured.ready():
            assert error is None
            engine.admit(compiled, so_far)
        for output in engine.step():
            said[output.sequence].take(output)
        engine.scheduler.check_integrity()
    return said


def check_every_cut(engine: Engine, asked: EngineRequest) -> None:
    """Wherever the first engine died, the rest is what it would have said; a sequence that had ended says nothing."""
    truth = answer(engine, asked)
    longest = max(len(said.tokens) for said in truth.values())
    assert longest > 8
    for cut in range(longest):
        ended = {number for number, said in truth.items() if len(said.tokens) <= cut}
        known = tuple(None if number in ended else tuple(truth[number].tokens[:cut]) for number in truth)
        scored = len(truth[0].prompt_logprobs) if cut else len(truth[0].prompt_logprobs) // 2
        for number, rest in answer(engine, asked, SoFar(known, scored)).items():
            if number in ended:
                assert (rest.tokens, rest.finish_reason) == ([], FinishReason.CANCELLED)
                continue
            whole = truth[number]
            assert rest.tokens == whole.tokens[cut:], (cut, number)
            assert rest.logprobs == whole.logprobs[cut:]
            assert rest.finish_reason == whole.finish_reason
            assert rest.prompt_logprobs == (whole.prompt_logprobs[scored:] if number == 0 else [])
            assert bool(rest.cached) == (not (cut or (scored and not number))), "told once of a sequence"


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mamba2"])
def test_every_kind_of_layer(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    options = EngineOptions(
        model=str(tmp_path), threads=1, max_num_seqs=4, kv_blocks=40, max_num_batched_tokens=16, pack_cache="off"
    )
    engine, _ = build_engine(options)
    try:
        prompt = tuple(tiny.prompt(21, 1))
        first = answer(engine, EngineRequest("r", prompt, SAMPLED, seed=2**63 + 5))
        stop = first[1].tokens[10]  # where one of the sequences ends before the others
        check_every_cut(engine, EngineRequest("r", prompt, SAMPLED, (stop,), seed=2**63 + 5))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def concierge() -> Iterator[tuple[Engine, TextPipeline]]:
    engine, _ = build_engine(EngineOptions(threads=1, max_num_seqs=4, kv_blocks=200))
    yield engine, TextPipeline.load("penstock-concierge")
    engine.close()


def test_an_answer_that_follows_a_grammar(concierge: tuple[Engine, TextPipeline]) -> None:
    engine, text = concierge
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "a_fixed_value": {"const": "always the same"}},
        "required": ["name", "a_fixed_value"],
        "additionalProperties": False,
    }
    held = Grammar(GrammarKind.LARK, translate("json_schema", json.dumps(schema)))
    prompt = tuple(text.tokenizer.encode("<|im_start|>user\nA table, please.<|im_end|>\n<|im_start|>assistant\n"))
    sampled = SamplingParams(max_tokens=60, temperature=1.0, n=2)
    check_every_cut(engine, EngineRequest("g", prompt, sampled, text.eos_ids, seed=11, grammar=held))


def test_who_is_worked_on_is_told_before_the_step() -> None:
    engine, _ = null_engine()
    told: list[set[str]] = []
    engine.works_on = lambda names: told.append(set(names))
    engine.add(request(request_id="a"))
    assert told == []  # it waits
    engine.step()
    assert told == [{"a"}]
    engine.add(request(request_id="b"))
    engine.step()
    assert told == [{"a"}, {"a", "b"}]
    engine.step()
    assert len(told) == 2
    engine.close()


def test_the_record_is_what_was_noted_last(tmp_path: Path) -> None:
    path = tmp_path / "work"
    assert read_record(path) is None
    record = WorkRecord(path)
    assert read_record(path) == frozenset()
    for names in ({"a"}, {f"é{number}" for number in range(5000)}, {"b", "c"}, set()):
        record.note(names)
        assert read_record(path) == names
    record.close()


def test_a_record_without_room_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = WorkRecord(tmp_path / "work")
    record.note(["a"])

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.engine.work_record.os.pwrite", full)
    record.note(["b"])
    assert read_record(tmp_path / "work") is None
    record.close()


def test_a_damaged_record_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "work"
    path.touch()
    assert read_record(path) is None
    record = WorkRecord(path)
    record.note(["a", "b"])
    record.close()
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        assert read_record(path) is None
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        assert read_record(path) is None
