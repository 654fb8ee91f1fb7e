"""How much memory low-rank adapters may take. Pure arithmetic, no torch."""

from __future__ import annotations

from penstock.config.options import EngineOptions
from penstock.config.resolve import ModelFacts

_VALUE_BYTES = 4  # of adapters in float32, the widest type


def adapter_bytes(facts: ModelFacts, options: EngineOptions) -> int:
    """What all adapters together may take, in slots and in memory; 0 for an engine without."""
    if not options.enable_lora:
        return 0
    return most_adapters(options) * (options.max_lora_bytes or bytes_of_one(facts, options.max_lora_rank))


def part_bytes(facts: ModelFacts, options: EngineOptions, layers: int, tables: int) -> int:
    """Of that, what goes with so many layers and so many of embedding and head."""
    rank = options.max_lora_rank
    share = layers * _layer_bytes(facts, rank) + tables * _table_bytes(facts, rank)
    return -(-adapter_bytes(facts, options) * share // bytes_of_one(facts, rank))


def most_adapters(options: EngineOptions) -> int:
    """For how many adapters of the largest rank there is memory."""
    return max(options.max_loras, options.max_cpu_loras or 0)


def bytes_of_one(facts: ModelFacts, rank: int) -> int:
    """An adapter of embedding, head and all projections of a model, in float32; experts of a layer count as one."""
    return max(1, len(facts.layers)) * _layer_bytes(facts, rank) + 2 * _table_bytes(facts, rank)


def _layer_bytes(facts: ModelFacts, rank: int) -> int:
    hidden, attention = facts.hidden_size, facts.attention_size
    return _VALUE_BYTES * rank * (4 * (hidden + attention) + 3 * (hidden + facts.intermediate_size))


def _table_bytes(facts: ModelFacts, rank: int) -> int:
    return _VALUE_BYTES * rank * (facts.hidden_size + facts.vocab_size)
