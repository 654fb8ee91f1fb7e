"""What loaded weights take, estimated from a checkpoint's headers. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from penstock.config.options import EngineOptions
from penstock.config.resolve import DTYPE_BYTES, Decision, ModelFacts
from penstock.kernels.canonical import Blocks, Canonical, Plain
from penstock.quant.formats import FORMATS
from penstock.quant.tensor import TensorInfo

if TYPE_CHECKING:
    from penstock.kernels.api import KernelSet

PACKING_SLACK = 1.05  # over the file's bytes, for packed scales and padding

# Estimated bits of a weight, scales included, by the first letters of `--quantize` formats.
QUANTIZED_BITS = {
    "q2_k": 2.8, "q3_k": 3.7, "q4_0": 4.7, "q4_1": 5.2, "q4_k": 4.8, "q5_0": 5.7, "q5_1": 6.2, "q5_k": 5.8, "q6_k": 6.8,
    "q8_0": 8.7, "iq4_": 4.8, "tq1_": 2.1, "tq2_": 2.4, "mxfp": 4.5, "nvfp": 4.8, "int4": 4.5, "int8": 8.2, "fp8": 8.2,
    "fp8_": 8.2,
}  # fmt: skip


def _takes_all(matrix: Canonical) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Packer:
    """The kernels that pack weights.

    Attributes:
        name: "native", "triton" or "reference", whose weights are plain.
        refusal: why a matrix cannot be packed as it is stored, or None.
    """

    name: str
    refusal: Callable[[Canonical], str | None] = _takes_all

    @property
    def native(self) -> bool:
        """Whether weights stay as they are stored, in the native library's packing."""
        return self.name == "native"


def packer_of(kernels: KernelSet) -> Packer:
    """The packer among an engine's kernels."""
    chosen = next(choice for choice in kernels.choices if choice.op == "packable").chosen
    return Packer(chosen.name.split(" ")[0], kernels.packable)


def resident_bytes(
    facts: ModelFacts, packer: Packer, options: EngineOptions, tensors: Iterable[TensorInfo] = ()
) -> int:
    """Bytes of the loaded weights: as stored where the kernels take them so, else in the compute type.

    Args:
        facts, packer, options: of the model.
        tensors: of the checkpoint; for kernels on a GPU, which take some formats only.
    """
    others = facts.file_bytes - facts.float_bytes
    if options.quantize is not None:
        made = facts.float_values * QUANTIZED_BITS.get(options.quantize[:4], 16.5) / 8
        return int(made + others * PACKING_SLACK)
    if not facts.decoded and packer.native:
        return int(facts.file_bytes * PACKING_SLACK)
    size = DTYPE_BYTES[options.dtype]
    if facts.decoded or packer.name == "reference":
        return facts.parameters * size
    decoded = [info for info in tensors if _why_decoded(info, packer)]
    more = sum(prod(info.shape) * size - info.nbytes * PACKING_SLACK for info in decoded)
    return int(facts.float_values * size + others * PACKING_SLACK + more)


def decoded_formats(packer: Packer, dtype: str, tensors: Iterable[TensorInfo]) -> tuple[Decision, ...]:
    """The formats of a checkpoint that kernels on a GPU do not take as they are stored, and why."""
    if packer.name != "triton":
        return ()
    reasons = {info.format: why for info in tensors if (why := _why_decoded(info, packer))}
    return tuple(Decision(f"weights in {name}", f"decoded to {dtype}", why) for name, why in reasons.items())


def _why_decoded(info: TensorInfo, packer: Packer) -> str | None:
    """Why a quantised matrix cannot be packed as it is stored; None if it can, and for other tensors."""
    nothing = np.empty(0, np.uint8)
    if len(info.shape) < 2 or info.format not in FORMATS:
        return None
    shape = prod(info.shape[:-1]), info.shape[-1]
    if info.format.startswith("f8"):
        return packer.refusal(Plain(info.format, shape, nothing))
    if FORMATS[info.format].block_size == 1:
        return None
    return packer.refusal(Blocks(info.format, shape, nothing))
