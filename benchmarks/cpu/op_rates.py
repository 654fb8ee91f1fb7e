"""Attention by KV type, and the small ops of a step, beside this machine's limits in the same run.

python -m benchmarks.cpu.op_rates [--kv-types bfloat16,int8] [--megabytes 256]

Shapes are those of Llama-3.2-1B. Attention of single tokens is told as bytes of the cache read a second, over caches of
`--megabytes` in turns, and beside the memory bandwidth; attention of prompts as multiplications and additions, beside
the peak of bfloat16 where the cache's type and the processor have those products, else of float32. Best of several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.cpu.kernels import best_seconds
from benchmarks.cpu.limits import measure_limits, settings, share
from benchmarks.report import report
from penstock.kernels.cpu import native, ops
from penstock.kernels.sampling import RowSettings

HEADS, KV_HEADS, DIM, HIDDEN, BLOCK, VOCABULARY = 32, 8, 64, 2048, 16, 151_936
KV_TYPES = ("bfloat16", "float16", "fp8", "int8", "int4")
DECODES = ((1, 4096), (16, 1024), (32, 64))  # (rows, tokens of each one's context)
PROMPTS = (512, 2048)


def attention(kv_type: str, rows: int, queries: int, context: int, copies: int) -> float:
    """Seconds of one layer's attention for `rows` with that many new tokens each, `copies` caches in turns."""
    blocks = -(-context // BLOCK)
    runs: list[Callable[[], Any]] = []
    query = torch.randn(rows * queries, HEADS * DIM)
    for _ in range(copies):
        cache = ops.make_cache(kv_type, 1 + rows * blocks, BLOCK, KV_HEADS, DIM, DIM)
        table = 1 + torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
        place = torch.arange(context)
        for row in range(rows):
            slot = table[row, place // BLOCK].long() * BLOCK + place % BLOCK
            flat = torch.ones(context, 2), torch.zeros(context, 2)
            ops.rope_and_cache_write(torch.randn(context, (HEADS + 2 * KV_HEADS) * DIM), *flat, slot, cache)
        start = torch.arange(rows + 1, dtype=torch.int32) * queries
        lengths = torch.full((rows,), context, dtype=torch.int32)
        plan = ops.plan_attention(cache, start, lengths, table, (queries,) * rows, (context,) * rows, None)
        runs.append(lambda cache=cache, plan=plan: ops.paged_attention(query, cache, plan, DIM**-0.5))  # type: ignore[misc]
    turn = itertools.cycle(runs)
    return best_seconds(lambda: next(turn)())


def small_ops(tokens: int) -> dict[str, float]:
    """Microseconds a token of the other ops of a step over that many tokens, memory warm."""
    x, other, weight = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN), torch.ones(HIDDEN)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    cache = ops.make_cache("bfloat16", 2 + tokens // BLOCK, BLOCK, KV_HEADS, DIM, DIM)
    cos, sin = ops.rope_tables(torch.arange(tokens), 0.1 ** torch.arange(DIM // 2))
    slots = torch.arange(tokens) + BLOCK
    logits = np.random.default_rng(0).standard_normal((min(tokens, 32), VOCABULARY), dtype=np.float32)
    kernel = native.NativeSampling()
    rows = [
        kernel.row(RowSettings(vocab_size=VOCABULARY, seed=i, temperature=0.8, top_k=40, top_p=0.9))
        for i in range(len(logits))
    ]
    positions = np.arange(len(logits))
    seconds = {
        "norm with residual": best_seconds(lambda: ops.rms_norm(x, weight, 1e-5, other)) / tokens,
        "rotation and KV write": best_seconds(lambda: ops.rope_and_cache_write(qkv, cos, sin, slots, cache)) / tokens,
        "sampling, top-k and top-p of 152k": best_seconds(lambda: kernel.sample(logits, rows, positions)) / len(rows),
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def main() -> None:
    options = settings(__doc__)
    options.add_argument("--kv-types", default=",".join(KV_TYPES))
    options.add_argument("--megabytes", type=int, default=256, help="size of all caches that are read in turns")
    given = options.parse_args()
    native.select_isa(given.isa)
    native.library().set_num_threads(given.threads)
    limits = measure_limits(given.threads)
    figures: dict[str, Any] = {}
    table = []
    for kv_type in given.kv_types.split(","):
        token = ops.cache_block_bytes(kv_type, BLOCK, KV_HEADS, DIM, DIM) / BLOCK
        peak = limits["bf16" if kv_type == "bfloat16" and native.isa() == "avx512_bf16" else "fp32"]
        cells, found = [], {}
        for rows, context in DECODES:
            read = token * rows * context
            copies = max(1, int(given.megabytes * 1e6 / read))
            rate = read / attention(kv_type, rows, 1, context, min(copies, 64)) / 1e9
            found[f"decode {rows} x {context}, GB/s"] = rate
            cells.append(share(rate, limits["read"]))
        for prompt in PROMPTS:
            work = 4 * HEADS * DIM * prompt * (prompt + 1) / 2
            rate = work / attention(kv_type, 1, prompt, prompt, 1) / 1e12
            found[f"prompt {prompt}, TFLOPS"] = rate
            cells.append(share(rate, peak))
        figures[kv_type] = found
        table.append([kv_type, token / (2 * KV_HEADS * DIM) * 8, *cells])
    small = {str(tokens): small_ops(tokens) for tokens in (1, 32, 512)}
    columns = ["KV type", "bits", *(f"{r} row(s), {c} deep: GB/s" for r, c in DECODES)]
    columns += [f"prompt of {n}: TFLOPS" for n in PROMPTS]
    everything = {"isa": native.isa(), "threads": given.threads, "limits": dict(limits), "attention": figures}
    report("cpu_op_rates", given.results, everything | {"microseconds_a_token": small}, columns, table)
    for tokens, values in small.items():
        print(f"{tokens} token(s):", ", ".join(f"{name} {value:.2f} µs" for name, value in values.items()))


if __name__ == "__main__":
    main()
