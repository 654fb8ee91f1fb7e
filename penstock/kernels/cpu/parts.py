"""Ops over parts and streams of activations, as in `kernels.api`, over the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.kernels.cpu.recording import LOGIT_ROWS, Eager, Handle, extent_of, tape_of, width_of


def multiply(x: Any, factors: Any) -> Any:
    tape = tape_of(x)
    size = width_of(x)
    some = extent_of(x) == LOGIT_ROWS
    out = tape.new(size, extent_of(x))
    whole = not isinstance(factors, Handle) and factors.dim() == 1
    part = tape.vector(factors) if whole else tape.part(factors)
    tape.program.multiply(tape.index(x), part, size, tape.index(out), some)
    return tape.done(out)


def weighted_sum(base: Any, terms: Sequence[Any], weights: Any) -> Any:
    tape = tape_of(base)
    size = width_of(base)
    some = extent_of(base) == LOGIT_ROWS
    out = tape.new(size, extent_of(base))
    tape.program.weighted_sum(
        tape.index(base), [tape.index(term) for term in terms], tape.part(weights), size, tape.index(out), some
    )
    return tape.done(out)


def match_rms(x: Any, like: Any, least: float) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.match_rms(tape.index(x), tape.index(like), size, least, tape.index(out), extent_of(x))
    return tape.done(out)


def statistical_topk(x: Any, deviations: float) -> Any:
    tape = tape_of(x)
    size = width_of(x)
    some = extent_of(x) == LOGIT_ROWS
    out = tape.new(size, extent_of(x))
    tape.program.statistical_topk(tape.part(x), size, deviations, tape.index(out), some)
    return tape.done(out)


def rotate_heads(x: Any, cos: Any, sin: Any, heads: int) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size)
    tape.program.rotate(
        tape.index(x), tape.index(cos), tape.index(sin), width_of(cos), heads, size // heads, tape.index(out)
    )
    out = tape.done(out)
    return out.view(-1, heads, size // heads) if isinstance(tape, Eager) else out
