"""Ops of latent attention: the reference against formulas, the native library against the reference on every ISA."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.cpu import native, ops
from penstock.kernels.reference import attention, dense, experts, latent
from penstock.quant.encode import quantize_matrix

BLOCK, LATENT, ROTATED = 16, 48, 20
SHIFT = 6.0  # rotated parts are larger than latents, as in trained models
KV_TYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "int4")


@dataclass
class Rows:
    """Rows (queries, context), their cache entries before norm and rotation, and where those go."""

    lens: tuple[tuple[int, int], ...]
    heads: int
    block: int = BLOCK
    latent: int = LATENT
    rotated: int = ROTATED

    def __post_init__(self) -> None:
        torch.manual_seed(len(self.lens) + self.heads)
        counts = [-(-context // self.block) for _, context in self.lens]
        free = list(range(1, sum(counts) + 2))
        random.Random(3).shuffle(free)
        self.table = torch.zeros(len(self.lens), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        self.blocks = sum(counts) + 2
        size = self.latent + self.rotated
        self.entries = [torch.randn(context, size) for _, context in self.lens]
        for entries in self.entries:
            entries[:, self.latent :] *= SHIFT
        self.norm = torch.rand(self.latent) + 0.5
        self.query = torch.randn(sum(queries for queries, _ in self.lens), self.heads, size) * 0.2

    def slots(self, row: int) -> Tensor:
        place = torch.arange(self.lens[row][1])
        return self.table[row, place // self.block].long() * self.block + place % self.block

    def fill(self, run: Any, kv_type: str, step: int) -> KvTensors:
        """A cache of garbage with all entries written, `step` tokens at a time."""
        size = self.latent + self.rotated
        cache = run.make_cache(kv_type, self.blocks, self.block, 1, size, self.latent, latent=True)
        cache.key.view(torch.uint8).fill_(255)
        frequencies = 10000.0 ** -(torch.arange(0, self.rotated, 2) / self.rotated)
        for row, entries in enumerate(self.entries):
            for begin in range(0, len(entries), step):
                part = slice(begin, begin + step)
                cos, sin = run.rope_tables(torch.arange(len(entries))[part], frequencies)
                write = entries[part].contiguous(), self.norm, 1e-6, cos, sin, self.slots(row)[part], cache, True
                run.latent_cache_write(*write)
        return cache

    def written(self, run: Any) -> list[Tensor]:
        """The native float32 keys of each row, [tokens, C + P]: a tile is [C + P][16 tokens]."""
        size = self.latent + self.rotated
        keys = self.fill(run, "float32", 1000).key.view(torch.float32).view(self.blocks, -1, size, 16)
        flat = keys.permute(0, 1, 3, 2).reshape(self.blocks, -1, size)[:, : self.block].reshape(-1, size)
        return [flat[self.slots(row)] for row in range(len(self.lens))]

    def attend(self, run: Any, kv_type: str = "float32", keep: slice | None = None, step: int = 1000) -> Tensor:
        """Attends for the rows of `keep`."""
        return self.ask(run, self.fill(run, kv_type, step), keep or slice(None))

    def ask(self, run: Any, cache: KvTensors, keep: slice) -> Tensor:
        lens = self.lens[keep]
        queries, contexts = tuple(q for q, _ in lens), tuple(c for _, c in lens)
        before = sum(q for q, _ in self.lens[: keep.start or 0])
        query = self.query[before : before + sum(queries)]
        start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        lengths, table = torch.tensor(contexts, dtype=torch.int32), self.table[keep].contiguous()
        plan = run.plan_attention(cache, start, lengths, table, queries, contexts, None)
        return run.paged_attention(query.flatten(1), cache, plan, 0.3)


class Reference:
    """The reference ops under the names of the native module."""

    latent_cache_write = staticmethod(latent.latent_cache_write)
    rope_tables, make_cache = staticmethod(dense.rope_tables), staticmethod(dense.make_cache)
    plan_attention = staticmethod(attention.plan_attention)
    paged_attention = attention.PagedAttention()


def formula(rows: Rows, keys: list[Tensor]) -> Tensor:
    """Softmax attention in float64 over one key a token for all heads, whose beginning is the value."""
    out, token = [], 0
    for (queries, context), key in zip(rows.lens, keys, strict=True):
        for place in range(context - queries, context):
            scores = rows.query[token].double() @ key[: place + 1].double().t() * 0.3
            out.append(scores.softmax(-1) @ key[: place + 1, : rows.latent].double())
            token += 1
    return torch.stack(out).flatten(1)


def exact_keys(rows: Rows) -> list[Tensor]:
    """Normalised latents and key parts rotated pair by pair, in float64."""
    keys = []
    for entries in rows.entries:
        x = entries.double()
        part = x[:, : rows.latent]
        part = part / (part.square().mean(1, keepdim=True) + 1e-6).sqrt() * rows.norm
        pairs = torch.view_as_complex(x[:, rows.latent :].reshape(len(x), -1, 2))
        angle = torch.outer(torch.arange(len(x)), 10000.0 ** -(torch.arange(0, rows.rotated, 2) / rows.rotated))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle.double()), angle.double()))
        keys.append(torch.cat((part, turned[..., 0], turned[..., 1]), dim=1))
    return keys


def stored(rows: Rows, x: Tensor, kv_type: str) -> Tensor:
    """Keys [tokens, C + P] float32 as a type keeps them: scales of a token's two parts, or of 32 elements."""
    if kv_type in ("bfloat16", "float16"):
        return x.to(getattr(torch, kv_type)).float()
    if kv_type in ("fp8", "int8"):
        end = 448.0 if kv_type == "fp8" else 127.0
        parts = []
        for part in (x[:, : rows.latent], x[:, rows.latent :]):
            most = part.abs().amax(1, keepdim=True)
            code = part * (torch.tensor(end) / most)
            code = code.to(torch.float8_e4m3fn).float() if kv_type == "fp8" else code.round()
            parts.append(code * (most / end))
        return torch.cat(parts, dim=1)
    if kv_type == "int4":
        parts = []
        for part in x.split(32, dim=1):
            low = part.amin(1, keepdim=True)
            scale = ((part.amax(1, keepdim=True) - low) / 15).bfloat16().float()
            low = low.bfloat16().float()
            parts.append(((part - low) * (torch.tensor(1.0) / scale) + 0.5).clamp(0, 15).floor() * scale + low)
        return torch.cat(parts, dim=1)
    return x


GRID = [
    Rows(((1, 1), (1, 40), (5, 21), (1, 257)), 16),
    Rows(((40, 40), (1, 300), (3, 33)), 5),
    Rows(((1, 530), (2, 2)), 90, block=32),
    Rows(((7, 7), (1, 100)), 3, block=4, latent=16, rotated=2),
    Rows(((1, 290), (4, 70)), 40, latent=512, rotated=64),
]


@pytest.mark.parametrize("rows", GRID, ids=range(len(GRID)))
def test_reference_equals_the_formula(rows):
    torch.testing.assert_close(rows.attend(Reference).double(), formula(rows, exact_keys(rows)), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("rows", GRID, ids=range(len(GRID)))
def test_native_equals_the_reference(isa, rows):
    torch.testing.assert_close(rows.attend(ops), rows.attend(Reference), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("rows", GRID, ids=range(len(GRID)))
def test_small_types_are_near_and_alike_on_all_instruction_sets(rows, kv_type):
    results, rounded = [], []
    for name in native.usable_isas():
        native.select_isa(name)
        alone = (name, kv_type) == ("avx512_bf16", "bfloat16")
        (rounded if alone else results).append(rows.attend(ops, kv_type))
    native.select_isa("auto")
    keys = [stored(rows, key, kv_type) for key in rows.written(ops)]
    torch.testing.assert_close(results[0].double(), formula(rows, keys), rtol=2e-4, atol=2e-4)
    for other in results[1:]:
        assert torch.equal(other, results[0])
    for other in rounded:
        torch.testing.assert_close(other, results[0], rtol=0.0, atol=2e-2)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_rows_do_not_depend_on_their_mates_or_on_how_they_were_written(isa, kv_type):
    rows = GRID[0]
    whole = rows.attend(ops, kv_type)
    assert torch.equal(rows.attend(ops, kv_type, step=7), whole)
    begin = 0
    for row, (queries, _) in enumerate(rows.lens):
        alone = rows.attend(ops, kv_type, slice(row, row + 1))
        assert torch.equal(alone, whole[begin : begin + queries])
        begin += queries


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_block_is_the_bytes_it_says_and_one_copy(kv_type):
    cache = ops.make_cache(kv_type, 3, BLOCK, 1, 576, 512, latent=True)
    size = ops.cache_block_bytes(kv_type, BLOCK, 1, 576, 512, latent=True)
    assert cache.key.nbytes + cache.value.nbytes == 3 * size
    assert size < 0.6 * ops.cache_block_bytes(kv_type, BLOCK, 1, 576, 512)
    cache.key[1] = 7
    cache.copy_block(1, 2)
    assert torch.equal(cache.key[2], cache.key[1])
    with pytest.raises(ValueError, match="value size of a latent KV cache is 20; it must be a multiple of 16"):
        ops.make_cache(kv_type, 3, BLOCK, 1, 36, 20, latent=True)


@pytest.mark.parametrize(("heads", "outputs", "inputs", "rotated"), [(4, 48, 20, 6), (16, 128, 64, 0), (3, 5, 7, 2)])
@pytest.mark.parametrize("tokens", [1, 5, 170])
@pytest.mark.parametrize("interleaved", [False, True])
def test_one_product_a_head(product_isa, heads, outputs, inputs, rotated, tokens, interleaved):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, heads * (inputs + rotated))
    weight = torch.randn(heads * outputs, inputs) / inputs**0.5
    tables: tuple[Tensor, ...] = ()
    if rotated:
        tables = dense.rope_tables(torch.arange(tokens) * 3, 0.1 ** torch.arange(rotated // 2), 1.2)
    plain = experts.pack_experts([weight], heads)
    expected = latent.head_linear(x, plain, *tables, interleaved=interleaved)
    by_hand = torch.einsum("thk,hmk->thm", x.view(tokens, heads, -1)[..., :inputs], weight.view(heads, outputs, inputs))
    torch.testing.assert_close(expected.view(tokens, heads, -1)[..., :outputs], by_hand)
    packed = ops.pack_experts([weight], heads)
    ours = ops.head_linear(x, packed, *tables, interleaved=interleaved)
    tolerance = 5e-2 if native.two_ways() else 1e-5  # matrix units take bfloat16
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    few = ops.head_linear(x[:3].contiguous(), packed, *(t[:3].contiguous() for t in tables), interleaved=interleaved)
    assert torch.equal(few, ours[:3])


def test_one_product_a_head_over_integers(product_isa):
    """Quantised matrices take their inputs in eight bits."""
    torch.manual_seed(0)
    heads, outputs, inputs = 4, 32, 64
    weight = torch.randn(heads * outputs, inputs) / 8
    stored = quantize_matrix("q8_0", weight.numpy())
    packed = ops.pack_experts([stored], heads)
    x = torch.randn(9, heads * inputs)
    expected = latent.head_linear(x, experts.pack_experts([weight], heads))
    ours = ops.head_linear(x, packed)
    torch.testing.assert_close(ours, expected, rtol=0.0, atol=0.05)
    assert torch.equal(ops.head_linear(x[4:5].contiguous(), packed), ours[4:5])
