"""Which layers each stage of a pipeline has: dealt by what a step reads of each, or as somebody wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.ranks import remote_ranks
from penstock.layers.decoder import Block, ParallelMixers, SelfAttention
from penstock.layers.part import FINAL, WHOLE, ModelPart, layer_input, layer_output
from penstock.layers.weight import Layer, Weight
from penstock.models.registry import Model
from penstock.parallel.stages import Work, deal, split_by_hand
from penstock.runtime.kv_memory import ELSEWHERE
from penstock.startup.rooms import Room, Share
from penstock.weights.weight_plan import WeightPlan

ROWS = 8  # tokens that a step is reckoned with: of experts it reads those that so many tokens choose


def stages_of(
    model: Model, plans: Sequence[WeightPlan], options: EngineOptions, rooms: Sequence[Room] = ()
) -> tuple[ModelPart, ...]:
    """The part of each stage; one alone where layers are not dealt.

    Args:
        model: declared, all of it.
        plans: of its weights.
        options: concrete.
        rooms: of the stages, where they differ; () for enough, and one speed.

    Raises:
        ConfigError: the model has too few layers, or its layers cannot be told apart where the split says.
    """
    stages = options.pipeline_parallel_size
    if stages == 1:
        return (WHOLE,)
    if model.runs:
        raise ConfigError(f"--pipeline-parallel-size {stages} is not possible: {model.runs}. Leave it out.")
    work = work_of(model, plans, head_leads=_head_leads(model, options))
    if options.pipeline_layer_split is not None:
        counts = split_by_hand(options.pipeline_layer_split, len(model.blocks), stages, work.cuts)
    else:
        counts = deal(work, stages, [room.memory for room in rooms], [room.speed for room in rooms])
    parts = [ModelPart(begin, end) for begin, end in pairwise((0, *accumulate(counts)))]
    parts[-1] = replace(parts[-1], end=None)
    if _head_leads(model, options):
        parts[0], parts[-1] = replace(parts[0], head=True), replace(parts[-1], head=False)
    return tuple(parts)


def shares_of(
    model: Model, plans: Sequence[WeightPlan], stages: Sequence[ModelPart], rooms: Sequence[Room]
) -> list[Share]:
    """What each machine holds of a model whose stages are those: this one the first ones, the others one each.

    `rooms`: of this machine, and of those.
    """
    taken = {id(plan.weight): plan.nbytes for plan in plans}
    local = len(stages) - len(rooms) + 1
    weights = [sum(taken.get(id(weight), 0) for weight in model.weights_of(part)) for part in stages]
    kept = [_kept(model, part) for part in stages]
    every = sum(kept) or 1
    split = [slice(0, local), *(slice(stage, stage + 1) for stage in range(local, len(stages)))]
    return [Share(room, sum(weights[own]), sum(kept[own]) / every) for room, own in zip(rooms, split, strict=True)]


def _kept(model: Model, part: ModelPart) -> int:
    """Elements that the part's layers keep of a token."""
    here = {index for block in model.blocks[part.first : part.end] for index in _memories(block)}
    return sum(model.cache_specs[index].elements_per_token for index in here)


def _head_leads(model: Model, options: EngineOptions) -> bool:
    """Whether the first stage has the head too: logits are many times what hidden states are, to cross a network.

    What adapters change of a head is with the last stage.
    """
    return bool(remote_ranks(options)) and model.head is not None and not options.enable_lora


def work_of(model: Model, plans: Sequence[WeightPlan], *, head_leads: bool = False) -> Work:
    """What the layers cost, in bytes that a step of a few rows reads, and what memory their weights take.

    `head_leads`: the first stage has the head, not the last one.
    """
    taken = {id(plan.weight): plan.nbytes for plan in plans}
    blocks = [list(block.weights()) if isinstance(block, Layer) else [] for block in model.blocks]
    head = list(_of(model.head))
    opening = _distinct([*_of(model.embedding, *model.opening, model.classifier, model.projection), *head * head_leads])
    ending = [*_of(*model.closing, model.norm), *head * (not head_leads)]
    return Work(
        costs=[_read(weights, taken) for weights in blocks],
        first=_read(head, taken) * head_leads,  # of the embedding a step reads a few rows
        last=_read(ending, taken),
        sizes=[_size(weights, taken) for weights in blocks],
        first_size=_size(opening, taken),
        last_size=_size(ending, taken),
        cuts=cuts(model),
    )


def _distinct(weights: Sequence[Weight]) -> list[Weight]:
    return list({id(weight): weight for weight in weights}.values())


def _of(*layers: object) -> Iterator[Weight]:
    for layer in layers:
        if isinstance(layer, Layer):
            yield from layer.weights()


def _size(weights: Sequence[Weight], taken: dict[int, int]) -> int:
    return sum(taken.get(id(weight), 0) for weight in weights)


def _read(weights: Sequence[Weight], taken: dict[int, int]) -> float:
    """Bytes; of experts as many as ROWS tokens choose at most, one each."""
    return sum(taken.get(id(weight), 0) * min(1.0, ROWS / weight.experts) for weight in weights)


def cuts(model: Model) -> frozenset[int]:
    """Layers at which a stage may begin: nobody behind them reads what a layer before them keeps."""
    first = {index: number for number, block in reversed(list(enumerate(model.blocks))) for index in _memories(block)}
    reach = [0] * len(model.blocks)  # of the memory a layer writes or reads first, up to where it is read last
    for number, block in enumerate(model.blocks):
        for index in _memories(block):
            reach[first[index]] = max(reach[first[index]], number)
    ends = list(accumulate(reach, max))
    return frozenset(cut for cut in range(1, len(model.blocks)) if ends[cut - 1] < cut)


def _memories(block: Block) -> Iterator[int]:
    """Numbers of the caches that a block works on."""
    mixer = block.attention
    both: tuple[SelfAttention, ...] = (mixer.first, mixer.second) if isinstance(mixer, ParallelMixers) else (mixer,)
    for one in both:
        index = getattr(one, "index", None)
        if isinstance(index, int):
            yield index


def types_here(model: Model, kv_types: Sequence[str]) -> tuple[str, ...]:
    """The types of all layers' caches, where those of other parts have no memory."""
    if model.part is WHOLE:
        return tuple(kv_types)
    here = {index for block in model.blocks[model.part.first : model.part.end] for index in _memories(block)}
    return tuple(kind if index in here else ELSEWHERE for index, kind in enumerate(kv_types))


def taps_here(model: Model, taps: Sequence[str]) -> tuple[str, ...]:
    """Those of these taps that lie in the model's part."""
    part = model.part
    layers = range(part.first, len(model.blocks) if part.end is None else part.end)
    known = {name(layer) for layer in layers for name in (layer_input, layer_output)}
    return tuple(tap for tap in taps if tap in known or (tap == FINAL and part.end is None))


def hold(model: Model, part: ModelPart, plans: Sequence[WeightPlan]) -> tuple[WeightPlan, ...]:
    """Has a declared model be a part of itself; the plans of the weights that part has."""
    if part is WHOLE:
        return tuple(plans)
    model.part = part
    held = {id(weight) for weight in model.weights()}
    return tuple(plan for plan in plans if id(plan.weight) in held)
