"""Whether an engine tells its server which prefixes it has cached. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.kv.cache import KVCache
from penstock.transfer.prefix_names import Observers, PrefixNames, PrefixNews


def telling_prefixes(cache: KVCache, seed: str, send: Callable[[list[int]], None]) -> Callable[[], None]:
    """What sends the news there are of a cache's blocks, named under this seed; with "" there are none."""
    if not seed:
        return lambda: None
    news = PrefixNews(PrefixNames(seed), cache.block_size)
    cache.tree.observer = Observers(cache.tree.observer, news)

    def tell() -> None:
        if news.notes:
            notes, news.notes = news.notes, []
            send(notes)

    return tell
