"""The native library, if it can be loaded: block decoders and the sampler, on numpy arrays."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.errors import ConfigError
from penstock.kernels.sampling import LogprobTable, RowSettings, first_places

_FIELDS = tuple(field.name for field in fields(RowSettings))


@functools.cache
def _load() -> tuple[Any, str | None]:
    try:
        module: Any = importlib.import_module("penstock._native")
    except ImportError as error:
        return None, f"the native library cannot be loaded ({error}); `pip install .` in the source tree builds it"
    built = module.built_isas()
    if all(module.refusal(isa) for isa in built):
        return None, (
            f"the native library was built for another processor (it has {', '.join(built)}); `pip install .` in the "
            "source tree builds it for all, `make setup` for this one"
        )
    return module, None


def available() -> bool:
    """Whether the native library is there."""
    return _load()[0] is not None


def unavailable_reason() -> str | None:
    """Why the native library is not there, or None if it is."""
    return _load()[1]


def library() -> Any:
    """The extension module.

    Raises:
        ConfigError: it cannot be loaded.
    """
    module, reason = _load()
    if module is None:
        raise ConfigError(f"{reason}.")
    return module


def isa() -> str:
    """The instruction set in use, "none" without the library."""
    return str(library().isa()) if available() else "none"


def select_isa(name: str) -> str:
    """Uses instruction set `name` ("auto": the best this machine has) from now on and returns the one in use.

    Raises:
        ConfigError: the name is unknown, this build lacks it, or this machine does; three different messages.
    """
    try:
        library().select_isa(name)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"isa: {error}") from None
    return isa()


def cpu_features() -> dict[str, bool]:
    """Feature → whether the processor has it and the operating system lets programs use it; {} without the library."""
    return dict(library().cpu_features()) if available() else {}


def built_isas() -> tuple[str, ...]:
    """Instruction sets this build has ops for, worst first."""
    return tuple(library().built_isas()) if available() else ()


def usable_isas() -> tuple[str, ...]:
    """Instruction sets that this build has and this machine can run, best first."""
    return tuple(isa for isa in reversed(built_isas()) if library().refusal(isa) is None)


def refused_isas() -> tuple[tuple[str, str], ...]:
    """The other instruction sets that have a name, each with a sentence that says why it cannot be used here."""
    if not available():
        return ()
    reasons = ((isa, library().refusal(isa)) for isa in library().known_isas())
    return tuple((isa, str(reason)) for isa, reason in reasons if reason is not None)


def two_ways() -> bool:
    """Whether the instruction set in use has two arithmetics, so that level fast differs from strict."""
    return available() and bool(library().two_ways())


def set_num_threads(threads: int) -> None:
    """Sets how many threads native ops use, the caller's included."""
    library().set_num_threads(threads)


def dequantize_blocks(format: str, data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Decodes whole blocks of a format named as in `quant.tensor` into `out`, both one-dimensional and contiguous.

    Formats: f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, mxfp4.

    Raises:
        ValueError: the format is unknown, data is not whole blocks or out has another number of values.
        TypeError: an array has another type or is not contiguous.
    """
    library().dequantize_blocks(format, data, out)


def encode_rows(
    format: str,
    values: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint8],
    importance: npt.NDArray[np.float32] | None = None,
) -> None:
    """Encodes rows [N, K] into blocks of a format whose scales have to be searched for; all arrays contiguous.

    Formats: q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs. `importance` [K] weighs squared errors by input, besides
    what errors of large values weigh more. Values must be finite.

    Raises:
        ValueError: the format has no encoder, rows are not whole blocks, or sizes do not agree.
        TypeError: an array has another type or is not contiguous.
    """
    library().encode_rows(format, values, out, importance)


class NativeSampling:
    """The sampling op of the native library; see `kernels.sampling.SamplingKernel`."""

    on_device = False

    def row(self, settings: RowSettings) -> Any:
        """A native row. Prompt and output go over only if a parameter looks at them."""
        given = {name: getattr(settings, name) for name in _FIELDS}
        given["seed"] &= 2**64 - 1
        if settings.repetition_penalty == 1.0 and not settings.chain:
            given["prompt_ids"] = ()
        return library().SamplerRow(**given)

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        rows: Sequence[Any],
        positions: npt.NDArray[np.int64],
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """As in SamplingKernel."""
        tokens, errors = library().sample(logits, rows, positions.tolist(), masks)
        return np.array(tokens, np.int64), np.array(errors, np.uint8)

    def drawn(
        self,
        logits: npt.NDArray[np.float32],
        rows: Sequence[Any],
        positions: Sequence[int],
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[list[int], list[int]]:
        """As `sample`, of numbers."""
        found: tuple[list[int], list[int]] = library().sample(logits, rows, positions, masks)
        return found

    def verify(
        self,
        logits: npt.NDArray[np.float32],
        rows: Sequence[Any],
        drafts: Sequence[tuple[int, ...]],
        positions: npt.NDArray[np.int64],
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """As in SamplingKernel."""
        starts = np.array(first_places(drafts), np.int64)
        expected = np.array([token for ahead in drafts for token in (*ahead, -1)], np.int64)
        tokens = np.empty(len(expected), np.int64)
        errors = np.empty(len(expected), np.uint8)
        library().verify(logits, list(rows), starts, expected, positions, tokens, errors, masks)
        return tokens, errors

    def logprobs(self, logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64], top: int) -> LogprobTable:
        """As in SamplingKernel."""
        count = len(logits)
        table = LogprobTable(
            np.empty(count, np.float64),
            np.empty(count, np.int64),
            np.empty((count, top), np.int32),
            np.empty((count, top), np.float64),
            np.empty(count, np.uint8),
        )
        library().logprobs(
            logits, targets, table.logprobs, table.ranks, table.top_ids, table.top_logprobs, table.errors
        )
        return table
