"""Gemma 3n text models (Google 2025): AltUp, per-layer embeddings, sparse MLPs, layers that share caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from penstock.layers.altup import (
    AltUpBlock,
    AltUpCoefficients,
    AltUpInput,
    AltUpOutput,
    AroundNorms,
    Laurel,
    LaurelBlock,
)
from penstock.layers.decoder import Block, DecoderModel, FeedForward
from penstock.layers.linear import Linear, StoredRows
from penstock.layers.mlp import MlpVariant
from penstock.layers.per_layer_embeddings import PerLayerEmbeddings, PerLayerInput, PerLayerSizes
from penstock.layers.recurrent import constants
from penstock.models.blueprint import Blueprint
from penstock.models.gemma import AROUND, attention_of, both_rotations, shared_leftovers

SOUND = (r"(model\.)?(embed_vision|embed_audio|audio_tower)\..*",)
HALF = 0.5**0.5


def per_layer_embeddings(blueprint: Blueprint) -> PerLayerEmbeddings:
    """The vectors that every layer is given of its own."""
    fields, kernels = blueprint.fields, blueprint.kernels
    layers, size = blueprint.num_layers, fields.integer("hidden_size_per_layer_input")
    vocab = fields.integer("vocab_size")
    stored = fields.integer("vocab_size_per_layer_input", vocab)
    sizes = {"hidden_size": blueprint.hidden_size, "vocab": vocab, "stored": stored}
    return PerLayerEmbeddings(kernels, layers, size, eps=blueprint.norm_eps, **sizes)


def per_layer_input(blueprint: Blueprint, index: int) -> PerLayerInput:
    """What layer `index` makes of its vector."""
    size = blueprint.fields.integer("hidden_size_per_layer_input")
    sizes = PerLayerSizes(blueprint.hidden_size, size, blueprint.num_layers)
    norm = blueprint.norm(f"model.layers.{index}.post_per_layer_input_norm")
    activation = blueprint.activation("hidden_activation", "gelu_pytorch_tanh")
    return PerLayerInput(blueprint.kernels, index, sizes, activation, norm)


def build(blueprint: Blueprint) -> DecoderModel:
    """Of five layers the last has full attention; scores are not scaled."""
    fields = blueprint.fields
    kernels = blueprint.kernels
    hidden = blueprint.hidden_size
    windows = blueprint.windows()
    slots, feed_forward = blueprint.slots(windows), _feed_forward(blueprint)
    full, local = both_rotations(blueprint)
    count, active = fields.integer("altup_num_inputs", 4), fields.integer("altup_active_idx", 0, minimum=0)
    if not active < count <= 8:
        problem = f"is {count}; allowed: up to 8, and more than altup_active_idx, {active}"
        raise fields.error("altup_num_inputs", problem)
    rank, scaled = fields.integer("laurel_rank", 64), fields.flag("altup_correct_scale", True)

    def block(index: int) -> Block:
        prefix = f"model.layers.{index}"
        rotary = full if windows[index] is None else local
        attention = attention_of(blueprint, index, rotary, slots[index], window=windows[index])
        norms = AroundNorms(
            blueprint.norm(f"{prefix}.{AROUND.before_attention}"),
            blueprint.norm(f"{prefix}.{AROUND.after_attention}", factor=HALF),
            blueprint.norm(f"{prefix}.{AROUND.before_mlp}"),
            blueprint.norm(f"{prefix}.{AROUND.after_mlp}"),
        )
        left = Linear(kernels, ((f"{prefix}.laurel.linear_left", rank),), hidden, bias=False)
        right = Linear(kernels, ((f"{prefix}.laurel.linear_right", hidden),), rank, bias=False)
        laurel = Laurel(left, right, blueprint.norm(f"{prefix}.laurel.post_laurel_norm", factor=HALF))
        computed = LaurelBlock(kernels, norms, attention, feed_forward(index), laurel, hidden)
        scale = constants(f"{prefix}.altup.correct_output_scale", hidden) if scaled else None
        mixing = _coefficients(blueprint, f"{prefix}.altup", count)
        return AltUpBlock(
            kernels, computed, mixing, per_layer_input(blueprint, index), count=count, active=active, scale=scale
        )

    mean = replace(blueprint, norm_eps=blueprint.norm_eps * count**2)  # of the streams, of which the sum is normed
    return blueprint.model(
        [block(index) for index in range(blueprint.num_layers)],
        full.rope,
        mean.norm("model.norm"),
        tie_default=True,
        embedding_scale=hidden**0.5,
        soft_cap=fields.optional_number("final_logit_softcapping"),
        max_positions=fields.integer("max_position_embeddings"),
        ignorable=(*SOUND, *shared_leftovers(slots), *(() if scaled else (r".*\.altup\.correct_output_scale",))),
        opening=(per_layer_embeddings(blueprint), AltUpInput(kernels, count, active, hidden)),
        closing=(AltUpOutput(kernels, count, active, hidden),),
    )


def _feed_forward(blueprint: Blueprint) -> Callable[[int], FeedForward]:
    """MLPs, of which some look at what is far above the mean only."""
    fields, layers = blueprint.fields, blueprint.num_layers
    stated = fields.values.get("intermediate_size")
    sizes = fields.integers("intermediate_size") if isinstance(stated, (list, tuple)) else ()
    sizes = sizes or (fields.integer("intermediate_size"),) * layers
    if len(sizes) != layers:
        raise fields.error("intermediate_size", f"has {len(sizes)} entries; num_hidden_layers is {layers}")
    usual = [0.95 if layers > 10 and index < 10 else 0.0 for index in range(layers)]
    kept = fields.shares("activation_sparsity_pattern", layers, usual)
    above = [NormalDist().inv_cdf(share) if share else None for share in kept]
    activation = blueprint.activation("hidden_activation", "gelu_pytorch_tanh")
    return lambda index: blueprint.mlp(
        index, activation=activation, size=sizes[index], variant=MlpVariant(deviations=above[index])
    )


def _coefficients(blueprint: Blueprint, prefix: str, count: int) -> tuple[AltUpCoefficients, AltUpCoefficients]:
    """Those that predict streams, and those that correct them.

    The latter, c + 1 of what the active stream gained, as two numbers each: c + 1 and -(c + 1).
    """
    kernels, hidden = blueprint.kernels, blueprint.hidden_size

    def mixed(shift: Tensor | None, *parts: StoredRows) -> AltUpCoefficients:
        norm = blueprint.norm(f"{prefix}.router_norm", factor=1 / hidden)
        router = Linear(kernels, ((f"{prefix}.modality_router", count),), hidden, bias=False)
        return AltUpCoefficients(kernels, norm, router, Linear(kernels, parts, count, bias=False), shift)

    twice = np.repeat(np.arange(count), 2)
    signs = np.tile(np.array([1.0, -1.0], np.float32), count)
    shift = torch.from_numpy(signs).to(blueprint.dtype)
    correct = mixed(shift, StoredRows(f"{prefix}.correction_coefs", count, twice, signs))
    return mixed(None, StoredRows(f"{prefix}.prediction_coefs", count * count)), correct
