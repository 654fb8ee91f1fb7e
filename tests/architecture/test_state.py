"""No state lies in modules: the batch, the cache and the options are arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import Module, modules, parse

STATELESS = ("core", "layers", "models")
MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "WeakKeyDictionary",
    "WeakValueDictionary", "WeakSet", "local", "ContextVar", "Lock", "RLock", "count", "cycle", "iter", "Random",
    "empty", "zeros", "ones", "tensor", "array",
}  # fmt: skip
CACHES = {"cache", "lru_cache"}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _name(value) in MUTABLE_CALLS
    if isinstance(value, (ast.BinOp, ast.IfExp, ast.BoolOp)):
        return any(_is_mutable(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))
    return isinstance(value, MUTABLE_LITERALS)


def _bodies(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: of the module, its classes and its branches."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.stmt):
                yield child
                stack.append(child)


def mutable_state(module: Module) -> Iterator[str]:
    """Every piece of mutable state a module or one of its classes keeps, as a sentence."""
    for statement in _bodies(module.tree):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and _is_mutable(statement.value):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [ast.unparse(target) for target in targets]
            if names != ["__all__"]:
                yield f"{module.path}:{statement.lineno} keeps {', '.join(names)}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"{module.path}:{node.lineno} declares global {', '.join(node.names)}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and CACHES & set(
            map(_name, node.decorator_list)
        ):
            yield f"{module.path}:{node.lineno} caches {node.name} for the life of the process"


def test_no_module_keeps_mutable_state() -> None:
    checked = [module for module in modules() if module.part in STATELESS]
    assert len(checked) > 10
    assert [sentence for module in checked for sentence in mutable_state(module)] == []


@pytest.mark.parametrize(
    "text",
    [
        "CACHE = {}",
        "cache: dict[str, int] = {}",
        "ROWS = [1, 2]",
        "SEEN = set()",
        "from collections import defaultdict\nX = defaultdict(list)",
        "X = [i for i in range(3)]",
        "if True:\n    X = {1}",
        "class A:\n    rows = []",
        "def f():\n    global X\n    X = 1",
        "@lru_cache(maxsize=None)\ndef f(): ...",
        "@functools.cache\ndef f(): ...",
        "X = [1] * 3",
        "import torch\nX = torch.zeros(3)",
    ],
)
def test_the_rule_sees_state(text: str) -> None:
    assert len(list(mutable_state(parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "__all__ = ['a']",
        "X = (1, 2)",
        "X = frozenset({1})",
        "X = MappingProxyType({1: 2})",
        "def f():\n    x = []\n    return x",
        "@dataclass\nclass A:\n    rows: list[int] = field(default_factory=list)",
        "X = tuple([1])",
    ],
)
def test_the_rule_allows_constants(text: str) -> None:
    assert list(mutable_state(parse(text))) == []
