"""The fields of `EngineOptions` as keywords, for type checkers; `tests/test_keywords.py` keeps them equal."""

from __future__ import annotations

from typing import Any, TypedDict


class EngineKeywords(TypedDict, total=False):
    """Keywords of `LLM` and `AsyncLLM`: what `EngineOptions` says, but the model."""

    served_model_name: str | None
    device: str
    dtype: str
    kv_cache_dtype: str
    pack_cache: str
    pack_cache_size: int | None
    load_format: str
    quantize: str | None
    isa: str
    arithmetic: str
    batch_invariant: bool
    threads: int | None
    tensor_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layer_split: str | None
    remote_workers: int
    workers_address: str | None
    distributed_executor_backend: str
    enable_expert_parallel: bool
    enable_eplb: bool
    num_redundant_experts: int
    eplb_step_interval: int
    data_parallel_size: int
    routing_policy: str
    max_model_len: int | None
    goal: str
    max_users: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_chunk_tokens: int | None
    block_size: int
    gpu_memory_utilization: float
    memory: int | None
    kv_cache_memory: int | None
    kv_blocks: int | None
    kv_ram: int | None
    kv_disk: int | None
    kv_disk_path: str | None
    kv_events_config: str | None
    prefix_caching_hash_algo: str
    kv_store: str | None
    kv_store_seconds: int | None
    enable_prefix_caching: bool
    share_prefix_cache: bool
    shared_prompts: tuple[str, ...]
    policy: str
    depth: int | None
    enforce_eager: bool | None
    seed: int
    tool_call_parser: str | None
    reasoning_parser: str | None
    max_logprobs: int
    logprobs_mode: str
    speculative_config: str | None
    hf_overrides: str | None
    pooler_config: str | None
    enable_prompt_embeds: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    max_lora_bytes: int | None
    control_vector: tuple[str, ...]
    control_vector_layers: str | None
    watermark_key: int
    logits_processors: tuple[Any, ...]
