"""Gives a loaded model slots for adapters, and what fills them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.errors import ConfigError
from penstock.layers.adapters import add_to_layers
from penstock.layers.part import WHOLE
from penstock.runtime.adapter_loading import AdapterLoader
from penstock.runtime.adapters import AdapterRoom
from penstock.startup.adapter_room import adapter_bytes, part_bytes
from penstock.startup.engine_spec import Declaration
from penstock.weights.loader import StoredMatrices
from penstock.weights.weight_plan import WeightPlan


def make_adapter_room(spec: Declaration, whole: Sequence[WeightPlan] = ()) -> AdapterRoom:
    """The room of a model, before its steps are recorded; the null form where none are asked for.

    Args:
        spec: of the model, or of the part that a stage has: it keeps what adapters have for its layers.
        whole: the plans of all stages' weights, of the one that looks at whole adapters.

    Raises:
        ConfigError: the model's layers take none.
    """
    options, model = spec.options, spec.model
    if not options.enable_lora:
        return AdapterRoom()
    if model.runs:
        raise ConfigError(f"--enable-lora is not possible: {model.runs}. Merge the adapter into the model's weights.")
    slots, rank = options.max_loras + 1, options.max_lora_rank
    held = {id(layer): layer for top in model.held() for layer in top.walk()} if model.part is not WHOLE else None
    here = [layer for layer in model.walk() if held is None or id(layer) in held]
    own = add_to_layers(here, spec.kernels, slots, rank)
    others = [] if held is None else [layer for layer in model.walk() if id(layer) not in held]
    elsewhere = add_to_layers(others, spec.kernels, slots, rank)
    matrices = StoredMatrices(spec.checkpoint, whole or spec.weights)
    room = adapter_bytes(spec.facts, options)
    most = rank, room // options.max_loras
    loader = AdapterLoader(
        {**elsewhere, **own}, model.renames, matrices.pieces, spec.checkpoint.config, most,
        (frozenset(elsewhere) - frozenset(own), bool(whole)),
    )  # fmt: skip
    if held is not None:
        part = model.part
        layers = range(len(model.blocks))[part.first : part.end]
        room = part_bytes(spec.facts, options, len(layers), (part.first == 0) + (part.end is None))
    return AdapterRoom(loader.load, options.max_loras, room)
