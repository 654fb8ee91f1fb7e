"""Whether a model of foreign code agrees with itself once its attention reads our caches: tried before it may serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.config.cache_spec import group_layers
from penstock.layers.batch import Batch, GroupTables, LayerCache
from penstock.layers.decoder import DecoderModel

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
)
TOKENS = 40
CHUNKS = (17, 1, 9, 13)
BLOCK = 8


@torch.inference_mode()
def disagreement(model: DecoderModel, expected: Callable[[Tensor], Tensor]) -> float:
    """The mean difference of a random prompt's logits, computed in chunks, in units of their standard deviation.

    Args:
        model: loaded.
        expected: what the logits of a prompt [T] int64 should be, [T, vocab].
    """
    tokens = torch.randint(model.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    groups = group_layers(model.cache_specs)
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    blocks = -(-TOKENS // BLOCK)
    kind = str(model.dtype).removeprefix("torch.")
    caches = [
        LayerCache(
            group_of[layer],
            model.kernels.make_cache(kind, blocks + 1, BLOCK, spec.num_kv_heads, spec.key_dim, spec.value_dim),
        )
        for layer, spec in enumerate(model.cache_specs)
    ]
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)[None]
    parts, done = [], 0
    for count in CHUNKS:
        batch = _chunk(tokens, done, count, table, len(groups))
        parts.append(model.logits(model.forward(batch, caches), torch.arange(count)))
        done += count
    wanted = expected(tokens)
    return float((torch.cat(parts) - wanted).abs().mean() / wanted.std())


def _chunk(tokens: Tensor, done: int, count: int, table: Tensor, groups: int) -> Batch:
    """Tokens [done, done + count) of one row."""
    place = torch.arange(done, done + count)
    slot = table[0, place // BLOCK].long() * BLOCK + place % BLOCK
    return Batch(
        token_ids=tokens[done : done + count],
        positions=place[None],
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_len=torch.tensor([done + count], dtype=torch.int32),
        groups=(GroupTables(table, slot),) * groups,
        prompt_tokens=torch.tensor([count], dtype=torch.int32),
        draft_tokens=torch.zeros(1, dtype=torch.int32),
        logit_rows=torch.arange(count),
        query_lens=(count,),
        context_lens=(done + count,),
    )
