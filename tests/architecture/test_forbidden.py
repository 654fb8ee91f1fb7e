"""Things that never appear in the package: ambient settings, code execution on data, unfinished work."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source import ROOT, Module, imports, modules, parse

ENVIRONMENT = "penstock.config.environment"
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib", "jsonpickle"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "unsafe_load"}
AMBIENT = {"environ", "environb", "getenv", "putenv"}
ABSOLUTE = re.compile(r"/(?:work|home|root|tmp|Users|mnt|opt|data|srv|media|workspace)/")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b")
REMOTE_CODE = re.compile(r"trust_remote_code|\btrust=True\b")


def violations(module: Module) -> Iterator[str]:
    """Everything forbidden that a module holds, as a sentence."""
    for line, name in imports(module):
        words = name.split(".")
        if words[0] in UNSAFE_MODULES:
            yield f"{module.path}:{line} imports {name}"
        if words[0] == "os" and words[-1] in AMBIENT and module.name != ENVIRONMENT:
            yield f"{module.path}:{line} imports {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _is_ambient(node) and module.name != ENVIRONMENT:
            yield f"{module.path}:{node.lineno} reads the environment"
        elif isinstance(node, ast.Call) and _unsafe(node):
            yield f"{module.path}:{node.lineno} calls {ast.unparse(node.func)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ABSOLUTE.match(node.value):
            yield f"{module.path}:{node.lineno} names the absolute path {node.value!r}"
    for number, text in enumerate(module.text.splitlines(), 1):
        for pattern in (UNFINISHED, REMOTE_CODE):
            if found := pattern.search(text):
                yield f"{module.path}:{number} says {found.group()}"


def _is_ambient(node: ast.Attribute) -> bool:
    return node.attr in AMBIENT and isinstance(node.value, ast.Name) and node.value.id == "os"


def _unsafe(node: ast.Call) -> bool:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in UNSAFE_CALLS
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    return function.attr in UNSAFE_CALLS - {"eval", "exec"} or (owner, function.attr) in (
        ("torch", "load"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("os", "system"),
        ("os", "popen"),
    )


def test_nothing_forbidden_is_in_the_package() -> None:
    assert [sentence for module in modules() for sentence in violations(module)] == []


def test_nothing_unfinished_is_in_the_native_code() -> None:
    files = [path for ending in ("*.cpp", "*.h") for path in (ROOT / "csrc").rglob(ending)]
    assert [path.name for path in files if UNFINISHED.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nX = os.environ['A']",
        "import os\nX = os.getenv('A')",
        "from os import environ",
        "import pickle",
        "def f():\n    from marshal import loads",
        "x = eval('1')",
        "exec('x = 1')",
        "import torch\nx = torch.load('a')",
        "socket.recv_pyobj()",
        "P = '/home/someone/model'",
        "x = 1  # TODO later",
        "def f():\n    raise NotImplementedError",
        "load(trust_remote_code=False)",
    ],
)
def test_the_rule_sees_what_is_forbidden(text: str) -> None:
    assert len(list(violations(parse(text)))) == 1


@pytest.mark.parametrize(
    "text", ["model.eval()", "ROUTE = '/v1/models'", "import os\nos.cpu_count()", "x = '/proc/stat'"]
)
def test_the_rule_allows_what_is_not(text: str) -> None:
    assert list(violations(parse(text))) == []
