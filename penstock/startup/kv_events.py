"""Who is told of an engine's blocks, by its options. No torch here."""

from __future__ import annotations

import logging
from dataclasses import replace

from penstock.config.environment import hash_seed, whole_block_hashes
from penstock.config.errors import ConfigError
from penstock.config.kv_events import kv_events
from penstock.core.kv.cache import KVCache
from penstock.startup.claim import Claim
from penstock.startup.started import Started
from penstock.transfer.block_hashes import BlockHasher
from penstock.transfer.told_blocks import ToldBlocks

log = logging.getLogger(__name__)


def settle_events(started: Started, cache: KVCache, claim: Claim) -> None:
    """Publishes which blocks the cache has, where the options ask for it, until the claim is released.

    Raises:
        ConfigError: an endpoint cannot be had, or the engine keeps no prefixes.
    """
    options = started.options
    asked = kv_events(options.kv_events_config)
    if asked is None:
        return
    if not options.enable_prefix_caching or started.whole_prompts:
        raise ConfigError(
            "--kv-events-config tells which prefixes are cached; this engine keeps none "
            "(--no-enable-prefix-caching, or an encoder). Start it without."
        )
    from penstock.transfer.kv_events import EventPublisher, EventWriter  # its libraries are the server's

    if asked.block_hashes is None:
        asked = replace(asked, block_hashes="bytes" if whole_block_hashes() else "int")
    if hash_seed() is None:
        log.warning("PYTHONHASHSEED is not set: nobody else can compute the hashes of blocks that KV events name")
    hasher = BlockHasher(options.prefix_caching_hash_algo, hash_seed())
    writer = EventWriter(asked, hasher, started.groups, "DISK" if options.kv_disk else "CPU")
    publisher = EventPublisher(asked, writer)
    blocks = ToldBlocks(options.block_size, len(started.groups), asked.max_queue_size, publisher.wake)
    cache.tree.observer = blocks
    publisher.start(blocks)
    claim.closing(publisher.close)
    events, replay = publisher.endpoints
    log.info("%-12s %12s  %s", "KV events", "", f"{events}, batches again at {replay}" if replay else events)
