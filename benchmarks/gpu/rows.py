"""Ops that read little beside what they write: norms, rotation with the cache's write, and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.measure import Figure, Setting
from penstock.kernels.sampling import RowSettings

SAMPLERS = {"greedy": {"temperature": 0.0}, "draw": {}, "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
            "top-p 0.95, min-p 0.02, penalties": {"top_p": 0.95, "min_p": 0.02, "presence_penalty": 0.5}}  # fmt: skip


def rows(setting: Setting) -> Iterator[Figure]:
    """Time a call, and bytes moved beside bandwidth where there are many rows."""
    ops = setting.kernels()
    one, launches = setting.random(1, 64), 4 if setting.tiny else 400
    each = setting.seconds([partial(ops.add, one, one)] * launches) / launches
    yield Figure("a launch that does next to nothing", each * 1e6, "µs")
    hidden, heads, kv_heads, dim = (64, 4, 2, 16) if setting.tiny else (4096, 32, 8, 128)
    weight = torch.ones(hidden, device=setting.torch_device)
    frequencies = torch.ones(dim // 2, device=setting.torch_device)
    for tokens in (3,) if setting.tiny else (1, 64, 8192):
        copies = 1 if setting.tiny else max(1, min(16, (64 << 20) // (tokens * hidden)))
        xs = [setting.random(tokens, hidden) for _ in range(copies)]
        norm = setting.seconds([partial(ops.rms_norm, x, weight, 1e-6, x) for x in xs]) / copies
        yield _row(setting, f"rms_norm with residual, {tokens} × {hidden}", norm, 4 * xs[0].nbytes)
        slots = torch.arange(tokens, device=setting.torch_device)
        name = str(setting.dtype).removeprefix("torch.")
        cache = ops.make_cache(name, -(-tokens // 16) + 1, 16, kv_heads, dim, dim, setting.torch_device)
        tables = ops.rope_tables(slots, frequencies)
        parts = [setting.random(tokens, (heads + 2 * kv_heads) * dim) for _ in range(copies)]
        calls = [partial(ops.rope_and_cache_write, x, *tables, slots, cache) for x in parts]
        yield _row(
            setting, f"rotation and cache write, {tokens} tokens", setting.seconds(calls) / copies, 2 * parts[0].nbytes
        )


def _row(setting: Setting, name: str, seconds: float, size: int) -> Figure:
    share = setting.share(size / seconds, "read") if size > 32 << 20 else None
    return Figure(name, seconds * 1e6, "µs", note="" if share is None else f"{share:.0%} of bandwidth")


def sampling(setting: Setting) -> Iterator[Figure]:
    """Draws of a step, with what the host does for them."""
    op: Any = setting.kernels().sampling()  # `draw` is the device's own
    for vocabulary in (200,) if setting.tiny else (128_256, 262_144):
        count = 2 if setting.tiny else 64
        logits = torch.randn(count, vocabulary, device=setting.torch_device) * 4
        positions = np.arange(count)
        for name, given in [*SAMPLERS.items()][: 2 if setting.tiny else None]:
            made = RowSettings(vocabulary, **given)  # type: ignore[arg-type]
            drawn = [op.row(replace(made, seed=number)) for number in range(count)]
            seconds = setting.seconds([partial(op.draw, logits, drawn, positions)], graph=False)
            rate = logits.nbytes / seconds
            share = setting.share(rate, "read")
            note = "" if share is None else f"{1 / share:.1f} times a read of the logits"
            yield Figure(f"{name}, {count} × {vocabulary}", seconds * 1e6, "µs", note=note)
        targets = np.arange(count)
        seconds = setting.seconds([partial(op.logprobs, logits, targets, 5)], graph=False)
        yield Figure(f"log-probabilities, top 5, {count} × {vocabulary}", seconds * 1e6, "µs")
