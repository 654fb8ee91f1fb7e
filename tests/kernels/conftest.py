"""Triton's interpreter takes less time in tests."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _hasten_interpreter() -> None:
    if find_spec("triton") is not None and not torch.cuda.is_available():
        _hasten()


def _hasten() -> None:
    """Takes half of the time from the interpreter, which prepares the language anew for each call within a kernel.

    Here it is prepared once, for good, and sums of indices are not looked at for overflow, as they are not on a device.
    """
    language, interpreter = import_module("triton.language"), import_module("triton.runtime.interpreter")
    kernel = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    prepared = interpreter._patch_lang(kernel)
    nothing_to_undo = None if prepared is None else type(prepared)()
    interpreter._patch_lang = lambda _: nothing_to_undo  # type: ignore[attr-defined]
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
