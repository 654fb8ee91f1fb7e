"""Gives a loaded model slots for adapters, and what fills them."""

from __future__ import annotations

from penstock.config.errors import ConfigError
from penstock.layers.adapters import add_adapters
from penstock.runtime.adapter_loading import AdapterLoader
from penstock.runtime.adapters import AdapterRoom
from penstock.startup.adapter_room import adapter_bytes
from penstock.startup.engine_spec import Declaration
from penstock.weights.loader import StoredMatrices


def make_adapter_room(spec: Declaration) -> AdapterRoom:
    """The room of a model, before its steps are recorded; the null form where none are asked for.

    Raises:
        ConfigError: the model's layers take none.
    """
    options, model = spec.options, spec.model
    if not options.enable_lora:
        return AdapterRoom()
    if model.runs:
        raise ConfigError(f"--enable-lora is not possible: {model.runs}. Merge the adapter into the model's weights.")
    targets = add_adapters(model, spec.kernels, options.max_loras + 1, options.max_lora_rank)
    matrices = StoredMatrices(spec.checkpoint, spec.weights)
    room = adapter_bytes(spec.facts, options)
    most = options.max_lora_rank, room // options.max_loras
    loader = AdapterLoader(targets, model.renames, matrices.pieces, spec.checkpoint.config, most)
    return AdapterRoom(loader.load, options.max_loras, room)
