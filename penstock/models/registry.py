"""Builds the model of a configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import DecoderModel as Model
from penstock.layers.ops import KernelSet
from penstock.models import fallback
from penstock.models.blueprint import Blueprint
from penstock.models.families import ARCHITECTURES, Family, named, text_fields
from penstock.models.not_run import NOT_RUN

__all__ = ["Model", "build_model", "check_architecture", "family_of"]


def family_of(config: Mapping[str, Any]) -> tuple[Family, str]:
    """The family of the first supported name under `architectures`, and its head as in `Blueprint`.

    Raises:
        CheckpointError: none is supported.
    """
    names = _architectures(config)
    name, found = next(((name, known) for name in names if (known := named(name))), ("", None))
    if found is None:
        near = difflib.get_close_matches(names[0][:80], ARCHITECTURES, 1, cutoff=0.0)[0]
        raise CheckpointError(
            f"config.json: architectures is {names}, which neither is known here nor is a causal language model of the "
            f"installed transformers ({fallback.version() or 'none'}); the nearest that is known: {near}. "
            f"All: {', '.join(ARCHITECTURES)}."
        )
    typed = _plain(str(config.get("model_type")))
    own = [known for known, family in ARCHITECTURES.items() if _plain(_base(known)) == typed]
    if own and all(ARCHITECTURES[known].build != found[0].build for known in own):
        raise CheckpointError(
            f"config.json: model_type is {config['model_type']!r}, which goes with {own[0]}, but architectures says "
            f"{name}. Correct the one that is wrong, or download the file again from where the model comes from."
        )
    return found


def _base(architecture: str) -> str:
    return re.sub(r"(ForCausalLM|ForConditionalGeneration|Model)$", "", architecture)


def _plain(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names:
        raise CheckpointError(
            f"config.json: architectures is {names!r}; it must list one of: {', '.join(ARCHITECTURES)}."
        )
    return [str(name) for name in names]


def check_architecture(config: Mapping[str, Any]) -> None:
    """Refuses what neither the registry nor transformers can run, whatever else the configuration says.

    Raises:
        CheckpointError: the architecture is unknown, or cannot run through transformers.
    """
    _refuse_not_run(_architectures(config))
    if made := _elsewhere(config):
        fallback.check(made, config)
    else:
        family_of(config)


def _refuse_not_run(names: Sequence[str]) -> None:
    for name in names:
        if name in NOT_RUN and not named(name):
            raise CheckpointError(
                f"config.json: architectures names {name}, which cannot run here: {NOT_RUN[name]}. Take a model of "
                "another architecture; docs/models.md lists them."
            )


def _elsewhere(config: Mapping[str, Any]) -> Any:
    """transformers' class, where the registry has no family; None where it has, or there is no class either."""
    names = _architectures(config)
    if any(named(name) for name in names):
        return None
    return next((found for name in names if (found := fallback.known(name))), None)


def _builder(family: Family) -> Callable[[Blueprint], Model]:
    module, _, function = family.build.partition(".")
    found: Callable[[Blueprint], Model] = getattr(import_module(f"penstock.models.{module}"), function)
    return found


def build_model(
    config: Mapping[str, Any], kernels: KernelSet, *, dtype: torch.dtype, max_model_len: int | None = None
) -> Model:
    """Builds a model whose weights are declared and not yet loaded.

    Args:
        config: config.json as a dict.
        kernels: the ops it computes with.
        dtype: compute dtype.
        max_model_len: longest sequence that will be served, if already known. Only "dynamic" rope depends on it.

    Raises:
        CheckpointError: unknown architecture, or a field that is missing or impossible.
    """
    if made := _elsewhere(config):
        return fallback.build(config, made, kernels, dtype, max_model_len)
    family, head = family_of(config)
    fields = text_fields(config, family)
    return _builder(family)(Blueprint.read(fields, kernels, dtype, max_model_len, head, family.facts))
