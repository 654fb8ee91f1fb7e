"""Files, functions and the core stay small enough to be read."""

from __future__ import annotations

import ast
from collections import Counter

from tests.architecture.source import ROOT, modules

MAX_FILE = 500
MAX_KERNEL_FILE = 800
MAX_FUNCTION = 60
MAX_PARTS = {"core": 2600, "engine": 1900}  # see docs/architecture.md
MAX_DIALECT = 600
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def test_files_are_short() -> None:
    limit = {"kernels": MAX_KERNEL_FILE}
    assert [(m.path, m.lines) for m in modules() if m.lines > limit.get(m.part, MAX_FILE)] == []


def test_native_files_are_short() -> None:
    sources = [path for ending in ("*.cpp", "*.h", "*.hpp", "*.cc") for path in (ROOT / "csrc").rglob(ending)]
    sizes = [(str(path.relative_to(ROOT)), len(path.read_text(encoding="utf-8").splitlines())) for path in sources]
    assert [size for size in sizes if size[1] > MAX_KERNEL_FILE] == []


def test_functions_are_short() -> None:
    long = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION:
                    long.append(f"{module.path}:{node.lineno} {node.name} has {size} lines")
    assert long == []


def test_core_and_engine_fit_in_a_head() -> None:
    """Counted in lines of code, policies apart: documentation is not to be traded for room."""
    counted = [module for module in modules() if not module.within("penstock.core.policies")]
    sizes = {part: sum(m.code_lines for m in counted if m.part == part) for part in MAX_PARTS}
    assert {part: size for part, size in sizes.items() if not 0 < size < MAX_PARTS[part]} == {}


def test_dialects_are_short() -> None:
    """Each a folder or a file; counted in lines of code as well. A folder within a dialect, which serves the requests
    that it translates, is counted apart and is no larger."""
    sizes: Counter[str] = Counter()
    for module in modules():
        if module.within("penstock.server.dialects") and module.name != "penstock.server.dialects":
            folder = module.path.split("/")[3:-1]
            sizes["/".join(folder) or module.name.split(".")[3]] += module.code_lines
    assert {"openai", "responses", "responses/service", "anthropic", "ollama", "embeddings"} <= sizes.keys()
    assert {name: size for name, size in sizes.items() if size > MAX_DIALECT} == {}


def test_names_say_what_a_file_is_for() -> None:
    assert [m.path for m in modules() if VAGUE_NAMES & set(m.name.split("."))] == []
