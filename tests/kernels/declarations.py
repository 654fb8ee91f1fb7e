"""What `kernels.api` declares of every op."""

from __future__ import annotations

import inspect
from dataclasses import fields

from penstock.kernels import api
from penstock.kernels.registry import Implementation

OPS = {field.name: str(field.type) for field in fields(api.KernelSet) if field.name != "choices"}
"""Op → the name of its protocol; sampling has none."""


def keeps_declaration(item: Implementation) -> bool:
    """Whether a function takes what is declared: these names in this order, with these defaults; it may take more."""
    declared = list(inspect.signature(getattr(api, OPS[item.op]).__call__).parameters.values())[1:]
    taken = list(inspect.signature(item.function).parameters.values())
    wanted = [(parameter.name, parameter.default) for parameter in declared]
    more = taken[len(declared) :]
    optional = all(parameter.default is not parameter.empty for parameter in more)
    return [(parameter.name, parameter.default) for parameter in taken[: len(declared)]] == wanted and optional
