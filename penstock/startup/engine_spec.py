"""What an engine will be, decided before a weight is read: options, memory plan, kernels, the declared model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.config.cache_spec import CacheGroup, group_layers
from penstock.config.environment import pack_folder
from penstock.config.errors import ConfigError
from penstock.config.machine import Accelerator, Machine, free_bytes
from penstock.config.options import EngineOptions
from penstock.config.resolve import DTYPE_BYTES, Decision, ModelFacts, chosen_gpu, resolve
from penstock.kernels import devices, triton
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.registry import KernelContext
from penstock.layers.part import WHOLE, ModelPart
from penstock.models.registry import Model, build_model, check_architecture
from penstock.parallel.ranks import Ranks
from penstock.quant.decode import native_block_decoder
from penstock.runtime.ranks.group import Group, NullGroup
from penstock.startup.cache_plan import Caches, memory_limits, plan_caches, state_bytes
from penstock.startup.draft import draft_of
from penstock.startup.draft_room import with_draft_room
from penstock.startup.draft_spec import DraftSpec
from penstock.startup.gpu_memory import DeviceMemory, Measured, remedies, share
from penstock.startup.header_plan import this_machine
from penstock.startup.kept_start import weights_identity, weights_place
from penstock.startup.memory_plan import MemoryLimits, MemoryPlan, activation_bytes, format_bytes
from penstock.startup.rank_plan import check_model, kept_elements, rank_machine, rank_notes, with_rank_kv
from penstock.startup.resident import packer_of, resident_bytes
from penstock.startup.rooms import Room, common_room, compared, measured_speed, rooms_of_stages
from penstock.startup.sharding import Sharing, shard
from penstock.startup.staging import hold, shares_of, stages_of
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.dummy import open_dummy
from penstock.weights.facts import model_facts
from penstock.weights.kept_files import most_bytes, trim
from penstock.weights.open import open_checkpoint
from penstock.weights.pack_cache import PackedFile
from penstock.weights.weight_plan import (
    LoadTarget,
    WeightPlan,
    decoded_formats,
    plan_weights,
    planned_bytes,
    quantized_bytes,
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A model that is declared, all of it or what one rank has of it; no weight is read.

    Attributes:
        checkpoint: opened, headers only.
        facts: sizes from its headers.
        options: fully concrete.
        model: its weights not loaded.
        groups: its cache groups.
        kernels: the implementation of every op.
        weights: how each of the model's weights comes into memory; () for a model that reads them itself.
        ranks: whose share of each layer it is.
    """

    checkpoint: Checkpoint
    facts: ModelFacts
    options: EngineOptions
    model: Model
    groups: tuple[CacheGroup, ...]
    kernels: KernelSet
    weights: tuple[WeightPlan, ...]
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class EngineSpec(Declaration):
    """What an engine will be: everything that is decided before a weight is read.

    Attributes:
        plan: where the memory goes.
        settings: derived options and why.
        limits: what the plan was made under.
        draft: the model that drafts for it, if any.
        fullest: the share of the rank that keeps most of a token; None where that is `model`.
        stages: parts of the model, the first of which is this one; one alone where layers are not dealt.
        whole: the plans of all stages' weights, where layers are dealt.
    """

    plan: MemoryPlan
    settings: tuple[Decision, ...]
    limits: MemoryLimits
    draft: DraftSpec | None = None
    stages: tuple[ModelPart, ...] = (WHOLE,)
    fullest: Model | None = None
    whole: tuple[WeightPlan, ...] = ()

    def with_model(self, model: Model, kernels: KernelSet) -> EngineSpec:
        """The same engine with another declaration of its model, on other kernels."""
        plans = _weight_plans(model, self.checkpoint, self.options)
        return replace(self, model=model, kernels=kernels, weights=plans)

    def quantized_bytes(self, format: str) -> int:
        """What the weights would take, had the model been quantised to a format as it loads."""
        return _quantized_bytes(self.facts, self.kernels, self.options, self.weights, format)


def measure_machine(device: str = "auto") -> Machine:
    """This machine, as torch and the native library see it too; without GPUs where `device` asks for none."""
    number = device.partition(":")[2]
    gpus = () if device in ("cpu", "interpreter") else devices.accelerators(triton.unavailable_reason, int(number or 0))
    return this_machine(gpus)


def declare_rank(
    options: EngineOptions, max_model_len: int, ranks: Ranks, group: Group, part: ModelPart = WHOLE
) -> Declaration:
    """A rank's share of a model's layers, or of those of a part, by options that the one that leads has made concrete.

    Raises:
        CheckpointError: the model cannot be read; ConfigError: an option cannot be honoured here.
    """
    checkpoint = _opened(options)
    kernels = resolve_kernels(_context(options))
    model = _declared(checkpoint, options, ranks, group, kernels, max_model_len)
    plans = hold(model, part, _weight_plans(model, checkpoint, options))
    groups = group_layers(model.cache_specs)
    return Declaration(checkpoint, model_facts(checkpoint), options, model, groups, kernels, plans, ranks)


def _opened(options: EngineOptions) -> Checkpoint:
    opened = open_dummy if options.load_format == "dummy" else open_checkpoint
    checkpoint = opened(options.model, options.hf_overrides)
    check_architecture(checkpoint.config)
    return checkpoint


def _context(options: EngineOptions) -> KernelContext:
    return KernelContext(
        options.device_kind, options.dtype, options.isa, options.kv_cache_dtype, batch_invariant=options.batch_invariant
    )


def _declared(
    checkpoint: Checkpoint, options: EngineOptions, ranks: Ranks, group: Group, kernels: KernelSet, max_model_len: int
) -> Model:
    with torch.device(options.torch_device):  # its constants are made there
        dtype = getattr(torch, options.dtype)
        model = build_model(checkpoint.config, kernels, dtype=dtype, max_model_len=max_model_len)
    if not ranks.alone and not model.runs:
        plans = _weight_plans(model, checkpoint, options)
        shard(model, checkpoint, plans, ranks, group, Sharing.of(options))
    return model


def _on_kernels(declare: Callable[[KernelSet, int], Model], options: EngineOptions) -> tuple[KernelSet, Model]:
    """The implementation of every op, and the model on them."""
    assert options.max_model_len
    context = _context(options)
    kernels = resolve_kernels(context)
    model = declare(kernels, options.max_model_len)
    if (of_heads := _of_heads(context, model)) is not None:
        kernels = resolve_kernels(of_heads)
        model = declare(kernels, options.max_model_len)
    return kernels, model


def make_engine_spec(
    options: EngineOptions,
    machine: Machine | None = None,
    drafts: int = 0,
    group: Group | None = None,
    rooms: Sequence[Room] = (),
) -> EngineSpec:
    """Opens the checkpoint's headers, resolves every option, plans the memory and chooses the kernels.

    Args:
        options: as given.
        machine: None measures this one.
        drafts: most of a sequence in a step, for which there is to be room.
        group: of the ranks that compute the model; None where it is only planned, or there is one.
        rooms: of the other machines that compute it too.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: an option cannot be honoured; MemoryPlanError: it does not fit.
    """
    checkpoint = _opened(options)
    facts = model_facts(checkpoint)
    ranks = Ranks(0, options.tensor_parallel_size)
    own = rank_machine((machine or measure_machine(options.device)).within(options.memory), options)
    machine = own.beside(sum(room.memory for room in rooms))
    resolved = resolve(options, facts, machine)
    concrete = resolved.options
    assert concrete.max_model_len and concrete.max_num_seqs and concrete.max_num_batched_tokens
    devices.use(concrete.torch_device)
    gpu = chosen_gpu(concrete, machine)
    declare = partial(_declared, checkpoint, concrete, ranks, group or NullGroup())
    kernels, model = _on_kernels(declare, concrete)
    if model.runs and concrete.on_gpu:
        return make_spec_on_cpu(options, machine, model.runs, drafts)
    check_model(model, concrete)
    fullest, heaviest = _largest(model, checkpoint, concrete, ranks, kernels)
    concrete = with_rank_kv(options, concrete, fullest, facts)
    types = (concrete.kv_cache_dtype,) * len(model.cache_specs)
    plans = _weight_plans(model, checkpoint, concrete)
    weights = heaviest or (planned_bytes(plans) if plans else resident_bytes(facts, packer_of(kernels), concrete))
    limits = memory_limits(options, concrete, machine, gpu, drafts)
    draft = draft_of(model, kernels, concrete)
    caches = _caches(fullest, kernels, draft)
    limits = with_draft_room(limits, None if draft is None else draft.needs, caches, concrete)
    if gpu is not None:
        smaller = partial(_quantized_bytes, facts, kernels, concrete, plans)
        limits = _with_remedies(limits, gpu, smaller, facts, concrete, weights, machine)
    of_stages, limits = _dealt(limits, _each_machine(own, rooms, concrete), model, plans, weights, facts, concrete)
    plan = plan_caches(caches, concrete, limits, types, facts, weights)
    if plan.max_model_len != concrete.max_model_len:
        model = declare(kernels, plan.max_model_len)
        plans = _weight_plans(model, checkpoint, concrete)
    stages = stages_of(model, plans, concrete, of_stages)
    settings = [Decision(name, str(value), reason) for name, value, reason in resolved.reasons]
    settings += (*_notes(model, plan, plans, kernels), *rank_notes(concrete, stages, model))
    return EngineSpec(
        checkpoint, facts, concrete, model, group_layers(model.cache_specs), kernels,
        hold(model, stages[0], plans), ranks, plan=plan, settings=tuple(settings), limits=limits, draft=draft,
        stages=stages, fullest=fullest, whole=plans if len(stages) > 1 else (),
    )  # fmt: skip


def _each_machine(own: Machine, rooms: Sequence[Room], options: EngineOptions) -> tuple[Room, ...]:
    """What this machine has, and each other one; () where this is the only one."""
    if not rooms:
        return ()
    return compared(Room(own.memory_available, measured_speed(options.threads or own.cores)), rooms)


def _dealt(
    limits: MemoryLimits,
    machines: Sequence[Room],
    model: Model,
    plans: Sequence[WeightPlan],
    weights: int,
    facts: ModelFacts,
    options: EngineOptions,
) -> tuple[tuple[Room, ...], MemoryLimits]:
    """What each stage has where there are several machines, and the limits that they set together.

    `weights`: bytes of all.
    """
    of_stages = rooms_of_stages(machines, options.pipeline_parallel_size)
    if not machines:
        return of_stages, limits
    here, *others = shares_of(model, plans, stages_of(model, plans, options, of_stages), machines)
    here = here._replace(own=limits.drafter_bytes)
    step = activation_bytes(facts, limits, DTYPE_BYTES[options.dtype])
    where = f", as {len(machines)} machines allow together"
    return of_stages, replace(limits, available_bytes=common_room((here, *others), weights, step), where=where)


def _with_remedies(
    limits: MemoryLimits,
    gpu: Accelerator,
    smaller: Callable[[str], int],
    facts: ModelFacts,
    options: EngineOptions,
    weights: int,
    machine: Machine,
) -> MemoryLimits:
    memory = DeviceMemory(gpu.memory_total, gpu.memory_free)
    return replace(limits, remedies=remedies(facts, smaller, options, limits, memory, weights, machine))


def _largest(
    model: Model, checkpoint: Checkpoint, options: EngineOptions, ranks: Ranks, kernels: KernelSet
) -> tuple[Model, int]:
    """Of all ranks' shares the one that keeps most of a token, and the heaviest one's bytes; 0 of one rank.

    All have the blocks that the fullest has room for.
    """
    if ranks.alone:
        return model, 0
    assert options.max_model_len
    shares = [model]
    for rank in range(1, ranks.count):
        other = Ranks(rank, ranks.count)
        shares.append(_declared(checkpoint, options, other, NullGroup(), kernels, options.max_model_len))
    heaviest = max(planned_bytes(_weight_plans(share, checkpoint, options)) for share in shares)
    return max(shares, key=kept_elements), heaviest


def _notes(model: Model, plan: MemoryPlan, plans: Sequence[WeightPlan], kernels: KernelSet) -> list[Decision]:
    """What became of wishes and of the weights."""
    notes = [Decision("max_model_len", str(plan.max_model_len), note) for note in plan.notes]
    if packer_of(kernels).name == "triton":
        kind = str(model.dtype).removeprefix("torch.")
        notes += [
            Decision(f"weights in {name}", f"decoded to {kind}", why) for name, why in decoded_formats(plans).items()
        ]
    if model.runs:
        kind, _, reason = model.runs.partition(": ")
        notes.append(Decision("layers", kind, reason))
    return notes


def _weight_plans(model: Model, checkpoint: Checkpoint, options: EngineOptions) -> tuple[WeightPlan, ...]:
    """How a model's weights come into memory; () for one that reads them itself.

    Raises:
        CheckpointError: tensors are missing, of a wrong shape or left over.
        ConfigError: a model that reads its weights itself cannot quantise them.
    """
    if model.runs:
        if options.quantize is not None:
            raise ConfigError(f"--quantize {options.quantize} is not possible: {model.runs}. Leave the option out.")
        return ()
    target = LoadTarget(model.dtype, options.torch_device, options.device != "cpu", options.quantize)
    return plan_weights(model, checkpoint, target)


def _quantized_bytes(
    facts: ModelFacts, kernels: KernelSet, options: EngineOptions, plans: Sequence[WeightPlan], format: str
) -> int:
    if plans:
        return quantized_bytes(plans, format)
    return resident_bytes(facts, packer_of(kernels), replace(options, quantize=format))


def _of_heads(context: KernelContext, model: Model) -> KernelContext | None:
    """The context with the sizes of the model's heads, where a GPU's shared memory bounds them; else None."""
    limit = devices.shared_memory(context.device)
    sizes = {(spec.key_dim, 0 if spec.latent else spec.value_dim) for spec in model.cache_specs if not spec.state}
    return replace(context, heads=tuple(sorted(sizes)), shared_memory=limit) if limit and sizes else None


def make_spec_on_cpu(options: EngineOptions, machine: Machine, runs: str, drafts: int = 0) -> EngineSpec:
    """As `make_engine_spec`, for a model that foreign code computes, which runs on CPUs only."""
    if options.device != "auto":
        raise ConfigError(f"--device {options.device} is not possible: {runs}. Take --device cpu.")
    spec = make_engine_spec(replace(options, device="cpu"), machine, drafts)
    return replace(spec, settings=(Decision("device", "cpu", runs), *spec.settings))


WORTH_KEEPING = 64 << 20  # bytes of weights: from here on, packed weights are kept in a file by default


def plan_again(spec: EngineSpec, kv_types: Sequence[str]) -> MemoryPlan:
    """The plan with the KV cache in these types, one a layer.

    Raises:
        MemoryPlanError: it does not fit.
    """
    limits = replace(spec.limits, max_model_len_fixed=True)
    return _plan_loaded(spec, kv_types, limits, spec.plan.weights_bytes)


def plan_measured(spec: EngineSpec, kv_types: Sequence[str], measured: Measured) -> MemoryPlan:
    """The plan once the weights are loaded and the largest step has been measured.

    Raises:
        MemoryPlanError: it does not fit.
    """
    memory = DeviceMemory(measured.total, measured.total - measured.others)
    available = share(spec.options, memory)
    free_slot = state_bytes(spec.model.cache_specs)  # captured steps write the states of unused slots there
    step = measured.step + measured.recordings + free_slot
    limits = replace(spec.limits, available_bytes=available, activation_bytes=step)
    others = remedies(spec.facts, spec.quantized_bytes, spec.options, limits, memory, measured.weights)
    limits = replace(limits, remedies=others)
    return _plan_loaded(spec, kv_types, limits, measured.weights)


def _plan_loaded(spec: EngineSpec, kv_types: Sequence[str], limits: MemoryLimits, weights: int) -> MemoryPlan:
    """A plan for the model as it was declared: with the length that was planned then."""
    limits = replace(limits, max_model_len=spec.plan.max_model_len)
    caches = _caches(spec.fullest or spec.model, spec.kernels, spec.draft)
    return plan_caches(caches, spec.options, limits, kv_types, spec.facts, weights)


def _caches(model: Model, kernels: KernelSet, draft: DraftSpec | None = None) -> Caches:
    guests = () if draft is None else draft.guests
    return Caches(model.cache_specs, kernels.cache_block_bytes, model.whole_prompts, guests)


def packed_file(spec: Declaration) -> tuple[PackedFile | None, str]:
    """The file that keeps the model's packed weights, or None and the reason."""
    options, checkpoint = spec.options, spec.checkpoint
    path = weights_place(options, spec.facts.name, checkpoint.path, spec.ranks)
    if path is None:
        return None, "switched off"
    if options.load_format == "dummy":
        return None, "random weights need no file"
    if not packer_of(spec.kernels).native:
        return None, "only the native library's packing is"
    if spec.model.part is not WHOLE:
        return None, "stages have parts of the model, which may be others the next time"
    size = spec.facts.file_bytes
    if options.pack_cache == "auto" and size < WORTH_KEEPING:
        return None, f"packing {format_bytes(size)} takes less than a moment"
    most = most_bytes(path.parent, options.pack_cache_size)
    if size > most:  # nothing that others could be removed for
        half = f"half of what the disk of {path.parent} has room for"
        what = half if options.pack_cache_size is None else "--pack-cache-size"
        return None, f"{format_bytes(size)} are more than {what}, {format_bytes(most)}"
    if not os.path.exists(path):
        trim(path.parent, most - size)
        if (room := free_bytes(path.parent)) < size:
            return None, f"only {format_bytes(room)} are free in {path.parent}"
    return PackedFile(path, weights_identity(options, checkpoint.path, spec.ranks), str(checkpoint.path.resolve())), ""


def hold_to_size(options: EngineOptions) -> None:
    """Removes what was used least recently of what is kept for faster starts, if it has become too much."""
    if (folder := pack_folder(options.pack_cache)) is not None:
        trim(folder, most_bytes(folder, options.pack_cache_size))


def kernel_decisions(kernels: KernelSet) -> tuple[Decision, ...]:
    """The implementation of every op, and why better ones were refused."""
    decoder = native_block_decoder()
    rows = [(choice.op, choice.chosen.name, choice.refused) for choice in kernels.choices]
    refused = () if decoder else (("native", str(native.unavailable_reason())),)
    rows.append(("dequantize (at load)", f"native ({native.isa()})" if decoder else "reference (numpy)", refused))
    return tuple(Decision(op, name, _why(name, refused)) for op, name, refused in rows)


def _why(name: str, refused: tuple[tuple[str, str], ...]) -> str:
    best = "no faster implementation yet" if name.startswith("reference") else "the best there is for this op"
    return "; ".join(f"{other}: {reason}" for other, reason in refused) or best
