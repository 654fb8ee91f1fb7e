"""Starts the processes of a model's other ranks, ahead of all that takes long in this one. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.errors import ConfigError
from penstock.config.ranks import rank_count
from penstock.startup.claim import Claim

if TYPE_CHECKING:
    from penstock.startup.workers import Workers


def start_workers(claim: Claim) -> Workers | None:
    """The processes of the other ranks, which have begun to load their libraries and end with the claim; None where
    there are none.

    Raises:
        ConfigError: there cannot be such processes; EngineDeadError: one cannot be started.
    """
    options = claim.options
    if rank_count(options) == 1:
        return None
    try:
        from penstock.startup.workers import Workers
    except ImportError as error:
        raise ConfigError(f"several processes of a model need a library that is not installed: {error}.") from None
    workers = Workers(options)
    claim.closing(workers.close)
    return workers
