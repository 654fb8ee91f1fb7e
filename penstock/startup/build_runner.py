"""Loads the model of a spec and joins it with its KV memory, batch builder, executor and sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.config.cache_spec import CacheKind
from penstock.config.limits import PROMPT_LOGIT_ROWS
from penstock.config.resolve import Decision
from penstock.kernels.copies import check
from penstock.kernels.devices import MemoryMeter, memory_meter
from penstock.layers.part import WHOLE
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder, BatchTraits
from penstock.runtime.drafters.drafting import Drafting
from penstock.runtime.executor import EagerExecutor, Executor, make_executor
from penstock.runtime.graph_captures import CudaGraphCapture, DryRun, GraphCapture, InterpretedCapture
from penstock.runtime.graphs import DecodeGraphs, Recordable, padded_queries, padded_sizes
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.logits_processors import load_processors
from penstock.runtime.pipeline.lead import HeadHere, StagedSteps
from penstock.runtime.pipeline.stage import Stage
from penstock.runtime.pooling import Pooler
from penstock.runtime.ranks.step_sizes import StepSizes
from penstock.runtime.replay import Rows
from penstock.runtime.runner import Collaborators, ModelRunner
from penstock.runtime.sampler import Sampler
from penstock.startup.adapters import make_adapter_room
from penstock.startup.control_vectors import steer
from penstock.startup.draft import load_drafter, load_text_drafter
from penstock.startup.draft_head import load_head
from penstock.startup.draft_self import load_self
from penstock.startup.engine_spec import Declaration, EngineSpec, packed_file, plan_again, plan_measured
from penstock.startup.given_rows import row_store, take_rows
from penstock.startup.gpu_memory import smaller_share, smaller_step, smaller_weights
from penstock.startup.kv_probe import choose_kv_types
from penstock.startup.memory_plan import format_bytes
from penstock.startup.out_of_memory import oom_as_plan_error
from penstock.startup.peak import measure
from penstock.startup.scheduling import spare_states
from penstock.startup.staging import taps_here, types_here
from penstock.startup.warm_up import WarmUp
from penstock.weights.loader import load_weights

if TYPE_CHECKING:
    from penstock.startup.workers import Workers

log = logging.getLogger(__name__)
Loading = tuple[EngineSpec, tuple[str, ...], list[Decision]]
SHARED = 4  # a step is replayed while its rows' contexts are at most so many times the cache's blocks
_READ_BACK = (  # ops whose reference implementation reads values back from the device
    *("plan_attention", "paged_attention", "grouped_experts"),
    *("short_conv", "selective_scan", "gated_delta_rule"),
)


def load(
    spec: EngineSpec, progress: Callable[[int, int], None] | None = None, meter: MemoryMeter | None = None
) -> Loading:
    """Loads the weights, chooses the types of the caches and, on a GPU, measures what the largest step leaves for them.

    Args:
        spec: of the engine; its model's weights are filled.
        progress: called with (bytes read, bytes in all).
        meter: of the device's memory; None takes the device's own, if it has one.

    Returns:
        The spec, planned again where cache types changed or a step was measured; every layer's cache type;
        notes on all this.

    Raises:
        CheckpointError: weights are missing, left over or damaged.
        MemoryPlanError: the caches do not fit.
    """
    model, options = spec.model, spec.options
    meter = meter or memory_meter(options.torch_device)
    before = meter.read().allocated if meter else 0
    lighter = partial(smaller_weights, spec.quantized_bytes, options, spec.plan, meter)
    with oom_as_plan_error(spec.plan, "the weights were loaded", lighter):
        notes = fill(spec, progress)
    kv = choose_kv_types(model, spec.groups, options.kv_cache_dtype, options.block_size, options.torch_device)
    if kv.reason:
        notes.append(Decision("KV cache types", ", ".join(dict.fromkeys(kv.of_layer)), kv.reason))
        spec = replace(spec, plan=plan_again(spec, kv.of_layer))
    if meter is not None:
        with oom_as_plan_error(spec.plan, "a step was tried", partial(smaller_step, options)):
            found = measure(spec, kv.of_layer, meter, before, partial(_dry_run, spec))
        spec = replace(spec, plan=plan_measured(spec, kv.of_layer, found))
        others = f"beside weights of {format_bytes(found.weights)}; {format_bytes(found.others)} are not torch's"
        notes.append(Decision("largest step", format_bytes(found.step), others))
        if found.recordings:
            notes.append(Decision("recorded steps", format_bytes(found.recordings), "of the largest, beside that"))
        notes += (Decision("max_model_len", str(spec.plan.max_model_len), note) for note in spec.plan.notes)
    return spec, kv.of_layer, notes


def fill(spec: Declaration, progress: Callable[[int, int], None] | None = None) -> list[Decision]:
    """Fills a declared model's weights, and has it take what options add to its hidden states; notes on this."""
    model, options = spec.model, spec.options
    cache, why = packed_file(spec)
    load_weights(model, spec.checkpoint, spec.weights, progress=progress, cache=cache)
    model.place(torch.device(options.torch_device))
    steered = steer(model, options)
    take_rows(model, options)
    notes = [Decision("packed weights", "kept" if cache else "not kept", cache.describe if cache else why)]
    if steered:
        notes.append(Decision("control vectors", steered, "--control-vector"))
    return notes


def make_parts(
    spec: EngineSpec,
    kv_types: Sequence[str],
    rows: int,
    logit_rows: int,
    taps: Sequence[str] = (),
    workers: Workers | None = None,
) -> tuple[KVMemory, BatchBuilder, Executor]:
    """What a loaded model's steps need.

    Args:
        spec: with the plan that is to be followed.
        kv_types: of every layer's cache.
        rows: most sequences in a step.
        logit_rows: most rows whose logits are made at once.
        taps: hidden states that are kept of every step besides those that a draft head reads.
        workers: of the other ranks, which have loaded theirs; None for no others.
    """
    sizes = _sizes(spec, kv_types, rows, logit_rows, taps)
    if workers is None:
        return rank_parts(spec, sizes)
    from penstock.runtime.ranks.experts import ExpertShelf  # whose messages take a codec

    workers.make(sizes)
    memory, builder, executor = rank_parts(spec, sizes)
    interval = spec.options.eplb_step_interval
    return memory, builder, workers.join(executor, memory, ExpertShelf(spec.model, workers.group), interval)


def _engine_parts(
    spec: EngineSpec, kv_types: Sequence[str], rows: int, workers: Workers | None
) -> tuple[KVMemory, BatchBuilder, Executor | StagedSteps]:
    """As `make_parts`; where stages of layers compute one after the other, this process has the first one."""
    logit_rows = max(rows, PROMPT_LOGIT_ROWS)
    if workers is None or len(spec.stages) == 1:
        return make_parts(spec, kv_types, rows, logit_rows, workers=workers)
    sizes = _sizes(spec, kv_types, rows, logit_rows, ())
    memory, builder, first = rank_parts(spec, sizes)
    workers.make(replace(sizes, given=first.gives))
    stage = Stage(first, memory, last=False, taps=taps_here(spec.model, sizes.taps))
    return memory, builder, workers.behind(stage, _logits_of(spec.model) if spec.model.part.with_head else None)


def _logits_of(model: Model) -> HeadHere:
    def logits(hidden: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        wanted = range(len(hidden)) if rows is None else rows
        return model.logits(hidden, torch.as_tensor(np.asarray(wanted, np.int64)))

    return logits


def _sizes(spec: EngineSpec, kv_types: Sequence[str], rows: int, logit_rows: int, taps: Sequence[str]) -> StepSizes:
    spare = spec.options.device != "cpu"  # a state for unused rows of captured steps
    return StepSizes(
        kv_types=tuple(kv_types),
        kv_blocks=spec.plan.kv_blocks,
        max_model_len=spec.plan.max_model_len,
        rows=rows,
        logit_rows=logit_rows,
        state_slots=rows + spare_states(spec.plan) + spare,
        taps=(*_tapped(spec), *taps),
    )


def rank_parts(spec: Declaration, sizes: StepSizes) -> tuple[KVMemory, BatchBuilder, Executor]:
    """What steps of these sizes need of one rank's model, which is loaded."""
    options, model = spec.options, spec.model
    memory = KVMemory(
        spec.kernels,
        model.cache_specs,
        sizes.kv_blocks,
        options.block_size,
        kv_types=types_here(model, sizes.kv_types),
        device=options.torch_device,
        state_slots=sizes.state_slots,
        shared=model.whole_prompts,
    )
    builder = _builder(spec, sizes.rows, sizes.max_model_len)
    assert options.max_num_batched_tokens
    most, fast = options.max_num_batched_tokens, options.arithmetic == "fast"
    kept = not options.on_gpu and options.pack_cache != "off" and spec.ranks.alone and model.part is WHOLE
    part = replace(model.part, taps=taps_here(model, sizes.taps), given=sizes.given)
    return memory, builder, make_executor(model, memory.caches, most, sizes.logit_rows, fast, part, kept=kept)


def _tapped(spec: EngineSpec) -> tuple[str, ...]:
    """Hidden states that a head reads, if there is one."""
    return () if spec.draft is None else spec.draft.taps.names


def _builder(spec: Declaration, rows: int, max_model_len: int) -> BatchBuilder:
    options, model = spec.options, spec.model
    return BatchBuilder(
        len(spec.groups),
        rows,
        -(-max_model_len // options.block_size),
        options.block_size,
        torch.device(options.torch_device),
        BatchTraits(
            mask=model.mask,
            types=0 if model.embedding.types is None else model.embedding.types.shape[0],
            axes=model.position_axes,
            cross=tuple(index for index, group in enumerate(spec.groups) if group.kind is CacheKind.CROSS),
        ),
    )


def make_runner(
    spec: EngineSpec,
    kv_types: Sequence[str],
    rows: int,
    drafting: Drafting | None = None,
    workers: Workers | None = None,
) -> tuple[ModelRunner, Executor | StagedSteps]:
    """The runner of a loaded model, for so many sequences a step, and what runs its steps."""
    options, plan = spec.options, spec.plan
    meter = memory_meter(options.torch_device)
    lower = partial(smaller_share, options, plan, meter)
    adapters = make_adapter_room(spec, spec.whole)
    if workers is not None and options.enable_lora:
        workers.share(adapters)
    with oom_as_plan_error(plan, "the caches were made", lower):
        memory, builder, executor = _engine_parts(spec, kv_types, rows, workers)
    model = spec.model
    kernel = spec.kernels.sampling()
    processors = load_processors(options.logits_processors)
    sampler = Sampler(model.vocab_size, rows, kernel, options.logprobs_mode, options.watermark_key, processors)
    graphs = None
    if sampler.on_device and isinstance(executor, EagerExecutor):
        why = _unrecordable(spec)
        if why is None:
            capture = CudaGraphCapture() if options.torch_device.startswith("cuda") else InterpretedCapture()
            graphs = _graphs(spec, memory, builder, rows, capture)
        executor.describe = f"layer by layer: {why}" if why else f"graphs: of decoding, for up to {rows} rows"
    if graphs is not None and graphs.longest > 1 and drafting is not None:
        drafting.keep_to(graphs.longest - 1)
    warm_up = WarmUp(spec, memory) if options.on_gpu and sampler.on_device else None
    if warm_up is not None:
        warm_up.ahead()
    if spec.draft is not None and drafting is not None:
        with oom_as_plan_error(plan, "the draft model was loaded", lower):
            if spec.draft.own:
                lead = {} if workers is None else {"lead": workers.draft}
                drafting.use(load_self(spec.draft, model, spec.kernels, options, plan, memory.caches, **lead))
            elif spec.draft.needs.own:
                drafting.use(load_text_drafter(spec.draft, model, spec.kernels, options, plan))
            elif spec.draft.files is None:
                drafting.use(load_drafter(spec.draft, model, spec.kernels, options, plan, rows))
            else:
                drafting.use_tapped(load_head(spec.draft, model, spec.kernels, options, plan, rows))
    runner = ModelRunner(
        executor,
        memory,
        sampler,
        builder,
        Collaborators(
            pooler=Pooler(model.classifier, model.projection),
            graphs=graphs,
            warm_up=warm_up.run_next if warm_up else None,
            media=row_store(model, options, memory.caches),
            drafting=drafting,
            adapters=adapters,
            stages=executor if isinstance(executor, StagedSteps) else None,
            group=None if workers is None else workers.group,
        ),
    )
    return runner, executor


def _unrecordable(spec: EngineSpec) -> str | None:
    """Why no step of a model can be recorded as a graph, or None."""
    model, kernels = spec.model, spec.kernels
    if spec.options.enforce_eager:
        return "--enforce-eager, or no GPU"
    if model.whole_prompts:
        return "the model decodes nothing"
    if model.runs:
        return model.runs
    if any(group.kind is CacheKind.CROSS for group in spec.groups):
        return "rows attend to an encoder's output, whose lengths differ"
    read = [c.op for c in kernels.choices if c.op in _READ_BACK and c.chosen.name.startswith("reference")]
    return f"the reference of {', '.join(read)} reads from the device" if read else None


def _graphs(
    spec: EngineSpec, memory: KVMemory, builder: BatchBuilder, rows: int, capture: GraphCapture
) -> DecodeGraphs:
    tokens = [SHARED * count * spec.options.block_size for count in spec.plan.kv_blocks]
    most = 1 if any(cache.state for cache in memory.caches) else spec.limits.draft_states
    kept = all(group.kind in (CacheKind.FULL, CacheKind.LATENT) for group in spec.groups)
    recordable = Recordable(padded_sizes(rows), tokens, padded_queries(most), kept)
    return DecodeGraphs(spec.model, memory.caches, builder, capture, recordable, _tapped(spec))


def _dry_run(spec: EngineSpec, memory: KVMemory) -> None:
    """Runs the largest step that will be captured, to see what memory it takes; nothing if none will be."""
    rows = spec.options.max_num_seqs
    if rows and _unrecordable(spec) is None:
        try:
            _graphs(spec, memory, _builder(spec, rows, spec.plan.max_model_len), rows, DryRun()).dry_run()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the error is logged when the step is to be captured
            check(spec.options.torch_device)
            log.debug("a recording could not be tried", exc_info=True)
