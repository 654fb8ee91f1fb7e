"""Where the inputs of a checkpoint's weights are cut, so that ranks can share them with the bits of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.kernels.canonical import Blocks, Canonical, Plain, take_rows
from penstock.kernels.cpu import native, packing
from penstock.kernels.segments import segment_ends
from penstock.layers.weight import Weight
from penstock.quant.decode import matrix_of
from penstock.quant.formats import FORMATS
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import stored_rows
from penstock.weights.sources import Source
from penstock.weights.weight_plan import WeightPlan, decide, kept_float, sample

_FLOATS = 64  # inputs that products of plain matrices sum together
_FIRST = np.zeros(1, np.int64)  # of a matrix's rows


class SegmentEnds:
    """The segments of a model's weights, by what its checkpoint stores and what that becomes in memory."""

    def __init__(self, checkpoint: Checkpoint, plans: Sequence[WeightPlan]) -> None:
        """`plans` of the whole model."""
        self._checkpoint = checkpoint
        self._plans = {id(plan.weight): plan for plan in plans}

    def __call__(self, weight: Weight) -> tuple[int, ...]:
        """Where the segments of its inputs end; one end where they cannot be cut."""
        inputs, plan = weight.shape[-1], self._plans[id(weight)]
        unit = math.lcm(*(self._unit(plan, place) for place in range(len(plan.sources))))
        return segment_ends(inputs, math.lcm(weight.segment, unit)) if weight.segment and unit else (inputs,)

    def _unit(self, plan: WeightPlan, place: int) -> int:
        """Inputs of one of its matrices that stay together; 0 for all."""
        source, form = plan.sources[place], plan.forms[place]
        stored = self._row(source)
        form = form or decide(plan.weight, stored, plan.target)
        if form.decoded:
            return math.lcm(_FLOATS, _stored_unit(stored))
        matrix = sample(form.encoded, stored.shape[1]) if form.encoded else stored
        return math.lcm(_packed_unit(matrix), _stored_unit(matrix))

    def _row(self, source: Source) -> Canonical:
        """The first row of a matrix; of one that is stored by itself its form alone."""
        if source.plain is None:
            whole = replace(source, part=replace(source.part, rows=None))
            return take_rows(stored_rows(self._checkpoint, whole), _FIRST)
        inputs, stored = source.inputs, source.plain.format
        format = stored if source.part.transform is None else kept_float(stored)
        block = FORMATS[format]
        nothing = np.zeros(inputs // block.block_size * block.block_bytes, np.uint8)
        return matrix_of(format, (1, inputs), nothing) or Plain("f32", (1, inputs), np.zeros(4 * inputs, np.uint8))


def _packed_unit(matrix: Canonical) -> int:
    return packing.segment_unit(matrix) if native.available() else math.lcm(_FLOATS, _stored_unit(matrix))


def _stored_unit(matrix: Canonical) -> int:
    """Inputs that a stored matrix keeps together."""
    if isinstance(matrix, Blocks):
        return FORMATS[matrix.format].block_size
    if isinstance(matrix, Plain):
        return matrix.tile[1] if matrix.scales is not None and matrix.tile[1] < matrix.shape[1] else 1
    return matrix.group
