"""Joins a loaded model with its KV memory, batch builder, executor and sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.executor import Executor, make_executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.prepare import Prepared
from penstock.runtime.runner import PROMPT_LOGIT_ROWS, ModelRunner
from penstock.runtime.sampler import Sampler


def make_runner(prepared: Prepared, kv_types: Sequence[str], rows: int) -> tuple[ModelRunner, Executor]:
    """The runner of a model that is prepared and loaded, and what runs its steps.

    Args:
        prepared: with the plan that is to be followed.
        kv_types: of every layer's cache.
        rows: most branches in a step.
    """
    options, plan, model, groups = prepared.options, prepared.plan, prepared.model, prepared.groups
    memory = KVMemory(
        prepared.kernels,
        model.cache_specs,
        groups,
        plan.kv_blocks,
        options.block_size,
        kv_types=kv_types,
        device=options.device,
        state_slots=rows + plan.checkpoints,
    )
    builder = BatchBuilder(
        len(groups),
        rows,
        -(-plan.max_model_len // options.block_size),
        options.block_size,
        torch.device(options.device),
        mask=model.mask,
        types=0 if model.embedding.types is None else model.embedding.types.shape[0],
    )
    assert options.max_num_batched_tokens
    sizes = options.max_num_batched_tokens, max(rows, PROMPT_LOGIT_ROWS)
    executor = make_executor(model, memory.caches, *sizes, options.arithmetic == "fast")
    sampler = Sampler(model.vocab_size, rows, prepared.kernels.sampling())
    return ModelRunner(executor, memory, sampler, builder, model.classifier, model.projection), executor
