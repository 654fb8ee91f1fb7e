"""Joins a loaded model with its KV memory, batch builder, executor and sampler; tells the scheduler its limits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.config.options import EngineOptions, SchedulerOptions
from penstock.layers.batch import MaskKind
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.executor import Executor, make_executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.memory_plan import MemoryPlan
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


def scheduler_options(options: EngineOptions, plan: MemoryPlan, model: Model) -> SchedulerOptions:
    """What the scheduler of a model planned for so is told. Of encoders' prompts nothing is kept, so none is shared."""
    whole_prompts = model.mask is not MaskKind.CAUSAL
    assert options.max_num_seqs and options.max_num_batched_tokens
    return SchedulerOptions(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=options.block_size,
        num_blocks=plan.kv_blocks,
        enable_prefix_caching=options.enable_prefix_caching and not whole_prompts,
        policy=options.policy,
        depth=options.depth,
        max_chunk_tokens=None if whole_prompts else options.max_chunk_tokens,
        recurrent=plan.state_bytes > 0,
        checkpoints=plan.checkpoints,
        whole_prompts=whole_prompts,
    )
