"""The models of the library as a host's: every one that is there, by the name that it was pulled under."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from penstock.config.errors import PenstockError
from penstock.config.options import EngineOptions
from penstock.host.source import ModelSource
from penstock.library.store import Entry, Store

_log = logging.getLogger(__name__)


def library_models(store: Store, defaults: EngineOptions) -> Mapping[str, ModelSource]:
    """The models there are now; `defaults` are their options, but for those that a model's maker asked for.

    One that is damaged is left out: what is wrong with it stands in the log.
    """
    found: dict[str, ModelSource] = {}
    for entry in store.list():
        try:
            found.setdefault(entry.name, ModelSource(entry.name, _options(entry, defaults)))
        except (PenstockError, OSError, ValueError) as error:
            _log.warning("%s is left out: %s", entry.name, error)
    return found


def _options(entry: Entry, defaults: EngineOptions) -> EngineOptions:
    """Flags that were given come before what a model's maker asked for."""
    usual = EngineOptions()
    asked = {name: value for name, value in entry.options.items() if getattr(defaults, name) == getattr(usual, name)}
    return replace(defaults, **asked, model=str(entry.path), served_model_name=entry.name)
