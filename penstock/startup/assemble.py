"""Loads a prepared model and joins it with its KV memory, batch builder, executor and sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from penstock.config.options import EngineOptions, SchedulerOptions
from penstock.config.resolve import Decision
from penstock.kernels.copies import check
from penstock.kernels.devices import MemoryMeter, memory_meter
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.executor import EagerExecutor, Executor, make_executor
from penstock.runtime.graphs import CudaRecorder, DecodeGraphs, InterpretedRecorder, Recorder, Rehearsal, padded_sizes
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.runner import PROMPT_LOGIT_ROWS, ModelRunner
from penstock.runtime.sampler import Sampler
from penstock.startup.gpu_memory import smaller_share, smaller_step, smaller_weights
from penstock.startup.kv_probe import choose_kv_types
from penstock.startup.memory_plan import MemoryPlan, format_bytes
from penstock.startup.out_of_memory import oom_as_plan_error
from penstock.startup.peak import measure
from penstock.startup.prepare import Prepared, packed_file, plan_again, plan_measured
from penstock.startup.resident import packer_of
from penstock.startup.warm_up import WarmUp
from penstock.weights.loader import load_weights

log = logging.getLogger(__name__)
SHARED = 4  # times that a cache's blocks may be in rows' contexts on average before a step is not replayed
_READ_BACK = (  # ops whose reference does
    *("plan_attention", "paged_attention", "grouped_experts"),
    *("short_conv", "selective_scan", "gated_delta_rule"),
)


def load(
    prepared: Prepared, progress: Callable[[int, int], None] | None = None, meter: MemoryMeter | None = None
) -> tuple[Prepared, tuple[str, ...], list[Decision]]:
    """Loads the weights, chooses the types of the caches and, on a GPU, measures what the largest step leaves for them.

    Args:
        prepared: its model's weights are filled.
        progress: called with (bytes read, bytes in all).
        meter: of the device's memory; None takes the device's own, if it has one.

    Returns:
        What was prepared, planned again where cache types changed or a step was measured; every layer's cache type;
        notes on all this.

    Raises:
        CheckpointError: weights are missing, left over or damaged.
        MemoryPlanError: the caches do not fit.
    """
    model, options = prepared.model, prepared.options
    cache, kept = packed_file(prepared)
    meter = meter or memory_meter(options.torch_device)
    before = meter.read().allocated if meter else 0
    lighter = partial(smaller_weights, prepared.facts, packer_of(prepared.kernels), options, prepared.plan, meter)
    with oom_as_plan_error(prepared.plan, "the weights were loaded", lighter):
        load_weights(
            model,
            prepared.checkpoint,
            dtype=model.dtype,
            progress=progress,
            device=options.torch_device,
            staged=options.device != "cpu",
            cache=cache,
            quantize=options.quantize,
        )
        model.place(torch.device(options.torch_device))
    notes = [Decision("packed weights", *(("kept", cache.describe) if cache else ("not kept", kept)))]
    kv = choose_kv_types(model, prepared.groups, options.kv_cache_dtype, options.block_size, options.torch_device)
    if kv.reason:
        notes.append(Decision("KV cache types", ", ".join(dict.fromkeys(kv.of_layer)), kv.reason))
        prepared = replace(prepared, plan=plan_again(prepared, kv.of_layer))
    if meter is not None:
        with oom_as_plan_error(prepared.plan, "a step was tried", partial(smaller_step, options)):
            found = measure(prepared, kv.of_layer, meter, before, partial(_rehearse, prepared))
        prepared = replace(prepared, plan=plan_measured(prepared, kv.of_layer, found))
        others = f"beside weights of {format_bytes(found.weights)}; {format_bytes(found.others)} are not torch's"
        notes.append(Decision("largest step", format_bytes(found.step), others))
        if found.recordings:
            notes.append(Decision("recorded steps", format_bytes(found.recordings), "of the largest, beside that"))
        notes += (Decision("max_model_len", str(prepared.plan.max_model_len), note) for note in prepared.plan.notes)
    return prepared, kv.of_layer, notes


def make_parts(
    prepared: Prepared, kv_types: Sequence[str], rows: int, logit_rows: int
) -> tuple[KVMemory, BatchBuilder, Executor]:
    """What a loaded model's steps need.

    Args:
        prepared: with the plan that is to be followed.
        kv_types: of every layer's cache.
        rows: most sequences in a step.
        logit_rows: most rows whose logits are made at once.
    """
    options = prepared.options
    plan = prepared.plan
    model = prepared.model
    groups = prepared.groups
    memory = KVMemory(
        prepared.kernels,
        model.cache_specs,
        groups,
        plan.kv_blocks,
        options.block_size,
        kv_types=kv_types,
        device=options.torch_device,
        state_slots=rows + plan.checkpoints + (options.device != "cpu"),  # one for what recordings leave over
        shared=model.whole_prompts,
    )
    builder = _builder(prepared, rows)
    assert options.max_num_batched_tokens
    sizes = options.max_num_batched_tokens, logit_rows
    return memory, builder, make_executor(model, memory.caches, *sizes, options.arithmetic == "fast")


def _builder(prepared: Prepared, rows: int) -> BatchBuilder:
    options, model = prepared.options, prepared.model
    return BatchBuilder(
        len(prepared.groups),
        rows,
        -(-prepared.plan.max_model_len // options.block_size),
        options.block_size,
        torch.device(options.torch_device),
        mask=model.mask,
        types=0 if model.embedding.types is None else model.embedding.types.shape[0],
    )


def make_runner(prepared: Prepared, kv_types: Sequence[str], rows: int) -> tuple[ModelRunner, Executor]:
    """The runner of a model that is prepared and loaded, for so many sequences a step, and what runs its steps."""
    options = prepared.options
    meter = memory_meter(options.torch_device)
    lower = partial(smaller_share, options, prepared.plan, meter)
    with oom_as_plan_error(prepared.plan, "the caches were made", lower):
        memory, builder, executor = make_parts(prepared, kv_types, rows, max(rows, PROMPT_LOGIT_ROWS))
    model = prepared.model
    sampler = Sampler(model.vocab_size, rows, prepared.kernels.sampling())
    graphs = None
    if sampler.on_device and isinstance(executor, EagerExecutor):
        why = _unrecordable(prepared)
        if why is None:
            recorder = CudaRecorder() if options.torch_device.startswith("cuda") else InterpretedRecorder()
            graphs = _graphs(prepared, memory, builder, rows, recorder)
        executor.describe = f"layer by layer: {why}" if why else f"graphs: of decoding, for up to {rows} rows"
    warm_up = WarmUp(prepared, memory) if options.on_gpu and sampler.on_device else None
    if warm_up is not None:
        warm_up.ahead()
    heads = model.classifier, model.projection
    return ModelRunner(
        executor, memory, sampler, builder, *heads, graphs, warm_up.run_next if warm_up else None
    ), executor


def _unrecordable(prepared: Prepared) -> str | None:
    """Why no step of a model can be recorded as a graph, or None."""
    model, kernels = prepared.model, prepared.kernels
    if prepared.options.enforce_eager:
        return "--enforce-eager, or no GPU"
    if model.whole_prompts:
        return "the model decodes nothing"
    if model.runs:
        return model.runs
    read = [c.op for c in kernels.choices if c.op in _READ_BACK and c.chosen.name.startswith("reference")]
    return f"the reference of {', '.join(read)} reads from the device" if read else None


def _graphs(prepared: Prepared, memory: KVMemory, builder: BatchBuilder, rows: int, recorder: Recorder) -> DecodeGraphs:
    tokens = [SHARED * count * prepared.options.block_size for count in prepared.plan.kv_blocks]
    return DecodeGraphs(prepared.model, memory.caches, builder, recorder, padded_sizes(rows), tokens)


def _rehearse(prepared: Prepared, memory: KVMemory) -> None:
    """Takes the memory of recordings for a moment, if there will be any."""
    rows = prepared.options.max_num_seqs
    if rows and _unrecordable(prepared) is None:
        try:
            _graphs(prepared, memory, _builder(prepared, rows), rows, Rehearsal()).rehearse()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it will be told when it is to be recorded
            check(prepared.options.torch_device)
            log.debug("a recording could not be tried", exc_info=True)


def scheduler_options(options: EngineOptions, plan: MemoryPlan, model: Model) -> SchedulerOptions:
    """What the scheduler of a model planned for so is told. Of encoders' prompts nothing is kept, so none is shared."""
    whole_prompts = model.whole_prompts
    assert options.max_num_seqs and options.max_num_batched_tokens and options.depth is not None
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
        share_prefix_cache=options.share_prefix_cache,
    )
