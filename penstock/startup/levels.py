"""Levels of arithmetic: what "same request, same answer" means for the kernels in use."""

from __future__ import annotations

from penstock.config.resolve import Decision
from penstock.kernels.api import KernelSet
from penstock.kernels.cpu import native
from penstock.kernels.triton import FIXED_ORDER
from penstock.startup.resident import packer_of

STRICT = (
    "strict: tokens and log-probabilities depend only on the request and its seed, to the bit; not on batch, chunking, "
    "prefix hits, preemption or threads"
)
FAST = (
    "fast: tokens and log-probabilities depend only on the request, its seed and which tokens of its prompt are cached "
    "from when they were generated, to the bit; not on batch, chunking, preemption or threads"
)
ROUNDING = (
    "scheduling, cache and sampling are exact; torch's matrix products may round differently with the number of rows "
    "in a step, so that logits agree to float rounding and tokens except at ties within it"
)


def guarantee(kernels: KernelSet, fast: bool = False) -> str:
    """The level in use, in a sentence; `fast`: tokens are multiplied by their kind."""
    if not packer_of(kernels).native:
        return STRICT if _in_fixed_order(kernels) else ROUNDING
    return FAST if fast else STRICT


def _in_fixed_order(kernels: KernelSet) -> bool:
    """Whether kernels of Triton multiply and attend in an order that no step changes."""
    names = {choice.op: choice.chosen.name for choice in kernels.choices}
    return all(names[op].endswith(FIXED_ORDER) for op in ("linear", "gated_linear", "paged_attention"))


def level_notes(wanted: str, fast: bool) -> tuple[Decision, ...]:
    """What became of `--arithmetic`: `wanted` is the level asked for, `fast` whether level fast is in use."""
    if fast:
        return (Decision("arithmetic", "fast", "prompt tokens in matrix units, generated ones and logits as integers"),)
    if wanted != "fast":
        return ()
    if native.two_ways():
        return (Decision("arithmetic", "strict", "fast needs recorded steps"),)
    return (Decision("arithmetic", "strict", f"fast is the same on {native.isa()}, which has no matrix units"),)


def products_note(kernels: KernelSet) -> str:
    """How answers differ from those of other instruction sets, beginning with a comma; or ""."""
    return ", products in matrix units" if packer_of(kernels).native and native.two_ways() else ""
