"""Every regular expression of the package, found in its source, and texts on which each could be slow."""

from __future__ import annotations

import ast
import importlib
import re
import re._constants as sre
import re._parser as sre_parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import penstock

_CALLS = frozenset(("compile", "search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer"))
_SCANNING = frozenset(("search", "sub", "subn", "split", "findall", "finditer"))  # which look at each place of a text
_SCREENED = 1000  # characters
_MOST_ATTACKS = 60
_SHORT, _LONG_S = 22, 0.05
_SAMPLES = {
    sre.CATEGORY_DIGIT: "0", sre.CATEGORY_SPACE: " ", sre.CATEGORY_WORD: "a", sre.CATEGORY_NOT_DIGIT: "a",
    sre.CATEGORY_NOT_SPACE: "a", sre.CATEGORY_NOT_WORD: " ",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where the source uses `re`: the module, and the name that is assigned or the function, with a number."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('penstock.')}:{self.name}"


def places() -> Iterator[tuple[Place, ast.Call]]:
    """All calls of `re` in the package."""
    root = Path(penstock.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from _in_module(module, ast.parse(path.read_text(encoding="utf-8")))


def _in_module(module: str, tree: ast.Module) -> Iterator[tuple[Place, ast.Call]]:
    for node in tree.body:
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and _is_re(call.func)]
        assigned = [target.id for target in _targets(node) if isinstance(target, ast.Name)]
        if assigned:
            yield from ((Place(module, assigned[0]), call) for call in calls[:1])
        elif calls:
            for function, inner in _functions(node):
                for number, call in enumerate(inner):
                    yield Place(module, f"{function}{number or ''}"), call


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def _functions(node: ast.stmt) -> Iterator[tuple[str, list[ast.Call]]]:
    """Functions and methods, with the calls of `re` in each."""
    found: list[tuple[str, ast.AST]] = []
    if isinstance(node, ast.ClassDef):
        found = [(f"{node.name}.{getattr(item, 'name', '')}", item) for item in node.body]
    else:
        found = [(getattr(node, "name", ""), node)]
    for name, item in found:
        calls = [call for call in ast.walk(item) if isinstance(call, ast.Call) and _is_re(call.func)]
        yield name, calls


def _is_re(function: ast.expr) -> bool:
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "re" and getattr(function, "attr", "") in _CALLS


def imports_of_re() -> Iterator[str]:
    """Modules that import `re`, or an engine like it, in a way that `places` does not see."""
    root = Path(penstock.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            aliased = isinstance(node, ast.Import) and any(a.name in ("re", "regex") and a.asname for a in node.names)
            other = isinstance(node, ast.Import) and any(a.name == "regex" for a in node.names)
            if aliased or other or (isinstance(node, ast.ImportFrom) and node.module in ("re", "regex")):
                yield str(path.relative_to(root))


def scans(place: Place, call: ast.Call) -> bool:
    """Whether an expression is looked for at each place of a text, not only at one."""
    own = getattr(call.func, "attr", "")
    if own != "compile":
        return own in _SCANNING
    methods = _methods().get(place.name, set())
    return not methods or bool(methods & _SCANNING)


@cache
def _methods() -> dict[str, set[str]]:
    """By a name that stands before a method of expressions, these methods."""
    found: dict[str, set[str]] = {}
    for path in Path(penstock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in _CALLS:
                found.setdefault(node.value.id, set()).add(node.attr)
    return found


def strings(folders: Sequence[str]) -> list[str]:
    """The expressions that modules of some folders hold as strings, to be compiled elsewhere."""
    found: dict[str, None] = {}
    for folder in folders:
        for path in sorted((Path(penstock.__file__).parent / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\\." in node.value:
                    found[node.value] = None
    return list(found)


def patterns(place: Place, call: ast.Call, made: Mapping[str, Callable[[], list[re.Pattern[str]]]]) -> list[Any]:
    """The compiled expressions of a place; `made` has those that are made while running. Empty for an unknown place."""
    if str(place) in made:
        return made[str(place)]()
    value = getattr(importlib.import_module(place.module), place.name, None)
    if isinstance(value, re.Pattern):
        return [value]
    if isinstance(value, Mapping):
        return [pattern for pattern in value.values() if isinstance(pattern, re.Pattern)]
    if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
        flags = call.args[-1].attr if isinstance(call.args[-1], ast.Attribute) else ""
        return [re.compile(call.args[0].value, getattr(re, flags, 0))]
    return []


def worst_texts(
    pattern: re.Pattern[Any], scans: bool, count: int
) -> list[tuple[str, Callable[[Any], Any], Callable[[int], Any]]]:
    """The texts that take longest of those an expression's parts suggest: name, how it is used, and text by size."""
    from benchmarks.linear.growth import best

    run = (lambda text: sum(1 for _ in pattern.finditer(text))) if scans else pattern.fullmatch
    found = []
    for parts in _attacks(pattern)[:_MOST_ATTACKS]:
        make = _text_of(parts, isinstance(pattern.pattern, bytes))
        if (seconds := best(run, make(_SHORT), 1)) > _LONG_S:
            raise ValueError(f"{pattern.pattern!r} takes {seconds:.3f} s for {make(_SHORT)!r}: its time is exponential")
        found.append((best(run, make(_SCREENED), 1), repr(parts), run, make))
    found.sort(key=lambda entry: -entry[0])
    return [(name, run, make) for _, name, run, make in found[:count]]


def _text_of(parts: tuple[str, str, str], as_bytes: bool) -> Callable[[int], Any]:
    before, pump, after = parts

    def make(size: int) -> Any:
        text = before + pump * (size // max(1, len(pump))) + after
        return text.encode("utf-8", "surrogatepass") if as_bytes else text

    return make


def _attacks(pattern: re.Pattern[Any]) -> list[tuple[str, str, str]]:
    """What stands before, what is repeated, what stands behind."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    tree = sre_parse.parse(source, pattern.flags & ~re.UNICODE)
    letters = list(dict.fromkeys([*_letters(tree), "a", " ", "\\", '"']))[:10]
    befores = list(dict.fromkeys(["", *_befores(tree)]))[:4]
    pumps = [*letters, *(sample for sample in _bodies(tree) if sample), _sample(tree) or "a"]
    pairs = ["".join(pair) for pair in islice(permutations(letters[:5], 2), 12)]
    attacks = [(before, pump, "\0") for pump in dict.fromkeys(pumps) for before in befores]
    return [*((before, before or "a", "\0") for before in befores), *attacks, *(("", pair, "\0") for pair in pairs)]


def _sample(tree: Any, most: int = 2) -> str:
    """A short text that a part matches, mostly."""
    text = ""
    for op, value in tree:
        if op is sre.LITERAL:
            text += chr(value)
        elif op is sre.NOT_LITERAL:
            text += "a" if value != ord("a") else "b"
        elif op is sre.ANY:
            text += "a"
        elif op is sre.IN:
            text += next(iter(_members(value)), "a")
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            text += _sample(value[2]) * min(max(value[0], 1), most, value[1])
        elif op is sre.SUBPATTERN:
            text += _sample(value[3])
        elif op is sre.ATOMIC_GROUP:
            text += _sample(value)
        elif op is sre.BRANCH:
            text += _sample(value[1][0])
    return text


def _members(entries: Any) -> Iterator[str]:
    """Characters of a set, one of each range."""
    if entries and entries[0][0] is sre.NEGATE:
        yield from (char for char in ("a", " ", "0", "\x01") if not _holds(entries[1:], char))
        return
    for op, value in entries:
        if op is sre.LITERAL:
            yield chr(value)
        elif op is sre.RANGE:
            yield chr(value[0])
        elif op is sre.CATEGORY:
            yield _SAMPLES.get(value, "a")


def _holds(entries: Any, char: str) -> bool:
    for op, value in entries:
        if op is sre.LITERAL and value == ord(char):
            return True
        if op is sre.RANGE and value[0] <= ord(char) <= value[1]:
            return True
        if op is sre.CATEGORY and _SAMPLES.get(value) == char:
            return True
    return False


def _walk(tree: Any) -> Iterator[tuple[Any, Any]]:
    for op, value in tree:
        yield op, value
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            yield from _walk(value[2])
        elif op is sre.SUBPATTERN:
            yield from _walk(value[3])
        elif op is sre.ATOMIC_GROUP:
            yield from _walk(value)
        elif op is sre.BRANCH:
            for branch in value[1]:
                yield from _walk(branch)


def _letters(tree: Any) -> Iterator[str]:
    for op, value in _walk(tree):
        if op is sre.LITERAL:
            yield chr(value)
        elif op is sre.IN:
            yield from _members(value)


def _bodies(tree: Any) -> Iterator[str]:
    """What repeats may repeat."""
    for op, value in _walk(tree):
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            yield _sample(value[2])
        elif op is sre.BRANCH:
            yield from (_sample(branch) for branch in islice(value[1], 4))


def _befores(tree: Any) -> Iterator[str]:
    """What leads to each repeat, and what leads past it."""
    for end in range(len(tree)):
        if tree[end][0] in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.SUBPATTERN):
            yield _sample(tree[:end])
            yield _sample(tree[: end + 1])
