"""A GPU's memory: the share an engine may fill, and other ways to start a model that does not fit. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.machine import Accelerator, Machine
from penstock.config.options import EngineOptions
from penstock.config.resolve import ModelFacts
from penstock.quant.footprint import PACKING_SLACK
from penstock.startup.memory_plan import MemoryLimits, MemoryPlan, Remedy, format_bytes

if TYPE_CHECKING:
    from penstock.kernels.devices import MemoryMeter

Quantized = Callable[[str], int]
"""A format of `--quantize` → bytes of the weights, if they were quantised to it as they load."""

SMALL_STEP = 2048  # tokens of a step that is still efficient
ALMOST_ALL = 0.97  # of a GPU's memory: the largest share that is suggested
SMALLER_FORMATS = ("fp8", "int4")  # suggested for float weights, which are quantised while they load


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of a device.

    Attributes:
        weights: held by the loaded model.
        step: the most that the largest step held besides weights and caches.
        others: not torch's: of other processes, and of contexts, libraries and compiled kernels.
        total: the device's.
        recordings: what recorded steps will keep, beside the largest step.
    """

    weights: int
    step: int
    others: int
    total: int
    recordings: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU: all, and those that nobody uses."""

    total: int
    free: int


def share(options: EngineOptions, memory: DeviceMemory) -> int:
    """Bytes of a GPU that may be filled besides what is in use."""
    return max(0, int(options.gpu_memory_utilization * memory.total) - (memory.total - memory.free))


def described(options: EngineOptions, gpu: Accelerator) -> str:
    """The share, for people."""
    return f"{options.gpu_memory_utilization:.0%} of {gpu.name}'s {format_bytes(gpu.memory_total)} less what is in use"


def remedies(
    facts: ModelFacts,
    quantized: Quantized,
    options: EngineOptions,
    limits: MemoryLimits,
    memory: DeviceMemory,
    weights: int,
    machine: Machine | None = None,
) -> tuple[Remedy, ...]:
    """Other ways to start, the least loss first.

    Args:
        facts, quantized, options: of the model.
        limits: under which it does not fit.
        memory: of the GPU.
        weights: bytes of the weights as they would be.
        machine: whose CPU may serve instead; None if it may not.
    """
    found: list[Remedy] = []
    if limits.max_num_batched_tokens > SMALL_STEP and not facts.whole_prompts:
        smaller = replace(limits, max_num_batched_tokens=SMALL_STEP, activation_bytes=None)
        found.append(Remedy(f"--max-num-batched-tokens {SMALL_STEP}", smaller, weights))
    if options.gpu_memory_utilization < ALMOST_ALL:
        more = share(replace(options, gpu_memory_utilization=ALMOST_ALL), memory)
        found.append(Remedy(f"--gpu-memory-utilization {ALMOST_ALL}", replace(limits, available_bytes=more), weights))
    if options.quantize is None and facts.float_values:
        for name in SMALLER_FORMATS:
            found.append(Remedy(f"--quantize {name}", limits, quantized(name)))
    if machine is not None and machine.isas and not facts.decoded and options.quantize is None:
        found.append(Remedy("--device cpu", _on_cpu(limits, machine), int(facts.file_bytes * PACKING_SLACK)))
    return tuple(found)


def _on_cpu(limits: MemoryLimits, machine: Machine) -> MemoryLimits:
    """The same wishes in the host's memory, with steps of its size."""
    rows, tokens = min(64, limits.max_num_seqs), min(512, limits.max_num_batched_tokens)
    limits = replace(limits, max_num_seqs=rows, max_num_batched_tokens=tokens, activation_bytes=None)
    return replace(limits, available_bytes=machine.memory_available, attention_masks=True)


def smaller_share(options: EngineOptions, plan: MemoryPlan, meter: MemoryMeter | None) -> str:
    """A --gpu-memory-utilization with which the caches fit, beside the weights, into what others leave free now."""
    if meter is None:
        return ""
    meter.reset()
    use = meter.read()
    room = use.free + use.allocated - plan.weights_bytes
    missing = plan.kv_bytes + plan.state_bytes + plan.activation_bytes - room
    lower = math.floor(100 * (options.gpu_memory_utilization - max(0, missing) / use.total) - 1) / 100
    given_up = (options.gpu_memory_utilization - lower) * use.total
    return f"--gpu-memory-utilization {lower}" if lower > 0 and given_up < plan.kv_bytes else ""


def smaller_weights(quantized: Quantized, options: EngineOptions, plan: MemoryPlan, meter: MemoryMeter | None) -> str:
    """A --quantize with which weights, a step and some caches fit into what others leave free now."""
    if meter is None or options.quantize is not None:
        return ""
    use = meter.read()
    room = use.total - use.others - plan.activation_bytes
    fits = (name for name in SMALLER_FORMATS if 1.1 * quantized(name) < min(room, plan.weights_bytes))
    name = next(fits, None)
    return f"--quantize {name}" if name else ""


def smaller_step(options: EngineOptions) -> str:
    """--max-num-batched-tokens of half the tokens."""
    return f"--max-num-batched-tokens {max(1, (options.max_num_batched_tokens or 2) // 2)}"
