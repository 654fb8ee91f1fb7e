"""Has a loaded model add control vectors to its hidden states (representation engineering, arXiv:2310.01405)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from penstock.config.adapters import path_and_scale
from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.options import EngineOptions
from penstock.models.registry import Model
from penstock.quant.formats.record import Floats
from penstock.weights.adapters.control_vectors import read_control_vector


def steer(model: Model, options: EngineOptions) -> str:
    """Reads what is asked for before the model's steps are recorded; what it does, for people, "" for nothing.

    Raises:
        CheckpointError: a file is damaged, no control vector, or of another model.
        ConfigError: the layers are not written as first-last; or this model's layers are not this package's.
    """
    if not options.control_vector:
        if options.control_vector_layers is not None:
            raise ConfigError("--control-vector-layers says where control vectors count; name one: --control-vector.")
        return ""
    if model.runs:
        raise ConfigError(f"--control-vector is not possible: {model.runs}.")
    first, last = _layers(options.control_vector_layers, len(model.blocks))
    hidden = model.embedding.weight.shape[1] if model.embedding.projection is None else None
    total: dict[int, Floats] = {}
    for given in options.control_vector:
        path, scale = path_and_scale("--control-vector", given)
        for number, direction in read_control_vector(Path(path)).items():
            if number >= len(model.blocks) or (hidden is not None and len(direction) != hidden):
                raise CheckpointError(
                    f"the control vector {path} has {len(direction)} elements behind layer {number}; the model has "
                    f"layers 0 to {len(model.blocks) - 1} of {hidden} elements. Take one that was made for it."
                )
            if first <= number <= last:
                total[number] = total.get(number, np.float32(0)) + np.float32(scale) * direction
    if not total:
        raise ConfigError(f"--control-vector-layers {first}-{last} leaves nothing of the control vectors.")
    device = torch.device(options.torch_device)
    model.directions.update((number, torch.from_numpy(vector).to(device)) for number, vector in total.items())
    return f"behind layers {min(total)} to {max(total)}"


def _layers(given: str | None, count: int) -> tuple[int, int]:
    """The first and the last layer that `given` names."""
    if given is None:
        return 0, count
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", given)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"--control-vector-layers is {given!r}; allowed: first-last, counted from 0, as 10-20.")
    return int(match[1]), int(match[2])
