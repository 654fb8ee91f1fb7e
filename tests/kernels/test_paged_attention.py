"""Reference paged attention against the formula, written out per query and head in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.reference import attention
from penstock.kernels.reference.attention import PagedAttention, plan_attention


@dataclass(frozen=True)
class Case:
    """Rows as (query length, context length)."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    chunked: bool = False
    sloped: bool = False

    @property
    def slopes(self) -> Tensor | None:
        return 0.7 ** torch.arange(1.0, self.heads + 1) if self.sloped else None

    def lowest(self, place: int) -> int:
        """The first position that the query of a position sees."""
        if self.window is None:
            return 0
        return place - place % self.window if self.chunked else max(0, place - self.window + 1)


ROWS = {
    "one": ((1, 1),),
    "decode": ((1, 5), (1, 33), (1, 1), (1, 16), (1, 17)),
    "prompts": ((9, 9), (21, 21), (9, 9)),
    "chunks": ((10, 31), (12, 12), (40, 70)),
    "mixed": ((1, 9), (13, 20), (1, 40), (3, 11), (3, 3), (0, 7), (11, 11), (1, 2)),
}


@dataclass
class Built:
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    sinks: Tensor | None
    facts: tuple[Any, ...]

    @property
    def cache(self) -> KvTensors:
        return KvTensors(self.key_cache, self.value_cache)


def build(case: Case, seed: int = 0) -> Built:
    """Random rows scattered over shuffled blocks; every slot no row owns, or that no window reaches, is NaN."""
    torch.manual_seed(seed)
    blocks = [-(-context // case.block_size) for _, context in case.rows]
    free = list(range(1, sum(blocks) + 3))
    random.Random(seed).shuffle(free)
    shape = (len(free) + 1, case.block_size, case.kv_heads)
    key_cache, value_cache = (
        torch.full((*shape, dim), torch.nan, dtype=case.dtype) for dim in (case.dim, case.value_dim)
    )
    table = torch.zeros(len(case.rows), max(blocks) + 3, dtype=torch.int32)
    keys, values = [], []
    for row, (queries, context) in enumerate(case.rows):
        keys.append(torch.randn(context, case.kv_heads, case.dim).to(case.dtype))
        values.append(torch.randn(context, case.kv_heads, case.value_dim).to(case.dtype))
        lowest = 0 if case.window is None else max(0, context - queries - case.window + 1)
        for logical in range(lowest // case.block_size, blocks[row]):
            table[row, logical] = free.pop()
        for place in range(lowest, context):
            block, offset = table[row, place // case.block_size], place % case.block_size
            key_cache[block, offset], value_cache[block, offset] = keys[row][place], values[row][place]
    query_lens = tuple(queries for queries, _ in case.rows)
    start = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    context_lens = tuple(context for _, context in case.rows)
    query = torch.randn(sum(query_lens), case.heads, case.dim).to(case.dtype)
    sinks = torch.randn(case.heads) if case.sinks else None
    facts = (start, torch.tensor(context_lens, dtype=torch.int32), table, query_lens, context_lens)
    return Built(query, keys, values, key_cache, value_cache, sinks, facts)


def exact(case: Case, built: Built, scale: float) -> Tensor:
    out, token = [], 0
    for row, (queries, context) in enumerate(case.rows):
        for index in range(queries):
            place = context - queries + index
            low = case.lowest(place)
            for head in range(case.heads):
                kv = head * case.kv_heads // case.heads
                key, value = (
                    built.keys[row][low : place + 1, kv].double(),
                    built.values[row][low : place + 1, kv].double(),
                )
                scores = key @ built.query[token, head].double() * scale
                if case.soft_cap:
                    scores = case.soft_cap * (scores / case.soft_cap).tanh()
                if case.slopes is not None:
                    scores = scores + float(case.slopes[head]) * torch.arange(low - place, 1)
                weights = scores.exp()
                extra = math.exp(float(built.sinks[head])) if built.sinks is not None else 0.0
                out.append(weights @ value / (weights.sum() + extra))
            token += 1
    return torch.stack(out).view(token, case.heads * case.value_dim)


def run(case: Case, built: Built, scale: float = 0.3) -> Tensor:
    plan = plan_attention(built.cache, *built.facts, case.window, chunked=case.chunked)
    attend = PagedAttention()
    return attend(built.query, built.cache, plan, scale, built.sinks, case.soft_cap, case.slopes)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_slopes(rows, window, heads, kv_heads):
    case = Case(ROWS[rows], heads, kv_heads, window=window, soft_cap=1.5 if window else None, sloped=True)
    built = build(case)
    torch.testing.assert_close(run(case, built).double(), exact(case, built, 0.3), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize(("sinks", "soft_cap"), [(False, None), (True, None), (False, 1.5), (True, 1.5)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_formula(rows, window, sinks, soft_cap, heads, kv_heads):
    case = Case(ROWS[rows], heads, kv_heads, window=window, sinks=sinks, soft_cap=soft_cap)
    built = build(case)
    ours = run(case, built)
    assert ours.shape == (built.query.shape[0], heads * case.value_dim)
    torch.testing.assert_close(ours.double(), exact(case, built, 0.3), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [1, 6, 20, 1000])
def test_chunks(rows, window):
    case = Case(ROWS[rows], window=window, chunked=True)
    built = build(case)
    torch.testing.assert_close(run(case, built).double(), exact(case, built, 0.3), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_bfloat16_and_other_sizes(sinks, window):
    case = Case(ROWS["mixed"], 4, 2, 16, 24, 16, window, sinks, dtype=torch.bfloat16)
    built = build(case)
    ours = run(case, built)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact(case, built, 0.3), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("sinks", [False, True])
def test_small_tasks(monkeypatch: pytest.MonkeyPatch, window, sinks):
    """Tiling of prompts and splitting of decode rows change nothing."""
    case = Case(ROWS["mixed"] + ROWS["chunks"], window=window, sinks=sinks)
    built = build(case)
    whole = run(case, built)
    monkeypatch.setattr(attention, "SCRATCH_ELEMENTS", 1)
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 1)
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 200)
    plan = plan_attention(built.cache, *built.facts, window)
    assert len(plan.tasks) > 12
    assert max(task.queries for task in plan.tasks if task.mask is not None) == attention.SHARED_QUERIES
    torch.testing.assert_close(run(case, built), whole, rtol=1e-5, atol=1e-6)


def test_decode_rows_share_tasks():
    case = Case(((1, 30),) * 12 + ((1, 5),))
    built = build(case)
    plan = plan_attention(built.cache, *built.facts, None)
    assert len(plan.tasks) == 1
    assert plan.tasks[0].keys == 32  # the longest context, padded, whatever the table's width


def test_a_row_does_not_depend_on_its_mates():
    alone = Case(((1, 21),))
    built = build(alone)
    single = run(alone, built)
    for mates in (((1, 200),), ((1, 3), (1, 150)), ((1, 22),) * 40):
        case = Case(((1, 21), *mates))
        other = build(case, seed=7)
        other.query[0] = built.query[0]
        table = other.facts[2]
        for place in range(21):
            block = table[0, place // 4]
            other.key_cache[block, place % 4], other.value_cache[block, place % 4] = (
                built.keys[0][place],
                built.values[0][place],
            )
        torch.testing.assert_close(run(case, other)[:1], single, rtol=1e-6, atol=1e-7)


def test_an_empty_step():
    case = Case(((0, 7), (0, 3)))
    assert run(case, build(case)).shape == (0, 32)


MASKED = {
    "bidirectional": (((9, 9), (40, 40), (1, 1), (21, 21)), ("bidirectional",) * 4),
    "mixed": (((1, 30), (20, 20), (17, 17), (5, 33)), ("causal", "bidirectional", "causal", "causal")),
    "cross": (((30, 7), (1, 40), (5, 5), (12, 12)), ("cross", "cross", "causal", "bidirectional")),
    "spans": (((40, 40), (30, 50), (1, 30), (20, 20)), ("spans", "spans", "causal", "bidirectional")),
}
# Of the rows of kind "spans": marked ones (first, end); the second row's queries begin at position 20.
MARKED = (((3, 11), (11, 12), (20, 39)), ((22, 30), (41, 50)))


def masked(name: str, window: int | None) -> tuple[Case, Built]:
    """A case whose rows are entirely in the cache, and what plan_attention is told of it."""
    rows, masks = MASKED[name]
    case = Case(rows)
    built = build(case)
    built.facts = (*built.facts, window, masks, step_spans(rows, masks))
    return case, built


def step_spans(rows: tuple[tuple[int, int], ...], masks: tuple[str, ...]) -> Tensor:
    marked = iter(MARKED)
    out = []
    for (queries, context), mask in zip(rows, masks, strict=True):
        spans = next(marked) if mask == "spans" else ()
        for place in range(context - queries, context):
            out.append(next(((low, end) for low, end in spans if low <= place < end), (place, place + 1)))
    return torch.tensor(out, dtype=torch.int32)


def visible(mask: str, place: int, other: int, window: int | None, span: tuple[int, int]) -> bool:
    """The rule, pair by pair."""
    if mask == "cross":
        return True
    if mask == "bidirectional":
        return window is None or abs(place - other) <= window // 2
    if mask == "spans" and span[0] <= other < span[1]:
        return True
    return other <= place and (window is None or place - other < window)


def by_the_rule(case: Case, built: Built, scale: float) -> Tensor:
    window, masks, spans = built.facts[5:]
    out, token = [], 0
    for row, (queries, context) in enumerate(case.rows):
        for place in range(context - queries, context):
            span = tuple(spans[token].tolist())
            shown = torch.tensor([at for at in range(context) if visible(masks[row], place, at, window, span)])
            keys, values = built.keys[row][shown].double(), built.values[row][shown].double()
            for head in range(case.heads):
                kv = head * case.kv_heads // case.heads
                scores = keys[:, kv] @ built.query[token, head].double() * scale
                out.append(scores.softmax(0) @ values[:, kv])
            token += 1
    return torch.stack(out).view(token, -1)


@pytest.mark.parametrize("window", [None, 1, 6, 9, 1000])
@pytest.mark.parametrize("name", MASKED)
def test_masks(name, window):
    case, built = masked(name, window)
    ours = PagedAttention()(built.query, built.cache, plan_attention(built.cache, *built.facts), 0.3)
    torch.testing.assert_close(ours.double(), by_the_rule(case, built, 0.3), rtol=2e-5, atol=2e-6)
