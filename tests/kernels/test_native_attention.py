"""Native cache writes and attention against the torch reference, on every instruction set.

All sets give the same bits, except that avx512_bf16 multiplies a bfloat16 cache with queries and weights of that type.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import native, ops
from tests.kernels.test_paged_attention import MASKED, ROWS, Built, Case, build, by_the_rule, masked, run

TYPES = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3, "fp8": 0.2, "int8": 3e-2, "int4": 0.5}


def attend(case: Case, built: Built, kv_type: str, scale: float = 0.3) -> Tensor:
    """Writes the built keys and values to a native cache whose every other byte is 255, and attends."""
    start, contexts, table, query_lens, context_lens, *rest = built.facts
    window, *masking = rest or (case.window,)
    blocks = built.key_cache.shape[0]
    cache = ops.make_cache(kv_type, blocks, case.block_size, case.kv_heads, case.dim, case.value_dim)
    cache.key.fill_(255)
    cache.value.fill_(255)
    for row, (queries, context) in enumerate(case.rows):
        lowest = 0 if case.window is None else max(0, context - queries - case.window + 1)
        place = torch.arange(lowest, context)
        slot = table[row, place // case.block_size].long() * case.block_size + place % case.block_size
        parts = (torch.zeros(context - lowest, case.heads * case.dim), built.keys[row][lowest:].flatten(1))
        qkv = torch.cat((*parts, built.values[row][lowest:].flatten(1)), dim=1)
        cos, sin = torch.ones(len(place), 2), torch.zeros(len(place), 2)
        ops.rope_and_cache_write(qkv, cos, sin, slot, cache)
    about = (start, contexts, table, query_lens, context_lens, window, *masking)
    plan = ops.plan_attention(cache, *about, chunked=case.chunked)
    return ops.paged_attention(built.query, cache, plan, scale, built.sinks, case.soft_cap, case.slopes)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize(("sinks", "soft_cap"), [(False, None), (True, None), (False, 1.5), (True, 1.5)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_equals_the_reference(isa, rows, window, sinks, soft_cap, heads, kv_heads):
    case = Case(ROWS[rows], heads, kv_heads, window=window, sinks=sinks, soft_cap=soft_cap)
    built = build(case)
    torch.testing.assert_close(attend(case, built, "float32"), run(case, built), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [1, 6, 20, 1000])
def test_chunks_equal_the_reference(isa, rows, window):
    case = Case(ROWS[rows], window=window, chunked=True)
    built = build(case)
    torch.testing.assert_close(attend(case, built, "float32"), run(case, built), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("window", "block_size"), [(None, 4), (6, 16), (None, 24)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_slopes_equal_the_reference(isa, rows, window, block_size, heads, kv_heads):
    case = Case(
        ROWS[rows], heads, kv_heads, block_size=block_size, window=window, soft_cap=1.5 if window else None, sloped=True
    )
    built = build(case)
    torch.testing.assert_close(attend(case, built, "float32"), run(case, built), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kv_type", TYPES)
def test_sloped_rows_do_not_depend_on_their_mates_or_chunks(isa, kv_type):
    """Long rows, cut into several partitions, give the bits they give alone, and token by token."""
    case = Case(((300, 600), (290, 290), (1, 301)), 4, 2, 16, 16, 16, sloped=True)
    built = build(case)
    whole = attend(case, built, kv_type)
    begin = 0
    for row, (queries, context) in enumerate(case.rows):
        for first in {0, queries // 2, queries - 1}:
            rows = ((queries - first, context),)
            alone = build(Case(rows, 4, 2, 16, 16, 16), seed=5)
            alone.keys, alone.values = [built.keys[row]], [built.values[row]]
            alone.query = built.query[begin + first : begin + queries].contiguous()
            single = attend(Case(rows, 4, 2, 16, 16, 16, sloped=True), alone, kv_type)
            assert torch.equal(single, whole[begin + first : begin + queries])
        begin += queries


@pytest.mark.parametrize("kv_type", TYPES)
def test_small_types_are_near_and_alike_on_all_instruction_sets(kv_type):
    case = Case(ROWS["mixed"] + ((1, 300), (40, 500)), 8, 2, 64, 48, 16, sinks=True)
    built = build(case)
    results, rounded = [], []
    for name in native.usable_isas():
        native.select_isa(name)
        alone = (name, kv_type) == ("avx512_bf16", "bfloat16")
        (rounded if alone else results).append(attend(case, built, kv_type, scale=0.125))
    native.select_isa("auto")
    torch.testing.assert_close(results[0], run(case, built, 0.125), rtol=0.0, atol=TYPES[kv_type])
    for other in results[1:]:
        assert torch.equal(other, results[0])
    for other in rounded:
        torch.testing.assert_close(other, results[0], rtol=0.0, atol=1e-2)


def test_a_latent_cache(isa):
    """One KV head of unequal sizes, many query heads: a compressed vector, as latent attention keeps it."""
    case = Case(((1, 40), (5, 21)), 16, 1, 576, 512, 16)
    built = build(case)
    torch.testing.assert_close(attend(case, built, "float32", 0.04), run(case, built, 0.04), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 6, 9, 1000])
@pytest.mark.parametrize("name", MASKED)
def test_masks(isa, name, window):
    case, built = masked(name, window)
    torch.testing.assert_close(
        attend(case, built, "float32").double(), by_the_rule(case, built, 0.3), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [None, 90])
def test_masked_rows_do_not_depend_on_their_mates(isa, kv_type, window):
    """Long rows, cut into several units and partitions, give the bits they give alone."""
    rows, masks = ((300, 300), (290, 290), (1, 301), (33, 310)), ("bidirectional", "causal", "causal", "cross")
    case = Case(rows, 4, 2, 16, 16, 16)
    built = build(case)
    built.facts = (*built.facts, window, masks)
    whole = attend(case, built, kv_type)
    if kv_type == "float32":
        built.facts = (*built.facts, torch.zeros(624, 2, dtype=torch.int32))
        torch.testing.assert_close(whole.double(), by_the_rule(case, built, 0.3), rtol=2e-5, atol=2e-6)
    begin = 0
    for row, (queries, context) in enumerate(rows):
        alone = build(Case(((queries, context),), 4, 2, 16, 16, 16), seed=5)
        alone.keys, alone.values = [built.keys[row]], [built.values[row]]
        alone.query = built.query[begin : begin + queries].contiguous()
        alone.facts = (*alone.facts, window, masks[row : row + 1])
        single = attend(Case(((queries, context),), 4, 2, 16, 16, 16), alone, kv_type)
        assert torch.equal(single, whole[begin : begin + queries])
        begin += queries


@pytest.mark.parametrize(
    ("dtype", "slots", "kind"),
    [(torch.float32, 5, torch.int64), (torch.float32, 3, torch.int64), (torch.bfloat16, 4, torch.int64),
     (torch.float32, 4, torch.int32)],
)  # fmt: skip
def test_entries_have_a_slot_each(dtype, slots, kind):
    """An encoder's too, which are written beside the steps; slots behind the last would be read otherwise."""
    slot, still = torch.arange(slots, dtype=kind), (torch.ones(4, 1, 2), torch.zeros(4, 1, 2))
    cache = ops.make_cache("float32", 4, 16, 2, 8, 8)
    with pytest.raises(ValueError, match=r"\(4, 48\) for slots .*; allowed are float32, and one int64 slot a row"):
        ops.rope_and_cache_write(torch.zeros(4, 48, dtype=dtype), *still, slot, cache)
    latent = ops.make_cache("float32", 4, 16, 1, 12, 8)
    with pytest.raises(ValueError, match=r"\(4, 12\) for slots .*; allowed are float32, and one int64 slot a row"):
        ops.latent_cache_write(torch.zeros(4, 12, dtype=dtype), torch.ones(8), 1e-6, *still, slot, latent)
