"""The package's source, parsed once, for the tests that read it."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "penstock"


@dataclass(frozen=True)
class Module:
    """One Python file of the package.

    Attributes:
        name: dotted name, for example "penstock.core.scheduler".
        part: the sub-package it lies in ("core"), "" for the package's own __init__.
        path: relative to the repository.
        text: the source.
        tree: its syntax tree.
    """

    name: str
    part: str
    path: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def code_lines(self) -> int:
        return code_lines(self.text)

    def within(self, *names: str) -> bool:
        """Whether the module is one of these or lies below one of them."""
        return any(self.name == name or self.name.startswith(name + ".") for name in names)


def code_lines(text: str) -> int:
    """Lines of a Python file that hold code: no blank lines, comments or docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - set(_docstring_lines(ast.parse(text))))


_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def parse(text: str, name: str = "penstock.core.example") -> Module:
    """A module from source text, as if it lay in the package."""
    part = name.split(".")[1] if "." in name else ""
    return Module(name, part, name.replace(".", "/") + ".py", text, ast.parse(text))


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, sorted by name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(ROOT)
        parts = [*relative.parts[:-1], *(() if path.name == "__init__.py" else (path.stem,))]
        text = path.read_text(encoding="utf-8")
        part = parts[1] if len(parts) > 1 else ""
        found.append(Module(".".join(parts), part, str(relative), text, ast.parse(text)))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, at its head or inside a function, also by name.

    `from a import b` gives "a.b", which may be a module or something inside the module "a".
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.name.split(".")
                above = above[: len(above) - node.level + module.path.endswith("__init__.py")]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
