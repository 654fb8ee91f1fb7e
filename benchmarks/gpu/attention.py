"""Attention over a paged cache: decode against bandwidth, prompts against matrix peak, and in its latent form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.measure import Figure, Setting
from penstock.kernels.api import KernelSet
from penstock.kernels.cache import KvTensors

BLOCK = 16
STEP = 8192  # tokens written to a cache at once


@dataclass(frozen=True, slots=True)
class Case:
    """A step: (queries, context) of every row, and the heads of a model."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    kv_type: str = "bfloat16"
    value_dim: int = 0
    least: float | None = None

    @property
    def latent(self) -> bool:
        return self.value_dim != self.dim and self.kv_heads == 1

    @property
    def work(self) -> float:
        """Operations: two products for every query and key that it sees."""
        pairs = sum(queries * (context - queries) + queries * (queries + 1) / 2 for queries, context in self.rows)
        return 2.0 * pairs * self.heads * (self.dim + (self.value_dim or self.dim))

    @property
    def width(self) -> int:
        """Blocks of the longest row."""
        return -(-max(context for _, context in self.rows) // BLOCK)

    @property
    def decodes(self) -> bool:
        return all(queries == 1 for queries, _ in self.rows)


LLAMA, LATENT = (32, 8, 128), (16, 1, 576)
CASES = (
    Case("decode, 16 × 32k, 8B", ((1, 32768),) * 16, *LLAMA, least=0.80),
    Case("decode, 16 × 32k, 8B, fp8 cache", ((1, 32768),) * 16, *LLAMA, "fp8"),
    Case("decode, 64 × 2k, 8B", ((1, 2048),) * 64, *LLAMA),
    Case("decode, 1 × 32k, 8B", ((1, 32768),), *LLAMA),
    Case("prompt, 1 × 8k, 8B", ((8192, 8192),), *LLAMA, least=400.0),
    Case("prompt, 16 × 512, 8B", ((512, 512),) * 16, *LLAMA),
    Case("chunk of 2k behind 30k, 8B", ((2048, 32768),), *LLAMA),
    Case("prompt, 1 × 8k, head 64", ((8192, 8192),), 32, 8, 64),
    Case("prompt, 1 × 8k, head 256", ((8192, 8192),), 16, 8, 256),
    Case("latent decode, 16 × 32k, V2-Lite", ((1, 32768),) * 16, *LATENT, value_dim=512),
    Case("latent decode, 64 × 4k, V2-Lite, fp8 cache", ((1, 4096),) * 64, *LATENT, "fp8", value_dim=512),
    Case("latent prompt, 1 × 4k, V2-Lite", ((4096, 4096),), *LATENT, value_dim=512),
)
QUICK = (0, 1, 4, 9)
TINY = (
    Case("decode", ((1, 300),), 4, 2, 16, "fp8"),
    Case("prompt", ((20, 20),), 4, 2, 16, "float32"),
    Case("latent decode", ((1, 40),), 2, 1, 24, "float32", 16),
)


def filled(setting: Setting, ops: KernelSet, case: Case, blocks: int) -> KvTensors:
    """A cache of random entries in every slot but those of block 0."""
    value_dim = case.value_dim or case.dim
    cache = ops.make_cache(
        case.kv_type, blocks, BLOCK, case.kv_heads, case.dim, value_dim, setting.torch_device, case.latent
    )
    for begin in range(BLOCK, blocks * BLOCK, STEP):
        slots = torch.arange(begin, min(begin + STEP, blocks * BLOCK), device=setting.torch_device)
        turned = case.dim - value_dim if case.latent else case.dim
        tables = ops.rope_tables(slots, torch.ones(turned // 2, device=setting.torch_device))
        if case.latent:
            norm = torch.ones(value_dim, device=setting.torch_device)
            ops.latent_cache_write(setting.random(len(slots), case.dim), norm, 1e-6, *tables, slots, cache)
        else:
            parts = setting.random(len(slots), case.kv_heads * (2 * case.dim + value_dim))
            ops.rope_and_cache_write(parts, *tables, slots, cache)
    return cache


def prepared(setting: Setting, case: Case) -> Callable[[], object]:
    """One call of the op; what tiles it takes is decided in the call."""
    ops = setting.kernels(case.kv_type)
    device = setting.torch_device
    lens, contexts = [row[0] for row in case.rows], [row[1] for row in case.rows]
    width = case.width
    blocks = 1 + width * len(case.rows)
    cache = filled(setting, ops, case, blocks)
    table = 1 + torch.randperm(blocks - 1, device=device).int().view(len(case.rows), width)
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    plan = ops.plan_attention(cache, starts, lengths, table, lens, contexts, None)
    query = setting.random(sum(lens), case.heads * case.dim)
    return partial(ops.paged_attention, query, cache, plan, case.dim**-0.5)


def attention(setting: Setting) -> Iterator[Figure]:
    cases = TINY if setting.tiny else [CASES[i] for i in QUICK] if setting.quick else CASES
    for case in cases:
        seconds = setting.seconds([prepared(setting, case)])
        if case.decodes:
            size = setting.kernels(case.kv_type).cache_block_bytes(
                case.kv_type, BLOCK, case.kv_heads, case.dim, case.value_dim or case.dim, case.latent
            )
            rate = size * case.width * len(case.rows) / seconds
            share = setting.share(rate, "read")
            yield Figure(case.name, rate / 1e9, "GB/s", share, "bandwidth", case.least)
        else:
            rate = case.work / seconds
            note = "" if (share := setting.share(rate, "bf16")) is None else f"{share:.0%} of bf16 peak"
            yield Figure(case.name, rate / 1e12, "TFLOP/s", least=case.least, note=note)
