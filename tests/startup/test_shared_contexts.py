"""Contexts that lie with several processes: the bits of one process, in a part of the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.config.cache_spec import RUN, CacheKind
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.kernels.cpu import native
from penstock.startup.engine_spec import EngineSpec, make_engine_spec
from tests.models import tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
LONG = 1400
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "max_model_len": 2048,
    "max_num_batched_tokens": 300,
    "max_num_seqs": 4,
    "dtype": "float32",
}
DENSE: dict[str, Any] = {"num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 2}
SIZES: dict[str, dict[str, Any]] = {
    "deepseek-v2": {"num_attention_heads": 8, "v_head_dim": 32, "num_key_value_heads": 8, "num_hidden_layers": 2},
    "qwen3": {**DENSE, "num_key_value_heads": 1},
    "llama": {**DENSE, "num_key_value_heads": 2},
    "unlike": {**DENSE, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
    "gpt-oss": {**DENSE, "num_key_value_heads": 1},
    "gemma2": {**DENSE, "num_key_value_heads": 1},
}

Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[str, Path] = {}

    def of(name: str) -> str:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            family = "qwen3" if name == "unlike" else name
            tiny.save(family, made[name], max_position_embeddings=2048, hidden_size=64, **SIZES[name])
        return str(made[name])

    return of


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, how many tokens it wants, and whether its prompt is scored."""

    prompt: Sequence[int]
    tokens: int = 12
    scored: bool = False


BEGINNING = tiny.prompt(LONG, 1)
REQUESTS = {
    "long": Asked(BEGINNING, 20),
    "same beginning": Asked([*BEGINNING[:1100], *tiny.prompt(90, 2)]),
    "short": Asked(tiny.prompt(7, 3)),
    "edge": Asked(tiny.prompt(RUN, 4)),
    "scored": Asked(tiny.prompt(700, 5), 4, scored=True),
}


def answers(model: str, requests: dict[str, Asked] = REQUESTS, **options: Any) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of all, which keep each other company; then of the first one once more. However many
    of them a step gave."""
    engine, _ = build_engine(EngineOptions(model=model, **{**SETTINGS, **options}))
    found: dict[str, list[Any]] = {}
    first = next(iter(requests))
    try:
        for turn in (requests, {first: requests[first]}):
            for name, asked in turn.items():
                scored = {"prompt_logprobs": 1} if asked.scored else {}
                how = SamplingParams(temperature=0.8, max_tokens=asked.tokens, ignore_eos=True, logprobs=2, **scored)
                engine.add(EngineRequest(f"{name} {len(turn)}", tuple(asked.prompt), how, seed=7))
            while engine.has_work:
                for output in engine.step():
                    assert output.error is None, output.error
                    told = found.setdefault(output.request_id, [[], [], []])
                    for all_of, given in zip(
                        told, (output.tokens, output.logprobs, output.prompt_logprobs), strict=True
                    ):
                        all_of += given or ()
        assert engine.dead is None
    finally:
        engine.close()
    return found


def shared(count: int, ranks: int | None = None) -> dict[str, int]:
    return {"tensor_parallel_size": ranks or count, "decode_context_parallel_size": count}


@pytest.mark.parametrize(("name", "count", "ranks"), [("deepseek-v2", 2, 2), ("deepseek-v2", 3, 3), ("qwen3", 2, 4)])
def test_answers_are_those_of_one_process(model: Folder, name: str, count: int, ranks: int) -> None:
    assert answers(model(name), **shared(count, ranks)) == answers(model(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "ranks"),
    [
        *(("deepseek-v2", 2, 4), ("deepseek-v2", 4, 4), ("llama", 3, 3), ("llama", 2, 4), ("llama", 4, 4)),
        *(("qwen3", 2, 2), ("qwen3", 4, 4), ("gpt-oss", 2, 2), ("gpt-oss", 4, 4), ("gemma2", 2, 2), ("gemma2", 3, 3)),
    ],
)
def test_more_families_and_numbers(model: Folder, name: str, count: int, ranks: int) -> None:
    assert answers(model(name), **shared(count, ranks)) == answers(model(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("qwen3", kind) for kind in ("bfloat16", "fp8", "int8", "int4")),
        *(("deepseek-v2", kind) for kind in ("bfloat16", "fp8", "int8", "int4")),
    ],
)
def test_small_types(model: Folder, name: str, kind: str) -> None:
    found = answers(model(name), **shared(2), kv_cache_dtype=kind)
    assert found == answers(model(name), kv_cache_dtype=kind)


@pytest.mark.slow
def test_drafts_stages_and_preemption(model: Folder) -> None:
    """Drafts are verified, sequences give up their blocks and come back, and layers are dealt as well."""
    repeating = {f"r{i}": Asked([*tiny.prompt(40, i)] * 20, 60) for i in range(4)}
    expected = [answers(model(name), repeating) for name in ("deepseek-v2", "qwen3")]
    few = {"kv_blocks": 6, "block_size": 512}
    drafts = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}
    for given in (few, drafts, {**few, **drafts}):
        for name, wanted in zip(("deepseek-v2", "qwen3"), expected, strict=True):
            found = answers(model(name), repeating, **shared(2), **given)
            assert found == wanted
    staged = answers(model("qwen3"), repeating, pipeline_parallel_size=2, **shared(2))
    assert staged == expected[1]


def spec_of(model: str, **options: Any) -> EngineSpec:
    return make_engine_spec(EngineOptions(model=model, **{**SETTINGS, **options}))


@pytest.mark.parametrize(("name", "count", "ranks"), [("deepseek-v2", 2, 2), ("qwen3", 4, 4), ("llama", 2, 4)])
def test_a_rank_keeps_its_part_of_a_token(model: Folder, name: str, count: int, ranks: int) -> None:
    whole = spec_of(model(name), tensor_parallel_size=ranks, block_size=256 * count)
    parts = spec_of(model(name), **shared(count, ranks))
    assert parts.plan.kv_block_bytes == tuple(size // count for size in whole.plan.kv_block_bytes)
    assert parts.options.block_size == 256 * count
    told = {one.name: one for one in parts.settings}
    assert told["contexts"].value == f"over {count} ranks" and "2 of 2 layers" in told["contexts"].reason
    assert told["block_size"].value == str(256 * count)
    memory = {"kv_cache_memory": 64 << 20}
    tokens = [
        spec.plan.kv_blocks[0] * spec.options.block_size
        for spec in (
            spec_of(model(name), tensor_parallel_size=ranks, **memory),
            spec_of(model(name), **shared(count, ranks), **memory),
        )
    ]
    assert tokens[1] == pytest.approx(count * tokens[0], rel=0.02)


def test_windows_stay_whole(model: Folder) -> None:
    specs = spec_of(model("gpt-oss"), **shared(2)).model.cache_specs
    assert {spec.kind: spec.stripe.ranks for spec in specs} == {CacheKind.SLIDING: 1, CacheKind.FULL: 2}


def test_what_cannot_be_is_refused(model: Folder) -> None:
    def refused(match: str, name: str = "qwen3", **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            spec_of(model(name), **options)

    refused("what divides --tensor-parallel-size, 4", tensor_parallel_size=4, decode_context_parallel_size=3)
    refused("an integer from 1 to 8", tensor_parallel_size=2, decode_context_parallel_size=0)
    refused("no layer has keys and values", "llama", **shared(2))  # two KV heads: each rank has one
    refused(
        "no layer has keys and values", "unlike", tensor_parallel_size=6, decode_context_parallel_size=2
    )  # unlike pairs
    refused("allowed: 1 or --decode-context", prefill_context_parallel_size=4, **shared(2))
    refused("some positions of a block", kv_ram=1 << 20, **shared(2))
    assert spec_of(model("qwen3"), prefill_context_parallel_size=2, **shared(2)).options.block_size == 512
