"""What lies below the device: the tier of an engine that has started, by its options. No torch here."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from penstock import __version__
from penstock.config.adapters import path_and_scale
from penstock.config.arithmetic import ARITHMETIC_VERSION
from penstock.config.environment import kv_folder, kv_key
from penstock.config.errors import ConfigError
from penstock.config.kv_store import store_address
from penstock.config.machine import read_machine
from penstock.config.options import EngineOptions
from penstock.config.ranks import rank_count
from penstock.core.kv.cache import KVCache
from penstock.core.policies.bounded_tier import BoundedTier, Entry, place_numbers, restored
from penstock.core.policies.shared_tier import SharedTier
from penstock.runtime.mover import Mover
from penstock.runtime.ranks.gathered import GatheredMover
from penstock.runtime.runner import ModelRunner
from penstock.startup.below_room import BelowRoom, below_room
from penstock.startup.kept_pins import KeptPins
from penstock.startup.memory_plan import format_bytes
from penstock.startup.remote_store import remote_store
from penstock.startup.shares import keeps_below
from penstock.startup.started import Started
from penstock.startup.warming import Idle, Warming
from penstock.transfer.carrier import Carrier
from penstock.transfer.disk import DiskStore, remove_others
from penstock.transfer.pieces import Pieces, pieces_of
from penstock.transfer.sealing import PLAIN, Sealing, sealing_of
from penstock.transfer.shared import MOST_QUEUED, SharedStore
from penstock.transfer.store import RamBefore, RamStore, Store
from penstock.weights.content import content_digest, files_digest

log = logging.getLogger(__name__)
_LAYOUT: Final = 2  # of what is kept
_MOST_SAVING: Final = 512  # blocks that are written at a time
# What the numbers in a block depend on, besides the weights and the arithmetic.
_DECIDE: Final = (
    *("dtype", "kv_cache_dtype", "quantize", "isa", "arithmetic", "batch_invariant", "block_size", "hf_overrides"),
    *("device", "control_vector", "control_vector_layers", "load_format"),
)


def settle_tier(started: Started, cache: KVCache, engine: Idle) -> list[Callable[[], bool]]:
    """Puts the tier of an engine's options below its cache, and what is there from before into its prefix tree.

    Returns:
        What pins again what was pinned, and brings the rest into the pool, while the engine has nothing to do.

    Raises:
        ConfigError: the tier cannot be had.
    """
    options, runner = started.options, started.runner
    if not keeps_below(options):
        return []
    if not options.enable_prefix_caching or started.whole_prompts or not isinstance(runner, ModelRunner):
        raise ConfigError(
            "--kv-ram, --kv-disk and --kv-store keep prefixes that are found again; this engine keeps none "
            "(--no-enable-prefix-caching, or an encoder). Start it without them."
        )
    pieces = pieces_of(runner.memory, options.torch_device)
    sealing = sealing_of(kv_key()) if options.kv_disk or options.kv_store else PLAIN
    room = _room(started, pieces.sizes, sealing.overhead)
    places = room.places  # in all groups, in each of which a block of tokens is kept
    counts = (places,) * len(pieces.sizes)
    essential = tuple(g for g, group in enumerate(cache.groups) if group.essential)
    below = _stores(started, pieces, sealing, counts, essential)
    mover = _mover(started, pieces, below.store)
    catalog = Forgetful(below.store, mover) if isinstance(mover, GatheredMover) else below.store
    saving, dropped = min(_MOST_SAVING, max(len(counts), places)), cache.tree.forget_below
    if below.shared is None:
        tier = BoundedTier(counts, saving, dropped, catalog=catalog)
    else:
        tier = SharedTier(counts, saving, dropped, seeker=below.shared, catalog=catalog)
    tier.seconds_for = partial(_prompt_seconds, engine)
    cache.transfers.tier = tier
    for place in restored(cache, tier, below.store.found()):
        below.store.forget(place)
    runner.mover = mover
    flag = _flag(options)
    told = f"{places} blocks {flag.where}, {tier.copies} of them from before; their names take up to"
    most = format_bytes(flag.most) if flag.most else ""
    log.info("%-12s %12s  %s %s of memory", "KV below", most, told, format_bytes(room.index_bytes))
    pins = () if below.folder is None else (KeptPins(below.folder, cache.pins, engine.add, sealing),)
    return [*pins, Warming(engine, cache, tier)]


class _Below(NamedTuple):
    """Where copies are kept: in all, on disk if there, and what engines share of it if they do."""

    store: Store
    folder: Path | None
    shared: SharedStore | None


def _stores(
    started: Started, pieces: Pieces, sealing: Sealing, counts: tuple[int, ...], essential: tuple[int, ...]
) -> _Below:
    """What this process keeps; the other ranks keep their shares beside it.

    Raises:
        ConfigError: it cannot be kept, here or in one of these.
    """
    options, others = started.options, started.others
    sizes = pieces.sizes
    folder = disk_folder(started, pieces, sealing) if options.kv_disk else None
    stems = _stems(started, pieces, sealing) if options.kv_store else ()
    queued = MOST_QUEUED // rank_count(options)
    store: Store = RamStore()
    disk: DiskStore | None = None
    if folder is not None:
        name, shares = options.served_model_name or "", () if others is None else others.kv_sizes
        store = disk = DiskStore(
            folder, sizes, place_numbers(counts), model=name, block_size=options.block_size, sealing=sealing,
            shares=shares,
        )  # fmt: skip
    if others is not None:  # whose files lie beside those of a folder that is this engine's now
        from penstock.runtime.ranks.messages import KeepShare

        asked = [
            KeepShare(
                places=counts,
                ram=_part(options.kv_ram or 0, own, started),
                disk="" if folder is None else folder.name,
                stem=stems[rank] if stems else "",
                queued=queued,
                essential=essential,
                key_id=sealing.key_id,
            )
            for rank, own in enumerate(others.kv_sizes, 1)
        ]
        others.keep(asked)
    shared: SharedStore | None = None
    if options.kv_store:
        store = shared = SharedStore(remote_store(options), stems, sizes, essential, disk, sealing, queued)
    if options.kv_ram and (options.kv_disk or options.kv_store):
        store = RamBefore(store, _part(options.kv_ram, sizes, started))
    return _Below(store, folder, shared)


class _Flag(NamedTuple):
    """What says how much may lie below: its bytes, 0 where others bound that, and where."""

    name: str
    most: int
    where: str


def _flag(options: EngineOptions) -> _Flag:
    if options.kv_disk:
        return _Flag("--kv-disk", options.kv_disk, "on disk")
    if options.kv_store:
        return _Flag("--kv-store", 0, f"in {store_address(options.kv_store)}")
    return _Flag("--kv-ram", options.kv_ram or 0, "in memory")


def _room(started: Started, sizes: Sequence[int], overhead: int) -> BelowRoom:
    """Room for copies, as far as there is memory for their names.

    Raises:
        ConfigError: there is none for a single block of tokens.
    """
    options = started.options
    shares = () if started.others is None else started.others.kv_sizes
    asked = below_room(options, sizes, overhead=overhead, shares=shares)
    room = below_room(options, sizes, read_machine().memory_available, overhead, shares)
    if not room.places:
        flag = _flag(options)
        raise ConfigError(
            f"{flag.name} is {format_bytes(flag.most)}, but a block of {options.block_size} tokens takes "
            f"{format_bytes(sum(sizes) + sum(map(sum, shares)))}; give it room for one at least."
        )
    if room.places < asked.places:
        log.warning(
            "there would be room for %d blocks, but their names would take %s of memory; %d are kept. Blocks of more "
            "tokens (--block-size) need fewer names.",
            asked.places,
            format_bytes(asked.index_bytes),
            room.places,
        )
    return room


class Forgetful(NamedTuple):
    """A store whose shares in other ranks forget what it does."""

    store: Store
    others: GatheredMover

    def describe(self, place: int, entry: Entry) -> None:
        """What will be written at a place."""
        self.store.describe(place, entry)

    def forget(self, place: int) -> None:
        """The copy at a place is not wanted any more, in any rank."""
        self.store.forget(place)
        self.others.forget(place)


def _mover(started: Started, pieces: Pieces, store: Store) -> Mover:
    """This process's, or that of all ranks."""

    def own(tell: Callable[[int, bool], None] | None) -> Carrier:
        return Carrier(pieces, store, threads=2 if pieces.most == 1 else 4, tell=tell)

    if started.others is None:
        return own(None)
    return started.others.gather(own, lambda place: store.entry(place).digest)


def _part(total: int, sizes: Sequence[int], started: Started) -> int:
    """A rank's part of bytes that all have, by its share of a block."""
    others = () if started.others is None else started.others.kv_sizes
    return total * sum(sizes) // max(1, sum(sizes) + sum(map(sum, others)))


def _stems(started: Started, pieces: Pieces, sealing: Sealing) -> tuple[str, ...]:
    """What the names of each rank's share begin with in a store that engines share.

    Raises:
        ConfigError: the model's files cannot be read.
    """
    try:
        notes = kv_folder(started.options.kv_disk_path) / "digests.json"
        version = identity(started, pieces, notes, sealing)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--kv-store needs the digest of the model's files: {error}.") from None
    stem = f"penstock:{version[:32]}"
    if started.others is None:
        return (stem,)
    return tuple(f"{stem}.{rank}" for rank in range(1 + len(started.others.kv_sizes)))


def _prompt_seconds(engine: Idle, tokens: int) -> float | None:
    pace = engine.pace()
    return None if pace is None else pace.seconds(tokens, 0)


def disk_folder(started: Started, pieces: Pieces, sealing: Sealing = PLAIN) -> Path:
    """Where the blocks of this model are kept; those of its other versions go that take more than as many bytes.

    Raises:
        ConfigError: there is no such folder.
    """
    options = started.options
    try:
        base = kv_folder(options.kv_disk_path)
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = hashlib.sha256(str(Path(started.model_path).resolve()).encode()).hexdigest()
        name = re.sub(r"[^A-Za-z0-9._-]", "_", options.served_model_name or "model")[:80] + f"-{place[:8]}"
        folder = base / f"{name}-{identity(started, pieces, base / 'digests.json', sealing)[:16]}"
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"--kv-disk has no folder to keep blocks in ({error}); name one with --kv-disk-path."
        ) from None
    for other in remove_others(folder, name, options.kv_disk or 0, encrypted=bool(sealing.key_id)):
        log.info(
            "%s is removed: it was used less lately than other versions of this model, or was not encrypted", other
        )
    return folder


def identity(started: Started, pieces: Pieces, notes: Path, sealing: Sealing = PLAIN) -> str:
    """All that the bytes of a block depend on. Raises OSError if the model's files cannot be read."""
    options = started.options
    weights = content_digest(Path(started.model_path), notes, weights=options.load_format != "dummy")
    vectors = (path_and_scale("--control-vector", one)[0] for one in options.control_vector)
    files = [files_digest([Path(vector)], notes) for vector in vectors]
    facts = [
        *(_LAYOUT, ARITHMETIC_VERSION, weights, files, started.told.numbers, started.plan.max_model_len, pieces.sizes),
        [str(getattr(options, name)) for name in _DECIDE],
        options.seed if options.load_format == "dummy" else None,
        [one.value for one in started.told.kernels],
        None if options.torch_device == "cpu" else __version__,
        *([sealing.key_id] if sealing.key_id else []),
        *([] if started.others is None else [started.others.layout, started.others.kv_sizes]),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
