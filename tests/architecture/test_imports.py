"""Imports go one way only, along the order of docs/architecture.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.architecture.source import PACKAGE, Module, imports, modules, parse

# Each tier may import the tiers before it; parts of one tier do not know each other.
TIERS: tuple[tuple[str, ...], ...] = (
    ("config",),
    ("core", "text", "kernels"),
    ("quant",),
    ("parallel",),
    ("layers",),
    ("models",),
    ("multimodal",),
    ("weights",),
    ("library",),
    ("structured",),
    ("runtime",),
    ("transfer",),
    ("startup",),
    ("evaluate",),
    ("train",),
    ("engine",),
    ("host",),
    ("completions", "sampling_keywords"),
    ("search",),
    ("cluster",),
    ("async_llm", "program"),
    ("llm", "server"),
    ("cli",),
    ("__main__",),
)
# Parts that may import less than everything before them.
NARROW = {
    "models": {"config", "core", "layers"},
    "search": {"config", "core", "text", "engine"},
    "server": {"config", "core", "text", "engine", "host", "search"},
}
PARTS = {part: tier for tier, parts in enumerate(TIERS) for part in parts}


def allowed(part: str) -> set[str]:
    """What a part may import, besides itself."""
    before = {other for other, tier in PARTS.items() if tier < PARTS[part]}
    return NARROW.get(part, before)


def forbidden(module: Module) -> Iterator[str]:
    """Every import of the package that a module may not make, as a sentence."""
    if not module.part:
        return
    for line, name in imports(module):
        words = name.split(".")
        if words[0] != "penstock" or len(words) < 2 or words[1] not in PARTS:
            continue
        if words[1] != module.part and words[1] not in allowed(module.part):
            yield f"{module.path}:{line} imports {name}: {module.part} may not know {words[1]}"


def test_imports_go_one_way() -> None:
    assert [sentence for module in modules() for sentence in forbidden(module)] == []


def test_every_folder_has_a_place_in_the_order() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/**/*.py")}
    assert folders <= PARTS.keys()
    assert {"config", "core", "text"} <= folders


def test_nothing_is_imported_relatively() -> None:
    """One spelling for every import: the full name."""
    found = [m.path for m in modules() if any(line.lstrip().startswith("from .") for line in m.text.splitlines())]
    assert found == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("penstock.core.x", "from penstock.text.tokenizer import Tokenizer"),
        ("penstock.core.x", "import penstock.kernels.registry"),
        ("penstock.text.x", "from penstock import core"),
        ("penstock.text.x", "def f():\n    from penstock.core.request import X"),
        ("penstock.kernels.x", "from ..core import request"),
        ("penstock.models.x", "from penstock.kernels import api"),
        ("penstock.models.x", "from penstock.quant.tensor import StoredTensor"),
        ("penstock.server.x", "from penstock.runtime import runner"),
        ("penstock.server.x", "from importlib import import_module\nimport_module('penstock.models.llama')"),
        ("penstock.server.x", "from penstock.startup.memory_plan import MemoryPlan"),
        ("penstock.structured.x", "from penstock.runtime.runner import ModelRunner"),
        ("penstock.runtime.x", "from penstock.startup.engine_spec import EngineSpec"),
        ("penstock.startup.x", "from penstock.evaluate import scoring"),
        ("penstock.engine.x", "from penstock.cli.main import main"),
        ("penstock.engine.x", "if TYPE_CHECKING:\n    from penstock.server.app import App"),
        ("penstock.config.x", "import penstock.core.request"),
        ("penstock.layers.x", "from penstock.models.llama import Llama"),
    ],
)
def test_the_rule_sees_what_is_wrong(name: str, line: str) -> None:
    assert len(list(forbidden(parse(line, name)))) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("penstock.core.x", "from penstock.config import limits\nfrom penstock.core.request import X"),
        ("penstock.models.x", "from penstock.layers.linear import Linear"),
        ("penstock.server.x", "from penstock.engine.api import X\nfrom penstock import __version__"),
        ("penstock.cli.x", "import penstock.server.app, penstock.models.llama, torch"),
    ],
)
def test_the_rule_allows_what_is_right(name: str, line: str) -> None:
    assert list(forbidden(parse(line, name))) == []
