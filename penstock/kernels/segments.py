"""Where sums over inputs that ranks may share are cut, so that any number of ranks can give the bits of one process."""

from __future__ import annotations

import math

MAX_SEGMENTS = 8
_SPAN = 256  # inputs that packings keep together: cuts between spans cost least


def segment_ends(inputs: int, unit: int) -> tuple[int, ...]:
    """Ends of up to MAX_SEGMENTS segments, all but the last multiples of `unit`, as equal as can be.

    They follow from the weight alone: each is summed from zero, and the sums are added in order, whoever computed them.
    """
    whole = math.lcm(unit, _SPAN)
    unit = whole if inputs // whole >= MAX_SEGMENTS else unit
    units = inputs // unit
    count = max(1, min(MAX_SEGMENTS, units))
    return (*((place + 1) * units // count * unit for place in range(count - 1)), inputs)
