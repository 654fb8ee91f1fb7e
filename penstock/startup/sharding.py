"""What a rank has of a model: the step between declaring a model and planning its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.options import EngineOptions
from penstock.config.speculation import speculation
from penstock.layers.sharding import Shards, shard_model
from penstock.models.registry import Model
from penstock.parallel.ranks import Ranks
from penstock.runtime.ranks.group import Group
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.shares import SegmentEnds
from penstock.weights.weight_plan import WeightPlan


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ranks share of a model, as options say.

    Attributes:
        tables: embedding and head too; else every rank has them, and one alone may use them.
        adapters: there may be low-rank ones.
        copies, contexts: of experts, and ranks that share a context; as of Shards.
    """

    tables: bool = True
    adapters: bool = False
    copies: int | None = None
    contexts: int = 1

    @classmethod
    def of(cls, options: EngineOptions) -> Sharing:
        """What these options say."""
        drafts, lora = speculation(options.speculative_config), options.enable_lora
        heads = drafts is not None and drafts.loads and drafts.method != "draft_model"  # which read the target's tables
        copies = options.num_redundant_experts if options.enable_eplb else None
        return cls(not (heads or lora), lora, copies, options.decode_context_parallel_size)


def shard(
    model: Model,
    checkpoint: Checkpoint,
    plans: Sequence[WeightPlan],
    ranks: Ranks,
    group: Group,
    sharing: Sharing,
) -> Shards:
    """Leaves of a declared model, whose weights are not loaded, what this rank computes.

    A layer that is not dealt is whole in every rank: each computes it, and all get the same numbers.

    Args:
        model: changed in place: its weights, and how many heads its caches have.
        checkpoint: opened.
        plans: of the whole model.
        ranks: more than one.
        group: what its collectives wait on; where nothing is computed, as when a plan is made, the null form.
        sharing: what may be shared.

    Returns:
        What was shared, and what was not.
    """
    shards = Shards(
        ranks,
        group,
        SegmentEnds(checkpoint, plans),
        tables=sharing.tables,
        adapters=sharing.adapters,
        copies=sharing.copies,
        contexts=sharing.contexts,
    )
    shard_model(model, shards)
    return shards
