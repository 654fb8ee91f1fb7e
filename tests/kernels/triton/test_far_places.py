"""Places beyond 2³¹ elements, which large caches and stacks of experts have; what lies between is never touched."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch

from penstock.kernels.cache import KvTensors
from tests.kernels.triton.compare import sides

PAGE = 1 << 30  # elements between blocks; the third begins behind 2³¹


def test_blocks_of_a_cache(device):
    both = sides(device, torch.float32, "make_cache", "paged_attention", kv_type="fp8")
    block, heads, dim = 4, 2, 16
    near = both.ours.make_cache("fp8", 3, block, heads, dim, dim, both.torch_device)
    memory = torch.empty(2 * PAGE + (1 << 20), dtype=torch.uint8, device=both.torch_device)
    parts = []
    for number, entries in enumerate((near.layout.key, near.layout.value)):
        own = memory[number << 19 :]
        data = own.view(torch.float8_e4m3fn)[4 * block :]
        parts.append(replace(entries, data=data, scale=own.view(torch.float32), page=PAGE))
    far = KvTensors(memory, memory, replace(near.layout, key=parts[0], value=parts[1]))
    torch.manual_seed(0)
    qkv, cos = both.here(torch.randn(3, 6 * dim)), both.here(torch.ones(3, 1, dim))
    start, length = (both.here(torch.tensor(x, dtype=torch.int32)) for x in ([0, 3], [3]))
    table = both.here(torch.tensor([[2]], dtype=torch.int32))
    found = []
    for cache in (near, far):
        slot = both.here(torch.arange(3) + 2 * block)
        query = both.ours.rope_and_cache_write(qkv, cos, both.here(torch.zeros(3, 1, dim)), slot, cache)
        plan = both.ours.plan_attention(cache, start, length, table, (3,), (3,), None)
        found.append(both.ours.paged_attention(query, cache, plan, 0.3))
    assert found[0].abs().sum() > 0 and torch.equal(*found)


def test_matrices_of_experts(device):
    both = sides(device, torch.bfloat16, "grouped_experts")
    packing, products = (import_module(f"penstock.kernels.triton.{name}") for name in ("packing", "products"))
    size, count = 1024, 2050
    values = torch.empty(count * size, size, dtype=torch.int8, device=both.torch_device)
    torch.manual_seed(0)
    values[-size:] = both.here(torch.randint(-9, 9, (size, size), dtype=torch.int8))
    scales = both.here(torch.rand(1, count * size))
    x, found = both.here(torch.randn(2, size).bfloat16()), []
    for experts, own in ((count, slice(None)), (1, slice(-size, None))):
        part = packing.Eights(experts * size, size, values[own], scales[:, own].contiguous())
        rows, owner = (both.here(torch.tensor(n, dtype=torch.int32)) for n in ([0, 1, *[2] * 14], [experts - 1]))
        found.append(torch.empty(2, size, dtype=torch.bfloat16, device=both.torch_device))
        products.multiply(x, part, found[-1], grouped=products.GroupedRows(rows, owner, 16, 2, 1), experts=experts)
    assert found[0].abs().sum() > 0 and torch.equal(*found)
