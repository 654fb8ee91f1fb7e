"""What a family's configuration says of its layers, before any is built. No torch.

A rule stands here once: the family's builder and the memory plan both read it, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from penstock.models.defaults import MEMORYLESS_LAYERS, RECURRENT_LAYERS
from penstock.models.fields import Fields

Windows = Callable[[Fields, int], tuple[int | None, ...]]
"""(configuration, layers) → each layer's window, None for full attention."""
Attending = Callable[[Fields, int], tuple[bool, ...]]
"""(configuration, layers) → whether each layer keeps keys and values."""
Pattern = Callable[[Fields], Callable[[int], bool]]
"""Which layers slide, or attend, where the configuration does not list the layers' types."""

_ATTEND = ("full_attention", "attention")
_LETTERS = MappingProxyType(
    {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}
)


def sliding_window(fields: Fields) -> int | None:
    """The width of sliding layers, None where the configuration has none."""
    used = fields.has("sliding_window") and fields.flag("use_sliding_window", True)
    return fields.integer("sliding_window") if used else None


def rope_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Whether each layer has rope: as `no_rope_layers` says (0: none), else all but every fourth or so.

    Raises:
        CheckpointError: it says so of another number of layers.
    """
    every = fields.integer("no_rope_layer_interval", 4)
    stated = fields.integers("no_rope_layers") or tuple((index + 1) % every for index in range(layers))
    if len(stated) != layers:
        raise fields.error("no_rope_layers", f"has {len(stated)} entries; num_hidden_layers is {layers}")
    return tuple(map(bool, stated))


# -- windows ----------------------------------------------------------------------------------------------------------


def full(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Every layer attends to everything."""
    return (None,) * layers


def alike(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Every layer slides, where there is a window."""
    return (sliding_window(fields),) * layers


def asked(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Every layer slides, where `use_sliding_window` asks for it."""
    return alike(fields, layers) if fields.flag("use_sliding_window", False) else full(fields, layers)


def typed(pattern: Pattern, width: Callable[[Fields], int | None] = sliding_window) -> Windows:
    """Windows as `layer_types` says, else as the pattern does."""

    def windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
        window = width(fields)
        slides = pattern(fields)
        sliding = [slides(index) for index in range(layers)]
        if fields.has("layer_types"):
            types = fields.texts("layer_types", layers)
            unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
            if unknown:
                raise fields.error("layer_types", f"has {unknown}; allowed: full_attention, sliding_attention")
            sliding = [kind == "sliding_attention" for kind in types]
        if any(sliding) and window is None:
            raise fields.error("sliding_window", "is missing, but the model has sliding layers")
        return tuple(window if slide else None for slide in sliding)

    return windows


def last_full(period: int, *names: str) -> Pattern:
    """Of every `period` layers the last does not slide; the first field of these names that is there says otherwise."""

    def pattern(fields: Fields) -> Callable[[int], bool]:
        name = next(filter(fields.has, names), None)
        every = period if name is None else fields.integer(name)
        return lambda index: (index + 1) % every != 0

    return pattern


def first_full(period: int, name: str = "") -> Pattern:
    """Of every `period` layers the first does not slide; a field of this name may say otherwise."""

    def pattern(fields: Fields) -> Callable[[int], bool]:
        every = fields.integer(name, period) if name else period
        return lambda index: index % every != 0

    return pattern


def where_set(fields: Fields) -> Callable[[int], bool]:
    """All layers slide, where there is a window."""
    slides = sliding_window(fields) is not None
    return lambda index: slides


def never(fields: Fields) -> Callable[[int], bool]:
    """None slides."""
    return lambda index: False


def upper(first: int, *, asked: bool) -> Pattern:
    """Layers from `max_window_layers` on slide; where `asked`, only if `use_sliding_window` is true."""

    def pattern(fields: Fields) -> Callable[[int], bool]:
        slides = sliding_window(fields) is not None and fields.flag("use_sliding_window", not asked)
        begin = fields.integer("max_window_layers", first, minimum=0)
        return lambda index: slides and index >= begin

    return pattern


def spelled_out(fields: Fields) -> Callable[[int], bool]:
    """A pattern as a number, or spelled out as in "LLLG"; 0 for none. Nothing slides without a window."""
    pattern = fields.values.get("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern", 4, minimum=0)
    slides = fields.has("sliding_window")
    return lambda index: slides and every > 0 and (index + 1) % every != 0


def without_rope(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Layers without rope slide, where `use_sliding_window` asks for it."""
    if not (fields.flag("use_sliding_window", False) and fields.has("sliding_window")):
        return full(fields, layers)
    has_rope = rope_layers(fields, layers)
    return typed(lambda _: lambda index: not has_rope[index])(fields, layers)


def chunks(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Layers with rope see a chunk."""
    chunk = fields.integer("attention_chunk_size", 8192)
    return tuple(chunk if has_rope else None for has_rope in rope_layers(fields, layers))


# -- layers that attend -----------------------------------------------------------------------------------------------


def all_attend(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Every layer keeps keys and values."""
    return (True,) * layers


def none_attend(fields: Fields, layers: int) -> tuple[bool, ...]:
    """No layer does."""
    return (False,) * layers


def attending(pattern: Pattern) -> Attending:
    """Recurrent layers and others: as `layer_types` says, else as the pattern does."""

    def attends(fields: Fields, layers: int) -> tuple[bool, ...]:
        if not fields.has("layer_types"):
            return tuple(map(pattern(fields), range(layers)))
        types = fields.texts("layer_types", layers)
        allowed = (*RECURRENT_LAYERS, *_ATTEND)
        if unknown := sorted(set(types) - set(allowed)):
            raise fields.error("layer_types", f"has {unknown}; allowed: {', '.join(allowed)}")
        return tuple(kind not in RECURRENT_LAYERS for kind in types)

    return attends


def periodic(fields: Fields) -> Callable[[int], bool]:
    """One layer of `attn_layer_period`."""
    period, offset = fields.integer("attn_layer_period", 8), fields.integer("attn_layer_offset", 4, minimum=0)
    return lambda index: index % period == offset


def every_nth(name: str, period: int) -> Pattern:
    """The last of every so many layers, as a field says."""

    def pattern(fields: Fields) -> Callable[[int], bool]:
        every = fields.integer(name, period)
        return lambda index: (index + 1) % every == 0

    return pattern


def listed(name: str, *, all_without: bool = False) -> Pattern:
    """The layers that a field lists; `all_without`: all, where it lists none."""

    def pattern(fields: Fields) -> Callable[[int], bool]:
        layers = fields.integers(name)
        return lambda index: index in layers or (all_without and not layers)

    return pattern


def layer_letters(fields: Fields, layers: int) -> tuple[str, ...]:
    """Nemotron-H's layers: "M" for Mamba-2, "*" for attention, "E" for experts, "-" for an MLP."""
    field = next(filter(fields.has, ("layer_types", "layers_block_type")), "layers_block_type")
    types = fields.texts(field, layers)
    if unknown := sorted(set(types) - set(_LETTERS)):
        raise fields.error(field, f"has {unknown}; allowed: {', '.join(_LETTERS)}")
    return tuple(_LETTERS[kind] for kind in types)


def lettered(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Nemotron-H's layers that attend."""
    return tuple(letter == "*" for letter in layer_letters(fields, layers))


def generic(fields: Fields, layers: int) -> tuple[bool, ...]:
    """All layers but those that `layer_types` calls something else."""
    if not fields.has("layer_types"):
        return all_attend(fields, layers)
    others = (*RECURRENT_LAYERS, *MEMORYLESS_LAYERS)
    return tuple(kind not in others for kind in fields.texts("layer_types", layers))


@dataclass(frozen=True, slots=True)
class Judge:
    """How a family's rerankers, language models that say yes or no, are asked about a query and a document.

    Attributes:
        named: what their names have in them, where their files say nothing.
        words: "no" and "yes", as tokens.
        before, after: what stands around the question, with control tokens.
        question: of {instruction}, {query} and {document}.
        instruction: where a request brings none.
    """

    named: str
    words: tuple[str, str]
    before: str
    question: str
    after: str
    instruction: str


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What sets a family's layers apart.

    Attributes:
        windows: each layer's.
        attends: which layers keep keys and values.
        latent: layers keep one latent of each token, of `kv_lora_rank` and `qk_rope_head_dim` elements.
        stretched: `max_position_embeddings` is stated after the rope was stretched.
        padded: positions begin behind the padding token's.
        encoder: tokens see those after them.
        judge: how its rerankers are asked; None where there are none.
    """

    windows: Windows = full
    attends: Attending = all_attend
    latent: bool = False
    stretched: bool = False
    padded: bool = False
    encoder: bool = False
    judge: Judge | None = None


PLAIN = FamilyFacts()
UNKNOWN = FamilyFacts(typed(where_set), generic)
"""Of models without a family."""
