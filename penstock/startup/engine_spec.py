"""What an engine will be, decided before a weight is read: options, memory plan, kernels, the declared model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.config.cache_spec import CacheGroup, group_layers
from penstock.config.environment import pack_folder
from penstock.config.errors import ConfigError
from penstock.config.machine import Machine, free_bytes
from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision, ModelFacts, chosen_gpu, resolve
from penstock.kernels import devices, triton
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.registry import KernelContext
from penstock.models.registry import Model, build_model, check_architecture
from penstock.quant.decode import native_block_decoder
from penstock.startup.cache_plan import Caches, memory_limits, plan_caches, state_bytes
from penstock.startup.draft import draft_of
from penstock.startup.draft_room import with_draft_room
from penstock.startup.draft_spec import DraftSpec
from penstock.startup.gpu_memory import DeviceMemory, Measured, remedies, share
from penstock.startup.header_plan import this_machine
from penstock.startup.kept_start import weights_identity, weights_place
from penstock.startup.memory_plan import MemoryLimits, MemoryPlan, format_bytes
from penstock.startup.resident import packer_of, resident_bytes
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
class EngineSpec:
    """What an engine will be: everything that is decided before a weight is read.

    Attributes:
        checkpoint: opened, headers only.
        facts: sizes from its headers.
        options: fully concrete.
        model: declared, its weights not loaded.
        groups: its cache groups.
        plan: where the memory goes.
        settings: derived options and why.
        kernels: the implementation of every op.
        limits: what the plan was made under.
        weights: how each of the model's weights comes into memory; () for a model that reads them itself.
        draft: the model that drafts for it, if any.
    """

    checkpoint: Checkpoint
    facts: ModelFacts
    options: EngineOptions
    model: Model
    groups: tuple[CacheGroup, ...]
    plan: MemoryPlan
    settings: tuple[Decision, ...]
    kernels: KernelSet
    limits: MemoryLimits
    weights: tuple[WeightPlan, ...]
    draft: DraftSpec | None = None

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


def make_engine_spec(options: EngineOptions, machine: Machine | None = None, drafts: int = 0) -> EngineSpec:
    """Opens the checkpoint's headers, resolves every option, plans the memory and chooses the kernels.

    `drafts`: most of a sequence in a step, for which there is to be room.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: an option cannot be honoured; MemoryPlanError: it does not fit.
    """
    machine = (machine or measure_machine(options.device)).within(options.memory)
    dummy = options.load_format == "dummy"
    checkpoint = (open_dummy if dummy else open_checkpoint)(options.model, options.hf_overrides)
    check_architecture(checkpoint.config)
    facts = model_facts(checkpoint)
    resolved = resolve(options, facts, machine)
    concrete = resolved.options
    assert concrete.max_model_len and concrete.max_num_seqs and concrete.max_num_batched_tokens
    devices.use(concrete.torch_device)
    gpu = chosen_gpu(concrete, machine)
    context = KernelContext(
        concrete.device_kind,
        concrete.dtype,
        concrete.isa,
        concrete.kv_cache_dtype,
        batch_invariant=concrete.batch_invariant,
    )
    kernels = resolve_kernels(context)

    def declare(max_model_len: int) -> Model:
        with torch.device(concrete.torch_device):  # its constants are made there
            dtype = getattr(torch, concrete.dtype)
            return build_model(checkpoint.config, kernels, dtype=dtype, max_model_len=max_model_len)

    model = declare(concrete.max_model_len)
    if (of_heads := _of_heads(context, model)) is not None:
        kernels = resolve_kernels(of_heads)
        model = declare(concrete.max_model_len)
    if model.runs and concrete.on_gpu:
        return make_spec_on_cpu(options, machine, model.runs, drafts)
    groups = group_layers(model.cache_specs)
    types = (concrete.kv_cache_dtype,) * len(model.cache_specs)
    plans = _weight_plans(model, checkpoint, concrete)
    weights = planned_bytes(plans) if plans else resident_bytes(facts, packer_of(kernels), concrete)
    limits = memory_limits(options, concrete, machine, gpu)
    if drafts:
        limits = replace(limits, draft_states=drafts + 1)
    draft = draft_of(model, kernels, concrete)
    caches = _caches(model, kernels, draft)
    limits = with_draft_room(limits, None if draft is None else draft.needs, caches, concrete)
    if gpu is not None:
        memory = DeviceMemory(gpu.memory_total, gpu.memory_free)
        smaller = partial(_quantized_bytes, facts, kernels, concrete, plans)
        limits = replace(limits, remedies=remedies(facts, smaller, concrete, limits, memory, weights, machine))
    plan = plan_caches(caches, concrete, limits, types, facts, weights)
    if plan.max_model_len != concrete.max_model_len:
        model = declare(plan.max_model_len)
        plans = _weight_plans(model, checkpoint, concrete)
    settings = [Decision(name, str(value), reason) for name, value, reason in resolved.reasons]
    settings += _notes(model, plan, plans, kernels)
    return EngineSpec(checkpoint, facts, concrete, model, groups, plan, tuple(settings), kernels, limits, plans, draft)


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
    return plan_caches(
        _caches(spec.model, spec.kernels, spec.draft), spec.options, limits, kv_types, spec.facts, weights
    )


def _caches(model: Model, kernels: KernelSet, draft: DraftSpec | None = None) -> Caches:
    guests = () if draft is None else draft.guests
    return Caches(model.cache_specs, kernels.cache_block_bytes, model.whole_prompts, guests)


def packed_file(spec: EngineSpec) -> tuple[PackedFile | None, str]:
    """The file that keeps the model's packed weights, or None and the reason."""
    options, checkpoint = spec.options, spec.checkpoint
    path = weights_place(options, spec.facts.name, checkpoint.path)
    if path is None:
        return None, "switched off"
    if options.load_format == "dummy":
        return None, "random weights need no file"
    if not packer_of(spec.kernels).native:
        return None, "only the native library's packing is"
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
    return PackedFile(path, weights_identity(options, checkpoint.path), str(checkpoint.path.resolve())), ""


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
