"""Answers with heads that read hidden states are those without, to the bit, whatever the target keeps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from tests.engine.test_drafts import check, run
from tests.engine.test_equality import finish
from tests.engine.test_grammars import held
from tests.engine.test_speculation import asked
from tests.models import tiny, tiny_heads

FAMILIES = ("llama", "gpt-oss", "deepseek-v2", "lfm2-moe", "qwen3-next", "jamba")


def made(folder: Path, config: dict[str, Any] | None, **more: Any) -> Engine:
    options = {"dtype": "float32", "threads": 1, "max_num_seqs": 6, "block_size": 4, "kv_blocks": 150, **more}
    text = None if config is None else json.dumps({"adaptive": False, "num_speculative_tokens": 3, **config})
    return build_engine(EngineOptions(str(folder), max_model_len=120, speculative_config=text, **options))[0]


def layers(folder: Path) -> int:
    count: int = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    return count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "medusa"])
def test_answers_are_those_without(family: str, kind: str, tmp_path: Path) -> None:
    """Hits, preemption, cancelled requests, any chunks, little memory; drafts are accepted and refused."""
    tiny.save(family, tmp_path / "target")
    tiny_heads.save(kind, tmp_path / "head", layers(tmp_path / "target"))
    plain = made(tmp_path / "target", None)
    truth = run(plain, *asked(8, 0))
    plain.close()
    engine = made(tmp_path / "target", {"model": str(tmp_path / "head")}, max_chunk_tokens=7)
    for turn in range(1, 4):
        requests = asked(8, 3, turn)
        if turn == 1:  # prefixes of which a head has computed nothing
            run(engine, *(replace(one, request_id=f"u{one.request_id}", speculate=0) for one in requests[::2]))
        check(run(engine, *requests, dice=random.Random(turn) if turn > 1 else None), truth)
    stats = engine.stats()
    engine.close()
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.drafter_failures == 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_prompts_that_are_scored_beside_all_states(tmp_path: Path) -> None:
    """Layers for multi-token prediction want the last state of every token, scores those of some."""
    tiny.save("llama", tmp_path)
    tiny_heads.join(tmp_path)
    params = SamplingParams(max_tokens=20, prompt_logprobs=2, temperature=0.0, allowed_token_ids=(3, 8, 10, 11, 60))
    requests = [EngineRequest(f"p{n}", tuple(tiny.prompt(9 + 4 * n)), params, seed=n) for n in range(4)]
    answers = []
    for config in (None, {"method": "mtp"}):
        engine = made(tmp_path, config, max_chunk_tokens=7)
        for request in requests:
            engine.add(replace(request, speculate=3))
        answers.append(finish(engine))
        stats = engine.stats()
        engine.close()
    assert answers[0] == answers[1] and all(answer.prompt_logprobs for answer in answers[0].values())
    assert stats.drafter_failures == 0 and 0 < stats.accepted_tokens < stats.drafted_tokens


def test_further_layers_and_fields(tmp_path: Path) -> None:
    """A head as speculators write it: its layers' sizes apart, two layers, residuals that are normed before."""
    tiny.save("llama", tmp_path / "target")
    tiny_heads.save("eagle3", tmp_path / "head")
    tiny_heads.as_speculators(tmp_path / "head")
    truth_of = made(tmp_path / "target", None)
    truth = run(truth_of, *asked(8, 0))
    truth_of.close()
    engine = made(tmp_path / "target", {"model": str(tmp_path / "head")})
    check(run(engine, *asked(8, 3, 1)), truth)
    stats = engine.stats()
    engine.close()
    assert stats.drafter_failures == 0 and 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_on_a_device(kind: str, tmp_path: Path) -> None:
    """Kernels of devices, interpreted, with steps that are recorded and states that are read behind them."""
    tiny.save("llama", tmp_path / "target", num_hidden_layers=2)
    if kind == "mtp":
        tiny_heads.join(tmp_path / "target")
    else:
        tiny_heads.save(kind, tmp_path / "head", 2)
    device = {"device": "interpreter", "batch_invariant": True, "max_num_batched_tokens": 40, "block_size": 8}
    config = {"method": kind} if kind == "mtp" else {"model": str(tmp_path / "head")}

    def short(drafts: int) -> list[EngineRequest]:
        requests = asked(2, drafts)
        return [replace(one, sampling=replace(one.sampling, max_tokens=8)) for one in requests]

    plain = made(tmp_path / "target", None, **device)
    truth = run(plain, *short(0))
    plain.close()
    engine = made(tmp_path / "target", config, **device)
    check(run(engine, *short(3)), truth)
    stats = engine.stats()
    engine.close()
    assert stats.drafter_failures == 0 and 0 < stats.accepted_tokens < stats.drafted_tokens


def test_what_is_taken_back(shared_data: Path) -> None:
    """Strings that are banned: the head goes on from where the answer was cut."""
    model = shared_data / "models" / "penstock-concierge"
    text = TextPipeline.load(str(model))
    request = held(text, "r", max_tokens=60, temperature=0.0)
    params = request.sampling
    requests = [
        replace(request, request_id=f"r{len(banned)}", grammar=None, sampling=replace(params, banned_strings=banned))
        for banned in (("the", "would"), ())
    ]
    answers = []
    for config in (None, {"model": f"{model}-eagle3"}, {"method": "mtp", "model": f"{model}-mtp"}):
        said = None if config is None else json.dumps({"adaptive": False, **config})
        engine, _ = build_engine(EngineOptions(str(model), threads=1, max_num_seqs=4, speculative_config=said))
        answers.append(run(engine, *(replace(one, speculate=4) for one in requests)))
        stats = engine.stats()
        engine.close()
        assert stats.drafter_failures == 0 and (stats.accepted_tokens > 0) == (config is not None)
    assert answers[0] == answers[1] == answers[2]
