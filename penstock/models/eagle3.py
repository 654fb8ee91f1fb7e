"""EAGLE-3 heads (arXiv:2503.01840), and those that draft all tokens in one pass (P-EAGLE, arXiv:2602.01469).

As published for vLLM and SGLang (`midlayer.`) and by speculators (`layers.0.`).
"""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import Block, DecoderBlock, ModelTraits
from penstock.layers.draft_head import DraftHead, Fusion, Given, PairedBlock, PairedLinear, beside
from penstock.layers.embedding import table
from penstock.layers.linear import Linear
from penstock.layers.norm import RmsNorm
from penstock.layers.rotary import Rotary
from penstock.layers.weight import Weight, WeightPart
from penstock.models.blueprint import BARE, Blueprint
from penstock.models.draft_heads import TargetFacts, tapped_layers
from penstock.models.rope import context_length

RENAMES = ((r"^midlayer\.", "layers.0."), (r"^model\.", ""), *BARE)
NOT_WEIGHTS = (r"d2t", r"t2d", r".*\.rotary_emb\.inv_freq")
EMBEDDING, LOGITS = "embed_tokens.weight", "lm_head.weight"


class ParallelHead(DraftHead):
    """An EAGLE-3 head that drafts all tokens in one pass.

    Attributes:
        mask_token: stands where a token is not known.
        mask_states: what it reads there instead of the target's hidden states.
    """

    mask_token: int
    mask_states: Weight

    def masked(self) -> Tensor:
        """[1, width of the target's hidden states, side by side]."""
        found: Tensor = self.mask_states.value
        return found


def build(blueprint: Blueprint, target: TargetFacts, names: Container[str], parallel: bool) -> DraftHead:
    """The head.

    Args:
        blueprint: of its configuration.
        target: which it has to agree with.
        names: of its tensors.
        parallel: it drafts all tokens in one pass.

    Raises:
        CheckpointError: it was made for another model.
    """
    fields, kernels = blueprint.fields, blueprint.kernels
    hidden = blueprint.hidden_size
    if (vocab := fields.integer("vocab_size", target.vocab_size)) != target.vocab_size:
        raise CheckpointError(
            f"the head was made for a vocabulary of {vocab} tokens, the target has one of {target.vocab_size}."
        )
    tapped = fields.integer("target_hidden_size", hidden)
    if tapped != target.hidden_size:
        raise CheckpointError(
            f"the head reads hidden states of {tapped} elements (target_hidden_size), the target's have "
            f"{target.hidden_size}."
        )
    owns = (EMBEDDING in names or f"model.{EMBEDDING}" in names, LOGITS in names)
    if not owns[0] and hidden != target.hidden_size:
        raise CheckpointError(
            f"the head has no {EMBEDDING} of its own, and the target's is {target.hidden_size} wide, not {hidden}."
        )
    if not owns[1] and "d2t" in names:
        raise CheckpointError(f"the head has a draft vocabulary (d2t), but no {LOGITS} for it.")
    drafted = fields.integer("draft_vocab_size", vocab) if "d2t" in names else vocab
    tables = (
        table(kernels, f"model.{EMBEDDING}", vocab, hidden),
        table(kernels, LOGITS, drafted, hidden),
    )
    width = len(tapped_layers(fields, target)) * tapped
    make = ParallelHead if parallel else DraftHead
    head = make(
        kernels,
        tables,
        (not owns[0], not owns[1]),
        _blocks(blueprint),
        blueprint.norm("model.norm"),
        _traits(blueprint),
        Given(hidden, beside, _fusion(blueprint, width)),
    )
    if isinstance(head, ParallelHead):
        head.mask_token = fields.integer("ptd_token_id", minimum=0)
        if head.mask_token >= target.vocab_size:
            raise fields.error("ptd_token_id", f"is {head.mask_token}, and there are {target.vocab_size} tokens")
        head.mask_states = Weight((1, width), (WeightPart("mask_hidden", (1, width)),), keep_float32=True)
    return head


def _fusion(blueprint: Blueprint, width: int) -> Fusion:
    fields, hidden = blueprint.fields, blueprint.hidden_size
    before = fields.flag("norm_before_fc", False)
    norm = RmsNorm(blueprint.kernels, "input_norm.weight", width, blueprint.norm_eps) if before else None
    return Fusion(norm, Linear(blueprint.kernels, (("fc", hidden),), width, bias=fields.flag("bias", False)))


def _traits(blueprint: Blueprint) -> ModelTraits:
    rope = blueprint.rotary().rope
    longest = context_length(blueprint.fields, rope, blueprint.max_model_len)
    return ModelTraits(longest, blueprint.dtype, ignorable=NOT_WEIGHTS, renames=RENAMES)


def _blocks(blueprint: Blueprint) -> list[Block]:
    """The first layer reads pairs, others are usual ones."""
    rotary, found = blueprint.rotary(), list[Block]()
    for index in range(blueprint.num_layers):
        prefix = f"model.layers.{index}"
        attention = blueprint.attention(index, rotary)
        norm, middle = blueprint.norm(f"{prefix}.input_layernorm"), blueprint.norm(f"{prefix}.post_attention_layernorm")
        if index:
            found.append(DecoderBlock(norm, attention, middle, blueprint.mlp(index)))
            continue
        attention.qkv = _paired(blueprint, f"{prefix}.self_attn", rotary)
        norms = norm, blueprint.norm(f"{prefix}.hidden_norm")
        before = blueprint.fields.flag("norm_before_residual", False)
        found.append(PairedBlock(norms, attention, middle, blueprint.mlp(index), before))
    return found


def _paired(blueprint: Blueprint, prefix: str, rotary: Rotary) -> PairedLinear:
    heads, keys = blueprint.num_heads * blueprint.head_dim, blueprint.num_kv_heads * blueprint.head_dim
    parts = ((f"{prefix}.q_proj", heads), (f"{prefix}.k_proj", keys), (f"{prefix}.v_proj", keys))
    bias = blueprint.fields.flag("attention_bias", False)
    return PairedLinear(blueprint.kernels, parts, blueprint.hidden_size, bias=bias)
