"""From options to a running engine: open, resolve, plan, build, load. The engine's only module that needs torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from penstock.config.machine import Machine, read_machine
from penstock.config.options import EngineOptions, SchedulerOptions
from penstock.config.resolve import DTYPE_BYTES, ModelFacts, resolve
from penstock.core.cache_spec import group_layers
from penstock.core.scheduler import Scheduler
from penstock.engine.api import Decision, EngineInfo
from penstock.engine.loop import Engine
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.registry import KernelContext
from penstock.models.registry import Model, build_model
from penstock.quant.decode import native_block_decoder
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.memory_plan import MemoryLimits, MemoryPlan, plan_memory
from penstock.runtime.runner import ModelRunner
from penstock.runtime.sampler import Sampler
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.facts import model_facts
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint

log = logging.getLogger(__name__)

DETERMINISM = (
    "scheduling, cache and sampling are exact; torch's matrix products may round differently with the number of rows "
    "in a step, so that logits agree to float rounding and tokens except at ties within it"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything decided before a weight is read.

    Attributes:
        checkpoint: opened, headers only.
        facts: sizes from its headers.
        options: fully concrete.
        model: declared, its weights not loaded.
        plan: where the memory goes.
        settings: derived options and why.
        kernels: the implementation of every op.
    """

    checkpoint: Checkpoint
    facts: ModelFacts
    options: EngineOptions
    model: Model
    plan: MemoryPlan
    settings: tuple[Decision, ...]
    kernels: KernelSet


def measure_machine() -> Machine:
    """This machine, as torch and the native library see it too."""
    features = native.cpu_features()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return read_machine(
        isas=native.usable_isas(),
        has_bf16=features.get("avx512_bf16", False) or features.get("amx_bf16", False),
        cuda_devices=gpus,
        gpu_memory_available=torch.cuda.mem_get_info(0)[0] if gpus else 0,
    )


def prepare(options: EngineOptions, machine: Machine | None = None) -> Prepared:
    """Opens the checkpoint's headers, resolves every option, plans the memory and chooses the kernels.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: an option cannot be honoured; MemoryPlanError: it does not fit.
    """
    machine = machine or measure_machine()
    checkpoint = open_checkpoint(options.model)
    facts = model_facts(checkpoint)
    resolved = resolve(options, facts, machine)
    concrete = resolved.options
    assert concrete.max_model_len and concrete.max_num_seqs and concrete.max_num_batched_tokens
    gpu = concrete.device == "cuda"
    limits = MemoryLimits(
        available_bytes=machine.gpu_memory_available if gpu else machine.memory_available,
        max_model_len=concrete.max_model_len,
        max_model_len_fixed=options.max_model_len is not None,
        max_num_seqs=concrete.max_num_seqs,
        max_num_batched_tokens=concrete.max_num_batched_tokens,
        block_size=concrete.block_size,
        kv_cache_memory=concrete.kv_cache_memory,
        kv_cache_memory_fixed=options.kv_cache_memory is not None,
        kv_blocks=concrete.kv_blocks,
        enable_prefix_caching=concrete.enable_prefix_caching,
    )
    kernels = resolve_kernels(KernelContext(concrete.device, concrete.dtype, concrete.isa))
    declare = partial(build_model, checkpoint.config, kernels, dtype=getattr(torch, concrete.dtype))
    model = declare(max_model_len=concrete.max_model_len)
    groups = group_layers(model.cache_specs)
    plan = plan_memory(model=facts, groups=groups, dtype_bytes=DTYPE_BYTES[concrete.dtype], limits=limits)
    if plan.max_model_len != concrete.max_model_len:
        model = declare(max_model_len=plan.max_model_len)
    settings = [Decision(name, str(value), reason) for name, value, reason in resolved.reasons]
    settings += [Decision("max_model_len", str(plan.max_model_len), note) for note in plan.notes]
    return Prepared(checkpoint, facts, concrete, model, plan, tuple(settings), kernels)


def build_engine(
    options: EngineOptions, progress: Callable[[int, int], None] | None = None
) -> tuple[Engine, EngineInfo]:
    """Builds an engine that is ready to step.

    Args:
        options: as given by the user.
        progress: called with (bytes read, bytes in all) while weights load.

    Raises:
        PenstockError: as `prepare`; also weights that are missing, left over or damaged.
    """
    prepared = prepare(options)
    concrete, plan = prepared.options, prepared.plan
    for what, size, remark in plan.table():
        log.info("%-12s %12s  %s", what, size, remark)
    if concrete.threads:
        torch.set_num_threads(concrete.threads)
    if native.available():
        native.select_isa(concrete.isa)
        native.set_num_threads(concrete.threads or 1)
    dtype = getattr(torch, concrete.dtype)
    device = torch.device(concrete.device)
    model = prepared.model
    load_weights(model, prepared.checkpoint, dtype=dtype, progress=progress, device=concrete.device)
    groups = group_layers(model.cache_specs)
    scheduler_options = _scheduler_options(concrete, plan)
    memory = KVMemory(model.cache_specs, groups, plan.kv_blocks, concrete.block_size, dtype=dtype, device=device)
    rows = scheduler_options.max_num_seqs
    widest = -(-plan.max_model_len // concrete.block_size)
    builder = BatchBuilder(len(groups), rows, widest, concrete.block_size, device)
    runner = ModelRunner(model, memory, Sampler(model.vocab_size, rows, prepared.kernels.sampling()), builder)
    engine = Engine(Scheduler(scheduler_options, groups), runner)
    return engine, engine_info(prepared, model.vocab_size)


def _scheduler_options(options: EngineOptions, plan: MemoryPlan) -> SchedulerOptions:
    assert options.max_num_seqs and options.max_num_batched_tokens
    return SchedulerOptions(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=options.block_size,
        num_blocks=plan.kv_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        policy=options.policy,
        depth=options.depth,
        max_chunk_tokens=options.max_chunk_tokens,
    )


def kernel_decisions(kernels: KernelSet) -> tuple[Decision, ...]:
    """Per op, what it got and why better ones were refused."""
    decoder = native_block_decoder()
    rows = [(choice.op, choice.chosen.name, choice.refused) for choice in kernels.choices]
    refused = () if decoder else (("native", str(native.unavailable_reason())),)
    rows.append(("dequantize (at load)", f"native ({native.isa()})" if decoder else "reference (numpy)", refused))
    return tuple(Decision(op, name, _why(name, refused)) for op, name, refused in rows)


def _why(name: str, refused: tuple[tuple[str, str], ...]) -> str:
    best = "no faster implementation yet" if name.startswith("reference") else "the best there is for this op"
    return "; ".join(f"{other}: {reason}" for other, reason in refused) or best


def engine_info(prepared: Prepared, vocab_size: int) -> EngineInfo:
    """The facts of an engine built as prepared."""
    concrete = prepared.options
    architectures = prepared.checkpoint.config.get("architectures") or ["?"]
    assert concrete.max_num_seqs and concrete.max_num_batched_tokens and concrete.served_model_name
    return EngineInfo(
        model=concrete.served_model_name,
        model_path=str(prepared.checkpoint.path),
        architecture=str(architectures[0]),
        max_model_len=prepared.plan.max_model_len,
        vocab_size=vocab_size,
        block_size=concrete.block_size,
        num_blocks=prepared.plan.kv_blocks[0],
        max_num_seqs=concrete.max_num_seqs,
        max_num_batched_tokens=concrete.max_num_batched_tokens,
        dtype=concrete.dtype,
        device=concrete.device,
        determinism=DETERMINISM,
        settings=prepared.settings,
        memory=tuple(Decision(*row) for row in prepared.plan.table()),
        kernels=kernel_decisions(prepared.kernels),
    )
