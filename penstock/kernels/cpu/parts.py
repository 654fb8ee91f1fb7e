"""Ops over parts and streams of activations, as in `kernels.api`, over the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.kernels.cpu.recording import Eager, Handle, extent_of, tape_of, width_of


def multiply(x: Any, factors: Any) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    whole = not isinstance(factors, Handle) and factors.dim() == 1
    part = tape.vector(factors) if whole else tape.part(factors)
    tape.program.multiply(tape.index(x), part, size, tape.index(out), extent_of(x))
    return tape.done(out)


def weighted_sum(base: Any, terms: Sequence[Any], weights: Any) -> Any:
    tape, size = tape_of(base), width_of(base)
    out = tape.new(size, extent_of(base))
    inputs = [tape.index(term) for term in terms]
    tape.program.weighted_sum(tape.index(base), inputs, tape.part(weights), size, tape.index(out), extent_of(base))
    return tape.done(out)


def match_rms(x: Any, like: Any, least: float) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.match_rms(tape.index(x), tape.index(like), size, least, tape.index(out), extent_of(x))
    return tape.done(out)


def statistical_topk(x: Any, deviations: float) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.statistical_topk(tape.part(x), size, deviations, tape.index(out), extent_of(x))
    return tape.done(out)


def rotate_heads(x: Any, cos: Any, sin: Any, heads: int) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size)
    tables = [tape.index(table) for table in (cos, sin)]
    tape.program.rotate_heads(
        tape.index(x), *tables, heads, size // heads, width_of(cos), tape.index(out), extent_of(x)
    )
    out = tape.done(out)
    return out.view(-1, heads, size // heads) if isinstance(tape, Eager) else out
