"""This machine's limits: memory bandwidth and the rates of its multiply-add instructions, for one thread and all.

python -m benchmarks.cpu.limits
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from benchmarks.report import arguments, report
from penstock.kernels.cpu import native

READ_BYTES = 2 << 30  # beyond every cache
UNITS = {"read": "GB/s", "int8": "TOPS", "bf16": "TFLOPS", "fp32": "TFLOPS"}
SCALES = {"read": 1e9, "int8": 1e12, "bf16": 1e12, "fp32": 1e12}


def measure_limits(threads: int, read_bytes: int = READ_BYTES) -> Mapping[str, float]:
    """Limits that this many threads reach together, in UNITS; 0 where the processor has no such instruction."""
    library = native.library()
    before = library.num_threads()
    library.set_num_threads(threads)
    try:
        return {what: library.measure_limit(what, read_bytes) / SCALES[what] for what in UNITS}
    finally:
        library.set_num_threads(before)


def share(rate: float, limit: float) -> str:
    """A rate and its share of a limit, which is 0 where the processor has no such instruction."""
    return f"{rate:.3g} ({rate / limit:.0%})" if limit else f"{rate:.3g}"


def settings(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark of kernels takes."""
    parser = arguments(description)
    parser.add_argument("--isa", default="auto", help="instruction set to measure")
    parser.add_argument("--threads", type=int, default=native.library().num_threads())
    return parser


def main() -> None:
    options = settings(__doc__)
    options.add_argument("--read-bytes", type=int, default=READ_BYTES, help="memory to read")
    given = options.parse_args()
    native.select_isa(given.isa)
    counts = sorted({1, given.threads})
    found = {threads: measure_limits(threads, given.read_bytes) for threads in counts}
    rows = [[f"{what} ({UNITS[what]})", *(found[threads][what] for threads in counts)] for what in UNITS]
    figures = {"isa": native.isa(), "units": UNITS, "threads": {str(n): dict(limits) for n, limits in found.items()}}
    report("cpu_limits", given.results, figures, ["limit", *(f"{n} thread(s)" for n in counts)], rows)


if __name__ == "__main__":
    main()
