"""Ollama's `keep_alive`: how long a model stays loaded after its last use."""

from __future__ import annotations

import re
from typing import Final

from penstock.host.model_host import KeepAlive

_PART: Final = re.compile(r"(?<![\d.])(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_EVER_S: Final = 10 * 365 * 86400.0  # from here on, for ever


def keep_alive_of(given: float | str | None) -> KeepAlive | None:
    """What a body says: seconds, or a duration as Go writes it; below 0 for ever. None where it says nothing."""
    if given is None or given == "":
        return None
    if isinstance(given, str):
        size = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(given))
        given = -size if given.startswith("-") else size
    return KeepAlive(None if given < 0 or given > _EVER_S else given)
