"""What a rank that does not lead keeps below its device: its share of copies, as the one that leads asks it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.config.environment import kv_folder, kv_key
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.core.policies.bounded_tier import place_numbers
from penstock.parallel.ranks import Ranks
from penstock.runtime.kv_memory import KVMemory
from penstock.startup.remote_store import remote_store
from penstock.transfer.carrier import Carrier
from penstock.transfer.pieces import pieces_of
from penstock.transfer.sealing import PLAIN, sealing_of
from penstock.transfer.share import ShareMover, ShareStore
from penstock.transfer.shared import SharedStore
from penstock.transfer.store import RamBefore, RamStore, Store

if TYPE_CHECKING:
    from penstock.runtime.ranks.messages import KeepShare


def keeps_below(options: EngineOptions) -> bool:
    """Whether anything lies below the device."""
    return bool(options.kv_ram or options.kv_disk or options.kv_store)


def kv_sizes(options: EngineOptions, memory: KVMemory) -> tuple[int, ...]:
    """Bytes that a rank keeps of a block, by cache group; () where nothing lies below."""
    return pieces_of(memory, options.torch_device).sizes if keeps_below(options) else ()


def share_mover(
    options: EngineOptions, memory: KVMemory, ranks: Ranks, asked: KeepShare, tell: Callable[[int, bool], None]
) -> ShareMover:
    """Carries a rank's share; `tell` is told of each transfer that has ended, and whether it failed.

    Raises:
        ConfigError: it cannot be kept here.
    """
    pieces = pieces_of(memory, options.torch_device)
    sealing = sealing_of(kv_key()) if asked.disk or asked.stem else PLAIN
    if sealing.key_id != asked.key_id:
        raise ConfigError("PENSTOCK_KV_KEY is another one here than where the engine is led; set it to the same key.")
    store: Store = RamStore()
    share: ShareStore | None = None
    if asked.disk:
        try:
            folder = kv_folder(options.kv_disk_path) / asked.disk
        except RuntimeError as error:
            raise ConfigError(
                f"--kv-disk has no folder to keep blocks in ({error}); name one with --kv-disk-path."
            ) from None
        store = share = ShareStore(folder, ranks.name, pieces.sizes, place_numbers(asked.places), sealing)
    if asked.stem:
        remote = remote_store(options)
        store = SharedStore(
            remote, (asked.stem,), pieces.sizes, asked.essential, share, sealing, most_queued=asked.queued
        )
    if asked.ram and (asked.disk or asked.stem):
        store = RamBefore(store, asked.ram)
    return ShareMover(Carrier(pieces, store, tell=tell), store)
