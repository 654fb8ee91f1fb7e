"""Which tensors of a checkpoint fill which declared weights, by their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import DecoderModel
from penstock.layers.weight import Weight, WeightPart
from penstock.quant.methods import Method
from penstock.quant.tensor import TensorInfo
from penstock.weights.checkpoint import Checkpoint, text_config

LISTED = 20  # names listed of each kind of fault


@dataclass(frozen=True, slots=True)
class Source:
    """Where one part's bytes lie.

    Attributes:
        part: what they fill.
        key: the key or alias under which they were found.
        stored: headers of the stored tensors by suffix; one, under "", where the weight is stored plainly.
    """

    part: WeightPart
    key: str
    stored: Mapping[str, TensorInfo]

    @property
    def plain(self) -> TensorInfo | None:
        return self.stored.get("")

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.stored.values()]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(info.nbytes for info in self.stored.values())

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        *rows, inputs = self.part.shape
        return math.prod(rows), inputs

    @property
    def inputs(self) -> int:
        """Of the matrix once it is placed: of one that is stored the other way round, its rows."""
        return self.part.shape[0 if self.part.key.endswith(".transposed") else -1]


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
        found = [f"{len(names)} {what}: {listed(names)}" for what, names in kinds if names]
        if found:
            raise CheckpointError(
                f"the tensors in {path} do not match its configuration. {'; '.join(found)}. "
                "Download the model again, or check that config.json belongs to these weights."
            )


def listed(names: list[str]) -> str:
    more = f", … ({len(names) - LISTED} more)" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def matched(model: DecoderModel, checkpoint: Checkpoint, method: Method) -> list[tuple[Weight, list[Source]]]:
    """Every weight with its sources.

    Raises:
        CheckpointError: tensors are missing, of a wrong shape or left over.
    """
    names = _named(checkpoint, model.renames)
    faults = _Faults()
    sources = [(weight, list(_sources(weight, names, checkpoint, method, faults))) for weight in model.weights()]
    _check_shapes(sources, checkpoint, faults)
    used = {name for _, found in sources for source in found for name in source.names}
    others = (part for weight, _ in sources for part in weight.others)  # which other ranks read
    used |= {name for part in others if (found := _find(part, names, checkpoint, method)) for name in found.names}
    ignorable = [re.compile(pattern) for pattern in (*model.ignorable, *method.ignorable)]
    for name, stored in names.items():
        if stored not in used and not any(pattern.fullmatch(name) for pattern in ignorable):
            faults.left_over.append(stored)
    faults.check(checkpoint.path)
    return sources


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


def _sources(
    weight: Weight, names: Mapping[str, str], checkpoint: Checkpoint, method: Method, faults: _Faults
) -> Iterator[Source]:
    """The sources of the first layout whose first part the checkpoint has; missing parts go to `faults`."""
    layouts = (weight.parts, *weight.alternatives)
    chosen = next((parts for parts in layouts if _find(parts[0], names, checkpoint, method)), weight.parts)
    for part in chosen:
        found = _find(part, names, checkpoint, method)
        if found:
            yield found
        else:
            faults.missing.append(part.key)


def _find(part: WeightPart, names: Mapping[str, str], checkpoint: Checkpoint, method: Method) -> Source | None:
    for key in (part.key, *part.aliases):
        packed = method.sources(key, names)
        if packed is not None:
            return Source(part, key, {suffix: _header(checkpoint, name) for suffix, name in packed.items()})
        if key in names:
            return Source(part, key, {"": _header(checkpoint, names[key])})
    return None


def _header(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """A tensor's header under the checkpoint's name for it; a file of several may have another."""
    info = checkpoint.tensors[name]
    return info if info.name == name else replace(info, name=name)


def _check_shapes(sources: list[tuple[Weight, list[Source]]], checkpoint: Checkpoint, faults: _Faults) -> None:
    """Shapes of plain tensors; a quantised matrix is checked while it is decoded."""
    for _, found in sources:
        for source in found:
            info, wanted = source.plain, list(source.part.shape)
            if info is not None and list(info.shape) != wanted:
                said = _said(info.shape, wanted, text_config(checkpoint.config))
                faults.misshapen.append(f"{info.name} (is {list(info.shape)}, must be {wanted}{said})")


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
