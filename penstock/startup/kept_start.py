"""What a start decided and recorded, kept beside the packed weights: the next one needs neither layers nor torch.

The file (`weights.pack_cache`, checksummed and renamed when complete) is of one checkpoint, one packing and one state
of this package's code. What depends on the machine is decided anew at every start; where that differs in what a
recording depends on, the engine starts as if there were no file, and writes another.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.config.cache_spec import CacheKind, CacheSpec, Stripe
from penstock.config.code import code_digest
from penstock.config.environment import pack_folder
from penstock.config.errors import MemoryPlanError, PenstockError
from penstock.config.limits import PROMPT_LOGIT_ROWS
from penstock.config.machine import Machine, has_accelerator_files
from penstock.config.names import served_name
from penstock.config.options import EngineOptions
from penstock.config.ranks import rank_count
from penstock.config.resolve import Decision, LayerFacts, ModelFacts, resolve
from penstock.config.speculation import speculation
from penstock.kernels.cpu import native
from penstock.kernels.cpu.journal import Arrays, Journal, Names
from penstock.kernels.cpu.packed import PACKING
from penstock.parallel.ranks import ALONE, Ranks
from penstock.startup.cache_plan import Caches, memory_limits, plan_caches
from penstock.startup.header_plan import native_block_bytes, this_machine
from penstock.startup.memory_plan import MemoryLimits, MemoryPlan
from penstock.weights.pack_cache import PackCache, PackCacheError, PackWriter, file_name, fingerprint

log = logging.getLogger(__name__)
VERSION: Final = 3  # of what is kept; PACKING and ARITHMETIC_VERSION are in the fingerprint
_UNUSABLE: Final = (PackCacheError, PenstockError, LookupError, TypeError, ValueError, OSError)
SHARES: Final = 2  # version of what a rank has of each layer
MOST_CONSTANTS: Final = 64 << 20  # bytes
_LONGEST_NAME: Final = 50  # of a model, in the name of a rank's file
# What a recording depends on, besides the length that is served. Sizes of steps and caches are free.
RECORDED_UNDER: Final = (
    *("device", "dtype", "isa", "kv_cache_dtype", "arithmetic", "quantize", "block_size", "batch_invariant"),
    "enforce_eager",
)


@dataclass(frozen=True, slots=True)
class Arena:
    """What the largest step takes of recordings that were made for so many tokens, and logits of so many rows."""

    size: int  # bytes
    tokens: int
    rows: int

    @classmethod
    def of(cls, size: int, tokens: int, sequences: int) -> Arena:
        """For steps of so many tokens and sequences."""
        return cls(size, tokens, max(sequences, PROMPT_LOGIT_ROWS))

    def bytes_of(self, tokens: int, sequences: int) -> int:
        """What it takes where a step is larger or smaller, exactly or from above: places grow with one or the other."""
        return math.ceil(self.size * max(tokens / self.tokens, max(sequences, PROMPT_LOGIT_ROWS) / self.rows))


@dataclass(frozen=True, slots=True)
class KeptStart:
    """What is kept of a start.

    Attributes:
        facts: of the model.
        specs, kv_types: of its caches, by layer.
        vocab_size, architecture: of the model.
        weights_bytes, max_model_len: of the plan.
        arena: of its two recordings.
        under: options by name, as in RECORDED_UNDER.
        fast, determinism, numbers, settings, kernels: what the engine told of itself.
        body, head: journals of the forward pass and of logits.
        results: the value and width of each one's result.
        arrays: where constants lie in the file's `constants`: first byte, and how many.
    """

    facts: ModelFacts
    specs: tuple[CacheSpec, ...]
    kv_types: tuple[str, ...]
    vocab_size: int
    architecture: str
    weights_bytes: int
    max_model_len: int
    arena: Arena
    under: Mapping[str, Any]
    fast: bool
    determinism: str
    numbers: str
    settings: tuple[Decision, ...]
    kernels: tuple[Decision, ...]
    body: Sequence[Any]
    head: Sequence[Any]
    results: tuple[tuple[int, int], tuple[int, int]]
    arrays: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, text: str) -> KeptStart:
        """Reads what `text` of another one gave."""
        found: dict[str, Any] = json.loads(text)
        facts, specs = found["facts"], found["specs"]
        layers = tuple(LayerFacts(**layer) for layer in facts.pop("layers"))
        found["facts"] = ModelFacts(layers=layers, **facts)
        found["arena"] = Arena(**found["arena"])
        found["specs"] = tuple(_spec(spec) for spec in specs)
        for name in ("settings", "kernels"):
            found[name] = tuple(Decision(**decision) for decision in found[name])
        found["kv_types"] = tuple(found["kv_types"])
        found["results"] = tuple(map(tuple, found["results"]))
        return cls(**found)

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    def plan(self, asked: EngineOptions, concrete: EngineOptions, machine: Machine) -> MemoryPlan:
        """Where the memory goes this time, on a machine's CPU; raises MemoryPlanError if it does not fit."""
        limits = memory_limits(asked, concrete, machine, None)
        caches = Caches(self.specs, native_block_bytes)

        def planned(limits: MemoryLimits) -> MemoryPlan:
            return plan_caches(caches, concrete, limits, self.kv_types, self.facts, self.weights_bytes)

        step = self.arena.bytes_of(limits.max_num_batched_tokens, limits.max_num_seqs)
        # A first start estimates its step, and the length it serves is recorded; the cache gets what that left over.
        try:
            first = planned(limits)
        except MemoryPlanError:
            length = min(limits.max_model_len, self.max_model_len)
            return planned(replace(limits, max_model_len=length, activation_bytes=step))
        step = min(step, first.activation_bytes)
        plan = planned(replace(limits, max_model_len=first.max_model_len, activation_bytes=step))
        return replace(plan, notes=first.notes)

    def check(self, concrete: EngineOptions, plan: MemoryPlan) -> None:
        """Raises PackCacheError where options or a plan decide otherwise than this start did."""
        for name in RECORDED_UNDER:
            if getattr(concrete, name) != self.under[name]:
                raise PackCacheError(f"{name} was {self.under[name]!r} and is {getattr(concrete, name)!r}")
        if plan.max_model_len != self.max_model_len:
            raise PackCacheError(f"max_model_len was {self.max_model_len} and is {plan.max_model_len}")


def _spec(found: Mapping[str, Any]) -> CacheSpec:
    state = tuple(tuple(shape) for shape in found["state"])
    told = {"kind": CacheKind(found["kind"]), "state": state, "stripe": Stripe(**found["stripe"])}
    return CacheSpec(**{**found, **told})


@dataclass(frozen=True, slots=True)
class Again:
    """A start that was found, and decided anew for this machine.

    Attributes:
        kept: what was found.
        options: concrete.
        plan: where the memory goes.
        settings: derived options and why.
        weights: the file of packed weights.
        constants: the file they lie in.
    """

    kept: KeptStart
    options: EngineOptions
    plan: MemoryPlan
    settings: tuple[Decision, ...]
    weights: PackCache
    constants: PackCache


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recordings of an engine that has started, for `keep`.

    Attributes:
        body, head: journals.
        results: as in KeptStart.
        fast: as in KeptStart.
        matrices: packed matrices of weights by name.
        caches: (layout, key, value, states) of every layer.
    """

    body: Journal
    head: Journal
    results: tuple[tuple[int, int], tuple[int, int]]
    fast: bool
    matrices: Mapping[str, Sequence[Any]]
    caches: Sequence[tuple[Any, int, int, Sequence[int]]]

    def names(self) -> Names:
        """How the journals' objects are written."""
        objects: dict[int, Any] = {}
        places: dict[int, Any] = {}
        for key, parts in self.matrices.items():
            objects |= {id(part): {"matrix": [key, number]} for number, part in enumerate(parts)}
        for layer, (layout, keys, values, states) in enumerate(self.caches):
            objects[id(layout)] = {"layout": layer}
            places |= {keys: {"cache": [layer, "key"]}, values: {"cache": [layer, "value"]}}
            places |= {state: {"cache": [layer, number]} for number, state in enumerate(states)}
        return Names(objects, places)


def weights_place(options: EngineOptions, name: str, model: Path, ranks: Ranks = ALONE) -> Path | None:
    """The file of a rank's packed weights; None where none is kept."""
    folder = pack_folder(options.pack_cache)
    if folder is None:
        return None
    named = name if ranks.alone else name[:_LONGEST_NAME]  # a file's name is cut, and its end tells ranks apart
    return folder / file_name(model, "-".join(filter(None, (named, options.quantize, ranks.name))))


def weights_identity(options: EngineOptions, model: Path, ranks: Ranks = ALONE) -> str:
    """What a rank's packed weights depend on."""
    packing = f"{PACKING} {options.quantize} {options.hf_overrides or ''}".rstrip()
    copies = f" {options.num_redundant_experts} copies" if options.enable_eplb else ""
    share = f"{ranks.name} {SHARES} {options.decode_context_parallel_size}{copies}"
    return fingerprint(model, packing if ranks.alone else f"{packing} {share}")


def start_place(weights: Path) -> Path:
    """Where the start of a model is kept, beside its packed weights."""
    return weights.with_name(f"{weights.name}.start")


def _identity(weights: str) -> str:
    """What a kept start depends on: the packed weights, and all code of this package."""
    return code_digest(VERSION, weights)


def find(asked: EngineOptions) -> Again | None:
    """The start that was kept of this model and these options; None where it cannot be used."""
    try:
        found = _read(asked)
        return _decided(asked, found) if found is not None else None
    except _UNUSABLE as error:
        log.info("the engine starts anew: what was kept of its last start cannot be used (%s)", error)
        return None


def known(asked: EngineOptions) -> KeptStart | None:
    """What is kept of this model, for planning, which is to `check` it too."""
    try:
        found = _read(asked)
    except _UNUSABLE:
        return None
    return found.kept if found is not None else None


@dataclass(frozen=True, slots=True)
class _Found:
    """A kept start: what it says, its file, and the file and identity of the weights beside it."""

    kept: KeptStart
    file: PackCache
    weights: Path
    identity: str


def _read(asked: EngineOptions) -> _Found | None:
    """What is kept of this model; None where nothing is. Raises one of _UNUSABLE."""
    weights = _kept_at(asked)
    if weights is None:
        return None
    identity = weights_identity(asked, Path(asked.model).expanduser())
    file = PackCache(start_place(weights), _identity(identity))
    return _Found(KeptStart.of(bytes(file.data("start")).decode()), file, weights, identity)


def _kept_at(asked: EngineOptions) -> Path | None:
    """The file of packed weights beside which a start is kept; None where there is none for such options."""
    model = Path(asked.model).expanduser()
    if not native.available() or asked.load_format != "auto" or not model.exists():
        return None
    if asked.device != "cpu" and (asked.device != "auto" or has_accelerator_files()):
        return None
    drafts = speculation(asked.speculative_config)
    loads = asked.enable_lora or asked.control_vector or (drafts is not None and drafts.loads)
    if asked.enable_prompt_embeds or rank_count(asked) > 1:  # whose steps are built with torch
        return None
    if loads:  # which has to be done
        return None
    weights = weights_place(asked, served_name(str(model)), model)
    if weights is None or not os.path.exists(start_place(weights)):  # False where the folder cannot be searched
        return None
    return weights


def _decided(asked: EngineOptions, found: _Found) -> Again:
    """Raises one of _UNUSABLE where this machine decides otherwise."""
    kept = found.kept
    machine = this_machine().within(asked.memory)
    resolved = resolve(asked, kept.facts, machine)
    options = resolved.options
    plan = kept.plan(asked, options, machine)
    kept.check(options, plan)
    settings = [Decision(name, str(value), reason) for name, value, reason in resolved.reasons]
    settings += (Decision("max_model_len", str(plan.max_model_len), note) for note in plan.notes)
    return Again(kept, options, plan, tuple(settings), PackCache(found.weights, found.identity), found.file)


def keep(start: KeptStart, constants: bytes | bytearray, weights: Path, identity: str) -> None:
    """Writes a start beside its packed weights; where that is not possible, the next one starts anew too."""
    try:
        writer = PackWriter(start_place(weights), _identity(identity))
    except OSError as error:
        log.info("nothing of this start is kept: %s", error.strerror or error)
        return
    try:
        writer.put("start", [(b"", memoryview(start.text().encode()))])
        writer.put("constants", [(b"", memoryview(constants))])
        writer.finish()
    except OSError as error:
        writer.discard()
        log.info("nothing of this start is kept: %s", error.strerror or error)


def written(recorded: Recorded) -> tuple[list[Any], list[Any], Arrays]:
    """The journals in plain values, and their constants.

    Raises:
        NotKeptError: one holds something that another process cannot have again.
    """
    names, arrays = recorded.names(), Arrays()
    return recorded.body.written(names, arrays), recorded.head.written(names, arrays), arrays
