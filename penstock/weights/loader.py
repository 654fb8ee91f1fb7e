"""Fills a model's declared weights from a checkpoint, one tensor at a time, as their plans say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config.errors import CheckpointError, ConfigError
from penstock.kernels.api import Matrix
from penstock.kernels.canonical import Canonical, Plain, concatenate, take_columns, take_rows
from penstock.kernels.plain import FLOAT_FORMATS, plain_matrix
from penstock.kernels.staging import to_device
from penstock.layers.decoder import DecoderModel
from penstock.layers.weight import WeightPart
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.decode import canonical_tensor, decoded_rows, dequantize, stored_matrix
from penstock.quant.encode import quantize_matrix
from penstock.quant.formats.record import Bytes
from penstock.quant.methods import Method, checkpoint_method
from penstock.quant.tensor import StoredTensor
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.device_encode import device_encoder
from penstock.weights.dummy import DummyCheckpoint, random_matrices
from penstock.weights.pack_cache import PackedFile
from penstock.weights.readers.files import let_go
from penstock.weights.sources import Source, listed
from penstock.weights.weight_plan import Form, WeightPlan, decide, kept_float, requested

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


def load_weights(
    model: DecoderModel,
    checkpoint: Checkpoint,
    plans: Sequence[WeightPlan],
    *,
    progress: Progress | None = None,
    cache: PackedFile | None = None,
) -> None:
    """Reads, packs and places every weight; beyond the model, memory holds one weight at a time.

    Args:
        model: as built; its weights are filled.
        checkpoint: an opened checkpoint.
        plans: from `plan_weights` of both; a model that reads its weights itself needs none.
        progress: called with (bytes read, bytes in all) after every tensor.
        cache: where packed weights are kept from one start to the next, or None.

    Raises:
        CheckpointError: tensors cannot be decoded.
        ValueError: the plans are of another model.
    """
    if model.load_from(checkpoint.path):
        return
    if [id(plan.weight) for plan in plans] != [id(weight) for weight in model.weights()]:
        raise ValueError("the plans are of another model's weights.")
    total = sum(source.nbytes for plan in plans for source in plan.sources)
    reader = _Reader(checkpoint, checkpoint_method(checkpoint.config, checkpoint.tensors), _Meter(total, progress))
    for plan in plans:
        weight, target = plan.weight, plan.target
        if weight.pack is None:
            weight.fill((reader.whole(plan).to(target.device),))
        elif cache is None or not cache.restore(weight):
            if isinstance(checkpoint, DummyCheckpoint):
                format = requested(target.quantize, weight) if target.quantize else None
                parts = random_matrices(weight, target.dtype, target.device, format)
            else:
                parts = reader.matrices(plan)
            _pack(plan, [part.to(target.device) if isinstance(part, Tensor) else part for part in parts])
            if cache is not None:
                cache.keep(weight)
            reader.let_go()
        else:
            reader.skip(plan)
    if cache is not None:
        cache.finish()


def _pack(plan: WeightPlan, parts: Sequence[Matrix]) -> None:
    try:
        plan.weight.fill(parts)
    except ValueError as error:
        names = list(dict.fromkeys(name for source in plan.sources for name in source.names))
        raise CheckpointError(
            f"the weights of {listed(names)} cannot be used: {str(error).rstrip('.')}. "
            "Download the model again, or take another quantisation of it."
        ) from error


@dataclass(slots=True)
class _Meter:
    total: int
    progress: Progress | None
    done: int = 0

    def count(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


class _Reader:
    """Reads the sources of one weight at a time."""

    def __init__(self, checkpoint: Checkpoint, method: Method, meter: _Meter) -> None:
        self._checkpoint = checkpoint
        self._method = method
        self._meter = meter
        self._read: list[Bytes] = []

    def let_go(self) -> None:
        """Memory need not hold any longer what was read of the file."""
        for data in self._read:
            let_go(data)
        self._read.clear()

    def _stored_tensor(self, name: str) -> StoredTensor:
        stored = self._checkpoint.read(name)
        self._read.append(stored.data)
        return stored

    def skip(self, plan: WeightPlan) -> None:
        """Counts what needs no reading."""
        self._meter.count(sum(source.nbytes for source in plan.sources))

    def whole(self, plan: WeightPlan) -> Tensor:
        """The weight as one plain tensor."""
        if len(plan.sources) == 1 and plan.sources[0].part.index is None:
            return self.tensor(plan.sources[0], plan.dtype).contiguous()
        whole = torch.empty(plan.weight.shape, dtype=plan.dtype)
        for source in plan.sources:
            tensor = self.tensor(source, plan.dtype)
            part = source.part
            target = whole if part.index is None else whole[part.index]
            axis = plan.weight.merge_axis
            target.narrow(axis, part.offset, tensor.shape[axis]).copy_(tensor)
        return whole

    def matrices(self, plan: WeightPlan) -> list[Matrix]:
        """The weight's matrices, as its plan says."""
        slots: dict[int, list[tuple[Source, Form | None]]] = {}
        for source, form in zip(plan.sources, plan.forms, strict=True):
            slots.setdefault(source.part.offset, []).append((source, form))
        parts: list[Matrix] = []
        for offset in sorted(slots):
            members = sorted(slots[offset], key=lambda member: member[0].part.index or 0)
            first = members[0][0]
            found = _joined([self._matrix(source, form, plan) for source, form in members], plan, first.key)
            split = plan.weight.gate_up and len(slots) == 1
            parts += _halves(found, plan.weight.experts, first.part.interleaved) if split else [found]
        return parts

    def _matrix(self, source: Source, form: Form | None, plan: WeightPlan) -> Matrix:
        matrix = self.stored(source)
        form = form or decide(plan.weight, matrix, plan.target)
        if form.encoded and isinstance(matrix, Plain):  # whole rows, whose length the format may depend on
            matrix = _encoded(form.encoded, source, matrix, plan.target.staging)
        if (columns := source.part.columns) is not None:
            matrix = take_columns(matrix, *columns)
        return _decoded(matrix, plan.dtype, plan.target.staging) if form.decoded else matrix

    def stored(self, source: Source) -> Canonical:
        """One part of a weight, as it is stored."""
        stored = self._canonical(source) if source.part.transform is None else None
        if stored is None:
            kept = "f32" if source.plain is None else kept_float(source.plain.format)
            return plain_matrix(self.tensor(source, FLOAT_FORMATS[kept]))
        self._meter.count(source.nbytes)
        rows = _rows(source.part, stored.shape[0])
        return stored if rows is None else take_rows(stored, rows)

    def _canonical(self, source: Source) -> Canonical | None:
        if source.plain is None:
            stored = {suffix: self._stored_tensor(info.name) for suffix, info in source.stored.items()}
            return self._method.canonical(source.key, stored, source.shape)
        return stored_matrix(self._stored_tensor(source.plain.name), source.shape)

    def pieces(self, source: Source) -> Iterator[Tensor]:
        """One part of a weight that is two-dimensional, decoded to float32, some rows at a time."""
        matrix = self._canonical(source)
        if matrix is None:
            yield self.tensor(source, torch.float32)
        else:
            yield from decoded_rows(matrix)

    def tensor(self, source: Source, dtype: torch.dtype) -> Tensor:
        """One part of a weight, decoded."""
        part = source.part
        if source.plain is not None:
            tensor = dequantize(self._stored_tensor(source.plain.name), dtype)
        else:
            matrix = self._canonical(source)
            assert matrix is not None
            tensor = canonical_tensor(matrix, dtype).reshape(part.shape)
        self._meter.count(source.nbytes)
        tensor = tensor if part.rows is None else tensor[torch.from_numpy(part.rows)]
        if part.entries is None:
            return tensor if part.transform is None else part.transform(tensor)
        own = slice(*part.entries[:2])
        if part.transform is None or part.shape[0] == part.entries[2]:
            return tensor[own] if part.transform is None else part.transform(tensor[own])
        return part.transform(tensor)[own]


def _rows(part: WeightPart, stored: int) -> npt.NDArray[np.int64] | None:
    """Which of a matrix's rows a part takes; None for all."""
    if part.entries is None:
        return part.rows
    each = stored // part.entries[2]
    return np.arange(part.entries[0] * each, part.entries[1] * each, dtype=np.int64)


def stored_rows(checkpoint: Checkpoint, source: Source) -> Canonical:
    """A matrix of the checkpoint's quantisation method, as it is stored.

    Raises:
        CheckpointError: it cannot be decoded.
    """
    reader = _Reader(checkpoint, checkpoint_method(checkpoint.config, checkpoint.tensors), _Meter(0, None))
    found = reader.stored(source)
    reader.let_go()
    return found


class StoredMatrices:
    """The matrices of a checkpoint as its files have them, whatever a model makes of them."""

    def __init__(self, checkpoint: Checkpoint, plans: Sequence[WeightPlan]) -> None:
        self._checkpoint = checkpoint
        self._sources = {source.part.key: source for plan in plans for source in plan.sources}

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The weight [outputs, inputs] of a projection in float32 on the host, some outputs at a time.

        A whole table may take more than the model does.

        Raises:
            CheckpointError: there is none of that name, or it cannot be decoded.
        """
        source = self._sources.get(f"{name}.weight") or self._sources.get(f"{name}.transposed")
        if source is None and name == "lm_head":  # has the embedding's table
            source = self._sources.get("model.embed_tokens.weight")
        if source is None:
            raise CheckpointError(f"{self._checkpoint.path} has no matrix of its own for {name}.")
        method = checkpoint_method(self._checkpoint.config, self._checkpoint.tensors)
        plain = replace(source, part=replace(source.part, rows=None, transform=None, columns=None))
        reader = _Reader(self._checkpoint, method, _Meter(0, None))
        if source.part.key.endswith(".transposed"):
            yield reader.tensor(plain, torch.float32).T
        else:
            yield from reader.pieces(plain)
        reader.let_go()


def _encoded(format: str, source: Source, matrix: Plain, staging: torch.device | None) -> Canonical:
    there = device_encoder(format, matrix) if staging is not None else None
    try:
        if there is not None and staging is not None:
            return there(staging)
        return quantize_matrix(format, decode_canonical(matrix))
    except ConfigError as error:
        raise CheckpointError(f"{source.key} cannot be quantised to {format}: {error}") from error


def _decoded(matrix: Canonical, dtype: torch.dtype, staging: torch.device | None) -> Tensor:
    """The matrix as a plain tensor, where it is to be packed."""
    if staging is None:
        return canonical_tensor(matrix, dtype)
    if isinstance(matrix, Plain) and matrix.scales is None:
        data = to_device(matrix.data, staging)
        return data.view(FLOAT_FORMATS[matrix.format]).view(matrix.shape).to(dtype)
    return canonical_tensor(matrix, dtype).to(staging)


def _joined(members: list[Matrix], plan: WeightPlan, name: str) -> Matrix:
    """The matrices of all experts, one below the other."""
    if len(members) == 1:
        return members[0]
    stored = [member for member in members if not isinstance(member, Tensor)]
    if len(stored) == len(members):
        try:
            return concatenate(stored)
        except ValueError as reason:
            kind = str(plan.dtype).removeprefix("torch.")
            log.warning("%s and the other experts beside it are decoded to %s: they are %s", name, kind, reason)
    return torch.cat([m if isinstance(m, Tensor) else _decoded(m, plan.dtype, plan.target.staging) for m in members])


def _halves(matrix: Matrix, experts: int, interleaved: bool) -> list[Matrix]:
    """The gates and the ups of merged rows."""
    rows = np.arange(matrix.shape[0], dtype=np.int64).reshape(experts, -1)
    middle = rows.shape[1] // 2
    chosen = (rows[:, ::2], rows[:, 1::2]) if interleaved else (rows[:, :middle], rows[:, middle:])
    flat = [half.reshape(-1) for half in chosen]
    if isinstance(matrix, Tensor):
        return [matrix[torch.from_numpy(half)] for half in flat]
    return [take_rows(matrix, half) for half in flat]
