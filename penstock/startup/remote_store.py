"""The store that engines share, by an engine's options. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.config.environment import store_access
from penstock.config.errors import ConfigError
from penstock.config.kv_store import STORE_SECONDS, store_address
from penstock.config.options import EngineOptions
from penstock.transfer.lmcache_store import LMCacheStore
from penstock.transfer.mooncake_store import MooncakeStore
from penstock.transfer.object_store import ObjectStore
from penstock.transfer.redis_store import RedisStore
from penstock.transfer.remote import Remote
from penstock.transfer.store import StoreError

log = logging.getLogger(__name__)


def remote_store(options: EngineOptions) -> Remote:
    """What --kv-store names.

    Raises:
        ConfigError: it cannot be used.
    """
    access = store_access()
    address = store_address(options.kv_store or "", access)
    seconds = STORE_SECONDS if options.kv_store_seconds is None else options.kv_store_seconds
    makers: dict[str, Callable[[], Remote]] = {
        "redis": lambda: RedisStore(address, seconds),
        "s3": lambda: ObjectStore(address, access),
        "lmcache": lambda: LMCacheStore(address),
        "mooncake": lambda: MooncakeStore(address, access.mooncake),
    }
    remote = makers[address.kind]()
    try:
        remote.check()
    except StoreError as error:
        raise ConfigError(f"--kv-store {address} cannot be used: {error}.") from None
    except OSError as error:  # as it may be while machines start: it is a cache, and not what is served
        log.warning("--kv-store %s: %s; the engine starts without it, and tries again", address, error)
    return remote
