"""Whether a model fits here, from what headers tell, before its weights are there. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.config.errors import ConfigError, MemoryPlanError
from penstock.config.machine import Machine, has_accelerator_files, read_machine
from penstock.config.options import EngineOptions
from penstock.config.resolve import ModelFacts, resolve
from penstock.core.kv.cache_spec import CacheKind, CacheSpec
from penstock.kernels.cpu import native
from penstock.kernels.cpu.packed import block_bytes, kv_layout
from penstock.library.outlook import Outlook
from penstock.startup.cache_plan import Caches, memory_limits, plan_caches
from penstock.startup.memory_plan import MemoryPlan
from penstock.startup.resident import Packer, resident_bytes

SMALLER = ("q8_0", "q4_k_m", "q2_k")  # what --quantize may be told, the best first


@dataclass(frozen=True, slots=True)
class Forecast:
    """How a model would start on this machine's CPU.

    Attributes:
        plan: where the memory would go; None if it does not fit.
        why: the refusal; "" if it fits.
        quantize: the best format with which it would fit as it loads; None if it fits, or with none.
    """

    plan: MemoryPlan | None
    why: str = ""
    quantize: str | None = None


def machine_without_torch() -> Machine:
    """This machine without its GPUs."""
    if not native.available():
        return read_machine()
    features = native.cpu_features()
    return read_machine(
        isas=native.usable_isas(),
        refused_isas=native.refused_isas(),
        has_bf16=features.get("avx512_bf16", False) or features.get("amx_bf16", False),
    )


def may_have_gpu() -> bool:
    """Whether there may be a GPU, whose memory nobody knows without torch."""
    return has_accelerator_files()


def forecast(facts: ModelFacts, options: EngineOptions | None = None, machine: Machine | None = None) -> Forecast:
    """Plans a model from its headers.

    Args:
        facts: of the model; sizes of weights that are not here yet may be estimates.
        options: as it would be asked for.
        machine: another than this one.
    """
    asked, here = options or EngineOptions(device="cpu"), machine or machine_without_torch()
    try:
        return Forecast(_plan(facts, asked, here))
    except MemoryPlanError as error:
        why = str(error)
    except ConfigError as error:
        return Forecast(None, str(error))
    for format in SMALLER if facts.float_values else ():
        try:
            _plan(facts, EngineOptions(device="cpu", quantize=format), here)
        except ConfigError:
            continue
        return Forecast(None, why, format)
    return Forecast(None, why)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is to be said of a model before it is loaded: why it cannot run here, or how it can; "" for nothing."""

    why: str | None = None
    remark: str = ""


def refusal(outlook: Outlook) -> Refusal:
    """Whether a model that is about to be pulled could ever run on this machine, were all its memory free; where there
    may be a GPU nothing is said.
    """
    if outlook.facts is None or may_have_gpu():
        return Refusal()
    here = machine_without_torch()
    here = replace(here, memory_available=here.memory_total)
    found = forecast(outlook.facts, machine=here)
    if found.plan is not None:
        return Refusal()
    if found.quantize is not None:
        return Refusal(remark=f"{outlook.name} fits here with --quantize {found.quantize} only: {found.why}")
    for name, facts in outlook.others.items():
        if forecast(facts, machine=here).plan is not None:
            return Refusal(f"{outlook.name} cannot run here: {found.why} What can: penstock pull {name}")
    return Refusal(f"{outlook.name} cannot run here: {found.why}")


def _plan(facts: ModelFacts, asked: EngineOptions, machine: Machine) -> MemoryPlan:
    concrete = resolve(asked, facts, machine).options
    specs = tuple(_specs(facts))
    weights = resident_bytes(facts, Packer("native" if machine.isas else "reference"), concrete)
    caches = Caches(specs, _block_bytes if machine.isas else _plain_bytes, facts.whole_prompts)
    limits = memory_limits(asked, concrete, machine, None)
    return plan_caches(caches, concrete, limits, (concrete.kv_cache_dtype,) * len(specs), facts, weights)


def _specs(facts: ModelFacts) -> Iterator[CacheSpec]:
    """Caches as headers tell of them: so many elements a token, here as those of one head."""
    for layer in facts.layers:
        kind = CacheKind.FULL if layer.window is None else CacheKind.SLIDING
        key = -(-layer.elements_per_token // 2)
        yield CacheSpec(kind, 1 if key else 0, key, layer.elements_per_token - key, layer.window)


def _block_bytes(kv_type: str, block_size: int, heads: int, key_dim: int, value_dim: int, latent: bool) -> int:
    return block_bytes(kv_layout(kv_type, block_size, heads, key_dim, value_dim, latent))


def _plain_bytes(kv_type: str, block_size: int, heads: int, key_dim: int, value_dim: int, latent: bool) -> int:
    size = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int4": 0.5}.get(kv_type, 1.0)
    return int(size * block_size * heads * (key_dim + value_dim))
