"""Paged attention of Triton against the formula, written out per query and head in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.kernels.api import resolve_kernels
from penstock.kernels.cache import KvTensors
from penstock.kernels.registry import KernelContext
from tests.kernels.test_paged_attention import Built, Case, build, by_the_rule, exact
from tests.kernels.triton.compare import TOLERANCE, Sides, sides

KV_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 4e-3, "fp8": 0.2}


def filled(both: Sides, case: Case, built: Built, kv_type: str) -> KvTensors:
    """A cache whose every byte is 255, NaN in all types, but for the entries that some query sees."""
    _, _, table, _, context_lens, *_ = built.facts
    about = kv_type, len(built.key_cache), case.block_size, case.kv_heads, case.dim, case.value_dim
    cache = both.ours.make_cache(*about, device=both.torch_device)
    cache.key.view(torch.uint8).fill_(255)
    cache.value.view(torch.uint8).fill_(255)
    for row, ((queries, _), context) in enumerate(zip(case.rows, context_lens, strict=True)):
        lowest = 0 if case.window is None else max(0, context - queries - case.window + 1)
        place = torch.arange(lowest, context)
        block, offset = table[row, place // case.block_size].long(), place % case.block_size
        keys, values = built.keys[row][lowest:], built.values[row][lowest:]
        if kv_type == "fp8":
            nothing = torch.zeros(context - lowest, case.heads * case.dim, dtype=case.dtype)
            parts = torch.cat((nothing, keys.flatten(1), values.flatten(1)), dim=1)
            tables = torch.ones(len(place), 1, 2), torch.zeros(len(place), 1, 2)
            here = [both.here(x) for x in (parts, *tables, block * case.block_size + offset)]
            both.ours.rope_and_cache_write(*here, cache)
        else:
            block, offset = both.here(block), both.here(offset)
            cache.key[block, :, offset] = both.here(keys).to(cache.key.dtype)
            cache.value[block, :, offset] = both.here(values).to(cache.value.dtype)
    return cache


def attend(both: Sides, case: Case, built: Built, kv_type: str, scale: float) -> Tensor:
    """On the CPU again."""
    cache = filled(both, case, built, kv_type)
    start, contexts, table, query_lens, context_lens, *rest = built.facts
    window, *masking = rest or (case.window,)
    tables = both.here(start), both.here(contexts), both.here(table)
    plan = both.ours.plan_attention(
        cache, *tables, query_lens, context_lens, window, *masking, chunked=case.chunked
    )  # fmt: skip
    changes = [None if x is None else both.here(x) for x in (built.sinks, case.slopes)]
    query = both.here(built.query)
    return both.ours.paged_attention(query, cache, plan, scale, changes[0], case.soft_cap, changes[1]).cpu()


def compare_attention(device: str, case: Case, kv_type: str = "float32", scale: float | None = None) -> None:
    """Of the case's rows, in its type, against `exact`."""
    both = sides(device, case.dtype, "paged_attention", "plan_attention", kv_type=kv_type)
    built = build(case)
    scale = 1.5 * case.dim**-0.5 if scale is None else scale
    expected = exact(case, built, scale)
    limit = max(KV_TOLERANCE[kv_type], TOLERANCE[case.dtype])
    ours = attend(both, case, built, kv_type, scale)
    assert ours.dtype == case.dtype
    torch.testing.assert_close(ours.double(), expected, rtol=limit, atol=limit)


def compare_masks(device: str, case: Case, built: Built) -> None:
    both = sides(device, case.dtype, "paged_attention")
    torch.testing.assert_close(
        attend(both, case, built, "float32", 0.3).double(), by_the_rule(case, built, 0.3), rtol=2e-5, atol=2e-6
    )


def alone(case: Case, built: Built, row: int) -> tuple[Case, Built]:
    """A step with only that row of a case, with the same queries, keys and values."""
    single = replace(case, rows=case.rows[row : row + 1])
    made = build(single, seed=row + 5)
    begin = int(built.facts[0][row])
    made.keys, made.values, made.sinks = [built.keys[row]], [built.values[row]], built.sinks
    made.query = built.query[begin : begin + case.rows[row][0]].contiguous()
    return single, made


def compare_company(device: str, case: Case, kv_type: str = "float32") -> None:
    """Every row of a case gives the bits that it gives alone, whatever its blocks."""
    both = sides(device, case.dtype, "paged_attention", kv_type=kv_type)
    built = build(case)
    together = attend(both, case, built, kv_type, 0.2)
    for row in range(len(case.rows)):
        begin, end = built.facts[0][row : row + 2].tolist()
        single = attend(both, *alone(case, built, row), kv_type, 0.2)
        assert torch.equal(together[begin:end], single), f"row {row}"


def compare_chunks(
    device: str, case: Case, cuts: tuple[int, ...], kv_type: str = "float32", fixed: bool = False
) -> None:
    """The only row of a case gives the same bits in steps that end at `cuts` of its queries.

    Rows of up to eight and of more give different ones unless they are `fixed`.
    """
    both = sides(device, case.dtype, "plan_attention", kv_type=kv_type)
    if fixed:
        name = str(case.dtype).removeprefix("torch.")
        invariant = KernelContext(device, name, kv_type=kv_type, batch_invariant=True)
        both = replace(both, ours=resolve_kernels(invariant))
    built = build(case)
    whole = attend(both, case, built, kv_type, 0.2)
    if fixed:
        limit = max(KV_TOLERANCE[kv_type], TOLERANCE[case.dtype])
        torch.testing.assert_close(whole.double(), exact(case, built, 0.2), rtol=limit, atol=limit)
    ((queries, context),) = case.rows
    for begin, end in pairwise((0, *cuts, queries)):
        length = context - queries + end
        step = replace(case, rows=((end - begin, length),))
        made = build(step, seed=end)
        made.keys, made.values, made.sinks = [built.keys[0][:length]], [built.values[0][:length]], built.sinks
        made.query = built.query[begin:end].contiguous()
        assert torch.equal(attend(both, step, made, kv_type, 0.2), whole[begin:end]), f"queries {begin} to {end}"
