"""Beam search gives what transformers' beam search gives, and a step computes one token a beam."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from penstock import LLM
from penstock.config.errors import ContextLengthError, ParameterError
from penstock.core.request import FinishReason
from penstock.search.beam import Beam, BeamParams, BeamSearch
from tests.models import tiny

PROMPT = tiny.prompt(19, 4)
PAD = 0


@dataclass(frozen=True)
class Pair:
    """One model in both engines."""

    theirs: transformers.PreTrainedModel
    ours: LLM
    eos: int


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3-moe", "deepseek-v3", "gpt2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.save(request.param, folder)
    eos = likely_end(model)
    model.config.eos_token_id = eos
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with LLM(folder, threads=1, dtype="float32", kv_blocks=400, max_model_len=100) as llm:
        yield Pair(model, llm, eos)


def beams(model: transformers.PreTrainedModel, width: int, length: int, eos: int | None) -> list[list[int]]:
    """The answers of transformers' beam search, padded."""
    found = model.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=PAD,
    )
    rows: list[list[int]] = found[:, len(PROMPT) :].tolist()
    return rows


def likely_end(model: transformers.PreTrainedModel) -> int:
    """A token at which beams end at several lengths."""
    for token in dict.fromkeys(token for row in beams(model, 10, 8, None) for token in row[1:]):
        if len({row.index(token) for row in beams(model, 4, 16, token) if token in row}) > 1 and token != PAD:
            return token
    raise AssertionError("no token ends beams at several lengths")


def reference(
    pair: Pair, width: int, n: int, length: int, penalty: float, early: Any, eos: bool
) -> list[tuple[Any, float]]:
    """Tokens and scores as transformers finds them."""
    found = pair.theirs.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=n,
        max_new_tokens=length,
        length_penalty=penalty,
        early_stopping=early,
        do_sample=False,
        eos_token_id=pair.eos if eos else None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for tokens, score in zip(found.sequences[:, len(PROMPT) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = tokens.index(pair.eos) + 1 if eos and pair.eos in tokens else length
        answers.append((tuple(tokens[:end]), score))
    return answers


@pytest.mark.parametrize(
    ("width", "n", "length", "penalty", "early", "eos"),
    [
        (2, 2, 12, 1.0, False, True),
        (4, 4, 16, 1.0, False, True),
        (4, 4, 16, 1.0, True, True),
        (4, 2, 16, 2.0, "never", True),
        (4, 4, 16, 0.0, "never", True),
        (5, 5, 10, -1.0, False, True),
        (4, 4, 8, 1.0, False, False),
        (10, 10, 6, 0.5, True, True),
        (19, 19, 7, 1.0, False, True),
        (20, 5, 5, 1.0, False, False),
    ],
)
def test_answers_are_those_of_transformers(
    pair: Pair, width: int, n: int, length: int, penalty: float, early: Any, eos: bool
) -> None:
    expected = reference(pair, width, n, length, penalty, early, eos)
    params = BeamParams(width, n, length, penalty, early, ignore_eos=not eos)
    (found,) = pair.ours.beam_search(PROMPT, params, logprobs=2)
    assert [output.token_ids for output in found.outputs] == [tokens for tokens, _ in expected]
    for output, (tokens, score) in zip(found.outputs, expected, strict=True):
        total = sum(entry.logprob for entry in output.logprobs)
        assert total / len(tokens) ** penalty == pytest.approx(score, rel=1e-3, abs=1e-4)
        assert all(len(entry.top) == 2 for entry in output.logprobs)
        ended = eos and tokens[-1] == pair.eos
        assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        shown = tokens[:-1] if ended else tokens
        assert output.text.split() == [f"w{token}" for token in shown]


def test_ends_really_happen(pair: Pair) -> None:
    (found,) = pair.ours.beam_search(PROMPT, BeamParams(4, 4, 16))
    assert any(output.finish_reason is FinishReason.STOP for output in found.outputs)
    assert len({len(output.token_ids) for output in found.outputs}) > 1


def test_a_step_computes_one_token_a_beam(pair: Pair) -> None:
    prompt = tiny.prompt(40, 9)
    before = pair.ours.stats()
    (found,) = pair.ours.beam_search(prompt, BeamParams(3, 3, 10, ignore_eos=True))
    after = pair.ours.stats()
    computed = after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    assert len(found.outputs[0].token_ids) == 10
    # The prompt once, then 9 steps of 3 beams; what beams share is computed for each that asks for it at once.
    assert computed <= 40 + 9 * 3 * 2
    assert after.cached_tokens - before.cached_tokens >= 9 * 3 * 39


def test_several_prompts_and_a_second_run_give_the_same(pair: Pair) -> None:
    prompts = [tiny.prompt(length, length) for length in (3, 8, 21)]
    together = pair.ours.beam_search(prompts, BeamParams(3, 3, 8))
    alone = [pair.ours.beam_search(prompt, BeamParams(3, 3, 8))[0] for prompt in prompts]
    assert [[o.token_ids for o in c.outputs] for c in together] == [[o.token_ids for o in c.outputs] for c in alone]
    assert [o.logprobs for o in together[0].outputs] == [()] * 3


def test_what_cannot_be_searched_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(ContextLengthError, match="19 tokens and max_tokens is 82"):
        pair.ours.beam_search(PROMPT, BeamParams(max_tokens=82))
    with pytest.raises(ContextLengthError):
        pair.ours.beam_search(tiny.prompt(100, 1), BeamParams())
    for fields, name in (
        ({"width": 0}, "beam_width"),
        ({"width": 21}, "beam_width"),
        ({"width": 10**9}, "beam_width"),
        ({"n": 5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "often"}, "early_stopping"),
    ):
        with pytest.raises(ParameterError, match=name):
            BeamParams(**fields)  # type: ignore[arg-type]


def test_a_model_that_ends_with_many_tokens_has_fewer_beams(pair: Pair) -> None:
    with pytest.raises(ParameterError, match="at most 16, as 4 tokens can end an answer"):
        pair.ours.beam_search(PROMPT, BeamParams(17, stop_token_ids=(97, 98, 99)))


async def test_a_search_that_is_left_leaves_nothing_behind(pair: Pair) -> None:
    llm = pair.ours._async

    async def leave() -> None:
        search = asyncio.ensure_future(llm.beam_search(PROMPT, BeamParams(4, 4, 60, ignore_eos=True)))
        await asyncio.sleep(0.02)
        assert not search.done()
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(leave(), pair.ours._loop))
    async with asyncio.timeout(60):
        while (stats := pair.ours.stats()).running or stats.waiting:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert pair.ours.stats().steps == stats.steps


def test_only_the_first_candidates_may_end() -> None:
    """A beam that ends behind the first `width` candidates is no answer (they are there to go on with)."""
    search = BeamSearch(BeamParams(width=2, n=2), frozenset({0}), 8)
    search.advance([[(5, -1.0), (6, -2.0), (0, -3.0)]])
    assert search.finished == []
    assert [beam.tokens for beam in search.running] == [(5,), (6,)]
    search.advance([[(0, -0.1), (1, -2.5)], [(0, -0.2), (1, -2.0)]])
    assert [beam.tokens for beam in search.finished] == [(5, 0), (6, 0)]
    assert search.finished[0].score == pytest.approx(-1.1 / 2)
    assert search.running == []
    assert Beam().score == float("-inf")
