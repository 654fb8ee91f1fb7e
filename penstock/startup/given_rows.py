"""Has a loaded model take rows of its embedding from requests, in the place of tokens of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.given_rows import PIECE
from penstock.config.options import EngineOptions
from penstock.kernels.copies import upload
from penstock.layers.batch import LayerCache
from penstock.models.registry import Model
from penstock.runtime.media import ROWS, Arrays, Encoders, MediaShape, MediaStore


def take_rows(model: Model, options: EngineOptions) -> None:
    """Prepares a model before its steps are recorded, if that is asked for.

    Raises:
        ConfigError: the model needs more of a token than its row.
    """
    if not options.enable_prompt_embeds:
        return
    if why := _needs_tokens(model):
        raise ConfigError(f"--enable-prompt-embeds is not possible: {why}. Leave it out.")
    least = min(options.max_num_batched_tokens or PIECE, options.max_chunk_tokens or PIECE)
    if least < PIECE:
        told = f"rows are computed {PIECE} at a time, but a step takes {least} tokens of a prompt"
        raise ConfigError(f"--enable-prompt-embeds is not possible: {told}. Raise --max-num-batched-tokens.")
    model.embedding.takes_rows = True


def row_width(model: Model) -> int:
    """Values of a row that the model takes; 0 where it takes none."""
    return model.embedding.weight.shape[1] if model.embedding.takes_rows else 0


def row_store(model: Model, options: EngineOptions, caches: Sequence[LayerCache]) -> MediaStore | None:
    """What brings rows to the steps of a model that takes them, else None."""
    if not row_width(model):
        return None
    device = torch.device(options.torch_device)
    factor = model.embedding.scale if model.embedding.multiplies else 1.0

    def rows(arrays: Arrays) -> Tensor:
        given = upload(arrays[ROWS], device).to(model.dtype)
        return (given if factor == 1.0 else given * factor)[None]

    shape = MediaShape(1, model.position_axes, row_width(model), model.dtype)
    return MediaStore(Encoders(rows=rows), shape, options.block_size, caches, device)


def _needs_tokens(model: Model) -> str:
    """Why rows cannot stand for tokens, a clause; "" where they can."""
    if model.runs:
        return model.runs
    if model.head is None or model.whole_prompts:
        return "the model makes no text"
    if model.opening:
        return "further layers of this model look its tokens up themselves"
    if model.media_levels or model.embedding.types is not None:
        return "the model takes more than text"
    return ""
