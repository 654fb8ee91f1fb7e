"""Fills a model's declared weights from a checkpoint, one tensor at a time."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.errors import CheckpointError, ConfigError
from penstock.kernels.api import Matrix
from penstock.kernels.canonical import Canonical, Plain, concatenate, take_rows
from penstock.kernels.plain import FLOAT_FORMATS, plain_matrix
from penstock.kernels.staging import to_device
from penstock.layers.decoder import DecoderModel
from penstock.layers.weight import Weight, WeightPart
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.decode import canonical_tensor, dequantize, stored_matrix
from penstock.quant.encode import quantize_matrix
from penstock.quant.methods import Method, checkpoint_method
from penstock.weights.checkpoint import Checkpoint, text_config
from penstock.weights.device_encode import device_encoder
from penstock.weights.dummy import DummyCheckpoint, random_matrices
from penstock.weights.pack_cache import PackedFile

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
LISTED = 20  # names listed of each kind of fault


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one part's bytes lie.

    Attributes:
        part: what they fill.
        key: the key or alias under which they were found.
        stored: names of the stored tensors by suffix; one, under "", where the weight is stored plainly.
    """

    part: WeightPart
    key: str
    stored: Mapping[str, str]

    @property
    def plain(self) -> str | None:
        return self.stored.get("")


@dataclass(slots=True)
class _Faults:
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)

    def check(self, path: object) -> None:
        kinds = (  # each name once: a tied tensor is the source of two weights
            ("missing", list(dict.fromkeys(self.missing))),
            ("of another shape than the configuration says", list(dict.fromkeys(self.misshapen))),
            ("unknown to this architecture", self.left_over),
        )
        found = [f"{len(names)} {what}: {_listed(names)}" for what, names in kinds if names]
        if found:
            raise CheckpointError(
                f"the tensors in {path} do not match its configuration. {'; '.join(found)}. "
                "Download the model again, or check that config.json belongs to these weights."
            )


def _listed(names: list[str]) -> str:
    more = f", … ({len(names) - LISTED} more)" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def load_weights(
    model: DecoderModel,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: str = "cpu",
    staged: bool = False,
    cache: PackedFile | None = None,
    quantize: str | None = None,
) -> None:
    """Reads, packs and places every weight; beyond the model, memory holds one weight at a time.

    Args:
        model: as built; its weights are filled.
        checkpoint: an opened checkpoint.
        dtype: type of the weights, but those declared `keep_float32`.
        progress: called with (bytes read, bytes in all) after every tensor.
        device: where weights are placed.
        staged: matrices of floats are copied there as they are stored, in short pieces, and converted there; the host
            holds none of them.
        cache: where packed weights are kept from one start to the next, or None.
        quantize: a format of `config.quantisation.QUANTIZE_FORMATS` that float matrices get, or None. Tables get one of
            eight bits.

    Raises:
        CheckpointError: tensors are missing, of a wrong shape or left over (all in one error), or cannot be decoded.
        ConfigError: a model that reads its weights itself cannot quantise them.
    """
    if quantize is not None and model.runs:
        raise ConfigError(f"--quantize {quantize} is not possible: {model.runs}. Leave the option out.")
    if model.load_from(checkpoint.path):
        return
    method = checkpoint_method(checkpoint.config, checkpoint.tensors)
    sources = _matched(model, checkpoint, method)
    total = sum(_size(source, checkpoint) for _, found in sources for source in found)
    reader = _Reader(checkpoint, method, _Meter(total, progress), quantize, torch.device(device) if staged else None)
    for weight, found in sources:
        if weight.pack is None:
            weight.fill((reader.whole(weight, found, torch.float32 if weight.keep_float32 else dtype).to(device),))
        elif cache is None or not cache.restore(weight):
            if isinstance(checkpoint, DummyCheckpoint):
                parts = random_matrices(weight, dtype, device, quantize and _request(quantize, weight))
            else:
                parts = reader.matrices(weight, found, dtype)
            _pack(weight, found, [part.to(device) if isinstance(part, Tensor) else part for part in parts])
            if cache is not None:
                cache.keep(weight)
        else:
            reader.skip(found)
    if cache is not None:
        cache.finish()


def _matched(model: DecoderModel, checkpoint: Checkpoint, method: Method) -> list[tuple[Weight, list[_Source]]]:
    """Every weight with its sources.

    Raises:
        CheckpointError: tensors are missing, of a wrong shape or left over.
    """
    names = _named(checkpoint, model.renames)
    faults = _Faults()
    sources = [(weight, list(_sources(weight, names, method, faults))) for weight in model.weights()]
    _check_shapes(sources, checkpoint, faults)
    used = {name for _, found in sources for source in found for name in source.stored.values()}
    ignorable = [re.compile(pattern) for pattern in (*model.ignorable, *method.ignorable)]
    for name, stored in names.items():
        if stored not in used and not any(pattern.fullmatch(name) for pattern in ignorable):
            faults.left_over.append(stored)
    faults.check(checkpoint.path)
    return sources


def _pack(weight: Weight, sources: Sequence[_Source], parts: Sequence[Matrix]) -> None:
    try:
        weight.fill(parts)
    except ValueError as error:
        names = list(dict.fromkeys(name for source in sources for name in source.stored.values()))
        raise CheckpointError(
            f"the weights of {_listed(names)} cannot be used: {str(error).rstrip('.')}. "
            "Download the model again, or take another quantisation of it."
        ) from error


def _named(checkpoint: Checkpoint, renames: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The model's spelling of every stored name → the stored name."""
    names: dict[str, str] = {}
    patterns = [(re.compile(theirs), ours) for theirs, ours in renames]
    for stored in checkpoint.tensors:
        name = stored
        for theirs, ours in patterns:
            name = theirs.sub(ours, name, count=1)
        names[name] = stored
    return names


def _sources(weight: Weight, names: Mapping[str, str], method: Method, faults: _Faults) -> Iterator[_Source]:
    """The sources of the first layout whose first part the checkpoint has; missing parts go to `faults`."""
    layouts = (weight.parts, *weight.alternatives)
    chosen = next((parts for parts in layouts if _find(parts[0], names, method)), weight.parts)
    for part in chosen:
        found = _find(part, names, method)
        if found:
            yield found
        else:
            faults.missing.append(part.key)


def _find(part: WeightPart, names: Mapping[str, str], method: Method) -> _Source | None:
    for key in (part.key, *part.aliases):
        packed = method.sources(key, names)
        if packed is not None:
            return _Source(part, key, packed)
        if key in names:
            return _Source(part, key, {"": names[key]})
    return None


def _size(source: _Source, checkpoint: Checkpoint) -> int:
    """Bytes in the file."""
    return sum(checkpoint.tensors[name].nbytes for name in source.stored.values())


def _check_shapes(sources: list[tuple[Weight, list[_Source]]], checkpoint: Checkpoint, faults: _Faults) -> None:
    """Shapes of plain tensors; a quantised matrix is checked while it is decoded."""
    for _, found in sources:
        for source in found:
            name, wanted = source.plain, list(source.part.shape)
            shape = wanted if name is None else list(checkpoint.tensors[name].shape)
            if shape != wanted:
                said = _said(shape, wanted, text_config(checkpoint.config))
                faults.misshapen.append(f"{name} (is {shape}, must be {wanted}{said})")


def _said(shape: Sequence[int], wanted: Sequence[int], config: Mapping[str, Any]) -> str:
    """The fields of the configuration that ask for sizes a tensor has not."""
    differ = {want for have, want in zip(shape, wanted, strict=False) if have != want}
    fields = [f"{name} is {value}" for name, value in config.items() if type(value) is int and value in differ]
    heads, size = config.get("num_attention_heads"), config.get("head_dim")
    pairs = config.get("num_key_value_heads") or heads
    if type(heads) is int and type(pairs) is int and type(size) is int:
        counts = {"num_attention_heads": heads, "num_key_value_heads": pairs, "all heads": heads + 2 * pairs}
        fields += [f"{name} × head_dim is {n} × {size}" for name, n in counts.items() if n * size in differ]
    return f": {', '.join(fields)}" if fields else ""


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

    def __init__(
        self,
        checkpoint: Checkpoint,
        method: Method,
        meter: _Meter,
        quantize: str | None,
        staging: torch.device | None,
    ) -> None:
        self._quantize = quantize
        self._staging = staging
        self._checkpoint = checkpoint
        self._method = method
        self._meter = meter

    def skip(self, sources: Sequence[_Source]) -> None:
        """Counts what needs no reading."""
        self._meter.count(sum(_size(source, self._checkpoint) for source in sources))

    def whole(self, weight: Weight, sources: Sequence[_Source], dtype: torch.dtype) -> Tensor:
        """The weight as one plain tensor."""
        if len(sources) == 1 and sources[0].part.index is None:
            return self._tensor(sources[0], dtype).contiguous()
        whole = torch.empty(weight.shape, dtype=dtype)
        for source in sources:
            tensor = self._tensor(source, dtype)
            part = source.part
            target = whole if part.index is None else whole[part.index]
            target.narrow(weight.merge_axis, part.offset, tensor.shape[weight.merge_axis]).copy_(tensor)
        return whole

    def matrices(self, weight: Weight, sources: Sequence[_Source], dtype: torch.dtype) -> list[Matrix]:
        """The weight's matrices, as they are stored where its packing takes them so; else plain, of type `dtype`."""
        slots: dict[int, list[_Source]] = {}
        for source in sources:
            slots.setdefault(source.part.offset, []).append(source)
        parts: list[Matrix] = []
        for offset in sorted(slots):
            members = sorted(slots[offset], key=lambda source: source.part.index or 0)
            found = self._joined([self._matrix(source, weight, dtype) for source in members], dtype, members[0].key)
            split = weight.gate_up and len(slots) == 1
            parts += _halves(found, weight.experts, members[0].part.interleaved) if split else [found]
        return parts

    def _matrix(self, source: _Source, weight: Weight, dtype: torch.dtype) -> Matrix:
        stored = self._canonical(source) if source.part.transform is None else None
        if stored is None:
            info = self._checkpoint.tensors[source.plain] if source.plain is not None else None
            kept = torch.float32 if info is None else _KEPT.get(info.format, torch.float32)
            stored = plain_matrix(self._tensor(source, kept))
        else:
            self._meter.count(_size(source, self._checkpoint))
            stored = stored if source.part.rows is None else take_rows(stored, source.part.rows)
        asked = self._quantize and _request(self._quantize, weight)
        if asked and isinstance(stored, Plain):
            stored = self._quantized(asked, source, stored)
        if weight.packable is not None and weight.packable(stored) is None:
            return stored
        return self._decoded(stored, dtype)

    def _decoded(self, matrix: Canonical, dtype: torch.dtype) -> Tensor:
        """The matrix as a plain tensor, where it is to be packed."""
        if self._staging is None:
            return canonical_tensor(matrix, dtype)
        if isinstance(matrix, Plain) and matrix.scales is None:
            data = to_device(matrix.data, self._staging)
            return data.view(FLOAT_FORMATS[matrix.format]).view(matrix.shape).to(dtype)
        return canonical_tensor(matrix, dtype).to(self._staging)

    def _joined(self, members: list[Matrix], dtype: torch.dtype, name: str) -> Matrix:
        """The matrices of all experts, one below the other."""
        if len(members) == 1:
            return members[0]
        stored = [member for member in members if not isinstance(member, Tensor)]
        if len(stored) == len(members):
            try:
                return concatenate(stored)
            except ValueError as reason:
                kind = str(dtype).removeprefix("torch.")
                log.warning("%s and the other experts beside it are decoded to %s: they are %s", name, kind, reason)
        return torch.cat([m if isinstance(m, Tensor) else self._decoded(m, dtype) for m in members])

    def _quantized(self, format: str, source: _Source, matrix: Plain) -> Canonical:
        there = device_encoder(format, matrix) if self._staging is not None else None
        try:
            if there is not None and self._staging is not None:
                return there(self._staging)
            return quantize_matrix(format, decode_canonical(matrix))
        except ConfigError as error:
            raise CheckpointError(f"{source.key} cannot be quantised to {format}: {error}") from error

    def _canonical(self, source: _Source) -> Canonical | None:
        shape = source.part.shape
        flat = (math.prod(shape[:-1]), shape[-1])
        if source.plain is None:
            stored = {suffix: self._checkpoint.read(name) for suffix, name in source.stored.items()}
            return self._method.canonical(source.key, stored, flat)
        return stored_matrix(self._checkpoint.read(source.plain), flat)

    def _tensor(self, source: _Source, dtype: torch.dtype) -> Tensor:
        part = source.part
        if source.plain is not None:
            tensor = dequantize(self._checkpoint.read(source.plain), dtype)
        else:
            matrix = self._canonical(source)
            assert matrix is not None
            tensor = canonical_tensor(matrix, dtype).reshape(part.shape)
        self._meter.count(_size(source, self._checkpoint))
        tensor = tensor if part.rows is None else tensor[torch.from_numpy(part.rows)]
        return tensor if part.transform is None else part.transform(tensor)


def _request(format: str, weight: Weight) -> str | None:
    """The format a weight gets where `format` was asked for; None where it stays as it is."""
    if weight.quantize_policy == "kept":
        return None
    return "q8_0" if weight.quantize_policy == "eight bits" and format not in ("f32", "bf16", "f16") else format


_KEPT = {name: FLOAT_FORMATS[name] for name in ("f32", "f16", "bf16")}  # what torch can transform


def _halves(matrix: Matrix, experts: int, interleaved: bool) -> list[Matrix]:
    """The gates and the ups of merged rows."""
    rows = np.arange(matrix.shape[0], dtype=np.int64).reshape(experts, -1)
    middle = rows.shape[1] // 2
    chosen = (rows[:, ::2], rows[:, 1::2]) if interleaved else (rows[:, :middle], rows[:, middle:])
    flat = [half.reshape(-1) for half in chosen]
    if isinstance(matrix, Tensor):
        return [matrix[torch.from_numpy(half)] for half in flat]
    return [take_rows(matrix, half) for half in flat]
