"""What a quantisation method is: names of the tensors that make a matrix, and how they become a canonical one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Canonical
from penstock.quant.formats import FORMATS, decode_to_float32
from penstock.quant.formats.record import Floats
from penstock.quant.tensor import StoredTensor, TensorInfo

_INTEGERS = {f"{kind}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)}
_REMEDY = "Download the model again, or check that its quantisation configuration belongs to these weights."


@dataclass(frozen=True, slots=True)
class Matrix:
    """One quantised matrix as stored.

    Attributes:
        key: the model's name of the weight.
        shape: (N, K) of the decoded matrix.
        tensors: the stored tensors by their suffix.
    """

    key: str
    shape: tuple[int, int]
    tensors: Mapping[str, StoredTensor]

    def error(self, suffix: str, problem: str) -> CheckpointError:
        """The error to raise about one of the tensors."""
        return CheckpointError(f"tensor {self.tensors[suffix].info.name!r} {problem}. {_REMEDY}")

    def has(self, suffix: str) -> bool:
        return suffix in self.tensors

    def stored_shape(self, suffix: str) -> tuple[int, ...]:
        return self.tensors[suffix].info.shape

    def array(self, suffix: str, fmt: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """The stored values of an integer format, in its shape.

        Raises:
            CheckpointError: it is stored in another format or shape than those given.
        """
        info = self.tensors[suffix].info
        if info.format != fmt or (shape is not None and info.shape != shape):
            wanted = f"{fmt}{list(shape) if shape is not None else ''}"
            raise self.error(suffix, f"is {info.format}{list(info.shape)} where {wanted} is needed")
        if fmt not in _INTEGERS:
            raise self.error(suffix, f"is {fmt} where integers are needed")
        return self.tensors[suffix].data.view(_INTEGERS[fmt]).reshape(info.shape)

    def floats(self, suffix: str, shape: tuple[int, ...] | None = None) -> Floats:
        """Values of any plain format as float32, finite.

        Raises:
            CheckpointError: NaN or infinity among them, another shape than the one given, or no plain format.
        """
        stored = self.tensors[suffix]
        plain = FORMATS.get(stored.info.format)
        if plain is None or plain.block_size != 1:
            raise self.error(suffix, f"is stored as {stored.info.format}, which is no plain number format")
        values = decode_to_float32(stored.info.format, stored.data)
        if shape is not None and values.size != math.prod(shape):
            raise self.error(suffix, f"has shape {list(stored.info.shape)} where {list(shape)} is needed")
        if not np.isfinite(values).all():
            raise self.error(suffix, "holds NaN or infinity among its scales")
        return values.reshape(stored.info.shape if shape is None else shape)

    def check_noted_shape(self, suffix: str) -> None:
        """Compares the shape that a tensor of two integers notes, if it is there.

        Raises:
            CheckpointError: it is not the matrix's.
        """
        if self.has(suffix):
            noted = self.array(suffix, self.tensors[suffix].info.format).reshape(-1).tolist()
            if noted != list(self.shape):
                raise self.error(suffix, f"notes the shape {str(noted)[:60]} where {list(self.shape)} is needed")

    def group_size(self, suffix: str, groups: int) -> int:
        """Inputs that share a scale where a row of K has `groups` scales.

        Raises:
            CheckpointError: they do not divide the row.
        """
        inputs = self.shape[1]
        if groups < 1 or inputs % groups:
            raise self.error(suffix, f"has {groups} groups, which do not divide a row of {inputs} inputs")
        return inputs // groups


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which the tensors of a matrix are stored beside each other.

    Attributes:
        required: suffixes that must be there; the first holds the codes. They replace `ends` in a weight's key.
        decode: the matrix as stored → canonical.
        values: how many weights the tensors (by suffix) stand for.
        optional: suffixes used where they are there.
        ends: how the keys of such weights end.
    """

    required: tuple[str, ...]
    decode: Callable[[Matrix], Canonical]
    values: Callable[[Mapping[str, TensorInfo]], int]
    optional: tuple[str, ...] = ()
    ends: str = ".weight"

    def find(self, key: str, names: Mapping[str, Any]) -> dict[str, str] | None:
        """suffix → name of every tensor of weight `key`; None where it is not stored in this layout."""
        if not key.endswith(self.ends):
            return None
        stem = key.removesuffix(self.ends)
        found = {suffix: stem + suffix for suffix in (*self.required, *self.optional) if stem + suffix in names}
        return found if all(suffix in found for suffix in self.required) else None


@dataclass(frozen=True, slots=True)
class Method:
    """A quantisation method as one checkpoint configures it.

    Attributes:
        name: as in `quant_method`.
        layouts: how its matrices are stored, tried in order.
        ignorable: regular expressions of tensors that only other engines' arithmetic needs.
        converted: whether matrices are decoded at load because no kernel reads the format.
    """

    name: str
    layouts: tuple[Layout, ...] = ()
    ignorable: tuple[str, ...] = ()
    converted: bool = False

    def sources(self, key: str, names: Mapping[str, str]) -> dict[str, str] | None:
        """The stored tensors of a weight.

        Args:
            key: the model's name, for example "model.layers.0.self_attn.q_proj.weight".
            names: the model's spelling of every stored name → the stored name.

        Returns:
            suffix → stored name; None where the weight is stored plainly or not at all.
        """
        for layout in self.layouts:
            found = layout.find(key, names)
            if found is not None:
                return {suffix: names[name] for suffix, name in found.items()}
        return None

    def canonical(self, key: str, stored: Mapping[str, StoredTensor], shape: tuple[int, int]) -> Canonical:
        """The matrix of a weight.

        Args:
            key: the weight's name.
            stored: its tensors by suffix, as `sources` named them.
            shape: (N, K) that it must have.

        Raises:
            CheckpointError: the tensors do not make such a matrix, or a scale is no number.
        """
        for layout in self.layouts:
            if all(suffix in stored for suffix in layout.required):
                return layout.decode(Matrix(key, shape, stored))
        raise CheckpointError(
            f"the tensors of {key!r} ({', '.join(stored)}) are in no layout of {self.name}. {_REMEDY}"
        )

    def count(self, tensors: Mapping[str, TensorInfo]) -> tuple[int, list[TensorInfo]]:
        """What a checkpoint's tensors stand for.

        Returns:
            The weights, packed ones counted one by one, their scales not at all; and the tensors that hold weights as
            they are: neither packed ones and their scales, nor ignorable ones.
        """
        packed = list(self._packed(tensors))
        used = {name for found, _ in packed for name in found.values()}
        ignored = [re.compile(pattern) for pattern in self.ignorable]
        plain = [
            info
            for name, info in tensors.items()
            if name not in used and not any(pattern.fullmatch(name) for pattern in ignored)
        ]
        values = sum(
            layout.values({suffix: tensors[name] for suffix, name in found.items()}) for found, layout in packed
        )
        return values + sum(math.prod(info.shape) for info in plain), plain

    def _packed(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[dict[str, str], Layout]]:
        for name in tensors:
            for layout in self.layouts:
                payload = layout.required[0]
                key = name.removesuffix(payload) + layout.ends
                found = layout.find(key, tensors) if name.endswith(payload) else None
                if found is not None:
                    yield found, layout
                    break


def packed_values(payload: str, bits: int) -> Callable[[Mapping[str, TensorInfo]], int]:
    """Counts the fields of `bits` bits in tensor `payload`, for `Layout.values`."""

    def count(infos: Mapping[str, TensorInfo]) -> int:
        return infos[payload].nbytes * 8 // bits

    return count


def unsupported(what: str, allowed: Iterable[object]) -> CheckpointError:
    """The error to raise about a setting of a quantisation configuration."""
    listed = ", ".join(map(str, allowed))
    return CheckpointError(
        f"quantization_config: {what} cannot be read; allowed: {listed}. Use another quantisation of the model."
    )
