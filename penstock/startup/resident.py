"""What loaded weights take, estimated from a checkpoint's headers alone. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.options import EngineOptions
from penstock.config.resolve import DTYPE_BYTES, ModelFacts
from penstock.kernels.canonical import Canonical
from penstock.quant.footprint import PACKING_SLACK, encoded_bytes

if TYPE_CHECKING:
    from penstock.kernels.api import KernelSet


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


def resident_bytes(facts: ModelFacts, packer: Packer, options: EngineOptions) -> int:
    """Bytes of the loaded weights, where no model was declared whose plans tell (`weights.weight_plan`).

    They are as stored where the kernels take them so, else in the compute type.
    """
    others = facts.file_bytes - facts.float_bytes
    if options.quantize is not None:
        return int(encoded_bytes(options.quantize, facts.float_values) + others * PACKING_SLACK)
    if not facts.decoded and packer.native:
        return int(facts.file_bytes * PACKING_SLACK)
    size = DTYPE_BYTES[options.dtype]
    if facts.decoded or packer.name == "reference":
        return facts.parameters * size
    return int(facts.float_values * size + others * PACKING_SLACK)
