"""The scheduler's options for a planned model. No torch here."""

from __future__ import annotations

from penstock.config.options import EngineOptions, SchedulerOptions
from penstock.startup.memory_plan import MemoryPlan


def spare_states(plan: MemoryPlan) -> int:
    """Slots of recurrent states behind those of the rows: for shared prefixes, and for drafts that are verified."""
    return plan.checkpoints + plan.draft_states


def scheduler_options(options: EngineOptions, plan: MemoryPlan, *, whole_prompts: bool = False) -> SchedulerOptions:
    """For concrete options. An encoder's prompts, computed whole, are not kept in the cache, nor shared."""
    assert options.max_num_seqs and options.max_num_batched_tokens and options.depth is not None
    stages = options.pipeline_parallel_size
    return SchedulerOptions(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=options.block_size,
        num_blocks=plan.kv_blocks,
        enable_prefix_caching=options.enable_prefix_caching and not whole_prompts,
        policy=options.policy,
        depth=options.depth if stages == 1 else stages - 1,
        max_chunk_tokens=None if whole_prompts else options.max_chunk_tokens,
        recurrent=plan.state_bytes > 0,
        checkpoints=spare_states(plan),
        whole_prompts=whole_prompts,
        share_prefix_cache=options.share_prefix_cache,
        stages=stages,
    )
