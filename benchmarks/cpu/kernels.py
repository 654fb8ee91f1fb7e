"""The linear op on every weight format beside this machine's limits, measured in the same run.

One row against the memory bandwidth (packed bytes read a second), 16 and 512 rows against the rate of the multiply-add
instruction the format's kernel uses. Weights are random; best of several runs, as other work on the machine only slows.

    python -m benchmarks.cpu.kernels [--kinds q4_k,q8_0] [--megabytes 256]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.cpu.limits import measure_limits, settings, share
from benchmarks.report import report
from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Plain
from penstock.kernels.cpu import native, ops
from penstock.quant.formats import FORMATS

INPUTS = 2048
MULTIPLY_ROWS = 8192  # of the weight that 16 and 512 rows are multiplied with
TOKENS = (1, 4, 16, 32, 512)
SECONDS = 0.5  # of each measurement
FLOATS = ("f32", "bf16", "f16", "f8_e4m3")
PAIRS = ("bf16", "f8_e4m3", "fp8_block")  # multiplied in bfloat16 where the processor has such products
FORMATS_ALL = (
    *("q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "q2_k", "q3_k", "iq4_xs", "mxfp4", "nvfp4", "tq1_0", "tq2_0"),
    *("int8", "int4_g128", "nf4", "fp8_block"),
    *FLOATS,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One format: packed and stored bytes a weight, and for every number of rows the best time in seconds."""

    kind: str
    unit: str  # of `limits`, that its products take
    bytes_a_weight: float
    stored_a_weight: float
    stream_bytes: int
    seconds: dict[int, float]


def random_matrix(kind: str, rows: int) -> Canonical:
    rng, shape = np.random.default_rng(0), (rows, INPUTS)

    def codes(below: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return rng.integers(0, below, shape, dtype=np.uint8)

    def scales(group: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return rng.uniform(0.001, 0.01, (rows, INPUTS // group)).astype(np.float16).astype(np.float32)

    if kind == "int8":
        return Affine(codes(256), 8, INPUTS, scales(INPUTS), zero=128)
    if kind == "int4_g128":
        return Affine(codes(16), 4, 128, scales(128), zeros=codes(16)[:, : INPUTS // 128].copy())
    if kind == "nf4":
        return Codebook(codes(16), np.linspace(-1, 1, 16, dtype=np.float32) ** 3, 64, scales(64))
    if kind == "fp8_block":
        tiles = np.full((-(-rows // 128), INPUTS // 128), 0.01, dtype=np.float32)
        return Plain("f8_e4m3", shape, codes(0x40).reshape(-1), tiles, (128, 128))
    size = FORMATS[kind].block_bytes * INPUTS // FORMATS[kind].block_size
    data = rng.integers(0, 0x40, rows * size, dtype=np.uint8)  # scales are finite then
    return Plain(kind, shape, data) if kind in FLOATS else Blocks(kind, shape, data)


def best_seconds(run: Callable[[], object]) -> float:
    run()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return best


def measure(kind: str, megabytes: int) -> Measured:
    small = ops.pack_linear([random_matrix(kind, MULTIPLY_ROWS)])
    rows = max(MULTIPLY_ROWS, megabytes * 10**6 * MULTIPLY_ROWS // small.nbytes)
    stream = ops.pack_linear([random_matrix(kind, rows)])
    seconds = {}
    for tokens in TOKENS:
        weight = stream if tokens <= 4 else small
        x = torch.randn(tokens, INPUTS)
        seconds[tokens] = best_seconds(lambda x=x, weight=weight: ops.linear(x, weight))  # type: ignore[misc]
    (part,) = small.parts
    weights = MULTIPLY_ROWS * INPUTS
    pairs = kind in PAIRS and native.isa() in ("avx512_bf16", "amx", "amx_emulated")
    unit = "int8" if "codes" in part.kind else "bf16" if pairs else "fp32"
    return Measured(kind, unit, part.nbytes / weights, part.file_bytes / weights, stream.nbytes, seconds)


def main() -> None:
    options = settings(__doc__)
    options.add_argument("--kinds", default=",".join(FORMATS_ALL), help="formats, separated by commas")
    options.add_argument(
        "--megabytes", type=int, default=256, help="size of the weight that few rows are multiplied with"
    )
    given = options.parse_args()
    native.select_isa(given.isa)
    native.library().set_num_threads(given.threads)
    limits = measure_limits(given.threads)
    table, figures = [], {}
    for kind in given.kinds.split(","):
        found = measure(kind, given.megabytes)
        peak = limits[found.unit]
        reads = {n: found.stream_bytes / found.seconds[n] / 1e9 for n in TOKENS if n <= 4}
        rates = {n: 2 * n * MULTIPLY_ROWS * INPUTS / found.seconds[n] / 1e12 for n in TOKENS if n > 4}
        figures[kind] = {
            "bits_a_weight": 8 * found.bytes_a_weight,
            "stored_bits_a_weight": 8 * found.stored_a_weight,
            "gigabytes_a_second": {str(n): rate for n, rate in reads.items()},
            "share_of_bandwidth": reads[1] / limits["read"],
            "tera_operations_a_second": {str(n): rate for n, rate in rates.items()},
            "unit": found.unit,
            "share_of_peak": {str(n): rate / peak for n, rate in rates.items()} if peak else {},
        }
        shares = [share(reads[1], limits["read"]), reads[4], *(share(rate, peak) for rate in rates.values())]
        table.append([kind, 8 * found.bytes_a_weight, *shares])
    columns = ["format", "bits", "1 row: GB/s", "4 rows: GB/s", *(f"{n} rows: TOPS" for n in TOKENS if n > 4)]
    everything = {"isa": native.isa(), "threads": given.threads, "limits": dict(limits), "formats": figures}
    report("cpu_kernels", given.results, everything, columns, table)


if __name__ == "__main__":
    main()
