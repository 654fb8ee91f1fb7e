"""What it costs to sum shared inputs in segments: the output and down projections of a 0.6B model, with and without.

Both packings take turns on one thread, by its processor time. A step's share of these products is about a third.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.report import arguments, report
from penstock.kernels.canonical import Blocks, Canonical
from penstock.kernels.cpu import native, ops
from penstock.kernels.plain import plain_matrix
from penstock.quant.formats import FORMATS

SHAPES = (("down", 1024, 3072, 1), ("attention output", 1024, 2048, 256))
FORMS = ("q4_k", "q8_0", "bf16", "f32")
ROWS = (1, 4, 16, 512)
COLUMNS = ("product", "weights", "rows", "segments", "µs without", "with / without")


def matrix(form: str, rows: int, inputs: int) -> Canonical:
    """Random weights."""
    if form in ("bf16", "f32"):
        dtype = torch.bfloat16 if form == "bf16" else torch.float32
        return plain_matrix((torch.randn(rows, inputs) * 0.02).to(dtype))
    stored = FORMATS[form]
    count = rows * inputs // stored.block_size * stored.block_bytes
    data = np.random.default_rng(0).integers(0, 60, count, dtype=np.uint8)
    return Blocks(form, (rows, inputs), data)


def ratio(one: Canonical, segment: int, rows: int, repeats: int) -> tuple[int, float, float]:
    """(segments, median seconds without, median of pairs' ratios); several copies, so that memory is read anew."""
    copies = [[ops.pack_linear([one], given) for _ in range(6)] for given in (0, segment)]
    x = torch.randn(rows, one.shape[1])
    times: tuple[list[float], list[float]] = ([], [])
    for at in range(repeats):
        for kind in (0, 1) if at % 2 else (1, 0):
            begin = time.thread_time()
            ops.linear(x, copies[kind][at % 6])
            times[kind].append(time.thread_time() - begin)
    ratios = [cut / plain for plain, cut in zip(*times, strict=True)]
    return len(copies[1][0].parts[0].segments), statistics.median(times[0]), statistics.median(ratios)


def main() -> None:
    """Prints the ratios."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    native.set_num_threads(1)
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    for (name, outputs, inputs, segment), form in itertools.product(SHAPES, FORMS):
        one = matrix(form, outputs, inputs)
        for rows in ROWS:
            repeats = max(10, given.repeats // (8 if rows > 100 else 1))
            segments, plain, times = ratio(one, segment, rows, repeats)
            about = {"product": name, "weights": form, "rows": rows, "segments": segments}
            found.append({**about, "seconds": plain, "ratio": times})
    table = [tuple(one.values()) for one in found]
    table = [(*about, seconds * 1e6, times) for *about, seconds, times in table]
    report("segments", given.results, {"products": found}, COLUMNS, table)


if __name__ == "__main__":
    main()
