"""EAGLE and EAGLE-2 heads (arXiv:2401.15077, 2406.16858): one projection, layers without a last norm.

As published by their authors, and for vLLM and SGLang, most without a first norm too; also with norms before the
projection (HASS, arXiv:2408.15766).
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import Block, DecoderBlock, ModelTraits
from penstock.layers.draft_head import DraftHead, Given, Merge, PairedLinear
from penstock.layers.embedding import table
from penstock.models.blueprint import BARE, Blueprint
from penstock.models.draft_heads import TargetFacts
from penstock.models.rope import context_length

RENAMES = ((r"^model\.(model\.)?", ""), *BARE)
NOT_WEIGHTS = (r".*\.rotary_emb\.inv_freq",)
EMBEDDING, LOGITS = "embed_tokens.weight", "lm_head.weight"


def build(blueprint: Blueprint, target: TargetFacts, names: Collection[str]) -> DraftHead:
    """The head.

    Raises:
        CheckpointError: it was made for another model.
    """
    fields, kernels = blueprint.fields, blueprint.kernels
    hidden = blueprint.hidden_size
    vocab = fields.integer("vocab_size", target.vocab_size)
    if (hidden, vocab) != (target.hidden_size, target.vocab_size):
        raise CheckpointError(f"the head reads hidden states of {hidden} elements and guesses {vocab} tokens.")
    ends = {name.removeprefix("model.").removeprefix("model.") for name in names}
    owns = EMBEDDING in ends, LOGITS in ends
    normed = "embedding_layernorm.weight" in ends
    norms = [blueprint.norm(f"{name}_layernorm") if normed else None for name in ("embedding", "hidden_states")]
    projection = PairedLinear(kernels, (("fc", hidden),), hidden, bias="fc.bias" in ends)
    rope = blueprint.rotary().rope
    longest = context_length(fields, rope, blueprint.max_model_len)
    return DraftHead(
        kernels,
        (table(kernels, f"model.{EMBEDDING}", vocab, hidden), table(kernels, LOGITS, vocab, hidden)),
        (not owns[0], not owns[1]),
        _blocks(blueprint, ends),
        None,
        ModelTraits(longest, blueprint.dtype, NOT_WEIGHTS, RENAMES),
        Given(hidden, Merge(norms[0], norms[1], projection), after_norm=True, normed=False),
    )


def _blocks(blueprint: Blueprint, names: Collection[str]) -> list[Block]:
    rotary, found = blueprint.rotary(), list[Block]()
    for index in range(blueprint.num_layers):
        prefix = f"model.layers.{index}"
        attention = blueprint.attention(
            index,
            rotary,
            qkv_bias=f"layers.{index}.self_attn.q_proj.bias" in names,
            output_bias=f"layers.{index}.self_attn.o_proj.bias" in names,
        )
        has = index > 0 or "layers.0.input_layernorm.weight" in names
        before = blueprint.norm(f"{prefix}.input_layernorm") if has else None
        middle = blueprint.norm(f"{prefix}.post_attention_layernorm")
        found.append(DecoderBlock(before, attention, middle, blueprint.mlp(index)))
    return found
