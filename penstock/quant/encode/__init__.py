"""Float32 matrices → canonical quantised matrices, in every format that can be written. No torch here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from penstock.config.errors import ConfigError
from penstock.config.quantisation import QUANTIZE_FORMATS
from penstock.kernels.canonical import Blocks, Canonical, Plain
from penstock.quant.encode import groups
from penstock.quant.encode.blocks import BLOCK_ENCODERS
from penstock.quant.formats import FORMATS
from penstock.quant.formats.record import Bytes, Floats

__all__ = ["INT4_GROUPS", "SEARCHED", "encode_blocks", "fallback", "quantize_matrix", "require_finite"]

SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
"""Block formats whose scales the native library searches for; these and the ternary ones heed importance."""
INT4_GROUPS = (128, 64, 32)
_FALLBACKS = {
    "iq4_xs": "iq4_nl",
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "tq1_0": "q4_0",
    "tq2_0": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
_CHUNK = 2**18  # values a thread encodes at a time, so that temporaries stay in its cache


def fallback(name: str, inputs: int) -> str:
    """`name`, or the block format that ggml's tools choose instead where rows of `inputs` are not whole blocks."""
    if inputs % FORMATS[name].block_size == 0:
        return name
    second = _FALLBACKS.get(name, "f16")
    return second if inputs % FORMATS[second].block_size == 0 else "f16"


def encode_blocks(name: str, values: Floats, importance: Floats | None = None) -> Bytes:
    """Rows → bytes of a GGUF format.

    Args:
        name: "q4_k", "q8_0", "bf16", …
        values: [N, K] contiguous float32, finite; K a multiple of the format's block.
        importance: [K] what a squared error of each input weighs (mean squared activations), or None for all alike.

    Returns:
        [N · bytes of a row] uint8.

    Raises:
        ConfigError: there is no encoder, rows are not whole blocks, or a value is not finite.
    """
    _check(name, values, importance)
    if importance is not None:  # all scales of weights are alike; a floor keeps groups that were never active sane
        importance = importance / max(float(importance.mean()), 1e-30) + np.float32(1e-4)
    out = np.empty(values.size // FORMATS[name].block_size * FORMATS[name].block_bytes, dtype=np.uint8)
    if name in SEARCHED:
        _native().encode_rows(name, values, out, importance)
    else:
        _by_chunks(name, values, importance, out)
    return out


def _native() -> Any:
    native = importlib.import_module("penstock.kernels.cpu.native")
    if not native.available():
        formats = ", ".join(name for name in BLOCK_ENCODERS if name != "f32")
        raise ConfigError(f"{native.unavailable_reason()}. Formats that do without it: {formats}.")
    return native


def _check(name: str, values: Floats, importance: Floats | None) -> None:
    if name not in BLOCK_ENCODERS and name not in SEARCHED:
        raise ConfigError(f"{name!r} cannot be encoded; formats: {', '.join((*BLOCK_ENCODERS, *SEARCHED))}.")
    block = FORMATS[name].block_size
    if values.shape[1] % block:
        raise ConfigError(f"rows of {values.shape[1]} values are not whole {name} blocks of {block}.")
    if importance is not None and importance.shape != (values.shape[1],):
        raise ConfigError(
            f"importance has shape {importance.shape}; one weight an input, ({values.shape[1]},), is needed."
        )
    require_finite(values)


def require_finite(values: Floats) -> None:
    """Raises ConfigError where a value is infinite or NaN."""
    if not np.isfinite(values.sum(dtype=np.float64)) and not np.isfinite(values).all():
        raise ConfigError("a weight is infinite or not a number, so that no scale fits it; the model is damaged.")


def _by_chunks(name: str, values: Floats, importance: Floats | None, out: Bytes) -> None:
    encoder, found = BLOCK_ENCODERS[name], FORMATS[name]
    block = found.block_size if found.block_size > 1 else values.shape[1]
    row_bytes = out.size // len(values)
    step = max(1, _CHUNK // values.shape[1])

    def encode(start: int) -> None:
        rows = values[start : start + step]
        weights = None if importance is None else np.broadcast_to(importance, rows.shape).reshape(-1, block)
        encoded = encoder(rows.reshape(-1, block), weights)
        out[start * row_bytes : (start + len(rows)) * row_bytes] = encoded.reshape(-1)

    _in_threads(encode, range(0, len(values), step))


def _in_threads(work: Callable[[int], None], starts: range) -> None:
    """numpy works outside the interpreter's lock, so that two threads do twice as much."""
    if len(starts) < 2:
        for start in starts:
            work(start)
        return
    native = importlib.import_module("penstock.kernels.cpu.native")
    threads = native.library().num_threads() if native.available() else 1
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, starts):
            pass


def quantize_matrix(format: str, values: Floats, importance: Floats | None = None) -> Canonical:
    """Quantises one matrix, as if it came from a checkpoint in that format.

    Args:
        format: one of `config.quantisation.QUANTIZE_FORMATS` or a block format ("q4_k"). Names of whole files such as
            "q4_k_m" give their main block format; rows that do not divide into its blocks take the format that
            `fallback` names (int4: int8; nvfp4: fp8).
        values: [N, K] contiguous float32, finite.
        importance: [K] weight of each input's squared error; heeded by the searched and ternary formats and int4.

    Raises:
        ConfigError: an unknown format, or a value that is not finite.
    """
    if format not in QUANTIZE_FORMATS and format not in BLOCK_ENCODERS and format not in SEARCHED:
        raise ConfigError(f"{format!r} is no format to quantise to; allowed: {', '.join(QUANTIZE_FORMATS)}.")
    rows, inputs = values.shape
    if format in _GROUPED:
        require_finite(values)
        return _GROUPED[format](values, importance)
    name = fallback(format if format in FORMATS else format[: format.index("k") + 1], inputs)
    data = encode_blocks(name, values, importance)
    if name in ("f32", "f16", "bf16"):
        return Plain(name, (rows, inputs), data)
    return Blocks(name, (rows, inputs), data)


def _int4(values: Floats, importance: Floats | None) -> Canonical:
    group = next((group for group in INT4_GROUPS if values.shape[1] % group == 0), None)
    return groups.int8_rows(values) if group is None else groups.int4_groups(values, group, importance)


def _fp8_block(values: Floats, importance: Floats | None) -> Canonical:
    return groups.fp8_tiles(values)


def _nvfp4(values: Floats, importance: Floats | None) -> Canonical:
    divides = values.shape[1] % groups.NVFP4_GROUP == 0
    return groups.nvfp4(values, importance) if divides else groups.fp8_rows(values)


_GROUPED: dict[str, Callable[[Floats, Floats | None], Canonical]] = {
    "int8": groups.int8_rows,
    "int4": _int4,
    "fp8": groups.fp8_rows,
    "fp8_block": _fp8_block,
    "nvfp4": _nvfp4,
}
