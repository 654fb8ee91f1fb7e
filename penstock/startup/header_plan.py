"""Where a model's memory would go, from what headers tell, and the machine without its GPUs. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.config.machine import Accelerator, Machine, read_machine
from penstock.config.options import EngineOptions
from penstock.config.resolve import ModelFacts
from penstock.config.speculation import speculation
from penstock.kernels.cpu import native
from penstock.kernels.cpu.packed import block_bytes, kv_layout
from penstock.startup.cache_plan import Caches, memory_limits, plan_caches
from penstock.startup.draft_room import DraftNeeds, logits_at_once, with_draft_room
from penstock.startup.memory_plan import MemoryPlan
from penstock.startup.resident import Packer, resident_bytes
from penstock.weights.draft_heads import head_files, kind_of
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint


def this_machine(accelerators: tuple[Accelerator, ...] = ()) -> Machine:
    """This machine as the native library sees it; of GPUs it has those it is told of."""
    features = native.cpu_features()
    return read_machine(
        isas=native.usable_isas(),
        refused_isas=native.refused_isas(),
        has_bf16=features.get("avx512_bf16", False) or features.get("amx_bf16", False),
        accelerators=accelerators,
    )


def plan_from_headers(facts: ModelFacts, asked: EngineOptions, concrete: EngineOptions, machine: Machine) -> MemoryPlan:
    """The plan of a model of which headers alone are known, with its draft model if it has one, on a machine's CPU.

    Args:
        facts: of the model.
        asked, concrete: options as they were asked for, and resolved.
        machine: on which it is to run.

    Raises:
        CheckpointError: the draft model or head cannot be read.
        MemoryPlanError: it does not fit.
    """
    packer = Packer("native" if machine.isas else "reference")
    draft = _draft(packer, concrete, facts)
    specs, guests = tuple(_specs(facts)), () if draft is None or draft.own else tuple(_specs(draft.facts))
    block_bytes = native_block_bytes if machine.isas else _plain_block_bytes
    caches = Caches(specs, block_bytes, facts.whole_prompts, guests)
    limits = with_draft_room(memory_limits(asked, concrete, machine, None), draft, caches, concrete)
    weights = resident_bytes(facts, packer, concrete)
    return plan_caches(caches, concrete, limits, (concrete.kv_cache_dtype,) * len(specs), facts, weights)


def _draft(packer: Packer, options: EngineOptions, target: ModelFacts) -> DraftNeeds | None:
    """What headers tell of the draft model that is asked for, if one is; its weights are quantised no further. One with
    another number of tokens is taken to have another vocabulary."""
    asked = speculation(options.speculative_config)
    if asked is None or not asked.loads or asked.method == "self":  # which is there already
        return None
    checkpoint = open_checkpoint(asked.model or options.model)
    kind = kind_of(checkpoint, asked.method)
    facts = model_facts(checkpoint) if kind is None else head_files(checkpoint, kind).facts()
    weights = resident_bytes(facts, packer, replace(options, quantize=None))
    own = tuple(_specs(facts)) if kind is None and facts.vocab_size != target.vocab_size else ()
    return DraftNeeds(asked, facts, weights, logits_at_once(kind, asked), own)


def _specs(facts: ModelFacts) -> Iterator[CacheSpec]:
    """Caches as headers tell of them: so many elements a token, here as those of one head."""
    for layer in facts.layers:
        kind = CacheKind.FULL if layer.window is None else CacheKind.SLIDING
        key = -(-layer.elements_per_token // 2)
        yield CacheSpec(kind, 1 if key else 0, key, layer.elements_per_token - key, layer.window)


def native_block_bytes(kv_type: str, block_size: int, heads: int, key_dim: int, value_dim: int, latent: bool) -> int:
    """The op `cache_block_bytes` of the native library; 0 of a layer that keeps no keys."""
    return 0 if not heads else block_bytes(kv_layout(kv_type, block_size, heads, key_dim, value_dim, latent))


def _plain_block_bytes(kv_type: str, block_size: int, heads: int, key_dim: int, value_dim: int, latent: bool) -> int:
    size = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": 0.5}.get(kv_type, 1.0)
    return int(size * block_size * heads * (key_dim + value_dim))
