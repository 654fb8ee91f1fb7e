"""The engines of one model on this machine: processes that map the same weights, with a part of its memory each."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from penstock.cluster.client import ClusterClient, Life, Watching
from penstock.cluster.policies import POLICIES
from penstock.cluster.router import Router
from penstock.config.cores import CoreBoard
from penstock.config.data_parallel import engine_options
from penstock.config.options import EngineOptions
from penstock.config.ranks import context_block, rank_count
from penstock.host.engine import HostedEngine, Progress, hosted_options, one_engine
from penstock.host.memory import FIRST_PROCESS_BYTES, plan_model
from penstock.host.process_client import ProcessClient, ToldPrefixes
from penstock.startup.header_plan import this_machine
from penstock.transfer.prefix_names import PrefixNames

_SHARE: Final = 0.9  # of the memory that is free at the start: files that are mapped want some too


def make_engine(options: EngineOptions, max_queue_seconds: float | None, progress: Progress | None) -> HostedEngine:
    """The engine that options ask for, or several of them as one; it is not started yet."""
    if options.data_parallel_size == 1:
        return one_engine(options, max_queue_seconds, progress)
    return cluster(options, max_queue_seconds, progress)


def cluster(
    options: EngineOptions, max_queue_seconds: float | None = None, progress: Progress | None = None
) -> ClusterClient:
    """Several engines as one, as `options.data_parallel_size` and `routing_policy` say."""
    count, seed = options.data_parallel_size, secrets.token_hex(16)
    board = CoreBoard()
    router = Router(
        POLICIES[options.routing_policy](),
        PrefixNames(seed),
        count,
        context_block(options),
        shared=options.share_prefix_cache,
        caching=options.enable_prefix_caching,
    )

    def make(watching: Watching) -> Sequence[ProcessClient]:
        asked = hosted_options(options)
        memory = memory_of_one(asked)
        return [
            ProcessClient(
                engine_options(asked, number, memory),
                on_progress=progress if number == 0 else None,
                max_queue_seconds=max_queue_seconds,
                watcher=Life(number, watching),
                cores=board if rank_count(options) == 1 else None,
                told_prefixes=ToldPrefixes(seed, functools.partial(router.hear, number)),
            )
            for number in range(count)
        ]

    return ClusterClient(make, router, closing=board.close)


def memory_of_one(options: EngineOptions) -> int:
    """Bytes that each of the engines may fill: its weights, which all of them map, and an even part of the rest.

    Raises:
        CheckpointError: the model cannot be read.
        MemoryPlanError: it does not fit once; each engine says whether its part is enough.
    """
    count = options.data_parallel_size
    total = options.memory or int(_SHARE * this_machine().memory_available) - count * FIRST_PROCESS_BYTES
    alone = replace(options, data_parallel_size=1, device="cpu", memory=None)
    planned = plan_model(alone, total + FIRST_PROCESS_BYTES)
    shared = planned.plan.weights_bytes if weights_are_shared(options) else 0
    return shared + (total - shared) // count


def weights_are_shared(options: EngineOptions) -> bool:
    """Whether engines map one file of packed weights; else each has its own."""
    return options.pack_cache != "off" and options.load_format == "auto" and rank_count(options) == 1
