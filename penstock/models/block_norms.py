"""Where a block has norms, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """The names of a block's norms, None for those it lacks.

    In a `parallel` block the MLP reads what attention reads. In one that norms `sums`, the norms after a part are of
    what the part has been added to. The `first` block may lack the norm before attention.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False
    sums: bool = False
    first: bool = True


PRE_NORM = BlockNorms()
POST_NORM = BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SUM_NORM = BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm", sums=True)
PARALLEL = BlockNorms(before_mlp=None, parallel=True)
MIXER_ALONE = BlockNorms("norm", before_mlp=None)  # no MLP
