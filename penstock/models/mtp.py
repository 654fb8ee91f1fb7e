"""Layers for multi-token prediction that come with a model (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Names are as `models.mtp_layouts` makes them. The first layer is used for all tokens; it is one of the model's own kind.
Like vLLM and SGLang, the layer is given the target's states behind its last norm; position 0 has its embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import ModelTraits
from penstock.layers.draft_head import DraftHead, Given, Merge, PairedLinear
from penstock.layers.embedding import table
from penstock.layers.norm import RmsNorm
from penstock.layers.ops import KernelSet
from penstock.models.draft_heads import TargetFacts
from penstock.models.mtp_layouts import MtpLayout
from penstock.models.registry import build_model

IGNORABLE: Final = (r".*\.rotary_emb\.inv_freq", r"model\.layers\.[1-9]\d*\..*")


def build(
    config: Mapping[str, Any],
    kernels: KernelSet,
    dtype: torch.dtype,
    max_model_len: int | None,
    target: TargetFacts,
    names: Collection[str],
    layout: MtpLayout,
) -> DraftHead:
    """The head of a configuration whose only layer is that for multi-token prediction.

    Raises:
        CheckpointError: it was made for another model.
    """
    model = build_model(config, kernels, dtype=dtype, max_model_len=max_model_len)
    vocab, hidden = model.embedding.weight.shape
    if (hidden, vocab) != (target.hidden_size, target.vocab_size):
        raise CheckpointError(
            f"its layers for multi-token prediction go with hidden states of {hidden} elements and {vocab} tokens."
        )
    if not isinstance(model.norm, RmsNorm):
        raise CheckpointError("its layers for multi-token prediction are of a kind that is not read here.")
    near = model.norm.weight.parts[0].transform is not None  # scales are stored as their distance from one
    norms = [
        RmsNorm(kernels, f"pre_fc_norm_{name}.weight", hidden, model.norm.eps, around_one=near)
        for name in ("embedding", "hidden")
    ]
    projection = PairedLinear(kernels, (("fc", hidden),), hidden, bias=False, swapped=layout.hidden_first)
    merge = Merge(norms[0], norms[1], projection)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    owns = "embed_tokens.weight" in names, "lm_head.weight" in names
    return DraftHead(
        kernels,
        (table(kernels, tables[0], vocab, hidden), table(kernels, tables[1], vocab, hidden)),
        (not owns[0], not owns[1]),
        model.blocks,
        None if layout.shares_norm else model.norm,
        ModelTraits(model.max_positions, dtype, (*model.ignorable, *IGNORABLE), model.renames),
        Given(hidden, merge, after_norm=layout.after_norm),
    )
