"""What lies below the device: the tier of an engine that has started, by its options. No torch here."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from penstock import __version__
from penstock.config.adapters import path_and_scale
from penstock.config.arithmetic import ARITHMETIC_VERSION
from penstock.config.environment import kv_folder
from penstock.config.errors import ConfigError
from penstock.config.machine import read_machine
from penstock.config.options import EngineOptions
from penstock.core.kv.cache import KVCache
from penstock.core.policies.bounded_tier import BoundedTier, place_numbers, restored
from penstock.runtime.runner import ModelRunner
from penstock.startup.below_room import BelowRoom, below_room
from penstock.startup.kept_pins import KeptPins
from penstock.startup.memory_plan import format_bytes
from penstock.startup.started import Started
from penstock.startup.warming import Idle, Warming
from penstock.transfer.carrier import Carrier
from penstock.transfer.disk import DiskStore, remove_others
from penstock.transfer.pieces import Pieces
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
    if not (options.kv_ram or options.kv_disk):
        return []
    if not options.enable_prefix_caching or started.whole_prompts or not isinstance(runner, ModelRunner):
        raise ConfigError(
            "--kv-ram and --kv-disk keep prefixes that are found again; this engine keeps none "
            "(--no-enable-prefix-caching, or an encoder). Start it without them."
        )
    pieces = Pieces(runner.memory, options.torch_device)
    most = options.kv_disk or options.kv_ram or 0
    room = _room(options, pieces.sizes)
    places = room.places  # in all groups, in each of which a block of tokens is kept
    if not places:
        raise ConfigError(
            f"{'--kv-disk' if options.kv_disk else '--kv-ram'} is {format_bytes(most)}, but a block of "
            f"{options.block_size} tokens takes {format_bytes(sum(pieces.sizes))}; give it room for one at least."
        )
    counts = (places,) * len(pieces.sizes)
    store: Store = RamStore()
    works: list[Callable[[], bool]] = []
    if options.kv_disk:
        folder, name = disk_folder(started, pieces), options.served_model_name or ""
        store = DiskStore(folder, pieces.sizes, place_numbers(counts), model=name, block_size=options.block_size)
        works.append(KeptPins(folder, cache.pins, engine.add))
        if options.kv_ram:
            store = RamBefore(store, options.kv_ram)
    tier = BoundedTier(
        counts,
        min(_MOST_SAVING, max(len(counts), places)),
        cache.tree.forget_below,
        catalog=store,
    )
    tier.seconds_for = partial(_prompt_seconds, engine)
    cache.transfers.tier = tier
    for place in restored(cache, tier, store.found()):
        store.forget(place)
    runner.mover = Carrier(pieces, store)
    what = "disk" if options.kv_disk else "memory"
    told = f"{places} blocks on {what}, {tier.copies} of them from before; their names take up to"
    log.info("%-12s %12s  %s %s of memory", "KV below", format_bytes(most), told, format_bytes(room.index_bytes))
    return [*works, Warming(engine, cache, tier)]


def _room(options: EngineOptions, sizes: Sequence[int]) -> BelowRoom:
    """Room for copies, as far as there is memory for their names."""
    asked = below_room(options, sizes)
    room = below_room(options, sizes, read_machine().memory_available)
    if room.places < asked.places:
        log.warning(
            "there would be room for %d blocks, but their names would take %s of memory; %d are kept. Blocks of more "
            "tokens (--block-size) need fewer names.",
            asked.places,
            format_bytes(asked.index_bytes),
            room.places,
        )
    return room


def _prompt_seconds(engine: Idle, tokens: int) -> float | None:
    pace = engine.pace()
    return None if pace is None else pace.seconds(tokens, 0)


def disk_folder(started: Started, pieces: Pieces) -> Path:
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
        folder = base / f"{name}-{identity(started, pieces, base / 'digests.json')[:16]}"
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"--kv-disk has no folder to keep blocks in ({error}); name one with --kv-disk-path."
        ) from None
    for other in remove_others(folder, name, options.kv_disk or 0):
        log.info("%s is removed: it was of a version of this model that was used less lately than others", other)
    return folder


def identity(started: Started, pieces: Pieces, notes: Path) -> str:
    """All that the numbers in a block depend on. Raises OSError if the model's files cannot be read."""
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
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
