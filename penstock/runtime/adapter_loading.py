"""Reads an adapter's files into what the slots of a model's projections hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.adapters import AdapterUse
from penstock.config.errors import CheckpointError, quoted
from penstock.kernels.adapters import AdapterSlots, LowRank, column_factors
from penstock.kernels.canonical import take_rows
from penstock.layers.linear import AdapterTarget, ProjectionAdapters
from penstock.quant.decode import canonical_tensor, dequantize, stored_matrix
from penstock.quant.tensor import StoredTensor
from penstock.runtime.adapters import Loaded
from penstock.weights.adapters.adapter import Adapter, LowRankTensors
from penstock.weights.adapters.open import adapter_digest, open_adapter

_KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)")
_STORED_ALIKE = 0.25  # of a row's length: what weights of few bits lose
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class AdapterLoader:
    """Loads adapters of one model. What it does touches nothing that steps use."""

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        renames: Sequence[tuple[str, str]],
        weight_of: Callable[[str], Iterable[Tensor]],
        config: Mapping[str, Any] | None = None,
        most: tuple[int, int] = (256, 2**40),
        elsewhere: tuple[frozenset[str], bool] = (frozenset(), False),
    ) -> None:
        """`targets`, by the checkpoint's names of projections; `weight_of` a name gives the matrix [M, K] in float32,
        some rows at a time.

        `renames`: patterns of other names, and the model's own, as the weights are renamed; `config`: the model's.
        `most`: rank and bytes of an adapter, more of which is not even decoded.
        `elsewhere`: names of projections that other processes have; and whether what an adapter says of those is looked
        at here all the same, so that a damaged one is refused before anybody computes with it.
        """
        self._targets = targets
        self._renames = [(re.compile(theirs), ours) for theirs, ours in renames]
        self._weight_of = weight_of
        self._config = config
        self._most_rank, self._most_bytes = most
        self._elsewhere, self._looks = elsewhere

    def load(self, use: AdapterUse) -> Loaded:
        """Reads an adapter.

        Raises:
            CheckpointError: it is damaged, of another model, or other than when it got its name.
            ConfigError: its rank or its shapes are not served.
        """
        adapter = open_adapter(use.path, self._config)
        self._check_size(use, adapter)
        for name, table in adapter.tables.items():
            if self._looks_at(own := self._named(name)):
                self._check_table(use, own, table)
        made: list[tuple[AdapterSlots, LowRank]] = []
        experts: dict[str, dict[int, tuple[str, LowRankTensors]]] = {}
        for name, change in adapter.changes.items():
            own = self._named(name)
            target = self._targets.get(own)
            if target is None and (expert := self._expert(own)) is not None:
                experts.setdefault(expert[0], {})[expert[1]] = own, change
                continue
            if target is None:
                raise CheckpointError(
                    f"the adapter {use.path} changes {quoted(name)}, which this model does not have, or which adapters "
                    f"cannot change here. It was made for {quoted(adapter.base or 'a model that it does not name')}."
                )
            if self._looks_at(own):
                made += self._kept(own, self._entries(use, own, target, change))
        for stack, changes in experts.items():
            if self._looks_at(stack):
                made += self._kept(stack, self._stacked(use, stack, changes))
            self._check_bytes(use, sum(entry.nbytes for _, entry in made))  # others' zeros are many
        self._check_bytes(use, sum(entry.nbytes for _, entry in made))
        if adapter_digest(use.path) != use.digest:
            raise CheckpointError(f"the adapter {use.path} is not what it was when it got its name; load it again.")
        return tuple(made)

    def _looks_at(self, name: str) -> bool:
        return self._looks or name not in self._elsewhere

    def _kept(self, name: str, made: Loaded) -> Loaded:
        return () if name in self._elsewhere else made

    def _check_size(self, use: AdapterUse, adapter: Adapter) -> None:
        """Raises CheckpointError for what is far too large, before any of it lies in memory."""
        if adapter.rank > self._most_rank:
            raise CheckpointError(
                f"the adapter {use.path} has rank {adapter.rank}; at most {self._most_rank} is served, start with a "
                "larger --max-lora-rank."
            )
        matrices = [tensor.info for change in adapter.changes.values() for tensor in (change.down, change.up)]
        sizes = (math.prod(info.shape) * _KINDS.get(info.format, torch.float32).itemsize for info in matrices)
        self._check_bytes(use, sum(sizes))

    def _check_table(self, use: AdapterUse, name: str, table: StoredTensor) -> None:
        """Raises CheckpointError for a table other than the model's, up to how that is stored."""
        shape, rows = table.info.shape, 0
        theirs = stored_matrix(table, (shape[0], shape[1])) if len(shape) == 2 else None
        for own in self._weight_of(name):
            some = np.arange(rows, rows := rows + len(own), dtype=np.int64)
            if theirs is None or theirs.shape[1] != own.shape[1] or theirs.shape[0] < rows:
                break
            values = self._finite(use, table, canonical_tensor(take_rows(theirs, some), torch.float32))
            off, size = (own - values).norm(dim=1), values.norm(dim=1)
            if not bool((off <= _STORED_ALIKE * size + 1e-6).all()):
                break
        else:
            if theirs is not None and theirs.shape[0] == rows:
                return
        raise CheckpointError(
            f"the adapter {use.path} brings {quoted(name)} of {list(shape)} that is not the model's: it was resized or "
            "trained. Merge the adapter into its model."
        )

    def _check_bytes(self, use: AdapterUse, size: int) -> None:
        if size > self._most_bytes:
            raise CheckpointError(
                f"the adapter {use.path} takes {size:,} bytes, but each has room for {self._most_bytes:,}; start with "
                "a larger --max-lora-rank or --max-lora-bytes."
            )

    def _named(self, name: str) -> str:
        found = f"{name}.weight"
        for theirs, ours in self._renames:
            found = theirs.sub(ours, found, count=1)
        return found.removesuffix(".weight").removesuffix(".transposed")

    def _expert(self, name: str) -> tuple[str, int] | None:
        """The projections of all experts that an expert's is one of, and its number; None where it is none."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        stack = f"{match[1]}.{_PROJECTIONS.get(match[3], match[3])}"
        return (stack, int(match[2])) if stack in self._targets else None

    def _stacked(self, use: AdapterUse, name: str, changes: Mapping[int, tuple[str, LowRankTensors]]) -> Loaded:
        """What changes single experts, by their numbers and with their names, as one of all; others' matrices are 0."""
        target = self._targets[name]
        assert isinstance(target, ProjectionAdapters)
        slots = target.slots
        if max(changes) >= slots.experts:
            raise CheckpointError(f"the adapter {use.path} changes expert {max(changes)} of {slots.experts}.")
        rank = max(change.rank for _, change in changes.values())
        down, up = torch.zeros(slots.experts, rank, slots.inputs), torch.zeros(slots.experts, slots.outputs, rank)
        columns = None
        if any(change.magnitude is not None for _, change in changes.values()):
            columns = torch.ones(slots.experts, slots.outputs)
        for number, (own, change) in changes.items():
            ours = [self._values(use, tensor, torch.float32) for tensor in (change.down, change.up)]
            if (ours[0].shape[1], len(ours[1])) != (slots.inputs, slots.outputs):
                raise CheckpointError(f"the adapter {use.path} was made for other experts: {list(ours[1].shape)}.")
            down[number, : change.rank], up[number, :, : change.rank] = ours[0], ours[1] * change.scale
            if columns is not None and change.magnitude is not None:
                columns[number] = self._columns(use, own, change, (ours[0], ours[1]))
        return target.entries(down, up, 1.0, columns)

    def _entries(self, use: AdapterUse, name: str, target: AdapterTarget, change: LowRankTensors) -> Loaded:
        kind = _KINDS.get(change.down.info.format, torch.float32)
        down, up = (self._values(use, tensor, kind) for tensor in (change.down, change.up))
        columns = None if change.magnitude is None else self._columns(use, name, change, (down, up))
        return target.entries(down, up, change.scale, columns)

    def _columns(self, use: AdapterUse, name: str, change: LowRankTensors, made: tuple[Tensor, Tensor]) -> Tensor:
        """What DoRA multiplies outputs by, of the weight of that name and an adapter's two matrices."""
        assert change.magnitude is not None
        lengths = self._values(use, change.magnitude, torch.float32).reshape(-1)
        down, up = made
        weight, looked_up = self._weight_of(name), change.looked_up
        try:
            columns = column_factors(weight, down, up, change.scale, lengths, looked_up=looked_up)
        except ValueError as error:
            raise CheckpointError(
                f"the adapter {use.path} changes {quoted(name)} as if it had {len(up)} outputs of {down.shape[1]} "
                f"inputs; it is {error}. Take an adapter that was made for this model."
            ) from None
        if not bool(torch.isfinite(columns).all()):
            told = f"lengths of {quoted(name)} that are no finite multiples of the model's"
            raise CheckpointError(f"the adapter {use.path} has {told}. Take an adapter made for this model.")
        return columns

    def _values(self, use: AdapterUse, tensor: StoredTensor, kind: torch.dtype) -> Tensor:
        return self._finite(use, tensor, dequantize(tensor, kind))

    def _finite(self, use: AdapterUse, tensor: StoredTensor, values: Tensor) -> Tensor:
        """These values of a tensor; raises CheckpointError for others than numbers."""
        if not bool(torch.isfinite(values).all()):
            name = quoted(tensor.info.name)
            raise CheckpointError(f"the adapter {use.path} has values in {name} that are no finite numbers.")
        return values
