"""The ragged batch against its definition, and the cache operations on real memory."""

from __future__ import annotations

import weakref

import pytest
import torch

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import CacheOp, CacheOpKind, NewSequence, ScheduledTokens, last_sample
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.mover import Mover

CPU = torch.device("cpu")

KERNELS = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))


def new_row(row: int, blocks: tuple[tuple[int, ...], ...]) -> NewSequence:
    return NewSequence(row, f"r{row}", 0, (1, 2, 3), (), 0, blocks, SamplingParams())


def test_a_ragged_batch_of_two_groups() -> None:
    builder = BatchBuilder(2, max_rows=4, max_blocks=8, block_size=4, device=CPU)
    builder.add_row(new_row(2, ((5, 9), (1, 3))))
    builder.add_row(new_row(0, ((7,), (2,))))
    builder.note_sample(0, 77)
    spans = (
        ScheduledTokens(0, 3, (last_sample(0),), 0, 0, True, ((), ())),
        ScheduledTokens(2, 6, (10, 11, 12), 2, 0, False, ((4,), (6,))),
    )
    batch = builder.build(spans, [0])
    assert batch.token_ids.tolist() == [77, 10, 11, 12]
    assert batch.positions.tolist() == [[3, 6, 7, 8]]
    assert batch.query_start.tolist() == [0, 1, 4]
    assert batch.context_len.tolist() == [4, 9] == list(batch.context_lens)
    assert batch.query_lens == (1, 3)
    assert batch.prompt_tokens.tolist() == [0, 2]
    assert batch.draft_tokens.tolist() == [0, 0]
    assert batch.logit_rows.tolist() == [0]
    assert [group.block_table.tolist() for group in batch.groups] == [
        [[7, 0, 0], [5, 9, 4]],
        [[2, 0, 0], [1, 3, 6]],
    ]
    assert [group.slot.tolist() for group in batch.groups] == [
        [7 * 4 + 3, 9 * 4 + 2, 9 * 4 + 3, 4 * 4],
        [2 * 4 + 3, 3 * 4 + 2, 3 * 4 + 3, 6 * 4],
    ]


def test_a_row_starts_over_with_the_tables_of_its_new_sequence() -> None:
    builder = BatchBuilder(1, max_rows=1, max_blocks=8, block_size=2, device=CPU)
    builder.add_row(new_row(0, ((3, 4, 5),)))
    builder.add_row(new_row(0, ((6,),)))
    batch = builder.build((ScheduledTokens(0, 2, (1, 2), 2, 0, True, ((8,),)),), [1])
    assert batch.groups[0].block_table.tolist() == [[6, 8]]


def test_a_copy_touches_its_group_alone() -> None:
    specs = [CacheSpec(CacheKind.FULL, 2, 3, 3), CacheSpec(CacheKind.SLIDING, 1, 3, 2, window=4)]
    memory = KVMemory(KERNELS, specs, (4, 5), 4)
    for cache in memory.caches:
        cache.kv.key[1], cache.kv.value[1] = 7.0, 8.0
    memory.apply(CacheOp(CacheOpKind.COPY, 1, source=1, target=3, num_tokens=2))
    full, sliding = (cache.kv for cache in memory.caches)
    assert full.key.shape == (4, 4, 2, 3)
    assert sliding.value.shape == (5, 4, 1, 2)
    assert not full.key[3].any()
    assert (sliding.key[3] == 7).all()
    assert (sliding.value[3] == 8).all()
    with pytest.raises(ValueError, match="save has no tier"):
        Mover().start(CacheOp(CacheOpKind.SAVE, 0, 1, 1, 1))


def test_closing_frees_every_block() -> None:
    specs = [CacheSpec(CacheKind.FULL, 1, 2, 2), CacheSpec(CacheKind.SLIDING, 1, 2, 2, window=4)]
    memory = KVMemory(KERNELS, specs, (4, 5), 4)
    tensors = [weakref.ref(tensor) for cache in memory.caches for tensor in (cache.kv.key, cache.kv.value)]
    assert len(tensors) == 4 and all(tensor() is not None for tensor in tensors)
    memory.close()
    assert [tensor() for tensor in tensors] == [None] * 4
