"""Key scores against the plain softmax, over the caches of every implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.registry import KernelContext
from penstock.layers.part import ModelPart
from penstock.runtime.executor import EagerExecutor, make_executor
from tests.models import tiny
from tests.models.harness import Harness, load

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
ROWS = ((5, 37), (1, 20), (9, 9), (3, 50))  # queries, positions
HEADS, KV_HEADS, DIM, VALUE_DIM, BLOCKS = 6, 2, 40, 24, 60
TYPES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3, "fp8": 0.15, "int8": 2e-2, "int4": 0.5}


def sides(kv_type: str) -> dict[str, KernelSet]:
    plain = {"reference": resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True, kv_type="float32"))}
    ours = {"native": resolve_kernels(KernelContext("cpu", "float32", kv_type=kv_type))}
    if kv_type in ("float32", "fp8"):
        ours["triton"] = resolve_kernels(KernelContext("interpreter", "float32", kv_type=kv_type))
    return ours | plain


def keys_and_queries() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    keys = [torch.randn(context, KV_HEADS, DIM, generator=generator) for _, context in ROWS]
    return keys, torch.randn(sum(queries for queries, _ in ROWS), HEADS, DIM, generator=generator)


def score(ops: KernelSet, kv_type: str, block_size: int, last: int, *, window: int | None = None, **how: Any) -> Tensor:
    """The scores of keys that were written to a cache whose every other byte is 255."""
    keys, query = keys_and_queries()
    kept = "float32" if "reference" in ops.key_scores.__module__ else kv_type
    cache = ops.make_cache(kept, BLOCKS, block_size, KV_HEADS, DIM, VALUE_DIM)
    cache.key.view(torch.uint8).fill_(255)
    width = -(-max(context for _, context in ROWS) // block_size)
    blocks = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1
    table = blocks[: len(ROWS) * width].view(len(ROWS), width).int()
    for row, (_, context) in enumerate(ROWS):
        place = torch.arange(context)
        slot = table[row, place // block_size].long() * block_size + place % block_size
        qkv = torch.cat(
            (torch.zeros(context, DIM * KV_HEADS), keys[row].flatten(1), torch.zeros(context, KV_HEADS * VALUE_DIM)), 1
        )
        ops.rope_and_cache_write(qkv, torch.ones(context, 1, 2), torch.zeros(context, 1, 2), slot, cache)
    lens, contexts = [queries for queries, _ in ROWS], [context for _, context in ROWS]
    start = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    given = torch.tensor(contexts, dtype=torch.int32)
    plan = ops.plan_attention(cache, start, given, table, lens, contexts, window)
    return ops.key_scores(query, cache, plan, last, 0.3, **how)


def plain(
    last: int, *, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """One query, one head and one key after the other, in float64."""
    keys, query = keys_and_queries()
    out = torch.zeros(len(ROWS), KV_HEADS, max(context for _, context in ROWS), dtype=torch.float64)
    begin = 0
    for row, (queries, context) in enumerate(ROWS):
        for number in range(max(0, queries - last), queries):
            place = context - queries + number
            low = 0 if window is None else max(0, place + 1 - window)
            for head in range(HEADS):
                of = head * KV_HEADS // HEADS
                scores = 0.3 * keys[row][low : place + 1, of].double() @ query[begin + number, head].double()
                scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                out[row, of, low : place + 1] += scores.softmax(0)[: place + 1 - low]
        begin += queries
    return out


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("block_size", [16, 4, 24])
def test_scores_are_sums_of_softmax_weights(kv_type: str, block_size: int) -> None:
    expected = plain(4)
    for name, ops in sides(kv_type).items():
        limit = 2e-5 if name == "reference" else TYPES[kv_type]
        found = score(ops, kv_type, block_size, 4)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)
        counts = torch.tensor([[min(4, queries) * HEADS // KV_HEADS] * KV_HEADS for queries, _ in ROWS])
        torch.testing.assert_close(found.sum(2), counts.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "how", [{"window": 7}, {"soft_cap": 1.5}, {"sinks": torch.linspace(-1, 1, HEADS)}], ids=["window", "cap", "sinks"]
)
def test_what_attention_does_to_scores_is_done_here_too(how: dict[str, Any]) -> None:
    expected = plain(3, **how)
    for ops in sides("float32").values():
        torch.testing.assert_close(score(ops, "float32", 16, 3, **how).double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("contexts", [(5, 0, 2), (0, 0, 0)])
def test_rows_that_attend_to_nothing_weigh_nothing(kv_type: str, contexts: tuple[int, ...]) -> None:
    """Rows of a cross group, some of which have no entries; every query sees all entries of its row."""
    generator, lens = torch.Generator().manual_seed(4), [2, 3, 1]
    keys = [torch.randn(context, KV_HEADS, DIM, generator=generator) for context in contexts]
    query = torch.randn(sum(lens), HEADS, DIM, generator=generator)
    expected = torch.zeros(3, KV_HEADS, max(contexts), dtype=torch.float64)
    for row, key in enumerate(keys):
        last = query[: sum(lens[: row + 1])][-lens[row] :][-2:].double()
        for head in range(HEADS if len(key) else 0):
            weights = (0.3 * last[:, head] @ key[:, head * KV_HEADS // HEADS].double().T).softmax(1)
            expected[row, head * KV_HEADS // HEADS, : len(key)] += weights.sum(0)
    for name, ops in sides(kv_type).items():
        kept = "float32" if name == "reference" else kv_type
        cache = ops.make_cache(kept, 4, 8, KV_HEADS, DIM, DIM)
        for row, key in enumerate(keys):
            if len(key):
                slot, nothing = 8 * (row + 1) + torch.arange(len(key)), torch.zeros(len(key), DIM * KV_HEADS)
                still = torch.ones(len(key), 1, 2), torch.zeros(len(key), 1, 2)
                ops.rope_and_cache_write(torch.cat((nothing, key.flatten(1), nothing), 1), *still, slot, cache)
        start = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
        given, table = torch.tensor(contexts, dtype=torch.int32), torch.tensor([[1], [2], [3]], dtype=torch.int32)
        masks = ("cross",) * 3
        plan = ops.plan_attention(cache, start, given, table, lens, list(contexts), None, masks)
        found = ops.key_scores(query, cache, plan, 2, 0.3)
        limit = 2e-5 if name == "reference" else TYPES[kv_type]
        torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)
        sinks = ops.key_scores(query, cache, plan, 2, 0.3, sinks=torch.zeros(HEADS))
        assert sinks.shape == expected.shape and not sinks[1].any()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_model_tells_of_its_keys(family: str, tmp_path: Path) -> None:
    """And its answers do not change; what is asked so is not recorded."""
    tiny.save(family, tmp_path)
    model = load(tmp_path)
    harness = Harness(model, seed=1)
    executor = make_executor(model, harness.caches, 48, 48, part=ModelPart(scored=2))
    assert isinstance(executor, EagerExecutor) and "scores of keys" in executor.describe
    plain_harness = Harness(model, seed=1)
    for work in ({"a": tiny.prompt(19, 1), "b": tiny.prompt(7, 2)}, {"a": [3], "b": [4]}):
        executor.forward(harness.next_batch(work))
        assert torch.equal(executor.logits(), torch.cat(list(plain_harness.step(work).values())))
        scores = executor.scores()
        assert sorted(scores) == list(range(len(model.blocks)))
        for layer in scores.values():
            assert layer.shape == (2, model.cache_specs[0].num_kv_heads, harness.lengths["a"])
            assert not layer[1, :, harness.lengths["b"] :].any()
            each = min(2, len(work["a"])) * 1.0
            assert torch.allclose(layer[0].sum(1), layer[0].sum(1)[0].expand(layer.shape[1])) and layer[0].sum() >= each
