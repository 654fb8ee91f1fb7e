"""What memory and executors of all ranks of a model agree on."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.layers.part import StateWidths


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much the steps of a loaded model hold.

    Attributes:
        kv_types: of every layer's cache.
        kv_blocks: of every cache group.
        max_model_len: longest prompt plus output, tokens.
        rows: most sequences in a step.
        logit_rows: most rows whose logits are made at once.
        state_slots: of recurrent layers.
        taps: hidden states that are kept of every step.
        given: how wide is what the layers before a later part give; None if that is not known.
    """

    kv_types: tuple[str, ...]
    kv_blocks: tuple[int, ...]
    max_model_len: int
    rows: int
    logit_rows: int
    state_slots: int
    taps: tuple[str, ...] = ()
    given: StateWidths | None = None
