"""Random weights, for benchmarks that measure speed and need no checkpoint."""

from __future__ import annotations

import torch

from penstock.layers.decoder import DecoderModel


def fill_dummy(
    model: DecoderModel, *, dtype: torch.dtype, seed: int = 0, scale: float = 0.02, device: str = "cpu"
) -> None:
    """Fills every weight with normal values of standard deviation `scale`; norm scales lie around one.

    Args:
        model: as built.
        dtype: type of the weights, but those declared `keep_float32`.
        seed: equal seeds give equal weights.
        scale: small enough that activations stay finite through many layers.
        device: where weights are placed.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in model.weights():
        values = torch.empty(weight.shape).normal_(0.0, scale, generator=generator)
        if "norm" in weight.parts[0].key:
            values += 1.0
        weight.fill(values.to(device=device, dtype=torch.float32 if weight.keep_float32 else dtype))
