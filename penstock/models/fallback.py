"""Architectures that only transformers has: its own modules compute, their attention reads and writes our caches.

No code of the model's folder is ever imported: classes of models and configurations are those of the installed library.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.config.errors import CheckpointError
from penstock.layers.batch import Batch, LayerCache
from penstock.layers.decoder import DecoderModel, Heads, ModelTraits
from penstock.layers.embedding import Embedding, Head, table
from penstock.layers.ops import KernelSet, TokenAdapters
from penstock.layers.part import WHOLE, LayerStates, ModelPart, PartOutput
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Weight
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.defaults import with_defaults
from penstock.models.fallback_check import TOLERANCE, disagreement
from penstock.models.fallback_trace import FAILURES, traced
from penstock.models.family_facts import UNKNOWN
from penstock.models.fields import Fields

log = logging.getLogger(__name__)

ATTENTION = "penstock"  # under which transformers knows the function below
CHANGING = ("dynamic", "longrope")  # rope types whose angles depend on the other rows of a step there


def known(name: str) -> Any:
    """transformers' own class of a causal language model by this name; None without one, or without the library."""
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
    except ImportError:
        return None
    return getattr(transformers, name, None) if name in NAMES.values() else None


def version() -> str | None:
    """The installed transformers, None without it."""
    try:
        import transformers
    except ImportError:
        return None
    return str(transformers.__version__)


def build(
    config: Mapping[str, Any], made: Any, kernels: KernelSet, dtype: torch.dtype, max_model_len: int | None
) -> FallbackModel:
    """A model of transformers' class `made`, whose weights are not loaded yet.

    Raises:
        CheckpointError: the architecture cannot be run this way; the message says why.
    """
    name = made.__name__
    settings, fields = check(made, config)
    blueprint = Blueprint.read(fields, kernels, dtype, max_model_len, facts=UNKNOWN)
    stated = _stated(blueprint)
    specs = traced(made, settings, _registered(), blueprint.num_layers) or stated
    windows = [[spec.window for spec in every] for every in (specs, stated)]
    if windows[0] != windows[1]:  # the model masks by itself; a short trial would not show it
        raise fields.error("layer_types", f"ask for windows {windows[1]}, where the code of {name} has {windows[0]}")
    log.warning("%s has no implementation of its own here: transformers %s computes it, slowly.", name, version())
    return FallbackModel(blueprint, made, settings, specs)


def check(made: Any, config: Mapping[str, Any]) -> tuple[Any, Fields]:
    """transformers' configuration for its class `made`, and the fields of the text model.

    Raises:
        CheckpointError: the architecture cannot be run this way; the message says why.
    """
    own = {key: value for key, value in config.items() if key != "auto_map"}
    settings = made.config_class.from_dict(own)
    text = settings.get_text_config()
    fields = Fields(with_defaults(text.model_type, text.to_dict()))
    _check(made.__name__, made, fields)
    return settings, fields


def _stated(blueprint: Blueprint) -> tuple[CacheSpec, ...]:
    """What layers keep by the configuration, where their code cannot tell."""
    windows = blueprint.windows()
    full = CacheSpec(CacheKind.FULL, blueprint.num_kv_heads, blueprint.head_dim, blueprint.head_dim)
    return tuple(
        full
        if width is None
        else CacheSpec(CacheKind.SLIDING, blueprint.num_kv_heads, blueprint.head_dim, blueprint.head_dim, width)
        for width in windows
    )


def _registered() -> str:
    """The name under which transformers has the attention below."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    return ATTENTION


def _check(name: str, made: Any, fields: Fields) -> None:
    rope = fields.below("rope_parameters")
    kind = rope.values.get("rope_type") if rope is not None else None
    reasons = {
        "its attention cannot be replaced in transformers": not getattr(made, "_supports_attention_backend", False),
        "it keeps a state besides keys and values": getattr(made, "_is_stateful", False),
        "transformers has no positions for it": "position_ids" not in inspect.signature(made.forward).parameters,
        "it attends in chunks": fields.has("attention_chunk_size"),
        f"rope_type {kind!r} turns tokens by the length of the longest row there": kind in CHANGING,
    }
    for reason, applies in reasons.items():
        if applies:
            raise CheckpointError(
                f"the architecture {name} has no implementation of its own here, and cannot run through transformers: "
                f"{reason}. `docs/models.md` lists what can."
            )


class FallbackModel(DecoderModel):
    """A causal language model that transformers computes."""

    def __init__(self, blueprint: Blueprint, made: Any, settings: Any, specs: Sequence[CacheSpec]) -> None:
        kernels, vocab = blueprint.kernels, blueprint.fields.integer("vocab_size")
        rows = table(kernels, "", vocab, blueprint.hidden_size)
        longest = blueprint.fields.integer("max_position_embeddings")
        heads, traits = Heads(Head(kernels, rows)), ModelTraits(longest, blueprint.dtype)
        super().__init__(kernels, Embedding(kernels, rows), (), None, heads, traits)
        self.cache_specs = tuple(specs)
        self.runs = f"transformers {version()}: {made.__name__} has no implementation of its own here"
        self._made, self._settings = made, settings
        self._module: Any = None
        self._step: ForwardStep | None = None
        self._hidden: Tensor | None = None
        self._last: tuple[Tensor, Tensor] | None = None

    def weights(self) -> Iterator[Weight]:
        """None: transformers keeps them."""
        return iter(())

    def load_from(self, folder: Path) -> bool:
        """Lets transformers read the folder, and compares with its own attention.

        Raises:
            CheckpointError: it cannot, or the results differ.
        """
        try:
            module, found = self._made.from_pretrained(
                folder,
                config=self._settings,
                dtype=self.dtype,
                attn_implementation=_registered(),
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
        for fault in ("missing", "mismatched", "unexpected"):
            if names := sorted(map(str, found[f"{fault}_keys"])):
                raise CheckpointError(
                    f"{fault} weights in {folder}, by transformers' reading: {', '.join(names[:20])}."
                )
        self._module = module.eval()
        for part in module.modules():
            part.penstock = self
        module.base_model.register_forward_hook(self._keep_hidden)
        try:
            off = disagreement(self, self._alone)
        except FAILURES as error:
            raise CheckpointError(
                f"{self._made.__name__} cannot run through transformers on our caches: {error}"
            ) from error
        if not off < TOLERANCE[self.dtype]:
            raise CheckpointError(
                f"{self._made.__name__} through transformers, with our caches, gives other logits than transformers "
                f"alone: they differ by {off:.2g} of their spread, allowed is {TOLERANCE[self.dtype]}. "
                "The architecture keeps or masks something in its own way and cannot be run."
            )
        return True

    def _keep_hidden(self, module: Any, inputs: Any, output: Any) -> None:
        self._hidden = output[0][0]

    def _alone(self, tokens: Tensor) -> Tensor:
        """What transformers computes of a prompt [T] with attention of its own, [T, vocab] float32."""
        self._module.set_attn_implementation("eager")
        logits = self._module(tokens[None], use_cache=False).logits[0]
        self._module.set_attn_implementation(ATTENTION)
        found: Tensor = logits.float()
        return found

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """As DecoderModel's; logits of the wanted tokens are made at once and kept for `logits`."""
        rows = batch.logit_rows
        self._step = ForwardStep(batch, caches, self.kernels)
        output = self._module(
            batch.token_ids[None], position_ids=batch.positions[:1], use_cache=False, logits_to_keep=rows
        )
        self._step = None
        assert self._hidden is not None
        self._last = self._hidden[rows], output.logits[0]
        return self._last[0]

    def run(
        self, batch: Batch, caches: Sequence[LayerCache], part: ModelPart = WHOLE, given: LayerStates | None = None
    ) -> PartOutput:
        """The whole of it.

        Raises:
            ValueError: a part, or taps, are asked for.
        """
        if part != WHOLE or given is not None:
            raise ValueError(f"{self.runs}: it runs as a whole, and its layers cannot be looked at")
        return PartOutput(LayerStates(self.forward(batch, caches)), {})

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Rows int64 of the last step's logits, [rows, vocab_size] float32; nothing has adapters here."""
        assert self._last is not None and hidden is self._last[0]
        return self._last[1][rows].float()

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, seen: int | None, **how: Any) -> Tensor:
        """query [1, H, T, D], key and value [1, K, T, D], rotated → [1, T, H, D]; `seen`: positions, None for all."""
        assert self._step is not None
        step, spec = self._step, self.cache_specs[index]
        shape = (spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.window)
        if (key.shape[1], key.shape[3], value.shape[3], seen) != shape:
            raise CheckpointError(
                f"layer {index} has {key.shape[1]} KV heads of {key.shape[3]} and {value.shape[3]} elements and window "
                f"{seen}; the configuration says {shape[0]} of {shape[1]} and {shape[2]}, and {shape[3]}."
            )
        cache, tokens = step.caches[index], query.shape[2]
        merged = torch.cat([part[0].transpose(0, 1).reshape(tokens, -1) for part in (query, key, value)], dim=1)
        slot = step.batch.groups[cache.group].slot
        rotated = self.kernels.rope_and_cache_write(merged, *step.rotation(NO_ROPE), slot, cache.kv)
        attended = self.kernels.paged_attention(rotated, cache.kv, step.plan(cache, seen), **how)
        return attended.view(1, tokens, query.shape[1], -1)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' AttentionInterface calls it."""
    unknown = [name for name in ("position_bias", "head_mask") if others.get(name) is not None]
    if attention_mask is not None or unknown:
        raise CheckpointError(f"{type(module).__name__} masks scores in its own way and cannot read our caches.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = others.get("s_aux")
    how = {"scale": scale, "sinks": None if sinks is None else sinks.float(), "soft_cap": others.get("softcap")}
    return module.penstock.attend(module.layer_idx, query, key, value, sliding_window, **how), None
