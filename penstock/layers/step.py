"""One forward pass as layers see it: the batch, the caches, and what all layers share, prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.kernels.adapters import TokenAdapters
from penstock.kernels.api import KernelSet
from penstock.kernels.cache import StateRows
from penstock.layers.batch import Batch, LayerCache, MaskKind
from penstock.layers.rotary import Rotary, Temperature


@dataclass(slots=True)
class ForwardStep:
    """Lives for one forward pass.

    Attributes:
        batch: the step's tokens.
        caches: one a layer that keeps something, in layer order.
        kernels: the ops.
        last: the step is in the model's last layer.
        per_layer_embeddings: [T, layers · size], a vector for each layer; None for models without.
        streams: other versions of the hidden states, [T, hidden] each (layers.altup).
        scored: of how many last queries of a row attention tells how they weigh its keys; 0 for none.
        scores: what it told, by number of the layer's memory, as in kernels.api.KeyScores.
    """

    batch: Batch
    caches: Sequence[LayerCache]
    kernels: KernelSet
    last: bool = False
    per_layer_embeddings: Tensor | None = None
    streams: tuple[Tensor, ...] = ()
    scored: int = 0
    scores: dict[int, Tensor] = field(default_factory=dict)
    _plans: dict[int, Any] = field(default_factory=dict)
    _temperatures: dict[Temperature, Tensor] = field(default_factory=dict)
    _rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def plan(self, cache: LayerCache, window: int | None, chunked: bool = False) -> Any:
        """The attention plan of the cache's group (all its layers have the same window, or chunks of that size)."""
        batch = self.batch
        plans = self._plans if batch.plans is None else batch.plans
        plan = plans.get(cache.group)
        if plan is None:
            tables = batch.groups[cache.group]
            crosses = tables.context_len is not None  # to entries that are no tokens of the rows
            masks = (MaskKind.CROSS,) * len(tables.context_lens) if crosses else batch.masks
            plan = plans[cache.group] = self.kernels.plan_attention(
                cache.kv,
                batch.query_start,
                batch.context_len if tables.context_len is None else tables.context_len,
                tables.block_table,
                batch.query_lens,
                tables.context_lens if crosses else batch.context_lens,
                window,
                tuple(mask.value for mask in masks),
                batch.spans,
                chunked,
            )
        return plan

    @property
    def adapters(self) -> TokenAdapters | None:
        """Which adapters the step's tokens have; None where no token has one."""
        return self.batch.adapters

    def inject(self, hidden: Tensor, level: int) -> Tensor:
        """`hidden` with the step's media of this level in it; as it is in a step without."""
        given = self.batch.injected
        return hidden if given is None else self.kernels.inject(hidden, given.rows, given.values, level)

    def wanted(self, x: Tensor) -> Tensor:
        """In the last layer, once its tokens have been mixed: the rows [L, N] of x [T, N] whose logits are wanted.

        Only they are computed further, and tokens of a prompt but its last one cost no feed-forward there. Elsewhere x.
        """
        return self.kernels.take_rows(x, self.batch.logit_rows) if self.last else x

    @property
    def state_rows(self) -> StateRows:
        """Where the step's rows keep their recurrent states."""
        batch = self.batch
        assert batch.state_slot is not None
        return StateRows(batch.state_slot, batch.query_start, batch.context_len, batch.state_after)

    def temperature(self, temperature: Temperature) -> Tensor:
        """The queries' factors at the step's positions, [T, 1] float32."""
        found = self._temperatures.get(temperature)
        if found is None:
            found = self._temperatures[temperature] = self.kernels.position_scales(
                self.batch.positions[0], temperature.length, temperature.weight, temperature.offset
            )
        return found

    def rotation(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The rotary tables at the step's positions: cos and signed sin, each [T, 1, rot] float32."""
        found = self._rotations.get(id(rotary))
        if found is None:
            positions = self.batch.positions if rotary.rope.axes else self.batch.positions[0]
            frequencies, axes = rotary.beside(positions)
            found = self.kernels.rope_tables(positions, frequencies, rotary.rope.attention_factor, axes)
            self._rotations[id(rotary)] = found
        return found
