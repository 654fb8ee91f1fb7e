"""Attention over contexts that lie with several ranks gives the bits of one process."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.cache_spec import Stripe
from penstock.kernels.cache import KvTensors
from penstock.kernels.cpu import native, ops, shared
from penstock.kernels.cpu.recording import Recording
from penstock.kernels.reference import attention as plain
from penstock.kernels.reference import dense, latent
from penstock.kernels.reference import shared as plain_shared
from tests.kernels.test_rank_group import Threads, group_of, together

pytestmark = pytest.mark.skipif(
    not native.available() or not hasattr(os, "memfd_create"), reason="the native library or memfd_create is missing"
)
TYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "int4")
ROTATED = 16
PLAIN = SimpleNamespace(make_cache=dense.make_cache, plan_attention=plain.plan_attention)


@dataclass(frozen=True)
class Case:
    """Rows as (query length, context length); rows of one `shared` number begin with the same blocks.

    `heads` are those of each rank; `sharing` neighbours have one context together.
    """

    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, ...] = (4, 4)
    sharing: int = 2
    kv_heads: int = 1
    dim: int = 32
    value_dim: int = 32
    latent: bool = False
    block_runs: int = 1  # a rank has of each block
    prefix: int = 0
    sinks: bool = False
    soft_cap: float | None = None
    sloped: bool = False

    @property
    def block_size(self) -> int:
        return 256 * self.sharing * self.block_runs

    def of(self, rank: int) -> range:
        """The heads of all that share contexts with a rank, among all."""
        first = rank // self.sharing * self.sharing
        return range(sum(self.heads[:first]), sum(self.heads[: first + self.sharing]))

    def own(self, rank: int) -> range:
        start = sum(self.heads[:rank])
        return range(start, start + self.heads[rank])


@dataclass(frozen=True)
class Step:
    """What the ops are given: queries [T, all heads, D] and entries of all tokens of the contexts, with their slots."""

    queries: Tensor
    entries: tuple[Tensor, Tensor]  # [context tokens, 1 · kv heads · D], values
    slots: Tensor
    tables: tuple[Any, ...]
    sinks: Tensor | None
    slopes: Tensor | None
    blocks: int


def built(case: Case, seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // case.block_size) for _, context in case.rows]
    numbers = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        for place in range(count):
            table[row, place] = table[0, place] if row and place < case.prefix else numbers.pop()
    slots = []
    for row, (_, context) in enumerate(case.rows):
        positions = torch.arange(context)
        slots.append(table[row, positions // case.block_size].long() * case.block_size + positions % case.block_size)
    lens, contexts = (tuple(row[i] for row in case.rows) for i in (0, 1))
    start = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)
    total, heads = sum(contexts), sum(case.heads)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = (drawn(total, case.kv_heads * dim) for dim in (case.dim, case.value_dim))
    begin = 0
    for context in contexts:  # what lies in the same blocks is the same
        common = min(context, case.prefix * case.block_size)
        for entries in (keys, values):
            entries[begin : begin + common] = entries[:common].clone()
        begin += context
    return Step(
        drawn(sum(lens), heads, case.dim),
        (keys, values),
        torch.cat(slots),
        (start, torch.tensor(contexts, dtype=torch.int32), table, lens, contexts),
        drawn(heads) if case.sinks else None,
        0.7 ** torch.arange(1.0, heads + 1) / 64 if case.sloped else None,
        sum(counts) + 1,
    )


def filled(case: Case, step: Step, kv_type: str, stripe: Stripe, kernels: Any = ops) -> KvTensors:
    """A cache that has what a rank keeps of the contexts, and NaNs elsewhere."""
    size = case.block_size // stripe.ranks
    cache = kernels.make_cache(kv_type, step.blocks, size, case.kv_heads, case.dim, case.value_dim, latent=case.latent)
    cache = replace(cache, stripe=stripe)
    for memory in (cache.key, cache.value):
        memory.fill_(255 if memory.dtype == torch.uint8 else torch.nan)
    keys, values = step.entries
    rotated = case.dim - case.value_dim if case.latent else ROTATED
    cos, sin = torch.ones(len(keys), 1, rotated), torch.zeros(len(keys), 1, rotated)
    if kernels is ops:
        cos, sin = cos.squeeze(1), sin.squeeze(1)
    if case.latent:
        norm = torch.ones(case.value_dim)
        write: Any = ops.latent_cache_write if kernels is ops else latent.latent_cache_write
        write(keys, norm, 1e-6, cos, sin, step.slots, cache)
    else:
        enter: Any = ops.rope_and_cache_write if kernels is ops else dense.rope_and_cache_write
        enter(torch.cat((torch.zeros(len(keys), case.dim), keys, values), dim=1), cos, sin, step.slots, cache)
    return cache


def whole(case: Case, step: Step, kv_type: str, kernels: Any = ops) -> Tensor:
    """What one process gives, [T, all heads, Dv]."""
    cache = filled(case, step, kv_type, Stripe(), kernels)
    plan = kernels.plan_attention(cache, *step.tables, None)
    attend = ops.paged_attention if kernels is ops else plain.PagedAttention()
    out = attend(step.queries, cache, plan, 0.2, step.sinks, case.soft_cap, step.slopes)
    return out.view(len(step.queries), -1, case.value_dim)


def ranked(case: Case, step: Step, kv_type: str, group: Any, kernels: Any = ops) -> Tensor:
    """What a rank gives, of its own heads."""
    own, of = case.own(group.rank), case.of(group.rank)
    cache = filled(case, step, kv_type, Stripe(group.rank % case.sharing, case.sharing), kernels)
    plan = kernels.plan_attention(cache, *step.tables, None)
    attend = shared.shared_attention if kernels is ops else plain_shared.shared_attention
    out = attend(
        step.queries[:, own.start : own.stop].contiguous(),
        cache,
        plan,
        0.2,
        None if step.sinks is None else step.sinks[own.start : own.stop].contiguous(),
        case.soft_cap,
        None if step.slopes is None else step.slopes[of.start : of.stop].contiguous(),
        group=group,
        heads=case.heads,
    )
    return out.view(len(step.queries), len(own), case.value_dim)


def same(case: Case, kv_type: str = "float32", seed: int = 0) -> None:
    step = built(case, seed)
    expected = whole(case, step, kv_type)
    assert expected.isfinite().all()
    with group_of(len(case.heads)) as groups:
        for rank, given in enumerate(together(groups, lambda group: ranked(case, step, kv_type, group))):
            own = case.own(rank)
            if isinstance(given, Exception):
                raise given
            assert torch.equal(given, expected[:, own.start : own.stop]), rank


ROWS = {
    "decode": ((1, 5), (1, 256), (1, 257), (1, 700), (1, 1400)),
    "prompts": ((40, 40), (300, 300), (700, 900)),
    "mixed": ((1, 900), (5, 517), (130, 1100), (1, 3), (33, 33)),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("sinks", "soft_cap", "sloped"), [(False, None, False), (True, 2.0, False), (True, None, True)]
)
def test_one_kv_head(isa, rows, sinks, soft_cap, sloped):
    same(Case(ROWS[rows], sinks=sinks, soft_cap=soft_cap, sloped=sloped))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "sharing"), [((4, 4), 2), ((1, 5), 2), ((3, 3, 2), 3), ((2, 2, 2, 2), 4), ((2, 2, 3, 1), 2)]
)
def test_latent_caches_and_ranks_of_unequal_heads(rows, heads, sharing):
    same(Case(ROWS[rows], heads, sharing, dim=64, value_dim=48, latent=True))


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_every_type_on_every_instruction_set(isa, kv_type, latent):
    same(Case(((1, 900), (70, 600)), dim=64, value_dim=48, latent=latent), kv_type)


@pytest.mark.parametrize(("heads", "sharing", "kv_heads"), [((4, 4), 2, 2), ((3, 6, 3), 3, 4)])
def test_several_kv_heads_and_blocks_of_several_runs(heads, sharing, kv_heads):
    same(Case(ROWS["mixed"], heads, sharing, kv_heads=kv_heads, block_runs=2))


@pytest.mark.parametrize("prefix", [1, 2])
@pytest.mark.parametrize("block_runs", [1, 2])
def test_rows_that_begin_with_the_same_blocks(prefix, block_runs):
    long = 512 * block_runs * prefix
    rows = ((1, long + 700), (1, long + 10), (2, long + 300), (1, long), (40, long + 513))
    same(Case(rows, prefix=prefix, block_runs=block_runs))


def test_what_does_not_fit_a_slot_goes_over_in_windows():
    """128 heads of 512 elements leave 264 KiB for a query and turn, and slots have 1 MiB."""
    same(Case(((1, 5000), (3, 2600)), (64, 64), dim=576, value_dim=512, latent=True))


def test_many_heads_of_one_kv_head():
    same(Case(((1, 900), (9, 600)), (100, 57), dim=32, value_dim=32))


def test_recorded_steps_are_as_those_at_once():
    case = Case(ROWS["mixed"], sinks=True)
    step = built(case)
    expected = whole(case, step, "float16")

    def compute(group: Any) -> Tensor:
        own = case.own(group.rank)
        cache = filled(case, step, "float16", Stripe(group.rank, 2))
        tape = Recording()
        tokens = len(step.queries)
        memory = torch.zeros(tokens, len(own) * case.dim)
        plan = ops.plan_attention(cache, None, None, tape.block_table(0), (), (), None)
        sinks = step.sinks[own.start : own.stop].contiguous()
        result = shared.shared_attention(tape.input(memory), cache, plan, 0.2, sinks, group=group, heads=case.heads)
        tape.finish(result, tokens, tokens)
        memory.copy_(step.queries[:, own.start : own.stop].flatten(1))
        start, contexts, table, *_ = step.tables
        ids = torch.zeros(tokens, dtype=torch.int64)
        for _ in range(2):
            tape.run(ids, ids, start, contexts, contexts, [(table, ids, None)], ids)
        return tape.result(tokens).clone().view(tokens, len(own), case.value_dim)

    with group_of(2) as groups:
        for rank, given in enumerate(together(groups, compute)):
            own = case.own(rank)
            assert torch.equal(given, expected[:, own.start : own.stop])


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("heads", "sharing"), [((4, 4), 2), ((2, 2, 3, 1), 2), ((1, 2, 3), 3)])
def test_the_reference(latent, heads, sharing):
    case = Case(ROWS["mixed"], heads, sharing, sinks=True, soft_cap=3.0, sloped=True, latent=latent)
    case = replace(case, dim=64, value_dim=48)
    step = built(case)
    expected = whole(case, step, "float32")
    threads = Threads(len(heads))
    groups = [threads.rank(rank) for rank in range(len(heads))]
    given = together(groups, lambda group: ranked(case, step, "float32", group, PLAIN))
    for rank, result in enumerate(given):
        own = case.own(rank)
        torch.testing.assert_close(result, expected[:, own.start : own.stop], rtol=2e-4, atol=2e-5)


def test_what_is_wrong_is_refused():
    layout = ops.make_cache("float32", 2, 512, 1, 32, 32).layout
    with pytest.raises(ValueError, match="runs of 256"):
        ops.make_cache("float32", 2, 300, 1, 32, 32).layout.of_rank(0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        layout.of_rank(2, 2)
    case = Case(((1, 300),))
    step = built(case)
    cache = filled(case, step, "float32", Stripe(0, 2))
    plan = ops.plan_attention(cache, *step.tables, None)

    def compute(group: Any) -> None:
        query = step.queries[:, :2].contiguous()
        try:
            shared.shared_attention(query, cache, plan, 0.2, group=group, heads=(2, 2))
        finally:
            group.stop()

    with group_of(2) as groups:
        errors = together(groups, compute)
        assert any("is not the one that has part 0 of 2" in str(error) for error in errors)
