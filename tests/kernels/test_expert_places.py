"""Experts that ranks have as a table says: native ops to the bit, the reference closely; and where experts lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import native, ops, shared
from penstock.kernels.cpu.packed import zero_pages
from penstock.kernels.cpu.rank_group import RankGroup
from penstock.kernels.cpu.step_program import address
from penstock.kernels.reference import shared as reference
from penstock.parallel.experts import ExpertTable, placed
from penstock.parallel.ranks import Ranks
from tests.kernels.test_rank_group import group_of, together

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


@pytest.mark.parametrize("copies", [0, 3])
@pytest.mark.parametrize("tokens", [1, 9, 400])  # the last takes several chunks
def test_a_table_says_who_computes_what(tokens: int, copies: int) -> None:
    generator = torch.Generator().manual_seed(3)
    count, hidden, inner, top_k = 6, 2048, 32, 3
    gate_up = torch.randn(count, 2 * inner, hidden, generator=generator) / 45
    down = torch.randn(count, hidden, inner, generator=generator)
    x, residual = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
    weights = torch.rand(tokens, top_k, generator=generator)
    ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])

    def packed(experts: list[int]) -> tuple[object, object]:
        up = [part.flatten(0, 1).contiguous() for part in gate_up[experts].split(inner, dim=1)]
        downs = [down[experts].flatten(0, 1).contiguous()]
        return ops.pack_experts(up, len(experts)), ops.pack_experts(downs, len(experts), segment=1)

    whole = ops.grouped_experts(x, weights, ids, *packed([*range(count)]), "silu", residual=residual)
    tables = [ExpertTable(Ranks(rank, 2), count, copies) for rank in range(2)]
    holdings = placed([9.0, 1.0, 8.0, 2.0, 7.0, 3.0], 2, len(tables[0].holdings[0]))
    for table in tables:
        table.holdings = holdings
        table.apply(())

    def compute(group: RankGroup) -> tuple[Tensor, Tensor]:
        table, own = tables[group.rank], holdings[group.rank]
        routed = x, weights, ids
        found = shared.shared_experts(*routed, *packed(own), "silu", group, 0, residual=residual, places=table)
        plain = gate_up[own], down[own]
        return found, reference.shared_experts(*routed, *plain, "silu", group, 0, residual=residual, places=table)

    with group_of(2) as groups:
        for found, plain in together(groups, compute):
            assert torch.equal(found, whole)
            assert torch.allclose(plain, whole, atol=1e-3)
    for table in tables:  # both ops have counted
        assert table.counts.tolist() == (2 * np.bincount(ids.reshape(-1).numpy(), minlength=count)).tolist()


def test_an_expert_lies_where_it_was_put() -> None:
    values = torch.randn(3 * 40, 24)
    matrix = ops.pack_experts([values], 3).parts[0]
    spare = zero_pages(1, matrix.expert_bytes)
    spare[0] = np.frombuffer(matrix.data, np.uint8)[: matrix.expert_bytes]
    matrix.put_expert(2, address(spare))
    out = np.empty((3 * 40, 24), np.float32)
    matrix.unpack(out)
    assert np.array_equal(out, torch.cat((values[:80], values[:40])).numpy())
    assert matrix.expert_address(2) == address(spare)
    for expert, at, said in ((3, address(spare), "no expert 3 among 3"), (1, address(spare) + 4, "aligned to 64")):
        with pytest.raises(ValueError, match=said):
            matrix.put_expert(expert, at)


def test_what_one_rank_gives_others_take() -> None:
    given = np.random.default_rng(1).integers(0, 255, 3_000_001).astype(np.uint8)  # more than a slot's worth

    def compute(group: RankGroup) -> object:
        got = np.zeros_like(given)
        own = address(given) if group.rank == 1 else 0
        group.pass_on(own, len(given), 1 if group.rank == 0 else 0, address(got) if group.rank == 0 else 0)
        return got

    with group_of(3) as groups:
        got = together(groups, compute)
        assert np.array_equal(got[0], given) and not got[1].any() and not got[2].any()
        with pytest.raises(ValueError, match="from a rank that there is"):
            groups[0].pass_on(0, 8, 3, address(given))
