"""Checked access to what a GGUF file says of its model, and what families ask of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.config.errors import CheckpointError, quoted

MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_NUMBER = 1e30
_MAX_SIZE = 2**31 - 1


class StoredTensor(Protocol):
    """A tensor of a file.

    Attributes:
        shape: slowest axis first.
        format: name of the ggml type, lower case.
        nbytes: as stored.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def decoded(self) -> npt.NDArray[np.float32]:
        """All values, one after the other."""
        ...


Tensors = Mapping[str, StoredTensor]


class Keys:
    """Checked access to one architecture's metadata keys."""

    __slots__ = ("arch", "values")

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.values = metadata
        self.arch = str(metadata.get("general.architecture"))

    def _find(self, key: str) -> tuple[str, Any]:
        full = f"{self.arch}.{key}"
        value = self.values.get(full)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one entry a layer, all equal
        return full, value

    def integer(self, key: str, default: int | None = None, *, most: int = _MAX_SIZE, least: int = 1) -> int:
        full, value = self._find(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            state = "missing" if value is None else quoted(str(value), 40)
            raise CheckpointError(f"metadata key {full} is {state}; an integer from {least} to {most} is needed.")
        return value

    def per_layer(self, key: str, *, most: int = _MAX_SIZE) -> list[int]:
        """One integer a layer, which may be 0; all the same where there is but one."""
        full, value = self._find(key)
        layers = self.integer("block_count", most=MAX_LAYERS)
        found = value if isinstance(value, list) else [value] * layers
        if len(found) != layers or not all(type(item) is int and 0 <= item <= most for item in found):
            raise CheckpointError(f"metadata key {full} is {quoted(str(value), 40)}; {layers} integers are needed.")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        full, value = self._find(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
            state = "missing" if value is None else quoted(str(value), 40)
            raise CheckpointError(f"metadata key {full} is {state}; a number above 0 is needed.")
        return shortest(value)

    def flag(self, key: str) -> bool | None:
        """None where the file does not say."""
        full, value = self._find(key)
        if value is not None and type(value) is not bool:
            raise CheckpointError(f"metadata key {full} is {quoted(str(value), 40)}; true or false is needed.")
        return value

    def has(self, key: str) -> bool:
        return self._find(key)[1] is not None


def shortest(value: float) -> float:
    """The decimal a float32 was written from (1e-06, not 9.99999997e-07), so that configs equal their twins."""
    return float(str(np.float32(value)))


def token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    """A special token; None where the model has none."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not -1 <= value < max(vocab_size, 2**32):
        raise CheckpointError(f"metadata key {key} is {quoted(str(value), 40)}; a token id is needed.")
    return value if 0 <= value < vocab_size else None  # writers put -1 or 2^32 - 1 where a model has none
