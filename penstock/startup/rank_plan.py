"""What one of several ranks plans with: its part of this machine, and of the memory for keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.config.cache_spec import RUN, CacheKind
from penstock.config.errors import ConfigError
from penstock.config.machine import Machine
from penstock.config.options import EngineOptions
from penstock.config.ranks import rank_count, several
from penstock.config.resolve import Decision, ModelFacts
from penstock.layers.part import ModelPart
from penstock.models.registry import Model


def rank_machine(machine: Machine, options: EngineOptions) -> Machine:
    """The part of a machine that one share of the layers gets, whose memory all ranks have together.

    Stages divide it as they divide layers: what is planned is the sum of them.
    """
    return replace(machine, memory_available=machine.memory_available // options.tensor_parallel_size)


def check_model(model: Model, options: EngineOptions) -> None:
    """Raises ConfigError for a model that several processes cannot compute, where they are asked for."""
    if rank_count(options) == 1:
        return
    why = ""
    if model.runs:
        why = model.runs
    elif any(spec.kind is CacheKind.CROSS for spec in model.cache_specs):
        why = "rows attend to an encoder's output, which one process computes"
    if options.enable_eplb and not why and not any(getattr(layer, "places", None) for layer in model.walk()):
        raise ConfigError("--enable-eplb is not possible: no layer has experts that processes share. Leave it out.")
    if why:
        raise ConfigError(f"{several(options)} is not possible: {why}. Leave it out.")
    sharing = options.decode_context_parallel_size
    if sharing > 1 and all(spec.stripe.whole for spec in model.cache_specs):
        told = "; ".join(f"{kind}: {why}" for kind, why in model.kept_whole.items())
        raise ConfigError(
            f"--decode-context-parallel-size {sharing} is not possible: no layer has keys and values that processes "
            f"would keep {sharing} times: KV heads are dealt, windows slide, or layers are whole in every process"
            f"{told and f' ({told})'}. Leave it out."
        )


def kept_elements(model: Model) -> int:
    """Elements of keys and values that a rank keeps of a token."""
    return sum(spec.elements_per_token for spec in model.cache_specs)


def with_rank_kv(asked: EngineOptions, options: EngineOptions, model: Model, facts: ModelFacts) -> EngineOptions:
    """Options whose kv_cache_memory is that of one rank: of what was asked for an even part, else what its heads need.

    Ranks have the same blocks, each with its own heads; where there are fewer of these than ranks, several keep one.
    """
    if options.kv_cache_memory is None or rank_count(options) == 1:
        return options
    if asked.kv_cache_memory is not None:
        return replace(options, kv_cache_memory=max(1, asked.kv_cache_memory // options.tensor_parallel_size))
    whole = sum(layer.elements_per_token for layer in facts.layers)
    own = kept_elements(model)
    return replace(options, kv_cache_memory=max(1, options.kv_cache_memory * min(own, whole) // max(1, whole)))


def rank_notes(options: EngineOptions, stages: Sequence[ModelPart], model: Model) -> list[Decision]:
    """What an engine tells of its ranks."""
    count = rank_count(options)
    if count == 1:
        return []
    share = "memory and threads told are those of one share of all layers"
    told = [Decision("ranks", str(count), f"{several(options)}: processes; {share}")]
    if len(stages) > 1:
        layers = len(model.blocks)
        counts = ", ".join(str((layers if part.end is None else part.end) - part.first) for part in stages)
        why = "by what a step reads of each" if options.pipeline_layer_split is None else "--pipeline-layer-split"
        told.append(Decision("layers of stages", counts, why))
    if options.decode_context_parallel_size > 1:
        shared = sum(not spec.stripe.whole for spec in model.cache_specs)
        why = f"{shared} of {len(model.cache_specs)} layers, whose positions are dealt in runs of {RUN}"
        told.append(Decision("contexts", f"over {options.decode_context_parallel_size} ranks", why))
    told += (Decision(f"{kind} layers", "whole in every rank", why) for kind, why in model.kept_whole.items())
    return told
