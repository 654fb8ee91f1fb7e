"""Penstock: one engine for running and serving large language models.

>>> from penstock import LLM
>>> with LLM() as llm:
...     print(llm.chat([{"role": "user", "content": "Book a table for two."}])[0].text)

Importing the package is cheap: torch and the engine load when an `LLM` is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM as AsyncLLM
    from penstock.config.constraint import Grammar as Grammar
    from penstock.config.constraint import GrammarKind as GrammarKind
    from penstock.config.constraint import ToolChoice as ToolChoice
    from penstock.config.constraint import ToolMode as ToolMode
    from penstock.config.sampling import SamplingParams as SamplingParams
    from penstock.llm import LLM as LLM
    from penstock.search.beam import BeamParams as BeamParams

__version__ = "0.1.0"
__all__ = [
    *("LLM", "AsyncLLM", "BeamParams", "Grammar", "GrammarKind", "SamplingParams", "ToolChoice", "ToolMode"),
    "__version__",
]

_HOMES = (
    ("LLM", "penstock.llm"),
    ("AsyncLLM", "penstock.async_llm"),
    ("SamplingParams", "penstock.config.sampling"),
    ("BeamParams", "penstock.search.beam"),
    ("Grammar", "penstock.config.constraint"),
    ("GrammarKind", "penstock.config.constraint"),
    ("ToolChoice", "penstock.config.constraint"),
    ("ToolMode", "penstock.config.constraint"),
)


def __getattr__(name: str) -> Any:
    """Loads an exported name from its module at first use."""
    for exported, module in _HOMES:
        if name == exported:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}; it exports {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
