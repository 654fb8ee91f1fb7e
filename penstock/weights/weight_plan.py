"""How every weight comes into memory, decided once from headers: what stays as it is stored, what is decoded, what is
quantised, and where. The memory plan counts these plans' bytes, and the loader carries them out.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from penstock.kernels.canonical import Blocks, Canonical, Plain
from penstock.layers.decoder import DecoderModel
from penstock.layers.weight import Weight
from penstock.quant.decode import matrix_of
from penstock.quant.encode import quantize_matrix
from penstock.quant.footprint import PACKING_SLACK, encoded_bytes
from penstock.quant.methods import checkpoint_method
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.sources import Source, matched

_TYPES: Final = MappingProxyType({"f32": "float32", "f16": "float16", "bf16": "bfloat16"})
WHOLE_FLOATS = ("f32", "f16", "bf16")  # what torch can transform; other stored formats are decoded to float32 for it


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """What weights become.

    Attributes:
        dtype: type of those that are plain, but where weights are declared `keep_float32`.
        device: where they are placed.
        staged: matrices of floats are copied there as they are stored, in short pieces, and converted there; the host
            holds none of them.
        quantize: a format of `config.quantisation.QUANTIZE_FORMATS` that float matrices get, or None. Tables get one of
            eight bits.
    """

    dtype: torch.dtype
    device: str = "cpu"
    staged: bool = False
    quantize: str | None = None

    @property
    def staging(self) -> torch.device | None:
        """Where matrices are decoded and quantised, if not on the host."""
        return torch.device(self.device) if self.staged else None


@dataclass(frozen=True, slots=True)
class Form:
    """What a matrix becomes before it is packed. Without either, it is packed as it is stored.

    Attributes:
        encoded: the format it is quantised to, or "".
        decoded: why it becomes a plain tensor of the compute type, or "".
    """

    encoded: str = ""
    decoded: str = ""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How one weight comes into memory.

    Attributes:
        weight: as declared.
        sources: the tensors that fill it.
        forms: of each source; None where a quantisation method's tensors must be read to know. () for a weight that is
            not packed.
        target: what it becomes.
        converted: matrices of the checkpoint's method are decoded to plain ones as they are read.
    """

    weight: Weight
    sources: tuple[Source, ...]
    forms: tuple[Form | None, ...]
    target: LoadTarget
    converted: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight, or of its matrices where they are decoded."""
        return torch.float32 if self.weight.keep_float32 and self.weight.pack is None else self.target.dtype

    @property
    def nbytes(self) -> int:
        """An estimate of what it takes in memory."""
        if self.weight.pack is None:
            return prod(self.weight.shape) * self.dtype.itemsize
        stored = sum(self._bytes(source, form) for source, form in zip(self.sources, self.forms, strict=True))
        values = sum(prod(source.part.shape) for source in self.sources)
        return int(stored * min(1.0, prod(self.weight.shape) / max(1, values)))  # it may take a part of a tensor

    def _bytes(self, source: Source, form: Form | None) -> float:
        values = prod(source.part.shape)
        if form is None:
            return values * self.dtype.itemsize if self.converted else source.nbytes * PACKING_SLACK
        if form.decoded:
            return values * self.dtype.itemsize
        if form.encoded:
            return encoded_bytes(_made(form.encoded, self.weight.shape[-1]), values)
        return source.nbytes * PACKING_SLACK

    def kept_as(self) -> Iterator[tuple[str, int]]:
        """What its values are kept as in memory, and how many: a format, or a type of plain tensors."""
        plain = str(self.dtype).removeprefix("torch.")
        if self.weight.pack is None:
            yield plain, prod(self.weight.shape)
            return
        for source, form in zip(self.sources, self.forms, strict=True):
            stored = source.plain.format if source.plain is not None else "quantised as stored"
            decoded = self.converted if form is None else bool(form.decoded)
            kept = plain if decoded else form.encoded if form is not None and form.encoded else stored
            yield _TYPES.get(kept, kept), prod(source.part.shape)

    def quantized(self, format: str | None) -> WeightPlan:
        """The same weight where models are quantised to a format as they load, or are not."""
        return _planned(self.weight, self.sources, replace(self.target, quantize=format), self.converted)


def kept_as(plans: Iterable[WeightPlan]) -> tuple[str, ...]:
    """What weights are kept as in memory, most values first; () where a model reads them itself."""
    values: Counter[str] = Counter()
    for plan in plans:
        for name, count in plan.kept_as():
            values[name] += count
    return tuple(name for name, _ in values.most_common())


def plan_weights(model: DecoderModel, checkpoint: Checkpoint, target: LoadTarget) -> tuple[WeightPlan, ...]:
    """A plan for each of a model's weights, in their order.

    Raises:
        CheckpointError: tensors are missing, of a wrong shape or left over: all in one error.
    """
    method = checkpoint_method(checkpoint.config, checkpoint.tensors)
    sources = matched(model, checkpoint, method)
    return tuple(_planned(weight, tuple(found), target, method.converted) for weight, found in sources)


def _planned(weight: Weight, sources: tuple[Source, ...], target: LoadTarget, converted: bool) -> WeightPlan:
    forms = (
        decide(weight, _expected(weight, source), target) if source.plain is not None else None
        for source in (sources if weight.pack is not None else ())
    )
    return WeightPlan(weight, sources, tuple(forms), target, converted)


def decide(weight: Weight, matrix: Canonical, target: LoadTarget) -> Form:
    """What becomes of a matrix of a packed weight; of its numbers nothing is read, they may be absent."""
    asked = requested(target.quantize, weight) if target.quantize and isinstance(matrix, Plain) else None
    packed = sample(asked, matrix.shape[1]) if asked else matrix
    refused = "its kernel takes plain matrices" if weight.packable is None else weight.packable(packed)
    return Form(asked or "", refused or "")


def requested(format: str, weight: Weight) -> str | None:
    """The format a weight gets where `format` was asked for; None where it stays as it is."""
    if weight.quantize_policy == "kept":
        return None
    return "q8_0" if weight.quantize_policy == "eight bits" and format not in WHOLE_FLOATS else format


def planned_bytes(plans: Iterable[WeightPlan]) -> int:
    """An estimate of what the weights take in memory."""
    return sum(plan.nbytes for plan in plans)


def quantized_bytes(plans: Iterable[WeightPlan], format: str) -> int:
    """The same where float matrices are quantised to a format as they load."""
    return sum(plan.quantized(format).nbytes for plan in plans)


def decoded_formats(plans: Iterable[WeightPlan]) -> dict[str, str]:
    """Formats of a file, other than floats, of which matrices are decoded, and why."""
    found: dict[str, str] = {}
    for plan in plans:
        for source, form in zip(plan.sources, plan.forms, strict=False):
            stored = source.plain
            if form is not None and form.decoded and stored is not None and stored.format not in WHOLE_FLOATS:
                found.setdefault(stored.format, form.decoded)
    return found


def _expected(weight: Weight, source: Source) -> Canonical:
    """The matrix of a source that is stored as one tensor, as it is packed, without its numbers."""
    assert source.plain is not None
    part, nothing = source.part, np.empty(0, np.uint8)
    inputs = weight.shape[-1] if part.columns is None else source.inputs
    shape = prod(part.shape) // inputs, inputs
    matrix = None if source.part.transform else matrix_of(source.plain.format, shape, nothing)
    return matrix or Plain(kept_float(source.plain.format), shape, nothing)


def kept_float(format: str) -> str:
    """The float format in which a tensor is transformed."""
    return format if format in WHOLE_FLOATS else "f32"


@functools.lru_cache(maxsize=64)
def sample(format: str, inputs: int) -> Canonical:
    """A matrix of one row in a format, to ask kernels about."""
    return quantize_matrix(format, np.linspace(-1.0, 1.0, inputs, dtype=np.float32).reshape(1, inputs))


def _made(format: str, inputs: int) -> str:
    """The format that rows get which are no whole blocks of the one that was asked for."""
    row = sample(format, inputs)
    return row.format if isinstance(row, (Blocks, Plain)) and row.format != "f8_e4m3" else format
