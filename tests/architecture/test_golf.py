"""Code is not played as golf: arguments are named or written out, and an assignment gives few names at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import Module, modules, parse

MAX_TARGETS = 2
MAX_PARAMETERS = 8
# Options that people write by name: commands (an option is a parameter there) and the Python interface.
WRITTEN_BY_NAME = ("penstock.cli", "penstock.llm", "penstock.async_llm")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def starred_tuples(module: Module) -> Iterator[str]:
    """Calls whose positional arguments come from a tuple of known length that was put together in sight.

    Such a tuple is a display, a local name or an attribute of `self` that is assigned one, or a parameter annotated as
    one. A function's own `*args` may be handed on, and so may what has any length: lists, comprehensions, results.
    Triton's kernels are left out: their language's own tuples are spread there.
    """
    named = named_tuples(module.tree)
    attributes = _fixed_attributes(module.tree, named)
    for function, calls in _calls(module.tree):
        if function is not None and _is_kernel(function):
            continue
        fixed = attributes | (_fixed_names(function, named) if function is not None else set())
        for call in calls:
            for argument in call.args:
                if isinstance(argument, ast.Starred) and _is_fixed(argument.value, fixed):
                    yield f"{module.path}:{call.lineno} spreads {ast.unparse(argument)} over parameters"


def named_tuples(tree: ast.Module) -> set[str]:
    """The classes of a module that are tuples with names."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if any(ast.unparse(base).endswith("NamedTuple") for base in node.bases)}


def _calls(tree: ast.Module) -> Iterator[tuple[Function | None, list[ast.Call]]]:
    """Each function with the calls of its own body, and the module's under None."""
    found: dict[Function | None, list[ast.Call]] = {}
    pending: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while pending:
        node, function = pending.pop()
        if isinstance(node, ast.Call):
            found.setdefault(function, []).append(node)
        inner = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        pending.extend((child, inner) for child in ast.iter_child_nodes(node))
    yield from found.items()


def _is_kernel(function: Function) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _is_fixed(value: ast.expr, fixed: set[str]) -> bool:
    """Whether an expression is a tuple whose length can be seen."""
    match value:
        case ast.Tuple(elts=items):
            return not any(isinstance(item, ast.Starred) and not _is_fixed(item.value, fixed) for item in items)
        case ast.Name() | ast.Attribute():
            return ast.unparse(value) in fixed
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _is_fixed(left, fixed) and _is_fixed(right, fixed)
        case ast.IfExp(body=body, orelse=other):
            return _is_fixed(body, fixed) and _is_fixed(other, fixed)
        case ast.Subscript(value=inner, slice=ast.Slice()):
            return _is_fixed(inner, fixed)
        case ast.NamedExpr(value=inner):
            return _is_fixed(inner, fixed)
    return False


def _is_fixed_annotation(annotation: ast.expr | None, named: set[str]) -> bool:
    """Whether it says tuple[X, Y], not tuple[X, ...], or names a NamedTuple of the module."""
    match annotation:
        case ast.Name(id=name):
            return name in named
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
            return not any(isinstance(item, ast.Constant) and item.value is ... for item in items)
        case ast.Subscript(value=ast.Name(id="tuple")):
            return True
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _is_fixed_annotation(left, named) or _is_fixed_annotation(right, named)
    return False


def _fixed_names(function: Function, named: set[str]) -> set[str]:
    """Parameters and local names that are tuples of a length that can be seen."""
    arguments = function.args
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    fixed = {item.arg for item in parameters if _is_fixed_annotation(item.annotation, named)}
    for node in ast.walk(function):
        fixed |= _assigned(node, fixed, named)
    return fixed


def _fixed_attributes(tree: ast.Module, named: set[str]) -> set[str]:
    fixed: set[str] = set()
    for node in ast.walk(tree):
        fixed |= {name for name in _assigned(node, fixed, named) if name.startswith("self.")}
    return fixed


def _assigned(node: ast.AST, fixed: set[str], named: set[str]) -> set[str]:
    """What a statement makes a tuple whose length can be seen."""
    match node:
        case ast.Assign(targets=targets, value=value) if _is_fixed(value, fixed):
            return {ast.unparse(target) for target in targets if isinstance(target, (ast.Name, ast.Attribute))}
        case ast.AnnAssign(target=target, annotation=annotation) if _is_fixed_annotation(annotation, named):
            return {ast.unparse(target)}
    return set()


def many_targets(module: Module) -> Iterator[str]:
    """Assignments of three and more names at once that neither take one call's result, nor swap, nor read a shape."""
    functions = [node for node in ast.walk(module.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    in_kernels = {id(node) for function in functions if _is_kernel(function) for node in ast.walk(function)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Assign) or id(node) in in_kernels:
            continue
        for target in node.targets:
            many = isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) > MAX_TARGETS
            if many and not _may_give_many(target, node.value):
                yield f"{module.path}:{node.lineno} assigns {ast.unparse(target)} at once"


def _may_give_many(target: ast.expr, value: ast.expr) -> bool:
    if isinstance(value, (ast.Await, ast.Subscript)):  # an entry of what a call gives
        value = value.value
    if isinstance(value, ast.Call):
        return True
    if ast.unparse(value).split(".")[-1] == "shape":
        return True
    if not isinstance(value, ast.Tuple) or not isinstance(target, (ast.Tuple, ast.List)):
        return False
    return {ast.unparse(item) for item in target.elts} == {ast.unparse(item) for item in value.elts}


def long_signatures(module: Module) -> Iterator[str]:
    """Functions of more than eight parameters, kernels and what people write by name apart."""
    if module.part == "kernels" or module.within(*WRITTEN_BY_NAME):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > MAX_PARAMETERS:
                yield f"{module.path}:{node.lineno} {node.name} has {count} parameters"


def test_no_tuple_is_spread_over_parameters() -> None:
    assert [sentence for module in modules() for sentence in starred_tuples(module)] == []


def test_few_names_are_assigned_at_once() -> None:
    assert [sentence for module in modules() for sentence in many_targets(module)] == []


def test_signatures_are_short() -> None:
    assert [sentence for module in modules() for sentence in long_signatures(module)] == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(a, b):\n    where = a, b\n    g(*where)",
        "def f(a, b):\n    g(*(a, b))",
        "def f(a, b, c):\n    where = (a, b) if c else (b, a)\n    g(1, *where)",
        "def f(a, b):\n    where = a, b\n    g(*where[:1])",
        "def f(a, b):\n    first = a, b\n    both = (*first, a)\n    g(*both)",
        "def f(sizes: tuple[int, int]):\n    g(*sizes)",
        "def f(sizes: tuple[int, int] | None):\n    g(*sizes)",
        "class P(NamedTuple):\n    x: int\n\ndef f(p: P):\n    g(*p)",
        "class C:\n    def __init__(self, a):\n        self.where = a, a\n    def f(self):\n        g(*self.where)",
        "async def f(a):\n    def inner():\n        where = a, a\n        g(*where)",
    ],
)
def test_the_rule_sees_tuples_that_are_spread(text: str) -> None:
    assert len(list(starred_tuples(parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def f(*args):\n    g(*args)",
        "def f(parts: Sequence[int]):\n    g(*parts)",
        "def f(parts: tuple[int, ...]):\n    g(*parts)",
        "def f(parts):\n    found = [x for x in parts]\n    g(*found)",
        "def f(parts):\n    found = (1, *parts)\n    g(*found)",
        "def f(parts):\n    g(*map(str, parts))",
        "def f(a, b):\n    where = a, b\n    g(where)",
        "@triton.jit\ndef f(a, b):\n    where = a, b\n    g(*where)",
    ],
)
def test_the_rule_allows_what_has_any_length(text: str) -> None:
    assert list(starred_tuples(parse(text))) == []


@pytest.mark.parametrize(
    "text", ["a, b, c = 1, 2, 3", "a, b, c = facts", "a, b, c = (f(x) for x in y)", "a, b, c = x.of"]
)
def test_the_rule_sees_many_targets(text: str) -> None:
    assert len(list(many_targets(parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    ["a, b = 1, 2", "a, b, c = f()", "a, b, c = f()[0]", "a, b, c = b, c, a", "a, b, c = x.shape", "a = b = c = 0"],
)
def test_the_rule_allows_few_targets(text: str) -> None:
    assert list(many_targets(parse(text))) == []


def test_the_rule_sees_long_signatures() -> None:
    nine = "def f(self, a, b, c, d, e, *, f, g, h, i): ..."
    assert len(list(long_signatures(parse(nine)))) == 1
    assert list(long_signatures(parse(nine.replace(", i)", ")")))) == []
    assert list(long_signatures(parse(nine, "penstock.cli.x"))) == []
