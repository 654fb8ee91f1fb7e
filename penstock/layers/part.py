"""Which layers of a model are run, what they are given and give, and where hidden states are looked at on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FINAL = "final"


def layer_input(layer: int) -> str:
    """The tap of what a layer is given."""
    return f"layers.{layer}.input"


def layer_output(layer: int) -> str:
    """The tap of what a layer gives, media that are added there included."""
    return f"layers.{layer}.output"


class StateWidths(NamedTuple):
    """Elements of a token in what one layer hands to the next, as in LayerStates; no per-layer embeddings have 0."""

    hidden: int
    streams: tuple[int, ...] = ()
    per_layer_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of a model: layers [first, end).

    What begins at layer 0 begins with the embedding; what goes to the last layer (end None) goes on to the final norm,
    and has the head if nobody else has it.

    Attributes:
        first, end: as said.
        taps: where hidden states are kept: `layer_input(n)`, `layer_output(n)` and FINAL, each [T, hidden_size], or,
            from the last layer's output on, [L, hidden_size] of the batch's `logit_rows`.
        scored: as in ForwardStep; steps that tell of keys are not recorded.
        given: how wide is what the layers before give; None to learn it from those layers, which must be loaded.
        head: whether it has the head; None where that goes with the last layer.
    """

    first: int = 0
    end: int | None = None
    taps: tuple[str, ...] = ()
    scored: int = 0
    given: StateWidths | None = None
    head: bool | None = None

    @property
    def with_head(self) -> bool:
        """Whether the head's weights are here."""
        return self.end is None if self.head is None else self.head

    def check(self, layers: int) -> None:
        """Refuses what a model of so many layers does not have.

        Raises:
            ValueError: the layers are none of the model's, or a tap is none of theirs.
        """
        end = layers if self.end is None else self.end
        if not 0 <= self.first < end <= layers:
            raise ValueError(f"layers {self.first} to {end} are no part of a model of {layers} layers")
        if not self.taps:
            return
        known = [name(layer) for layer in range(self.first, end) for name in (layer_input, layer_output)]
        known += [FINAL] if self.end is None else []
        for tap in self.taps:
            if tap not in known:
                raise ValueError(
                    f"tap {tap!r} is none of layers {self.first} to {end - 1}; allowed: {', '.join(known)}"
                )


WHOLE = ModelPart()


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What one layer hands to the next.

    Attributes:
        hidden: [T, hidden_size]; behind the last layer [L, hidden_size].
        streams, per_layer_embeddings: as in ForwardStep.
    """

    hidden: Tensor
    streams: tuple[Tensor, ...] = ()
    per_layer_embeddings: Tensor | None = None

    def each(self, function: Callable[[Tensor], Any]) -> LayerStates:
        """The same of what a function makes of every tensor."""
        vectors = self.per_layer_embeddings
        return LayerStates(
            function(self.hidden),
            tuple(function(stream) for stream in self.streams),
            None if vectors is None else function(vectors),
        )

    def widths(self, of: Callable[[Tensor], int]) -> StateWidths:
        """How wide they are."""
        vectors = self.per_layer_embeddings
        return StateWidths(of(self.hidden), tuple(map(of, self.streams)), 0 if vectors is None else of(vectors))

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them in one order."""
        vectors = self.per_layer_embeddings
        return (self.hidden, *self.streams, *(() if vectors is None else (vectors,)))


@dataclass(frozen=True, slots=True)
class PartOutput:
    """What a part of a model gives.

    Attributes:
        states: what the next layer would be given; of a part that goes to the end, the final hidden states.
        taps: hidden states by tap.
        scores: of keys, by number of the layer's memory, as in kernels.api.KeyScores.
    """

    states: LayerStates
    taps: Mapping[str, Tensor]
    scores: Mapping[int, Tensor] = field(default_factory=dict)
