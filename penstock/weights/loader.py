"""Fills a model's declared weights from a checkpoint, one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import DecoderModel
from penstock.layers.weight import Weight, WeightPart
from penstock.quant.decode import canonical_tensor, dequantize
from penstock.quant.methods import Method, checkpoint_method
from penstock.weights.checkpoint import Checkpoint

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
) -> None:
    """Reads, decodes and places every weight; beyond the model, memory holds one tensor at a time.

    Args:
        model: as built; its weights are filled.
        checkpoint: an opened checkpoint.
        dtype: type of the weights, but those declared `keep_float32`.
        progress: called with (bytes read, bytes in all) after every tensor.
        device: where weights are placed.

    Raises:
        CheckpointError: tensors are missing, of a wrong shape or left over (all in one error), or cannot be decoded.
    """
    method = checkpoint_method(checkpoint.config, checkpoint.tensors)
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
    total = sum(_size(source, checkpoint) for _, found in sources for source in found)
    done = 0
    for weight, found in sources:
        target = torch.float32 if weight.keep_float32 else dtype
        alone = len(found) == 1 and found[0].part.index is None
        whole = None if alone else torch.empty(weight.shape, dtype=target, device=device)
        for source in found:
            tensor = _decode(source, checkpoint, method, target)
            if whole is None:
                weight.fill(tensor.contiguous().to(device))
            else:
                _slot(whole, weight, source.part, tensor).copy_(tensor)
            done += _size(source, checkpoint)
            if progress is not None:
                progress(done, total)
        if whole is not None:
            weight.fill(whole)


def _named(checkpoint: Checkpoint, renames: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The model's spelling of every stored name → the stored name."""
    names: dict[str, str] = {}
    for stored in checkpoint.tensors:
        name = stored
        for theirs, ours in renames:
            if stored.startswith(theirs):
                name = ours + stored.removeprefix(theirs)
                break
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
                faults.misshapen.append(f"{name} (is {shape}, must be {wanted})")


def _decode(source: _Source, checkpoint: Checkpoint, method: Method, dtype: torch.dtype) -> Tensor:
    shape = source.part.shape
    if source.plain is not None:
        tensor = dequantize(checkpoint.read(source.plain), dtype)
    else:
        stored = {suffix: checkpoint.read(name) for suffix, name in source.stored.items()}
        matrix = method.canonical(source.key, stored, (math.prod(shape[:-1]), shape[-1]))
        tensor = canonical_tensor(matrix, dtype).reshape(shape)
    return tensor if source.part.transform is None else source.part.transform(tensor)


def _slot(whole: Tensor, weight: Weight, part: WeightPart, tensor: Tensor) -> Tensor:
    """The view of the weight that a part fills."""
    target = whole if part.index is None else whole[part.index]
    return target.narrow(weight.merge_axis, part.offset, tensor.shape[weight.merge_axis])
