"""What a rank has of a model: the step between declaring a model and planning its weights."""

from __future__ import annotations

from penstock.models.registry import Model
from penstock.parallel.ranks import Ranks
from penstock.runtime.ranks.group import Group


def shard(model: Model, ranks: Ranks, group: Group) -> None:
    """Leaves of a declared model, whose weights are not loaded, what this rank computes.

    A layer that is not dealt is whole in every rank: each computes it, and all get the same numbers.

    Args:
        model: changed in place: its weights, and how many heads its caches have.
        ranks: more than one.
        group: what its collectives wait on; where nothing is computed, as when a plan is made, the null form.
    """
