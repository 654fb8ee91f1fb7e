"""Key scores over the native library's cache: its keys are read back, a row at a time (`csrc/ops/kv_layout.h`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.cpu.ops import NativeAttentionPlan
from penstock.kernels.cpu.recording import Handle, NotRecordableError
from penstock.kernels.cpu.step_program import MASKS
from penstock.kernels.key_scores import Scoring, SeenRows, summed_weights
from penstock.kernels.reference.attention import visible

TILE, GROUP = 16, 32  # tokens of a tile; elements of an int4 key that share a scale


def key_scores(
    query: Any,
    cache: KvTensors,
    plan: NativeAttentionPlan,
    queries: int,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
) -> Any:
    if isinstance(query, Handle) or plan.tables is None:
        raise NotRecordableError("the model is asked for scores of keys, which are read layer by layer")
    given = query.reshape(len(query), -1, cache.layout.key_dim)
    scoring = Scoring(scale, sinks, soft_cap, slopes)
    return summed_weights(given, _rows(plan), partial(read_keys, cache), queries, scoring)


def _rows(plan: NativeAttentionPlan) -> SeenRows:
    tables = plan.tables
    assert tables is not None
    lens: list[int] = tables.query_start.diff().tolist()
    contexts: list[int] = tables.context_len.tolist()
    masks = () if plan.masks is None else tuple(MASKS[number] for number in plan.masks.tolist())
    seen = visible(lens, contexts, plan.window or None, masks, plan.spans, plan.chunked)
    return SeenRows(lens, contexts, tables.block_table, seen)


def read_keys(cache: KvTensors, blocks: Tensor, count: int) -> Tensor:
    """The first `count` keys of these blocks, [count, K, D] float32."""
    layout = cache.layout
    size, dim = layout.block_size, layout.key_dim
    if not count:  # of a row that attends to no entries; no tiles have no shape to decode
        return torch.zeros(0, layout.heads, dim)
    per_block = -(-size // TILE)
    blocks = blocks[: -(-count // size)]
    tiles = cache.key[blocks].view(len(blocks) * layout.heads * per_block, layout.key_tile_bytes)
    keys = _decoded(tiles, layout)[:, :dim]  # [tiles, D, 16]
    keys = keys.reshape(len(blocks), layout.heads, per_block, dim, TILE).permute(0, 2, 4, 1, 3)
    return keys.reshape(len(blocks), per_block * TILE, layout.heads, dim)[:, :size].flatten(0, 1)[:count]


def _decoded(tiles: Tensor, layout: Any) -> Tensor:
    """Tiles of bytes [n, bytes] → [n, padded D, 16] float32."""
    count, kind = len(tiles), layout.type
    codes = tiles[:, : layout.key_code_bytes].contiguous()
    beside = tiles[:, layout.key_code_bytes :].contiguous()
    if kind in ("float32", "float16"):
        return codes.view(torch.float32 if kind == "float32" else torch.float16).float().view(count, -1, TILE)
    if kind == "bfloat16":  # in pairs of elements
        return codes.view(torch.bfloat16).float().view(count, -1, TILE, 2).transpose(2, 3).reshape(count, -1, TILE)
    if kind == "int4":
        pairs = codes.view(count, -1, 1, TILE)
        values = torch.cat((pairs & 15, pairs >> 4), dim=2).float().reshape(count, -1, TILE)
        groups = -(-layout.key_dim // GROUP)
        scales = beside[:, : groups * 4 * TILE].contiguous().view(torch.bfloat16).float().view(count, groups, 2, TILE)
        scale, least = (part.repeat_interleave(GROUP, 1)[:, : values.shape[1]] for part in scales.unbind(2))
        return values * scale + least
    if kind == "fp8":
        values = codes.view(torch.float8_e4m3fn).float().view(count, -1, TILE)
    elif layout.latent:
        values = codes.view(torch.int8).float().view(count, -1, TILE)
    else:  # four elements side by side, plus 128
        values = (codes.float() - 128.0).view(count, -1, TILE, 4).transpose(2, 3).reshape(count, -1, TILE)
    factors = beside[:, : 4 * TILE * (1 + layout.latent)].contiguous().view(torch.float32).view(count, -1, 1, TILE)
    if not layout.latent:
        return values * factors[:, 0]
    first = torch.arange(values.shape[1]) < layout.value_dim
    return torch.where(first.view(1, -1, 1), values * factors[:, 0], values * factors[:, 1])
