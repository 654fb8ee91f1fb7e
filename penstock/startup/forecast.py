"""Whether a model fits here, from what headers tell, before its weights are there. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config.errors import ConfigError, MemoryPlanError
from penstock.config.machine import Machine, has_accelerator_files
from penstock.config.options import EngineOptions
from penstock.config.resolve import ModelFacts, resolve
from penstock.library.outlook import Outlook
from penstock.startup.header_plan import plan_from_headers, this_machine
from penstock.startup.memory_plan import MemoryPlan

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
    asked, here = options or EngineOptions(device="cpu"), machine or this_machine()
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
    here = this_machine()
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
    return plan_from_headers(facts, asked, resolve(asked, facts, machine).options, machine)
