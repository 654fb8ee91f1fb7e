"""Runs a model step by step as a runner would: rows in scattered blocks of four tokens, one batch a step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.cache_spec import group_layers
from penstock.kernels.adapters import tokens_of
from penstock.kernels.api import resolve_kernels
from penstock.kernels.cache import KvTensors
from penstock.kernels.registry import KernelContext
from penstock.layers.batch import Batch, GroupTables, LayerCache
from penstock.models.registry import Model, build_model
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny

BLOCK_SIZE, ROWS = 4, 8  # ROWS: slots of recurrent states


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """The model of a checkpoint folder, on the reference kernels."""
    checkpoint = open_checkpoint(path)
    kernels = resolve_kernels(KernelContext("cpu", str(dtype).removeprefix("torch.")))
    model = build_model(checkpoint.config, kernels, dtype=dtype, **options)
    plans = () if model.runs else plan_weights(model, checkpoint, LoadTarget(dtype))
    load_weights(model, checkpoint, plans)
    return model


class Harness:
    """Owns the KV memory of a model and the block tables of its rows.

    Blocks are handed out in random order, poisoned with NaN first; of a sliding group, blocks that fell out of the
    window are replaced by block 0 and poisoned again, so that any read outside the contract shows.
    """

    def __init__(self, model: Model, *, num_blocks: int = 200, seed: int = 0) -> None:
        self.model, self.axes = model, model.position_axes
        self.groups = group_layers(model.cache_specs)
        free = list(range(1, num_blocks))
        random.Random(seed).shuffle(free)
        self.free = [list(free) for _ in self.groups]
        self.caches: list[LayerCache] = []
        group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        for layer, spec in enumerate(model.cache_specs):
            if spec.state:  # a row that starts must not read what an earlier one left
                state = tuple(torch.full((ROWS, *shape), float("nan")) for shape in spec.state)
                self.caches.append(LayerCache(len(self.groups), KvTensors(torch.empty(0), torch.empty(0)), state))
                continue
            sizes = (spec.num_kv_heads, spec.key_dim, spec.value_dim)
            kv_type = str(model.dtype).removeprefix("torch.")
            kv = model.kernels.make_cache(kv_type, num_blocks, BLOCK_SIZE, *sizes, latent=spec.latent)
            for tensor in (kv.key, kv.value):
                tensor.view(torch.uint8).fill_(255)  # NaN in every float type
            self.caches.append(LayerCache(group_of[layer], kv))
        self.tables: dict[str, list[list[int]]] = {}
        self.slots: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Computes the given tokens of each row (new rows appear by being named): logits [tokens, vocab] of each."""
        logits = self.wanted(work, range(sum(map(len, work.values()))))
        return dict(zip(work, logits.split([len(tokens) for tokens in work.values()]), strict=True))

    def next_batch(self, work: Mapping[str, Sequence[int]]) -> Batch:
        """The batch of the next step, whose logits are all wanted; somebody else computes it."""
        for row, new in work.items():
            self._extend(row, len(new))
        return replace(self._batch(work), logit_rows=torch.arange(sum(map(len, work.values()))))

    def wanted(self, work: Mapping[str, Sequence[int]], tokens: Sequence[int]) -> Tensor:
        """Computes a step as `step` does, and the logits of some of its tokens: [tokens, vocab]."""
        for row, new in work.items():
            self._extend(row, len(new))
        batch = replace(self._batch(work), logit_rows=torch.tensor(tokens, dtype=torch.int64))
        hidden, rows = self.model.forward(batch, self.caches), torch.arange(len(tokens))
        if batch.adapters is None:
            return self.model.logits(hidden, rows)
        return self.model.logits(hidden, rows, tokens_of(batch.adapters, rows))

    def _extend(self, row: str, count: int) -> None:
        tables = self.tables.setdefault(row, [[] for _ in self.groups])
        self.slots.setdefault(row, (5 * len(self.slots) + 3) % ROWS)
        start = self.lengths.get(row, 0)
        self.lengths[row] = start + count
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            while len(table) * BLOCK_SIZE < start + count:
                table.append(self.free[index].pop())
            if group.window is None:
                continue
            for dropped in range(max(0, start - group.window + 1) // BLOCK_SIZE):
                block, table[dropped] = table[dropped], 0
                for layer in group.layers if block else ():
                    kv = self.caches[layer].kv
                    for tensor in (kv.key, kv.value):
                        tensor[block].view(torch.uint8).fill_(255)

    def _batch(self, work: Mapping[str, Sequence[int]]) -> Batch:
        query_lens = tuple(len(tokens) for tokens in work.values())
        context_lens = tuple(self.lengths[row] for row in work)
        spans = list(zip(context_lens, query_lens, strict=True))
        positions = torch.cat([torch.arange(context - count, context) for context, count in spans])
        rows = torch.repeat_interleave(torch.arange(len(work)), torch.tensor(query_lens))
        groups = []
        for index in range(len(self.groups)):
            tables = [self.tables[row][index] for row in work]
            width = max(map(len, tables)) + 2  # wider than needed, as a real table is
            table = torch.tensor([entries + [0] * (width - len(entries)) for entries in tables], dtype=torch.int32)
            slot = table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            groups.append(GroupTables(table, slot))
        return Batch(
            token_ids=torch.tensor([token for tokens in work.values() for token in tokens], dtype=torch.int64),
            positions=positions.expand(self.axes, -1),
            query_start=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
            context_len=torch.tensor(context_lens, dtype=torch.int32),
            groups=tuple(groups),
            prompt_tokens=torch.tensor(query_lens, dtype=torch.int32),
            draft_tokens=torch.zeros(len(query_lens), dtype=torch.int32),
            logit_rows=torch.arange(0),
            query_lens=query_lens,
            context_lens=context_lens,
            state_slot=torch.tensor([self.slots[row] for row in work], dtype=torch.int64),
        )


def greedy(model: Model, prompt: Sequence[int], count: int, stop: Sequence[int] = (), chunk: int = 1000) -> list[int]:
    """The first `count` greedy tokens after a prompt computed in chunks; a stop token ends them."""
    harness = Harness(model, num_blocks=(len(prompt) + count) // BLOCK_SIZE + 3)
    for start in range(0, len(prompt), chunk):
        logits = harness.step({"row": prompt[start : start + chunk]})["row"]
    tokens: list[int] = []
    while True:
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == count or tokens[-1] in stop:
            return tokens
        logits = harness.step({"row": tokens[-1:]})["row"]


def check_logits(path: Path, theirs: Any, count: int = 30) -> None:
    """A checkpoint gives the logits of transformers' model for a prompt, computed in chunks."""
    tokens, harness = tiny.prompt(count), Harness(load(path))
    logits = torch.cat([harness.step({"row": tokens[start : start + 8]})["row"] for start in range(0, count, 8)])
    assert tiny.distance(logits, tiny.reference_logits(theirs, tokens)) < 1e-4
