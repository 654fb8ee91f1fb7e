"""What a rank has of a model: the step between declaring a model and planning its weights."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.layers.sharding import Shards, shard_model
from penstock.models.registry import Model
from penstock.parallel.ranks import Ranks
from penstock.runtime.ranks.group import Group
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.shares import SegmentEnds
from penstock.weights.weight_plan import WeightPlan


def shard(
    model: Model,
    checkpoint: Checkpoint,
    plans: Sequence[WeightPlan],
    ranks: Ranks,
    group: Group,
    *,
    tables: bool = True,
    adapters: bool = False,
    copies: int | None = None,
) -> Shards:
    """Leaves of a declared model, whose weights are not loaded, what this rank computes.

    A layer that is not dealt is whole in every rank: each computes it, and all get the same numbers.

    Args:
        model: changed in place: its weights, and how many heads its caches have.
        checkpoint: opened.
        plans: of the whole model.
        ranks: more than one.
        group: what its collectives wait on; where nothing is computed, as when a plan is made, the null form.
        tables: embedding and head are shared too; else every rank has them, and one alone may use them.
        adapters: there may be low-rank ones.
        copies: of experts, as of Shards.

    Returns:
        What was shared, and what was not.
    """
    shards = Shards(ranks, group, SegmentEnds(checkpoint, plans), tables=tables, adapters=adapters, copies=copies)
    shard_model(model, shards)
    return shards
